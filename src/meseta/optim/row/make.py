"""Creation of row optimizers from their specs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from meseta.ops.row_program.optimizer import RowOptimizer
from meseta.ops.row_program.program import state_kinds, trace
from meseta.optim.row.adagrad import adagrad, ftrl, rmsprop, rowwise_adagrad
from meseta.optim.row.adam import adam, lamb, rowwise_adam, rowwise_lamb
from meseta.optim.row.sgd import frozen, lars, sgd
from meseta.optim.row.transforms import clip_norm, clip_value, coupled_decay, decoupled_decay, l1_penalty
from meseta.spec import MesetaError, OptimizerSpec, suggest
from meseta.system.user_code import import_custom

RowOptimizerFactory = Callable[[OptimizerSpec], RowOptimizer]

FACTORIES: dict[str, RowOptimizerFactory] = {
    "sgd": sgd,
    "adagrad": adagrad,
    "rowwise_adagrad": rowwise_adagrad,
    "adam": adam,
    "adamw": adam,
    "rowwise_adam": rowwise_adam,
    "lamb": lamb,
    "rowwise_lamb": rowwise_lamb,
    "lars": lars,
    "ftrl": ftrl,
    "rmsprop": rmsprop,
    "frozen": frozen,
}
BUILT_IN_DECAY = ("lamb", "rowwise_lamb", "lars")
"""Optimizers that implement weight decay themselves, as published."""


def make_row_optimizer(spec: OptimizerSpec) -> RowOptimizer:
    """Return the row optimizer of a spec. Equal specs share one, so that it is traced once for all tables.

    Raises MesetaError if a custom optimizer cannot be imported or traced, is not a RowOptimizer, or has another state
    than its spec.
    """
    return _build(_import_factory(spec.name) if spec.is_custom else FACTORIES[spec.name], spec)


@cache
def _build(factory: RowOptimizerFactory, spec: OptimizerSpec) -> RowOptimizer:
    optimizer = factory(spec)
    if spec.is_custom:
        _check_custom(optimizer, spec)
    # With "looked_up", the gradient already has the penalties of each lookup.
    if spec.stepped_rows != "looked_up":
        optimizer = _with_penalties(optimizer, spec)
    if spec.clip_norm is not None:
        optimizer = clip_norm(optimizer, spec.clip_norm)
    if spec.clip_value is not None:
        optimizer = clip_value(optimizer, spec.clip_value)
    return optimizer


def _with_penalties(optimizer: RowOptimizer, spec: OptimizerSpec) -> RowOptimizer:
    if spec.weight_decay and spec.name not in BUILT_IN_DECAY:
        is_decoupled = spec.name == "adamw" or spec.weight_decay_mode == "decoupled"
        optimizer = (decoupled_decay if is_decoupled else coupled_decay)(optimizer, spec.weight_decay)
    # FTRL solves for the penalty, and a custom optimizer may use l1 itself.
    if spec.l1 and spec.name != "ftrl" and not spec.is_custom:
        optimizer = l1_penalty(optimizer, spec.l1)
    return optimizer


def _import_factory(name: str) -> RowOptimizerFactory:
    """Import the factory 'package.module:factory'."""
    module_name, _, attribute = name.partition(":")
    try:
        module = import_custom(f"row optimizer {name!r}", module_name)
    except (ImportError, ValueError) as error:  # ValueError: the module name is empty.
        raise MesetaError(
            f"row optimizer {name!r}: module {module_name!r} cannot be imported ({error}); "
            "use 'package.module:factory', and run Python such that it finds the package"
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        functions = [key for key, value in vars(module).items() if callable(value)]
        raise MesetaError(
            f"row optimizer {name!r}: module {module_name!r} has no function {attribute!r}; "
            f"{suggest(attribute, functions)}"
        )
    return factory


def _check_custom(optimizer: object, spec: OptimizerSpec) -> None:
    owner = f"row optimizer {spec.name!r}"
    if not isinstance(optimizer, RowOptimizer):
        raise MesetaError(f"{owner}: the factory must return a RowOptimizer, got {type(optimizer).__name__}")
    trace(optimizer)
    kinds = list(state_kinds(optimizer).values())
    counts = kinds.count("element"), kinds.count("row")
    if counts != spec.num_states:
        raise MesetaError(
            f"{owner} has {counts[0]} numbers per element and {counts[1]} per row, but its spec has "
            f"{spec.num_states[0]} and {spec.num_states[1]}, from which the planner computes memory; "
            f"set element_states={counts[0]}, row_states={counts[1]}"
        )
