"""Tests that a killed, interrupted or failed `prepare` resumes and ends with identical files."""

from __future__ import annotations

import errno
import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cli.processes import Command
from data import prepare_and_die
from data.click_log import make_lines, write_tsv
from failing_reads import Read, failing_reads
from meseta.data import PrepareOptions
from meseta.data.formats import text as text_format
from meseta.data.prepare import prepare, recipe_preparation, staging, write
from meseta.data.prepare.staging import staged_folder
from meseta.data.prepare.write import Spool
from meseta.spec import MesetaError

Progress = Callable[[str, int, float], None]


def write_sources(folder: Path, kind: str) -> list[str]:
    """Write three files with 450 rows. CSV files have one bad row each."""
    lines = make_lines(450)
    for number in range(3):
        part = lines[number * 150 : (number + 1) * 150]
        if kind == "tsv.gz":
            (folder / f"{number}.tsv.gz").write_bytes(gzip.compress("\n".join(part).encode()))
        elif kind == "tsv":
            write_tsv(folder / f"{number}.tsv", part)
        elif kind == "csv":
            rows = [line.split("\t") for line in part]
            text = "".join(f'{r[0]},{r[2]},"{r[20]},\n""{r[21]}"""\n' for r in rows)
            (folder / f"{number}.csv").write_text(f'label,"price",city\n{text}7,1,no label\n')
        elif kind == "ffm":
            text = "".join(f"{row % 2} 0:{row % 30}:1 1:{row % 7}:0.5 1:{row % 11}:2\n" for row in range(150))
            (folder / f"{number}.ffm").write_text(text)
        else:
            bags = pa.array([[f"{word}" for word in line.split("\t")[14:19] if word] for line in part])
            table = pa.table({"label": [row % 2 for row in range(150)], "bag": bags})
            pq.write_table(table, folder / f"{number}.parquet", row_group_size=70)
    return [f"{folder}/[0-9].{kind}"]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def kill(folder: Path, kind: str, num_kills: int, seed: int, **options: Any) -> int:
    """Kill and resume `prepare`, check the result, and return the number of kills."""
    raw = folder / "raw"
    raw.mkdir()
    document = {"sources": write_sources(raw, kind), "num_threads": 2, "hash_rows": 1000, "test_fraction": 0.3}
    (folder / "options.json").write_text(json.dumps(document | options))
    script = Path(prepare_and_die.__file__)
    streams = folder.with_name(f"{folder.name}-streams")
    command = Command(streams, script, folder, folder / "options.json", num_kills, seed, program="python")
    command.succeed()
    assert tree(folder / "out") == tree(folder / "whole")
    assert sorted(p.name for p in folder.iterdir()) == ["options.json", "out", "raw", "whole"]
    return int(command.out.read_text())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("tsv", {}, marks=pytest.mark.soak),
        pytest.param("tsv.gz", {"valid_fraction": 0.2}, marks=pytest.mark.soak),
        ("csv", {"vocabulary": True, "min_count": 1, "bad_rows": "skip", "valid_fraction": 0.3}),
        pytest.param("ffm", {}, marks=pytest.mark.soak),
        ("parquet", {}),
        pytest.param("tsv", {"recipe_only": True, "valid_fraction": 0.2}, marks=pytest.mark.soak),
        ("csv", {"recipe_only": True, "vocabulary": True, "min_count": 1, "bad_rows": "skip"}),
        pytest.param("parquet", {"recipe_only": True, "vocabulary": True, "min_count": 1}, marks=pytest.mark.soak),
    ],
)
def test_killed_at_random_moments(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    assert kill(tmp_path, kind, num_kills=6, seed=1, **options) > 0


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["tsv", "tsv.gz", "csv", "ffm", "parquet"])
def test_killed_often(tmp_path: Path, kind: str, seed: int) -> None:
    options = {"vocabulary": bool(seed % 2) and "tsv" not in kind, "bad_rows": "skip", "valid_fraction": seed % 4 / 8}
    options["recipe_only"] = seed % 3 == 0
    kill(tmp_path, kind, num_kills=8, seed=seed, **options)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small blocks, windows and parts, and commit after each."""
    monkeypatch.setattr(text_format, "BLOCK_BYTES", 5000)
    monkeypatch.setattr(write, "WINDOW_SAMPLES", 64)
    monkeypatch.setattr(write, "NUM_PART_WINDOWS", 1)
    monkeypatch.setattr(recipe_preparation, "WINDOW_SAMPLES", 64)
    monkeypatch.setattr(recipe_preparation, "ROW_GROUP_ROWS", 32)
    monkeypatch.setattr(staging, "COMMIT_INTERVAL_S", 0.0)


def options_of(folder: Path, out: str = "out", **options: Any) -> PrepareOptions:
    folder.mkdir(exist_ok=True)
    if not (folder / "log.tsv").exists():
        write_tsv(folder / "log.tsv", make_lines(400))
    return PrepareOptions(sources=[f"{folder}/log.tsv"], out=folder / out, num_threads=1, **options)


def interrupted(options: PrepareOptions, stage: str, after_rows: int = 200) -> None:
    def interrupt(at: str, rows: int, share: float) -> None:
        if at == stage and rows >= after_rows:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(options, interrupt)
    assert options.out.with_name(f"{options.out.name}.tmp").exists() and not options.out.exists()


def first_rows(options: PrepareOptions) -> dict[str, int]:
    """Prepare, and return with how many rows each stage began."""
    calls: dict[str, int] = {}
    prepare(options, lambda stage, rows, share: calls.setdefault(stage, rows) and None)
    return calls


@pytest.mark.parametrize("stage", ["read", "count"])
def test_a_recipe_resumes(tmp_path: Path, small: None, stage: str) -> None:
    (tmp_path / "log.csv").write_text(
        "label,price,city\n" + "".join(f"{row % 2},{row},{'long' * 20} {row % 37}\n" for row in range(400))
    )
    options, again = (
        PrepareOptions(
            sources=[f"{tmp_path}/log.csv"], out=tmp_path / out, vocabulary=True, min_count=2, recipe_only=True
        )
        for out in ("out", "again")
    )
    interrupted(options, stage)
    begun = first_rows(options)
    assert begun["read"] == 400 if stage == "count" else 0 < begun["read"] < 400
    assert begun["count"] > 64 if stage == "count" else begun["count"] == 64
    assert first_rows(again) == {"read": 0, "count": 64}
    assert tree(tmp_path / "out") == tree(tmp_path / "again")


@pytest.mark.parametrize("stage", ["read", "write"])
def test_what_was_done_is_not_done_again(tmp_path: Path, small: None, stage: str) -> None:
    options = options_of(tmp_path)
    interrupted(options, stage)
    begun = first_rows(options)
    assert begun["read"] == 400 if stage == "write" else 0 < begun["read"] < 400
    assert (begun["write"] > 0) == (stage == "write")
    prepare(options_of(tmp_path / "other"))
    written, expected = tree(tmp_path / "out"), tree(tmp_path / "other/out")
    assert written.keys() == expected.keys()
    # Two files name the sources.
    assert {name for name in written if written[name] != expected[name]} == {"dataset.json", "prepare.json"}


def test_other_work_starts_again(tmp_path: Path, small: None) -> None:
    interrupted(options_of(tmp_path), "read")
    assert first_rows(options_of(tmp_path, seed=3))["read"] == 0
    shutil.rmtree(tmp_path / "out")
    interrupted(options_of(tmp_path), "read")
    write_tsv(tmp_path / "log.tsv", make_lines(401))
    assert first_rows(PrepareOptions(sources=[f"{tmp_path}/log.tsv"], out=tmp_path / "out"))["read"] == 0
    shutil.rmtree(tmp_path / "out")
    interrupted(options_of(tmp_path), "read")
    assert first_rows(options_of(tmp_path, force=True))["read"] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.tsv", "out"]


def test_a_replacement_resumes(tmp_path: Path, small: None) -> None:
    options = options_of(tmp_path)
    prepare(options)
    before = tree(tmp_path / "out")
    again = options_of(tmp_path, force=True, seed=5)

    def interrupt(at: str, rows: int, share: float) -> None:
        if rows >= 200:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(again, interrupt)
    assert tree(tmp_path / "out") == before
    # As a kill between the two renames leaves it.
    (tmp_path / "out").rename(tmp_path / "out.old.tmp")
    assert first_rows(again)["read"] > 0
    assert tree(tmp_path / "out") != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.tsv", "out"]


@pytest.mark.parametrize(
    ("number", "reason", "is_kept"),
    [(errno.EIO, "Input/output error; after this is fixed, run the same command to resume", True),
     (errno.ENOSPC, "No space left on device; free space there, or choose another --out", False)],
)  # fmt: skip
def test_a_disk_that_fails_keeps_what_is_done_and_a_full_one_does_not(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, number: int, reason: str, is_kept: bool
) -> None:
    options = options_of(tmp_path)
    whole = Spool._process_window

    def fail(self: Spool, window: pa.RecordBatch) -> None:
        if self.num_rows > 100:
            raise OSError(number, os.strerror(number))
        whole(self, window)

    with monkeypatch.context() as patch:
        patch.setattr(Spool, "_process_window", fail)
        with pytest.raises(MesetaError, match=f"{reason}$"):
            prepare(options)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out")] == ["out.tmp"] * is_kept
    assert (first_rows(options)["read"] > 0) == is_kept
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.tsv", "out"]


def test_two_at_work_on_one_folder(tmp_path: Path) -> None:
    options = options_of(tmp_path)
    with staged_folder(options.out, {}, force=False) as staging:
        with pytest.raises(MesetaError, match=r"another process is writing .*out\.tmp'; wait for it, or choose"):
            prepare(options)
        assert staging.folder.exists()


def test_a_leftover_from_before_a_restart_of_the_machine_is_not_used(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_of(tmp_path)
    interrupted(options, "read")
    monkeypatch.setattr(staging, "boot_id", lambda: "another")
    assert first_rows(options)["read"] == 0


def test_rows_short_of_a_window_are_kept_while_a_split_gets_no_more(tmp_path: Path) -> None:
    """A split by files may receive no rows between many commits."""
    batch = pa.record_batch(
        {"label": pa.array([1, 0, 1], pa.float32()), "price": pa.array([1.0, 2.0, 3.0], pa.float32())}
    )
    first, second = (Spool(tmp_path / "valid.arrow", ("price",), ("label",)) for _ in range(2))
    first.add(batch)
    for _ in range(4):
        state = first.get_state()
    second.set_state(json.loads(json.dumps(state)))
    second.close()
    assert pa.Table.from_batches(second.windows(0, second.num_windows)).to_pydict() == batch.to_pydict()


@pytest.mark.parametrize("name", [staging.JOURNAL_FILE, "prepare.json"])
def test_a_failed_read_removes_no_work(tmp_path: Path, name: str) -> None:
    """A failed read of the journal or the record is not taken for missing work."""
    out, record = tmp_path / "out", {"options": {}, "sources": {}}
    with pytest.raises(KeyboardInterrupt), staged_folder(out, record, force=False) as work:
        (work.folder / "part").write_text("an hour of work")
        work.commit({"rows": 7})
        (work.folder / "prepare.json").write_text(json.dumps(record))
        if name == "prepare.json":
            (work.folder / staging.JOURNAL_FILE).unlink()
            (work.folder / staging.DATASET_FILE).write_text("{}")
        raise KeyboardInterrupt
    before = {path.name: path.read_bytes() for path in work.folder.iterdir() if path.is_file()}

    def choose(read: Read) -> int | None:
        return errno.EIO if read.kind == "open" and read.path == str(work.folder / name) else None

    for _ in range(2):
        refused = pytest.raises(MesetaError, match="Input/output error")
        with failing_reads(tmp_path, choose=choose), refused, staged_folder(out, record, force=False):
            raise AssertionError
        assert {path.name: path.read_bytes() for path in work.folder.iterdir() if path.is_file()} == before
    with staged_folder(out, record, force=False) as again:
        assert again.is_complete if name == "prepare.json" else again.state == {"rows": 7}
