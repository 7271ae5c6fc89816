"""Which parts of a step travel while a rank computes, in a run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from meseta.comm import World
from meseta.models.base import find_dense_forward
from meseta.pipeline.model import Model
from meseta.spec import MesetaError
from meseta.spec.stages import OVERLAPS, Overlap


@dataclass(frozen=True)
class OverlapChoice:
    """What is hidden in a run, and what is not."""

    hidden: tuple[Overlap, ...]
    """In the order of OVERLAPS."""
    excluded: Mapping[Overlap, str]
    """Why each that was to be chosen cannot be."""


def choose_overlap(
    asked: Literal["auto", "off"] | Collection[Overlap], model: Model, world: World, accumulate_steps: int = 1
) -> OverlapChoice:
    """What is asked for; 'auto': all that a model on these ranks lets hide.

    Raises MesetaError where one is asked for by name that cannot be.
    """
    sums_dense = getattr(model, "dense_gradients", None) is not None
    copies = world.is_one_cpu_host
    return predict_overlap(
        asked, model, world.size, accumulate_steps, has_dense_gradients=sums_dense, is_one_cpu_host=copies
    )


def predict_overlap(
    asked: Literal["auto", "off"] | Collection[Overlap],
    model: Any,
    num_ranks: int,
    accumulate_steps: int = 1,
    *,
    has_dense_gradients: bool,
    is_one_cpu_host: bool,
) -> OverlapChoice:
    """The same for a model, or its outline, that is not placed yet, on so many ranks. `has_dense_gradients`: whether
    there will be dense gradients that every rank has whole. `is_one_cpu_host`: whether nothing leaves a host, and the
    processors that compute copy what travels in it."""
    if asked == "off":
        return OverlapChoice((), {})
    reasons: dict[Overlap, str] = {}
    if num_ranks == 1:
        reasons = dict.fromkeys(OVERLAPS, "one rank sends nothing")
    else:
        if find_dense_forward(model) is None and accumulate_steps == 1:
            reasons["embeddings"] = (
                f"{type(model).__name__} computes nothing from dense inputs alone (it has no method `forward_dense`), "
                f"and "
                "there are no micro-batches"
            )
        if not has_dense_gradients:
            reasons["dense"] = "there are no dense gradients that every rank has whole"
    if asked != "auto":
        for name in (name for name in OVERLAPS if name in asked and name in reasons):
            raise MesetaError(
                f"pipeline.overlap {name!r} cannot be: {reasons[name]}; leave it out, or set pipeline.overlap=auto"
            )
        return OverlapChoice(tuple(name for name in OVERLAPS if name in asked), {})
    if is_one_cpu_host:
        reasons.setdefault("ids", "on the processors of one host, reading a batch ahead costs more than it hides")
    return OverlapChoice(tuple(name for name in OVERLAPS if name not in reasons), reasons)
