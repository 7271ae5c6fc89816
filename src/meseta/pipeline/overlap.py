"""Selection of the transfers that a run overlaps with computation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from meseta.comm import World
from meseta.models.layers import find_dense_forward
from meseta.pipeline.losses import Model
from meseta.spec import MesetaError
from meseta.spec.stages import OVERLAPS, Overlap


@dataclass(frozen=True)
class OverlapChoice:
    """Overlaps of a run, and the reasons for those that are left out."""

    hidden: tuple[Overlap, ...]
    """Selected overlaps, in the order of `OVERLAPS`."""
    excluded: Mapping[Overlap, str]
    """Reasons, for each overlap that `auto` left out."""


def choose_overlap(
    asked: Literal["auto", "off"] | Collection[Overlap], model: Model, world: World, accumulate_steps: int = 1
) -> OverlapChoice:
    """Select the overlaps of a placed model, with 'auto' all possible ones. Raises MesetaError for impossible ones."""
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
    """Select the overlaps as `choose_overlap` does, for a model that may not be placed yet.

    Args:
        asked: Setting `pipeline.overlap`.
        model: Model, or an outline of it.
        num_ranks: Number of ranks.
        accumulate_steps: Number of micro-batches.
        has_dense_gradients: Whether each rank will have complete dense gradients.
        is_one_cpu_host: Whether all ranks run on the CPUs of one host.
    """
    if asked == "off":
        return OverlapChoice((), {})
    reasons: dict[Overlap, str] = {}
    if num_ranks == 1:
        reasons = dict.fromkeys(OVERLAPS, "one rank sends nothing")
    else:
        if find_dense_forward(model) is None and accumulate_steps == 1:
            reasons["embeddings"] = (
                f"{type(model).__name__} computes nothing from dense inputs alone (it has no method `forward_dense`), "
                "and there are no micro-batches"
            )
        if not has_dense_gradients:
            reasons["dense"] = "there are no dense gradients that every rank has whole"
    if asked != "auto":
        for name in (name for name in OVERLAPS if name in asked and name in reasons):
            raise MesetaError(
                f"pipeline.overlap {name!r} is not possible: {reasons[name]}; remove this overlap, or set "
                "pipeline.overlap=auto"
            )
        return OverlapChoice(tuple(name for name in OVERLAPS if name in asked), {})
    if is_one_cpu_host:
        # The cores that compute also copy the transferred data.
        reasons.setdefault("ids", "on the processors of one host, reading a batch ahead costs more than it hides")
    return OverlapChoice(tuple(name for name in OVERLAPS if name not in reasons), reasons)
