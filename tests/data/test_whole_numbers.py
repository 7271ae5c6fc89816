"""One number, one id: every spelling of a whole number in a column of whole numbers is one value, in every format."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.click_log import make_lines, write_tsv
from meseta.data import Dataset, PrepareOptions, Reader, ReaderOptions
from meseta.data.dataset.encoding import DatasetEncoding, encoding_difference
from meseta.data.formats.table_rows import group_keys
from meseta.data.prepare import prepare, read_layout
from meseta.data.prepare.new_rows import NewRows
from meseta.data.prepare.prepare_like import PrepareLikeOptions, prepare_like
from meseta.data.schema.infer import holds_whole_numbers
from meseta.data.schema.schema import format_schema
from meseta.data.whole_numbers import reference, respell_whole_numbers
from meseta.spec import MesetaError
from sampling import diagonal, fewer_examples, product, sample

LOW, HIGH = -(2**63), 2**64 - 1
WHOLE = st.integers(LOW, HIGH) | st.integers(-200, 200) | st.sampled_from([0, LOW, HIGH, 2**53 + 1, 10**18, 10**19])
SPACES = st.text(" \t\r\n\v\f", max_size=2)
NUMBER_LIKE = st.text("0123456789+-.eE _x", max_size=12)


@st.composite
def spelling_of(draw: st.DrawFn, number: int) -> str:
    """A text whose value is `number`, by Python's own arithmetic."""
    digits, shift = str(abs(number)), draw(st.integers(-25, 25))
    sign = "-" if number < 0 else draw(st.sampled_from(["", "+", "-"] if number == 0 else ["", "+"]))
    if shift > 0:  # the point moves to the left, and the exponent says so
        digits = digits.zfill(shift + 1)
        text = f"{digits[:-shift]}.{digits[-shift:]}" + draw(st.sampled_from(["", "0", "00"]))
    else:
        zeros = "0" * -shift if number else ""  # 00 has a zero in front, which is kept
        text = digits + zeros + draw(st.sampled_from(["", ".", ".0", ".000"]))
    if text.startswith("0.") and draw(st.booleans()):
        text = text[1:] if any(sign.isdigit() for sign in text[2:]) else text
    exponent = (
        ""
        if shift == 0
        else draw(st.sampled_from("eE")) + (draw(st.sampled_from(["", "+"])) if shift > 0 else "") + str(shift)
    )
    return draw(SPACES) + sign + text + exponent + draw(SPACES)


def respelled(texts: Sequence[bytes], kind: pa.DataType | None = None) -> list[bytes]:
    return [bytes(value) for value in respell_whole_numbers(pa.array(texts, kind or pa.binary())).to_pylist()]


@given(st.data(), st.lists(WHOLE, max_size=20))
def test_every_spelling_becomes_the_usual_one(data: st.DataObject, numbers: list[int]) -> None:
    texts = [data.draw(spelling_of(number)).encode() for number in numbers]
    assert all(Decimal(text.decode().strip()) == number for text, number in zip(texts, numbers, strict=True))
    for kind in (pa.binary(), pa.large_binary()):
        assert respelled(texts, kind) == [b"%d" % number for number in numbers]
    strings = pa.array([text.decode() for text in texts], pa.string())
    assert respell_whole_numbers(strings.slice(1)).cast(pa.binary()).to_pylist() == [b"%d" % n for n in numbers[1:]]
    assert not numbers or holds_whole_numbers(["", *(text.decode() for text in texts)])


@fewer_examples(2)
@given(st.lists(NUMBER_LIKE | st.text(max_size=8), max_size=20))
def test_no_other_text_changes(texts: list[str]) -> None:
    encoded = [text.encode() for text in texts]
    result = respelled(encoded)
    assert result == reference.respell_whole_numbers(encoded)
    for before, after in zip(texts, result, strict=True):
        if after != before.encode():
            number = Fraction(before.strip())  # refuses underscores and spaces inside
            assert number.denominator == 1 and LOW <= number <= HIGH and after.decode() == str(number)
            assert not re.match(r"\s*[+-]?0\d", before)
        if holds_whole_numbers([before]) and len(before) < 12 and not re.search(r"[eE][+-]?\d{4,}", before):
            assert Fraction(before.strip()).denominator == 1


KEPT = ["012", "-007", "00", "01.0", "1e999999999", "1e99999999999999999999", "-1e20", "18446744073709551616",
        "-9223372036854775809", "9" * 400, "1" + "0" * 400]  # fmt: skip


@pytest.mark.parametrize("text", KEPT)
def test_zeros_in_front_and_more_than_64_bits_stay_text(text: str) -> None:
    assert respelled([text.encode(), b"12.0"]) == [text.encode(), b"12"]
    assert holds_whole_numbers([text])


@pytest.mark.parametrize("text", ["1.5", "12a", "1e-999999999", "0x10", "1_000", "--1", ".", "e5", "１２", " "])
def test_one_other_value_is_enough_to_leave_a_column_as_it_is(text: str) -> None:
    assert not holds_whole_numbers(["12", text])
    assert respelled([text.encode()]) == [text.encode()]
    assert not holds_whole_numbers(["", "NA"]) and not holds_whole_numbers([])


NAMES = ("user", "shop", "tags")
SCHEMA = {
    "label": "click", "categorical": ["user", "shop", "tags"], "group": "user", "dense": ["price"],
    "crosses": {"pair": ["user", "shop"]}, "whole_numbers": ["user", "shop", "tags"],
}  # fmt: skip


def rows(num_rows: int = 120) -> list[dict[str, Any]]:
    """Whole numbers, some of them missing; the last column holds lists."""
    return [
        {
            "click": row % 2,
            "price": row * 0.25,
            "user": None if row % 11 == 3 else row * row % 17 - 4,
            "shop": 2**40 + row % 5,
            "tags": [row % 7, 3] if row % 3 else [],
        }
        for row in range(num_rows)
    ]


def usual(number: int | None) -> str:
    return "" if number is None else str(number)


def as_double(number: int | None) -> str:
    return "" if number is None else f"{float(number)!r}"


def csv_of(table: list[dict[str, Any]], spell: Callable[[int | None], str]) -> bytes:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(table[0])
    for row in table:
        tags = "|".join(map(spell, row["tags"]))
        writer.writerow([row["click"], row["price"], spell(row["user"]), spell(row["shop"]), tags])
    return file.getvalue().encode()


def json_of(table: list[dict[str, Any]], convert: Callable[[int], Any]) -> bytes:
    def converted(value: Any) -> Any:
        if isinstance(value, list):
            return list(map(convert, value))
        return None if value is None else convert(value)

    lines = [{name: converted(value) if name in NAMES else value for name, value in row.items()} for row in table]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def parquet_of(table: list[dict[str, Any]], kind: pa.DataType, convert: Callable[[int], Any] = int) -> bytes:
    def column(name: str) -> pa.Array:
        values = [row[name] for row in table]
        if name == "tags":
            return pa.array([[convert(item) for item in items] for items in values], pa.list_(kind))
        return pa.array([None if value is None else convert(value) for value in values], kind)

    others = {name: pa.array([row[name] for row in table]) for name in ("click", "price")}
    file = io.BytesIO()
    pq.write_table(pa.table({**others, **{name: column(name) for name in NAMES}}), file)
    return file.getvalue()


FORMS: dict[str, tuple[str, Callable[[list[dict[str, Any]]], bytes]]] = {
    "csv": ("csv", lambda table: csv_of(table, usual)),
    "csv of doubles": ("csv", lambda table: csv_of(table, as_double)),
    "csv with exponents": ("csv", lambda table: csv_of(table, lambda n: "" if n is None else f" {n * 10}e-1")),
    "json": ("jsonl", lambda table: json_of(table, int)),
    "json of doubles": ("jsonl", lambda table: json_of(table, float)),
    "json of text": ("jsonl", lambda table: json_of(table, lambda n: f"{n}.0")),
    "int64": ("parquet", lambda table: parquet_of(table, pa.int64())),
    "double": ("parquet", lambda table: parquet_of(table, pa.float64(), float)),
    "string": ("parquet", lambda table: parquet_of(table, pa.string(), lambda n: f"+{n}.0" if n > 0 else str(n))),
    "large_binary": ("parquet", lambda table: parquet_of(table, pa.large_binary(), lambda n: b"%d.0" % n)),
}


def prepared(
    folder: Path, form: str, table: list[dict[str, Any]], schema: dict[str, Any] | None = None, **options: Any
) -> Path:
    """The folder of the dataset that one table in one form makes."""
    ending, write = FORMS[form]
    name = form.replace(" ", "_")
    (folder / f"{name}.{ending}").write_bytes(write(table))
    if schema is not None:
        multi_valued = {"multi_valued": {"tags": "|"}} if ending == "csv" else {}
        (folder / f"{name}.yaml").write_text(json.dumps({**schema, **multi_valued}))
        options["schema"] = folder / f"{name}.yaml"
    out = folder / f"{name}.out"
    prepare(
        PrepareOptions(
            sources=[f"{folder}/{name}.{ending}"], out=out, test_fraction=0, hash_rows=1000, force=True, **options
        )
    )
    return out


def training_rows(folder: Path) -> dict[str, list[Any]]:
    return pq.read_table(folder / "train").to_pydict()


@pytest.mark.parametrize(
    "case", sample(product(form=[form for form in FORMS if form != "csv"], vocabulary=[False, True]), 5, seed=0)
)
def test_one_table_in_any_form_gives_the_same_rows(tmp_path: Path, case: dict[str, Any]) -> None:
    form, options = case["form"], {"vocabulary": True, "min_count": 2} if case["vocabulary"] else {}
    expected = prepared(tmp_path, "csv", rows(), SCHEMA, **options)
    other = prepared(tmp_path, form, rows(), SCHEMA, **options)
    assert training_rows(other) == training_rows(expected)
    assert (
        encoding_difference(
            DatasetEncoding.from_dataset(Dataset.load(expected)), DatasetEncoding.from_dataset(Dataset.load(other))
        )
        is None
    )
    keys = [row["user"] for row in rows() if row["user"] is not None]
    assert {*keys} <= {*training_rows(other)["user.group"]}


@pytest.mark.parametrize("form", sample(FORMS, 3, seed=0))
def test_the_sample_decides(tmp_path: Path, form: str) -> None:
    options: dict[str, Any] = {"sparse": ["user", "shop"], "label": "click"}
    folder = prepared(tmp_path, form, rows(), **options)
    form_kept = Dataset.load(folder).source_form
    lists = [] if form.startswith("csv") else ["tags"]  # of CSV, a schema alone says that fields are lists
    assert form_kept is not None and [*form_kept.whole_numbers] == ["user", "shop", *lists]
    [source] = [path for path in tmp_path.iterdir() if path.stem == form.replace(" ", "_") and path.is_file()]
    layout = read_layout(PrepareOptions(sources=[str(source)], out=tmp_path / "no", **options))
    assert "whole_numbers:\n  - user\n  - shop\n" in format_schema(layout)
    (tmp_path / "printed.yaml").write_text(format_schema(layout))
    again = prepare(PrepareOptions(sources=[str(source)], out=tmp_path / "again", test_fraction=0, hash_rows=1000,
                                   schema=tmp_path / "printed.yaml"))  # fmt: skip
    assert again.source_form == form_kept and training_rows(tmp_path / "again") == training_rows(folder)


@given(st.data())
@fewer_examples(20)
def test_new_rows_take_the_stored_decision(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A day in which each value is spelled otherwise, and some are text."""
    folder = tmp_path_factory.mktemp("days")
    prepared(folder, "csv", rows(), SCHEMA)
    spellings: dict[int, str] = {}

    def spell(number: int | None) -> str:
        if number is None:
            return ""
        if number not in spellings:
            spellings[number] = data.draw(spelling_of(number)).strip()
        return spellings[number]

    (folder / "new.csv").write_bytes(csv_of(rows(), spell))
    prepare_like(PrepareLikeOptions(sources=[f"{folder}/new.csv"], out=folder / "new", like=folder / "csv.out"))
    assert pq.read_table(folder / "new/test").to_pydict() == training_rows(folder / "csv.out")


def ids(folder: Path, name: str = "user") -> list[int]:
    return training_rows(folder)[name]


def test_former_schemas_and_datasets_keep_the_former_rule(tmp_path: Path) -> None:
    former = {key: value for key, value in SCHEMA.items() if key != "whole_numbers"}
    usual_ids = ids(prepared(tmp_path, "csv", rows(), former))
    folder = prepared(tmp_path, "csv of doubles", rows(), former)
    document = json.loads((folder / "dataset.json").read_text())
    assert "whole_numbers" not in document["source_form"]
    missing = [row["user"] is None for row in rows()]
    same = [one == other for one, other in zip(ids(folder), usual_ids, strict=True)]
    assert same == missing  # each double is a distinct value
    (tmp_path / "again.csv").write_bytes(csv_of(rows(), usual))
    prepare_like(PrepareLikeOptions(sources=[f"{tmp_path}/again.csv"], out=tmp_path / "again", like=folder))
    assert pq.read_table(tmp_path / "again/test")["user"].to_pylist() == usual_ids


def test_criteo_logs_and_hexadecimal_ids_keep_each_spelling(tmp_path: Path) -> None:
    lines = [
        line.split("\t")[:14] + ["123e4567", "12.0"] + [str(row % 3)] * 24 for row, line in enumerate(make_lines(80))
    ]
    path = write_tsv(tmp_path / "log.tsv", ["\t".join(line) for line in lines])
    layout = read_layout(PrepareOptions(sources=[str(path)], out=tmp_path / "no"))
    assert layout.whole_numbers == () and "whole_numbers" not in format_schema(layout)
    assert not holds_whole_numbers(["123e4567", "12ab34cd"])


def test_zeros_in_front_are_another_value(tmp_path: Path) -> None:
    values = ["12", "12.0", "012", " 12", "1e999999999", "1.2e1", "0012"]
    text = "".join(f"{row % 2},{values[row % 7]}\n" for row in range(140))
    (tmp_path / "log.csv").write_text("click,zip\n" + text)
    prepare(
        PrepareOptions(
            sources=[f"{tmp_path}/log.csv"], out=tmp_path / "out", test_fraction=0, vocabulary=True, min_count=1
        )
    )
    vocabulary = pq.read_table(tmp_path / "out/vocabulary/zip.parquet").to_pydict()
    assert dict(zip(vocabulary["value"], vocabulary["count"], strict=True)) == {
        None: 0, "12": 80, "0012": 20, "012": 20, "1e999999999": 20
    }  # fmt: skip


CONDITIONS = ["user == 12", "user == 12.0", "user == '+12'", "user in ['1.2e1', 99]"]


@pytest.mark.parametrize("case", diagonal(condition=CONDITIONS, vocabulary=[False, True]))
def test_constants_of_filters_have_the_same_spelling(tmp_path: Path, case: dict[str, Any]) -> None:
    condition, vocabulary = case["condition"], case["vocabulary"]
    options = {"vocabulary": True, "min_count": 1} if vocabulary else {}
    table = [{**row, "user": (12, 99, 7)[place % 3]} for place, row in enumerate(rows())]
    folder = prepared(tmp_path, "csv of doubles", table, SCHEMA, **options)
    reader = Reader(Dataset.load(folder), "train", ReaderOptions(batch_size=16, filter=condition))
    assert reader.num_rows == (80 if "99" in condition else 40)


def test_other_decisions_are_another_encoding(tmp_path: Path) -> None:
    former = {key: value for key, value in SCHEMA.items() if key != "whole_numbers"}
    one, other = (Dataset.load(prepared(tmp_path, "csv", rows(), schema)) for schema in (SCHEMA, former))
    difference = encoding_difference(DatasetEncoding.from_dataset(one), DatasetEncoding.from_dataset(other))
    assert difference is not None
    assert "column 'shop', in which 12 and 12.0 were one value and are two values now" in difference
    assert DatasetEncoding.from_dict(
        DatasetEncoding.from_dataset(one).to_dict(), "run"
    ) == DatasetEncoding.from_dataset(one)


def test_group_keys_are_the_numbers_themselves() -> None:
    texts = respell_whole_numbers(pa.array(["12.0", "+12", "12", "012", "a"]))
    assert group_keys(texts).tolist()[:3] == [12, 12, 12] and len({*group_keys(texts).tolist()}) == 3


@pytest.mark.parametrize("kind", [pa.list_(pa.float64()), pa.large_list(pa.float32()), pa.list_(pa.decimal128(9, 2))])
def test_lists_of_whole_doubles_are_ids_and_others_are_left_out(tmp_path: Path, kind: pa.DataType) -> None:
    for name, extra in (("whole", 3.0), ("fraction", 0.5)):
        lists = pa.array([[Decimal(row % 5), Decimal(str(extra))] for row in range(60)]).cast(kind)
        pq.write_table(
            pa.table({"click": [0, 1] * 30, "seen": lists, "shop": [1, 2, 3] * 20}), tmp_path / f"{name}.parquet"
        )
    layout = read_layout(PrepareOptions(sources=[f"{tmp_path}/whole.parquet"], out=tmp_path / "no"))
    assert [column.name for column in layout.encoded_features] == ["seen", "shop"] and layout.whole_numbers == (
        "seen",
        "shop",
    )
    layout = read_layout(PrepareOptions(sources=[f"{tmp_path}/fraction.parquet"], out=tmp_path / "no"))
    assert [column.name for column in layout.encoded_features] == ["shop"]
    with pytest.raises(MesetaError, match=r"row 1, column 'seen': 0.50? in a list is not a whole number; fix the row"):
        prepare(PrepareOptions(sources=[f"{tmp_path}/fraction.parquet"], out=tmp_path / "no", sparse=["seen"]))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"whole_numbers": ["price"]}, "column 'price' is no category and not the group; list it under categorical"),
        ({"whole_numbers": ["user", "user"]}, "key 'whole_numbers': column 'user' is named twice"),
        ({"whole_numbers": ["click"]}, "column 'click' is no category and not the group"),
    ],
)
def test_bad_keys_are_named(tmp_path: Path, schema: dict[str, Any], message: str) -> None:
    with pytest.raises(MesetaError, match=re.escape(message)):
        prepared(tmp_path, "csv", rows(), {**SCHEMA, **schema})


def test_keys_of_new_rows_keep_the_raw_text(tmp_path: Path) -> None:
    folder = prepared(tmp_path, "csv", rows(), SCHEMA)
    (tmp_path / "new.csv").write_bytes(csv_of(rows(), as_double))
    [part] = NewRows(Dataset.load(folder), [f"{tmp_path}/new.csv"], keys=["user"]).read()
    assert part.keys is not None and part.keys["user"].to_pylist() == [as_double(row["user"]) for row in rows()]
    assert part.batch["user"].to_pylist() == ids(folder)


def test_recipes_and_splits_by_group_go_by_the_numbers(tmp_path: Path) -> None:
    """Rows of one group are spelled in two ways and stay in one split; the survey of quantiles reads groups as well."""
    half = csv_of(rows()[:60], usual) + csv_of(rows()[60:], as_double).partition(b"\n")[2]
    lines = [line.split(",") for line in half.decode().splitlines()]
    (tmp_path / "log.csv").write_text("\n".join(";".join(field.replace(".", ",") for field in line) for line in lines))
    keys = {**SCHEMA, "multi_valued": {"tags": "|"}, "decimal": ",", "delimiter": ";", "buckets": {"price": 3}}
    (tmp_path / "schema.yaml").write_text(json.dumps(keys))
    options: dict[str, Any] = {
        "sources": [f"{tmp_path}/log.csv"], "schema": tmp_path / "schema.yaml",
        "split_by": "group", "test_fraction": 0.3,
    }  # fmt: skip
    whole = prepare(PrepareOptions(out=tmp_path / "whole", **options))
    recipe = prepare(PrepareOptions(out=tmp_path / "recipe", recipe_only=True, **options))
    groups = [{*pq.read_table(tmp_path / "whole" / split)["user.group"].to_pylist()} for split in ("train", "test")]
    assert not groups[0] & groups[1] and all(groups)
    for split in ("train", "test"):
        one, other = (
            next(iter(Reader(dataset, split, ReaderOptions(batch_size=200)).epoch())) for dataset in (whole, recipe)
        )
        assert one.sparse.values.tolist() == other.sparse.values.tolist()
        assert one.dense.tolist() == other.dense.tolist()
