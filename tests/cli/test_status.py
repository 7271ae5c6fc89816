"""Tests of `meseta status` for running ranks, a stopped rank, a run that has ended, one process, and folders without
records."""

from __future__ import annotations

import importlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from forked import forking
from meseta.system.time_limits import HANG_EXIT_CODE
from meseta.telemetry.metrics_file import METRICS_FILE
from meseta.telemetry.rank_record import (
    RANK_RECORD_VARIABLE,
    RANKS_FOLDER,
    RECORD_BYTES,
    CurrentRankRecord,
    RankRecord,
    TransferInfo,
    record_path,
)

Run = Callable[..., tuple[int, str, str]]
LINES = """{"kind": "train", "step": 1000, "num_samples": 64000, "loss": 0.61, "ne": 0.95, "samples_per_s": 4321.2}
{"kind": "eval", "step": 1000, "split": "valid", "logloss": 0.62, "auc": 0.7}
{"kind": "train", "step": 2000, "num_samples": 128000, "loss": 0.5, "logloss": 0.4, "auc": 0.71, "samples_per_s": 4322}
{"kind": "tr"""
PROGRESS = (
    r"metrics\.jsonl, written [\d.]+ s ago: step 2,000, 4,322 samples/s, log loss 0\.4000, AUC 0\.7100; "
    r"valid at step 1,000, log loss 0\.6200, AUC 0\.7000"
)


def be_rank(rank: int, run_dir: Path) -> None:
    """Record a rank that waits for the counts of a batch. The last of three ranks has not started that exchange."""
    from meseta.comm.recording import start_record

    os.environ.update({"RANK": str(rank), "WORLD_SIZE": "3", RANK_RECORD_VARIABLE: str(record_path(run_dir, rank))})
    start_record()
    record = CurrentRankRecord.record
    assert record is not None
    record.enter_stage("input_dist" if rank < 2 else "data", 6)
    if rank < 2:
        with record.start_transfer(
            (0, "rows"), 6, TransferInfo("counts", "int64", num_peers=2, tables=("user", "item"))
        ):
            time.sleep(120)
    time.sleep(120)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[BaseProcess]]:
    """Three ranks that write records in `run`."""
    (tmp_path / "run" / RANKS_FOLDER).mkdir(parents=True)
    processes = []
    for rank in range(3):
        record_path(tmp_path / "run", rank).write_bytes(bytes(RECORD_BYTES))
        process: BaseProcess = forking().Process(target=be_rank, args=(rank, tmp_path / "run"))
        process.start()
        processes.append(process)
    for rank in range(3):  # heartbeats arrive
        while not any(record_path(tmp_path / "run", rank).read_bytes()[512:520]):
            time.sleep(0.01)
    yield processes
    for process in processes:
        process.kill()
        process.join()


def test_ranks_at_work_stopped_and_ended(
    run: Run, ranks: list[BaseProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    # The machine may be slow.
    command = importlib.import_module("meseta.cli.status")
    monkeypatch.setattr(command, "STUCK_TIMEOUT_S", 60.0)
    with monkeypatch.context() as patch:
        patch.setattr(command, "MISSED_HEARTBEAT_TIMEOUT_S", 60.0)
        code, out, _ = run("status", folder)
        assert code == 0 and "stacks of rank" not in out and "metrics.jsonl" not in out
        (folder / METRICS_FILE).write_text(LINES)
        code, out, _ = run("status", folder, "--stacks")
    assert re.fullmatch(PROGRESS, out.splitlines()[1]), out
    assert (code, out.splitlines()[0].endswith(", running")) == (0, True), out
    for rank, process in enumerate(ranks):
        assert re.search(
            rf"^rank {rank} on \S+, process {process.pid}: step 7, stage .*; heartbeat \d\.\d s ago$", out, re.M
        )
        [stacks] = re.findall(rf"stacks of rank {rank}:\n((?:.+\n|\n(?=Thread|Current))+)", out)
        assert "in be_rank" in stacks
    pid = ranks[2].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    time.sleep(3)
    code, out, _ = run("hang", folder)
    assert (code, out.splitlines()[0].endswith(", stuck")) == (HANG_EXIT_CODE, True), out
    line = r"^silent: rank 2 on \S+ \(process \d+\) has been silent for [\d.]+ s, stopped by a signal, at step 7, "
    line += "stage data; ranks 0, 1 wait for 'counts' of tables user, item$"
    assert re.search(line, out, re.MULTILINE), out
    assert f"no stacks of rank 2: it is stopped by a signal and cannot answer; `kill -CONT {pid}` resumes it" in out
    assert "stacks of rank 1:" in out and ranks[0].is_alive() and ranks[1].is_alive()
    for process in ranks:
        process.kill()
        process.join()
    code, out, _ = run("hang", folder)
    assert code == 0 and out.splitlines()[0].endswith(", ended") and "silent: rank 2 on " in out
    assert (
        "rank 0 on" in out
        and "ended, last at step 7, stage input_dist, waiting for 'counts' of tables user, item" in out
    )


def test_one_process_has_metrics_but_no_records(run: Run, tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text(LINES)
    for command in ("status", "hang"):
        code, out, _ = run(command, tmp_path)
        first, second = out.splitlines()
        assert code == 0 and first.startswith(f"{tmp_path}: no rank records") and re.fullmatch(PROGRESS, second)


@pytest.mark.parametrize("kind", ["nothing", "another number", "another size", "a link", "a folder", "short"])
def test_folders_without_records_are_refused(kind: str, error_of: Callable[..., str], tmp_path: Path) -> None:
    paths = [record_path(tmp_path, rank) for rank in range(2)]
    paths[0].parent.mkdir()
    for rank, path in enumerate(paths):
        path.write_bytes(bytes(RECORD_BYTES))
        descriptor = os.open(path, os.O_RDWR)
        RankRecord(descriptor, 0 if kind == "another number" else rank, rank + 2 if kind == "another size" else 2)
        os.close(descriptor)
    if kind == "nothing":
        for path in paths:
            path.unlink()
    if kind in ("a link", "a folder"):
        paths[1].unlink()
        paths[1].mkdir() if kind == "a folder" else paths[1].symlink_to(paths[0])
    if kind == "short":
        os.truncate(paths[1], 1000)
    error = error_of("hang", tmp_path)
    words = {
        "nothing": "has no records of ranks in 'ranks'; give the run_dir of a training on several ranks",
        "another number": "is of rank 0 of 2, which does not match its name or the other records; move it away",
        "another size": "is of rank 0 of 2, which does not match its name or the other records; move it away",
        "a link": "Too many levels of symbolic links; move it away",
        "a folder": "Is a directory; move it away",
        "short": "its size must be at least 36,864 bytes, got 1,000",
    }
    assert words[kind] in error
