"""Bad sources: one clear line each, and nothing is left behind."""

import gzip
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.click_log import make_lines, write_tsv
from meseta.data.formats import text as text_format
from meseta.data.prepare import PrepareOptions, prepare
from meseta.spec import MesetaError

GOOD = make_lines(60)


def run(tmp_path: Path, *patterns: str, **options: Any) -> None:
    prepare(PrepareOptions(sources=[f"{tmp_path}/{p}" for p in patterns], out=tmp_path / "out", **options))


def refuse(tmp_path: Path, message: str, *patterns: str, **options: Any) -> None:
    """Refused with this message, on one line, with neither the folder nor its unfinished form left."""
    with pytest.raises(MesetaError, match=message) as error:
        run(tmp_path, *(patterns or ("log.tsv",)), **options)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.tmp").exists()


def with_field(line: str, place: int, text: str) -> str:
    fields = line.split("\t")
    fields[place] = text
    return "\t".join(fields)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (with_field(GOOD[40], 3, "abc"), r"log.tsv', line 41, field 4 \(int_2\): 'abc' is not an integer"),
        (with_field(GOOD[40], 3, "1.5"), r"line 41, field 4 \(int_2\): '1.5' is not an integer"),
        (with_field(GOOD[40], 13, "NA"), r"line 41, field 14 \(int_12\): 'NA' is not an integer"),
        (with_field(GOOD[40], 0, "2"), r"line 41, field 1 \(label\): '2' is outside 0..1"),
        (with_field(GOOD[40], 0, "-1"), r"line 41, field 1 \(label\): '-1' is outside 0..1"),
        (with_field(GOOD[40], 0, "nan"), r"line 41, field 1 \(label\): 'nan' is outside 0..1"),
        (with_field(GOOD[40], 0, ""), r"line 41, field 1 \(label\): '' is not a label"),
        (GOOD[40] + "\textra", "line 41: 41 tab-separated fields, expected 40"),
        (GOOD[40].rsplit("\t", 1)[0], "line 41: 39 tab-separated fields, expected 40"),
        ("", "line 41: 1 tab-separated fields, expected 40"),
    ],
)
@pytest.mark.parametrize("block_bytes", [1 << 20, 700])
def test_bad_field_names_file_line_and_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str, message: str, block_bytes: int
) -> None:
    monkeypatch.setattr(text_format, "BLOCK_BYTES", block_bytes)
    write_tsv(tmp_path / "log.tsv", [*GOOD[:40], bad, *GOOD[41:]])
    refuse(tmp_path, message)


def test_wrong_number_of_columns_in_the_first_line(tmp_path: Path) -> None:
    write_tsv(tmp_path / "log.tsv", [line.split("\t", 1)[1] for line in GOOD])
    refuse(tmp_path, "39 fields in its first line: rows without a label")
    write_tsv(tmp_path / "log.tsv", [line.replace("\t", ",") for line in GOOD])
    refuse(tmp_path, "has 1 tab-separated fields in its first line, expected 40")


def test_missing_empty_doubled_and_mixed_sources(tmp_path: Path) -> None:
    refuse(tmp_path, "no such file")
    (tmp_path / "log.tsv").touch()
    refuse(tmp_path, "log.tsv' is empty")
    (tmp_path / "log.tsv").write_bytes(gzip.compress(b""))
    refuse(tmp_path, "expected 40|contains no rows")
    write_tsv(tmp_path / "log.tsv", GOOD)
    refuse(tmp_path, "listed twice", "log.tsv", "*.tsv")
    (tmp_path / "folder").mkdir()
    refuse(tmp_path, "is a folder without files", "folder")
    refuse(tmp_path, "no source is left for training", "log.tsv", test_files=[f"{tmp_path}/log.tsv"])
    pq.write_table(pa.table({"label": [0.0], "c": ["x"]}), tmp_path / "log.parquet")
    refuse(tmp_path, "one format at a time", "log.*")


def test_truncated_files(tmp_path: Path) -> None:
    whole = gzip.compress("\n".join(GOOD * 20).encode())
    (tmp_path / "log.tsv").write_bytes(whole[:-20])
    refuse(tmp_path, "truncated or damaged")
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    (tmp_path / "log.tsv").write_bytes(bytes(damaged))
    refuse(tmp_path, "truncated or damaged|line|expected 40")
    pq.write_table(pa.table({"label": [0.0] * 1000, "c": [str(i) for i in range(1000)]}), tmp_path / "log.parquet")
    (tmp_path / "log.parquet").write_bytes((tmp_path / "log.parquet").read_bytes()[:-50])
    refuse(tmp_path, "log.parquet' cannot be read", "log.parquet")


def test_bad_options(tmp_path: Path) -> None:
    write_tsv(tmp_path / "log.tsv", GOOD)
    refuse(tmp_path, "--test-fraction must be in", test_fraction=1.0)
    refuse(tmp_path, "exclude each other", test_fraction=0.1, test_files=["x"])
    refuse(tmp_path, "did you mean 'cat_1'", hash_rows_by_feature={"cat-1": 5})
    refuse(tmp_path, "--hash-rows of all features must be in", hash_rows=0)
    refuse(tmp_path, "do not apply to Criteo logs", dense=["int_0"])
    write_tsv(tmp_path / "one.tsv", GOOD[:1])
    refuse(tmp_path, "none of 1 rows is left for training", "one.tsv", test_fraction=0.9999999)


def test_existing_folder_needs_force(tmp_path: Path) -> None:
    write_tsv(tmp_path / "log.tsv", GOOD)
    run(tmp_path, "log.tsv")
    before = (tmp_path / "out" / "dataset.json").read_bytes()
    with pytest.raises(MesetaError, match="exists; choose another --out, or replace it with --force"):
        run(tmp_path, "log.tsv")
    run(tmp_path, "log.tsv", force=True, seed=1)
    assert (tmp_path / "out" / "dataset.json").read_bytes() != before
    (tmp_path / "out" / "dataset.json").unlink()
    with pytest.raises(MesetaError, match="is not a prepared dataset, so --force does not replace it"):
        run(tmp_path, "log.tsv", force=True)


def test_only_our_own_leftover_is_removed(tmp_path: Path) -> None:
    write_tsv(tmp_path / "log.tsv", GOOD)
    leftover = tmp_path / "out.tmp"
    leftover.mkdir()
    (leftover / "precious").touch()
    with pytest.raises(MesetaError, match="must not exist, because prepare did not make it"):
        run(tmp_path, "log.tsv")
    assert (leftover / "precious").exists()
    (leftover / "meseta-prepare-unfinished.json").touch()
    run(tmp_path, "log.tsv")
    assert not leftover.exists()


def test_an_interrupt_before_anything_was_saved_leaves_nothing(tmp_path: Path) -> None:
    write_tsv(tmp_path / "log.tsv", GOOD)
    num_threads = threading.active_count()

    def interrupt(at: str, rows: int, share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(PrepareOptions(sources=[f"{tmp_path}/log.tsv"], out=tmp_path / "out"), interrupt)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.tsv"]
    assert threading.active_count() == num_threads
