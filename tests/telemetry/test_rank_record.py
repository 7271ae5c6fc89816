"""Rank records: written values are read back, and damaged records are refused."""

from __future__ import annotations

import os
import random
import signal
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from zlib import crc32

import pytest

from forked import forking
from meseta.spec import MesetaError
from meseta.system.files import link_tmpfile, open_tmpfile
from meseta.system.processes import has_signal_handler, process_start_ticks, read_process_state
from meseta.telemetry.rank_record import RECORD_BYTES, RankRecord, TransferInfo, is_initialized, parse_record

ROWS, SUMS = (0, "rows"), (1, "sums")


@pytest.fixture
def file() -> Iterator[int]:
    with tempfile.TemporaryFile() as opened:
        os.ftruncate(opened.fileno(), RECORD_BYTES)
        yield opened.fileno()


def content(file: int) -> bytes:
    return os.pread(file, RECORD_BYTES, 0)


def test_written_values_are_read_back(file: int) -> None:
    assert not is_initialized(content(file))
    record = RankRecord(file, rank=2, num_ranks=4, signal=40)
    record.num_previous_steps = 100
    record.enter_stage("lookup", 7)
    ids = record.start_transfer(ROWS, 7, TransferInfo("ids", "int64", None, 5, 4096.0, 3, ("user", "item"), (0, 2)))
    record.start_transfer(SUMS, None, TransferInfo("dense", "float32", 21))
    with ids:
        state = parse_record(content(file), "here")
        assert {lane: (wait.lane, wait.sequence_number) for lane, wait in state.waits.items()} == {0: (0, 1)}
    done = parse_record(content(file), "here")
    assert (state.rank, state.num_ranks, state.pid, state.signal) == (2, 4, os.getpid(), 40)
    assert (state.stage, state.step) == ("lookup", 108) and state.start_ticks == process_start_ticks(os.getpid())
    first, second = done.transfers
    assert (first.name, first.step, first.batch_tag, first.dtype, first.num_elements) == ("ids", 108, 5, "int64", None)
    assert (first.num_bytes, first.num_peers, first.tables, first.ranks) == (4096, 3, "user, item", "0, 2")
    assert (second.name, second.step, second.num_elements, second.lane_name) == ("dense", None, 21, "sums")
    assert first.done_ns >= first.start_ns > 0 == second.done_ns and not done.waits
    record.leave_stage()
    assert parse_record(content(file), "here").stage == ""


def test_the_ring_keeps_the_last(file: int) -> None:
    record = RankRecord(file, 0, 2)
    for number in range(1000):
        record.start_transfer(ROWS, number, TransferInfo(f"number {number}"))
    kept = parse_record(content(file), "here").transfers
    assert [transfer.name for transfer in kept] == [f"number {n}" for n in range(1000 - len(kept), 1000)]
    assert len(kept) == (RECORD_BYTES - 4096) // 256 and kept[-1].sequence_number == 1000


def test_history_hashes_differ_after_any_difference(file: int) -> None:
    hashes = []
    for other in ("agree", "agree", "norms"):
        record = RankRecord(file, 0, 2)
        for name in ("counts", other, "ids"):
            record.start_transfer(ROWS, 0, TransferInfo(name))
        hashes.append(parse_record(content(file), "here").transfers[-1].history_hash)
    assert hashes[0] == hashes[1] != hashes[2]


def test_long_names_are_cut_between_characters(file: int) -> None:
    RankRecord(file, 0, 2).start_transfer(ROWS, 0, TransferInfo("ids", tables=("ñ" * 200, "b\x1b[2J")))
    (kept,) = parse_record(content(file), "here").transfers
    assert kept.tables == "ñ" * 38 + "..."
    RankRecord(file, 0, 2).start_transfer(ROWS, 0, TransferInfo("ids", tables=("b\x1b[2J",)))
    assert parse_record(content(file), "here").transfers[-1].tables == "b?[2J"


@pytest.mark.parametrize(
    ("ranks", "included"),
    [(None, range(100)), ((0, 12), (0, 12)), ((), range(100)), (tuple(range(50)), range(100))],
)
def test_ranks_of_a_transfer(file: int, ranks: tuple[int, ...] | None, included: Sequence[int]) -> None:
    """Without a list of ranks, or with one too long for the record, any rank may take part."""
    RankRecord(file, 0, 100).start_transfer(ROWS, 0, TransferInfo("ids", ranks=ranks))
    (kept,) = parse_record(content(file), "here").transfers
    assert [rank for rank in range(100) if kept.includes_rank(rank)] == list(included)


def die_writing(path: str) -> None:
    record = RankRecord(os.open(path, os.O_RDWR), 1, 2)
    record.start_transfer(ROWS, 3, TransferInfo("gradients"))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_record_survives_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / "record"
    path.write_bytes(bytes(RECORD_BYTES))
    process: BaseProcess = forking().Process(target=die_writing, args=(str(path),))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    state = parse_record(path.read_bytes(), str(path))
    assert (state.pid, state.transfers[-1].name) == (process.pid, "gradients")


@pytest.mark.parametrize(
    ("at", "bytes_there", "words"),
    [
        (0, b"PK", "its first bytes are not those"),
        (8, struct.pack("<I", 9), "its version is 9"),
        (20, b"\7", "its header does not match its checksum"),
    ],
)
def test_other_files_are_refused(file: int, at: int, bytes_there: bytes, words: str) -> None:
    RankRecord(file, 0, 2)
    os.pwrite(file, bytes_there, at)
    with pytest.raises(MesetaError, match=f"rank record 'here': {words}.*move it away"):
        parse_record(content(file), "here")
    with pytest.raises(MesetaError, match="got 10;"):
        parse_record(content(file)[:10], "here")


def test_damaged_transfers_are_dropped(file: int) -> None:
    record, draw = RankRecord(file, 0, 2), random.Random(0)
    for number in range(200):
        with record.start_transfer(ROWS, number, TransferInfo("ids", tables=("user",))):
            pass
    whole = content(file)
    expected = {(t.index, t.sequence_number, t.name, t.tables) for t in parse_record(whole, "here").transfers}
    for _ in range(200):
        spoiled = bytearray(whole)
        for _ in range(draw.choice([1, 30, 2000])):
            spoiled[draw.randrange(RECORD_BYTES)] = draw.randrange(256)
        try:
            state = parse_record(bytes(spoiled), "here")
        except MesetaError:
            continue
        assert {(t.index, t.sequence_number, t.name, t.tables) for t in state.transfers} <= expected


def test_impossible_ranks_are_refused(file: int) -> None:
    RankRecord(file, 5, 2)
    with pytest.raises(MesetaError, match="its header names rank 5 of 2"):
        parse_record(content(file), "here")
    head = content(file)[:200]
    assert crc32(head) != 0


def test_files_without_a_name_get_one(tmp_path: Path) -> None:
    descriptor = open_tmpfile(tmp_path / "not" / "there")
    os.write(descriptor, b"0123456789")
    (tmp_path / "not" / "there").mkdir(parents=True)
    assert list(tmp_path.rglob("*.record")) == []
    path = tmp_path / "not" / "there" / "a.record"
    path.write_text("former")
    for _ in range(2):
        if not link_tmpfile(descriptor, path):
            pytest.skip("this file system gives no names to files without one")
    os.close(descriptor)
    assert path.read_bytes() == b"0123456789"


def test_processes_are_known_by_number_and_start() -> None:
    sleep = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGUSR1, print); print(); time.sleep(60)"]
    process: BaseProcess = forking().Process(target=os.execv, args=(sys.executable, sleep))
    process.start()
    pid = process.pid
    assert pid is not None
    while not has_signal_handler(pid, signal.SIGUSR1):
        pass
    assert not has_signal_handler(pid, signal.SIGUSR2)
    os.kill(pid, signal.SIGSTOP)
    while (state := read_process_state(pid)) is not None and state.state_code != "T":
        pass
    assert (
        state is not None
        and state.is_stopped
        and state.blocked_reason == "stopped by a signal"
        and state.start_ticks == process_start_ticks(pid)
    )
    process.kill()
    process.join()
    assert read_process_state(pid) is None and not has_signal_handler(pid, signal.SIGUSR1)
