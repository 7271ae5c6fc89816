"""Calls that a disk or a server does not answer are reported once, with their cause. Slow calls are not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from fuse_server import fuse_mount
from meseta.system.waits import blocked_calls, current_activities, read_activities, track_activity, track_request
from meseta.telemetry import watching
from meseta.telemetry.watching import POLL_INTERVAL_S, STALL_TIMEOUT_S, StallWatch, WatchedProcess
from sampling import sample
from stalled_disk import loop_disk

CALLS = {
    "write": "os.write(os.open(path, os.O_WRONLY | os.O_CREAT), b'x')",
    "unlink": "os.unlink(path + '3')",
    "mkdir": "os.chdir(os.path.dirname(path)); os.mkdir('new')",
    "rename": "os.rename(path, path + '2')",
    "open": "open(path, 'w')",
}
"""Calls that block on a frozen file system. `path` is a file on it."""
READS = {"open": "open(path)", "stat": "os.stat(path)", "read": "os.read(file, 1)", "getdents": "os.listdir(folder)"}


def start(code: str, path: Path, ready: str = "") -> subprocess.Popen[bytes]:
    """Start a process that runs `ready`, prints a line, waits for input and runs `code`."""
    program = f"import os; path = {str(path)!r}; folder = os.path.dirname(path)\n{ready}\nprint(flush=True)\n"
    program += f"os.read(0, 1)\n{code}\n"
    process = subprocess.Popen([sys.executable, "-S", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    process.communicate(timeout=20)


def release(process: subprocess.Popen[bytes], call: str = "") -> None:
    """Let a process of `start` run until it blocks in `call`, or in any call on a file."""
    assert process.stdin is not None
    process.stdin.write(b"x")
    process.stdin.flush()
    deadline = time.monotonic() + 20
    while not any(call in ("", blocked.call) for blocked in blocked_calls(process.pid)):
        assert time.monotonic() < deadline, "the process does not wait in its call"
        time.sleep(0.005)


def lines_of(watch: StallWatch, process: int, begin_s: float, end_s: float) -> dict[float, list[str]]:
    """Return the lines of a watch by the time of its polls, on a simulated clock."""
    said = {}
    now_s = begin_s
    while now_s <= end_s:
        if lines := watch.poll([WatchedProcess(process, rank=3)], now_s):
            said[now_s] = lines
        now_s += POLL_INTERVAL_S
    return said


def test_writes_to_a_frozen_disk(tmp_path: Path) -> None:
    """A stall is reported after STALL_TIMEOUT_S with call, file and file system, once more later, and when it ends."""
    with loop_disk(tmp_path / "disk") as disk:
        path = disk.place / "file"
        path.write_text("x" * 10)
        path.with_name("file3").touch()
        for name, code in CALLS.items():
            process = start(code, path)
            disk.freeze()
            release(process)
            watch = StallWatch()
            said = lines_of(watch, process.pid, 0.0, 100.0)
            assert list(said) == [STALL_TIMEOUT_S, 4 * STALL_TIMEOUT_S], (name, said)
            (line,) = said[STALL_TIMEOUT_S]
            assert f"(process {process.pid}) has waited 15 s for the file system at {str(disk.place)!r} (ext4" in line
            target = path.with_name({"mkdir": "new", "unlink": "file3"}.get(name, "file"))
            assert line.startswith("warning: rank 3 on ") and f": {name} of {str(target)!r}; check the disk" in line
            disk.thaw()
            end(process)
            assert watch.poll([WatchedProcess(process.pid, rank=3)], 110.0) == [
                f"note: the file system at {str(disk.place)!r} (ext4 on {disk.device}) answers again, after 1 min 50 s"
            ]
            assert watch.poll([WatchedProcess(process.pid, rank=3)], 112.5) == []


@pytest.mark.parametrize("name", sample(READS, k=1, seed=0))
def test_reads_from_a_stopped_server(tmp_path: Path, name: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_text("x" * 10)
    with fuse_mount(source, tmp_path / "served") as mounted:
        path = tmp_path / "served/file"
        process = start(READS[name], path, "file = os.open(path, os.O_RDONLY)" if name == "read" else "")
        mounted.stop()
        release(process)
        said = lines_of(StallWatch(), process.pid, 0.0, STALL_TIMEOUT_S)
        assert list(said) == [STALL_TIMEOUT_S]
        assert f"for the file system at '{tmp_path}/served' (fuse on served): " in said[STALL_TIMEOUT_S][0]
        expected = {"getdents": ("open", "stat", "getdents")}.get(name, (name, "stat"))
        assert any(f": {call} of '{tmp_path}/served" in said[STALL_TIMEOUT_S][0] for call in expected), said
        mounted.resume()
        end(process)


@pytest.mark.soak
def test_a_slow_sync_is_no_stall(tmp_path: Path) -> None:
    """An fsync of 20 MB at 1 MB/s is one call of 20 s."""
    with loop_disk(tmp_path / "disk") as disk:
        path = disk.place / "file"
        code = "file = os.open(path, os.O_WRONLY | os.O_CREAT); os.write(file, bytes(20 << 20)); os.fsync(file)"
        process = start(code, path)
        disk.limit_writes(1_000_000)
        try:
            release(process, "fsync")
            watch, num_looks = StallWatch(), 0
            while any(call.call == "fsync" for call in blocked_calls(process.pid)):
                num_looks += 1
                assert watch.poll([WatchedProcess(process.pid)], time.monotonic()) == []
                time.sleep(POLL_INTERVAL_S)
            assert num_looks * POLL_INTERVAL_S > STALL_TIMEOUT_S
        finally:
            disk.limit_writes(0)
            end(process)


def test_a_stopped_process_is_no_stall(tmp_path: Path) -> None:
    process = start("os.read(0, 1)", tmp_path)
    os.kill(process.pid, 19)
    assert lines_of(StallWatch(), process.pid, 0.0, 60.0) == {}, "it reads from a pipe, and is stopped"
    process.kill()
    end(process)


def test_requests_and_phases(tmp_path: Path) -> None:
    """A request to a URL whose thread sleeps has stalled; one whose thread transfers bytes has not."""
    watch, sleeping, ended = StallWatch(), threading.Event(), threading.Event()

    def send() -> None:
        with track_activity("saving step 40"), track_request("s3://bucket/run/file", "write"):
            sleeping.set()
            ended.wait()

    thread = threading.Thread(target=send)
    thread.start()
    assert sleeping.wait(10)
    time.sleep(0.05)
    said = []
    for look in range(7):
        watched = WatchedProcess(os.getpid(), read_activities(current_activities.content()))
        said += watch.poll([watched], look * POLL_INTERVAL_S)
    assert len(said) == 1 and said[0].startswith(
        f"warning: process {os.getpid()} has waited 15 s for s3://bucket: write of 's3://bucket/run/file', "
        "while saving step 40; check the network and the store"
    )
    ended.set()
    thread.join()
    assert read_activities(current_activities.content()) == []
    assert [line[:25] for line in watch.poll([WatchedProcess(os.getpid())], 20.0)] == ["note: s3://bucket answers"]


def test_a_file_system_is_identified_by_its_mount_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stall is reported once, even if the description of the file system changes."""
    watch, entered, ended = StallWatch(), threading.Event(), threading.Event()

    def read() -> None:
        with track_request("/mnt/data/file", "read"):
            entered.set()
            ended.wait()

    thread = threading.Thread(target=read)
    thread.start()
    assert entered.wait(10)
    time.sleep(0.05)
    said = []
    for look in range(10):
        about = "nfs on server" if look < 8 else ""
        monkeypatch.setattr(watching, "find_mount", lambda _, about=about: ("/mnt/data", about))
        said += watch.poll([WatchedProcess(os.getpid(), read_activities(current_activities.content()))], look * 2.5)
    ended.set()
    thread.join()
    said += watch.poll([WatchedProcess(os.getpid())], 30.0)
    assert len(said) == 2 and "15 s for the file system at '/mnt/data' (nfs on server): " in said[0], said
    assert "; check the disk or server behind it; " in said[0]
    assert said[1] == "note: the file system at '/mnt/data' (nfs on server) answers again, after 30 s"


def test_progress_of_a_request(tmp_path: Path) -> None:
    """The thread that transfers differs from the thread that waits."""
    watch, ended = StallWatch(), threading.Event()

    def transfer() -> None:
        while not ended.wait(0.001):
            pass

    thread = threading.Thread(target=transfer)
    thread.start()
    with track_request("s3://bucket/run/file", "write", thread.native_id):
        for look in range(12):
            watched = WatchedProcess(os.getpid(), read_activities(current_activities.content()))
            assert watch.poll([watched], look * POLL_INTERVAL_S) == []
            time.sleep(0.02)
    ended.set()
    thread.join()


def test_a_pause_of_the_watcher_does_not_count(tmp_path: Path) -> None:
    with loop_disk(tmp_path / "disk") as disk:
        path = disk.place / "file"
        process = start(CALLS["open"], path)
        disk.freeze()
        release(process)
        watch = StallWatch()
        assert watch.poll([WatchedProcess(process.pid)], 0.0) == []
        assert watch.poll([WatchedProcess(process.pid)], 1000.0) == []
        assert list(lines_of(watch, process.pid, 1002.5, 1020.0)) == [1000.0 + STALL_TIMEOUT_S]
        disk.thaw()
        end(process)


def test_more_activities_than_slots() -> None:
    with ExitStack() as held:
        for number in range(30):
            held.enter_context(track_activity(f"phase {number} of a name that is longer than its field has room for"))
        activities = read_activities(current_activities.content())
        assert (
            len(activities) == 10 and activities[0].name.startswith("phase 0 ") and activities[0].name.endswith("...")
        )
    assert read_activities(current_activities.content()) == []
    assert read_activities(bytes(range(256)) * 10) == []
