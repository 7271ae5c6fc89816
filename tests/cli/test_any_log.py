"""Tests that small logs of many kinds train without options, with the roles that a person would choose."""

from __future__ import annotations

import decimal
import json
import random
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from meseta.data import Dataset
from meseta.data.schema.layout import NO_CATEGORY
from sampling import sample

ROWS = 300
Output = Callable[..., str]
Values = Callable[[random.Random], object]


def clicked(draw: random.Random) -> int:
    return int(draw.random() < 0.3)


def write_text(path: Path, columns: dict[str, Values], sign: str = ",", *, names: bool = True) -> None:
    draw = random.Random(0)
    lines = [sign.join(columns)] if names else []
    lines += [sign.join(str(value(draw)) for value in columns.values()) for _ in range(ROWS)]
    path.write_text("\n".join(lines) + "\n")


def write_parquet(path: Path, columns: dict[str, Values]) -> None:
    draw = random.Random(0)
    table = {name: [value(draw) for _ in range(ROWS)] for name, value in columns.items()}
    kinds = {"vector": pa.list_(pa.float32(), 3), "genres": pa.list_(pa.int64(), 2), "amount": pa.decimal128(9, 2)}
    pq.write_table(pa.table({name: pa.array(values, kinds.get(name)) for name, values in table.items()}), path)


HOUR: Values = lambda d: d.randrange(24)  # noqa: E731
LOGS: dict[str, tuple[dict[str, Values], dict[str, list[str]]]] = {
    # name of the file: columns, and their expected roles
    "whole_numbers.csv": (
        {"label": clicked, "a": HOUR, "b": lambda d: d.randrange(90)},
        {"dense": ["a", "b"], "sparse": ["a.category", "b.category"]},
    ),
    "no_names.csv": (
        {"": clicked, "2": HOUR, "3": lambda d: 10_000 + d.randrange(50)},
        {"dense": ["column_2", "column_3"], "sparse": ["column_2.category", "column_3.category"]},
    ),
    "no_names.tsv": (
        {"": HOUR, "2": lambda d: f"{d.random():.3f}", "3": lambda d: d.choice("xyz"), "4": clicked},
        {"dense": ["column_1", "column_2"], "sparse": ["column_1.category", "column_3"]},
    ),
    "ids_as_text.csv": (
        {"click": clicked, "user": lambda d: f"u{d.randrange(90)}", "item": lambda d: f"i{d.randrange(40)}"},
        {"dense": [], "sparse": ["user", "item"]},
    ),
    "ids_of_64_bits.csv": (
        {"click": clicked, "who": lambda d: 2**63 + 7 * d.randrange(90), "what": lambda d: 2**60 + d.randrange(40)},
        {"dense": [], "sparse": ["who", "what"]},
    ),
    "hours.csv": (
        {"click": clicked, "hour": HOUR, "weekday": lambda d: d.randrange(7)},
        {"dense": [], "sparse": ["hour", "weekday"]},
    ),
    "measurements.csv": (
        {"click": clicked, "age": lambda d: d.randrange(18, 80), "price": lambda d: f"{d.random():.2f}",
         "num_visits": lambda d: int(d.expovariate(0.2)), "balance": lambda d: d.randrange(-500, 500)},
        {"dense": ["age", "price", "num_visits", "balance"], "sparse": []},
    ),
    "one_class.csv": ({"click": lambda d: 0, "age": lambda d: d.randrange(18, 80)}, {"dense": ["age"], "sparse": []}),
    "one_category.csv": ({"click": clicked, "city": lambda d: d.choice("abc")}, {"dense": [], "sparse": ["city"]}),
    "nothing_in_it.csv": (
        {"click": clicked, "row_id": lambda d: d.getrandbits(60), "version": lambda d: 3, "gone": lambda d: "",
         "mail": lambda d: f"{d.getrandbits(60)}@x.org", "age": lambda d: d.randrange(18, 80)},
        {"dense": ["age"], "sparse": []},
    ),
    "odd_numbers.csv": (
        {"click": clicked, "x": lambda d: d.choice(["inf", "-inf", "nan", "1e400", "1e3", "0.5", ""]),
         "note": lambda d: d.choice(["a", "b" * 200_000]) if d.random() < 0.02 else "c"},
        {"dense": ["x"], "sparse": ["note"]},
    ),
    "kinds.parquet": (
        {"click": clicked, "amount": lambda d: decimal.Decimal(d.randrange(9999)) / 100,
         "vector": lambda d: [1.0, 2.0, d.random()],
         "genres": lambda d: [d.randrange(5), d.randrange(5)], "nested": lambda d: [[1], [2, d.randrange(3)]],
         "user_id": lambda d: float(d.randrange(50)) if d.random() < 0.9 else None},
        {"dense": ["amount"], "sparse": ["genres", "user_id"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sample(LOGS, 3, seed=20))
def test_a_log_and_nothing_else(tmp_path: Path, output_of: Output, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    columns, roles = LOGS[name]
    if name.endswith(".parquet"):
        write_parquet(tmp_path / name, columns)
    else:
        write_text(tmp_path / name, columns, "\t" if name.endswith(".tsv") else ",", names="no_names" not in name)
    printed = output_of("train", "--data", name)
    assert printed.splitlines()[-1].startswith("report: runs/")
    dataset = Dataset.load(next(tmp_path.glob("runs/*/data")))
    features = {feature.name: feature.encoding for feature in dataset.sparse if feature.name != NO_CATEGORY.name}
    sparse = [name for name, encoding in features.items() if encoding != "buckets"]
    assert {"dense": [feature.name for feature in dataset.dense], "sparse": sparse} == roles


def test_values_that_are_not_finite_are_counted(
    tmp_path: Path, output_of: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = ["inf", "-Infinity", "nan", "1e400", "", "NA", "0.5", "2"]
    Path("log.csv").write_text("click,x\n" + "".join(f"{row % 2},{values[row % 8]}\n" for row in range(800)))
    printed = output_of("prepare", "log.csv", "--out", "data")
    assert "x: 400 values are inf or nan and count as missing" in printed
    assert Dataset.load("data").not_finite == {"x": 400}


def test_another_try_with_other_columns_says_what_to_do_and_force_does_it(
    tmp_path: Path, output_of: Output, error_of: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_text(Path("log.csv"), LOGS["whole_numbers.csv"][0])
    settings = ["train.max_steps=2", "model.bottom_mlp=[8]", "model.top_mlp=[8]", "num_threads=1",
                "embedding.optimizer.lr=0.1"]  # fmt: skip
    output_of("train", "--data", "log.csv", *settings)
    Path("runs/log/notes.txt").write_text("mine")
    refusal = error_of("train", "--data", "log.csv", "--sparse", "a", *settings)
    assert 'the option sparse was [] and is ["a"] now' in refusal and "use --force to prepare it again" in refusal
    output_of("train", "--data", "log.csv", "--sparse", "a", "--ignore", "b", "--force", *settings)
    dataset = Dataset.load("runs/log/data")
    assert [feature.name for feature in dataset.sparse] == ["a"] and not dataset.dense
    assert Path("runs/log/notes.txt").read_text() == "mine"
    command = ["train", "--data", "log.csv", "--sparse", "a", "--ignore", "b", *settings, "model.dropout=0.5"]
    refusal = error_of(*command)
    assert "has another model" in refusal and "--force" in refusal
    output_of(*command, "--force")
    assert yaml.safe_load(Path("runs/log/config.yaml").read_text())["model"]["dropout"] == 0.5
    assert "checkpoint.mirror" in error_of("train", "runs/log/config.yaml", "--force", "checkpoint.mirror=memory://x")


def test_that_rows_with_times_could_be_tested_on_later_ones_is_said(
    tmp_path: Path, output_of: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    columns = {"click": lambda d: d.randrange(2), "seen": lambda d: f"2026-01-{d.randrange(1, 29):02}"}
    write_text(Path("log.csv"), {**columns, "city": lambda d: f"c{d.randrange(5)}"})
    table = {
        "click": [0, 1] * 40,
        "seen": [datetime(2026, 1, 1 + row % 28) for row in range(80)],
        "city": ["a", "b"] * 40,
    }
    pq.write_table(pa.table(table), "log.parquet")
    lines = pa.table({**table, "seen": [str(day) for day in table["seen"]]}).to_pylist()
    Path("log.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for log in ("log.csv", "log.parquet", "log.jsonl"):
        assert "--time seen --test-after TIME tests on later rows" in output_of("prepare", log, "--out", f"{log}.data")
    later = output_of("prepare", "log.csv", "--out", "later", "--time", "seen", "--test-after", "2026-01-20")
    assert "tests on later" not in later
