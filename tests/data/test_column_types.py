"""Parquet files whose columns differ in type: every ordered pair of 14 types gives the values of both files, or one
error line that names both."""

from __future__ import annotations

import datetime
import itertools
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.click_log import hashed, read_split
from meseta.data import Dataset
from meseta.data.formats.parquet_files import can_be_feature
from meseta.data.prepare import PrepareOptions, prepare
from meseta.data.prepare.prepare_like import PrepareLikeOptions, prepare_like
from meseta.spec import MesetaError
from sampling import diagonal, product, sample

NUM_ROWS = 60
START = datetime.datetime(2026, 1, 1)
TYPES: dict[str, tuple[pa.DataType, str]] = {
    "null": (pa.null(), "null"),
    "bool": (pa.bool_(), "bool"),
    "int16": (pa.int16(), "number"),
    "int64": (pa.int64(), "number"),
    "uint64": (pa.uint64(), "number"),
    "float": (pa.float32(), "number"),
    "double": (pa.float64(), "number"),
    "decimal": (pa.decimal128(12, 2), "number"),
    "string": (pa.string(), "text"),
    "large_string": (pa.large_string(), "text"),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), "text"),
    "binary": (pa.binary(), "text"),
    "timestamp": (pa.timestamp("us"), "time"),
    "date": (pa.date32(), "time"),
}
"""Each type and its kind."""
MODES = ("single", "list", "schema")
PAIRS = list(itertools.permutations(TYPES, 2))
SHIFTS = zip(MODES, (1, 4, 10), strict=True)
SAMPLED = {(place, (place + shift) % len(TYPES), mode) for mode, shift in SHIFTS for place in range(len(TYPES))}
"""Cases of `make test`: each type in both places of each mode."""
FORMER = {("date", "float", "list"), ("double", "timestamp", "list")}
"""Cases in which a column was once dropped because of one part."""
CASES = [
    pytest.param(
        *pair,
        mode,
        id=f"{pair[0]}-{pair[1]}-{mode}",
        marks=() if (*map(list(TYPES).index, pair), mode) in SAMPLED or (*pair, mode) in FORMER else pytest.mark.soak,
    )
    for pair in PAIRS
    for mode in MODES
]


def values_of(name: str, first: int) -> list[Any]:
    """A value for each row from `first` on, missing in every fifth."""
    kind, group = TYPES[name]
    numbers = [10 + row % 7 for row in range(first, first + NUM_ROWS)]
    made: list[Any] = {
        "null": [None] * NUM_ROWS,
        "bool": [number % 2 == 0 for number in numbers],
        "number": [Decimal(number) if name == "decimal" else number for number in numbers],
        "text": [f"c {number}".encode() if name == "binary" else f"c {number}" for number in numbers],
        "time": [START + datetime.timedelta(days=number) for number in numbers],
    }[group]
    if kind == pa.date32():
        made = [value.date() for value in made]
    return [None if row % 5 == 0 else value for row, value in enumerate(made)]


def text_of(value: Any) -> str:
    """Return a value as the text of a category."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return value.decode() if isinstance(value, bytes) else str(value)


def write(path: Path, column: pa.Array) -> None:
    table = {
        "label": [row % 2 for row in range(NUM_ROWS)],
        "city": [f"city {row % 5}" for row in range(NUM_ROWS)],
        "shop_id": column,
    }
    pq.write_table(pa.table(table), path)


def write_pair(folder: Path, one: str, other: str, *, lists: bool) -> list[Any]:
    """Two files; returns the values of `shop_id` in both."""
    rows = []
    for path, name, first in (("a.parquet", one, 0), ("b.parquet", other, NUM_ROWS)):
        values, kind = values_of(name, first), TYPES[name][0]
        if lists:
            values = [None if row % 11 == 0 else values[: row % 4] for row in range(NUM_ROWS)]
            kind = pa.list_(kind)
        write(folder / path, pa.array(values, kind))
        rows += values
    return rows


def run(folder: Path, **options: Any) -> Dataset:
    sources = [f"{folder}/[ab].parquet"]
    return prepare(PrepareOptions(sources=sources, out=folder / "out", test_fraction=0.0, hash_rows=500, **options))


@pytest.mark.parametrize(("one", "other", "mode"), CASES)
def test_pairs(tmp_path: Path, one: str, other: str, mode: str) -> None:
    rows = write_pair(tmp_path, one, other, lists=mode == "list")
    kinds = {TYPES[one][1], TYPES[other][1]} - {"null"}
    if mode == "schema" and kinds & {"bool", "time"}:
        check_role(tmp_path, rows, kinds, "time" if "time" in kinds else "dense")
        return
    options: dict[str, Any] = {}
    if mode == "schema":
        options["schema"] = tmp_path / "schema.yaml"
        options["schema"].write_text("label: label\ncategorical: [city, shop_id]\n")
    types = [TYPES[name][0] for name in (one, other) if name != "null"]
    is_dropped = [mode == "list" and not can_be_feature(pa.list_(kind)) for kind in types]
    if (len(kinds) > 1 or len(set(is_dropped)) > 1) and not all(is_dropped):
        check_refused(tmp_path, **options)
        return
    dataset = run(tmp_path, **options)
    if all(is_dropped) or (mode != "schema" and kinds == {"time"}):
        assert [feature.name for feature in dataset.sparse] == ["city"]  # no such column is a feature
        return
    prepared = read_split(tmp_path / "out", "train")
    if kinds == {"bool"} and mode == "single":
        check_numbers(prepared, rows)
    else:
        ids = [[hashed("shop_id", text_of(v)) for v in row or []] if mode == "list" else
               hashed("shop_id", text_of(row)) for row in rows]  # fmt: skip
        assert prepared.column("shop_id").to_pylist() == ids


def check_role(folder: Path, rows: list[Any], kinds: set[str], role: str) -> None:
    """With a schema: times, and booleans among numbers, which are 0 and 1."""
    entry = "[shop_id]" if role == "dense" else "shop_id"
    (folder / "schema.yaml").write_text(f"label: label\ncategorical: [city]\n{role}: {entry}\n")
    if kinds - {"bool", "number"} and kinds != {"time"}:
        check_refused(folder, schema=folder / "schema.yaml")
        return
    run(folder, schema=folder / "schema.yaml")
    prepared = read_split(folder / "out", "train")
    if role == "dense":
        check_numbers(prepared, rows)
        return
    for prepared_value, value in zip(prepared.column("shop_id").to_pylist(), rows, strict=True):
        expected = pl.Series([value], dtype=pl.Datetime("us")).dt.epoch("s")[0] if value is not None else None
        assert prepared_value == expected or (value is None and (prepared_value is None or np.isnan(prepared_value)))


def check_numbers(prepared: pa.Table, rows: list[Any]) -> None:
    """The dense feature is standardized log(1 + x), by polars."""
    logs = pl.Series([None if row is None else float(row) for row in rows], dtype=pl.Float64).fill_null(0.0).log1p()
    expected = (logs - logs.mean()) / logs.std(ddof=0)
    np.testing.assert_allclose(prepared.column("shop_id").to_numpy(), expected.to_numpy(), rtol=1e-5, atol=1e-6)


def check_refused(folder: Path, **options: Any) -> None:
    """One line with both files, the column and both types; nothing is left."""
    with pytest.raises(MesetaError) as refused:
        run(folder, **options)
    types = [re.escape(str(pq.read_schema(folder / name).field("shop_id").type)) for name in ("a.parquet", "b.parquet")]
    places = [re.escape(repr(f"{folder}/{name}")) for name in ("a.parquet", "b.parquet")]
    pattern = rf"source {places[1]}: column 'shop_id' is {types[1]}, but {types[0]} in {places[0]}; write both files .*"
    assert re.fullmatch(pattern, str(refused.value)), refused.value
    assert not (folder / "out").exists()


def test_three_files_of_which_one_is_null(tmp_path: Path) -> None:
    """A conflict is found behind an all-null file, and an all-null file anywhere changes nothing."""
    write(tmp_path / "a.parquet", pa.nulls(NUM_ROWS))
    write(tmp_path / "b.parquet", pa.array(values_of("string", 0)))
    write(tmp_path / "c.parquet", pa.array(values_of("int64", 0), pa.int64()))
    with pytest.raises(MesetaError, match=r"c.parquet': column 'shop_id' is int64, but string in .*b.parquet'"):
        prepare(PrepareOptions(sources=[f"{tmp_path}/*.parquet"], out=tmp_path / "out"))
    assert [feature.name for feature in run(tmp_path).sparse] == ["city", "shop_id"]


@pytest.mark.parametrize("ignore", [["shop_id"], ["shop*"]])
def test_ignored_columns_may_differ(tmp_path: Path, ignore: list[str]) -> None:
    write_pair(tmp_path, "string", "int64", lists=False)
    assert [feature.name for feature in run(tmp_path, ignore=ignore).sparse] == ["city"]
    (tmp_path / "schema.yaml").write_text("label: label\ncategorical: [city]\n")
    dataset = run(tmp_path, schema=tmp_path / "schema.yaml", force=True)
    assert [feature.name for feature in dataset.sparse] == ["city"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.struct([("a", pa.int64())]), pa.struct([("b", pa.string()), ("c", pa.int8())])),
        (pa.list_(pa.list_(pa.int64())), pa.struct([("a", pa.int64())])),
    ],
)
def test_columns_that_are_no_feature_in_any_file_may_differ(
    tmp_path: Path, one: pa.DataType, other: pa.DataType
) -> None:
    write(tmp_path / "a.parquet", pa.nulls(NUM_ROWS, one))
    write(tmp_path / "b.parquet", pa.nulls(NUM_ROWS, other))
    assert [feature.name for feature in run(tmp_path).sparse] == ["city"]


PAIR = pa.struct([("item", pa.string()), ("seconds", pa.float32())])


@pytest.mark.parametrize(
    "kind",
    [
        pa.large_list(pa.struct([("item", pa.large_string()), ("seconds", pa.int32())])),
        pa.list_(pa.struct([("item", pa.dictionary(pa.int8(), pa.string())), ("s", pa.float64())])),
        pa.list_(pa.null()),
        pa.null(),
        pa.list_(pa.struct([("item", pa.null()), ("seconds", pa.float32())])),
    ],
    ids=str,
)
@pytest.mark.parametrize("case", diagonal(swapped=[False, True], with_schema=[True, False]))
def test_lists_of_pairs(tmp_path: Path, kind: pa.DataType, case: dict[str, bool]) -> None:
    swapped, with_schema = case["swapped"], case["with_schema"]
    rows = [[{"item": f"v{i}", "seconds": float(i)} for i in range(row % 4)] for row in range(NUM_ROWS)]
    holds_pairs = pa.types.is_large_list(kind) or "float64" in str(kind) or "double" in str(kind)
    names = [kind.value_type.field(place).name for place in (0, 1)] if holds_pairs else []
    others = [[dict(zip(names, pair.values(), strict=True)) for pair in row] for row in rows] if names else [[]] * 60
    files = [(pa.list_(PAIR), rows), (kind, [None] * NUM_ROWS if kind == pa.null() else others)]
    expected = []
    for path, (one, values) in zip("ab", reversed(files) if swapped else files, strict=True):
        write(tmp_path / f"{path}.parquet", pa.array(values, one))
        expected += [[hashed("shop_id", pair_id) for pair_id in (next(iter(p.values())) for p in row or [])]
                     for row in values]  # fmt: skip
    options: dict[str, Any] = {}
    if with_schema:
        options["schema"] = tmp_path / "schema.yaml"
        options["schema"].write_text("label: label\ncategorical: [city, shop_id]\n")
    dataset = run(tmp_path, **options)
    assert [(feature.name, feature.weighted) for feature in dataset.sparse] == [("city", False), ("shop_id", True)]
    assert read_split(tmp_path / "out", "train").column("shop_id").to_pylist() == expected


LARGE = {pa.int64(): 2**53, pa.uint64(): 2**53, pa.decimal128(38, 0): 2**53, pa.decimal128(20, 2): Decimal(10**13)}
"""Most that float64 keeps of each type."""


@pytest.mark.parametrize(
    "case", sample(product(kind=[*LARGE], role=["dense", "categorical"], swapped=[False, True]), 6, seed=0)
)
def test_numbers_beyond_float64_are_refused_among_doubles(tmp_path: Path, case: dict[str, Any]) -> None:
    kind, role, swapped = case["kind"], case["role"], case["swapped"]
    (tmp_path / "schema.yaml").write_text(
        f"label: label\n{role}: [{'city, ' if role == 'categorical' else ''}shop_id]\n"
    )
    wide, double = ("b", "a") if swapped else ("a", "b")
    largest = LARGE[kind]
    write(tmp_path / f"{wide}.parquet", pa.array([largest] * NUM_ROWS, kind))
    write(tmp_path / f"{double}.parquet", pa.array([float(largest), None] * (NUM_ROWS // 2)))
    run(tmp_path, schema=tmp_path / "schema.yaml")
    ids = read_split(tmp_path / "out", "train").column("shop_id").to_pylist()
    assert len(set(ids)) == 2  # the same number is the same id, or the same value
    write(tmp_path / f"{wide}.parquet", pa.array([*[1] * (NUM_ROWS - 1), largest + 1], kind))
    message = rf"{wide}.parquet': column 'shop_id' is .*, but double in '.*{double}.parquet'; .* has more digits than"
    with pytest.raises(MesetaError, match=message):
        run(tmp_path, schema=tmp_path / "schema.yaml", force=True)
    for name in (wide, double):
        write(tmp_path / f"{name}.parquet", pa.array([*[1] * (NUM_ROWS - 1), largest + 1], kind))
    run(tmp_path, schema=tmp_path / "schema.yaml", force=True)  # without doubles, nothing is widened


@pytest.mark.parametrize("other", ["null", "large_string", "dictionary"])
@pytest.mark.parametrize("lists", [False, True])
def test_new_rows_of_other_types(tmp_path: Path, other: str, lists: bool) -> None:
    """`--like` takes a file of the same kind, or with nulls alone, without the other parts."""
    rows = write_pair(tmp_path, "string", other, lists=lists)
    prepare(PrepareOptions(sources=[f"{tmp_path}/a.parquet"], out=tmp_path / "out", hash_rows=500))
    prepare_like(PrepareLikeOptions(sources=[f"{tmp_path}/b.parquet"], out=tmp_path / "new", like=tmp_path / "out"))
    ids = read_split(tmp_path / "new", "test").column("shop_id").to_pylist()
    expected = [[hashed("shop_id", text_of(v)) for v in row or []] if lists else hashed("shop_id", text_of(row))
                for row in rows[NUM_ROWS:]]  # fmt: skip
    assert ids == expected


@pytest.mark.parametrize("swapped", [False, True])
def test_lists_with_fractions_in_one_file_are_no_reason_to_drop_a_column(tmp_path: Path, swapped: bool) -> None:
    lists = [pa.array([[1, 2], []] * 30, pa.list_(pa.int64())), pa.array([[1.5], [2.0]] * 30)]
    for path, column in zip("ab", reversed(lists) if swapped else lists, strict=True):
        write(tmp_path / f"{path}.parquet", column)
    check_refused(tmp_path)
    for path in "ab":
        write(tmp_path / f"{path}.parquet", lists[1])
    assert [feature.name for feature in run(tmp_path).sparse] == ["city"]
