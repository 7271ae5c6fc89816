"""Transforms of row optimizers: gradient clipping, weight decay and L1 penalty."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from meseta.ops.row_program.optimizer import Hyper, RowOptimizer, RowStats, Value, Values
from meseta.ops.row_program.program import state_kinds, trace
from meseta.optim.row.adagrad import adagrad, ftrl, rmsprop, rowwise_adagrad
from meseta.optim.row.adam import adam, lamb, rowwise_adam, rowwise_lamb
from meseta.optim.row.average import keep_average
from meseta.optim.row.sgd import frozen, lars, sgd
from meseta.spec import MesetaError, OptimizerSpec, suggest
from meseta.spec.average import AverageSpec
from meseta.system.user_code import import_custom

NORM_EPSILON = 1e-6
"""Added to a norm before division, as in torch.nn.utils.clip_grad_norm_."""


def clip_value(optimizer: RowOptimizer, limit: float) -> RowOptimizer:
    """Clip every element of the gradient to -limit..limit."""
    return _transform_gradient(optimizer, lambda w, g, stats: g.clamp(min=-limit, max=limit))


def clip_norm(optimizer: RowOptimizer, limit: float) -> RowOptimizer:
    """Clip the norm of the gradient of each row to `limit`."""

    def squares(w: Value, g: Value, state: Values, stats: Values, h: Hyper) -> Values:
        return {"unclipped_sq": g * g}

    def clipped(w: Value, g: Value, stats: Values) -> Value:
        return g * (limit / (stats["unclipped_sq"].sqrt() + NORM_EPSILON)).clamp(max=1.0)

    changed = _transform_gradient(optimizer, clipped)
    return replace(changed, row_stats=(squares, *changed.row_stats))


def coupled_decay(optimizer: RowOptimizer, weight_decay: float) -> RowOptimizer:
    """Add weight_decay * row to the gradient, the gradient of weight_decay / 2 * |row|^2."""
    return _transform_gradient(optimizer, lambda w, g, stats: g + w * weight_decay)


def l1_penalty(optimizer: RowOptimizer, l1: float) -> RowOptimizer:
    """Add l1 * sign(row) to the gradient, a subgradient of l1 * sum(|row|). It is 0 for elements that are 0."""
    return _transform_gradient(optimizer, lambda w, g, stats: g + w.sign() * l1)


def decoupled_decay(optimizer: RowOptimizer, weight_decay: float) -> RowOptimizer:
    """Subtract lr * weight_decay * row before the step (arXiv 1711.05101, algorithm 2)."""

    def update(w: Value, g: Value, state: Values, stats: Values, h: Hyper) -> tuple[Value, Values]:
        return optimizer.update(w - w * (h.lr * weight_decay), g, state, stats, h)

    return replace(optimizer, update=update)


def _transform_gradient(optimizer: RowOptimizer, change: Callable[[Value, Value, Values], Value]) -> RowOptimizer:
    """Replace the gradient of an optimizer by `change(rows, gradient, stats)`."""

    def changed(stage: RowStats) -> RowStats:
        return lambda w, g, state, stats, h: stage(w, change(w, g, stats), state, stats, h)

    def update(w: Value, g: Value, state: Values, stats: Values, h: Hyper) -> tuple[Value, Values]:
        return optimizer.update(w, change(w, g, stats), state, stats, h)

    return replace(optimizer, row_stats=tuple(map(changed, optimizer.row_stats)), update=update)


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


def make_row_optimizer(spec: OptimizerSpec, average: AverageSpec | None = None) -> RowOptimizer:
    """Return the row optimizer of a spec, which also keeps `average`. Equal specs share one, so that it is traced once
    for all tables.

    Raises MesetaError if a custom optimizer cannot be imported or traced, is not a RowOptimizer, or has another state
    than its spec.
    """
    return _build(_import_factory(spec.name) if spec.is_custom else FACTORIES[spec.name], spec, average)


@cache
def _build(factory: RowOptimizerFactory, spec: OptimizerSpec, average: AverageSpec | None) -> RowOptimizer:
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
    return optimizer if average is None or spec.name == "frozen" else keep_average(optimizer, average)


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
