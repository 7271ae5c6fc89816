"""Decimal commas, thousands separators and signs around numbers: read as a schema says, and named where it does not."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meseta.data import Dataset, PrepareOptions
from meseta.data.prepare import prepare, read_layout
from meseta.data.prepare.prepare_like import PrepareLikeOptions, prepare_like
from meseta.data.schema.schema import Schema, format_schema
from meseta.data.schema.text_syntax import (
    NumberFormat,
    format_hint,
    normalize_formatted_numbers,
    normalize_numbers_strictly,
)
from meseta.spec import MesetaError
from meseta.system.yaml_text import parse_yaml
from sampling import diagonal, fewer_examples

DECIMALS = (".", ",", "·")
THOUSANDS = ("", ".", ",", " ", "'", "_", "\u00a0", "\u202f")
STRIPPED = ("", "€", "€%", "$£", "kr", "|^]-["[:3])
NUMBERS = st.decimals(-(10**9), 10**9, places=3) | st.integers(-(10**15), 10**15).map(Decimal)


@st.composite
def formats(draw: st.DrawFn) -> NumberFormat:
    decimal, thousands = draw(st.sampled_from(DECIMALS)), draw(st.sampled_from(THOUSANDS))
    assume(decimal != thousands)
    return NumberFormat(decimal=decimal, thousands=thousands, strip=draw(st.sampled_from(STRIPPED)))


def grouped(digits: str, sign: str, size: int = 3) -> str:
    """Groups of three from the right; with a size of two, as in India: 12,34,567."""
    head, last = digits[:-3], digits[-3:]
    first = len(head) % size
    groups = [head[:first], *(head[at : at + size] for at in range(first, len(head), size)), last]
    return sign.join(group for group in groups if group)


@st.composite
def spelled(draw: st.DrawFn, number: Decimal, form: NumberFormat) -> str:
    """A text whose value in this format is `number`."""
    digits, _, fraction = f"{abs(number):f}".partition(".")
    if form.thousands and draw(st.booleans()):
        digits = grouped(digits, form.thousands, draw(st.sampled_from([2, 3])))
    if fraction.strip("0") or draw(st.booleans()):
        digits += form.decimal + fraction
    around = st.text([" ", "\u00a0", *form.strip], max_size=2)
    sign = "-" if number < 0 else draw(st.sampled_from(["", "+"]))
    return draw(around) + sign + draw(around) + digits + draw(around)


def plain(form: NumberFormat, texts: list[str], kind: pa.DataType | None = None) -> list[str]:
    values = pa.array([text.encode() for text in texts], kind or pa.binary())
    return [value.decode() for value in normalize_numbers_strictly(form, values).to_pylist()]


@given(st.data(), formats(), st.lists(NUMBERS, max_size=10))
def test_each_spelling_has_the_value_of_the_number(
    data: st.DataObject, form: NumberFormat, numbers: list[Decimal]
) -> None:
    texts = [data.draw(spelled(number, form)) for number in numbers]
    plain_texts = plain(form, texts)
    assert [Decimal(text) for text in plain_texts] == numbers
    assert pa.array(plain_texts, pa.string()).cast(pa.float64()).to_pylist() == [float(number) for number in numbers]
    assert plain(form, texts, pa.large_binary()) == plain_texts and all(map(form.is_number, texts))
    assert normalize_formatted_numbers(form, pa.array(texts, pa.string())).to_pylist() == [
        text.encode() for text in plain_texts
    ]


@given(formats(), st.lists(st.text("0123456789.,'+-eE €%$ \u00a0na", max_size=9), max_size=10))
def test_other_texts_are_no_numbers(form: NumberFormat, texts: list[str]) -> None:
    for text, plain_text in zip(texts, plain(form, texts), strict=True):
        if form.is_number(text):
            assert re.fullmatch(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", plain_text)
            kept = text.replace(form.thousands, "") if form.thousands else text
            for sign in (*form.strip, " ", "\u00a0"):
                kept = kept.replace(sign, "")
            assert float(plain_text) == float(kept.replace(form.decimal, "."))
        else:
            assert plain_text == ("?" if re.search(r"[0-9]", text) else text)
    for missing in ("", "NA", "nan", "-inf"):
        assert plain(form, [missing]) == [missing]


@pytest.mark.parametrize(
    "text", ["1.5", "1.50", "12.34", "1.2345", "1234.567.8", ".123", "1..234", "1,2,3", "1,234.5", "1€2"]
)
def test_a_misplaced_sign_is_never_passed_over(text: str) -> None:
    assert not NumberFormat(decimal=",", thousands=".", strip="€").is_number(text)


@given(
    st.data(),
    st.sampled_from([",", "."]),
    st.sampled_from(["", ".", ",", "'", " "]),
    st.sampled_from(["", "€", "%", "$"]),
)
@fewer_examples(2)
def test_the_hint_names_keys_that_make_a_text_column_numbers(
    data: st.DataObject, decimal: str, thousands: str, strip: str
) -> None:
    assume(decimal != thousands and (decimal, thousands, strip) != (".", "", ""))
    form = NumberFormat(decimal=decimal, thousands=thousands, strip=strip)
    numbers = data.draw(st.lists(st.decimals(1000, 10**7, places=2), min_size=20, max_size=40, unique=True))
    texts = [
        grouped(str(int(n)), thousands) + decimal + f"{n:.2f}"[-2:] + (f" {strip}" if strip else "") for n in numbers
    ]
    hint = format_hint(["n/a", *texts])
    assert hint is not None and " or " not in hint
    keys = parse_yaml(hint.replace(", ", "\n").replace('"\n"', '", "') if hint.count(":") > 1 else hint)
    advised = NumberFormat(**keys)
    assert plain(advised, texts) == plain(form, texts)


@pytest.mark.parametrize(
    "values",
    [
        ["a", "b"], ["12", "13.5", "x"], ["2026-01-31"], ["10.0.0.1"], ["01.02.2026"], ["1.2.3"], ["12:30"],
        ["3,5", "red", "blue"], ["%"], ["1e5", "12", "7x"],
    ],
)  # fmt: skip
def test_other_text_has_no_hint(values: list[str]) -> None:
    assert format_hint(values * 10) is None


def test_long_texts_have_no_hint_and_take_no_time() -> None:
    assert format_hint([" " * 10**6 + "1,5"]) is None


def test_a_sign_that_may_be_either_names_both() -> None:
    assert format_hint(["1,234", "5,678"]) == 'decimal: "," or thousands: ","'
    assert format_hint(["1,25 €", "3,50 €"]) == 'decimal: ",", strip: "€"'


SCHEMA = """
label: rated >= 3.5
weight: importance
time: at
dense: [price, age]
signed: [price]
categorical: [price, tags]
multi_valued: {tags: "|"}
weights: {tags: ":"}
buckets: {size: 4}
delimiter: ";"
"""
FORMAT = 'decimal: ","\nthousands: "."\nstrip: "€%"\n'
ROWS = [
    (row % 5 + 0.5, 0.25 + row % 3, 1.7e9 + row + 0.5, (row - 60) * 1234.5, row % 90, row * 1000.25, row % 4 / 8)
    for row in range(150)
]


def german(number: float) -> str:
    text = f"{abs(number):.3f}"
    return ("-" if number < 0 else "") + grouped(text[:-4], ".") + "," + text[-3:]


def log(path: Path, spell: Any, unit: str = "") -> Path:
    lines = ["rated;importance;at;price;age;size;tags"]
    for rated, importance, at, price, age, size, weight in ROWS:
        tags = f"a:{spell(weight)}|b{age}:{spell(2.5)}"
        price_text = "NA" if age == 7 else f"{spell(price)}{unit}"
        lines.append(";".join([spell(rated), spell(importance), spell(at), price_text, spell(age), spell(size), tags]))
    path.write_text("\n".join(lines) + "\n")
    return path


def without_category(folder: Path) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = pq.read_table(folder / "train").to_pydict()
    return {name: values for name, values in columns.items() if name != "price.category"}


def test_every_number_of_a_row_is_read_so(tmp_path: Path) -> None:
    """Labels, weights, times, dense columns, buckets and weights of ids; quantiles and new rows too."""

    def prepared(name: str, path: Path, schema: str) -> Dataset:
        (tmp_path / f"{name}.yaml").write_text(schema)
        options: dict[str, Any] = {"schema": tmp_path / f"{name}.yaml", "test_fraction": 0, "hash_rows": 100}
        return prepare(PrepareOptions(sources=[str(path)], out=tmp_path / name, **options))

    expected = prepared("plain", log(tmp_path / "plain.csv", repr), SCHEMA)
    dataset = prepared("german", log(tmp_path / "german.csv", german, " €"), SCHEMA + FORMAT)
    assert without_category(tmp_path / "german") == without_category(tmp_path / "plain")
    assert dataset.dense == expected.dense and dataset.sparse[-1].boundaries == expected.sparse[-1].boundaries
    assert dataset.source_form is not None and dataset.source_form.number_format == NumberFormat(
        decimal=",", thousands=".", strip="€%"
    )
    assert Dataset.load(tmp_path / "german") == dataset
    assert "number_format" not in json.loads((tmp_path / "plain/dataset.json").read_text())["source_form"]
    prepare_like(
        PrepareLikeOptions(sources=[f"{tmp_path}/german.csv"], out=tmp_path / "like", like=tmp_path / "german")
    )
    like = pq.read_table(tmp_path / "like/test").to_pydict()
    assert like == pq.read_table(tmp_path / "german/train").to_pydict()


def test_numbers_agree_with_arrow(tmp_path: Path) -> None:
    path = log(tmp_path / "log.csv", lambda number: f"{number:.3f}".replace(".", ","))
    convert = pa.csv.ConvertOptions(decimal_point=",", column_types={"price": pa.float64()})
    column = pa.csv.read_csv(path, parse_options=pa.csv.ParseOptions(delimiter=";"), convert_options=convert)["price"]
    texts = [line.split(";")[3] for line in path.read_text().splitlines()[1:]]
    numbers = [None if text == "NA" else float(text) for text in plain(NumberFormat(decimal=","), texts)]
    assert numbers == column.to_pylist()


@pytest.mark.parametrize("case", diagonal(value=["1.5", "12,3,4", "x9", "1.23,5"], kind=["csv", "jsonl", "parquet"]))
def test_a_number_in_another_format_is_a_bad_row(tmp_path: Path, case: dict[str, Any]) -> None:
    kind, value = case["kind"], case["value"]
    prices = [f"{row},5" for row in range(40)]
    prices[7] = value
    (tmp_path / "schema.yaml").write_text(
        'label: click\ndense: [price]\ncategorical: [shop]\ndecimal: ","\nthousands: "."\n'
    )
    table = pa.table({"click": [0, 1] * 20, "price": prices, "shop": ["a", "b"] * 20})
    path = tmp_path / f"log.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    elif kind == "csv":
        path.write_text(
            "click,price,shop\n" + "".join(f'{r["click"]},"{r["price"]}",{r["shop"]}\n' for r in table.to_pylist())
        )
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    options: dict[str, Any] = {"sources": [str(path)], "schema": tmp_path / "schema.yaml", "test_fraction": 0}
    line = {"csv": "line 9", "jsonl": "line 8", "parquet": "row 8"}[kind]
    with pytest.raises(MesetaError, match=rf"{line}, column 'price': '{re.escape(value)}' is not a number"):
        prepare(PrepareOptions(out=tmp_path / "no", **options))
    dataset = prepare(PrepareOptions(out=tmp_path / "out", bad_rows="skip", max_bad_rows=1, **options))
    assert dataset.num_training_rows == 39


def test_numbers_of_json_have_no_format(tmp_path: Path) -> None:
    rows = [{"click": row % 2, "price": row * 1.5, "old": f"{row},5", "shop": "a"} for row in range(40)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "schema.yaml").write_text(
        'label: click\ndense: [price, old]\ncategorical: [shop]\ndecimal: ","\nthousands: "."\n'
    )
    dataset = prepare(
        PrepareOptions(
            sources=[f"{tmp_path}/log.jsonl"], out=tmp_path / "out", schema=tmp_path / "schema.yaml", test_fraction=0
        )
    )
    columns = pq.read_table(tmp_path / "out/train").to_pydict()
    assert [len({*columns[name]}) for name in ("price", "old")] == [40, 40]
    means = {feature.name: feature.mean for feature in dataset.dense}
    assert means["price"] == pytest.approx(sum(math_log1p(row * 1.5) for row in range(40)) / 40)
    assert means["old"] == pytest.approx(sum(math_log1p(row + 0.5) for row in range(40)) / 40)


def math_log1p(number: float) -> float:
    return float(Decimal(1 + number).ln())


def test_printed_columns_name_the_key_and_keep_it(tmp_path: Path) -> None:
    text = "click;price;shop\n" + "".join(f"{row % 2};{row % 20},5{row % 10} €;{row % 3}\n" for row in range(60))
    (tmp_path / "log.csv").write_text(text)
    options: dict[str, Any] = {"sources": [f"{tmp_path}/log.csv"], "out": tmp_path / "no"}
    printed = format_schema(read_layout(PrepareOptions(**options)))
    assert 'numbers if a --schema file says decimal: ",", strip: "€"' in printed
    edited = re.sub(r"  - price[^\n]*\n", "", printed) + 'dense: [price]\ndecimal: ","\nstrip: "€"\n'
    (tmp_path / "schema.yaml").write_text(edited)
    layout = read_layout(PrepareOptions(schema=tmp_path / "schema.yaml", **options))
    (tmp_path / "again.yaml").write_text(format_schema(layout))
    assert read_layout(PrepareOptions(schema=tmp_path / "again.yaml", **options)) == layout
    assert layout.dense == ("price",) and layout.number_format == NumberFormat(decimal=",", strip="€")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("thousands: '.'", "key 'thousands': '.' is also the decimal sign; use another 'decimal'"),
        ("decimal: ',,'", "key 'decimal': ',,' must be one character"),
        ("decimal: ''", "key 'decimal': '' must be one character"),
        ("decimal: '5'", "key 'decimal': '5' must be one character other than a letter, digit, sign, quote"),
        ("decimal: ' '", "key 'decimal': ' ' must not be a space"),
        ("thousands: '-'", "key 'thousands': '-' must be one character"),
        ("strip: '€1'", "key 'strip': '€1' has '1', which can be part of a number"),
        ("strip: '.'", "key 'strip': '.' has '.', which can be part of a number"),
    ],
)
def test_bad_keys_are_named(tmp_path: Path, keys: str, message: str) -> None:
    (tmp_path / "schema.yaml").write_text(f"label: click\ndense: [price]\n{keys}\n")
    with pytest.raises(MesetaError, match=re.escape(message)):
        Schema.load(tmp_path / "schema.yaml")
