"""`check` finds each way in which a prepared dataset can differ from its dataset.json, and names its place."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meseta.data import Dataset, Reader, ReaderOptions
from meseta.data.dataset.check import CheckResult, check_dataset
from meseta.data.prepare import PrepareOptions, prepare
from meseta.spec import MesetaError

NUM_ROWS = 900
PART = "train/part-00000.parquet"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared dataset with a dense, a sparse and a weighted multi-valued feature."""
    folder = tmp_path_factory.mktemp("check")
    draw = np.random.default_rng(0)
    history = [draw.integers(0, 40, size).tolist() for size in draw.integers(0, 4, NUM_ROWS)]
    table = {
        "label": draw.integers(0, 2, NUM_ROWS),
        "sample_weight": draw.choice([0.0, 1.0, 2.5], NUM_ROWS),
        "price": draw.random(NUM_ROWS),
        "shop": [f"s{i}" for i in draw.integers(0, 30, NUM_ROWS)],
        "history": history,
        "history.weight": [[0.5] * len(ids) for ids in history],
    }
    pq.write_table(pa.table(table), folder / "raw.parquet")
    prepare(PrepareOptions(sources=[str(folder / "raw.parquet")], out=folder / "data", vocabulary=True, min_count=2))
    return folder / "data"


@pytest.fixture
def data(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "data"))


def only_fault(path: Path) -> str:
    result = check_dataset(path)
    assert len(result.faults) == 1, [str(fault) for fault in result.faults]
    return str(result.faults[0])


def change(path: Path, column: str, values: Callable[[list[Any]], list[Any]], kind: pa.DataType | None = None) -> None:
    """Rewrite one column of the first training file."""
    table = pq.read_table(path / PART)
    place = table.schema.get_field_index(column)
    array = pa.array(values(table[column].to_pylist()), kind or table.schema.field(column).type)
    pq.write_table(table.set_column(place, column, array), path / PART, row_group_size=100)


def put(row: int, *values: Any) -> Callable[[list[Any]], list[Any]]:
    """Replace the values from `row` on."""
    return lambda column: [*column[:row], *values, *column[row + len(values) :]]


def test_a_sound_dataset_has_no_faults(sound: Path) -> None:
    seen: list[tuple[int, int]] = []
    result = check_dataset(sound, lambda new, total: seen.append((new, total)))
    assert result == CheckResult(NUM_ROWS, 2, ())
    assert sum(new for new, _ in seen) == NUM_ROWS
    assert {total for _, total in seen} == {NUM_ROWS}


@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [
        ("label", put(250, 1.5), "row 250: labels must be in 0..1, got 1.5;"),
        ("label", put(3, float("nan")), "row 3: labels must be in 0..1, got nan;"),
        ("label", put(7, None), "row 7: values must not be missing, got a missing value;"),
        ("price", put(0, float("inf"), 1.0, float("nan")), r"row 0: dense values must be finite, got inf \(2 such val"),
        ("shop", put(333, -1), r"row 333: ids must be in 0\.\.\d+, got -1;"),
        ("shop", put(99, 10**6, 10**6), r"row 99: ids must be in 0\.\.\d+, got 1000000 \(2 such values\);"),
        ("sample_weight", put(8, -1.0), "row 8: sample weights must be 0, or 1e-09 to 1e\\+09, got -1;"),
        ("sample_weight", put(8, 1e-12, float("nan")), r"got 1e-12 \(2 such values\);"),
        ("history.weight", put(5, [0.5] * 9), r"row 5: each id must have one weight, got 9 weights for \d ids;"),
    ],
)
def test_values_that_break_a_rule(data: Path, column: str, values: Any, expected: str) -> None:
    change(data, column, values)
    fault = only_fault(data)
    assert fault.startswith(f"{PART}, column '{column}', row ")
    assert re.search(expected, fault), fault
    assert fault.endswith("; prepare the dataset again")


def test_whole_numbers_are_labels_and_weights_too(data: Path) -> None:
    """Other programs write them as integers."""

    def read() -> int:
        return sum(batch.batch_size for batch in Reader(data, "train", ReaderOptions(batch_size=16)).epoch())

    for column in ("label", "sample_weight"):
        change(data, column, lambda values: [int(value > 0) for value in values], pa.int16())
    num_rows = read()
    assert num_rows > 300 and not any(
        "must be" in str(fault) and "row" in str(fault) for fault in check_dataset(data).faults
    )
    change(data, "label", put(8, 2))
    with pytest.raises(MesetaError, match=r"row 8: 'label' must be in 0\.\.1, got 2;"):
        read()
    change(data, "label", put(8, 1))
    change(data, "sample_weight", put(9, -3))
    with pytest.raises(MesetaError, match=r"row 9: 'sample_weight' must be 0, or 1e-09 to 1e\+09, got -3;"):
        read()


@pytest.mark.parametrize("weight", [1e-12, 1e12, -1.0, float("nan")])
def test_the_reader_refuses_the_weights_that_the_check_finds(data: Path, weight: float) -> None:
    change(data, "sample_weight", put(8, weight))
    assert "row 8: sample weights must be" in only_fault(data)
    with pytest.raises(MesetaError, match=r"row 8: 'sample_weight' must be 0, or 1e-09 to 1e\+09, got .*;"):
        next(Reader(data, "train", ReaderOptions(batch_size=16)).epoch())
    change(data, "sample_weight", put(8, 1e-9))  # in float32 a little less than the limit, which is rounded as well
    assert check_dataset(data).faults == ()
    assert sum(batch.batch_size for batch in Reader(data, "train", ReaderOptions(batch_size=16)).epoch())


def test_a_bad_id_inside_a_list_names_its_row(data: Path) -> None:
    lists = pq.read_table(data / PART)["history"].to_pylist()
    row = next(r for r in range(400, len(lists)) if len(lists[r]) >= 2)
    change(data, "history", lambda column: [*column[:row], [*column[row][:-1], 10**6], *column[row + 1 :]])
    assert f"column 'history', row {row}: ids must be in" in only_fault(data)


def test_totals_are_compared(data: Path) -> None:
    change(data, "label", lambda column: [1.0 - value for value in column])
    assert "split 'train': the sum of label 'label' must be" in only_fault(data)


def test_frames_of_files(data: Path) -> None:
    path = data / PART
    table = pq.read_table(path)
    pq.write_table(table.slice(1), path)
    assert (
        f"{PART}: the file must have {table.num_rows} rows, as in dataset.json, got {table.num_rows - 1}; prepare"
        in only_fault(data)
    )
    pq.write_table(table.drop_columns(["price"]), path)
    assert "column 'price': the column must hold numbers, got no such column;" in only_fault(data)
    pq.write_table(table.append_column("extra", table["price"]), path)
    assert "column 'extra': columns must be named in dataset.json, got an unknown column;" in only_fault(data)
    pq.write_table(table.set_column(table.column_names.index("shop"), "shop", table["shop"].cast(pa.float32())), path)
    assert "column 'shop': the column must hold whole numbers, got float;" in only_fault(data)
    # Other programs may write the same values in other widths.
    pq.write_table(table.set_column(0, "label", table["label"].cast(pa.int8())), path)
    assert check_dataset(data).faults == ()
    path.unlink()
    assert only_fault(data) == f"{PART}: the file must be readable, got no such file; prepare the dataset again"


def test_flipped_bits_are_found_by_the_checksums_of_pages(data: Path) -> None:
    path = data / PART
    offset = pq.ParquetFile(path).metadata.row_group(0).column(1).data_page_offset
    damaged = bytearray(path.read_bytes())
    damaged[offset + 60] ^= 1
    path.write_bytes(bytes(damaged))
    assert f"{PART}: the file must be readable, got " in only_fault(data)


def test_unlisted_files(data: Path) -> None:
    (data / "train" / "part-00007.parquet").touch()
    fault = only_fault(data)
    assert fault == "train/part-00007.parquet: files must be named in dataset.json, got an unknown file; move it away"


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        (
            "../part.parquet",
            "'../part.parquet' must be the path of a file in the folder of the dataset: it leads outside",
        ),
        (PART, f"files '{PART}' and '{PART}' are the same file"),
        (
            PART.upper(),
            f"files '{PART}' and '{PART.upper()}' are the same file, at least on file systems that ignore case",
        ),
    ],
)
def test_names_in_the_description(data: Path, name: str, rule: str) -> None:
    document = json.loads((data / "dataset.json").read_text())
    document["splits"]["train"]["files"].append({"path": name, "num_rows": 0})
    (data / "dataset.json").write_text(json.dumps(document))
    with pytest.raises(MesetaError, match=re.escape(rule)):
        check_dataset(data)


def test_vocabularies(data: Path) -> None:
    path = data / "vocabulary" / "shop.parquet"
    table = pq.read_table(path)
    pq.write_table(table.slice(0, 5), path)
    assert (
        f"vocabulary/shop.parquet: the vocabulary must have {table.num_rows} rows, as in dataset.json, got 5;"
        in only_fault(data)
    )
    pq.write_table(table.take(pa.array([1, 0, *range(2, table.num_rows)])), path)
    assert "ids must be 0, 1, 2, ..." in only_fault(data)
    path.write_text("no Parquet")
    assert "vocabulary/shop.parquet: the file must be readable" in only_fault(data)


def test_bits_of_looked_up_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The value of the fault is the reason of the error: without its remedy, and whole if it has none."""
    pq.write_table(pa.table({"label": [0, 1] * 30, "shop": [f"s{i % 7}" for i in range(60)]}), tmp_path / "raw.parquet")
    prepare(PrepareOptions(sources=[str(tmp_path / "raw.parquet")], out=tmp_path / "data", hash_rows=64))
    assert check_dataset(tmp_path / "data").faults == ()
    path = tmp_path / "data/touched.parquet"
    table = pq.read_table(path)
    pq.write_table(table.set_column(1, table.schema.field(1), pa.array([b"x"], pa.large_binary())), path)
    rule = "touched.parquet: the file must have the bits of hashed features"
    reason = f"dataset file {str(path)!r} has 1 bytes for feature 'shop', which do not match the size of its table"
    assert only_fault(tmp_path / "data") == f"{rule}, got {reason}; prepare the dataset again"

    def refuse(dataset: Dataset) -> None:
        raise MesetaError("the file is empty")

    monkeypatch.setattr("meseta.data.dataset.check.read_touched", refuse)
    assert only_fault(tmp_path / "data") == f"{rule}, got the file is empty; prepare the dataset again"


def test_no_dataset_at_all(tmp_path: Path) -> None:
    with pytest.raises(MesetaError, match=r"cannot read dataset\.json"):
        check_dataset(tmp_path)
