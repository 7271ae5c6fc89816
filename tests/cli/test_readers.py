"""Tests of `meseta train --readers N`, which gives the same run and ends its reader processes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bad_input.commands import run_here
from cli.processes import PATIENCE_S, Command
from meseta.data.service.credentials import new_token
from meseta.data.service.server.local_readers import local_readers
from meseta.spec import MesetaError
from small_run import final_checksum, metrics, settings, train, without_times, write_config

COMMON = {"train__epochs": 2, "checkpoint__every_steps": 5}


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the same run on one rank without readers."""
    run_dir = tmp_path_factory.mktemp("local") / "run"
    train(settings(tiny, run_dir, **COMMON))
    return run_dir


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_the_same_weights_and_no_process_is_left(nproc: int, tiny: Path, whole: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = write_config(tmp_path / "c.yaml", settings(tiny, run_dir, **COMMON))
    command = Command(tmp_path / "log", "train", config, "--readers", 2, "--nproc", nproc)
    command.until(lambda: "step 8/" in command.err.read_text(), "step 8")
    assert len(command.readers()) == 3
    command.succeed()
    assert command.readers() == []
    local = whole if nproc == 1 else tmp_path / "local"
    if nproc == 1:
        assert without_times(metrics(run_dir)) == without_times(metrics(local))
    else:
        Command(tmp_path / "log2", "train", config, f"run_dir={local}", "--nproc", nproc).succeed()
    assert final_checksum(run_dir) == final_checksum(local)


def test_auto_begins_with_one(tiny: Path, whole: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = write_config(tmp_path / "c.yaml", settings(tiny, run_dir, **COMMON))
    command = Command(tmp_path / "log", "train", config, "--readers", "auto")
    command.until(lambda: "step 8/" in command.err.read_text(), "step 8")
    assert len(command.readers()) == 2
    command.succeed()
    assert command.readers() == []
    assert final_checksum(run_dir) == final_checksum(whole)


def test_a_killed_launcher_leaves_no_reader(tiny: Path, tmp_path: Path) -> None:
    plan = {"tables": {"*": "row_wise"}}
    config = write_config(tmp_path / "c.yaml", settings(tiny, tmp_path / "run", **COMMON, plan=plan))
    command = Command(tmp_path / "log", "train", config, "--readers", 1, "--nproc", 2)
    command.until(lambda: "step 8/" in command.err.read_text(), "step 8")
    assert len(command.readers()) == 2
    command.send(signal.SIGKILL, to_all=False)
    deadline_s = time.monotonic() + PATIENCE_S
    while command.readers():
        assert time.monotonic() < deadline_s, "readers outlive the command"
        time.sleep(0.05)


def test_where_readers_do_not_go(tiny: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.yaml", settings(tiny, tmp_path / "run", **COMMON))
    served = ("data.dir=null", "data.service.url=grpc://127.0.0.1:9")
    for arguments, why in (
        ((config, *served), "data.service.url already refers to readers"),
        (("--data", "raw.tsv"), "the ranks prepare raw files themselves"),
    ):
        ended = run_here("train", *map(str, arguments), "--readers", "2")
        assert ended.code == 1 and why in ended.err, ended.err
    for number in ("-1", "two", "1e3", "99999", ""):
        ended = run_here("train", str(config), f"--readers={number}")
        assert ended.code == 1 and "it must be auto, or a number up to 1024" in ended.err.splitlines()[-1], ended.err


@pytest.mark.parametrize("as_json", [False, True])
def test_a_dispatcher_prints_its_url(as_json: bool, tiny: Path) -> None:
    arguments = ["--data", f"a={tiny}", "--listen", "127.0.0.1:0", "--token-stdin", "--until-stdin-ends"]
    command = [sys.executable, "-m", "meseta.cli.main", "readers", "dispatch", *arguments, *["--json"] * as_json]
    done = subprocess.run(command, input=new_token() + b"\n", capture_output=True, check=True, timeout=60)
    printed = done.stdout.decode()
    if as_json:
        document = json.loads(printed)
        assert list(document) == ["url"] and re.fullmatch(r"grpc://127\.0\.0\.1:\d+", document["url"])
    else:
        url = r"(grpc://127\.0\.0\.1:\d+)"
        line = rf"dispatcher at {url}, with a; readers: meseta readers work --dispatcher \1\n"
        assert re.fullmatch(line, printed)


def test_local_readers_whose_dispatcher_does_not_start(tmp_path: Path) -> None:
    refused = pytest.raises(MesetaError, match="the dispatcher did not start; see its error above")
    with refused, local_readers(tmp_path / "none", 1, 1):
        pytest.fail("there is no dataset")
