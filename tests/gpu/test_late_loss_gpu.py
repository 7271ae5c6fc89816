"""Tests of steps on a GPU: no synchronization per step, overlapped copies, and no update after a non-finite loss.

MESETA_TEST_DEVICE=cpu runs the tests that need no GPU, with a simulated device."""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("pydantic", reason="Meseta's own requirements are not installed")

from bad_input.commands import run_here
from meseta.comm import World
from meseta.config import DenseOptimizerConfig
from meseta.data.read.batch import Batch
from meseta.embedding import EmbeddingBagCollection
from meseta.models import DLRM, MLPOptions
from meseta.optim.dense import make_dense_optimizer
from meseta.pipeline import Pipeline
from meseta.pipeline.losses import LateNonFiniteLoss
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import FeatureSpec, OptimizerSpec, TableSpec
from model_parts import lasting_tensors
from sampling import product, sample
from small_run import settings, write_config

DEVICE = os.environ.get("MESETA_TEST_DEVICE", "cuda")
HERE = DEVICE == "cpu" or torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not HERE, reason="no GPU here, or not `pytest tests/gpu`")
gpu = pytest.mark.skipif(DEVICE == "cpu", reason="about GPUs alone")

MATRIX = product(
    rows=["sgd", "adagrad", "rowwise_adagrad", "adam", "lars"],
    dtype=["float32", "float16", "bfloat16", "float64"],
    dense=["sgd", "adagrad", "adam", "adamw", "lamb"],
    accumulate_steps=[1, 2],
    bad=[0, 3],
)


def batch(number: int, size: int = 64) -> Batch:
    generator = torch.Generator().manual_seed(number)
    lengths = torch.randint(0, 4, (2 * size,), generator=generator)
    return Batch(
        dense=torch.randn(size, 3, generator=generator),
        sparse=KeyedJaggedTensor(("a", "b"), torch.randint(0, 50, (int(lengths.sum()),), generator=generator), lengths),
        label=torch.randint(0, 2, (size,), generator=generator).float(),
    )


def make(rows: str, dtype: str, dense: str, accumulate_steps: int = 1) -> Pipeline:
    spec = OptimizerSpec(name=rows, lr=0.05)  # type: ignore[arg-type]
    tables = [
        TableSpec(name=name, num_embeddings=50, embedding_dim=16, dtype=dtype, optimizer=spec)  # type: ignore[arg-type]
        for name in "ab"
    ]
    features = [FeatureSpec(name=name, table=name) for name in "ab"]
    embeddings = EmbeddingBagCollection(tables, features, seed=1, device=DEVICE)
    model: Any = DLRM(embeddings, num_dense=3, bottom_mlp=(8, 16), top_mlp=(8,), options=MLPOptions(seed=2))
    model = model.to(device=DEVICE, dtype=torch.float64 if dtype == "float64" else torch.float32)
    config = DenseOptimizerConfig(name=dense, lr=0.02)  # type: ignore[arg-type]
    optimizer = make_dense_optimizer(config, model.parameters())
    pipeline = Pipeline(model, optimizer, World.single(DEVICE), accumulate_steps=accumulate_steps)
    pipeline.update_check.is_deferred = True
    return pipeline


def learned(pipeline: Pipeline) -> dict[str, Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in lasting_tensors(pipeline).items()}


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("case", sample(MATRIX, 16, seed=3))
def test_a_non_finite_loss_leaves_every_bit(case: dict[str, Any], settled: bool) -> None:
    bad = case.pop("bad") if "bad" in case else 0
    before, pipeline = make(**case), make(**case)
    list(before.steps(map(batch, range(bad))))
    batches, done = [batch(number) for number in range(bad + 3)], 0
    batches[bad].dense[5, 1] = torch.nan
    with pytest.raises(LateNonFiniteLoss, match="nothing was updated"):
        for _ in pipeline.steps(iter(batches)):
            done += 1
            if settled:
                pipeline.synchronize()
    state, other = learned(pipeline), learned(before)
    assert state.keys() == other.keys()
    assert [name for name in state if not torch.equal(state[name], other[name])] == []
    assert pipeline.model.embeddings.step == bad and pipeline.batch is batches[bad] and done <= bad + 1
    assert pipeline(batch(99)).num_samples == 64  # and continues


@gpu
@pytest.mark.parametrize("dense", ["sgd", "adagrad", "adam", "adamw"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_steady_step_has_no_wait(dense: str, dtype: str) -> None:
    """Several ranks wait for the counts of ids. One process checks ids and loss a step later."""
    steps = make("rowwise_adagrad", dtype, dense).steps(map(batch, range(12)))
    for _ in range(6):
        next(steps)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        caught.clear()
        try:
            next(steps)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [f"{one.filename}:{one.lineno}" for one in caught if "synchronizing" in str(one.message)]
    assert waits == []


@gpu
def test_copies_on_a_side_stream_are_in_the_timeline(tiny: Path, tmp_path: Path) -> None:
    document = settings(tiny, tmp_path / "run", device="cuda", train__epochs=2)
    config = write_config(tmp_path / "c.yaml", document)
    ended = run_here("train", config, "--profile-steps", "4:9")
    assert ended.code == 0, ended.err
    events = json.loads((tmp_path / "run/timeline.json").read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    copies = [event for event in events if event["ph"] == "X" and tracks[event["tid"]] == "copies in flight"]
    assert [event["args"]["step"] for event in copies] == [4, 5, 6, 7, 8, 9]
    assert all(event["args"]["bytes to the device"] > 0 and event["dur"] > 0 for event in copies)


@gpu
def test_a_copy_runs_beside_the_computation(tmp_path: Path) -> None:
    """The profiler shows copies of batches and kernels in different streams."""
    steps = make("sgd", "float32", "sgd").steps(map(batch, range(8)))
    next(steps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch 2.11's profiler
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(3):
                next(steps)
            torch.cuda.synchronize()
    path = tmp_path / "profile.json"
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    kernels = Counter(event["args"]["stream"] for event in events if event.get("cat") == "kernel")
    [(computing, _)] = kernels.most_common(1)  # the other one fills memory for which these tests leave no space
    copies = [event for event in events if event.get("cat") == "gpu_memcpy" and "HtoD" in event["name"]]
    assert any(event["args"]["stream"] != computing for event in copies), (kernels, copies)
