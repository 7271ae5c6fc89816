"""`meseta predict --data` on raw files gives the bits of the same rows in a prepared dataset."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bad_input.commands import run_here, tree
from data.new_files import KINDS, NUM_TRAIN, columns, of_csv, part, without, write_csv, write_lines, write_parquet
from meseta.comm import World
from meseta.data.dataset.dataset import Dataset
from meseta.data.prepare import PrepareOptions, prepare
from meseta.spec import MesetaError
from meseta.train.predictions import write_predictions, write_raw_predictions
from meseta.train.trained_model import load_for_raw_rows, load_trained
from small_run import settings, train, write_config

NUM_NEW = 150
FEW_EXPERTS = {"model__name": "mmoe", "model__num_experts": 2, "model__expert_mlp": [8], "model__tower_mlp": [4]}


def trained(folder: Path, kind: str, *, vocabulary: bool = False, **changes: Any) -> tuple[Path, Path, Path]:
    """Train a run, write its predictions of the test split to before.parquet and delete its data. Return (run, labeled
    rows, unlabeled rows)."""
    sources, test, new, options = KINDS[kind](folder)
    data, run = folder / "data", folder / "run"
    prepare(
        PrepareOptions(
            sources=list(map(str, sources)), test_files=[str(test)], out=data, hash_rows=70, vocabulary=vocabulary,
            min_count=2, **options,
        )
    )  # fmt: skip
    train(settings(data, run, train__max_steps=2, train__eval_batch_size=64, **changes))
    before = load_trained(run, "test", World.single())
    write_predictions(before.model, before.reader, before.world, folder / "before.parquet")
    shutil.rmtree(data)
    return run, test, new


def predicted(run: Path, source: Path, out: Path, *keys: str) -> pa.Table:
    loaded = load_for_raw_rows(run, [str(source)], World.single(), keys=keys)
    assert write_raw_predictions(loaded.model, loaded.reader, loaded.world, out, loaded.logit_shift).num_rows == NUM_NEW
    return pq.read_table(out)


@pytest.fixture(scope="module")
def run_of_kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    kind = request.param
    return trained(tmp_path_factory.mktemp(kind), kind, vocabulary=kind in ("csv", "libffm"))


@pytest.mark.parametrize(
    "run_of_kind",
    [pytest.param(kind, marks=[pytest.mark.soak] * (kind in ("libsvm", "qid"))) for kind in KINDS],  # as libffm
    indirect=True,
)
def test_the_same_bits_after_the_data_are_deleted(run_of_kind: tuple[Path, Path, Path], tmp_path: Path) -> None:
    run, test, new = run_of_kind
    before = pq.read_table(run.with_name("before.parquet"))
    predictions = predicted(run, test, tmp_path / "labelled.parquet")
    assert predictions.equals(before.select(["row", "prediction", "label"]))
    predictions = predicted(run, new, tmp_path / "bare.parquet")
    assert predictions.equals(before.select(["row", "prediction"]))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of single-valued columns."""
    folder = tmp_path_factory.mktemp("new")
    table = without(columns(), "tags", "importance")
    source = write_csv(folder / "train.csv", part(table, 0, NUM_TRAIN))
    test = write_csv(folder / "test.csv", part(table, NUM_TRAIN, 500))
    prepare(PrepareOptions(sources=[str(source)], test_files=[str(test)], out=folder / "data", vocabulary=True,
                           min_count=2, sparse=["shop", "city", "hour"], ignore=["when"]))  # fmt: skip
    train(settings(folder / "data", folder / "run", train__max_steps=4))
    before = load_trained(folder / "run", "test", World.single())
    write_predictions(before.model, before.reader, before.world, folder / "before.parquet")
    return folder


def new_rows(case: Path) -> dict[str, list[Any]]:
    return part(without(columns(), "tags", "importance"), NUM_TRAIN, 500)


def test_key_columns_are_copied_to_the_output(case: Path, tmp_path: Path) -> None:
    rows = {**without(new_rows(case), "click"), "note": [f"a,\n{row}" for row in range(NUM_NEW)]}
    rows = dict(reversed(list(rows.items())))
    write_csv(tmp_path / "new.csv", rows)
    ended = run_here("predict", case / "run", "--data", tmp_path / "new.csv", "--out", tmp_path / "out.csv",
                     "--keys", "note, price,age")  # fmt: skip
    assert ended.code == 0, ended.err
    assert f"{NUM_NEW} predictions to" in ended.out and "AUC" not in ended.out and "not seen" in ended.out
    with (tmp_path / "out.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    expected = pq.read_table(case / "before.parquet")
    assert list(lines[0]) == ["row", "note", "price", "age", "prediction"]
    for name in ("note", "price", "age"):
        assert [line[name] for line in lines] == [str(value) for value in rows[name]]
    assert [int(line["row"]) for line in lines] == list(range(NUM_NEW))
    predictions = np.array([line["prediction"] for line in lines], np.float32)
    assert np.array_equal(predictions, expected["prediction"].to_numpy())


def test_columns_of_parquet_keep_their_types(case: Path, tmp_path: Path) -> None:
    rows = {**new_rows(case), "lists": [[1, 2]] * NUM_NEW, "seen": [True] * NUM_NEW}
    write_parquet(tmp_path / "new.parquet", rows)
    predictions = predicted(
        case / "run", tmp_path / "new.parquet", tmp_path / "p.parquet", "lists", "hour", "seen", "age"
    )
    source = pq.read_table(tmp_path / "new.parquet")
    assert predictions.select(["lists", "hour", "seen", "age"]).equals(source.select(["lists", "hour", "seen", "age"]))
    assert predictions.select(["row", "prediction", "label"]).equals(pq.read_table(case / "before.parquet"))
    out = tmp_path / "out.csv"
    ended = run_here("predict", case / "run", "--data", tmp_path / "new.parquet", "--out", out, "--keys", "lists")
    assert ended.code == 1 and "CSV does not support" in ended.err and not out.exists()


def test_rows_with_labels_give_the_metrics_of_eval(case: Path, tmp_path: Path) -> None:
    ended = run_here("predict", case / "run", "--data", case / "test.csv", "--out", tmp_path / "p.csv")
    expected = json.loads(run_here("eval", case / "run").out)
    assert f"AUC {expected['auc']:.4f}  NE {expected['ne']:.4f}  logloss {expected['logloss']:.4f}" in ended.out
    rows = {**new_rows(case), "click": [0.5] * NUM_NEW}
    write_csv(tmp_path / "half.csv", rows)
    ended = run_here("predict", case / "run", "--data", tmp_path / "half.csv", "--out", tmp_path / "p.csv")
    assert ended.code == 0 and "note: no metrics: metrics" in ended.err


def test_a_prediction_does_not_depend_on_its_batch(case: Path, tmp_path: Path) -> None:
    """A row gets the same bits alone and at any position of a batch of any size."""
    expected = pq.read_table(case / "before.parquet")["prediction"].to_numpy()
    config = (case / "run/config.yaml").read_text()
    for size in (1, 7, 1000):
        run = tmp_path / f"run-{size}"
        shutil.copytree(case / "run", run)
        (run / "config.yaml").write_text(config.replace("eval_batch_size: 130", f"eval_batch_size: {size}"))
        predictions = predicted(run, case / "test.csv", tmp_path / f"{size}.parquet")
        assert np.array_equal(predictions["prediction"].to_numpy(), expected), size
    write_csv(tmp_path / "some.csv", part(new_rows(case), 41, 60))
    loaded = load_for_raw_rows(case / "run", [str(tmp_path / "some.csv")], World.single())
    write_raw_predictions(loaded.model, loaded.reader, loaded.world, tmp_path / "some.parquet")
    assert np.array_equal(pq.read_table(tmp_path / "some.parquet")["prediction"].to_numpy(), expected[41:60])


def test_a_prepared_dataset_without_labels(case: Path, tmp_path: Path) -> None:
    write_csv(tmp_path / "new.csv", without(new_rows(case), "click"))
    ended = run_here("prepare", tmp_path / "new.csv", "--like", case / "run", "--out", tmp_path / "data")
    assert ended.code == 0 and "without labels" in ended.out
    ended = run_here("predict", case / "run", "--data", tmp_path / "data", "--out", tmp_path / "p.parquet")
    assert ended.code == 0, ended.err
    expected = pq.read_table(case / "before.parquet").select(["row", "prediction"])
    assert pq.read_table(tmp_path / "p.parquet").equals(expected)
    config = write_config(tmp_path / "c.yaml", settings(tmp_path / "data", tmp_path / "other"))
    for arguments in (["eval", case / "run", "--data", tmp_path / "data"], ["train", config]):
        ended = run_here(*arguments)
        assert ended.code == 1 and len(ended.errors) == 1 and "has no labels, so it cannot be" in ended.errors[0]
    assert run_here("data", "stats", tmp_path / "data").code == 0


def test_refused_inputs_leave_no_files(case: Path, tmp_path: Path) -> None:
    rows = new_rows(case)
    (tmp_path / "files").mkdir()
    write_csv(tmp_path / "files/less.csv", without(rows, "shop", "city"))
    write_csv(tmp_path / "files/bad.csv", {**rows, "price": [*[1] * 149, "dear"]})
    (tmp_path / "files/cut.csv.gz").write_bytes(gzip.compress((case / "test.csv").read_bytes())[:-200])
    files = tmp_path / "files"
    for source, more, message in (
        (files / "less.csv", [], "lacks 'shop', 'city'; the model needs all features on which it was trained"),
        (files / "bad.csv", [], "line 151, column 'price': 'dear' is not a number"),
        (files / "cut.csv.gz", [], "is truncated or damaged"),
        (files / "none.csv", [], "no such file"),
        (files, [], "cut.csv.gz' is truncated or damaged"),
        (case / "test.csv", ["--keys", "shpo"], "has no column 'shpo'; did you mean 'shop'?"),
        (case / "test.csv", ["--split", "valid"], "raw files have no split 'valid'"),
    ):
        ended = run_here("predict", case / "run", "--data", source, "--out", tmp_path / "p.csv", *more)
        assert ended.code == 1 and len(ended.errors) == 1 and message in ended.errors[0], ended.err
        assert sorted(path.name for path in tmp_path.iterdir()) == ["files"]
    ended = run_here("predict", case / "run", "--data", case / "test.csv", "--out", tmp_path / "p.txt")
    assert ended.code == 1 and "must end in .csv or .parquet" in ended.err


def test_ctrl_c_leaves_no_files(case: Path, tmp_path: Path) -> None:
    from meseta.data.read.new_batches import NewBatches

    whole = NewBatches.take

    def interrupt(self: NewBatches, num_rows: int) -> pa.Table:
        if num_rows < 130:  # the second batch
            raise KeyboardInterrupt
        return whole(self, num_rows)

    with mock.patch.object(NewBatches, "take", interrupt):
        ended = run_here("predict", case / "run", "--data", case / "test.csv", "--out", tmp_path / "p.csv")
    assert ended.code == 130 and not list(tmp_path.iterdir())


def test_a_run_of_an_older_version_reads_its_data(case: Path, tmp_path: Path) -> None:
    shutil.copytree(case / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/vocabulary")
    predictions = predicted(tmp_path / "run", case / "test.csv", tmp_path / "p.parquet")
    assert predictions.equals(pq.read_table(case / "before.parquet"))
    (case / "data").rename(case / "moved")
    try:
        with pytest.raises(MesetaError, match=r"vocabulary .* cannot be read .*; "):
            predicted(tmp_path / "run", case / "test.csv", tmp_path / "p.parquet")
    finally:
        (case / "moved").rename(case / "data")


def test_a_run_stores_its_vocabularies(tmp_path: Path) -> None:
    """Vocabularies get the file names of prepare, whatever the dataset calls them, and no other file is replaced."""
    sources, _, _, options = of_csv(tmp_path)
    data, run = tmp_path / "data", tmp_path / "run"
    prepare(PrepareOptions(sources=list(map(str, sources)), out=data, vocabulary=True, min_count=1, **options))
    document = json.loads((data / "dataset.json").read_text())
    for feature in document["sparse"]:
        if feature["name"] == "city":
            (data / feature["vocabulary"]).rename(data / "config.yaml")
            feature["vocabulary"] = "config.yaml"
    (data / "dataset.json").write_text(json.dumps(document))
    before = tree(data)
    for steps in (2, 3):  # start, then resume
        train(settings(data, run, train__max_steps=steps))
    kept = Dataset.load(run)
    assert (run / "config.yaml").read_text().startswith("run_dir:")
    for feature in kept.sparse:
        if feature.vocabulary:
            assert feature.vocabulary == f"vocabulary/{feature.name}.parquet"
            source = "config.yaml" if feature.name == "city" else feature.vocabulary
            assert (run / feature.vocabulary).read_bytes() == before[source]
            assert feature.candidates == f"vocabulary/{feature.name}+candidates.parquet"
            assert (run / feature.candidates).read_bytes() == before[feature.candidates]
    with mock.patch("os.link", side_effect=OSError(18, "Invalid cross-device link")):
        train(settings(data, tmp_path / "copied", train__max_steps=2))
    assert tree(tmp_path / "copied/vocabulary") == tree(run / "vocabulary")
    assert (tmp_path / "copied/vocabulary/city.parquet").stat().st_nlink == 1
    assert tree(data) == before


def test_a_model_of_two_labels(tmp_path: Path) -> None:
    table = part(columns(), 0, 300)
    rows = {"click": table["click"], "buy": [row % 3 // 2 for row in range(300)], "shop": table["shop"]}
    source = write_csv(tmp_path / "two.csv", rows)
    prepare(PrepareOptions(sources=[str(source)], out=tmp_path / "data", label=["click", "buy"]))
    train(settings(tmp_path / "data", tmp_path / "run", train__max_steps=4, **FEW_EXPERTS))
    train(settings(tmp_path / "data", tmp_path / "one", train__max_steps=4, data__labels=["buy"]))
    write_csv(tmp_path / "bare.csv", {"shop": rows["shop"]})
    for run, names in (("run", ["prediction.click", "prediction.buy"]), ("one", ["prediction"])):
        for file, labels in (("bare.csv", []), ("two.csv", [name.replace("prediction", "label") for name in names])):
            out = tmp_path / "p.parquet"
            ended = run_here("predict", tmp_path / run, "--data", tmp_path / file, "--out", out)
            assert ended.code == 0 and pq.read_table(out).column_names == ["row", *names, *labels], ended.err
            assert ("buy: AUC" in ended.out) == bool(labels)


@pytest.mark.parametrize("run_of_kind", ["criteo"], indirect=True)
def test_criteo_rows_without_labels_are_detected_by_their_fields(
    run_of_kind: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    run, _, _ = run_of_kind
    write_lines(tmp_path / "odd.tsv", ["\t".join(["1"] * 38)])
    ended = run_here("predict", run, "--data", tmp_path / "odd.tsv", "--out", tmp_path / "p.csv")
    assert ended.code == 1 and len(ended.errors) == 1
    lines = ["\t".join([*["1"] * 13, *["x"] * 26]), "\t".join([*["one"] * 13, *["x"] * 26])]
    write_lines(tmp_path / "bad.tsv", lines)
    ended = run_here("predict", run, "--data", tmp_path / "bad.tsv", "--out", tmp_path / "p.csv")
    assert "line 2, field 1 (int_0): 'one' is not an integer" in ended.err
    write_lines(tmp_path / "short.tsv", [lines[0], "1\t2"])
    ended = run_here("predict", run, "--data", tmp_path / "short.tsv", "--out", tmp_path / "p.csv")
    assert "line 2: 2 tab-separated fields, expected 39: 13 integers, 26 categories" in ended.err
