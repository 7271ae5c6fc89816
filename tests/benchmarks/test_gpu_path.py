"""The emulated GPU of benchmarks/gpu_path trains as a CPU does, and its recorder finds planted faults."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("Triton compiles for the GPU here", allow_module_level=True)

from gpu_path.patches import emulated_gpu
from gpu_path.records import StepRecording, compare_steps
from gpu_path.training import Training, TrainingCase, record_steps

from meseta.config.models import MODEL_NAMES
from model_parts import lasting_tensors
from sampling import product, sample

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN and infinity in masked lanes
SMALL: dict[str, Any] = {"batch_size": 8, "num_tables": 3, "num_rows": 20}
CASES = [
    *product(model=MODEL_NAMES, is_ragged=[False, True], row_optimizer=["sgd"], dense_optimizer=["sgd"]),
    *product(
        model=["dlrm"],
        is_ragged=[True],
        row_optimizer=["adagrad", "rowwise_adagrad", "adam", "lars"],
        dense_optimizer=["adagrad", "adam", "adamw", "lamb"],
    ),
]


def learned(training: Training) -> dict[str, Tensor]:
    """Return all weights and states on the host."""
    training.pipeline.synchronize()
    return {name: tensor.detach().cpu() for name, tensor in lasting_tensors(training.pipeline).items()}


def train(case: TrainingCase, device: str, num_steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    training = Training(case, device)
    return [training.step().loss for _ in range(num_steps)], learned(training)


@pytest.mark.parametrize("case", sample(CASES, k=1, seed=1))
def test_the_emulated_gpu_trains_as_the_cpu(case: dict[str, Any]) -> None:
    expected_losses, expected = train(TrainingCase(**case, **SMALL), "cpu")
    with emulated_gpu():
        losses, got = train(TrainingCase(**case, **SMALL), "cuda")
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    assert got.keys() == expected.keys()
    # Adam also scales up gradients that are rounding errors of 0.
    allowed_share = 0.0 if case["dense_optimizer"] == "sgd" else 1e-3
    for name, tensor in got.items():
        is_close = torch.isclose(tensor, expected[name], rtol=1e-4, atol=1e-6 if allowed_share == 0.0 else 5e-4)
        assert 1.0 - is_close.float().mean().item() <= allowed_share, name


def planted(fault: Callable[[Tensor], Tensor], num_steps: int = 1) -> list[StepRecording]:
    """Record steps of a DLRM in which `fault` replaces the logits."""
    with emulated_gpu() as gpu:
        training = Training(TrainingCase(model="dlrm", **SMALL), "cuda")
        score = training.model.score
        training.model.score = lambda dense, pooled: fault(score(dense, pooled))
        return record_steps(gpu, training, num_steps)


@pytest.fixture(scope="module")
def plain() -> list[StepRecording]:
    """Two recorded steps without a fault."""
    return planted(lambda logits: logits, 2)


def test_a_steady_step_has_no_wait(plain: list[StepRecording]) -> None:
    """tests/gpu/test_late_loss_gpu.py has the same test on a GPU."""
    for recording in plain:
        assert recording.select("synchronization") == []
        [copy, *_] = recording.select("copy to device")
        assert copy.source.startswith("pipeline/device_copy.py:")


def test_a_recording_repeats(plain: list[StepRecording]) -> None:
    first, second = ([record.name for record in recording.records] for recording in plain)
    assert first == second
    assert plain[0].counts() == plain[1].counts()
    assert [name for name, count in plain[0].counts().items() if count == 0] == [
        "synchronizations",
        "pinned allocations",
        "graph replays",
    ]


def read(logits: Tensor) -> Tensor:
    logits.sum().item()
    return logits


def select(logits: Tensor) -> Tensor:
    assert len(logits[logits.isfinite()]) == len(logits)
    return logits


def copy(logits: Tensor) -> Tensor:
    return logits + torch.ones(len(logits)).to(logits.device) * 0.0


@pytest.mark.parametrize("fault", [read, *(pytest.param(one, marks=pytest.mark.soak) for one in (select, copy))])
def test_a_planted_synchronization_is_counted(plain: list[StepRecording], fault: Callable[[Tensor], Tensor]) -> None:
    [recording] = planted(fault)
    assert recording.counts()["synchronizations"] == plain[0].counts()["synchronizations"] + 1


@pytest.mark.soak
def test_planted_memory_is_counted(plain: list[StepRecording]) -> None:
    def pin(logits: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:  # as in a thread that packs batches
            host = pool.submit(torch.empty, len(logits), pin_memory=True).result()
        host.copy_(logits.detach(), non_blocking=True)
        return logits

    [recording], usual = planted(pin), plain[0].counts()
    counts = recording.counts()
    changed = {name: counts[name] - usual[name] for name in usual if counts[name] != usual[name]}
    changed.pop("Python calls")
    assert changed == {"copies to host": 1, "pinned allocations": 1, "dispatcher calls": 1, "views": 1}


@pytest.mark.soak
def test_planted_python_calls_are_counted(plain: list[StepRecording]) -> None:
    def call(logits: Tensor) -> Tensor:
        def nothing() -> None:
            pass

        for _ in range(100):
            nothing()
        return logits

    [recording] = planted(call)
    assert recording.num_python_calls == plain[0].num_python_calls + 100


@pytest.mark.soak
def test_a_planted_scalar_is_listed(plain: list[StepRecording]) -> None:
    numbers = count()
    recordings = planted(lambda logits: logits * (1.0 + next(numbers)), 2)
    usual, added = (
        [one for one in compare_steps(*pair) if one.aspect == "scalar" and one.record.name == "aten::mul"]
        for pair in (plain, recordings)
    )
    # The factor of the logits is also that of their gradient.
    assert usual == [] and [one.detail for one in added] == ["other 4.0, then 5.0"] * 2


@pytest.mark.soak
def test_a_planted_branch_is_listed(plain: list[StepRecording]) -> None:
    numbers = count()
    differences = compare_steps(*planted(lambda logits: logits if next(numbers) % 2 else logits.neg().neg(), 2))
    assert differences[-1].aspect == "operator" and "aten::neg" in differences[-1].detail


def test_a_tensor_of_the_host_is_refused() -> None:
    with emulated_gpu(), pytest.raises(RuntimeError, match="expected all tensors on the emulated GPU"):
        torch.ones(3, device="cuda") + torch.ones(3)


def test_the_emulation_ends() -> None:
    with emulated_gpu():
        tensor = torch.ones(3, device="cuda")
        assert tensor.is_cuda and tensor.device == torch.device("cuda", 0) and (tensor * 2).tolist() == [2.0] * 3
        with pytest.raises(TypeError, match="numpy"):
            tensor.numpy()
    assert tensor.is_cpu and tensor.numpy().sum() == 3.0
