"""Conditions on rows against Python's own comparisons on the raw rows."""

from __future__ import annotations

import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meseta.data.dataset.dataset import Dataset
from meseta.data.prepare import PrepareOptions, prepare
from meseta.data.read.selection import MAX_CONSTANTS, RowFilter
from meseta.errors import format_value
from meseta.spec import MesetaError

NUM_ROWS = 400
CITIES = ["Ávila", "León", "", "it's"]
Row = dict[str, Any]
Condition = tuple[str, Callable[[Row], bool]]


def raw_rows() -> list[Row]:
    draw = np.random.default_rng(5)
    return [
        {
            "label": int(draw.random() < 0.4),
            "age": None if draw.random() < 0.1 else int(draw.integers(0, 9)) * 3,
            "price of it": round(float(draw.lognormal()), 2),
            "city": CITIES[draw.integers(0, 4)],
            "code": int(draw.integers(0, 6)),
        }
        for _ in range(NUM_ROWS)
    ]


ROWS = raw_rows()


def prepare_rows(folder: Path, name: str, **options: Any) -> Dataset:
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "raw.parquet")
    sparse = ["city", "code"]
    return prepare(
        PrepareOptions(
            sources=[str(folder / "raw.parquet")], out=folder / name, test_fraction=0.0, sparse=sparse, **options
        )
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("filter")


@pytest.fixture(scope="module")
def hashed(folder: Path) -> Dataset:
    return prepare_rows(folder, "hashed", hash_rows=100_000)


@pytest.fixture(scope="module")
def named(folder: Path) -> Dataset:
    return prepare_rows(folder, "named", vocabulary=True, min_count=1)


def chosen(dataset: Dataset, condition: str) -> list[int]:
    condition_on = RowFilter(condition, dataset)
    table = pq.read_table(dataset.dir / dataset.splits["train"].files[0].path, columns=list(condition_on.columns))
    return np.flatnonzero(condition_on(table)).tolist()


def number(name: str, sign: str, constant: float) -> Condition:
    """A comparison of a number, whose missing values count as 0."""
    signs: dict[str, Callable[[float, float], bool]] = {
        "==": lambda a, b: a == b, "!=": lambda a, b: a != b, "<": lambda a, b: a < b,
        "<=": lambda a, b: a <= b, ">": lambda a, b: a > b, ">=": lambda a, b: a >= b,
    }  # fmt: skip
    written = name if " " not in name else f"`{name}`"
    return f"{written} {sign} {constant}", lambda row: signs[sign](row[name] or 0, constant)


def category(name: str, values: list[Any], form: str) -> Condition:
    def written(value: Any) -> str:
        return str(value) if isinstance(value, int) else f'"{value}"'

    if form in ("==", "!="):
        return f"{name} {form} {written(values[0])}", lambda row: (row[name] == values[0]) == (form == "==")
    return f"{name} {form} [{', '.join(map(written, values))}]", lambda row: (row[name] in values) == (form == "in")


SIGNS = st.sampled_from(["==", "!=", "<", "<=", ">", ">="])
COMPARISONS = st.one_of(
    st.builds(number, st.just("age"), SIGNS, st.integers(-2, 26)),
    st.builds(number, st.just("price of it"), SIGNS, st.sampled_from([row["price of it"] for row in ROWS])),
    st.builds(number, st.just("label"), SIGNS, st.sampled_from([0, 1])),
    st.builds(
        category,
        st.just("city"),
        st.lists(st.sampled_from(CITIES), min_size=1, max_size=3),
        st.sampled_from(["==", "!=", "in", "not in"]),
    ),
    st.builds(
        category,
        st.just("code"),
        st.lists(st.integers(0, 5), min_size=1, max_size=3),
        st.sampled_from(["==", "not in"]),
    ),
)


def joined(parts: tuple[Condition, Condition], word: str) -> Condition:
    (text, holds), (other_text, other_holds) = parts
    if word == "and":
        return f"({text}) and ({other_text})", lambda row: holds(row) and other_holds(row)
    return f"({text} or {other_text})", lambda row: holds(row) or other_holds(row)


def negated(part: Condition) -> Condition:
    text, holds = part
    return f"not ({text})", lambda row: not holds(row)


CONDITIONS = st.recursive(
    COMPARISONS,
    lambda parts: st.one_of(
        st.builds(joined, st.tuples(parts, parts), st.sampled_from(["and", "or"])), st.builds(negated, parts)
    ),
    max_leaves=5,
)


@given(condition=CONDITIONS)
def test_conditions_mean_what_they_say_of_the_raw_rows(hashed: Dataset, named: Dataset, condition: Condition) -> None:
    text, holds = condition
    expected = [i for i, row in enumerate(ROWS) if holds(row)]
    assert chosen(hashed, text) == expected, text
    if '""' not in text:  # a vocabulary holds no missing value
        assert chosen(named, text) == expected, text


def test_and_binds_before_or_and_not_before_and(hashed: Dataset) -> None:
    expected = [i for i, r in enumerate(ROWS) if (r["label"] != 1 and r["code"] == 1) or r["code"] == 2]
    assert chosen(hashed, "not label == 1 and code == 1 or code == '2'") == expected


def test_it_looks_at_the_columns_that_it_names(hashed: Dataset) -> None:
    assert RowFilter("age > 1 and (city == 'x' or age < 9)", hashed).columns == ("age", "city")


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("", "character 1: expected a column, got 'the end'"),
        ("agee > 3", "character 1: there is no column 'agee'; did you mean 'age'"),
        ("age > ", "character 6: expected a number or a text in quotes, got 'the end'"),
        ("age > city", "character 7: expected a number or a text in quotes, got 'city'"),
        ("age 3", "character 5: expected a comparison or 'in' after 'age', got '3'"),
        ("age > 3 3", "character 9: expected 'and', 'or' or the end, got '3'"),
        ("(age > 3", r"character 9: expected '\)', got 'the end'"),
        ("age in 3", r"character 8: expected '\[', got '3'"),
        ("age in [3", r"character 10: expected '\]', got 'the end'"),
        ("age > 'x'", "character 7: column 'age' holds numbers; compare it with a number, not with 'x'"),
        ("city > 'x'", "character 8: categories have no order; compare 'city' with ==, != or in"),
        ("__import__('os')", "there is no column '__import__'"),
        ("age > 3; 1", "character 8: cannot read '; 1'"),
        ("city == 'x", 'character 9: cannot read "\'x"'),
        ("(" * 60 + "age > 3" + ")" * 60, "parentheses or 'not' are nested more than 50"),
    ],
)
def test_what_is_no_condition(hashed: Dataset, condition: str, message: str) -> None:
    with pytest.raises(MesetaError, match=message) as caught:
        RowFilter(condition, hashed)
    assert str(caught.value).startswith(f"filter {format_value(condition)}, character ")


@contextmanager
def counted_calls(counts: Counter[str], name: str) -> Iterator[None]:
    """Context manager that counts the calls of Python functions."""

    def count(frame: Any, event: str, argument: Any) -> None:
        counts[name] += event == "call"

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("word", ["in", "or", "both"])
def test_constants_have_a_limit(hashed: Dataset, word: str) -> None:
    def condition(num: int) -> str:
        if word == "or":
            return " or ".join(f"code == {k}" for k in range(num))
        head = "age > 3 and " if word == "both" else ""
        return f"{head}code in [{', '.join(map(str, range(num - bool(head))))}]"

    assert RowFilter(condition(MAX_CONSTANTS), hashed).columns[-1] == "code"
    text, num_calls = condition(20_000), Counter[str]()
    for num in (5_000, 20_000):
        with (
            pytest.raises(MesetaError, match="more than 4,096 constants; use fewer, or prepare a column") as caught,
            counted_calls(num_calls, str(num)),
        ):
            RowFilter(condition(num), hashed)
    assert num_calls["20000"] < 2 * num_calls["5000"] and len(str(caught.value)) < 300  # nothing behind it is read
    assert f"character {text.index('4096' if word != 'both' else '4095') + 1}:" in str(caught.value)


def test_a_long_condition_takes_one_mask_at_a_time(hashed: Dataset) -> None:
    table = pa.table({"age": np.zeros(1_000_000, np.float32)})
    condition = RowFilter(" or ".join(f"age == {k}" for k in range(1, 200)), hashed)
    tracemalloc.start()
    try:
        assert not condition(table).any()
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


def test_values_that_a_vocabulary_does_not_hold(named: Dataset) -> None:
    with pytest.raises(
        MesetaError, match="'Madrid' is not in the vocabulary of 'city', so its rows cannot be selected"
    ):
        RowFilter("city != 'Madrid'", named)


@given(text=st.text(alphabet="ageorndtin city<>=!()[],'\"`3.-e_ÁΩ\n\t", max_size=30))
def test_any_text_is_a_condition_or_one_clear_error(hashed: Dataset, text: str) -> None:
    try:
        RowFilter(text, hashed)
    except MesetaError as error:
        assert "character " in str(error)


def test_samples_columns(tmp_path: Path, hashed: Dataset) -> None:
    """Times may be written as dates, in UTC; groups are whole numbers; bags cannot be compared."""
    bags = hashed.sparse[0].model_copy(update={"name": "bag", "multi_valued": True})
    pairs = hashed.sparse[0].model_copy(update={"name": "pair", "made_of": ("city", "code")})
    dataset = hashed.model_copy(
        update={"weight": "worth", "group": "user", "time": "at", "sparse": (*hashed.sparse, bags, pairs)}
    )
    table = pa.table(
        {
            "worth": np.float32([0, 0.1, 2]),
            "user": [2**60, 2**60 + 1, -7],
            "at": [1_767_225_599.0, 1_767_225_600.0, 0.0],
        }
    )

    def rows(condition: str) -> list[int]:
        return np.flatnonzero(RowFilter(condition, dataset)(table)).tolist()

    assert rows("worth > 0") == [1, 2]
    assert rows("worth == 0.1") == rows("worth in [0.1, 7]") == [1]
    assert rows(f"user == {2**60}") == rows(f"user in [{2**60}, 3]") == [0]
    assert rows("at >= '2026-01-01'") == rows("at >= '2026-01-01 01:00+01:00'") == rows("at == 1767225600") == [1]
    for condition, message in (
        ("at > 'noon'", "is not a time; write it as"),
        ("bag == 3", "holds several ids per row"),
        ("pair == 3", "is made of 'city' and 'code'; compare these"),
        ("user == 'x'", "holds numbers"),
    ):
        with pytest.raises(MesetaError, match=message):
            RowFilter(condition, dataset)
