"""The check of a folder leaves nothing behind, and that of gloo tells who failed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meseta.measure.doctor import checks
from meseta.measure.doctor.child_processes import ProcessResult
from meseta.system.kernel import KernelFiles
from source_tree import ROOT

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


def test_how_rows_are_read_is_told_with_why_not_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checks.check_row_files(tmp_path, {"why_not": "it is forbidden"})
    assert found.text.startswith("tables on this disk are read by threads (it is forbidden), ")
    assert found.figures["io_uring"] is False and found.figures["block_bytes"] in (512, 1024, 2048, 4096)
    assert list(tmp_path.iterdir()) == []
    real_open = os.open

    def refuse(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    found = checks.check_row_files(tmp_path, {"why_not": None})
    assert found.state == "note" and "by io_uring, through the page cache: its file system has no direct" in found.text
    assert "cannot be written" in checks.check_row_files(tmp_path / "no", {"error": "ImportError: x"}).text


def test_all_that_was_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that stands at one second per look, rates are counts of bytes."""
    ticks = iter(range(10_000))
    monkeypatch.setattr(checks.time, "perf_counter", lambda: float(next(ticks)))
    speed = checks.measure_disk_speed(tmp_path, max_bytes=checks.WARMUP_BYTES + 4 * checks.BLOCK_BYTES, window_s=1000.0)
    assert speed.num_bytes == 24 << 20  # a first look, and two passes over two blocks
    assert speed.write_bytes_per_s == 8 << 20  # two blocks between two looks
    assert speed.read_bytes_per_s == (8 << 20) / 4  # two blocks, the end, and the look after it


@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_it_is_cut_off(kill: signal.Signals, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from meseta.measure.doctor import disk\n"
        "print(flush=True)\nwhile True: disk.measure(Path(sys.argv[1]))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(0.2)
    child.send_signal(kill)
    child.wait(30)
    child.stdout.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    found = checks.check_disk(tmp_path / "no", NOWHERE)
    assert found.state == "problem" and found.text.endswith("/no' does not exist") and "--dir" in found.way_out
    (tmp_path / "file").touch()
    assert checks.check_disk(tmp_path / "file", NOWHERE).text.endswith("is not a folder")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_folder_that_refuses(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(checks.tempfile, "TemporaryFile", refuse)
    found = checks.check_disk(tmp_path, NOWHERE)
    assert found.state == "problem" and found.text.endswith(f"cannot be written: {os.strerror(code)}")


def test_a_real_folder_that_refuses() -> None:
    found = checks.check_disk(Path("/proc/self"), NOWHERE)  # root may not write there either
    assert found.state == "problem" and "'/proc/self' cannot be written: " in found.text and "--dir" in found.way_out


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
    found = checks.check_disk(tmp_path, NOWHERE)
    assert found.state == state and words in found.text and found.figures["free_bytes"] == free


def test_a_folder_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, 50 * GB)
    (tmp_path / "proc/self").mkdir(parents=True)
    folder = tmp_path / "a b"
    folder.mkdir()
    mounts = f"/dev/vda / ext4 rw 0 0\ntmpfs {str(folder).replace(' ', chr(92) + '040')} tmpfs rw 0 0\nrubbish\n"
    (tmp_path / "proc/self/mounts").write_text(mounts)
    found = checks.check_disk(folder, KernelFiles(tmp_path))
    assert found.state == "note" and "(tmpfs)" in found.text and "are in memory" in found.text
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
    found = ended(monkeypatch, *children)
    assert found.state == "problem" and words in found.text and "ip link set lo up" in found.way_out


def test_gloo_without_torch() -> None:
    assert checks.check_gloo({"error": "ImportError"}).state == "note"


def test_ranks_that_do_not_meet_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "NUM_RANKS", 1)
    monkeypatch.setattr(checks, "run_children", in_time(checks.run_children))
    start_s = time.monotonic()
    found = checks.check_gloo({}, timeout_s=1)
    assert found.state == "problem" and time.monotonic() - start_s < 10


def in_time(run: Callable[..., list[ProcessResult]]) -> Callable[..., list[ProcessResult]]:
    """Ranks that are told of a second one, which never comes."""

    def call(module: str, environments: list[dict[str, str]], *rest: Any) -> list[ProcessResult]:
        return run(module, [{**variables, "WORLD_SIZE": "2"} for variables in environments], *rest)

    return call
