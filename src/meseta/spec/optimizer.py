"""A row optimizer and its constants."""

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
"""By name of a row optimizer: the constants that it uses. A user's own may use all."""
COUPLED_DECAY_OPTIMIZERS = tuple(name for name, used in USED_FIELDS.items() if "weight_decay_mode" in used)
"""Row optimizers to whose gradient a penalty can be added."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """A row optimizer and its constants; it is applied inside the backward pass, once per touched row and step.

    All are lazy: rows without a contribution, and their state, stand still, unless `stepped_rows` says otherwise. A
    constant that the named optimizer does not use must keep its default.
    """

    name: str = "rowwise_adagrad"
    """'sgd', 'adagrad', 'rowwise_adagrad' (one accumulator per row), 'adam', 'adamw', 'rowwise_adam' (one second moment
    per row), 'lamb', 'rowwise_lamb', 'lars', 'ftrl', 'rmsprop', 'frozen' (rows never change), or your own:
    'package.module:factory', where factory(spec) -> RowOptimizer."""
    lr: float = 0.01
    """Base learning rate; a schedule multiplies it."""
    eps: float = 1e-8
    """Added to the root in the denominator (adagrad, rmsprop, the adam and lamb families)."""
    beta1: float = 0.9
    """Decay of the first moment, in [0, 1) (the adam and lamb families)."""
    beta2: float = 0.999
    """Decay of the second moment, in [0, 1) (the adam and lamb families)."""
    alpha: float = 0.99
    """Decay of the mean square, in [0, 1) (rmsprop)."""
    momentum: float = 0.0
    """Decay of the velocity, in [0, 1); 0 keeps none (sgd, lars, rmsprop)."""
    initial_accumulator: float = 0.0
    """Start of the sum of squares (adagrad, rowwise_adagrad, ftrl)."""
    trust_coefficient: float = 0.001
    """Step length as a part of the row's norm (lars)."""
    beta: float = 1.0
    """Added to the root of the sum of squares (ftrl)."""
    l1: float = 0.0
    """Strength of the absolute penalty: ftrl solves for it; others, but the lamb family, lars and adamw, add
    l1 * sign(row) to the gradient."""
    l2: float = 0.0
    """Strength of the squared penalty (ftrl)."""
    weight_decay: float = 0.0
    """Pull of touched rows towards zero (all but ftrl, which has l2)."""
    weight_decay_mode: WeightDecayMode = "coupled"
    """'coupled' adds weight_decay * row to the gradient, 'decoupled' takes lr * weight_decay * row from the row (adamw
    always does; lamb and lars add it as published)."""
    clip_value: float | None = None
    """Every element of a row's gradient is limited to -clip_value..clip_value, before anything else."""
    clip_norm: float | None = None
    """A row's gradient that is longer is scaled to this norm, before weight decay is added."""
    stepped_rows: SteppedRows = "touched"
    """'all' steps every row of the table in every step, with a gradient of zero where no id reads it: decay acts on all
    rows, as if the table were a dense parameter, at the cost of a pass over the whole table per step. 'looked_up'
    steps the rows that 'touched' does, and adds weight_decay * row and l1 * sign(row) to the gradient once for each
    lookup of a row in the global batch, before the gradient is clipped: for optimizers that know mode 'coupled'."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Constants of your own optimizer, of types that JSON has."""
    element_states: int = 0
    """Numbers of state per element that your own optimizer keeps, by which the planner counts bytes."""
    row_states: int = 0
    """Numbers of state per row that your own optimizer keeps."""

    @property
    def is_custom(self) -> bool:
        """Whether the name is an import path of the user's own optimizer."""
        return ":" in self.name

    @property
    def num_states(self) -> tuple[int, int]:
        """Numbers of state (per element, per row)."""
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
            raise MesetaError(f"{owner}: beta and initial_accumulator are both 0, and it divides by them; raise one")

    def _check_looked_up(self, owner: str) -> None:
        if not self.is_custom and self.name not in COUPLED_DECAY_OPTIMIZERS:
            raise MesetaError(
                f"{owner}: stepped_rows 'looked_up' adds penalties to the gradient, but this one has decay of its own; "
                f"take 'touched', or one of {', '.join(COUPLED_DECAY_OPTIMIZERS)}"
            )
        if self.weight_decay_mode == "decoupled":
            raise MesetaError(
                f"{owner}: stepped_rows 'looked_up' adds weight_decay to the gradient, but weight_decay_mode is "
                "'decoupled'; take 'coupled', or stepped_rows 'touched'"
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
                raise MesetaError(f"{owner}: {name} must be positive, or None for no clipping, got {value}")
        for name in ("element_states", "row_states"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
                raise MesetaError(f"{owner}: {name} must be a whole number, at least 0, got {value!r}")

    def _check_options(self, owner: str) -> None:
        if not isinstance(self.options, Mapping) or not all(isinstance(name, str) for name in self.options):
            raise MesetaError(f"{owner}: options must map names to values, got {self.options!r}")
        try:
            json.dumps(dict(self.options), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise MesetaError(f"{owner}: options must be what JSON can hold, for checkpoints ({error})") from None
        object.__setattr__(self, "options", dict(self.options))

    def _check_unused_fields(self, owner: str) -> None:
        """Raise MesetaError for a constant that was set, but has no effect."""
        used = USED_FIELDS[self.name]
        for entry in fields(self):
            default = {} if entry.name == "options" else entry.default
            value = getattr(self, entry.name)
            if entry.name not in ("name", *used) and value != default:
                raise MesetaError(
                    f"{owner} does not use {entry.name}, which is {value!r}; "
                    f"leave it out, or choose an optimizer that does (this one uses {', '.join(used) or 'none'})"
                )
