"""Tests of killed processes: a run that is killed and resumed ends with the same bits, and no process hangs."""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from cli.processes import Command
from docs.forked_commands import forked_commands
from forked import forking
from meseta import checkpoint
from meseta.data.synth import ClickLog, SynthOptions, write_click_log
from sampling import case_id, product
from small_run import (
    REAL_ROWS,
    final_checksum,
    metrics,
    settings,
    train,
    without_times,
    write_config,
)

NUM_EPOCHS = 6 if os.environ.get("MESETA_SOAK") else 2
NUM_RAW_ROWS = 30_000 if os.environ.get("MESETA_SOAK") else 12_000
NUM_STEPS = 14 * NUM_EPOCHS
# `make soak` searches for plans.
PLAN = {} if os.environ.get("MESETA_SOAK") else {"plan": {"tables": {"user": "row_wise", "*": "table_wise"}}}
COMMON = {"train__epochs": NUM_EPOCHS, "checkpoint__every_steps": 3, "train__eval_every_steps": 20, **PLAN}
MAX_TRIES = 20
"""Maximum number of attempts at a kill. On a busy machine some kills come after the end of the command."""


@contextmanager
def commands_for_torchrun(folder: Path) -> Iterator[Path]:
    """Context manager that yields a program `meseta` whose processes are forked, as torchrun starts ranks by exec."""
    ended = forking().Event()
    server = forking().Process(target=_serve_commands, args=(folder, ended))
    server.start()
    try:
        while not os.access(folder / "meseta", os.X_OK):
            assert server.is_alive()
            time.sleep(0.01)
        yield folder / "meseta"
    finally:
        ended.set()
        server.join()


def _serve_commands(folder: Path, ended: Event) -> None:
    with forked_commands(folder):
        ended.wait()


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Callable[..., Path]:
    """`whole(2)` or `whole(2, stale=1)`: folder of an undisturbed run on that many ranks, made once for all test
    processes.

    torchrun starts runs without staleness and `--nproc` the runs compared with them. Both must give the same run.
    """
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared

    def make(folder: Path, size: int, stale: int) -> None:
        document = settings(tiny, folder / "run", **COMMON, pipeline__staleness=stale)
        if size == 1:
            train(document)
            return
        words = ("train", write_config(folder / "c.yaml", document))
        if stale:
            Command(folder, *words, "--nproc", size).succeed()
        else:
            with commands_for_torchrun(folder / "programs") as meseta:
                torchrun = ("--standalone", "--nproc-per-node", size, "--no-python", meseta)
                Command(folder, *torchrun, *words, program="torchrun").succeed()

    def get(size: int, stale: int = 0) -> Path:
        folder = shared / f"whole-{size}-{stale}"
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "run/summary.json").exists():
                make(folder, size, stale)
        return folder

    return get


@pytest.fixture(scope="session")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `NUM_RAW_ROWS` rows in `raw/*.tsv`, and the dataset `whole` that an undisturbed run prepared."""
    folder = tmp_path_factory.mktemp("raw")
    write_click_log(SynthOptions(out=folder / "raw", num_rows=NUM_RAW_ROWS, num_files=3, log=ClickLog(3, 0.001)))
    Command(folder, "prepare", folder / "raw/*.tsv", "--out", folder / "whole", "--hash-rows", 500).succeed()
    return folder


def prepared_under_kills(folder: Path, raw: Path, num_kills: int, draw: random.Random) -> Path:
    """Return a dataset whose preparation was killed `num_kills` times, each at a random moment after its work had
    begun."""
    out, unfinished = folder / "data", folder / "data.tmp"
    arguments = ("prepare", raw / "raw/*.tsv", "--out", out, "--hash-rows", 500)
    num_done, longest_s = 0, NUM_RAW_ROWS / 30_000
    for number in range(MAX_TRIES):
        changed = _changed_ns(unfinished)
        command = Command(folder / f"prepare-{number}", *arguments)
        if command.reached(lambda c=changed: _changed_ns(unfinished) > c, "work"):
            time.sleep(draw.uniform(0, longest_s))
        if killed(command) and not out.exists():
            num_done += 1
        else:  # it ended before the kill: try again, sooner
            shutil.rmtree(out)
            longest_s /= 2
        if num_done == num_kills:
            Command(folder / "prepared", *arguments).succeed()
            return out
    raise AssertionError(f"{num_done} of {MAX_TRIES} kills came before the work was done")


def _changed_ns(folder: Path) -> int:
    """Return the time of the last change of a folder, or 0 if it is missing."""
    try:
        return folder.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def killed(command: Command) -> bool:
    """Kill all processes of a command together. Return False if the command had already succeeded."""
    command.send(signal.SIGKILL)
    code = command.wait()
    assert code in (0, -signal.SIGKILL), command.err.read_text()
    return code == -signal.SIGKILL


def check_equal_data(out: Path, whole: Path) -> None:
    files = [{str(p.relative_to(d)): p.read_bytes() for p in d.rglob("*") if p.is_file()} for d in (out, whole)]
    assert files[0] == files[1]
    assert not list(out.parent.glob("*.tmp")) and not [name for name in files[0] if ".tmp" in name]


def saving(run_dir: Path) -> bool:
    return any((run_dir / "checkpoints").glob(".tmp-step-*")) if run_dir.exists() else False


def reach(command: Command, run_dir: Path, moment: str, draw: random.Random, share: float) -> None:
    """Wait for the moment of a kill: at start-up, some steps later, during a save or evaluation, or at the end of the
    run. `share` shortens the random delay."""
    saved = checkpoint.latest_complete(run_dir / "checkpoints") if run_dir.exists() else None
    step = int(saved.name.removeprefix("step-")) if saved else 0
    if moment == "start-up" or step > NUM_STEPS - 24:  # the run may end before the other moments
        time.sleep(draw.uniform(0.05, 0.05 + 0.75 * share))
        return
    aim = step + draw.randint(4, 14)
    if moment == "evaluating":
        aim = -(-aim // 20) * 20
    moments: list[tuple[Callable[[], Any], str]] = [
        (lambda: f"step {aim // 4 * 4}/" in command.err.read_text(), f"step {aim // 4 * 4}"),
        # Training continued while it was written.
        (lambda: checkpoint.latest_complete(run_dir / "checkpoints") != saved, "a checkpoint"),
        *([(lambda: saving(run_dir), "a checkpoint")] if moment == "saving" else []),
    ]
    if all(command.reached(condition, what) for condition, what in moments):
        longest_s = {"training": 0.03, "saving": 0.01, "evaluating": 0.1}[moment]
        time.sleep(draw.uniform(0, longest_s * share))


def check_equal(run_dir: Path, expected: Path) -> None:
    assert final_checksum(run_dir) == final_checksum(expected)
    assert without_times(metrics(run_dir)) == without_times(metrics(expected))
    shown = [*range(4, NUM_STEPS, 4), NUM_STEPS]
    assert [line["step"] for line in metrics(run_dir) if line["kind"] == "train"] == shown
    summaries = [json.loads((path / "summary.json").read_text()) for path in (run_dir, expected)]
    assert without_times([summaries[0]["test"]]) == without_times([summaries[1]["test"]])
    assert not [path for path in run_dir.rglob("*") if path.name.startswith(".") or ".tmp" in path.name]


def kill_run(
    folder: Path,
    arguments: tuple[object, ...],
    moment: str,
    draw: random.Random,
    *,
    start: Callable[..., Command] = Command,
    reach: Callable[[Command, Path, str, random.Random, float], None] = reach,
    kill: Callable[[Command], bool] = killed,
) -> None:
    """Start the run in `folder` and kill it at this moment. If it ends before, restore its folder and try again."""
    run_dir, before = folder.parent / "run", folder / "before"
    if run_dir.exists():
        shutil.copytree(run_dir, before)
    for number in range(MAX_TRIES):
        command = start(folder / str(number), "train", *arguments)
        reach(command, run_dir, moment, draw, 0.5**number)
        if kill(command) and not (run_dir / "summary.json").exists():
            return
        shutil.rmtree(run_dir)
        if before.exists():
            shutil.copytree(before, run_dir)
    raise AssertionError(f"the run was over before it was killed, {MAX_TRIES} times")


def killed_and_resumed(folder: Path, tiny: Path, size: int, moments: list[str], seed: int, **options: object) -> Path:
    """Return the directory of a resumed run. All its processes were killed together at each of `moments`."""
    draw = random.Random(seed)
    run_dir = folder / "run"
    config = write_config(folder / "c.yaml", settings(tiny, run_dir, **COMMON | options))
    for number, moment in enumerate(moments):
        kill_run(folder / str(number), (config, "--nproc", size), moment, draw)
    Command(folder / "last", "train", config, "--nproc", size).succeed()
    return run_dir


@pytest.mark.soak
@pytest.mark.parametrize("size", [1, 2])
def test_killed_twice(whole: Callable[[int], Path], tiny: Path, tmp_path: Path, size: int) -> None:
    moments = ["evaluating" if size == 1 else "training", "saving"]
    run_dir = killed_and_resumed(tmp_path, tiny, size, moments, seed=size)
    assert "resuming from step" in (tmp_path / "last/err.txt").read_text()
    check_equal(run_dir, whole(size) / "run")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_hundred_kills(
    whole: Callable[[int], Path], raw: Path, tiny: Path, tmp_path: Path, size: int, seed: int
) -> None:
    """15 cases kill two preparations and five trainings each."""
    draw = random.Random(f"{size}/{seed}")
    check_equal_data(prepared_under_kills(tmp_path, raw, 2, draw), raw / "whole")
    moments = [draw.choice(["start-up", "training", "saving", "evaluating"]) for _ in range(5)]
    check_equal(killed_and_resumed(tmp_path, tiny, size, moments, seed=seed), whole(size) / "run")


@pytest.mark.soak  # tests/distributed/test_stale.py cuts such a run off in `make test`
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("seed", range(1, 4))
def test_killed_with_answers_in_flight(
    whole: Callable[..., Path], tiny: Path, tmp_path: Path, size: int, seed: int
) -> None:
    """6 cases of 5 kills. All exchanges that can overlap do, including those of embeddings."""
    draw = random.Random(f"ahead/{size}/{seed}")
    moments = [draw.choice(["start-up", "training", "saving", "evaluating"]) for _ in range(5)]
    run_dir = killed_and_resumed(tmp_path, tiny, size, moments, seed=seed, pipeline__staleness=1)
    check_equal(run_dir, whole(size, stale=1) / "run")


DELTAS = ("one_shot", "consecutive", "intermittent", "rolling")


@pytest.mark.soak  # tests/train/test_delta_runs.py stops such runs in `make test`
@pytest.mark.parametrize("case", product(policy=DELTAS, size=[1, 2, 4], seed=range(2)), ids=case_id)
def test_killed_while_it_saves_deltas(
    whole: Callable[..., Path], tiny: Path, tmp_path: Path, case: dict[str, Any]
) -> None:
    """24 cases of 5 kills end with the bits of an undisturbed run that saves full checkpoints."""
    size, draw = case["size"], random.Random(str(case))
    moments = [draw.choice(["start-up", "training", "saving"]) for _ in range(5)]
    deltas = {"checkpoint__deltas": case["policy"], "checkpoint__max_chain": 3, "checkpoint__every_steps": 1}
    run_dir = killed_and_resumed(tmp_path, tiny, size, moments, seed=case["seed"], **deltas)
    check_equal(run_dir, whole(size) / "run")
    listed = checkpoint.list_checkpoints(run_dir)
    assert len(listed) == 2 and not any(one.problem for one in listed)
    needed = {f"step-{step:09d}" for one in listed if one.summary for step in one.summary.needs}
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == needed | {one.path.name for one in listed}


@pytest.mark.soak  # tests/data/test_resume_prepare.py kills a preparation in `make test`
def test_killed_while_preparing(raw: Path, tmp_path: Path) -> None:
    check_equal_data(prepared_under_kills(tmp_path, raw, 1, random.Random(0)), raw / "whole")


def test_a_dead_rank_and_a_dead_launcher(whole: Callable[[int], Path], tiny: Path, tmp_path: Path) -> None:
    """Kill a rank, then the launcher of the resumed run. The other processes end within seconds, and one line says
    why."""
    run_dir = tmp_path / "run"
    config = write_config(tmp_path / "c.yaml", settings(tiny, run_dir, **COMMON))

    def start(name: str, until_step: int) -> Command:
        command = Command(tmp_path / name, "train", config, "--nproc", 2)
        command.until(lambda: f"step {until_step}/" in command.err.read_text(), f"step {until_step}")
        return command

    def last_lines(command: Command) -> list[str]:
        lines = command.err.read_text().splitlines()
        return [line for line in lines if not line.startswith(("step ", "test at ", "resuming "))]

    dead_rank = start("dead rank", 8)
    os.kill(dead_rank.ranks()[1], signal.SIGKILL)
    assert dead_rank.wait(15) == 1
    assert last_lines(dead_rank) == [
        "error: rank 1 was killed by SIGKILL; all ranks were stopped; the same command resumes from the last checkpoint"
    ]
    assert dead_rank.members() == []

    orphans = start("orphans", 16)
    orphans.send(signal.SIGKILL, to_all=False)
    orphans.wait(15)
    deadline = time.monotonic() + 15
    while orphans.members() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert orphans.members() == []

    last = Command(tmp_path / "last", "train", config, "--nproc", 2).succeed()
    assert "resuming from step" in last.err.read_text()
    check_equal(run_dir, whole(2) / "run")
    first_lines = [out.read_text().splitlines()[0] for out in (last.out, whole(2) / "out.txt")]
    assert first_lines[0] == first_lines[1]


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_signals_save_and_the_run_resumes(whole: Callable[[int], Path], tiny: Path, tmp_path: Path, size: int) -> None:
    """Send SIGTERM to the started process, then Ctrl-C to all processes, as a terminal does."""
    run_dir = tmp_path / "run"
    config = write_config(tmp_path / "c.yaml", settings(tiny, run_dir, **COMMON | {"checkpoint__every_steps": None}))
    for name, number, at in (("term", signal.SIGTERM, 8), ("int", signal.SIGINT, 16)):
        command = Command(tmp_path / name, "train", config, "--nproc", size)
        command.until(lambda at=at, c=command: f"step {at}/" in c.err.read_text(), f"step {at}")  # type: ignore[misc]
        if number == signal.SIGTERM:
            command.send(number, to_all=False)
        else:
            command.send(number)
        assert command.wait(30) == 128 + number
        assert command.members() == []
        saved = checkpoint.latest_complete(run_dir / "checkpoints")
        assert saved is not None
        step = int(saved.name.removeprefix("step-"))
        assert step >= at
        last = command.err.read_text().splitlines()[-1]
        assert last == f"stopped after step {step}, saved in {saved}; the same command resumes from there"
    Command(tmp_path / "last", "train", config, "--nproc", size).succeed()
    check_equal(run_dir, whole(size) / "run")


def test_a_second_signal_ends_the_run_immediately(tiny: Path, tmp_path: Path) -> None:
    """A stopped rank keeps the other one from finishing its step."""
    config = write_config(tmp_path / "c.yaml", settings(tiny, tmp_path / "run", **COMMON))
    command = Command(tmp_path, "train", config, "--nproc", 2)
    command.until(lambda: "step 4/" in command.err.read_text(), "step 4")
    os.kill(command.ranks()[1], signal.SIGSTOP)
    command.send(signal.SIGTERM, to_all=False)
    time.sleep(1.3)
    assert command.process.exitcode is None
    command.send(signal.SIGTERM, to_all=False)
    assert command.wait(15) == 143
    assert command.members() == []


def test_sigterm_to_one_rank_before_it_trains(tiny: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.yaml", settings(tiny, tmp_path / "run"))
    command = Command(tmp_path, "train", config, "--nproc", 2)
    command.until(lambda: 1 in command.ranks(), "rank 1", interval_s=0.02)
    os.kill(command.ranks()[1], signal.SIGTERM)
    assert command.wait(30) == 143
    assert command.err.read_text() == "interrupted; the same command resumes from the last checkpoint\n"
    assert command.members() == []


def test_a_refused_id_on_two_ranks_is_reported_once(tiny: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(tiny, data)
    document = json.loads((data / "dataset.json").read_text())
    document["sparse"][0]["num_embeddings"] = 250
    (data / "dataset.json").write_text(json.dumps(document))
    config = write_config(tmp_path / "c.yaml", settings(data, tmp_path / "run"))
    command = Command(tmp_path, "train", config, "--nproc", 2)
    assert command.wait() == 1
    [line] = command.err.read_text().splitlines()
    assert re.match(
        r"error: step 1: table 'user': id 2\d\d from feature 'user', sample \d+, is outside 0\.\.249;", line
    )
    assert command.members() == [] and command.out.read_text() == ""


def test_eval_and_predict_on_two_ranks(whole: Callable[[int], Path], tmp_path: Path) -> None:
    run_dir = whole(2) / "run"
    evaluated = Command(tmp_path / "eval", "eval", run_dir, "--nproc", 2)
    predicted = Command(tmp_path / "predict", "predict", run_dir, "--out", tmp_path / "p.parquet", "--nproc", 2)
    evaluation = json.loads(evaluated.succeed().out.read_text())
    expected = json.loads((run_dir / "summary.json").read_text())["test"]
    for name in ("num_samples", "num_positives", "logloss", "ne", "auc", "calibration"):
        assert evaluation[name] == pytest.approx(expected[name], abs=1e-6)
    predicted.succeed()
    table = pq.read_table(tmp_path / "p.parquet")
    assert table["row"].to_pylist() == list(range(expected["num_samples"]))
    assert sum(table["label"].to_pylist()) == expected["num_positives"]


@pytest.mark.skipif(not REAL_ROWS.exists(), reason=f"needs {REAL_ROWS}")
def test_real_criteo_rows_through_the_command_line(tmp_path: Path) -> None:
    """Prepare, then train on 1 and on 2 ranks with the same metrics."""
    data = tmp_path / "data"
    Command(tmp_path / "prepare", "prepare", REAL_ROWS, "--out", data, "--hash-rows", 500).succeed()
    common = {"train__batch_size": 512, "embedding__dtype": "float64"}
    config = write_config(tmp_path / "2.yaml", settings(data, tmp_path / "run-2", **common))
    Command(tmp_path / "2", "train", config, "--nproc", 2).succeed()
    summaries = [train(settings(data, tmp_path / "run-1", **common))]
    summaries.append(json.loads((tmp_path / "run-2/summary.json").read_text()))
    for name in ("auc", "ne", "logloss", "calibration"):
        assert summaries[1]["test"][name] == pytest.approx(summaries[0]["test"][name], abs=1e-6)
    assert summaries[0]["num_samples"] + summaries[0]["test"]["num_samples"] == 10_000
