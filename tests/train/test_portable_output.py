"""Exported programs without traces of this machine, predictions with chosen columns, and advice for frozen tables."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest
import torch

from bad_input.commands import run_here
from meseta import checkpoint
from meseta.comm import World
from meseta.errors import UnknownColumnError
from meseta.spec import MesetaError
from meseta.train.interop.dense_export import DenseFormat, export_dense, load_dense_part
from meseta.train.interop.output_tables import OutputColumns
from meseta.train.predictions import write_predictions
from meseta.train.trained_model import TrainedModel, load_trained
from small_run import settings, train
from train.test_dense_export import run_exported, traces, trained_run
from train.test_predictions import with_keys


@pytest.mark.parametrize("form", ["torch-export", pytest.param("onnx", marks=pytest.mark.soak)])
def test_exported_programs_name_no_file_of_this_machine(tiny: Path, tmp_path: Path, form: DenseFormat) -> None:
    """An exported user's model has the same logits and no traces. A file that torch writes directly has many."""
    path, trained = trained_run(tiny, tmp_path / "run", model__name="own_models:Plain")
    batch = next(iter(trained.reader.epoch()))
    pooled = trained.model.embeddings(batch.sparse).pooled.values.detach()
    with torch.no_grad():
        expected = trained.model.score(batch.dense, pooled) + trained.logit_shift
    assert [traces(file) for file in export_dense(path, tmp_path / "out", form)] == [set(), set()]
    logits = run_exported(tmp_path / "out", form, batch.dense, pooled)
    np.testing.assert_allclose(logits, expected.numpy(), rtol=1e-5, atol=1e-5)
    part, _ = load_dense_part(path)
    torch.export.save(torch.export.export(part, (batch.dense, pooled)), tmp_path / "plain.pt2")
    assert len(traces(tmp_path / "plain.pt2")) >= 4


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    out = tmp_path_factory.mktemp("portable") / "run"
    train(settings(tiny, out, train__max_steps=4))
    return out


@pytest.fixture(scope="module")
def trained(run_dir: Path) -> TrainedModel:
    return load_trained(run_dir, "test", World.single())


def read(path: Path) -> pa.Table:
    return pq.read_table(path) if path.suffix == ".parquet" else pc.read_csv(path)


def test_columns_are_chosen_ordered_and_named(tiny: Path, run_dir: Path, tmp_path: Path) -> None:
    """Five random choices equal pyarrow's select and rename on a file with all columns."""
    data = with_keys(tiny, tmp_path / "data", group="session", time="when")
    trained = load_trained(run_dir, "test", World.single(), data)
    everything = tmp_path / "everything.parquet"
    write_predictions(trained.model, trained.reader, trained.world, everything, ["name", "city", "user"])
    whole, draw = pq.read_table(everything), random.Random(5)
    for number in range(5):
        olds = draw.sample(whole.column_names, draw.randint(1, len(whole.column_names)))
        olds += draw.choices(olds, k=draw.randint(0, 2))  # a column may have two names
        news = [old if draw.random() < 0.3 and olds.count(old) == 1 else f"c{i}" for i, old in enumerate(olds)]
        text = [new if new == old else f" {new} = {old}" for new, old in zip(news, olds, strict=True)]
        columns, out = OutputColumns.parse(text), tmp_path / f"{number}.{draw.choice(['csv', 'parquet'])}"
        write_predictions(trained.model, trained.reader, trained.world, out, columns.keys, columns=columns)
        expected = whole.select(olds).rename_columns(news)
        if out.suffix == ".csv":
            pc.write_csv(expected, tmp_path / "expected.csv")
            expected = pc.read_csv(tmp_path / "expected.csv")
        assert read(out).equals(expected), text


@pytest.mark.soak
def test_on_the_command_line(tiny: Path, run_dir: Path, tmp_path: Path) -> None:
    """A prepared split, and raw rows without labels. Columns in --columns need no --keys."""
    raw = pq.read_table(tiny.parent / "tiny.parquet").slice(0, 50)
    pq.write_table(raw.drop_columns("label"), tmp_path / "new.parquet")
    everything = run_here("predict", run_dir, "--out", tmp_path / "all.csv", "--keys", "user,city")
    assert everything.code == 0, everything.err
    ended = run_here("predict", run_dir, "--out", tmp_path / "some.csv", "--columns", "user,score=prediction,row")
    assert ended.code == 0, ended.err
    expected = read(tmp_path / "all.csv").select(["user", "prediction", "row"])
    assert read(tmp_path / "some.csv").equals(expected.rename_columns(["user", "score", "row"]))
    ended = run_here("predict", run_dir, "--data", tmp_path / "new.parquet", "--out", tmp_path / "new.csv",
                     "--columns", "who=user,score=prediction,price", "--keys", "price")  # fmt: skip
    assert ended.code == 0, ended.err
    predictions = read(tmp_path / "new.csv")
    assert predictions.column_names == ["who", "score", "price"]
    assert predictions["who"].to_pylist() == raw["user"].to_pylist()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("usr", "has no column 'usr'; did you mean 'user'"),
        ("prediction.click", "unknown column 'prediction.click'; did you mean 'prediction'"),
        ("label.x,row", "unknown column 'label.x'; did you mean 'label'"),
        ("a=user,a=city", "has two columns with the name 'a'; rename one, for example 'a_2=city'"),
        ("row,row", "has two columns with the name 'row'"),
        ("user,=prediction", "'=prediction' lacks a name; use NEW=OLD"),
        ("user,score=", "'score=' lacks a name"),
    ],
)
def test_bad_choices_are_one_line(trained: TrainedModel, tmp_path: Path, columns: str, message: str) -> None:
    with pytest.raises(MesetaError) as refusal:
        chosen = OutputColumns.parse(columns.split(","))
        write_predictions(trained.model, trained.reader, trained.world, tmp_path / "p.csv", chosen.keys, columns=chosen)
    assert list(tmp_path.iterdir()) == []
    [line] = str(refusal.value).splitlines()
    assert re.search(message, line), line


def test_a_bad_choice_on_the_command_line(run_dir: Path, tmp_path: Path) -> None:
    ended = run_here("predict", run_dir, "--out", tmp_path / "p.csv", "--columns", "score=predicton")
    assert ended.code == 1 and list(tmp_path.iterdir()) == []
    [line] = ended.err.splitlines()
    assert re.search("^error: .*has no column 'predicton'; .*; the column of predictions is 'prediction'", line), line


def test_only_the_error_of_a_missing_key_names_a_similar_column_of_the_predictions() -> None:
    columns = OutputColumns.parse(["score=predicton", "user"])
    missing = UnknownColumnError("keys: 'log'", "predicton", ["price", "user"])
    assert str(columns.explain_missing(missing)) == f"{missing}; the column of predictions is 'prediction'"
    for other in (
        UnknownColumnError("keys: 'log'", "user", ["price", "predicton"]),
        UnknownColumnError("keys: 'log'", "label", ["price", "user"]),
        MesetaError("source 'b': column 'predicton' is string, but int64 in 'a'; write both files with the same type"),
    ):
        assert columns.explain_missing(other) is other


def test_unavailable_columns_are_refused(tiny: Path, run_dir: Path, tmp_path: Path) -> None:
    ended = run_here("predict", run_dir, "--out", tmp_path / "p.csv", "--columns", "row", "--keys", "user")
    assert ended.code == 1 and "--keys has 'user', but --columns does not" in ended.err
    raw = pq.read_table(tiny.parent / "tiny.parquet").slice(0, 50)
    pq.write_table(raw.drop_columns("label"), tmp_path / "new.parquet")
    ended = run_here("predict", run_dir, "--data", tmp_path / "new.parquet", "--out", tmp_path / "p.csv",
                     "--columns", "prediction,label")  # fmt: skip
    assert ended.code == 1 and "unknown column 'label'; the rows have no labels" in ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["new.parquet"]


def test_the_advice_for_a_frozen_table_freezes_it(tiny: Path, tmp_path: Path) -> None:
    """A resumed run refuses `frozen`. With lr=0, which the error suggests, no bit of the rows changes."""
    run_dir, before, after = tmp_path / "run", tmp_path / "before", tmp_path / "after"
    train(settings(tiny, run_dir, train__max_steps=3))
    checkpoint.export(checkpoint.latest_complete(run_dir / "checkpoints"), before, "numpy")
    longer = {"train__max_steps": 6, "embedding__tables": {"city": {"optimizer": {"name": "frozen"}}}}
    with pytest.raises(MesetaError, match=r"table 'city' .* with lr=0, which freezes its rows, or start without"):
        train(settings(tiny, run_dir, **longer))
    train(settings(tiny, run_dir, **{**longer, "embedding__tables": {"city": {"optimizer": {"lr": 0.0}}}}))
    checkpoint.export(checkpoint.latest_complete(run_dir / "checkpoints"), after, "numpy")
    rows = {
        name: [np.load(folder / f"tables/{name}/row.npy") for folder in (before, after)] for name in ("city", "user")
    }
    assert np.array_equal(*rows["city"]) and not np.array_equal(*rows["user"])
