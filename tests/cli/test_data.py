"""Tests of `meseta data check` and `meseta data stats` on prepared data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meseta.data.prepare import PrepareOptions, prepare

NUM_ROWS = 500


@pytest.fixture
def data(tmp_path: Path) -> Path:
    draw = np.random.default_rng(1)
    raw = {
        "label": draw.integers(0, 2, NUM_ROWS),
        "price": draw.random(NUM_ROWS),
        "shop": [f"s{i}" for i in draw.integers(0, 30, NUM_ROWS)],
    }
    pq.write_table(pa.table(raw), tmp_path / "raw.parquet")
    prepare(PrepareOptions(sources=[str(tmp_path / "raw.parquet")], out=tmp_path / "data", hash_rows=100))
    return tmp_path / "data"


def test_check_says_that_all_is_sound(data: Path, output_of: Callable[..., str]) -> None:
    assert output_of("data", "check", data).startswith(f"{data}: no faults, {NUM_ROWS} rows in 2 files read in ")
    document = json.loads(output_of("data", "check", data, "--json"))
    assert document == {"dir": str(data), "ok": True, "num_rows": NUM_ROWS, "num_files": 2, "faults": []}


def test_check_names_every_fault_and_ends_with_1(data: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    (data / "notes.txt").touch()
    (data / "test" / "part-00000.parquet").unlink()
    code, out, _ = run("data", "check", data)
    assert code == 1
    lines = out.splitlines()
    assert lines[0] == "notes.txt: files must be named in dataset.json, got an unknown file; move it away"
    assert lines[1].startswith("test/part-00000.parquet: the file must be readable, got no such file;")
    assert lines[2].startswith(f"{data}: 2 faults, ")
    code, out, _ = run("data", "check", data, "--json")
    assert code == 1
    assert [fault["object"] for fault in json.loads(out)["faults"]] == ["notes.txt", "test/part-00000.parquet"]


def test_check_of_a_missing_dataset_is_one_line(tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = run("data", "check", tmp_path)
    assert (code, out) == (1, "")
    assert "error: dataset" in err
    assert "cannot read dataset.json" in err


def test_stats_prints_tables_and_writes_a_page_beside_the_data(data: Path, output_of: Callable[..., str]) -> None:
    out = output_of("data", "stats", data)
    assert out.splitlines()[-1] == str(data / "statistics.html")
    assert "price" in out
    assert "shop" in out
    assert (data / "statistics.html").read_text().startswith("<!doctype html>")
    assert output_of("data", "check", data).startswith(f"{data}: no faults")


def test_stats_as_json_and_elsewhere(data: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run("data", "stats", data, "--json")
    assert code == 0
    assert [f["name"] for f in json.loads(out)["sparse"]] == ["shop"]
    assert not (data / "statistics.html").exists()
    code, out, _ = run("data", "stats", data, "--html", tmp_path / "page.html")
    assert code == 0
    assert (tmp_path / "page.html").exists()
    code, _, err = run("data", "stats", data, "--html", tmp_path / "nowhere" / "page.html")
    assert code == 1
    assert "cannot be written" in err
