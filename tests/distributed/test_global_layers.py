"""Dropout and batch norm on several ranks train the model of one process. A resumed run has the bits of an
uninterrupted one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from meseta.comm import BatchSlice, World
from meseta.models.global_layers import SyncBatchNorm
from meseta.train.trained_model import load_trained
from small_run import final_checksum, metrics, settings, train, without_times

from .pool import RankPool
from .test_training import ROW_WISE, STEPS

Ranks = Callable[[int], RankPool]


def normalise(sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the output and the gradients of this rank's slice, and the running statistics. Gradients of parameters are
    in units of the global mean."""
    world = World.current() if len(sizes) > 1 else World.single()
    batch = BatchSlice(world=world, step=0, batch_size_per_rank=sizes)
    generator = torch.Generator().manual_seed(3)
    data, upstream = (torch.randn(sum(sizes), 5, generator=generator, dtype=dtype) * 3 + 10 for _ in range(2))
    local = slice(batch.first_sample, batch.first_sample + sizes[world.rank])
    layer = SyncBatchNorm(5).to(dtype)
    torch.nn.init.normal_(layer.weight, generator=generator)
    x = data[local].clone().requires_grad_()
    y = layer(x, batch)
    # The loss is the mean over this rank's samples.
    y.backward(upstream[local] / max(len(x), 1))
    share = batch.local_share
    return {
        "y": y.detach(),
        "x": x.grad * share,
        "weight": layer.weight.grad * share,
        "bias": layer.bias.grad * share,
        "mean": layer.running_mean,
        "var": layer.running_var,
    }


@pytest.mark.parametrize("sizes", [(5, 3), (8, 0), (0, 8), (1, 7)])
def test_batch_norm_is_that_of_one_process(ranks: Ranks, sizes: tuple[int, ...]) -> None:
    one = normalise((sum(sizes),), torch.float64)
    parts = ranks(2).run(normalise, sizes, torch.float64)
    for name, whole in one.items():
        if name in ("y", "x"):
            combined = torch.cat([part[name] for part in parts])
        elif name in ("mean", "var"):
            assert torch.equal(parts[0][name], parts[1][name])
            combined = parts[0][name]
        else:
            combined = sum(part[name] for part in parts)
        torch.testing.assert_close(combined, whole, rtol=0, atol=1e-12)


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in metrics(run_dir) if line["kind"] == "train"]


def buffers(run_dir: Path) -> dict[str, torch.Tensor]:
    model = load_trained(run_dir, "test", World.single()).model
    return {name: value for name, value in model.named_buffers() if "running" in name}


BOTH = {
    "model__dropout": 0.2,
    "model__batch_norm": True,
    "model__top_mlp": [8],
    "model__deep_mlp": [8],
    "embedding__optimizer__lr": 0.02,
    "train__log_every_steps": 1,
}


@pytest.mark.soak  # test_model_ranks.py has losses and rows of such a model in `make test`
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-5)])
def test_one_process_and_many_train_the_same_model(
    ranks: Ranks, tiny: Path, tmp_path: Path, dtype: str, tolerance: float
) -> None:
    common = {**BOTH, "embedding__dtype": dtype, "train__epochs": 2, **STEPS}
    one = train(settings(tiny, tmp_path / "1", **common))
    for size in (2, 4):
        many = ranks(size).run(train, settings(tiny, tmp_path / str(size), **common))[0]
        np.testing.assert_allclose(losses(tmp_path / str(size)), losses(tmp_path / "1"), rtol=0, atol=tolerance)
        assert many["test"]["logloss"] == pytest.approx(one["test"]["logloss"], abs=max(1e-6, tolerance))
        for name, value in buffers(tmp_path / "1").items():
            torch.testing.assert_close(buffers(tmp_path / str(size))[name], value, rtol=tolerance, atol=tolerance)
    plain = train(settings(tiny, tmp_path / "plain", **{**common, "model__dropout": 0.0, "model__batch_norm": False}))
    assert abs(plain["test"]["logloss"] - one["test"]["logloss"]) > 1e-3


def test_fewer_samples_than_ranks(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    common = {**BOTH, "embedding__dtype": "float64", "train__batch_size": 3, "train__max_steps": 3, "plan": ROW_WISE}
    one = train(settings(tiny, tmp_path / "1", **common))
    four = ranks(4).run(train, settings(tiny, tmp_path / "4", **common))[0]
    np.testing.assert_allclose(losses(tmp_path / "4"), losses(tmp_path / "1"), rtol=0, atol=1e-10)
    assert four["num_samples"] == one["num_samples"] == 9


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_micro_batches_have_the_dropout_of_the_whole_batch(ranks: Ranks, tiny: Path, tmp_path: Path, size: int) -> None:
    common = {
        **BOTH,
        "model__batch_norm": False,
        "embedding__dtype": "float64",
        "train__max_steps": 3,
        "plan": ROW_WISE,
    }
    train(settings(tiny, tmp_path / "whole", **common))
    parts = settings(tiny, tmp_path / "parts", **common, train__accumulate_steps=3)
    train(parts) if size == 1 else ranks(size).run(train, parts)
    np.testing.assert_allclose(losses(tmp_path / "parts"), losses(tmp_path / "whole"), rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    ranks: Ranks, tiny: Path, tmp_path: Path, size: int
) -> None:
    def run(folder: str, **changes: object) -> None:
        document = settings(tiny, tmp_path / folder, **BOTH, model__name="deepfm", plan=ROW_WISE, **changes)
        train(document) if size == 1 else ranks(size).run(train, document)

    often = {"train__eval_every_steps": 2, "train__accumulate_steps": 2}
    run("whole", train__max_steps=4, **often)
    run("cut", train__max_steps=3, **often)
    run("cut", train__max_steps=4, **often)
    assert final_checksum(tmp_path / "cut") == final_checksum(tmp_path / "whole")
    lines = [
        without_times([line for line in metrics(tmp_path / run) if line["kind"] == "train"]) for run in ("cut", "whole")
    ]
    assert lines[0] == lines[1]
