"""The checks of benchmarks/gpu_parts that train, on an emulated GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("Triton compiles for the GPU here", allow_module_level=True)

import bench_dcnv2
import bench_gpu
from dcnv2.shape import TINY
from gpu_parts import kernels, linear, replay, step_time
from gpu_parts.rows import Row, RowWriter, read_rows
from gpu_path.arguments import leaves
from gpu_path.patches import emulated_gpu
from gpu_path.training import Training, TrainingCase

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN and infinity in masked lanes
CASE = TrainingCase(model="dlrm", batch_size=4, num_tables=2, num_rows=20, is_ragged=True)


def compare(folder: Path, make_training: Callable[..., Training], num_steps: int = 4) -> list[Row]:
    """Return the rows of a comparison on an emulated GPU."""
    with emulated_gpu():
        replay.compare(RowWriter(folder / "rows"), "dlrm", make_training, num_steps, num_replays=num_steps - 2)
    return read_rows(folder / "rows")


def planted(case: TrainingCase, *, uses_graphs: bool) -> Training:
    """Create a training with a factor of the logits that a graph captures."""
    training, factors = Training(case, "cuda", uses_graphs=uses_graphs), count(1)
    score: Callable[[Any, Any], Tensor] = training.model.score
    training.model.score = lambda dense, pooled: score(dense, pooled) * float(next(factors))
    return training


def test_replayed_steps_equal_eager_ones(tmp_path: Path) -> None:
    eager, *replayed = compare(tmp_path, partial(Training, CASE, "cuda"))
    assert eager.value == 0
    assert [row.result for row in replayed] == ["met"] * 4
    assert [row.value for row in replayed[::2]] == [3, 3]


@pytest.mark.soak
def test_a_captured_constant_is_found(tmp_path: Path) -> None:
    _, num_replays, bits, *_ = compare(tmp_path, partial(planted, CASE))
    assert num_replays.result == "met"
    assert bits.result == "missed" and "such as prediction 2" in str(bits.value)


@pytest.mark.soak
def test_steps_that_are_not_captured_are_found(tmp_path: Path) -> None:
    def make_eager(*, uses_graphs: bool) -> Training:
        return Training(CASE, "cuda", uses_graphs=False)

    _, num_replays, bits, *_ = compare(tmp_path, make_eager, 3)
    assert (num_replays.result, bits.result) == ("missed", "met")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (torch.tensor([1.0, 2.0, 0.0]), []),
        (torch.tensor([1.0, 2.0, -0.0]), ["rows"]),
        (torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64), ["rows"]),
        (torch.tensor([[1.0, 2.0, 0.0]]), ["rows"]),
        (None, ["rows"]),
    ],
)
def test_bits_are_compared(changed: Tensor | None, expected: list[str]) -> None:
    before = {"rows": torch.tensor([1.0, 2.0, 0.0]), "step": torch.tensor(3.0)}
    after = {"step": torch.tensor(3.0)} | ({} if changed is None else {"rows": changed})
    assert replay.different(replay.Outcome(after, 0, {}), replay.Outcome(before, 0, {})) == expected


@pytest.mark.soak
def test_timed_steps_pack_no_batch() -> None:
    with emulated_gpu() as gpu:
        steps = step_time.TimedSteps(Training(CASE, "cuda", uses_graphs=True), CASE, "cuda")
        assert step_time.time_steps(steps, 3) > 0 and step_time.time_host(steps) > 0
        steps.batches.pack(2)
        steps.batches._arguments = iter(())  # Packing another batch would end the loop.
        gpu.begin()
        steps()
        steps()
        records = gpu.end()
    assert [record.kind for record in records].count("graph replay") == 2


@pytest.mark.soak
def test_dcnv2_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_dcnv2, "NUM_WARM_UP_STEPS", 3)
    with emulated_gpu():
        result = bench_dcnv2.measure(TINY, "cuda", num_steps=2, num_rounds=2)
    assert result.num_replayed >= 4 and result.rate > 0


def test_kernels_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shape = bench_gpu.Shape("small", 2, 50, 16, 8, 3)
    monkeypatch.setattr(kernels, "SHAPES", [shape])
    monkeypatch.setattr(kernels, "copy_rate", lambda: 1e9)
    monkeypatch.setattr(kernels, "device_seconds", lambda run: 1.0 if run(3) is None else 2.0)
    with emulated_gpu():
        kernels.check(RowWriter(tmp_path / "rows"))
        job = bench_gpu.Job(shape)
        touched = sum(len({*ids.tolist()}) for ids in job.batches[0].cpu().view(2, -1))
    assert job.update_bytes("rowwise_adagrad") == touched * 17 * 8 + 48 * 8 + 8 * 32 * 4
    assert len(read_rows(tmp_path / "rows")) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_layers_equal_others(dtype: torch.dtype) -> None:
    with emulated_gpu():
        pairs = linear.make_pairs((7, 16, 8), dtype, "cuda")
        assert len(pairs) == 3
        for fused, plain in pairs.values():
            some, other = ([leaf.cpu() for leaf in leaves(function(0))] for function in (fused, plain))
            torch.testing.assert_close(some, other, rtol=1e-5 if dtype == torch.float32 else 0.02, atol=0.02)
