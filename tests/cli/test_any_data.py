"""From a file of a public format to a report: `prepare`, then `train`, and no schema written by hand."""

from __future__ import annotations

import csv
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meseta.data import Dataset
from small_run import settings, write_config

Output = Callable[..., str]


def write_csv(path: Path) -> None:
    """Strings and missing values; the label is likelier in one city and at a low price."""
    draw = random.Random(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["row_id", "is_click", "price", "user_id", "city", "time"])
        for row in range(2000):
            city, price = draw.choice(["Ávila", 'the "old" town, León', "two\nlines", ""]), draw.choice([1, 20, None])
            click = draw.random() < 0.05 + 0.5 * (city == "Ávila") + 0.4 * (price == 1)
            writer.writerow([row, int(click), price, draw.randrange(300), city, "2026-01-02 10:00:00"])


def write_parquet(path: Path) -> None:
    """Lists with weights; the label is likelier where one item weighs much."""
    draw = random.Random(1)
    bags = [
        [(f"item {draw.randrange(5)}", draw.choice([0.0, 3.0])) for _ in range(draw.randrange(4))] for _ in range(2000)
    ]
    click = [draw.random() < 0.05 + 0.25 * min(3, sum(w for item, w in bag if item == "item 0")) for bag in bags]
    pair = pa.struct([("item", pa.string()), ("weight", pa.float32())])
    pq.write_table(pa.table({"history": pa.array(bags, pa.list_(pair)), "click": click}), path)


def write_ffm(path: Path) -> None:
    """Two fields, one of them with values; the label is likelier where index 3 of field 1 has a large value."""
    draw = random.Random(2)
    lines = []
    for _ in range(2000):
        pairs = [f"0:{draw.randrange(40)}:1", *(f"1:{draw.randrange(5)}:{draw.choice([0.1, 3])}" for _ in range(2))]
        lines.append(f"{2 * (draw.random() < 0.05 + 0.8 * ('1:3:3' in pairs)) - 1:+d} {' '.join(pairs)}\n")
    path.write_text("".join(lines))


@pytest.mark.parametrize(
    ("name", "write", "features"),
    [
        ("log.csv", write_csv, {"user_id": (False, False), "city": (False, False)}),
        ("log.ffm", write_ffm, {"field_0": (True, False), "field_1": (True, True)}),
        ("log.parquet", write_parquet, {"history": (True, True)}),
    ],
)
def test_two_commands_from_file_to_report(
    tmp_path: Path, output_of: Output, name: str, write: Callable[[Path], None], features: dict[str, tuple[bool, bool]]
) -> None:
    write(tmp_path / name)
    printed = output_of("prepare", tmp_path / name, "--out", tmp_path / "data", "--hash-rows", 1000)
    assert "columns, as inferred:" in printed and "--print-schema" in printed
    sparse = Dataset.load(tmp_path / "data").sparse
    assert {s.name: (s.multi_valued, s.weighted) for s in sparse} == features
    document = settings(tmp_path / "data", tmp_path / "run", train__epochs=4)
    printed = output_of("train", write_config(tmp_path / "config.yaml", document))
    assert float(printed.split("test AUC ")[1].split()[0]) > 0.7
    assert (tmp_path / "run" / "report.html").stat().st_size > 1000
