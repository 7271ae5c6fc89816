"""Tests of row files under faults of a disk, another program or a kill: a clear error or a removed file, never wrong
rows."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from meseta.ops.row_cache import BackingStoreError, RowCache, pin_rows
from meseta.ops.row_file import DiskEngine, RowFile, probe_engine
from meseta.ops.row_file.engine import THREADS, io_uring_unavailable_reason
from meseta.spec import MesetaError
from row_file_cases import ENGINES, damage, records_of
from small_disk import small_disk

WIDTH, ROWS = 260, 4000


@pytest.fixture(params=ENGINES)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RowFile]:
    """Row file of which all rows except the last ones are on disk."""
    file = RowFile(
        DiskEngine(tmp_path, request.param), "t", num_rows=ROWS, record_bytes=WIDTH, owner="table 't', rows 0..3999",
        segment_bytes=4096,
    )  # fmt: skip
    file.write(torch.arange(ROWS), records_of(ROWS, WIDTH, 0))
    yield file
    file.close()


def read(file: RowFile, rows: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(len(rows), WIDTH, dtype=torch.uint8)
    assert file.read(rows, out).wait().all()
    return out


@contextmanager
def in_its_place(file: RowFile, other: str) -> Iterator[None]:
    """Context manager that redirects the file's descriptor to another file."""
    descriptor = next(
        int(fd) for fd in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{fd}") == file.path
    )
    kept, there = os.dup(descriptor), os.open(other, os.O_RDONLY if Path(other).is_dir() else os.O_RDWR)
    os.dup2(there, descriptor)
    os.close(there)
    try:
        yield
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)


def named(file: RowFile, reason: str) -> str:
    return rf"table 't', rows 0\.\.3999: file '{re.escape(file.path)}', byte [\d,]+: {reason}"


def test_a_byte_that_changes_is_found_and_its_row_is_named(file: RowFile) -> None:
    file.flush()
    records = records_of(ROWS, WIDTH, 0)
    damage(Path(file.path), bytes(records[77].tolist()))
    with pytest.raises(MesetaError, match=named(file, "the checksum of row 77 is wrong.*last checkpoint")):
        read(file, torch.tensor([3, 77, 1000]))
    others = torch.tensor([row for row in range(ROWS) if row != 77])
    assert torch.equal(read(file, others), records[others])


def test_an_older_state_of_the_file_is_not_taken_for_the_present_one(file: RowFile) -> None:
    file.flush()
    before = Path(file.path).read_bytes()
    for seed in range(1, 9):  # every segment is written again
        file.write(torch.arange(ROWS), records_of(ROWS, WIDTH, seed))
    file.flush()
    with open(file.path, "r+b") as raw:
        raw.write(before)
        os.fsync(raw.fileno())
    with pytest.raises(MesetaError, match="checksum of row"):
        read(file, torch.arange(ROWS))


def test_a_file_that_was_cut_is_named(file: RowFile) -> None:
    file.flush()
    os.truncate(file.path, 8192)
    with pytest.raises(MesetaError, match=named(file, "the file ends early")):
        read(file, torch.arange(ROWS))


def test_pending_reads_end_before_the_file_is_closed(file: RowFile, tmp_path: Path) -> None:
    """Another file may reuse the descriptor. Later requests are refused, also those through the bare handle that a
    cache has."""
    file.flush()
    values = torch.zeros(9, WIDTH, dtype=torch.uint8)
    cache = RowCache(8, 1, ROWS, file.handle, [values])
    pinned = pin_rows([cache], [(0, torch.arange(8))])
    assert pinned.wait() == []
    pinned.unpin()
    frozen, expected = file.snapshot(), records_of(ROWS, WIDTH, 0)
    file.engine.max_reads_per_s = 2000.0
    rows = torch.arange(0, ROWS, 20)
    outs = [torch.zeros(len(rows), WIDTH, dtype=torch.uint8) for _ in range(3)]
    readings = [file.read(rows, out) for out in outs]
    while not outs[0].any():  # until the first rows are read
        time.sleep(0.001)
    file.close()
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    ended = 0
    for reading, out in zip(readings, outs, strict=True):
        try:
            assert reading.wait().all() and torch.equal(out, expected[rows])
            ended += 1
        except MesetaError as error:
            assert "the file is closed" in str(error)
    assert ended > 0
    with pytest.raises(MesetaError, match="the file is closed"):
        frozen.read(0, torch.empty(ROWS, WIDTH, dtype=torch.uint8)).wait()
    with pytest.raises(BackingStoreError) as failed:
        cache.write_back(cache.dirty_slots())
    assert "the file is closed and its rows are gone" in str(file.explain(failed.value.failure))
    with pytest.raises(BackingStoreError):
        pin_rows([cache], [(0, torch.arange(100, 108))])
    assert os.fstat(other).st_size == 0
    os.close(other)


def test_a_system_error_is_named_and_other_calls_succeed(file: RowFile, tmp_path: Path) -> None:
    file.flush()
    with (
        in_its_place(file, str(tmp_path)),
        pytest.raises(MesetaError, match=named(file, "the file cannot be read: .*direc")),
    ):
        read(file, torch.arange(ROWS))
    if file.engine.info.engine == THREADS:  # /proc/self/mem has no byte there
        with in_its_place(file, "/proc/self/mem"), pytest.raises(MesetaError, match="Input/output error"):
            read(file, torch.arange(ROWS))
    assert torch.equal(read(file, torch.arange(ROWS)), records_of(ROWS, WIDTH, 0))


def test_rows_that_a_full_disk_has_not_taken_are_kept(file: RowFile) -> None:
    file.flush()
    newer = records_of(ROWS, WIDTH, 1)
    file.write(torch.arange(10), newer[:10])  # begins a segment
    with in_its_place(file, "/dev/full"):
        with pytest.raises(MesetaError, match=named(file, "the file cannot be written: No space left.*free space")):
            file.flush()
        with pytest.raises(MesetaError, match="No space left"):
            file.write(torch.arange(10, 20), newer[10:20])
        assert torch.equal(read(file, torch.arange(10)), newer[:10])
    file.write(torch.arange(20, 30), newer[20:30])  # sends them again
    file.flush()
    assert torch.equal(read(file, torch.arange(10)), newer[:10])
    assert torch.equal(read(file, torch.arange(10, 20)), records_of(ROWS, WIDTH, 0)[10:20])  # refused, so not stored
    assert torch.equal(read(file, torch.arange(20, 30)), newer[20:30])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_disk_fills_up(engine: str, tmp_path: Path) -> None:
    with small_disk(tmp_path, "1m"):
        file = RowFile(DiskEngine(tmp_path, engine), "t", num_rows=8 * ROWS, record_bytes=WIDTH, segment_bytes=16384)
        records = records_of(8 * ROWS, WIDTH, 0)
        done = 0
        with pytest.raises(MesetaError, match="No space left"):
            for done in range(0, 8 * ROWS, 100):
                file.write(torch.arange(done, done + 100), records[done : done + 100])
        assert 0 < done < 8 * ROWS
        assert torch.equal(read(file, torch.arange(done)), records[:done])
        subprocess.run(["mount", "-o", "remount,size=32m", str(tmp_path)], check=True)
        file.write(torch.arange(done, 8 * ROWS), records[done:])
        assert torch.equal(read(file, torch.arange(8 * ROWS)), records)
        file.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_disk_fills_up_while_rows_are_cleaned(engine: str, tmp_path: Path) -> None:
    """The disk has room for all rows, but not for the largest size of their file."""
    generator = torch.Generator().manual_seed(0)
    with small_disk(tmp_path, "1300k"):
        file = RowFile(DiskEngine(tmp_path, engine), "t", num_rows=ROWS, record_bytes=WIDTH, segment_bytes=16384)
        expected = records_of(ROWS, WIDTH, 0)
        file.write(torch.arange(ROWS), expected)
        rows, newer = torch.arange(0), expected
        with pytest.raises(MesetaError, match="No space left"):
            for seed in range(1, 400):
                rows, newer = torch.randperm(ROWS, generator=generator)[:50], records_of(50, WIDTH, seed)
                file.write(rows, newer)
                expected[rows] = newer
        stored = read(file, torch.arange(ROWS))
        is_old, is_new = (stored[rows] == expected[rows]).all(1), (stored[rows] == newer).all(1)
        assert bool((is_old | is_new).all())  # some rows of the last batch may be stored
        stored[rows] = expected[rows]
        assert torch.equal(stored, expected)
        subprocess.run(["mount", "-o", "remount,size=32m", str(tmp_path)], check=True)
        file.write(rows, newer)
        expected[rows] = newer
        assert torch.equal(read(file, torch.arange(ROWS)), expected)
        file.close()


def test_rows_that_cleaning_cannot_read_stay_and_are_named(file: RowFile) -> None:
    file.flush()
    with open(file.path, "r+b") as raw:
        raw.write(bytes(40_000))
        os.fsync(raw.fileno())
    newer = records_of(ROWS, WIDTH, 1)
    for _ in range(6):
        file.write(torch.arange(0, ROWS, 2), newer[::2])
    with pytest.raises(MesetaError, match="checksum of row"):
        read(file, torch.arange(1, ROWS, 2))
    assert torch.equal(read(file, torch.arange(0, ROWS, 2)), newer[::2])


CHILD = """
import os, signal, sys, torch
from meseta.ops.row_file import DiskEngine, RowFile
if "two" in sys.argv:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for the second process
    os.fork()
file = RowFile(DiskEngine(sys.argv[1]), "a/b", num_rows=10_000, record_bytes=260)
file.write(torch.arange(10_000), torch.zeros(10_000, 260, dtype=torch.uint8))
os.write(1, f"{os.getpid()} {file.path}\\n".encode())  # one write: lines of two processes do not mix
if "end" not in sys.argv:
    signal.pause()
"""


def has_ended(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return True
    return False


def test_files_of_a_killed_process_go_at_the_next_start_and_others_stay(tmp_path: Path) -> None:
    living = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path), "two"], stdout=subprocess.PIPE, text=True)
    killed_id = 0
    try:
        assert living.stdout is not None
        lines = [living.stdout.readline().split() for _ in range(2)]
        path_of = {int(process_id): Path(path) for process_id, path in lines}
        [killed_id] = path_of.keys() - {living.pid}
        paths = [path_of[living.pid], path_of[killed_id]]
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 and path.parent == tmp_path for path in paths)
        other_host = paths[1].with_name(f"t.otherhost.1.00000000{paths[1].suffix}")
        other_host.write_bytes(b"")
        other_host.chmod(0o600)
        (tmp_path / "notes.meseta-rows").write_text("mine")
        assert DiskEngine(tmp_path).removed_files == []
        os.kill(killed_id, signal.SIGKILL)
        while not has_ended(killed_id):
            time.sleep(0.01)
        assert DiskEngine(tmp_path).removed_files == [paths[1]]
        assert paths[0].exists() and other_host.exists() and (tmp_path / "notes.meseta-rows").exists()
        living.send_signal(signal.SIGINT)
        living.wait()
        assert not paths[0].exists()
    finally:
        living.kill()
        living.wait()
        if killed_id and not has_ended(killed_id):
            os.kill(killed_id, signal.SIGKILL)
        if living.stdout:
            living.stdout.close()


def test_the_end_of_a_process_removes_its_files(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", CHILD, str(tmp_path), "end"], check=True, capture_output=True)
    assert list(tmp_path.iterdir()) == []


def test_a_fork_leaves_files_to_its_parent(file: RowFile) -> None:
    child = os.fork()
    if child == 0:
        try:
            file.num_bytes()
        except ValueError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(read(file, torch.arange(ROWS)), records_of(ROWS, WIDTH, 0))


FORBIDDEN = """
import ctypes, struct, sys
libc, filters = ctypes.CDLL(None), b"".join(
    struct.pack("HBBI", *one) for one in ((0x20, 0, 0, 0), (0x15, 0, 1, 425), (6, 0, 0, 0x50001), (6, 0, 0, 0x7FFF0000))
)  # io_uring_setup: EPERM
memory = ctypes.create_string_buffer(filters)
program = struct.pack("HxxxxxxQ", 4, ctypes.addressof(memory))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
from meseta.ops.row_file import probe_engine
from pathlib import Path
print(probe_engine(Path(sys.argv[1])).summary)
probe_engine(Path(sys.argv[1]), "io_uring")
"""


@pytest.mark.skipif(io_uring_unavailable_reason() is not None, reason="io_uring is forbidden already")
def test_threads_serve_where_the_system_forbids_io_uring(tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", FORBIDDEN, str(tmp_path)], check=False, capture_output=True, text=True
    )
    assert child.stdout.startswith("threads (the system forbids io_uring, for example by a container profile")
    assert "MesetaError: storage: engine 'io_uring' is unavailable: the system forbids io_uring" in child.stderr


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MesetaError, match=r"storage: '.*file/tier' cannot be created .*; set storage.dir"):
        DiskEngine(tmp_path / "file" / "tier")
    with pytest.raises(MesetaError, match="engine 'fast' is unknown"):
        probe_engine(tmp_path, "fast")
