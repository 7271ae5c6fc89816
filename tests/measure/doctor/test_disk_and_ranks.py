"""Checks of a folder, which leave no files, and of gloo, which name the failed rank."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forked import forking
from meseta.measure.doctor import checks
from meseta.measure.doctor.child_processes import ProcessResult
from meseta.system.kernel import KernelFiles

GB = 1_000_000_000
NOWHERE = KernelFiles(Path("/nowhere"))


def fake(monkeypatch: pytest.MonkeyPatch, free: int, write: float = 1e9, read: float = 1e9) -> None:
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    monkeypatch.setattr(checks, "measure_disk_speed", lambda *_: checks.DiskSpeed(1, write, read))


def test_a_small_measurement(tmp_path: Path) -> None:
    speed = checks.measure_disk_speed(tmp_path, max_bytes=16 << 20, window_s=0.5)
    assert speed.num_bytes == 16 << 20
    assert speed.write_bytes_per_s > 0 and speed.read_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


def test_the_way_rows_are_read_is_reported_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = checks.check_row_files(tmp_path, {"why_not": "it is forbidden"})
    assert finding.text.startswith("tables on this disk are read by threads (it is forbidden), ")
    assert finding.figures["io_uring"] is False and finding.figures["block_bytes"] in (512, 1024, 2048, 4096)
    assert list(tmp_path.iterdir()) == []
    real_open = os.open

    def refuse(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    finding = checks.check_row_files(tmp_path, {"why_not": None})
    assert (
        finding.state == "note" and "by io_uring, through the page cache: its file system has no direct" in finding.text
    )
    assert "cannot be written" in checks.check_row_files(tmp_path / "no", {"error": "ImportError: x"}).text


def test_all_that_was_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated clock advances by one second per reading, so rates are counts of bytes."""
    ticks = iter(range(10_000))
    monkeypatch.setattr(checks.time, "perf_counter", lambda: float(next(ticks)))
    speed = checks.measure_disk_speed(tmp_path, max_bytes=checks.WARMUP_BYTES + 4 * checks.BLOCK_BYTES, window_s=1000.0)
    assert speed.num_bytes == 24 << 20  # the warm-up, and two passes over two blocks
    assert speed.write_bytes_per_s == 8 << 20  # two blocks between two readings
    assert speed.read_bytes_per_s == (8 << 20) / 4  # two blocks, the end, and the reading after it


def measure_until_killed(folder: str, started: Connection) -> None:
    started.send(None)
    while True:
        checks.measure_disk_speed(Path(folder), max_bytes=16 << 20)


@pytest.mark.parametrize(("kill", "exit_code"), [(signal.SIGINT, 1), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_killed_check_leaves_no_files(kill: signal.Signals, exit_code: int, tmp_path: Path) -> None:
    receiver, sender = forking().Pipe(duplex=False)
    child: BaseProcess = forking().Process(target=measure_until_killed, args=(str(tmp_path), sender))
    child.start()
    sender.close()
    receiver.recv()
    time.sleep(0.1)
    assert child.pid is not None
    os.kill(child.pid, kill)
    child.join(30)
    assert child.exitcode == exit_code and list(tmp_path.iterdir()) == []


def test_a_path_that_is_no_folder(tmp_path: Path) -> None:
    finding = checks.check_disk(tmp_path / "no", NOWHERE)
    assert finding.state == "problem" and finding.text.endswith("/no' does not exist") and "--dir" in finding.way_out
    (tmp_path / "file").touch()
    assert checks.check_disk(tmp_path / "file", NOWHERE).text.endswith("is not a folder")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_folder_that_refuses(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(checks.tempfile, "TemporaryFile", refuse)
    finding = checks.check_disk(tmp_path, NOWHERE)
    assert finding.state == "problem" and finding.text.endswith(f"cannot be written: {os.strerror(code)}")


def test_a_real_folder_that_refuses() -> None:
    finding = checks.check_disk(Path("/proc/self"), NOWHERE)  # root may not write there either
    assert (
        finding.state == "problem" and "'/proc/self' cannot be written: " in finding.text and "--dir" in finding.way_out
    )


@pytest.mark.parametrize(
    ("free", "rates", "state", "words"),
    [
        (50 * GB, (1e9, 2e9), "ok", "50.0 GB free; 1,000 MB/s written and synced, 2,000 MB/s read back"),
        (5 * GB, (1e9, 2e9), "note", "little space"),
        (50 * GB, (20e6, 2e9), "note", "checkpoints will be slow"),
        (100_000_000, (1e9, 1e9), "problem", "100 MB free"),
    ],
)
def test_room_and_speed(
    free: int, rates: tuple[float, float], state: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, free, *rates)
    finding = checks.check_disk(tmp_path, NOWHERE)
    assert finding.state == state and words in finding.text and finding.figures["free_bytes"] == free


def test_a_folder_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, 50 * GB)
    (tmp_path / "proc/self").mkdir(parents=True)
    folder = tmp_path / "a b"
    folder.mkdir()
    mounts = f"/dev/vda / ext4 rw 0 0\ntmpfs {str(folder).replace(' ', chr(92) + '040')} tmpfs rw 0 0\nrubbish\n"
    (tmp_path / "proc/self/mounts").write_text(mounts)
    finding = checks.check_disk(folder, KernelFiles(tmp_path))
    assert finding.state == "note" and "(tmpfs)" in finding.text and "are in memory" in finding.text
    assert "(ext4)" in checks.check_disk(tmp_path, KernelFiles(tmp_path)).text


def ended(monkeypatch: pytest.MonkeyPatch, *children: ProcessResult) -> Any:
    monkeypatch.setattr(checks, "run_children", lambda *_: list(children))
    return checks.check_gloo({})


SUM, HANGS = ProcessResult(0, '{"sum": 3.0}\n', ""), ProcessResult(None, "", "")


def test_gloo_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    talkative = ProcessResult(0, 'a library prints\n3\n{"sum": 3.0}\n', "")
    assert ended(monkeypatch, SUM, talkative).state == "ok"


@pytest.mark.parametrize(
    ("children", "words"),
    [
        (
            (HANGS, ProcessResult(1, "", "Trace\nRuntimeError: [enforce fail at /a/b.cc:9] no address\n")),
            "rank 1: RuntimeError: no address",
        ),
        ((ProcessResult(-6, "", ""), HANGS), "rank 0: the process was killed by SIGABRT"),
        ((HANGS, HANGS), "rank 0: no answer within the time limit"),
        ((SUM, ProcessResult(0, '{"sum": 2.0}\n', "")), "returned sum 3 and sum 2"),
        ((SUM, ProcessResult(0, '{"sum": 30.0}\n', "")), "returned sum 3 and sum 30"),
        ((SUM, ProcessResult(0, "", "")), "returned sum 3 and nothing"),
        ((ProcessResult(0, '{"sum": 3', ""), SUM), 'returned {"sum": 3 and sum 3'),
    ],
)
def test_gloo_that_fails(children: tuple[ProcessResult, ...], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = ended(monkeypatch, *children)
    assert finding.state == "problem" and words in finding.text and "ip link set lo up" in finding.way_out


def test_gloo_without_torch() -> None:
    assert checks.check_gloo({"error": "ImportError"}).state == "note"


def test_ranks_that_do_not_connect_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "NUM_RANKS", 1)
    monkeypatch.setattr(checks, "run_children", with_missing_rank(checks.run_children))
    start_s = time.monotonic()
    finding = checks.check_gloo({}, timeout_s=1)
    assert finding.state == "problem" and time.monotonic() - start_s < 10


def with_missing_rank(run: Callable[..., list[ProcessResult]]) -> Callable[..., list[ProcessResult]]:
    """Let the ranks wait for a second one that never starts."""

    def call(module: str, environments: list[dict[str, str]], *rest: Any) -> list[ProcessResult]:
        return run(module, [{**variables, "WORLD_SIZE": "2"} for variables in environments], *rest)

    return call
