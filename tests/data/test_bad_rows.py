"""Tests that --bad-rows skip yields the dataset of the files without the bad rows, for any block size."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.click_log import make_lines
from meseta.data import Dataset, PrepareOptions
from meseta.data.formats import text as text_format
from meseta.data.formats.bad_rows import MAX_ERROR_EXAMPLES
from meseta.data.prepare import prepare
from meseta.spec import MesetaError

NUM_ROWS = 300
TSV_LINES = make_lines(NUM_ROWS)


def tsv(number: int, bad: bool) -> str:
    line = TSV_LINES[number]
    return line.replace("\t", "\tx\t", 1) + "\n" if bad else line + "\n"


def csv(number: int, bad: bool) -> str:
    price = ["cheap", "5 EUR", "1,1"][number % 3] if bad else str(number)
    return f'{number % 2},{price},"town {number % 7}{chr(10) * (number % 3 == 0)}"\n'


def ffm(number: int, bad: bool) -> str:
    return f"{number % 2} 0:{number % 9}:1 1:{'x' if bad else number % 5}:0.5\n"


FORMS: dict[str, tuple[Callable[[int, bool], str], str]] = {
    "log.tsv": (tsv, ""),
    "log.csv": (csv, "label,price,city\n"),
    "log.ffm": (ffm, ""),
}


def content(dataset: Dataset) -> list[dict[str, list[Any]]]:
    return [
        pq.read_table([dataset.dir / file.path for file in dataset.splits[name].files]).to_pydict()
        for name in ("train", "test")
        if dataset.splits[name].files
    ]


@pytest.mark.parametrize("block_bytes", [pytest.param(1 << 20, marks=pytest.mark.soak), 2500])
@pytest.mark.parametrize("name", FORMS)
def test_text_without_its_bad_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, block_bytes: int
) -> None:
    write, header = FORMS[name]
    draw = random.Random(name)
    bad = {row for row in range(NUM_ROWS) if draw.random() < 0.05} | {7, 8, NUM_ROWS - 1}
    for folder, rows in (("spoiled", range(NUM_ROWS)), ("clean", [r for r in range(NUM_ROWS) if r not in bad])):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(header + "".join(write(row, row in bad) for row in rows))
    options: dict[str, Any] = {"test_fraction": 0.0}
    if name == "log.csv":
        options["dense"] = ["price"]  # with words among its values it would be inferred as text
    clean = prepare(PrepareOptions(**options, sources=[f"{tmp_path}/clean/{name}"], out=tmp_path / "a"))
    monkeypatch.setattr(text_format, "BLOCK_BYTES", block_bytes)
    options |= {"bad_rows": "skip", "max_bad_rows": 0.2}
    dataset = prepare(PrepareOptions(**options, sources=[f"{tmp_path}/spoiled/{name}"], out=tmp_path / "b"))
    assert content(dataset) == content(clean)
    assert (dataset.dense, dataset.sparse) == (clean.dense, clean.sparse)
    assert dataset.sources[0].num_rows == NUM_ROWS - len(bad)
    assert dataset.bad_rows is not None and dataset.bad_rows.num_rows == len(bad)
    assert len(dataset.bad_rows.first) == MAX_ERROR_EXAMPLES
    lines = (header + "".join(write(row, row in bad) for row in range(NUM_ROWS))).split("\n")
    for place, row in zip(dataset.bad_rows.first, sorted(bad), strict=False):
        number = int(place.split(", line ")[1].split(",")[0].split(":")[0])
        assert lines[number - 1] == write(row, True).split("\n")[0]
        assert place.startswith(f"source '{tmp_path}/spoiled/{name}', line ") and "fix" not in place
    assert Dataset.load(tmp_path / "b") == dataset


@pytest.mark.parametrize("lines", [1, 2])
def test_a_quote_too_many_costs_its_line_alone(tmp_path: Path, lines: int) -> None:
    """Holds in files with multi-line fields, whose quotes could be mistaken for closing ones."""
    rows = [f'{row % 2},{row},"town{chr(10) * (lines - 1)} {row % 7}"\n' for row in range(100)]
    rows[40], rows[70] = '1,40,"town\n', '1,7"0,town\n'
    (tmp_path / "log.csv").write_text("label,price,city\n" + "".join(rows))
    dataset = prepare(
        PrepareOptions(
            sources=[f"{tmp_path}/log.csv"], out=tmp_path / "out", test_fraction=0.0, bad_rows="skip", dense=["price"],
            max_bad_rows=2,
        )
    )  # fmt: skip
    assert dataset.splits["train"].num_rows == 98
    assert dataset.bad_rows is not None and dataset.bad_rows.num_rows == 2
    assert f", line {2 + 40 * lines}: a quote is not closed" in dataset.bad_rows.first[0]


def test_quantiles_and_the_split_by_time_do_not_see_bad_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(4)
    rows = [f"{number % 2},{draw.randrange(10**9)},{draw.randrange(90)}\n" for number in range(300)]
    spoiled = [f"7,{10**9},1000\n" if draw.random() < 0.1 else row for row in rows]
    (tmp_path / "clean.csv").write_text("click,ts,age\n" + "".join(r for r in spoiled if not r.startswith("7")))
    (tmp_path / "spoiled.csv").write_text("click,ts,age\n" + "".join(spoiled))
    (tmp_path / "schema.yaml").write_text("label: click\ntime: ts\nbuckets: {age: 5}\n")
    options = {"schema": tmp_path / "schema.yaml", "split_by": "time", "test_fraction": 0.3}
    clean = prepare(PrepareOptions(sources=[f"{tmp_path}/clean.csv"], out=tmp_path / "a", **options))
    monkeypatch.setattr(text_format, "BLOCK_BYTES", 700)
    skip = {"bad_rows": "skip", "max_bad_rows": 0.2}
    dataset = prepare(PrepareOptions(sources=[f"{tmp_path}/spoiled.csv"], out=tmp_path / "b", **options, **skip))
    assert dataset.bad_rows is not None
    assert dataset.bad_rows.num_rows == sum(row.startswith("7") for row in spoiled) > 10
    assert (dataset.sparse, dataset.test_from, content(dataset)) == (clean.sparse, clean.test_from, content(clean))


def test_parquet_without_its_bad_rows_in_both_splits(tmp_path: Path) -> None:
    label = [0.0, 1.0] * 100
    label[30], label[31], label[150] = 3.0, None, -1.0  # type: ignore[call-overload]
    pq.write_table(pa.table({"label": label, "city": [f"c{r % 9}" for r in range(200)]}), tmp_path / "log.parquet")
    options = {"sources": [f"{tmp_path}/log.parquet"], "test_fraction": 0.3, "vocabulary": True, "min_count": 1}
    dataset = prepare(PrepareOptions(**options, out=tmp_path / "out", bad_rows="skip", max_bad_rows=3))
    assert dataset.bad_rows is not None and dataset.bad_rows.num_rows == 3
    assert [text.partition(", ")[2].partition(",")[0] for text in dataset.bad_rows.first] == [
        "row 31",
        "row 32",
        "row 151",
    ]
    # A row that stays goes to the split that it would go to anyway.
    pq.write_table(
        pa.table({"label": [0.0, 1.0] * 100, "city": [f"c{r % 9}" for r in range(200)]}), tmp_path / "w.parquet"
    )
    whole = prepare(PrepareOptions(**options | {"sources": [f"{tmp_path}/w.parquet"]}, out=tmp_path / "whole"))
    lost = [whole.splits[name].num_rows - dataset.splits[name].num_rows for name in ("train", "test")]
    assert sum(lost) == 3 and min(lost) >= 0


@pytest.mark.parametrize(
    ("limit", "is_enough"), [(2, False), (3, True), (0.02, False), (0.03, True), (0, False), (1.0, True)]
)
def test_too_many_are_refused(tmp_path: Path, limit: float, is_enough: bool) -> None:
    (tmp_path / "log.csv").write_text(
        "label,city\n" + "".join(f"{3 if r in (5, 50, 99) else 1},c{r % 2}\n" for r in range(100))
    )
    options = PrepareOptions(
        sources=[f"{tmp_path}/log.csv"], out=tmp_path / "out", bad_rows="skip", max_bad_rows=limit, test_fraction=0.0
    )
    if is_enough:
        assert prepare(options).splits["train"].num_rows == 97
        return
    with pytest.raises(
        MesetaError, match=rf"3 of 100 rows cannot be parsed, but --max-bad-rows allows {limit}"
    ) as caught:
        prepare(options)
    assert "log.csv', line 7, column 'label': '3' is outside 0..1; if the column holds ratings" in str(caught.value)
    assert not list(tmp_path.glob("out*"))


def test_the_first_bad_row_is_an_error_that_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("label,city\n1,a\n2,b\n" + "1,a\n" * 98)
    with pytest.raises(
        MesetaError, match=r"line 3.*fix or remove the line, or leave such rows out with --bad-rows skip"
    ):
        prepare(PrepareOptions(sources=[f"{tmp_path}/log.csv"], out=tmp_path / "out"))
    with pytest.raises(MesetaError, match="--bad-rows must be error or skip, got 'drop'"):
        PrepareOptions(sources=[], out=tmp_path, bad_rows="drop")
    for limit in (-1, 1.5):
        with pytest.raises(MesetaError, match="--max-bad-rows must be a number of rows, or a share"):
            PrepareOptions(sources=[], out=tmp_path, bad_rows="skip", max_bad_rows=limit)


def test_all_rows_bad(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("label,city\n2,a\n2,b\n")
    with pytest.raises(MesetaError, match="none of 2 rows is left"):
        prepare(
            PrepareOptions(sources=[f"{tmp_path}/log.csv"], out=tmp_path / "out", bad_rows="skip", max_bad_rows=1.0)
        )
