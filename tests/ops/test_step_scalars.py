"""Tests of the numbers and the verdict of a step in device memory. The kernels run in Triton's interpreter."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meseta.ops.id_policy.reference import make_report
from meseta.ops.step_scalars import StepNumbers, StepScalars
from meseta.ops.step_scalars import reference as scalars_reference
from meseta.ops.step_verdict import (
    NON_FINITE_LOSS,
    REJECTED_ID,
    RejectedPlace,
    StepReport,
    VerdictMemory,
    record_verdict,
)
from meseta.spec import MesetaError

CPU = torch.device("cpu")
LOSSES = [0.0, -0.0, 1.5, 1e308, 5e-324, math.inf, -math.inf, math.nan]


def test_numbers_keep_their_address_and_follow_the_step() -> None:
    scalars = StepScalars(CPU)
    scalars.write(StepNumbers(3, 0.5))
    rates = scalars.view("rate", torch.float64, lambda now: [0.1 * now.lr_factor, now.step])
    single = scalars.view("float", torch.float32, lambda now: [1.0 / (1 + now.step)] * 3)
    keys = scalars.view("key", torch.int64, lambda now: [(1 << 64) - 1 - now.step])
    assert rates.tolist() == [0.1 * 0.5, 3.0] and keys.tolist() == [-4]
    assert single.tolist() == [0.25] * 3
    addresses = [tensor.data_ptr() for tensor in (rates, single, keys)]
    scalars.write(StepNumbers(7, 0.25))
    assert rates.tolist() == [0.1 * 0.25, 7.0] and single.tolist() == [0.125] * 3 and keys.tolist() == [-8]
    again = scalars.view("rate", torch.float64, lambda now: [])
    assert [again.data_ptr(), single.data_ptr(), keys.data_ptr()] == addresses


def test_many_numbers_do_not_overlap() -> None:
    scalars = StepScalars(CPU)
    views = {n: scalars.view(n, torch.float64, lambda now, n=n: [n + now.step] * n) for n in range(1, 40)}
    scalars.write(StepNumbers(100, 1.0))
    assert all(view.tolist() == [n + 100.0] * n for n, view in views.items())


@given(words=st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=20))
def test_the_kernel_writes_all_bits(words: list[int]) -> None:
    triton = pytest.importorskip("meseta.ops.step_scalars.triton")
    if torch.cuda.is_available():
        pytest.skip("Triton compiles for the GPU here")
    packed = struct.pack(f"<{len(words)}Q", *words)
    size = -(-len(words) // scalars_reference.WORDS_PER_BLOCK) * scalars_reference.WORDS_PER_BLOCK
    written, expected = (torch.zeros(size, dtype=torch.int64) for _ in range(2))
    triton.write_words(written, packed)
    scalars_reference.write_words(expected, packed)
    assert torch.equal(written, expected)
    assert [word % (1 << 64) for word in written[: len(words)].tolist()] == words


def test_a_new_number_in_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    scalars = StepScalars(CPU)
    scalars._device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(MesetaError, match="run the same step once before the capture"):
        scalars.view("late", torch.float64, lambda now: [1.0])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("places", [[], [(-1, 0, 0)], [(-1, 0, 0), (2, 5, 1 << 62)], [(0, 1, -7), (-1, 0, 0)]])
@pytest.mark.parametrize("was_refused", [False, True])
def test_verdict(loss: float, places: Sequence[tuple[int, int, int]], was_refused: bool) -> None:
    sums = torch.tensor([loss, 2.5, math.nan], dtype=torch.float64)
    counts = [torch.arange(group, 2 * group + 1) for group in range(len(places))]
    reports = [make_report(torch.tensor(place), count) for place, count in zip(places, counts, strict=True)]
    memory = VerdictMemory.create(CPU)
    memory.set_flags(found_inf=was_refused)
    report = StepReport.from_words(record_verdict(memory, sums, reports).numpy(), [len(count) for count in counts])
    is_rejected = any(feature >= 0 for feature, _, _ in places)
    assert report.verdict == (not math.isfinite(loss)) * NON_FINITE_LOSS + is_rejected * REJECTED_ID
    is_refused = was_refused or report.verdict > 0
    assert memory.flags.tolist() == [float(is_refused), float(not is_refused)]
    assert report.rejected == [RejectedPlace(*place) for place in places]
    assert [one.tolist() for one in report.num_outside] == [count.tolist() for count in counts]
    assert struct.pack("<3d", *report.sums) == sums.numpy().tobytes()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("num_groups", [0, 1, 2])
def test_verdict_of_the_kernel(loss: float, num_groups: int) -> None:
    triton = pytest.importorskip("meseta.ops.step_verdict.triton")
    if torch.cuda.is_available():
        pytest.skip("Triton compiles for the GPU here")
    sums = torch.tensor([loss, -3.0], dtype=torch.float64)
    reports = [torch.tensor([0, 0, -1, 0, 0, 7]), torch.tensor([REJECTED_ID, 0, 1, 2, 3, *range(300)])][:num_groups]
    memories = [VerdictMemory.create(CPU) for _ in range(2)]
    expected = record_verdict(memories[0], sums, reports)
    assert torch.equal(triton.record_verdict(memories[1].words, sums, reports), expected)
    assert torch.equal(memories[0].words, memories[1].words)
