"""Text without a line of names: the schema has them, and Criteo's logs get other roles, buckets and crosses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.click_log import hashed, make_lines, prepare_with, read_split, write_tsv
from meseta.data import Dataset
from meseta.data.formats import text as text_format
from meseta.data.prepare import PrepareOptions, read_layout
from meseta.data.schema.schema import format_schema
from meseta.spec import MesetaError

SCHEMA = "header: [clicked, age, city]\nlabel: clicked\ndense: [age]\ncategorical: [city]\n"


def run(tmp_path: Path, name: str, schema: str | None, **options: Any) -> Dataset:
    return prepare_with(tmp_path, name, schema, **{"force": True, **options})


@pytest.mark.parametrize("name", ["day_0", "day_0.gz", "log.csv"])
@pytest.mark.parametrize("block_bytes", [8 << 20, 900])
def test_the_printed_schema_of_criteos_logs_gives_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, block_bytes: int
) -> None:
    monkeypatch.setattr(text_format, "BLOCK_BYTES", block_bytes)
    write_tsv(tmp_path / "plain.tsv", make_lines(120))
    write_tsv(tmp_path / name, make_lines(120))
    run(tmp_path, "plain.tsv", None, out=tmp_path / "plain")
    layout = read_layout(PrepareOptions(sources=[f"{tmp_path}/plain.tsv"], out=tmp_path / "out"))
    run(tmp_path, name, format_schema(layout))
    assert read_split(tmp_path / "out", "train").equals(read_split(tmp_path / "plain", "train"))


def test_roles_buckets_and_crosses_of_criteos_logs(tmp_path: Path) -> None:
    lines = make_lines(120)
    write_tsv(tmp_path / "day_0", lines)
    layout = read_layout(PrepareOptions(sources=[f"{tmp_path}/day_0"], out=tmp_path / "out"))
    header = next(line for line in format_schema(layout).splitlines() if line.startswith("header: "))
    schema = f"""{header}
delimiter: "\\t"
label: label
dense: [int_0]
group: cat_25
categorical: [cat_0, cat_1, cat_25]
buckets: {{int_1: [0, 10, 100]}}
crosses: {{both: [cat_0, int_1]}}
"""
    dataset = run(tmp_path, "day_0", schema)
    assert [feature.name for feature in dataset.sparse] == ["cat_0", "cat_1", "cat_25", "int_1.bucket", "both"]
    table, fields = read_split(tmp_path / "out", "train"), [line.split("\t") for line in lines]
    buckets = [0 if row[2] == "" else 1 + sum(edge <= int(row[2]) for edge in (0, 10, 100)) for row in fields]
    assert table.column("int_1.bucket").to_pylist() == buckets
    crossed = [hashed("both", f"{row[14]}\x1f{bucket}") for row, bucket in zip(fields, buckets, strict=True)]
    assert table.column("both").to_pylist() == crossed
    assert table.column("cat_1").to_pylist() == [hashed("cat_1", row[15]) for row in fields]
    groups = table.column("cat_25.group").to_pylist()
    assert len(set(groups)) == len({row[39] for row in fields})


@pytest.mark.parametrize("sign", [",", ";", "|", "\t"])
def test_the_first_line_determines_the_delimiter(tmp_path: Path, sign: str) -> None:
    rows = [("1", "30", "Rome"), ("0", "", "Oslo"), ("1", "12", f'"a{sign}b"')]
    (tmp_path / "clicks.log").write_text("".join(sign.join(row) + "\n" for row in rows))
    dataset = run(tmp_path, "clicks.log", SCHEMA)
    table = read_split(tmp_path / "out", "train")
    assert dataset.splits["train"].num_rows == 3
    assert table.column("label").to_pylist() == [1, 0, 1]
    assert table.column("city").to_pylist() == [hashed("city", name) for name in ("Rome", "Oslo", f"a{sign}b")]


def test_lines_are_counted_from_the_first(tmp_path: Path) -> None:
    (tmp_path / "clicks.log").write_text("1,30,Rome\n0,31,Oslo,9\n1,old,Rome\n")
    with pytest.raises(MesetaError, match=r"line 2: 4 fields, but the header has 3;"):
        run(tmp_path, "clicks.log", SCHEMA)
    dataset = run(tmp_path, "clicks.log", SCHEMA, bad_rows="skip", max_bad_rows=2)
    assert dataset.splits["train"].num_rows == 1
    (tmp_path / "clicks.log").write_text("old,30,Rome\n")
    with pytest.raises(MesetaError, match=r"line 1, column 'clicked': 'old'"):
        run(tmp_path, "clicks.log", SCHEMA)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SCHEMA.replace("clicked, age, city", "clicked"), "key 'header': .* must name all columns, at least two"),
        (SCHEMA.replace("clicked, age", "clicked, ''"), "and no name may be empty"),
        (SCHEMA.replace("[clicked, age, city]", "names"), "key 'header': input should be a valid list"),
        (SCHEMA.replace("dense: [age]", "dense: [aeg]"), "has no column 'aeg'; did you mean 'age'"),
        (SCHEMA.replace("clicked, age", "clicked, city"), "'city' is the name of two columns|has no column 'age'"),
    ],
)
def test_bad_headers_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "clicks.log").write_text("1,30,Rome\n")
    with pytest.raises(MesetaError, match=message):
        run(tmp_path, "clicks.log", text)


def test_other_files_have_headers(tmp_path: Path) -> None:
    pq.write_table(pa.table({"clicked": [1, 0], "age": [1, 2], "city": ["a", "b"]}), tmp_path / "log.parquet")
    with pytest.raises(MesetaError, match="header and delimiter of the --schema file apply only to text"):
        run(tmp_path, "log.parquet", SCHEMA)
    write_tsv(tmp_path / "day_0", make_lines(3))
    with pytest.raises(MesetaError, match="that lists all names under header, as --print-schema prints it"):
        run(tmp_path, "day_0", "label: label\ndense: [int_0]\n")
