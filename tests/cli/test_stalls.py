"""Tests of commands whose disk, file server or store stops answering. One line reports it within 30 s, another one the
recovery, and the run ends well."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cli.processes import Command
from fuse_server import fuse_mount
from sampling import product, sample
from small_run import settings, train, write_config
from stalled_disk import loop_disk

SOON_S = 30.0
STALLS = ("run_dir", "checkpoints", "training data", "evaluation data", "loading", "store")
CASES = sample(product(stall=STALLS, ranks=[1, 2]), k=0, seed=0)


def begin(folder: Path, document: dict[str, Any], ranks: int) -> Command:
    folder.mkdir()
    command = Command(folder, "train", write_config(folder / "c.yaml", document), "--nproc", ranks)
    command.until(lambda: "step 40/" in command.err.read_text(), "the first steps")
    return command


def lines_of(command: Command) -> list[str]:
    return [line for line in command.err.read_text().splitlines() if line.startswith(("warning: ", "error: "))]


def first_line(command: Command, since_s: float) -> str:
    """Return the first line, which must appear soon. No other line may follow for a while."""
    command.until(lambda: lines_of(command), "a line")
    assert time.monotonic() - since_s < SOON_S
    time.sleep(5)
    (line,) = lines_of(command)
    return line


@contextmanager
def silent_store() -> Iterator[str]:
    """Context manager that starts a server that accepts connections and never answers. It yields the address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = []

        def accept() -> None:
            while True:
                try:
                    held.append(server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            for link in held:
                link.close()


@pytest.mark.parametrize("case", CASES)
def test_a_stall(case: dict[str, Any], tmp_path: Path, tiny: Path) -> None:
    """The line names the process, the file system or store, the elapsed time and the current stage."""
    stall, ranks = case["stall"], case["ranks"]
    endless = {"train__epochs": 100_000, "checkpoint__every_steps": 50, "num_threads": 1}
    # The launcher of `predict` reads the run's config itself.
    who = "rank [01] on .*" if ranks == 2 and stall != "loading" else "process "
    if stall in ("run_dir", "checkpoints"):
        with loop_disk(tmp_path / "disk") as disk:
            place = {"run_dir": "run"} if stall == "run_dir" else {}
            document = settings(tiny, disk.place / "run" if place else tmp_path / "run", **endless)
            if not place:
                document["checkpoint"]["dir"] = f"file://{disk.place}/checkpoints"
            command = begin(tmp_path / "a", document, ranks)
            disk.freeze()
            line = first_line(command, time.monotonic())
            assert f"for the file system at {str(disk.place)!r} (ext4 on {disk.device}): " in line
            assert stall == "run_dir" or ", while saving step " in line
            disk.thaw()
            finish(command, f"note: the file system at {str(disk.place)!r}")
    elif stall == "store":
        with silent_store() as address:
            document = settings(tiny, tmp_path / "run", checkpoint__mirror=f"{address}/bucket/run")
            command = Command(tmp_path / "a", "train", write_config(tmp_path / "c.yaml", document), "--nproc", ranks)
            since_s = time.monotonic()
            line = first_line(command, since_s + 5)  # for the start of torch
            assert f"for {address}: read of '{address}/bucket/run', while using the mirror; check the network" in line
            command.send(signal.SIGKILL)
            command.wait()
    else:
        source = tmp_path / "source"
        shutil.copytree(tiny, source)
        if stall == "loading":
            train(settings(tiny, tmp_path / "former", train__max_steps=4))
            shutil.copytree(tmp_path / "former", source / "run")
        with fuse_mount(source, tmp_path / "served") as mounted:
            if stall == "loading":
                command = Command(tmp_path / "a", "predict", tmp_path / "served/run", "--out", tmp_path / "p.csv",
                                  "--nproc", ranks)  # fmt: skip
                mounted.stop()
                line = first_line(command, time.monotonic() + 5)
            else:
                every = {"train__eval_every_steps": 40} if stall == "evaluation data" else {}
                document = settings(tmp_path / "served", tmp_path / "run", **endless, **every)
                command = begin(tmp_path / "a", document, ranks)
                mounted.stop()
                line = first_line(command, time.monotonic())
            assert f"for the file system at '{tmp_path}/served' (fuse on served): " in line
            assert f" of '{tmp_path}/served" in line
            mounted.resume()
            if stall == "loading":
                assert command.wait() == 0, command.err.read_text()
            else:
                finish(command, f"note: the file system at '{tmp_path}/served'")
    assert re.match(f"warning: {who}", line), line


def finish(command: Command, note: str) -> None:
    """Check that the run recovers, reports it, and stops on SIGTERM."""
    command.until(lambda: note in command.err.read_text(), "a note that the run continues")
    command.send(signal.SIGTERM, to_all=False)
    assert command.wait() == 143, command.err.read_text()
    assert "Traceback" not in command.err.read_text() and command.members() == []
