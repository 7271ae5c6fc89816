"""Tests of spoiled data files: they are used, or refused in one line. No traceback, hang or partial result."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bad_input.commands import run_here, tree, within
from bad_input.spoil import PIECES, spoil_bytes, spoil_document
from data.click_log import make_lines
from sampling import sample
from small_run import settings, train, write_config

CASES_PER_TEST = 10
TEXT = {
    "log.tsv": "\n".join(make_lines(30)) + "\n",
    "log.csv": "label,price,user_id,city\n" + "".join(f'{i % 2},{i}.5,{i % 7},"a,{i % 3}"\n' for i in range(30)),
    "log.svm": "".join(f"{2 * (i % 2) - 1:+d} {i % 5}:{i}.5 {i % 4 + 5}:1\n" for i in range(30)),
    "log.ffm": "".join(f"{i % 2} 0:{i % 5}:{i}.5 1:{i % 4 + 5}:1\n" for i in range(30)),
}
TYPES = [
    *(pa.null(), pa.bool_(), pa.int8(), pa.uint16(), pa.int64(), pa.uint64(), pa.float16(), pa.float64(), pa.string()),
    *(
        pa.binary(),
        pa.binary(4),
        pa.large_string(),
        pa.date32(),
        pa.timestamp("us"),
        pa.decimal128(9, 2),
        pa.time32("s"),
    ),
    *(pa.list_(pa.int64()), pa.large_list(pa.string()), pa.list_(pa.int32(), 2)),
    *(pa.struct([("id", pa.int64()), ("weight", pa.float32())]), pa.dictionary(pa.int8(), pa.string())),
    pa.list_(pa.struct([("id", pa.string()), ("weight", pa.float64())])),
    pa.list_(pa.list_(pa.int64())),
]


def values_of(kind: pa.DataType, size: int, draw: random.Random) -> pa.Array:
    """Return random values of a type, some of them missing. All are missing if the type is hard to construct."""
    plain = [
        None,
        0,
        1,
        2,
        200,
        -1,
        2**40,
        0.5,
        float("nan"),
        float("inf"),
        "a",
        "",
        b"abcd",
        True,
        [1, 2],
        [None],
        ["x"],
    ]
    plain += [{"id": 1, "weight": 0.5}, [{"id": "a", "weight": None}], [[1]], [("k", 1)]]
    fitting = []
    for value in plain:
        try:
            pa.array([value], kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            continue
        fitting.append(value)
    some = draw.sample(fitting, draw.randint(1, len(fitting)))
    return pa.array([draw.choice(some) for _ in range(size)], kind)


def spoil_table(table: pa.Table, draw: random.Random) -> pa.Table:
    """Remove, rename, double or convert one or two columns, or change one value."""
    for _ in range(draw.choice([1, 1, 2])):
        place = draw.randrange(table.num_columns)
        name, kind = (
            table.schema.names[place],
            draw.choice(["drop", "name", "type", "type", "value", "value", "double"]),
        )
        if kind == "drop" and table.num_columns > 1:
            table = table.remove_column(place)
        elif kind == "name":
            names = [
                *table.schema.names[:place],
                draw.choice(["", "x", "label", "é"]),
                *table.schema.names[place + 1 :],
            ]
            table = table.rename_columns(names)
        elif kind == "double":
            table = table.append_column(name, table.column(place))
        else:
            type_ = table.schema.field(place).type if kind == "value" else draw.choice(TYPES)
            values = values_of(type_, table.num_rows, draw)
            if kind == "value":
                old, row = table.column(place).combine_chunks(), draw.randrange(table.num_rows)
                values = pa.concat_arrays([old[:row], values[:1], old[row + 1 :]])
            table = table.set_column(place, name, values)
    return table


def write_parquet(path: Path, table: pa.Table, draw: random.Random) -> None:
    """Write the table with spoiled columns or bytes. A table that Parquet cannot store is written without spoiled
    columns."""
    if draw.random() < 0.6:
        try:
            pq.write_table(spoil_table(table, draw), path)
            return
        except pa.ArrowException:
            pass
    pq.write_table(table, path)
    path.write_bytes(spoil_bytes(path.read_bytes(), draw))


Case = Callable[[Path, Path, random.Random], list[Any]]
"""Makes the spoiled files in a folder, from those of a finished run, and returns the command."""


def raw_text(place: Path, trained: Path, draw: random.Random) -> list[Any]:
    name = draw.choice(sorted(TEXT))
    pieces = [*PIECES, *[b",", b"\t", b"\r", b" ", b"-", b"nan", b"1e400", b"\xc2\xa0"] * 2]
    data, zipped = TEXT[name].encode(), draw.random() < 0.3
    data = spoil_bytes(gzip.compress(data), draw) if zipped and draw.random() < 0.7 else spoil_bytes(data, draw, pieces)
    path = place / (name + ".gz" * zipped)
    path.write_bytes(data)
    options: list[Any] = draw.choice(
        [[], [], ["--vocabulary", "--min-count", 1], ["--label", "price"], ["--test-fraction", 0]]
    )
    return ["prepare", path, "--out", place / "out", "--hash-rows", draw.choice([50, 50, 50, 1, 2**40]), *options]


def raw_parquet(place: Path, trained: Path, draw: random.Random) -> list[Any]:
    table = pq.read_table(trained.parent / "data/train/part-00000.parquet").slice(0, 50)
    write_parquet(place / "log.parquet", table, draw)
    return ["prepare", place / "log.parquet", "--out", place / "out", *draw.choice([[], [], ["--vocabulary"]])]


def copied(place: Path, trained: Path, *what: str) -> Path:
    for name in what:
        shutil.copytree(trained.parent / name, place / name)
    return write_config(
        place / "c.yaml", settings(place / "data", place / "run", train__max_steps=3, checkpoint__every_steps=1)
    )


def description(place: Path, trained: Path, draw: random.Random) -> list[Any]:
    config = copied(place, trained, "data")
    path = place / "data/dataset.json"
    document = json.loads(path.read_text())
    if draw.random() < 0.7:
        path.write_text(json.dumps(spoil_document(document, draw), default=str))
    else:
        path.write_bytes(spoil_bytes(path.read_bytes(), draw))
    return draw.choice([["train", config], ["train", config], ["data", "check", place / "data"]])


def prepared(place: Path, trained: Path, draw: random.Random) -> list[Any]:
    config = copied(place, trained, "data")
    path = place / "data" / draw.choice(["train", "test"]) / "part-00000.parquet"
    write_parquet(path, pq.read_table(path), draw)
    return draw.choice([["train", config], ["train", config], ["data", "check", place / "data"]])


def plan(place: Path, trained: Path, draw: random.Random) -> list[Any]:
    config = copied(place, trained, "data")
    document = json.loads((trained / "plan.json").read_text())
    short = {"tables": {"*": "table_wise", "user": {"sharding": "row_wise", "ranks": [0]}}, "num_ranks": 1}
    text = json.dumps(spoil_document(draw.choice([document, short]), draw), default=str).encode()
    (place / "plan.json").write_bytes(text if draw.random() < 0.8 else spoil_bytes(text, draw))
    return ["train", config, f"plan={place / 'plan.json'}"]


def saved(place: Path, trained: Path, draw: random.Random) -> list[Any]:
    config = copied(place, trained, "data", "run")
    files = [path for path in sorted((place / "run/checkpoints").rglob("*")) if path.is_file()]
    manifests = [path for path in files if path.name == "manifest.json"]
    path = draw.choice(draw.choice([files, manifests]))
    if path.suffix == ".json" and draw.random() < 0.6:
        path.write_text(json.dumps(spoil_document(json.loads(path.read_text()), draw), default=str))
    else:
        path.write_bytes(spoil_bytes(path.read_bytes(), draw))
    folder = draw.choice([place / "run", path.parent])
    return draw.choice(
        [["train", config], ["eval", place / "run"], *(["checkpoint", c, folder] for c in ("verify", "inspect"))]
    )


def run_files(place: Path, trained: Path, draw: random.Random) -> list[Any]:
    config = copied(place, trained, "data", "run")
    path = draw.choice(
        [path for path in sorted((place / "run").iterdir()) if path.suffix in (".json", ".jsonl", ".yaml")]
    )
    if path.suffix == ".json" and draw.random() < 0.6:
        path.write_text(json.dumps(spoil_document(json.loads(path.read_text()), draw), default=str))
    else:
        path.write_bytes(spoil_bytes(path.read_bytes(), draw))
    run = place / "run"
    return draw.choice(
        [["report", run], ["eval", run], ["predict", run, "--out", place / "p.parquet"], ["train", config]]
    )


KINDS: dict[str, Case] = {
    case.__name__: case for case in (raw_text, raw_parquet, description, prepared, plan, saved, run_files)
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """A small `run` next to its `data`. Tests copy both."""
    folder = tmp_path_factory.mktemp("trained")
    data = folder / "data"
    shutil.copytree(tiny, data)
    document = json.loads((data / "dataset.json").read_text())
    for split in ("train", "test"):
        path = data / split / "part-00000.parquet"
        table = pq.read_table(path).slice(0, 120)
        pq.write_table(table, path, row_group_size=50)
        files = [{"path": f"{split}/{path.name}", "num_rows": 120}]
        positives = float(np.sum(table["label"].to_numpy()))
        document["splits"][split].update(num_rows=120, num_positives=positives, files=files)
    (data / "dataset.json").write_text(json.dumps(document))
    train(settings(data, folder / "run", train__max_steps=2, checkpoint__every_steps=1))
    return folder / "run"


def check_whole(place: Path, files_before: set[str], code: int) -> None:
    """Check that all new files are complete, and that a refused command adds no result."""
    for name in tree(place).keys() - files_before:
        assert not Path(name).name.startswith(".") and ".tmp" not in name, name
        assert code == 0 or name.split("/")[0] not in ("out", "p.parquet"), name
        if name.endswith(".json"):
            json.loads((place / name).read_text())


@pytest.mark.parametrize("seed", sample(range(72), 1, seed=0))
@pytest.mark.parametrize("kind", KINDS)
def test_spoiled_files(trained: Path, tmp_path: Path, kind: str, seed: int) -> None:
    draw = random.Random(f"{kind} {seed}")
    codes = []
    for number in range(CASES_PER_TEST):
        place = tmp_path / str(number)
        place.mkdir()
        command = KINDS[kind](place, trained, draw)
        files_before = set(tree(place))
        with within(120, f"{number}: {command}"):
            ended = run_here(*command)
        codes.append(ended.code)
        errors = [line for line in ended.err.splitlines() if line.startswith("error: ")]
        is_list = command[:2] == ["data", "check"]  # its result lists the faults
        assert ended.code in (0, 1) and (len(errors) == ended.code or is_list), (number, ended)
        check_whole(place, files_before, ended.code)
        shutil.rmtree(place)
    assert sum(codes) > 0 or kind == "run_files"  # many files of a run are never read again
