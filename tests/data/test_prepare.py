"""`prepare` of Criteo logs against a plain Python reading of the same lines."""

import json
from pathlib import Path

import numpy as np
import pytest

from data.click_log import DENSE, SPARSE, Oracle, make_lines, read_split, reuse_shares, write_tsv
from meseta.data import Dataset
from meseta.data.formats import text as text_format
from meseta.data.prepare import PrepareOptions, prepare
from meseta.data.read.order import random_words
from meseta.data.synth import ClickLog, SynthOptions, write_click_log

REAL_ROWS = Path(__file__).parents[3] / "shared" / "data" / "criteo_1tb_day0_head.tsv"
TEACHER = {
    "files": {"a.tsv": {"auc": 0.8, "ne": 0.7}, "b.tsv": {"auc": 0.81, "ne": 0.71}},
    "all": {"auc": 0.82, "ne": 0.72},
}


def check_split(folder: Path, split: str, oracle: Oracle) -> None:
    table = read_split(folder, split)
    assert table.column("label").to_pylist() == oracle.label
    dense = np.stack([table.column(name).to_numpy() for name in DENSE], axis=1)
    np.testing.assert_allclose(dense, oracle.dense, rtol=1e-5, atol=1e-6)
    sparse = np.stack([table.column(name).to_numpy() for name in SPARSE], axis=1)
    np.testing.assert_array_equal(sparse, oracle.sparse)


@pytest.mark.parametrize(("suffix", "end"), [(".tsv", "\n"), (".gz", "\n"), (".tsv", "\r\n")])
def test_split_by_files_agrees_with_plain_python(tmp_path: Path, suffix: str, end: str) -> None:
    lines = make_lines(700)
    write_tsv(tmp_path / f"day_0{suffix}", lines[:300], end)
    write_tsv(tmp_path / f"day_1{suffix}", lines[300:500], end)
    write_tsv(tmp_path / f"day_2{suffix}", lines[500:], end)
    options = PrepareOptions(
        sources=[f"{tmp_path}/day_*"],
        test_files=[f"{tmp_path}/day_2{suffix}"],
        out=tmp_path / "out",
        hash_rows=1000,
        seed=5,
    )
    dataset = prepare(options)
    check_split(tmp_path / "out", "train", Oracle.of(lines[:500], lines[:500], 1000, 5))
    check_split(tmp_path / "out", "test", Oracle.of(lines[500:], lines[:500], 1000, 5))
    assert [(s.split, s.num_rows) for s in dataset.sources] == [("train", 300), ("train", 200), ("test", 200)]
    assert dataset.splits["train"].num_positives == sum(line.startswith("1") for line in lines[:500])
    assert Dataset.load(tmp_path / "out") == dataset
    assert [path.name for path in tmp_path.iterdir() if "tmp" in path.name] == []


def test_statistics_agree_with_plain_counting(tmp_path: Path) -> None:
    lines = make_lines(400)
    source = write_tsv(tmp_path / "log.tsv", lines)
    dataset = prepare(PrepareOptions(sources=[str(source)], out=tmp_path / "out", test_fraction=0.0, hash_rows=10**7))
    ids = Oracle.of(lines, lines, 10**7, 0).sparse
    for place, feature in enumerate(dataset.sparse):
        column = [[row[place]] for row in ids]
        statistics = feature.statistics
        assert (statistics.num_rows, statistics.num_lookups, statistics.mean_pooling_factor) == (400, 400, 1.0)
        assert statistics.num_uniques == len({i for (i,) in column})
        rows, lookups = reuse_shares(column)
        np.testing.assert_allclose(statistics.reuse.rows, rows)
        np.testing.assert_allclose(statistics.reuse.lookups, lookups)
    assert dataset.splits["test"].num_rows == 0


def test_seeded_fraction_depends_on_seed_and_row_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other files, other blocks, another number of threads: the same datasets, to the byte."""
    lines = make_lines(500)
    is_test = random_words(np.arange(500), 3) < np.uint64(0.3 * 2**64)
    training = [line for line, test in zip(lines, is_test, strict=True) if not test]
    testing = [line for line, test in zip(lines, is_test, strict=True) if test]
    write_tsv(tmp_path / "whole.tsv", lines)
    for part in range(3):
        write_tsv(tmp_path / f"part_{part}.gz", lines[part * 170 : (part + 1) * 170])
    options = {"test_fraction": 0.3, "seed": 3, "hash_rows": 1000}
    prepare(PrepareOptions(sources=[f"{tmp_path}/whole.tsv"], out=tmp_path / "a", **options))
    monkeypatch.setattr(text_format, "BLOCK_BYTES", 2000)
    prepare(PrepareOptions(sources=[f"{tmp_path}/part_*.gz"], out=tmp_path / "b", num_threads=3, **options))
    check_split(tmp_path / "a", "train", Oracle.of(training, training, 1000, 3))
    check_split(tmp_path / "a", "test", Oracle.of(testing, training, 1000, 3))
    for name in ("train/part-00000.parquet", "test/part-00000.parquet"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    left, right = Dataset.load(tmp_path / "a"), Dataset.load(tmp_path / "b")
    assert (left.dense, left.sparse, left.splits) == (right.dense, right.sparse, right.splits)


def test_windows_and_parts_do_not_change_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meseta.data.prepare import write

    lines = make_lines(450)
    source = write_tsv(tmp_path / "log.tsv", lines)
    monkeypatch.setattr(write, "WINDOW_SAMPLES", 100)
    monkeypatch.setattr(write, "NUM_PART_WINDOWS", 2)
    monkeypatch.setattr(write, "ROW_GROUP_ROWS", 30)
    dataset = prepare(PrepareOptions(sources=[str(source)], out=tmp_path / "out", test_fraction=0.0, hash_rows=1000))
    assert [file.num_rows for file in dataset.splits["train"].files] == [200, 200, 50]
    check_split(tmp_path / "out", "train", Oracle.of(lines, lines, 1000, 0))
    rows, _ = reuse_shares([[row[0]] for row in Oracle.of(lines, lines, 1000, 0).sparse], window=100)
    np.testing.assert_allclose(dataset.sparse[0].statistics.reuse.rows, rows)


def test_hash_rows_per_feature_and_constant_columns(tmp_path: Path) -> None:
    lines = ["\t".join(["0", *["3"] * 13, *["ab"] * 26])] * 20
    source = write_tsv(tmp_path / "log.tsv", lines)
    dataset = prepare(
        PrepareOptions(sources=[str(source)], out=tmp_path / "out", hash_rows=50, hash_rows_by_feature={"cat_3": 2**33})
    )
    assert [s.num_embeddings for s in dataset.sparse][2:5] == [50, 2**33, 50]
    table = read_split(tmp_path / "out", "train")
    assert table.schema.field("cat_3").type == "int64"
    assert table.schema.field("cat_2").type == "int32"
    assert {d.std for d in dataset.dense} == {1.0}
    assert table.column("int_0").to_numpy().max() == pytest.approx(0, abs=1e-6)


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    source = write_tsv(tmp_path / "log.tsv", make_lines(50))
    calls: list[tuple[str, int, float]] = []
    prepare(PrepareOptions(sources=[str(source)], out=tmp_path / "out"), lambda *call: calls.append(call))
    assert calls == [("read", 0, 0.0), ("read", 50, 1.0), ("write", 0, 0.0), *calls[3:]]
    assert calls[-1] == ("write", 50, 1.0)


def test_teacher_is_copied_where_it_covers_the_test_split(tmp_path: Path) -> None:
    for name in ("a.tsv", "b.tsv"):
        write_tsv(tmp_path / name, make_lines(50))
    (tmp_path / "teacher.json").write_text(json.dumps(TEACHER))
    both = [f"{tmp_path}/*.tsv"]
    by_file = prepare(PrepareOptions(sources=both, test_files=[f"{tmp_path}/b.tsv"], out=tmp_path / "file"))
    by_fraction = prepare(PrepareOptions(sources=both, out=tmp_path / "fraction"))
    one_of_two = prepare(PrepareOptions(sources=[f"{tmp_path}/a.tsv"], out=tmp_path / "one"))
    assert by_file.teacher is not None and (by_file.teacher.auc, by_file.teacher.ne) == (0.81, 0.71)
    assert by_fraction.teacher is not None and (by_fraction.teacher.auc, by_fraction.teacher.ne) == (0.82, 0.72)
    assert one_of_two.teacher is None


def test_synthetic_log_and_its_teacher(tmp_path: Path) -> None:
    document = write_click_log(SynthOptions(out=tmp_path / "raw", num_rows=3000, num_files=3, log=ClickLog(1, 0.001)))
    last = f"{tmp_path}/raw/day_2.tsv"
    dataset = prepare(PrepareOptions(sources=[f"{tmp_path}/raw/*.tsv"], test_files=[last], out=tmp_path / "out"))
    assert dataset.teacher is not None
    assert dataset.teacher.auc == document["files"]["day_2.tsv"]["auc"]
    assert dataset.splits["test"].num_rows == 1000


@pytest.mark.skipif(not REAL_ROWS.exists(), reason="the real Criteo rows are not next to this repository")
def test_real_rows(tmp_path: Path) -> None:
    lines = REAL_ROWS.read_text().splitlines()
    dataset = prepare(PrepareOptions(sources=[str(REAL_ROWS)], out=tmp_path / "out", test_fraction=0.0, hash_rows=5000))
    assert (dataset.splits["train"].num_rows, dataset.splits["train"].num_positives) == (10_000, 265)
    check_split(tmp_path / "out", "train", Oracle.of(lines, lines, 5000, 0))
