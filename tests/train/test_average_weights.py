"""Averaged weights of a run, against numpy averages of the weights after each step of a run without."""

from __future__ import annotations

import copy
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import swa_utils

from average_oracle import KINDS, METRICS, Weights, average_of, differences, stored_weights
from meseta.checkpoint import newest
from meseta.checkpoint.averages import saved_average
from meseta.checkpoint.exporting import export
from meseta.comm import World
from meseta.config import RunConfig
from meseta.data.read.options import ReaderOptions
from meseta.data.read.reader import Reader
from meseta.models.global_layers import SyncBatchNorm
from meseta.spec import MesetaError
from meseta.train.advise import open_advisor
from meseta.train.averages.weights import _means_over_batches
from meseta.train.interop.dense_export import load_dense_part
from meseta.train.interop.importing import import_export
from meseta.train.trained_model import load_model, load_trained
from meseta.train.trainer import Trainer
from small_run import metrics, settings, train

STEPS = 7


def document(tiny: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    always = {"train__max_steps": STEPS, "train__eval_every_steps": 3, "embedding__optimizer__lr": 0.5}
    return settings(tiny, run_dir, **always | changes)


def weights_of(model: Any) -> Weights:
    shards = model.embeddings.shards
    rows = {f"table.{s.spec.name}": s.read(0, s.shard.num_rows)["row"].double().numpy() for s in shards}
    return rows | {f"model.{name}": p.detach().double().numpy() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def history(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Weights]:
    """Weights after each step of a run without an average."""
    folder = tmp_path_factory.mktemp("history")
    train(document(tiny, folder / "run", **SHORT, checkpoint__every_steps=1, checkpoint__keep_last=4))
    paths = sorted((folder / "run" / "checkpoints").glob("step-*"))
    assert len(paths) == 4
    return [stored_weights(path, folder / "out") for path in paths]


SHORT = {"train__max_steps": 4, "train__eval_every_steps": None}


@pytest.mark.parametrize("kind", ["ema", pytest.param("swa", marks=pytest.mark.soak)])
def test_run(tiny: Path, tmp_path: Path, history: list[Weights], kind: str) -> None:
    run_dir = tmp_path / "run"
    summary = train(document(tiny, run_dir, **KINDS[kind], **SHORT))
    path = newest(run_dir / "checkpoints")
    assert path is not None
    averages = stored_weights(path, tmp_path / "out")
    assert differences(stored_weights(path, tmp_path / "raw", states=True), history[-1]) == 0
    assert differences(averages, average_of(kind, history)) < 1e-6
    assert differences(averages, history[-1]) > 1e-2
    model = load_model(run_dir, World.single())
    assert differences(weights_of(model), averages) == 0
    assert metrics_of(run_dir) == [summary["test"][key] for key in METRICS]


def metrics_of(run_dir: Path, **options: Any) -> list[float]:
    evaluation = load_trained(run_dir, "test", World.single(), **options).evaluate().to_dict()
    return [evaluation[key] for key in METRICS]


@pytest.mark.soak
@pytest.mark.parametrize(
    "changes",
    [
        {"train__average_weights": "swa", "checkpoint__deltas": "consecutive", "checkpoint__every_steps": 1},
        *(
            {**KINDS["ema"], **more}
            for more in (
                {"train__average_start_step": 5},
                {"plan": {"tables": {"*": {"sharding": "table_wise", "tier": "cached", "cache_rows": 250}}}},
                {
                    "plan": {"tables": {"*": {"sharding": "table_wise", "tier": "disk", "cache_rows": 250}}},
                    "storage__dir": "scratch",
                },
                {"pipeline__staleness": 1},
                {"train__accumulate_steps": 2, "train__clip_norm": 0.5},
                {"model__name": "dcnv2", "model__batch_norm": True, "model__dropout": 0.2},
                {"embedding__optimizer__name": "adam", "embedding__optimizer__stepped_rows": "all"},
                {"checkpoint__deltas": "one_shot", "checkpoint__bits": 8, "checkpoint__every_steps": 2},
            )
        ),
    ],
)
def test_resumed_run_keeps_the_average_and_evaluations_do_not_change_training(
    tiny: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    if "storage__dir" in changes:
        changes = {**changes, "storage__dir": str(tmp_path)}
    train(document(tiny, tmp_path / "whole", **changes, train__eval_every_steps=None))
    train(document(tiny, tmp_path / "parts", **changes, train__max_steps=4))
    summary = train(document(tiny, tmp_path / "parts", **changes))
    # Metrics windows in the dense file differ if a run ends earlier.
    whole, parts = (saved_tensors(tmp_path / run, tmp_path / "out") for run in ("whole", "parts"))
    assert whole.keys() == parts.keys() and any(name.startswith("average.") for name in whole)
    assert [name for name in whole if not torch.equal(whole[name], parts[name])] == []
    assert metrics_of(tmp_path / "whole") == metrics_of(tmp_path / "parts")
    assert metrics_of(tmp_path / "parts") == [summary["test"][key] for key in METRICS]
    raw = {key: value for key, value in changes.items() if "average" not in key}
    train(document(tiny, tmp_path / "raw", **raw))
    plain = saved_tensors(tmp_path / "raw", tmp_path / "out")
    assert [name for name in plain if not torch.equal(whole[name], plain[name])] == []


def saved_tensors(run_dir: Path, out: Path) -> dict[str, torch.Tensor]:
    """Return all rows, states and dense tensors of the newest checkpoint, without metrics."""
    shutil.rmtree(out, ignore_errors=True)
    path = newest(run_dir / "checkpoints")
    assert path is not None
    export(path, out, "safetensors", states=True)
    tables = {f"{f.stem}.{name}": t for f in (out / "tables").iterdir() for name, t in load_file(f).items()}
    dense = load_file(out / "dense.safetensors")
    kept = ("model.", "optimizer.", "average.")
    return tables | {name: tensor for name, tensor in dense.items() if name.startswith(kept)}


@pytest.mark.soak
def test_another_average_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    changes = {**KINDS["ema"], "train__max_steps": 1, "train__eval_every_steps": None}
    train(document(tiny, tmp_path / "run", **changes))
    for key, value, was in (
        ("train__average_weights", None, "'ema' and is None"),
        ("train__average_decay", 0.7, "0.6 and is 0.7"),
        ("train__average_start_step", 3, "0 and is 3"),
    ):
        name = key.replace("__", ".")
        with pytest.raises(MesetaError, match=f"another average in step-000000001: {name} was {was} now; set it back"):
            train(document(tiny, tmp_path / "run", **{**changes, key: value, "train__max_steps": 2}))


@pytest.mark.soak
def test_best_weights_are_averages(tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    changes = {"train__finish": "best", "train__eval_every_steps": 1, "train__early_stopping__metric": "auc"}
    summary = train(document(tiny, run, **KINDS["ema"], **changes))
    lines = [line for line in metrics(run) if line["kind"] == "eval"]
    assert summary["best"]["step"] == max(lines, key=lambda line: line["auc"])["step"] < STEPS
    assert summary["test"]["auc"] == summary["best"]["value"]
    assert metrics_of(run) == metrics_of(run, best=True) == [summary["test"][key] for key in METRICS]


@pytest.mark.soak
def test_statistics_of_batch_norm_are_means_over_training_batches(tiny: Path, tmp_path: Path) -> None:
    changes = {"model__name": "dcnv2", "model__batch_norm": True, "train__average_norm_batches": 5}
    train(document(tiny, tmp_path / "run", **KINDS["swa"], **changes))
    model = load_model(tmp_path / "run", World.single())
    layers = [layer for layer in model.modules() if isinstance(layer, SyncBatchNorm)]
    inputs: dict[SyncBatchNorm, list[np.ndarray]] = {layer: [] for layer in layers}
    for layer in layers:
        layer.register_forward_pre_hook(lambda layer, args: inputs[layer].append(args[0].double().numpy()))
    reader = Reader(tiny, "train", ReaderOptions(batch_size=90, shuffle=True, window_rows=500))
    model.train()
    with torch.no_grad():
        for batch in islice(reader.epoch(), 5):
            model.score(batch.dense, model.embeddings(batch.sparse).pooled.values)
    assert layers
    for layer, of_layer in inputs.items():
        mean, variance = (np.mean([f(x) for x in of_layer], axis=0) for f in (column_means, column_variances))
        np.testing.assert_allclose(layer.running_mean.numpy(), mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(layer.running_var.numpy(), variance, rtol=1e-5, atol=1e-6)


def column_means(x: np.ndarray) -> np.ndarray:
    return x.mean(axis=0)


def column_variances(x: np.ndarray) -> np.ndarray:
    return x.var(axis=0, ddof=1)


@pytest.mark.soak
@pytest.mark.parametrize("states", [True, False])
def test_imported_run_has_the_average(tiny: Path, tmp_path: Path, states: bool) -> None:
    train(document(tiny, tmp_path / "run", **KINDS["ema"], **SHORT))
    path = newest(tmp_path / "run" / "checkpoints")
    assert path is not None
    export(path, tmp_path / "exported", "numpy", states=states)
    config = RunConfig.model_validate(document(tiny, tmp_path / "imported", **KINDS["ema"], **SHORT))
    imported, _ = import_export(tmp_path / "exported", config, states=states)
    averages = stored_weights(path, tmp_path / "out")
    assert differences(stored_weights(imported, tmp_path / "out"), averages) == 0
    raw = stored_weights(path, tmp_path / "out", states=True) if states else averages
    assert differences(stored_weights(imported, tmp_path / "out", states=True), raw) == 0
    other = RunConfig.model_validate(document(tiny, tmp_path / "other", **SHORT))
    if states:
        with pytest.raises(MesetaError, match="average_lag float32 per element"):
            import_export(tmp_path / "exported", other, states=True)


@pytest.mark.soak
def test_dense_exports_and_advice_use_averages(tiny: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    summary = train(document(tiny, run_dir, **KINDS["swa"], **SHORT))
    path = newest(run_dir / "checkpoints")
    assert path is not None
    averages = stored_weights(path, tmp_path / "out")
    part, _ = load_dense_part(path)
    dense = {f"model.{name}": value.detach().double().numpy() for name, value in part.model.named_parameters()}
    assert differences(dense, {name: value for name, value in averages.items() if name in dense}) == 0
    with open_advisor(run_dir, 1) as advisor:
        assert advisor._exact_ne == summary["test"]["ne"]
        assert 0 < abs(advisor.ne_loss({"user": 2})) < 0.2
        assert advisor.ne_loss({}) == 0


def test_layers_of_torch_get_the_statistics_of_update_bn() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.0)).eval()
    expected, batches = copy.deepcopy(model), [torch.randn(size, 3) for size in (8, 5, 9)]
    swa_utils.update_bn(batches, expected)
    with _means_over_batches(model, [model[1]]), torch.no_grad():
        for batch in batches:
            model(batch)
    assert all(torch.equal(one, other) for one, other in zip(model.buffers(), expected.buffers(), strict=True))
    assert model[1].momentum == 0.1 and not any(module.training for module in model.modules())


@pytest.mark.soak
def test_tied_parameters_are_averaged_once(tiny: Path, tmp_path: Path) -> None:
    trainer = Trainer(RunConfig.model_validate(document(tiny, tmp_path / "run", **KINDS["swa"])), World.single())
    trainer.model.tied = trainer.model.top_mlp
    tensors = trainer.average.get_tensors()
    names = [name for name in tensors if name.startswith("average.tied.")]
    assert names and all(
        tensors[name].data_ptr() == tensors[name.replace("tied", "top_mlp")].data_ptr() for name in names
    )
    with pytest.raises(MesetaError, match=r"here: dense tensor 'average\..* is missing, but must be \["):
        trainer.average.set_tensors({}, "here")


@pytest.mark.parametrize("entry", [5, {"kind": "swa", "other": 1}, {"kind": "mean"}, {"kind": "ema", "decay": "x"}])
def test_damaged_states_are_refused(entry: Any) -> None:
    with pytest.raises(MesetaError, match="average"):
        saved_average({"average": entry, "embedding_step": 3})
    with pytest.raises(MesetaError, match=r"at step None, which is not an average; use a checkpoint of `meseta train`"):
        saved_average({"average": {"kind": "swa"}})
