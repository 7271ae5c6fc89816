"""Predictions with key columns: order, columns, several labels, and refusals."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meseta.comm import World
from meseta.data.dataset.dataset import Dataset
from meseta.data.read.key_columns import KeyColumns
from meseta.data.read.options import ReaderOptions
from meseta.data.read.reader import Reader
from meseta.spec import MesetaError
from meseta.train.predictions import write_predictions
from meseta.train.trained_model import load_trained
from small_run import settings, train

FILE_ROWS = (100, 1, 178)
"""Rows of each file of the test split, which has 279."""


def with_keys(tiny: Path, target: Path, **roles: Any) -> Path:
    """Copy the tiny dataset and add a name, a group, a time and a second label to every row."""
    shutil.copytree(tiny, target)
    document = json.loads((target / "dataset.json").read_text())
    for split, sizes in (("train", [1221]), ("test", FILE_ROWS)):
        table = pq.read_table(target / split)
        rows = np.arange(table.num_rows)
        table = table.append_column("name", pa.array([f"row {i}" for i in rows]))
        table = table.append_column("session", pa.array(rows // 7 * 2**40 - 5))
        table = table.append_column("when", pa.array(1.7e9 + rows))
        table = table.append_column("buy", pa.array((rows % 5 == 0).astype(np.float32)))
        shutil.rmtree(target / split)
        (target / split).mkdir()
        files = []
        for number, size in enumerate(sizes):
            part, table = table.slice(0, size), table.slice(size)
            path = f"{split}/{number}.parquet"
            pq.write_table(part, target / path, row_group_size=37)
            files.append({"path": path, "num_rows": size})
        document["splits"][split]["files"] = files
    (target / "dataset.json").write_text(json.dumps(document | roles))
    return target


def predict(run_dir: Path, data: Path, out: Path, *keys: str) -> pa.Table:
    trained = load_trained(run_dir, "test", World.single(), data)
    assert write_predictions(trained.model, trained.reader, trained.world, out, keys) == 279
    return pq.read_table(out)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    out = tmp_path_factory.mktemp("predictions") / "run"
    train(settings(tiny, out, train__max_steps=4))
    return out


def test_keys_stay_with_their_rows(tiny: Path, run_dir: Path, tmp_path: Path) -> None:
    plain = predict(run_dir, tiny, tmp_path / "plain.parquet")
    assert plain.column_names == ["row", "prediction", "label"]
    data = with_keys(tiny, tmp_path / "data", group="session", time="when")
    table = predict(run_dir, data, tmp_path / "keyed.parquet", "name", "tags", "when")
    assert table.column_names == ["row", "name", "tags", "when", "session", "prediction", "label"]
    rows = np.arange(279)
    assert table["row"].to_pylist() == rows.tolist() and table["name"].to_pylist() == [f"row {i}" for i in rows]
    assert table["session"].to_pylist() == (rows // 7 * 2**40 - 5).tolist()
    assert table["when"].to_pylist() == (1.7e9 + rows).tolist()
    assert table["tags"].to_pylist() == pq.read_table(tiny / "test")["tags"].to_pylist()
    assert table.select(plain.column_names).equals(plain)


def test_several_labels_give_several_columns(tiny: Path, tmp_path: Path) -> None:
    positives = {"label": 100.0, "buy": 245.0}
    data = with_keys(tiny, tmp_path / "data", labels=["label", "buy"])
    document = json.loads((data / "dataset.json").read_text())
    for split in document["splits"].values():
        split["positives"] = positives
    document["source_form"]["labels"] = ["label", "buy"]
    (data / "dataset.json").write_text(json.dumps(document))
    small = {"model__num_experts": 2, "model__expert_mlp": [8], "model__tower_mlp": [4]}
    train(settings(data, tmp_path / "run", train__max_steps=4, model__name="mmoe", **small))
    table = predict(tmp_path / "run", data, tmp_path / "p.parquet")
    assert table.column_names == ["row", "prediction.label", "prediction.buy", "label.label", "label.buy"]
    assert table["label.buy"].to_pylist() == [float(i % 5 == 0) for i in range(279)]
    assert table["label.label"].to_pylist() == pq.read_table(tiny / "test")["label"].to_pylist()
    assert not table["prediction.label"].equals(table["prediction.buy"])


def test_invalid_keys_and_files_are_refused(tiny: Path, run_dir: Path, tmp_path: Path) -> None:
    data, out = with_keys(tiny, tmp_path / "data"), tmp_path / "p.parquet"
    with pytest.raises(MesetaError, match=r"has no column 'nmae'; did you mean 'name'\?"):
        predict(run_dir, data, out, "nmae")
    with pytest.raises(MesetaError, match="'prediction' is also a column of predictions"):
        predict(run_dir, data, out, "prediction")
    with pytest.raises(MesetaError, match="cannot be written"):
        predict(run_dir, data, tmp_path / "absent" / "p.parquet")
    path = data / "test" / "1.parquet"
    table = pq.read_table(path)
    for broken, message in (
        (table.set_column(table.column_names.index("name"), "name", pa.array([{"a": 1}])), "keys: .*name"),
        (table.append_column("name", pa.array(["x"])), "has two columns 'name'"),
    ):
        pq.write_table(broken, path)
        with pytest.raises(MesetaError, match=message):
            KeyColumns(Dataset.load(data), "test", ["name"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data"]


def test_a_prediction_that_is_not_finite(tiny: Path, run_dir: Path, tmp_path: Path) -> None:
    data = with_keys(tiny, tmp_path / "data")
    path = data / "test" / "2.parquet"
    table = pq.read_table(path)
    prices = table["price"].to_numpy().copy()
    prices[40] = np.nan
    pq.write_table(table.set_column(table.column_names.index("price"), "price", pa.array(prices)), path)
    with pytest.raises(MesetaError, match="row 141 has a logit that is not finite"):
        predict(run_dir, data, tmp_path / "p.parquet")
    assert not list(tmp_path.glob("*p.parquet*"))


def test_a_failed_prediction_leaves_no_files(tiny: Path, run_dir: Path, tmp_path: Path) -> None:
    data = with_keys(tiny, tmp_path / "data")
    path = data / "test" / "2.parquet"
    table = pq.read_table(path)
    users = table["user"].to_numpy().copy()
    users[40] = 10**6
    pq.write_table(table.set_column(table.column_names.index("user"), "user", pa.array(users)), path)
    with pytest.raises(MesetaError, match="id 1000000 from feature 'user'"):
        predict(run_dir, data, tmp_path / "p.parquet")
    assert [p.name for p in tmp_path.iterdir()] == ["data"]


def test_a_shuffled_reader_is_refused(tiny: Path, run_dir: Path, tmp_path: Path) -> None:
    trained = load_trained(run_dir, "test", World.single(), tiny)
    reader = Reader(trained.reader.dataset, "test", ReaderOptions(batch_size=100, shuffle=True))
    with pytest.raises(MesetaError, match="must return every row once"):
        write_predictions(trained.model, reader, trained.world, tmp_path / "p.parquet")


@pytest.mark.parametrize("step", [1, 50, 279, 1000])
def test_key_columns_in_pieces(tiny: Path, tmp_path: Path, step: int) -> None:
    keys = KeyColumns(Dataset.load(with_keys(tiny, tmp_path / "data")), "test", ["name", "session"])
    parts = []
    while (part := keys.take(step)).num_rows:
        assert part.num_rows == step or sum(p.num_rows for p in parts) + part.num_rows == 279
        parts.append(part)
    assert pa.concat_tables(parts)["name"].to_pylist() == [f"row {i}" for i in range(279)]
