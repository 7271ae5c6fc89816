"""Tests of labels from ratings, from -1 and 1 and from words, in CSV and Parquet, against plain Python."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meseta.data import Dataset, PrepareOptions
from meseta.data.dataset.encoding import DatasetEncoding, encoding_difference
from meseta.data.prepare import prepare
from meseta.data.prepare.prepare_like import PrepareLikeOptions, prepare_like
from meseta.data.prepare.run import read_layout
from meseta.data.schema.layout import RawLayout
from meseta.data.schema.schema import add_signed_labels, format_schema, resolve_labels
from meseta.spec import MesetaError
from sampling import diagonal, product, sample

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


def write(path: Path, columns: dict[str, list[Any]]) -> Path:
    """Write a table as CSV or as Parquet, by the suffix of `path`."""
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path)
    else:
        lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
        path.write_text("\n".join(lines) + "\n")
    return path


def signs_and_ratings() -> dict[str, list[Any]]:
    return {"click": [-1, 1] * 50, "rating": [row % 6 for row in range(100)], "city": ["a", "b"] * 50}


def labels_of(folder: Path, columns: dict[str, list[Any]], label: list[str], form: str) -> dict[str, list[float]]:
    """Prepare a table and return each label of its rows."""
    source = write(folder / f"log.{form}", columns)
    prepare(PrepareOptions(sources=[str(source)], out=folder / "out", label=label, test_fraction=0.0, force=True))
    table = pq.read_table(folder / "out" / "train")
    return {name: table[name].to_pylist() for name in Dataset.load(folder / "out").labels}


@pytest.mark.parametrize("case", diagonal(sign=[*OPERATORS], form=["csv", "parquet"]))
def test_a_condition_makes_the_label(tmp_path: Path, case: dict[str, Any]) -> None:
    sign, form = case["sign"], case["form"]
    ratings = [draw / 2 for draw in np.random.default_rng(0).integers(0, 11, 200).tolist()]
    columns = {"rating": ratings, "city": [f"c{row % 3}" for row in range(200)]}
    labels = labels_of(tmp_path, columns, [f"rating {sign} 3.5"], form)
    assert labels == {"label": [float(OPERATORS[sign](rating, 3.5)) for rating in ratings]}
    assert [feature.name for feature in Dataset.load(tmp_path / "out").sparse] == ["city"]


def test_several_labels_of_one_column(tmp_path: Path) -> None:
    columns = {"watched": list(range(100)), "liked": [row % 2 for row in range(100)], "city": ["a", "b"] * 50}
    labels = labels_of(tmp_path, columns, ["long=watched > 60", "short = watched>5", "liked"], "csv")
    assert labels == {
        "long": [float(row > 60) for row in range(100)],
        "short": [float(row > 5) for row in range(100)],
        "liked": [float(row % 2) for row in range(100)],
    }


@given(
    column=st.text(st.characters(exclude_characters="<>=!", exclude_categories=["C", "Z"]), min_size=1, max_size=8),
    sign=st.sampled_from(list(OPERATORS)),
    number=st.floats(allow_nan=False, allow_infinity=False),
    spaces=st.sampled_from(["", " ", "  "]),
)
def test_conditions_are_read_back(column: str, sign: str, number: float, spaces: str) -> None:
    entry = f"{column}{spaces}{sign}{spaces}{number!r}"
    [label], [rule] = resolve_labels("x", [entry], [column])
    assert (rule.name, rule.column, rule.operator, rule.threshold) == (label, column, sign, number)
    assert resolve_labels("x", [rule.entry], [column]) == ((label,), (rule,))
    assert resolve_labels("x", [entry], [column, entry]) == ((entry,), ())  # the name of a column goes first


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["rating >= four"], "compares with 'four', which is not a finite number"),
        (["rating >= nan"], "compares with 'nan'"),
        (["rating >= 1e999"], "compares with '1e999'"),
        (["ratings >= 4"], "has no column 'ratings'"),
        (["a=rating > 1", "a=rating > 2"], "two labels are called 'a'"),
    ],
)
def test_bad_conditions_are_named(entries: list[str], message: str) -> None:
    with pytest.raises(MesetaError, match=message):
        resolve_labels("x", entries, ["rating"])


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_minus_one_counts_as_zero(tmp_path: Path, form: str) -> None:
    signs = np.random.default_rng(1).choice([-1, 1], 200).tolist()
    columns = {"click": signs, "city": ["a", "b"] * 100}
    assert labels_of(tmp_path, columns, ["click"], form) == {"label": [float(sign > 0) for sign in signs]}
    options = PrepareOptions(sources=[str(tmp_path / f"log.{form}")], out=tmp_path / "out", label="click")
    assert "label: click                    # -1 and 1: -1 counts as 0\n" in format_schema(read_layout(options))


@pytest.mark.parametrize("case", sample(product(tail=[0, 0.5, 2], form=["csv", "parquet"]), 1, seed=1))
def test_another_number_among_signs_is_an_error(tmp_path: Path, case: dict[str, Any]) -> None:
    """The sampled rows, from which labels are inferred, have only -1 and 1."""
    form = case["form"]
    columns = {"click": [-1.0, 1.0] * 10_500 + [case["tail"]], "city": ["a", "b"] * 10_500 + ["b"]}
    place = "line 21002" if form == "csv" else "row 21001"
    with pytest.raises(MesetaError, match=f"{place}, column 'click': .* is not a label: labels must be -1 or 1"):
        labels_of(tmp_path, columns, ["click"], form)


@pytest.mark.parametrize(
    "values", [["true", "FALSE", "1"], ["Yes", "no", "0"], ["t", "f", "0.5"], ["Y", "n", " no "]], ids=str
)
def test_words_are_labels_in_parquet_as_in_csv(tmp_path: Path, values: list[str]) -> None:
    columns = {"click": values * 40, "city": ["a", "b", "c"] * 40}
    of_csv = labels_of(tmp_path, columns, ["click"], "csv")
    assert labels_of(tmp_path, columns, ["click"], "parquet") == of_csv
    kinds: list[pa.DataType] = [pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())]
    for kind in kinds:
        arrays: dict[str, Any] = {**columns, "click": pa.array(columns["click"], pa.string()).cast(kind)}
        assert labels_of(tmp_path, arrays, ["click"], "parquet") == of_csv


def test_further_rows_take_the_decision_of_the_first_ones(tmp_path: Path) -> None:
    columns = signs_and_ratings()
    labels_of(tmp_path, columns, ["click", "liked=rating >= 4"], "csv")
    new = write(tmp_path / "new.parquet", {"click": [1.0, 1.0, -1.0], "rating": [3, 4, 5], "city": ["a", "b", "a"]})
    prepare_like(PrepareLikeOptions(sources=[str(new)], out=tmp_path / "more", like=tmp_path / "out"))
    table = pq.read_table(tmp_path / "more" / "test")
    assert table["click"].to_pylist() == [1, 1, 0] and table["liked"].to_pylist() == [0, 1, 1]
    new = write(tmp_path / "new.parquet", {"click": [1.0, 0.0], "rating": [3, 4], "city": ["a", "b"]})
    with pytest.raises(MesetaError, match=r"row 2, column 'click': 0\.0 is not a label: labels must be -1 or 1"):
        prepare_like(PrepareLikeOptions(sources=[str(new)], out=tmp_path / "more", like=tmp_path / "out", force=True))


def test_the_schema_that_is_printed_says_it(tmp_path: Path) -> None:
    columns = signs_and_ratings()
    source = str(write(tmp_path / "log.csv", columns))
    options = PrepareOptions(sources=[source], out=tmp_path / "out", label=["click", "liked=rating >= 4"])
    layout = read_layout(options)
    (tmp_path / "schema.yaml").write_text(format_schema(layout))
    again = read_layout(PrepareOptions(sources=[source], out=tmp_path / "out", schema=tmp_path / "schema.yaml"))
    assert again == layout and again.raw_label_columns == ["click", "rating"]


@pytest.mark.parametrize("role", ["dense", "time"])
def test_a_column_that_makes_a_label_has_no_other_role(tmp_path: Path, role: str) -> None:
    source = write(tmp_path / "log.csv", {"rating": list(range(100)), "city": ["a", "b"] * 50})
    text = f"label: rating >= 4\n{role}: {'[rating]' if role == 'dense' else 'rating'}\ncategorical: [city]\n"
    (tmp_path / "schema.yaml").write_text(text)
    with pytest.raises(MesetaError, match="column 'rating' makes label 'rating >= 4' and also has another role"):
        prepare(PrepareOptions(sources=[str(source)], out=tmp_path / "out", schema=tmp_path / "schema.yaml"))


def test_runs_on_other_conditions_are_distinguished(tmp_path: Path) -> None:
    columns: dict[str, list[Any]] = {"rating": [row % 6 for row in range(100)], "city": ["a", "b"] * 50}
    encodings = []
    for label in ("liked=rating >= 4", "liked=rating >= 3"):
        labels_of(tmp_path, columns, [label], "csv")
        encodings.append(DatasetEncoding.from_dataset(Dataset.load(tmp_path / "out")))
    assert encoding_difference(encodings[0], encodings[0]) is None
    assert encoding_difference(*encodings) == "label 'liked', which was rating >= 4 and is rating >= 3 now"
    assert DatasetEncoding.from_dict(encodings[0].to_dict(), "x") == encodings[0]


@pytest.mark.parametrize(
    ("num_bad", "is_advised"), [(1, True), (200, False), pytest.param(5_000, False, marks=pytest.mark.soak)]
)
def test_leaving_rows_out_is_advised_for_few_rows_alone(tmp_path: Path, num_bad: int, is_advised: bool) -> None:
    ratings = [5 if row < num_bad else row % 2 for row in range(5_000)]
    np.random.default_rng(2).shuffle(ratings)
    with pytest.raises(MesetaError, match="specify a condition such as --label 'rating >= 5'") as caught:
        labels_of(tmp_path, {"rating": ratings, "city": ["a", "b"] * 2_500}, ["rating"], "csv")
    assert ("--bad-rows skip" in str(caught.value)) == is_advised


def test_a_label_of_ones_needs_no_rule() -> None:
    layout = RawLayout(labels=("a", "b", "c"), dense=(), sparse=())
    sample = {"a": ["1", "1"], "b": ["-1", "NA", "1.0"], "c": ["-1", "0", "1"]}
    assert [rule.name for rule in add_signed_labels(layout, sample).label_rules] == ["b"]
