"""`prepare` of CSV: rows as Python's csv module reads them, roles as inferred or as a schema says, errors by line."""

import csv
import gzip
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh64_intdigest

from data.click_log import read_split
from meseta.data import Dataset
from meseta.data.formats import text as text_format
from meseta.data.formats.csv import complete_records_size, count_records
from meseta.data.prepare import PrepareOptions, prepare, read_layout
from meseta.data.schema.infer import MISSING_TEXTS, infer_label, infer_role, role_from_name
from meseta.data.schema.schema import format_schema
from meseta.spec import MesetaError

HEADER = ["row_id", "Click", "price", "user_id", "city", "note, long", "time"]
CITIES = ["Paris", "Köln", 'the "old" one', "two\nlines", "a,b", "NA", "", " x "]


def make_rows(num_rows: int, seed: int = 0) -> list[list[str]]:
    draw = np.random.default_rng(seed)
    return [
        [
            str(i),
            str(int(draw.random() < 0.3)),
            str(draw.choice(["", "NA", "0.5", "-2", "1e3", " 7"])),
            str(10**12 + draw.integers(40)) if draw.random() < 0.9 else "",
            str(draw.choice(CITIES)),
            f"note {draw.integers(5)}",
            f"2026-01-{1 + i % 28:02d} 10:00:00",
        ]
        for i in range(num_rows)
    ]


def write_csv(path: Path, rows: list[list[str]], header: list[str] = HEADER, end: str = "\r\n") -> Path:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator=end).writerows([header, *rows])
    data = text.getvalue().encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def run(tmp_path: Path, *patterns: str, **options: Any) -> Dataset:
    settings = {"test_fraction": 0.0, "hash_rows": 500, "out": tmp_path / "out", **options}
    return prepare(PrepareOptions(sources=[f"{tmp_path}/{p}" for p in patterns or ["log.csv"]], **settings))


def hashed(feature: str, value: str) -> int:
    return xxh64_intdigest(value.encode(), xxh64_intdigest(feature.encode(), 0)) * 500 >> 64


def check(tmp_path: Path, rows: list[list[str]], dense: list[str], sparse: list[str], *, signed: bool = True) -> None:
    """The prepared rows against those of the csv module, in the order of HEADER."""
    table = read_split(tmp_path / "out", "train")
    columns = dict(zip(HEADER, zip(*rows, strict=True), strict=True))
    assert table.column("label").to_pylist() == [float(v) for v in columns["Click"]]
    for name in dense:
        numbers = [float(v) if v not in MISSING_TEXTS else 0.0 for v in columns[name]]
        values = np.array([math.log1p(max(v, 0.0)) - (math.log1p(max(-v, 0.0)) if signed else 0.0) for v in numbers])
        expected = (values - values.mean()) / values.std()
        np.testing.assert_allclose(table.column(name).to_numpy(), expected, rtol=1e-5, atol=1e-6)
    for name in sparse:
        assert table.column(name).to_pylist() == [hashed(name, v) for v in columns[name]]


@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("block_bytes", [8 << 20, 150])
def test_rows_are_those_of_the_csv_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, end: str, block_bytes: int
) -> None:
    monkeypatch.setattr(text_format, "BLOCK_BYTES", block_bytes)
    path = write_csv(tmp_path / name, make_rows(200), end=end)
    data = gzip.decompress(path.read_bytes()) if name.endswith("gz") else path.read_bytes()
    rows = list(csv.reader(io.StringIO(data.decode(), newline="")))[1:]
    dataset = run(tmp_path, name)
    assert [d.name for d in dataset.dense] == ["price", "time.age"]
    assert [s.name for s in dataset.sparse] == ["user_id", "city", "note, long", "time.hour", "time.weekday"]
    check(tmp_path, rows, ["price"], ["user_id", "city", "note, long"])


@given(st.lists(st.lists(st.text('a",\n\r ', max_size=4), min_size=2, max_size=3), min_size=1, max_size=8))
def test_records_end_where_the_csv_module_ends_them(rows: list[list[str]]) -> None:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL).writerows(rows)
    data = text.getvalue().encode()
    assert count_records(data) == len(rows)
    for stop in range(len(data) + 1):
        cut = complete_records_size(data[:stop])
        assert list(csv.reader(io.StringIO(data[:cut].decode(), newline=""))) == rows[: count_records(data[:cut])]
        assert count_records(data[cut:stop]) == 0


def test_columns_of_several_files_go_by_name(tmp_path: Path) -> None:
    rows = make_rows(120)
    write_csv(tmp_path / "a.csv", rows[:70])
    (tmp_path / "b.csv").write_bytes(
        b"\xef\xbb\xbf" + write_csv(tmp_path / "c", [row[::-1] for row in rows[70:]], HEADER[::-1]).read_bytes()
    )
    run(tmp_path, "*.csv")
    check(tmp_path, rows, ["price"], ["user_id", "city", "note, long"])
    write_csv(tmp_path / "b.csv", [row[:4] for row in rows[70:]], HEADER[:4])
    with pytest.raises(MesetaError, match=r"b.csv' has no column 'time'"):
        run(tmp_path, "*.csv", force=True)


@pytest.mark.parametrize(
    ("name", "values", "role"),
    [
        ("price", ["1.5", "", "NA", "2"], "dense"),
        ("age", ["1", "2"], "dense"),
        ("user_id", ["1", "2"], "categorical"),
        ("userId", ["1", "2"], "categorical"),
        ("C14", ["1", "2"], "categorical"),
        ("paid", ["1", "2"], "dense"),
        ("user_id", ["1.5"], "dense"),
        ("size", ["1_000"], "categorical"),
        ("size", ["1", "inf"], "dense"),
        ("city", ["Paris", ""], "categorical"),
        ("gone", ["", "NA"], "ignore"),
        ("", ["1"], "ignore"),
        ("hour", ["2026-01-02T03:04:05Z", ""], "ignore"),
        ("id", list(map(str, range(50))), "ignore"),
        ("id", list(map(str, range(49))), "categorical"),
        ("id", ["7"] * 60, "ignore"),
    ],
)
def test_roles_are_guessed_by_name_and_sample(name: str, values: list[str], role: str) -> None:
    assert infer_role(name, values).role == role


def test_labels_are_guessed_by_name() -> None:
    assert infer_label(["y", "Label", "click"]) == "Label"
    assert infer_label(["a", "CLICK"]) == "CLICK"
    assert infer_label(["a", "clicks"]) is None
    assert [role_from_name(name) for name in ("zip", "valid", "num_ids")] == ["categorical", None, "dense"]


def test_options_go_before_what_is_inferred(tmp_path: Path) -> None:
    write_csv(tmp_path / "log.csv", make_rows(60))
    dataset = run(tmp_path, dense=["user_id"], label="Click", time_features=())
    assert [d.name for d in dataset.dense] == ["price", "user_id"]
    assert [s.name for s in dataset.sparse] == ["city", "note, long"]
    dataset = run(tmp_path, sparse=["price"], time_features=(), force=True)
    names = [s.name for s in dataset.sparse]
    assert ([d.name for d in dataset.dense], names) == ([], ["price", "user_id", "city", "note, long"])


def test_the_schema_that_is_printed_says_what_was_inferred(tmp_path: Path) -> None:
    write_csv(tmp_path / "log.csv", make_rows(60), ["yes", "Click", "#a", "user_id", "a: b", "it's ", "time"])
    options = PrepareOptions(sources=[f"{tmp_path}/log.csv"], out=tmp_path / "out")
    layout = read_layout(options)
    (tmp_path / "schema.yaml").write_text(format_schema(layout))
    again = read_layout(PrepareOptions(sources=options.sources, out=options.out, schema=tmp_path / "schema.yaml"))
    assert (again, again.ignored) == (layout, layout.ignored)
    assert (layout.ignored, layout.time) == (("yes",), "time")  # a key


def test_a_schema_overrides(tmp_path: Path) -> None:
    rows = make_rows(60)
    write_csv(tmp_path / "log.csv", rows)
    (tmp_path / "schema.yaml").write_text("label: Click\ncategorical: [price, city]\ndense: [row_id]\nignore:\n")
    run(tmp_path, schema=tmp_path / "schema.yaml")
    check(tmp_path, rows, ["row_id"], ["price", "city"], signed=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lable: Click", "unknown key 'lable'; did you mean 'label'"),
        ("labels: Click", "key 'labels': input should be a valid list"),
        ("dense: [price]", "key 'label': field required"),
        ("label: Click\nlabels: [Click]", "both are given; specify either 'label' or 'labels'"),
        ("label: Click\ndense: price", "key 'dense': "),
        ("label: Click\ndense: [prize]", "has no column 'prize'; did you mean 'price'"),
        ("label: Click\nignore: [cities]", "has no column 'cities'"),
        ("label: Click\ndense: [price]\nignore: [price]", "column 'price' is named twice"),
        ("label: Click", "has no feature besides the label"),
        (
            "label: Click\ncategorical: [city]\nweights: {city: price}",
            "is not multi-valued; list it under multi_valued",
        ),
        ("label: Click\nweights: {city: price}", "is not under categorical"),
        ("- a", "must contain a mapping"),
        ("label: [", "is not YAML"),
    ],
)
def test_bad_schemas_are_named(tmp_path: Path, text: str, message: str) -> None:
    write_csv(tmp_path / "log.csv", make_rows(5))
    (tmp_path / "schema.yaml").write_text(text)
    with pytest.raises(MesetaError, match=message):
        run(tmp_path, schema=tmp_path / "schema.yaml")


BODY = 'label,price,city\n0,1,"two\nlines"\n1,,b\n'  # lines 1, 2-3, 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BODY + "2,1,c\n", r"log.csv', line 5, column 'label': '2' is outside 0..1"),
        (BODY + ",1,c\n", r"line 5, column 'label': '' is not a label"),
        (BODY + "ja,1,c\n", r"line 5, column 'label': 'ja' is not a label"),
        (BODY + "0,dear,c\n", r"line 5, column 'price': 'dear' is not a number; .*--schema"),
        (BODY + "0,1\n", "line 5: 2 fields, but the header has 3"),
        (BODY + "0,1,2,3\n0,1,a\n", "line 5: 4 fields, but the header has 3"),
        (BODY + "\n0,1,a\n", "line 5: 0 fields, but the header has 3"),
        (BODY + '0,1,"c\n0,1,d\n', "line 5: a quote is not closed"),
        (BODY + '0,1,5" pipe\n0,1,d\n', "line 5: a quote is not closed, or it is inside a field without quotes"),
        ("label,price\n", "contains no rows"),
        ("label\n1\n", "the header has 1 column"),
        ("label:price\n1:2\n", "the header has 1 column"),
        ("a,b\n1,2\n", "none of 'a', 'b' has the name of a label; choose one with --label"),
        ("label,b,b\n1,2,3\n", "'b' is the name of two columns"),
        ("label,b\n", "contains no rows"),
        ("label,0\n", "contains no rows"),
        ("0,2,x\n1,2,y\n2,2,z\n", "'column_1', 'column_2', 'column_3'; no single one of them contains only 0 and 1"),
        ("\xff,b\n1,2\n", "header is not UTF-8"),
        ('label,b"\n1,2"\n1,2\n', "line 1: the header .*a quote is not closed, or it is inside a field without quotes"),
    ],
)
@pytest.mark.parametrize("block_bytes", [8 << 20, 24])
def test_bad_csv_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str, block_bytes: int
) -> None:
    monkeypatch.setattr(text_format, "BLOCK_BYTES", block_bytes)
    (tmp_path / "log.csv").write_bytes(text.encode("latin-1"))
    explicit = {"dense": ["price"], "sparse": ["city"]} if text.startswith(BODY) else {}
    with pytest.raises(MesetaError, match=message) as error:
        run(tmp_path, **explicit)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_stray_quotes_never_cut_a_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Line ends inside and outside of quotes change places here, and are equal in number."""
    text = 'label,price,city\n0,1,5" pipe\n0,1,"a\nb\nc"\n0,1,6" pipe\n'
    (tmp_path / "log.csv").write_text(text)
    run(tmp_path, label="label")
    expected = [hashed("city", row[2]) for row in csv.reader(io.StringIO(text, newline=""))][1:]
    assert read_split(tmp_path / "out", "train").column("city").to_pylist() == expected
    monkeypatch.setattr(text_format, "BLOCK_BYTES", 24)
    with pytest.raises(MesetaError, match="line 2: a quote is not closed, or it is inside a field without quotes"):
        run(tmp_path, force=True)


def test_options_and_schema_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(MesetaError, match="--schema cannot be used with"):
        PrepareOptions(sources=["x"], out=tmp_path, schema=tmp_path / "s", label="a")


@pytest.mark.parametrize("words", [("true", "false"), ("Yes", "NO"), ("T", "f"), (" y ", "n")])
def test_labels_may_be_words(tmp_path: Path, words: tuple[str, str]) -> None:
    labels = [row % 3 == 0 for row in range(120)]
    lines = [f"{words[0] if label else words[1]},{row % 7},c{row % 5}" for row, label in enumerate(labels)]
    (tmp_path / "log.csv").write_text("clicked,age,city\n" + "\n".join(lines) + "\n")
    dataset = prepare(PrepareOptions(sources=[str(tmp_path / "log.csv")], out=tmp_path / "out", test_fraction=0.5))
    assert sum(split.num_positives for split in dataset.splits.values()) == sum(labels)


@pytest.mark.parametrize("block_bytes", [8 << 20, 40])
def test_a_label_that_is_no_word_and_no_number_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(text_format, "BLOCK_BYTES", block_bytes)
    for first, last, problem in (
        ("true", "maybe", "is not a label: .* or true or false"),
        ("yes", "2", "is outside 0..1"),
    ):
        (tmp_path / "log.csv").write_text(f"clicked,age\n{first},1\n" + "0,2\nNo,4\n" * 30 + f"{last},3\n")
        with pytest.raises(MesetaError, match=f"line 63, column 'clicked': .*{last}.* {problem}"):
            prepare(PrepareOptions(sources=[str(tmp_path / "log.csv")], out=tmp_path / "out"))
