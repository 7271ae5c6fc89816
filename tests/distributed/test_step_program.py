"""The step program of predictions has the transfers of a real step, started and waited for in the same order."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest

from meseta.models import MLPOptions
from meseta.optim.dense import GradientClipper
from meseta.planner.cost.schedule import step_program
from meseta.spec import Communication
from meseta.spec.stages import OVERLAPS, Overlap
from meseta.spec.transfer import GRADIENT_NORM, INTRA_HOST_SUFFIX, STEP_TRANSFERS
from sampling import product, sample

from .pool import RankPool
from .test_overlap import make_model, make_pipeline, slices

SIZES = [13, 11, 16, 12]
FLAT = ("counts", "ids", "embeddings", "embeddings inter-host", "agree", "replicas", "gradients",
        "gradients inter-host", "row statistics", "dense")  # fmt: skip
TWO_LEVEL = (*FLAT, "counts" + INTRA_HOST_SUFFIX, "ids" + INTRA_HOST_SUFFIX)
STEP = 2
"""The step under test, which has other steps before and after it."""
CASES = product(
    exchange=["flat", "hierarchical"],
    overlap=[*((name,) for name in OVERLAPS), ("ids", "gradients"), ("embeddings", "dense", "agree"), OVERLAPS],
    accumulate_steps=[1, 3],
    norm=[None, 0.5],
)


def orders(
    exchange: Any, accumulate_steps: int, overlap: tuple[Overlap, ...], norm: float | None
) -> tuple[list[str], list[str]]:
    """Return the names of the transfers started in one step, and of those waited for in it. Runs on every rank.

    `norm` is the limit of one norm over layers and rows.
    """
    model, world = make_model(exchange, Communication(), MLPOptions(dropout=0.3, seed=5))
    clip = None if norm is None else GradientClipper(norm=norm, includes_rows=True)
    pipeline, marks = make_pipeline(model, world, overlap, accumulate_steps, clip), []
    times = pipeline.world.transfers
    times.recent_spans.clear()
    for _ in pipeline.steps(slices(pipeline.world, SIZES)):
        marks.append(len(times.recent_spans))
    spans = [span for span in times.recent_spans if span.name in STEP_TRANSFERS]
    begun = sorted((span for span in spans if span.step == STEP), key=lambda span: span.begin_s)
    waited = list(times.recent_spans)[marks[STEP - 1] : marks[STEP]]
    return [span.name for span in begun], [span.name for span in waited if span.name in STEP_TRANSFERS]


def once(names: list[str]) -> list[str]:
    """Merge consecutive equal names, because the program has one transfer for the counts and ids of consecutive
    micro-batches."""
    return [name for name, _ in groupby(names)]


@pytest.mark.parametrize("case", sample(CASES, 2, seed=97))
def test_a_step_follows_its_program(ranks: Callable[[int], RankPool], case: dict[str, Any]) -> None:
    overlap, num_parts = case["overlap"], case["accumulate_steps"]
    names = TWO_LEVEL if case["exchange"] == "hierarchical" else FLAT
    if num_parts > 1 and "ids" in overlap:  # ids of later micro-batches are exchanged together
        names = tuple(name for name in names if not name.startswith(("counts", "ids")))
    if case["norm"] is not None:
        names = (*names, GRADIENT_NORM)
    program = step_program(overlap, num_parts, names)
    begun, waited = (once([action.name for action in program if action.kind == kind]) for kind in ("begin", "wait"))
    for orders_of_rank in ranks(4).run(orders, case["exchange"], num_parts, overlap, case["norm"]):
        assert [once([name for name in one if name in names]) for one in orders_of_rank] == [begun, waited]
