"""What the heap grows to for blocks that come and go, by hand; and what models really hold, by /proc."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.processes import Command
from meseta.config.models import MODEL_NAMES
from meseta.train.setup.heap import NUM_SIMULATED_STEPS, HeapModel, heap_peak

MB = 1 << 20
SIZES = {"autoint": 1024, "mmoe": 4096}
"""Samples, for 0.3 to 0.6 GB; those of all others are 16,384."""
FIRST = ("wide_deep",)


def peak_of(entries: list[tuple[int, int]]) -> float:
    """In MB, of one step: (number of a block, MB taken, or given back)."""
    heap = HeapModel()
    for block, size in entries:
        if size > 0:
            heap.allocate(block, int(size * MB))
        else:
            heap.free(block)
    return heap.peak / MB


def test_blocks_that_stay_lie_side_by_side() -> None:
    assert peak_of([(n, 1) for n in range(40)]) == pytest.approx(40, abs=0.01)
    assert peak_of([(0, 40), (1, 1)]) == pytest.approx(41, abs=0.01)


def test_a_block_is_too_small_for_the_next_of_its_size_by_its_ends() -> None:
    """Between two that stay, the place of one that was given back is taken by one a little smaller, not by one as
    large."""
    kept = [(0, 1), (1, 1), (2, 1), (1, -1)]
    assert peak_of([*kept, (3, 1)]) == pytest.approx(4, abs=0.01)
    assert peak_of([*kept, (3, 0.99)]) == pytest.approx(3, abs=0.01)


def test_blocks_that_were_given_back_side_by_side_are_joined_where_their_ends_were_not_kept() -> None:
    many = [(n, 1) for n in range(30)]  # more than ends are kept of one size
    again = [*many, *[(n, -1) for n in range(29)], (30, 10)]
    assert peak_of(again) == pytest.approx(30, abs=0.01)


def test_large_blocks_are_the_systems_where_the_heap_has_no_room() -> None:
    assert peak_of([(0, 33), (0, -33), (1, 4), (1, -4)]) == pytest.approx(33, abs=0.01)  # the heap has 4 of its own
    assert peak_of([(0, 31), (0, -31), (1, 33), (1, -33)]) == pytest.approx(64, abs=0.01)


def test_steps_are_done_again_and_what_one_keeps_is_given_back() -> None:
    once = [(0, 5 * MB), (1, 3 * MB), (1, -3 * MB)]
    assert 8 * MB <= heap_peak(once) <= NUM_SIMULATED_STEPS * 8.01 * MB


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.booleans()), max_size=30))
def test_it_holds_what_is_in_use_and_no_more_than_was_ever_taken(taken: list[tuple[int, bool]]) -> None:
    entries, alive = list[tuple[int, int]](), list[tuple[int, int]]()
    for number, (size, gives_back) in enumerate(taken):
        entries.append((number, size))
        alive.append((number, size))
        if gives_back:
            first, of_first = alive.pop(0)
            entries.append((first, -of_first))
    in_use = max(accumulate(size for _, size in entries), default=0)
    assert in_use <= peak_of(entries) <= sum(size for size, _ in taken) + 0.01


@pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.soak) for name in MODEL_NAMES
             if name != "logistic_regression"]
)  # fmt: skip
def test_a_model_holds_what_is_predicted_of_its_shapes(tmp_path: Path, name: str) -> None:
    """Within 30 % of the peak; logistic regression holds less than a process takes by chance."""
    script = Path(__file__).with_name("memory_of_models.py")
    command = Command(tmp_path, script, f"{name}:{SIZES.get(name, 16384)}", program="python").succeed()
    predicted, peak = json.loads(command.out.read_text())[name]
    print(f"{name}: predicted {predicted / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB")
    assert 0.7 * peak <= predicted <= 1.3 * peak
