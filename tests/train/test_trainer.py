"""Whole runs in this process: models, optimizers, files, schedules and resumption."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load_file

from meseta.comm import World
from meseta.config import RunConfig
from meseta.data.dataset.dataset import Dataset
from meseta.data.read.batch import Batch
from meseta.data.read.batch_reader import BatchIterator, BatchReader
from meseta.measure import threads
from meseta.measure.threads import use_num_threads
from meseta.pipeline import Pipeline, StepResult
from meseta.spec import MesetaError
from meseta.train.metrics import auc, logloss
from meseta.train.predictions import write_predictions
from meseta.train.state import dense_tensors, set_dense_tensors
from meseta.train.trained_model import load_trained
from meseta.train.trainer import Trainer
from sampling import sample
from small_run import (
    criteo_shaped_data,
    final_checksum,
    manifest,
    metrics,
    settings,
    spoil,
    table_checksums,
    train,
    without_times,
)

MODELS = {
    "dlrm": {},
    "dlrm without interaction": {"model__interaction": "none"},
    "dlrm_dcnv2": {"model__name": "dlrm_dcnv2"},
    "logistic_regression": {"model__name": "logistic_regression"},
}


@pytest.fixture(scope="session")
def criteo_shaped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return criteo_shaped_data(tmp_path_factory.getbasetemp() / "data")


def refusal(document: dict[str, Any]) -> str:
    with pytest.raises(MesetaError) as caught:
        train(document)
    return str(caught.value)


# The files of a run


@pytest.mark.parametrize("model", MODELS)
def test_from_a_synthetic_log_to_a_report(criteo_shaped: Path, tmp_path: Path, model: str) -> None:
    run_dir = tmp_path / "run"
    changes = {
        "embedding__optimizer__lr": 0.03,
        "train__log_every_steps": 2,
        "train__epochs": 2,
        "train__eval_every_steps": 10,
        **MODELS[model],
    }
    summary = train(settings(criteo_shaped, run_dir, train__batch_size=360, **changes))
    lines = metrics(run_dir)
    steps = [line["step"] for line in lines if line["kind"] == "train"]
    assert steps == [*range(2, 25, 2)]  # 2 * 4000 rows in batches of 360; the last batch of each epoch is short
    assert [(line["kind"], line["step"]) for line in lines if line["kind"] == "eval"] == [
        ("eval", 10), ("eval", 20), ("eval", 24),
    ]  # fmt: skip
    for line in lines:
        keys = {"loss", "ne", "auc", "lr_dense", "lr_sparse"} if line["kind"] == "train" else {"logloss", "ne", "auc"}
        assert all(math.isfinite(line[key]) for key in keys), line
    train_lines = [line for line in lines if line["kind"] == "train"]
    assert train_lines[-1]["num_samples"] == summary["num_samples"] == 8000
    assert {"data", "input_dist", "lookup", "dense_forward", "backward", "dense_update"} <= set(
        train_lines[0]["stages_s"]
    )
    assert np.mean([line["loss"] for line in train_lines[-5:]]) < np.mean([line["loss"] for line in train_lines[:5]])
    assert summary == json.loads((run_dir / "summary.json").read_text())
    assert summary["test"] == lines[-1] and summary["test"]["num_samples"] == 2000
    teacher = Dataset.load(criteo_shaped).teacher
    assert teacher is not None and summary["teacher"] == {"auc": teacher.auc, "ne": teacher.ne}
    assert summary["num_steps"] == 24 and summary["num_ranks"] == 1 and summary["ids_outside"] == {}
    assert summary["samples_per_s"] == pytest.approx(8000 / summary["train_s"])
    assert summary["checkpoint"].endswith("step-000000024")
    assert "<html" in (run_dir / "report.html").read_text()
    assert {"config.yaml", "dataset.json", "plan.json", "environment.json"} <= {p.name for p in run_dir.iterdir()}
    assert final_checksum(run_dir) == manifest(run_dir)["checksum"]


@pytest.mark.parametrize(
    ("optimizer", "dense"),
    [
        pytest.param(row, dense, marks=() if i == j else pytest.mark.soak)
        for i, row in enumerate(("sgd", "adagrad", "rowwise_adagrad", "adam"))
        for j, dense in enumerate(("adamw", "lamb", "adam", "sgd"))
    ],
)
def test_every_pair_of_optimizers_learns_and_resumes(tiny: Path, tmp_path: Path, optimizer: str, dense: str) -> None:
    rates = {"sgd": 1.0, "adagrad": 0.1, "rowwise_adagrad": 0.1, "adam": 0.02}
    changes = {
        "embedding__optimizer": {"name": optimizer, "lr": rates[optimizer]},
        "dense__optimizer": {"name": dense, "lr": 0.1 if dense == "sgd" else 0.01},
    }
    train(settings(tiny, tmp_path / "whole", **changes, train__max_steps=12))
    losses = [line["loss"] for line in metrics(tmp_path / "whole") if line["kind"] == "train"]
    assert losses[-1] < losses[0]
    train(settings(tiny, tmp_path / "cut", **changes, train__max_steps=6))
    train(settings(tiny, tmp_path / "cut", **changes, train__max_steps=12))
    assert metrics(tmp_path / "cut")[-1]["step"] == 12
    assert final_checksum(tmp_path / "cut") == final_checksum(tmp_path / "whole")


@pytest.fixture(scope="module")
def double(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run in float64. Tests only read it."""
    run_dir = tmp_path_factory.mktemp("double") / "run"
    train(settings(tiny, run_dir, embedding__dtype="float64"))
    return run_dir


def test_float64_makes_the_whole_run_float64(tiny: Path, double: Path, tmp_path: Path) -> None:
    train(settings(tiny, tmp_path / "single"))
    losses = [[line["loss"] for line in metrics(run) if "loss" in line] for run in (tmp_path / "single", double)]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], abs=1e-5)
    entry = manifest(double)["tables"]["user"]
    assert entry["dtype"] == "float64"
    trained = load_trained(double, "test", World.single())
    assert {p.dtype for p in trained.model.parameters()} == {torch.float64}


def test_schedules_appear_in_the_metrics(tiny: Path, tmp_path: Path) -> None:
    schedule = {"kind": "polynomial", "warmup_steps": 4, "decay_start_step": 6, "power": 1.0}
    document = settings(
        tiny, tmp_path / "run", train__max_steps=10, train__log_every_steps=1, embedding__schedule=schedule
    )
    train(document)
    lines = [line for line in metrics(tmp_path / "run") if line["kind"] == "train"]
    factors = [0.25, 0.5, 0.75, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert [line["lr_sparse"] for line in lines] == pytest.approx([0.1 * f for f in factors])
    assert [line["lr_dense"] for line in lines] == [0.01] * 10


def test_more_threads_give_the_same_bits(criteo_shaped: Path, tmp_path: Path) -> None:
    wide = {"model__bottom_mlp": [128, 64], "model__top_mlp": [256, 64], "model__embedding_dim": 16}
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            train(settings(criteo_shaped, tmp_path / str(threads), **wide, train__batch_size=2000))
    finally:
        torch.set_num_threads(1)
    assert final_checksum(tmp_path / "1") == final_checksum(tmp_path / "2")


def test_threads_that_change_between_steps_change_no_bit(
    criteo_shaped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contention, counts, step = threads.CpuContention(num_threads=2, num_processors=2), [], Pipeline._train_step

    def noted(self: Pipeline, *arguments: Any) -> StepResult:
        counts.append(torch.get_num_threads())
        return step(self, *arguments)

    def run(name: str) -> list[float]:
        shape = {"model__bottom_mlp": [128, 64], "model__top_mlp": [256, 64], "model__embedding_dim": 16}
        counts.clear()
        train(settings(criteo_shaped, tmp_path / name, **shape, train__batch_size=1000, train__log_every_steps=1))
        return [line["loss"] for line in metrics(tmp_path / name) if line["kind"] == "train"]

    monkeypatch.setattr(Pipeline, "_train_step", noted)
    monkeypatch.setattr(threads, "current_contention", lambda: contention)
    monkeypatch.setattr(threads, "SAMPLE_WINDOW_S", 0.0)
    monkeypatch.setattr(threads, "MIN_SAMPLES", 1_000_000)  # steps alternate between the numbers of threads
    with use_num_threads(2):
        calm = run("calm")
        assert set(counts) == {2}
        contention.update(2.0)
        crowded = run("crowded")
    assert counts == [1, 2] * (len(counts) // 2) + [1] * (len(counts) % 2) and len(counts) > 2
    assert calm == crowded
    assert final_checksum(tmp_path / "calm") == final_checksum(tmp_path / "crowded")


def test_only_the_seed_determines_a_run(tiny: Path, tmp_path: Path) -> None:
    for name, seed, prefetch in (("a", 0, 1), ("b", 0, 3), ("c", 1, 1)):
        torch.manual_seed(hash(name))
        train(settings(tiny, tmp_path / name, seed=seed, data__prefetch_batches=prefetch, train__max_steps=6))
    assert without_times(metrics(tmp_path / "a")) == without_times(metrics(tmp_path / "b"))
    assert final_checksum(tmp_path / "a") == final_checksum(tmp_path / "b") != final_checksum(tmp_path / "c")


# Resume


COMMON = {"train__epochs": 2, "train__eval_every_steps": 7, "checkpoint__every_steps": 3}


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an uninterrupted run of 28 steps."""
    folder = tmp_path_factory.mktemp("whole")
    train(settings(tiny, folder / "run", **COMMON))
    return folder / "run"


@pytest.mark.parametrize("k", [6, 14])
def test_a_stopped_run_resumes_identically(whole: Path, tiny: Path, tmp_path: Path, k: int) -> None:
    """Step 6 is in the middle of a metrics window of 4 steps and of an epoch of 14 steps. Step 14 ends an epoch."""
    cut, common = tmp_path / "cut", COMMON | {"checkpoint__every_steps": 5}
    train(settings(tiny, cut, **common, train__max_steps=k))
    train(settings(tiny, cut, **common))
    assert final_checksum(cut) == final_checksum(whole)
    steps = [line["step"] for line in metrics(cut) if line["kind"] == "train"]
    assert steps == sorted({*range(4, 29, 4), 28, k})
    # The end of the first part closes a window early and evaluates. All other metrics are equal.
    lines = {(line["kind"], line["step"]): line for line in without_times(metrics(whole))}
    for line in without_times(metrics(cut)):
        if line["step"] == k or (line["kind"] == "train" and line["step"] == k + 4 - k % 4):
            continue
        assert line == lines[line["kind"], line["step"]]


class KilledRun(Exception):
    """Exception that simulates a killed process."""


@pytest.mark.parametrize("when", sample([1, 11, 27], 1, seed=2))
def test_a_killed_run_resumes_identically(
    whole: Path, tiny: Path, tmp_path: Path, when: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints are saved every 3 steps and metrics every 4, so the run resumes in the middle of a window."""
    cut, expected = tmp_path / "cut", json.loads((whole / "summary.json").read_text())
    step = Pipeline._train_step

    def die(self: Pipeline, *arguments: Any) -> Any:
        result = step(self, *arguments)
        if self.model.embeddings.step == when:
            raise KilledRun
        return result

    with monkeypatch.context() as patch, pytest.raises(KilledRun):
        patch.setattr(Pipeline, "_train_step", die)
        train(settings(tiny, cut, **COMMON))
    torch.manual_seed(99)
    summary = train(settings(tiny, cut, **COMMON))
    assert without_times(metrics(cut)) == without_times(metrics(whole))
    assert final_checksum(cut) == final_checksum(whole)
    names = sorted(p.name for p in (cut / "checkpoints").iterdir())
    assert names == ["step-000000027", "step-000000028"]
    for path in names:  # also the one in the middle of a window
        both = [json.loads((d / "checkpoints" / path / "manifest.json").read_text())["checksum"] for d in (cut, whole)]
        assert both[0] == both[1]
    assert without_times([summary["test"]]) == without_times([expected["test"]])
    assert summary["num_samples"] == expected["num_samples"]


def test_a_resumed_run_reads_from_its_position(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first windows are not read again: reading starts once, in the middle."""
    begun = []
    epochs = BatchReader.epochs

    def spy(self: BatchReader, num_epochs: int) -> BatchIterator[Batch]:
        begun.append((self.split, self.get_state()["row"]))
        return epochs(self, num_epochs)

    monkeypatch.setattr(BatchReader, "epochs", spy)
    train(settings(tiny, tmp_path / "run", train__max_steps=5))
    train(settings(tiny, tmp_path / "run", train__max_steps=9))
    assert [row for split, row in begun if split == "train"] == [0, 5 * 90]


def test_a_finished_run_is_shown_again(tiny: Path, tmp_path: Path) -> None:
    document = settings(tiny, tmp_path / "run", train__max_steps=5)
    first = train(document)
    before = metrics(tmp_path / "run")
    again = train(document)
    assert without_times(metrics(tmp_path / "run")) == without_times(before)
    for key in ("num_steps", "num_samples", "teacher", "checkpoint", "stages_s_by_rank", "predicted"):
        assert again[key] == first[key]
    assert json.loads((tmp_path / "run/summary.json").read_text())["stages_s_by_rank"] == first["stages_s_by_rank"]
    assert again["train_s"] == pytest.approx(first["train_s"], abs=0.2)


def test_training_time_accumulates(tiny: Path, tmp_path: Path) -> None:
    train(settings(tiny, tmp_path / "run", train__max_steps=2))
    first = [line for line in metrics(tmp_path / "run") if line["kind"] == "train"][-1]
    train(settings(tiny, tmp_path / "run", train__max_steps=6))
    lines = [line for line in metrics(tmp_path / "run") if line["kind"] == "train"]
    times = [line["time_s"] for line in lines]
    assert times == sorted(times) and times[-1] > first["time_s"]


@pytest.fixture(scope="module")
def six_steps(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of six steps. Tests only read it."""
    folder = tmp_path_factory.mktemp("six")
    train(settings(tiny, folder / "run", train__max_steps=6))
    return folder / "run"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint__resume": "never"}, "checkpoint.resume is 'never'"),
        ({"model__embedding_dim": 8}, "table 'user' has embedding_dim 4 there, but 8 in the model"),
        ({"model__top_mlp": [9]}, "dense tensor 'model.top_mlp.0.bias' is saved as (8,), but the model has (9,)"),
        ({"embedding__optimizer__name": "sgd"}, "row optimizer 'rowwise_adagrad'"),
        ({"dense__optimizer__name": "sgd"}, "the dense part was trained with Adam, but the config has SGD"),
        ({"train__max_steps": 3}, "is at step 6, beyond the 3 steps of the config"),
        ({"seed": 5}, "it was saved with seed 0, but this reader has 5"),
    ],
)
def test_configs_that_do_not_fit_the_checkpoint_are_refused(
    tiny: Path, six_steps: Path, changes: dict[str, Any], message: str
) -> None:
    before = {p: p.read_bytes() for p in six_steps.rglob("*") if p.is_file()}
    assert message in refusal(settings(tiny, six_steps, **changes))
    assert {p: p.read_bytes() for p in six_steps.rglob("*") if p.is_file()} == before


def test_another_batch_size_continues_from_the_same_row(tiny: Path, tmp_path: Path) -> None:
    num_rows = Dataset.load(tiny).splits["train"].num_rows
    train(settings(tiny, tmp_path / "run", train__max_steps=6))
    summary = train(settings(tiny, tmp_path / "run", train__batch_size=200))
    assert summary["num_samples"] == num_rows
    assert summary["num_steps"] == 6 + -(-(num_rows - 6 * 90) // 200)


# Evaluation and prediction


def test_evaluation_and_predictions_equal_a_direct_computation(tiny: Path, double: Path, tmp_path: Path) -> None:
    """The expected values use rows read by pyarrow, tables read from the checkpoint's files, and plain matrix
    products."""
    summary = json.loads((double / "summary.json").read_text())
    trained = load_trained(double, "test", World.single())
    assert write_predictions(trained.model, trained.reader, trained.world, tmp_path / "p.parquet") == len(rows(tiny))
    predictions = pq.read_table(tmp_path / "p.parquet").to_pydict()
    logits, labels = by_hand(tiny, double), [row["label"] for row in rows(tiny)]
    assert predictions["row"] == list(range(len(labels))) and predictions["label"] == labels
    np.testing.assert_allclose(predictions["prediction"], 1 / (1 + np.exp(-logits)), rtol=1e-6)
    assert summary["test"]["logloss"] == pytest.approx(logloss(logits, labels), abs=1e-9)
    assert summary["test"]["auc"] == pytest.approx(auc(logits, labels), abs=1e-9)


def rows(data: Path) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = []
    for path in sorted((data / "test").glob("*.parquet")):
        read += pq.read_table(path).to_pylist()
    return read


def by_hand(data: Path, run_dir: Path) -> np.ndarray:
    """Return the logits [rows] of DLRM with dot interaction."""
    root = Path(json.loads((run_dir / "summary.json").read_text())["checkpoint"])
    tables = {}
    for name, entry in manifest(run_dir)["tables"].items():
        blocks = [pa.ipc.open_file(root / block["path"]).read_all() for block in entry["blocks"]]
        tables[name] = np.array([row for block in blocks for row in block["row"].to_pylist()])
    dense = {name.removeprefix("model."): value for name, value in load_file(root / "dense.safetensors").items()}
    dataset = Dataset.load(data)

    def layers(x: np.ndarray, part: str, last_relu: bool) -> np.ndarray:
        indices = sorted({int(name.split(".")[1]) for name in dense if name.startswith(part)})
        for index in indices:
            x = dense[f"{part}.{index}.weight"] @ x + dense[f"{part}.{index}.bias"]
            if last_relu or index != indices[-1]:
                x = np.maximum(x, 0)
        return x

    logits = []
    for row in rows(data):
        x = layers(np.array([row[d.name] for d in dataset.dense], np.float32).astype(np.float64), "bottom_mlp", True)
        vectors = [x]
        for feature in dataset.sparse:
            ids = row[feature.name] if feature.multi_valued else [row[feature.name]]
            weights = row[f"{feature.name}.weight"] if feature.weighted else [1.0] * len(ids)
            vectors.append(sum((w * tables[feature.name][i] for i, w in zip(ids, weights, strict=True)), np.zeros(4)))
        pairs = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
        logits.append(layers(np.concatenate([x, pairs]), "top_mlp", False)[0])
    return np.array(logits)


@pytest.mark.parametrize("policy", ["drop", "clamp", "hash"])
def test_out_of_range_ids_are_counted_separately_in_training_and_evaluation(
    tiny: Path, tmp_path: Path, policy: str
) -> None:
    small = copy_of(tiny, tmp_path / "small")
    document = json.loads((small / "dataset.json").read_text())
    next(s for s in document["sparse"] if s["name"] == "user")["num_embeddings"] = 100
    next(s for s in document["sparse"] if s["name"] == "tags")["num_embeddings"] = 50
    (small / "dataset.json").write_text(json.dumps(document))
    expected = {}
    for split in ("train", "test"):
        table = [r for p in sorted((small / split).glob("*.parquet")) for r in pq.read_table(p).to_pylist()]
        expected[split] = {
            "user": sum(r["user"] >= 100 for r in table),
            "tags": sum(i >= 50 for r in table for i in r["tags"]),
        }
        assert all(expected[split].values())
    common = {"embedding__id_policy": policy, "train__eval_every_steps": 6, "checkpoint__every_steps": 5}
    train(settings(small, tmp_path / "run", **common, train__max_steps=8))
    summary = train(settings(small, tmp_path / "run", **common))
    assert summary["ids_outside"] == expected["train"]
    assert summary["test"]["ids_outside"] == expected["test"]
    lines = [line for line in metrics(tmp_path / "run") if line["kind"] == "train"]
    assert lines[-1]["ids_outside"] == expected["train"]
    assert [line["ids_outside"]["user"] for line in lines] == sorted(line["ids_outside"]["user"] for line in lines)


def copy_of(data: Path, target: Path) -> Path:
    shutil.copytree(data, target)
    return target


def test_a_broken_dense_value_is_named_and_nothing_is_updated(tiny: Path, tmp_path: Path) -> None:
    broken = copy_of(tiny, tmp_path / "broken")
    spoil(broken, "train", "price", 555, float("nan"))
    text = refusal(settings(broken, tmp_path / "run", data__shuffle=False, checkpoint__every_steps=5))
    assert text.startswith(
        "step 7: the loss is not finite, and nothing was updated: dense feature 'price' of sample 15"
    )
    assert text.endswith("(the last checkpoint is '" + str(tmp_path / "run/checkpoints/step-000000005") + "')")
    assert manifest(tmp_path / "run")["step"] == 5


def test_a_loss_that_grows_without_bound_stops_the_run(tiny: Path, tmp_path: Path) -> None:
    text = refusal(settings(tiny, tmp_path / "run", dense__optimizer={"name": "sgd", "lr": 1e30}))
    assert "the loss is" in text and "lower the learning rates (there is no checkpoint yet)" in text
    assert not list((tmp_path / "run/checkpoints").iterdir())


def test_a_missing_test_split_is_refused_before_training(tiny: Path, tmp_path: Path) -> None:
    lacking = copy_of(tiny, tmp_path / "lacking")
    document = json.loads((lacking / "dataset.json").read_text())
    del document["splits"]["test"]
    (lacking / "dataset.json").write_text(json.dumps(document))
    assert "has no split 'test'" in refusal(settings(lacking, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_run_dir_that_is_a_file_is_refused(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("not a folder")
    assert "cannot be written" in refusal(settings(tiny, tmp_path / "run"))


def test_unknown_table_settings_are_refused(tiny: Path, tmp_path: Path) -> None:
    text = refusal(settings(tiny, tmp_path / "run", embedding__tables={"usr": {}}))
    assert "embedding.tables has 'usr'" in text and "user" in text


def test_a_table_with_its_own_optimizer(tiny: Path, tmp_path: Path) -> None:
    tables = {"user": {"optimizer": {"name": "adam", "lr": 0.01}, "init": {"kind": "normal", "scale": 0.5}}}
    train(settings(tiny, tmp_path / "run", embedding__tables=tables, train__max_steps=2))
    saved = manifest(tmp_path / "run")["tables"]
    assert saved["user"]["optimizer"]["name"] == "adam"
    assert saved["item"]["optimizer"]["name"] == "rowwise_adagrad"


def test_other_features_are_refused_in_evaluation(tiny: Path, six_steps: Path, tmp_path: Path) -> None:
    other = copy_of(tiny, tmp_path / "other")
    document = json.loads((other / "dataset.json").read_text())
    document["sparse"][0]["hash_seed"], name = "0x" + "0" * 16, document["sparse"][0]["name"]
    (other / "dataset.json").write_text(json.dumps(document))
    with pytest.raises(MesetaError, match=f"sparse feature '{name}': seed of the hash, which was"):
        load_trained(six_steps, "test", World.single(), other)


def test_predictions_that_cannot_be_written(six_steps: Path, tmp_path: Path) -> None:
    trained = load_trained(six_steps, "test", World.single())
    with pytest.raises(MesetaError, match="cannot be written"):
        write_predictions(trained.model, trained.reader, trained.world, tmp_path / "nowhere/p.parquet")


def test_predictions_of_broken_rows_are_refused(tiny: Path, six_steps: Path, tmp_path: Path) -> None:
    broken = copy_of(tiny, tmp_path / "broken")
    spoil(broken, "test", "age", 140, float("inf"))
    trained = load_trained(six_steps, "test", World.single(), broken)
    with pytest.raises(MesetaError, match="row 140 has a logit that is not finite"):
        write_predictions(trained.model, trained.reader, trained.world, tmp_path / "p.parquet")
    assert list(tmp_path.glob("*p.parquet*")) == []


def test_the_loaded_model_is_the_trained_one(tiny: Path, tmp_path: Path) -> None:
    document = settings(tiny, tmp_path / "run")
    trainer = Trainer(RunConfig.model_validate(document), World.single())
    trainer.run()
    loaded = load_trained(tmp_path / "run", "test", World.single())
    for trained, stored in zip(trainer.model.embeddings.shards, loaded.model.embeddings.shards, strict=True):
        assert torch.equal(trained.weight, stored.weight)
    assert loaded.step == 14 and table_checksums(tmp_path / "run").keys() == {"user", "item", "city", "tags"}


@pytest.mark.parametrize("fused", [True, False])
def test_step_counters_of_fused_optimizers_follow_their_parameter(fused: bool) -> None:
    """Placement follows torch.optim.Optimizer.load_state_dict. A fused kernel of a GPU refuses counters on the CPU."""
    layer = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.Adam(layer.parameters(), fused=True)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = dense_tensors(layer, optimizer, World.single())
    elsewhere = torch.nn.Linear(2, 1, bias=False, device="meta")
    other = torch.optim.Adam(elsewhere.parameters())
    other.param_groups[0]["fused"] = fused
    elsewhere.load_state_dict = lambda state: None  # type: ignore[assignment, misc, method-assign, return-value]
    set_dense_tensors(elsewhere, other, saved)
    devices = {name: value.device.type for name, value in other.state[elsewhere.weight].items()}
    assert devices == {"step": "meta" if fused else "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}


def test_a_failed_evaluation_keeps_the_checkpoint(tiny: Path, tmp_path: Path) -> None:
    broken = copy_of(tiny, tmp_path / "broken")
    spoil(broken, "test", "age", 140, float("nan"))
    assert "must be finite" in refusal(settings(broken, tmp_path / "run"))
    assert manifest(tmp_path / "run")["step"] == 14
