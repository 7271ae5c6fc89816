"""Specification of the optimizer of embedding rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import Any, Literal, get_args

from meseta.errors import MesetaError, check_choice, check_number

WeightDecayMode = Literal["coupled", "decoupled"]
SteppedRows = Literal["touched", "looked_up", "all"]

_COMMON_FIELDS = ("lr", "clip_value", "clip_norm", "stepped_rows")
_DECAY_FIELDS = ("weight_decay", "weight_decay_mode", "l1")
_MOMENT_FIELDS = ("eps", "beta1", "beta2")
_ADAGRAD_FIELDS = ("eps", "initial_accumulator")
USED_FIELDS: dict[str, tuple[str, ...]] = {
    "sgd": (*_COMMON_FIELDS, *_DECAY_FIELDS, "momentum"),
    "adagrad": (*_COMMON_FIELDS, *_DECAY_FIELDS, *_ADAGRAD_FIELDS),
    "rowwise_adagrad": (*_COMMON_FIELDS, *_DECAY_FIELDS, *_ADAGRAD_FIELDS),
    "adam": (*_COMMON_FIELDS, *_DECAY_FIELDS, *_MOMENT_FIELDS),
    "adamw": (*_COMMON_FIELDS, "weight_decay", *_MOMENT_FIELDS),
    "rowwise_adam": (*_COMMON_FIELDS, *_DECAY_FIELDS, *_MOMENT_FIELDS),
    "lamb": (*_COMMON_FIELDS, "weight_decay", *_MOMENT_FIELDS),
    "rowwise_lamb": (*_COMMON_FIELDS, "weight_decay", *_MOMENT_FIELDS),
    "lars": (*_COMMON_FIELDS, "weight_decay", "momentum", "trust_coefficient"),
    "ftrl": (*_COMMON_FIELDS, "initial_accumulator", "beta", "l1", "l2"),
    "rmsprop": (*_COMMON_FIELDS, *_DECAY_FIELDS, "eps", "alpha", "momentum"),
    "frozen": (),
}
"""Fields that each row optimizer uses. A custom optimizer may use all fields."""
COUPLED_DECAY_OPTIMIZERS = tuple(name for name, used in USED_FIELDS.items() if "weight_decay_mode" in used)
"""Row optimizers that can add weight decay and L1 penalties to the gradient."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """Row optimizer and its hyperparameters.

    The optimizer runs inside the backward pass and updates each row at most once per step. By default it is lazy: rows
    without a gradient keep their values and state, see `stepped_rows`. Fields that the optimizer does not use must keep
    their defaults.
    """

    name: str = "rowwise_adagrad"
    """Name of the optimizer: 'sgd', 'adagrad', 'rowwise_adagrad' (one accumulator per row), 'adam', 'adamw',
    'rowwise_adam' (one second moment per row), 'lamb', 'rowwise_lamb', 'lars', 'ftrl', 'rmsprop' or 'frozen' (rows are
    never updated). For a custom optimizer, 'package.module:factory' with factory(spec) -> RowOptimizer."""
    lr: float = 0.01
    """Base learning rate, multiplied by the schedule."""
    eps: float = 1e-8
    """Term added to the square root in the denominator (adagrad, rmsprop, the adam and lamb families)."""
    beta1: float = 0.9
    """Decay of the first moment, in [0, 1) (the adam and lamb families)."""
    beta2: float = 0.999
    """Decay of the second moment, in [0, 1) (the adam and lamb families)."""
    alpha: float = 0.99
    """Decay of the mean square, in [0, 1) (rmsprop)."""
    momentum: float = 0.0
    """Decay of the velocity, in [0, 1). 0 disables momentum and its state (sgd, lars, rmsprop)."""
    initial_accumulator: float = 0.0
    """Initial value of the sum of squares (adagrad, rowwise_adagrad, ftrl)."""
    trust_coefficient: float = 0.001
    """Step length relative to the norm of the row (lars)."""
    beta: float = 1.0
    """Term added to the square root of the sum of squares (ftrl)."""
    l1: float = 0.0
    """Strength of L1 regularization. ftrl solves for it in closed form. Other optimizers add l1 * sign(row) to the
    gradient (all except adamw, lars and the lamb family)."""
    l2: float = 0.0
    """Strength of L2 regularization (ftrl)."""
    weight_decay: float = 0.0
    """Weight decay of updated rows (all except ftrl, which has l2)."""
    weight_decay_mode: WeightDecayMode = "coupled"
    """Target of weight decay: 'coupled' adds weight_decay * row to the gradient, 'decoupled' subtracts lr *
    weight_decay * row from the row. adamw always decouples. lars and the lamb family decay as in their papers."""
    clip_value: float | None = None
    """Limit for the absolute value of each gradient element, applied first. `None` disables clipping by value."""
    clip_norm: float | None = None
    """Maximum norm of the gradient of a row, applied before weight decay. `None` disables clipping by norm."""
    stepped_rows: SteppedRows = "touched"
    """Rows that are updated in each step. 'touched' updates the rows with a gradient. 'all' updates every row as if the
    table were a dense parameter, so that weight decay acts on all rows, but each step reads and writes the whole table.
    'looked_up' updates the same rows as 'touched', but adds weight_decay * row and l1 * sign(row) once per lookup of
    the row in the global batch, before clipping. It requires an optimizer with weight_decay_mode 'coupled'."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Hyperparameters of a custom optimizer. All values must be JSON types."""
    element_states: int = 0
    """Number of state values per element of a custom optimizer, to predict memory."""
    row_states: int = 0
    """Number of state values per row of a custom optimizer, to predict memory."""

    @property
    def is_custom(self) -> bool:
        """Whether `name` is the import path of a custom optimizer."""
        return ":" in self.name

    @property
    def num_states(self) -> tuple[int, int]:
        """Number of state values (per element, per row)."""
        has_velocity = int(self.momentum > 0.0)
        counts = {
            "sgd": (has_velocity, 0),
            "adagrad": (1, 0),
            "rowwise_adagrad": (0, 1),
            "rowwise_adam": (1, 1),
            "rowwise_lamb": (1, 1),
            "lars": (has_velocity, 0),
            "rmsprop": (1 + has_velocity, 0),
            "frozen": (0, 0),
        }
        return (self.element_states, self.row_states) if self.is_custom else counts.get(self.name, (2, 0))

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or ":" not in self.name:
            check_choice("row optimizer", "name", self.name, USED_FIELDS)
        owner = f"row optimizer {self.name!r}"
        self._check_numbers(owner)
        check_choice(owner, "weight_decay_mode", self.weight_decay_mode, get_args(WeightDecayMode))
        check_choice(owner, "stepped_rows", self.stepped_rows, get_args(SteppedRows))
        self._check_options(owner)
        if not self.is_custom:
            self._check_unused_fields(owner)
        if self.stepped_rows == "looked_up":
            self._check_looked_up(owner)
        if self.name == "ftrl" and self.beta + self.initial_accumulator == 0.0:
            raise MesetaError(f"{owner}: the sum of beta and initial_accumulator must not be 0; increase one of them")

    def _check_looked_up(self, owner: str) -> None:
        if not self.is_custom and self.name not in COUPLED_DECAY_OPTIMIZERS:
            raise MesetaError(
                f"{owner}: stepped_rows 'looked_up' requires an optimizer that can add weight decay to the gradient; "
                f"set stepped_rows to 'touched', or use one of {', '.join(COUPLED_DECAY_OPTIMIZERS)}"
            )
        if self.weight_decay_mode == "decoupled":
            raise MesetaError(
                f"{owner}: stepped_rows 'looked_up' cannot be used with weight_decay_mode 'decoupled'; set "
                "weight_decay_mode to 'coupled', or stepped_rows to 'touched'"
            )

    def _check_numbers(self, owner: str) -> None:
        for name in ("beta1", "beta2", "alpha", "momentum"):
            if not 0.0 <= check_number(owner, name, getattr(self, name)) < 1.0:
                raise MesetaError(f"{owner}: {name} must be in [0, 1), got {getattr(self, name)}")
        for name in ("lr", "eps", "initial_accumulator", "trust_coefficient", "beta", "l1", "l2", "weight_decay"):
            if check_number(owner, name, getattr(self, name)) < 0.0:
                raise MesetaError(f"{owner}: {name} must not be negative, got {getattr(self, name)}")
        for name in ("clip_value", "clip_norm"):
            value = getattr(self, name)
            if value is not None and check_number(owner, name, value) <= 0.0:
                raise MesetaError(f"{owner}: {name} must be positive, or None to disable clipping, got {value}")
        for name in ("element_states", "row_states"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
                raise MesetaError(f"{owner}: {name} must be a non-negative integer, got {value!r}")

    def _check_options(self, owner: str) -> None:
        if not isinstance(self.options, Mapping) or not all(isinstance(name, str) for name in self.options):
            raise MesetaError(f"{owner}: options must map names to values, got {self.options!r}")
        try:
            json.dumps(dict(self.options), allow_nan=False)
        except (TypeError, ValueError) as error:
            # Checkpoints store the options.
            raise MesetaError(
                f"{owner}: options must be serializable as JSON ({error}); convert them to JSON types"
            ) from None
        object.__setattr__(self, "options", dict(self.options))

    def _check_unused_fields(self, owner: str) -> None:
        used = USED_FIELDS[self.name]
        for entry in fields(self):
            default = {} if entry.name == "options" else entry.default
            value = getattr(self, entry.name)
            if entry.name not in ("name", *used) and value != default:
                # Resuming with another optimizer is refused, because its states differ from those in the checkpoint.
                freezing = ", or keep the optimizer of a resumed run and set lr=0" if self.name == "frozen" else ""
                raise MesetaError(
                    f"{owner} does not use {entry.name}, which is set to {value!r}; remove it, or choose an optimizer "
                    f"that uses it (this one uses {', '.join(used) or 'none'}){freezing}"
                )
