"""Whole runs on 1, 2 and 4 ranks: equal metrics, equal bits under another plan, resume, errors on all ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from meseta.checkpoint import newest
from meseta.checkpoint.exporting import export
from meseta.comm import World
from meseta.config import RunConfig
from meseta.config.models import MODEL_NAMES
from meseta.data.prepare import PrepareOptions, prepare
from meseta.pipeline import Pipeline
from meseta.spec import MesetaError
from meseta.train.evaluate import evaluate
from meseta.train.predictions import write_predictions
from meseta.train.trained_model import load_trained
from meseta.train.trainer import Trainer
from small_run import (
    REAL_ROWS,
    final_checksum,
    metrics,
    need_and_held,
    settings,
    table_checksums,
    tiny_with_valid,
    train,
    without_times,
)

from .pool import RankPool
from .scenario import IS_SOAK

Ranks = Callable[[int], RankPool]
MIXED = {"tables": {"city": "data_parallel", "item": "column_wise", "tags": "row_wise", "user": "table_wise"}}
HOSTS = {
    "devices_per_host": 2,
    "tables": {
        "city": "table_row_wise",
        "item": "grid",
        "tags": {"sharding": "hot_replicated", "hot_rows": 3},
        "user": "table_column_wise",
    },
}
ROW_WISE = {"tables": {"*": "row_wise"}}
WIDE = {"model__embedding_dim": 32, "model__bottom_mlp": [16]}
PLANS: dict[int, Any] = {1: "auto", 2: MIXED, **({4: HOSTS} if IS_SOAK else {})}
"""Plans by number of ranks. `make test` runs them on up to two."""
STEPS: dict[str, int] = {"train__max_steps": 20} if IS_SOAK else {"train__max_steps": 4, "train__batch_size": 606}
"""More than an epoch. Its last batch is short, and batches do not divide by 4."""


def train_on(ranks: Ranks, size: int, document: dict[str, Any]) -> dict[str, Any]:
    """Train on `size` ranks and return the summary of rank 0. The ranks must agree on metrics and samples."""
    if size == 1:
        return train(document)
    summaries = ranks(size).run(train, document)
    for summary in summaries:
        assert without_times([summary["test"]]) == without_times([summaries[0]["test"]])
        assert summary["num_samples"] == summaries[0]["num_samples"]
    return summaries[0]


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in metrics(run_dir) if line["kind"] == "train"]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """Return the rows of each table in the newest checkpoint."""
    saved = newest(run_dir / "checkpoints")
    assert saved is not None
    files = export(saved, run_dir / "exported", "safetensors")
    return {file.stem: load_file(file)["row"] for file in files if file.parent.name == "tables"}


# The same model on any number of ranks


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float64", 1e-10), pytest.param("float32", 1e-5, marks=pytest.mark.soak)]
)
def test_one_process_and_many_train_the_same_model(
    ranks: Ranks, tiny: Path, tmp_path: Path, dtype: str, tolerance: float
) -> None:
    """Plans are mixed, and 4 ranks are two hosts."""
    common = {
        **WIDE,
        "embedding__dtype": dtype,
        "train__epochs": 2,
        "train__log_every_steps": 1,
        **STEPS,
    }
    common["embedding__optimizer__lr"] = 0.02
    plans: dict[int, Any] = {1: "auto", **({2: MIXED} if IS_SOAK else {}), 4: HOSTS}
    summaries = {
        size: train_on(ranks, size, settings(tiny, tmp_path / str(size), **common, plan=plan))
        for size, plan in plans.items()
    }
    alone = weights(tmp_path / "1")
    for size in plans.keys() - {1}:
        np.testing.assert_allclose(losses(tmp_path / str(size)), losses(tmp_path / "1"), rtol=0, atol=tolerance)
        for name in ("auc", "ne", "logloss", "calibration"):
            assert summaries[size]["test"][name] == pytest.approx(summaries[1]["test"][name], abs=max(1e-6, tolerance))
        assert summaries[size]["num_samples"] == summaries[1]["num_samples"]
        assert summaries[size]["num_ranks"] == size
        for name, weight in weights(tmp_path / str(size)).items():
            torch.testing.assert_close(weight, alone[name], rtol=0, atol=tolerance)


FEW = {"logistic_regression"}
"""Models that `make test` trains here. Most other files of this folder train some of the others on several ranks."""
MODELS = [pytest.param(name, marks=[] if name in FEW else pytest.mark.soak) for name in MODEL_NAMES]


@pytest.mark.parametrize(
    "model", [*MODELS, pytest.param("own_models:Plain", marks=pytest.mark.soak), "own_models:Regularised"]
)
def test_every_model_learns_and_is_the_same_on_two_ranks(ranks: Ranks, tiny: Path, tmp_path: Path, model: str) -> None:
    common = {
        **({} if model == "logistic_regression" else WIDE),
        "embedding__dtype": "float64",
        "model__name": model,
        "model__top_mlp": [32],
        "model__deep_mlp": [8],
        "model__attention_dim": 8,
        "model__cin_layers": [6, 4],
        "model__expert_mlp": [8],
        "model__tower_mlp": [4],
        "embedding__init__scale": 0.03,
        "embedding__optimizer__lr": 0.02,
        "dense__optimizer__lr": 0.02,
        "train__batch_size": 90 if IS_SOAK else 180,
        "train__epochs": 2,
    }
    one = train(settings(tiny, tmp_path / "one", **common))
    assert one["test"]["auc"] > 0.7  # that of a constant is 0.5
    assert (tmp_path / "one" / "report.html").stat().st_size > 1000
    plan = "auto" if model == "logistic_regression" else MIXED
    two = train_on(ranks, 2, settings(tiny, tmp_path / "two", **common, plan=plan))
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=0, atol=1e-10)
    assert two["test"]["auc"] == pytest.approx(one["test"]["auc"], abs=1e-6)


def test_loss_terms_are_reported_and_equal_on_any_number_of_ranks(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """Each line has the means since the previous line, also in a run that was resumed between two lines."""
    common = {
        "embedding__dtype": "float64",
        "model": {"name": "own_models:TwoBlocks", "embedding_dim": 32},
        "train__max_steps": 4,
        "train__log_every_steps": 2,
    }
    for size, plan in PLANS.items():
        train_on(ranks, size, settings(tiny, tmp_path / str(size), **common, plan=plan))
    for _ in range(2):
        train(settings(tiny, tmp_path / "again", **common, checkpoint__every_steps=3))
        shutil.rmtree(newest(tmp_path / "again/checkpoints"))  # so that the second run resumes from step 3
    each = train(settings(tiny, tmp_path / "each", **{**common, "train__log_every_steps": 1}))
    lines = {
        name: [line for line in metrics(tmp_path / name) if line["kind"] == "train" and line["step"] % 2 == 0]
        for name in (*map(str, PLANS), "again", "each")
    }
    assert each["num_steps"] == 4 and [line["step"] for line in lines["1"]] == [2, 4]
    for name in lines.keys() - {"1", "each"}:
        for line, of_one in zip(lines[name], lines["1"], strict=True):
            assert set(line["loss_terms"]) == {"first", "second"}
            assert line["loss_terms"] == pytest.approx(of_one["loss_terms"], rel=0, abs=1e-10)
            assert line["loss"] == pytest.approx(of_one["loss"], rel=0, abs=1e-10)
    steps = [line for line in metrics(tmp_path / "each") if line["kind"] == "train" and line["step"] <= 2]
    mean = np.mean([line["loss_terms"]["first"] for line in steps])  # batches of one size
    assert lines["1"][0]["loss_terms"]["first"] == pytest.approx(mean, rel=1e-9)


def test_global_loss_terms_are_equal_on_any_number_of_ranks(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """Gradients equal those of one process. 303 samples do not divide by 2 or 4, and the last batch is padded."""
    common = {
        "embedding__dtype": "float64",
        "model": {"name": "own_models:GlobalLoss", "embedding_dim": 32},
        "train__batch_size": 303,
        "train__log_every_steps": 2,
        "data__last_batch": "pad",
    }
    for size, plan in PLANS.items():
        train_on(ranks, size, settings(tiny, tmp_path / str(size), **common, plan=plan))
    lines = {n: [line for line in metrics(tmp_path / str(n)) if line["kind"] == "train"] for n in PLANS}
    for size in PLANS.keys() - {1}:
        for line, of_one in zip(lines[size], lines[1], strict=True):
            assert set(line["loss_terms"]) == {"calibration", "pairs"} and min(line["loss_terms"].values()) > 0
            assert line["loss_terms"] == pytest.approx(of_one["loss_terms"], rel=0, abs=1e-10)
            assert line["loss"] == pytest.approx(of_one["loss"], rel=0, abs=1e-10)
    with pytest.raises(MesetaError, match=r"set train\.accumulate_steps=1"):
        train(settings(tiny, tmp_path / "parts", **common, train__accumulate_steps=2))


def test_tables_of_several_widths_and_reductions_on_any_number_of_ranks(
    ranks: Ranks, tiny: Path, tmp_path: Path
) -> None:
    tables = {"user": {"embedding_dim": 48}, "item": {"embedding_dim": 64}, "tags": {"pooling": "mean"}}
    common = {**WIDE, "embedding__dtype": "float64", "embedding__tables": tables, "train__max_steps": 4}
    common["train__log_every_steps"] = 1
    for size, plan in PLANS.items():
        document = settings(tiny, tmp_path / str(size), **common, model__name="dlrm_dcnv2", plan=plan)
        train_on(ranks, size, document)
    for size in PLANS:
        np.testing.assert_allclose(losses(tmp_path / str(size)), losses(tmp_path / "1"), rtol=0, atol=1e-10)


@pytest.mark.soak  # test_global_layers.py trains such batches with dropout and batch norm in `make test`
def test_fewer_samples_than_ranks(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    common = {
        "embedding__dtype": "float64",
        "train__batch_size": 3,
        "train__max_steps": 5,
        "train__log_every_steps": 2,
        "train__eval_batch_size": 70,
    }
    one = train(settings(tiny, tmp_path / "one", **common))
    four = train_on(ranks, 4, settings(tiny, tmp_path / "four", **common))
    np.testing.assert_allclose(losses(tmp_path / "four"), losses(tmp_path / "one"), rtol=0, atol=1e-10)
    assert four["num_samples"] == one["num_samples"] == 15


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_another_plan_gives_the_same_bits(ranks: Ranks, tiny: Path, tmp_path: Path, size: int) -> None:
    """No bag is summed across row shards ('tags' is the only feature with bags), and no table is replicated."""
    plans = {
        "table_wise": {"tables": {"*": "table_wise"}},
        "column_wise": {"tables": {"*": "column_wise"}},
        "row_wise": {"tables": {"*": "row_wise", "tags": "table_wise"}},
        "mixed": {"tables": {"user": "row_wise", "item": "column_wise", "city": "table_wise", "tags": "column_wise"}},
    }
    if not IS_SOAK:  # "mixed" has all three schemes
        plans = {name: plans[name] for name in ("table_wise", "mixed")}
    common = {**WIDE, "train__epochs": 2, **STEPS}
    for name, plan in plans.items():
        train_on(ranks, size, settings(tiny, tmp_path / name, **common, plan=plan))
    expected = tmp_path / "table_wise"
    for name in plans:
        assert without_times(metrics(tmp_path / name)) == without_times(metrics(expected))
        assert table_checksums(tmp_path / name) == table_checksums(expected)
        assert final_checksum(tmp_path / name) == final_checksum(expected)


@pytest.mark.skipif(not REAL_ROWS.exists(), reason=f"needs {REAL_ROWS}")
def test_real_criteo_rows_on_one_and_two_ranks(ranks: Ranks, tmp_path: Path) -> None:
    data = tmp_path / "data"
    dataset = prepare(PrepareOptions(sources=[str(REAL_ROWS)], out=data, hash_rows=2000, test_fraction=0.1))
    num_rows = sum(split.num_rows for split in dataset.splits.values())
    assert num_rows == len(REAL_ROWS.read_bytes().splitlines())
    common = {"train__batch_size": 512, "embedding__dtype": "float64", "model__embedding_dim": 8}
    summaries = [train_on(ranks, n, settings(data, tmp_path / str(n), **common)) for n in (1, 2)]
    for name in ("auc", "ne", "logloss", "calibration"):
        assert summaries[1]["test"][name] == pytest.approx(summaries[0]["test"][name], abs=1e-6)
    assert summaries[0]["num_samples"] == summaries[1]["num_samples"] == dataset.splits["train"].num_rows
    np.testing.assert_allclose(losses(tmp_path / "1"), losses(tmp_path / "2"), rtol=0, atol=1e-10)


# Resume


class Killed(Exception):
    """Exception that simulates a killed process."""


def train_until(document: dict[str, Any], when: int) -> None:
    """Train until step `when`, which need not end a window or write a checkpoint. Runs on every rank."""
    step = Pipeline._train_step

    def die(self: Pipeline, *arguments: Any) -> Any:
        result = step(self, *arguments)
        if self.model.embeddings.step == when:
            raise Killed
        return result

    Pipeline._train_step = die  # type: ignore[method-assign]
    try:
        with pytest.raises(Killed):
            train(document)
    finally:
        Pipeline._train_step = step  # type: ignore[method-assign]


@pytest.mark.parametrize(("size", "when"), [(2, 5), pytest.param(4, 8, marks=pytest.mark.soak)])
def test_an_interrupted_run_resumes_identically(ranks: Ranks, tiny: Path, tmp_path: Path, size: int, when: int) -> None:
    common = {"train__epochs": 2, "train__batch_size": 250, **WIDE, "plan": MIXED}
    if not IS_SOAK:
        common["train__max_steps"] = 7
    common |= {"checkpoint__every_steps": 3, "checkpoint__keep_last": 9}
    train_on(ranks, size, settings(tiny, tmp_path / "whole", **common))
    ranks(size).run(train_until, settings(tiny, tmp_path / "cut", **common), when)
    train_on(ranks, size, settings(tiny, tmp_path / "cut", **common))
    assert without_times(metrics(tmp_path / "cut")) == without_times(metrics(tmp_path / "whole"))
    for path in sorted((tmp_path / "whole/checkpoints").iterdir()):  # some are in the middle of windows
        manifest = json.loads((tmp_path / "cut/checkpoints" / path.name / "manifest.json").read_text())
        assert manifest["checksum"] == json.loads((path / "manifest.json").read_text())["checksum"]


def held(document: dict[str, Any]) -> list[tuple[str, tuple[int, int], tuple[int, int], torch.Tensor, dict[str, Any]]]:
    """Return the shards of a resumed run before its next step. Runs on every rank."""
    trainer = Trainer(RunConfig.model_validate(document), World.current())
    trainer.run_dir.unlock()  # it will not run, and other ranks open the same folder
    shards = trainer.model.embeddings.shards
    return [(s.shard.table, s.shard.rows, s.shard.columns, s.weight, s.state) for s in shards]


def evaluate_here(run_dir: Path) -> dict[str, Any]:
    """Evaluate on the test split. Runs on every rank."""
    trained = load_trained(run_dir, "test", World.current())
    return evaluate(trained.model, trained.reader, trained.world).to_dict()


def test_saved_on_four_ranks_and_resumed_on_others(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    common = {**WIDE, "embedding__dtype": "float64", "train__epochs": 2, "train__batch_size": 606}
    saved = tmp_path / "saved"
    summary = train_on(ranks, 4, settings(tiny, saved, **common, plan=MIXED, train__max_steps=2))
    whole = {s[0]: s for s in held(settings(tiny, saved, **common))}
    for size, plan in ((2, MIXED), (4, ROW_WISE), *([(2, ROW_WISE)] if IS_SOAK else [])):
        for rank in ranks(size).run(held, settings(tiny, saved, **common, plan=plan)):
            assert rank
            for table, rows, columns, weight, state in rank:
                assert torch.equal(weight, whole[table][3][slice(*rows), slice(*columns)])
                for name, value in state.items():
                    assert torch.equal(value, whole[table][4][name][slice(*rows)])
    for evaluation in (evaluate_here(saved), *ranks(2).run(evaluate_here, saved)):
        for name in ("auc", "ne", "logloss", "calibration"):
            assert evaluation[name] == pytest.approx(summary["test"][name], abs=1e-6)
    ends = {}
    plans: dict[int, Any] = {1: "auto", 2: ROW_WISE, **({4: MIXED} if IS_SOAK else {})}
    for size, plan in plans.items():
        shutil.copytree(saved, tmp_path / str(size))
        ends[size] = train_on(ranks, size, settings(tiny, tmp_path / str(size), **common, plan=plan))
        assert ends[size]["num_steps"] == 6
    for size in plans.keys() - {1}:
        np.testing.assert_allclose(losses(tmp_path / str(size)), losses(tmp_path / "1"), rtol=0, atol=1e-9)
        assert ends[size]["test"]["auc"] == pytest.approx(ends[1]["test"]["auc"], abs=1e-6)


# Predictions and errors


def predict_here(run_dir: Path, out: Path) -> int:
    """Predict the test split. Runs on every rank."""
    trained = load_trained(run_dir, "test", World.current())
    return write_predictions(trained.model, trained.reader, trained.world, out, ["user", "tags"])


def message_of(function: Callable[..., Any], *args: Any) -> str:
    """Return the error of a call. Runs on every rank."""
    with pytest.raises(MesetaError) as caught:
        function(*args)
    return str(caught.value)


def test_predictions_on_two_ranks_are_those_of_one(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    train(settings(tiny, tmp_path / "run", train__max_steps=4, plan=ROW_WISE))
    num_rows = predict_here(tmp_path / "run", tmp_path / "one.parquet")
    assert ranks(2).run(predict_here, tmp_path / "run", tmp_path / "two.parquet") == [num_rows] * 2
    one, two = (pq.read_table(tmp_path / name) for name in ("one.parquet", "two.parquet"))
    assert one.column_names == two.column_names == ["row", "user", "tags", "prediction", "label"]
    for name in ("row", "user", "tags", "label"):
        assert one[name] == two[name]
    np.testing.assert_allclose(one["prediction"].to_numpy(), two["prediction"].to_numpy(), rtol=1e-5)
    nowhere = tmp_path / "nowhere" / "p.parquet"
    texts = ranks(2).run(message_of, predict_here, tmp_path / "run", nowhere)
    assert texts[0] == texts[1] and "cannot be written" in texts[0]


def spoiled(data: Path, target: Path) -> Path:
    """Return a copy in which row 555 of the training split has no price."""
    shutil.copytree(data, target)
    [path] = (target / "train").glob("*.parquet")
    table = pq.read_table(path)
    price = table["price"].to_numpy().copy()
    price[555] = np.nan
    index = table.schema.get_field_index("price")
    pq.write_table(table.set_column(index, table.schema.field(index), [price]), path)
    return target


def test_a_broken_value_on_one_rank_stops_all_before_the_update(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    data = spoiled(tiny, tmp_path / "data")
    document = settings(data, tmp_path / "run", data__shuffle=False, checkpoint__every_steps=5, plan=ROW_WISE)
    texts = ranks(2).run(message_of, train, document)
    assert texts[0] == texts[1] and texts[0].startswith("step 7: the loss is not finite")
    assert "dense feature 'price' of sample 15 is nan" in texts[0] and "step-000000005" in texts[0]


def test_a_refused_id_names_step_feature_and_sample_on_all_ranks(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(tiny, data)
    rows = pq.read_table(data / "train")["user"].to_pylist()
    document = json.loads((data / "dataset.json").read_text())
    limit = max(rows[:500])
    next(s for s in document["sparse"] if s["name"] == "user")["num_embeddings"] = limit
    (data / "dataset.json").write_text(json.dumps(document))
    first = next(i for i, row in enumerate(rows) if row >= limit)
    texts = ranks(2).run(message_of, train, settings(data, tmp_path / "run", data__shuffle=False, plan=ROW_WISE))
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"step {first // 90 + 1}: table 'user': id {rows[first]} from feature 'user', ")
    assert f"sample {first % 90}, is outside 0..{limit - 1}" in texts[0]


def test_an_unwritable_run_dir_raises_on_all_ranks(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("not a folder")
    texts = ranks(2).run(message_of, train, settings(tiny, tmp_path / "run"))
    assert texts[0] == texts[1] and "cannot be written" in texts[0]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"tables": {"user": "table_wise"}}, "'item' is not placed"),
        ({"tables": {"*": "table_whise"}}, "table_wise"),
        ({"tables": {"*": {"sharding": "hot_replicated"}}}, "hot_rows must be in 1.."),
        ({"devices_per_host": 1, "tables": {"*": {"sharding": "grid", "ranks": [5, 0]}}}, "in 0..1, got [5]"),
        (
            {"devices_per_host": 1, "tables": {"*": {"sharding": "table_row_wise", "ranks": [0, 1]}}},
            "must be on one host",
        ),
    ],
)
def test_a_plan_that_does_not_fit(ranks: Ranks, tiny: Path, tmp_path: Path, plan: Any, message: str) -> None:
    texts = ranks(2).run(message_of, train, settings(tiny, tmp_path / "run", plan=plan))
    assert texts[0] == texts[1] and message in texts[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("key", "document", "message"),
    [
        ("topology", {"num_hosts": 2, "devices_per_host": 1}, "but this run has 2 ranks, 2 per host"),
        ("topology", {"devices_per_host": 2, "hbm_byte": 5}, "unknown key 'hbm_byte'; did you mean 'hbm_bytes'?"),
        ("topology", {"devices_per_host": 2, "hbm_bytes": 1000}, "hbm"),
        ("cost_model", {"device": "cpu"}, "its format is unknown"),
        ("constraints", {"tables": {"usr": {"ranks": [0]}}}, "'usr'"),
        ("constraints", {"tables": {"user": {"ranks": [7]}}}, "7"),
    ],
)
def test_invalid_planner_files(
    ranks: Ranks, tiny: Path, tmp_path: Path, key: str, document: dict[str, Any], message: str
) -> None:
    path = tmp_path / "given.yaml"
    path.write_text(json.dumps(document))
    config = settings(tiny, tmp_path / "run", **{f"planner__{key}": str(path)})
    texts = ranks(2).run(message_of, train, config)
    assert texts[0] == texts[1] and message in texts[0], texts[0]
    assert not (tmp_path / "run").exists()


def test_two_ranks_allocate_the_predicted_bytes(tmp_path: Path, tiny: Path, ranks: Ranks) -> None:
    adagrad = {"embedding__optimizer": {"name": "adagrad"}}
    whole = need_and_held(settings(tiny, tmp_path / "one", **adagrad))
    plan = {"tables": {"user": {"sharding": "row_wise"}, "*": {"sharding": "table_wise"}}}
    results = ranks(2).run(need_and_held, settings(tiny, tmp_path / "two", plan=plan, **adagrad))
    assert all((tables, states) == (rows, held) for tables, states, rows, held in results)
    assert sum(tables for tables, *_ in results) == whole[0]


def test_several_ranks_select_the_same_weights(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """The first evaluation is the best, rates fall at every other one, and the run is interrupted between."""
    common = {
        "train__eval_every_steps": 2,
        "train__log_every_steps": 2,
        "train__early_stopping": {"min_delta": 10.0, "patience": 3},
        "train__finish": "best",
        "schedule": {"kind": "plateau", "plateau_patience": 1, "step_factor": 0.5},
        "train__epochs": 3,
        "plan": ROW_WISE,
    }
    document = settings(tiny_with_valid(tiny), tmp_path / "run", **common)
    train_on(ranks, 2, {**document, "train": {**document["train"], "max_steps": 5}})
    summary = train_on(ranks, 2, document)
    alone = train(settings(tiny_with_valid(tiny), tmp_path / "alone", **common))
    assert summary["num_steps"] == alone["num_steps"] == 8
    assert summary["test"]["step"] == summary["valid"]["step"] == 2
    for split in ("valid", "test"):
        assert summary[split]["num_samples"] == alone[split]["num_samples"]
        assert summary[split]["auc"] == pytest.approx(alone[split]["auc"], abs=1e-5)
    lines = [[line for line in metrics(tmp_path / name) if line["kind"] == "train"] for name in ("run", "alone")]
    rates = [[line["lr_dense"] for line in run if line["step"] % 2 == 0] for run in lines]
    assert rates[0] == rates[1] == [0.01, 0.01, 0.005, 0.0025]
    assert set(ranks(2).run(step_loaded, tmp_path / "run")) == {2}


def step_loaded(run_dir: Path) -> int:
    """Return the step of the weights that `meseta predict` loads."""
    return load_trained(run_dir, "test", World.current()).step
