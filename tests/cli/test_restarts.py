"""Tests of runs that lose ranks: they resume by themselves, on fewer ranks if necessary. Other commands do not
restart."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from cli.processes import Command
from cli.test_launch import ranks_that
from meseta import checkpoint
from meseta.cli import launch
from meseta.cli.launch import LaunchResult
from meseta.cli.restarts import RestartPolicy, run_with_restarts
from meseta.cli.train import _current_max_restarts, _launch_ranks
from meseta.config import RunConfig
from meseta.errors import FormerNameWarning
from meseta.spec import MesetaError
from small_run import final_checksum, metrics, settings, train, without_times, write_config

COMMON = {"checkpoint__every_steps": 3, "checkpoint__keep_last": 100}
RESTART = re.compile(
    r"note: rank (\d) was killed by SIGKILL; restart (\d) of 2, on (\d) ranks?, from (?:step (\d+)|the first step)"
)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def copied_at(run_dir: Path, out: Path, step: int) -> Path:
    """Copy the folder of a run as it was when this step was its newest checkpoint. At step 0 nothing is copied."""
    if not step:
        return out
    shutil.copytree(run_dir, out, ignore=lambda folder, names: [name for name in names if ".tmp" in name])
    for path in (out / "checkpoints").glob("step-*"):
        if step_of(path) > step:
            shutil.rmtree(path)
    (out / "summary.json").unlink(missing_ok=True)
    return out


def kill(command: Command, shown_step: int, ranks: Sequence[int], later_s: float) -> None:
    """Kill these ranks shortly after this step was logged."""
    command.until(lambda: f"step {shown_step}/" in command.err.read_text(), f"step {shown_step}")
    time.sleep(later_s)
    of = command.ranks()
    # Otherwise the launcher may already restart the others after the first kill.
    command.send(signal.SIGSTOP, to_all=False)
    for rank in ranks:
        os.kill(of[rank], signal.SIGKILL)
    command.send(signal.SIGCONT, to_all=False)


def lose_ranks(folder: Path, tiny: Path, seed: int, least_ranks: int, epochs: int = 4, **options: object) -> None:
    """Kill one of four ranks at a random step, and two of the rest later. The bits must be those of resuming by hand
    from the same checkpoints on as many ranks."""
    draw = random.Random(seed)
    first, second = draw.randrange(4, 4 * epochs + 1, 4), draw.randrange(6 * epochs, 10 * epochs + 1, 4)
    run_dir = folder / "run"
    config = write_config(folder / "c.yaml", settings(tiny, run_dir, **COMMON, train__epochs=epochs, **options))
    fewer = ("--max-restarts", 2, "--min-nproc", least_ranks)
    command = Command(folder / "itself", "train", config, "--nproc", 4, *fewer)
    kill(command, first, [draw.randrange(4)], draw.uniform(0, 0.03))
    command.until(lambda: "restart 1 of 2" in command.err.read_text(), "a restart")
    kill(command, second, [0, 2], draw.uniform(0, 0.03))
    command.succeed()
    assert command.members() == []
    restarts = [RESTART.fullmatch(line) for line in command.err.read_text().splitlines() if line.startswith("note: ra")]
    one, two = [(int(match[3]), int(match[4] or 0)) for match in restarts if match]
    assert [one[0], two[0]] == [max(3, least_ranks), max(1, least_ranks)] and one[1] < two[1]
    # At step 0 nothing was saved yet.
    assert (f"resuming from step {one[1]}," in command.err.read_text()) == (one[1] > 0)

    by_hand = copied_at(run_dir, folder / "one", one[1])
    at_second = f"checkpoints/step-{two[1]:09d}"
    so_far = Command(folder / "by-hand-1", "train", config, f"run_dir={by_hand}", "--nproc", one[0])
    so_far.until((by_hand / at_second).exists, at_second)
    so_far.send(signal.SIGKILL)
    so_far.wait()
    assert checkpoint.verify(by_hand / at_second) == checkpoint.verify(run_dir / at_second)
    again = copied_at(by_hand, folder / "two", two[1])
    if two[0] == 1:
        train(settings(tiny, again, **COMMON, train__epochs=epochs, **options))
    else:
        Command(folder / "by-hand-2", "train", config, f"run_dir={again}", "--nproc", two[0]).succeed()
    assert final_checksum(again) == final_checksum(run_dir)
    assert without_times(metrics(again)) == without_times(metrics(run_dir))
    assert step_of(checkpoint.latest_complete(run_dir / "checkpoints") or Path()) == 14 * epochs


def test_a_run_resumes_on_the_remaining_ranks(tiny: Path, tmp_path: Path) -> None:
    lose_ranks(tmp_path, tiny, seed=18, least_ranks=1, epochs=2, plan={"tables": {"*": "row_wise"}})


@pytest.mark.soak
@pytest.mark.parametrize("least_ranks", [1, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_runs_that_lose_ranks_at_random_steps(tiny: Path, tmp_path: Path, seed: int, least_ranks: int) -> None:
    lose_ranks(tmp_path, tiny, seed, least_ranks)


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[tuple[list[str], int]]]]:
    """`attempts([[program of rank 0, ...], ...])`: set the programs of each start, and return its arguments and number
    of ranks."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(launch, "PEER_EXIT_GRACE_S", 1)

    def plan(programs: Sequence[Sequence[str]]) -> list[tuple[list[str], int]]:
        made: list[tuple[list[str], int]] = []

        def start(ranks: list[BaseProcess], arguments: Sequence[str], errors: Sequence[Any], watch: Any) -> None:
            ranks.extend(ranks_that(*programs[len(made)]))
            made.append(([*arguments], len(errors)))

        monkeypatch.setattr(launch, "_start_ranks", start)
        return made

    yield plan
    for number, handler in handlers.items():
        signal.signal(number, handler)


DIES = "import os; os.kill(os.getpid(), 9)"
LOSES = "exit(75)"
WAITS = "import time; time.sleep(60)"


def run_of(tmp_path: Path) -> RunConfig:
    return RunConfig.model_validate(settings(tmp_path / "data", tmp_path / "run"))


def test_restarts_are_used_up(
    attempts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["meseta"])
    made = attempts([[LOSES, DIES, LOSES], [LOSES, LOSES], [DIES, DIES]])
    assert run_with_restarts(["train", "c.yaml"], 3, RestartPolicy(2, 2), run_of(tmp_path)) == 1
    assert made == [(["train", "c.yaml"], 3), (["train", "c.yaml"], 2), (["train", "c.yaml"], 2)]
    assert capsys.readouterr().err.splitlines() == [
        "note: rank 1 was killed by SIGKILL; restart 1 of 2, on 2 ranks, from the first step",
        "note: rank 0 lost its connection to the other ranks; restart 2 of 2, on 2 ranks, from the first step",
        "error: rank 0 was killed by SIGKILL after the last restart; all ranks were stopped",
    ]


@pytest.mark.parametrize(("first", "code"), [("exit(1)", 1), ("exit(143)", 143), ("exit(0)", 0)])
def test_an_error_that_a_rank_reports_is_not_repeated(attempts: Any, tmp_path: Path, first: str, code: int) -> None:
    made = attempts([[first, LOSES if code else "exit(0)"]])
    assert run_with_restarts(["train"], 2, RestartPolicy(3, 1), run_of(tmp_path)) == code
    assert len(made) == 1


def test_sigterm_ends_the_run(
    attempts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher receives SIGTERM while ranks run."""
    made = attempts([[f"import os, signal; os.kill({os.getpid()}, signal.SIGTERM); {WAITS}", WAITS]])
    monkeypatch.setattr(sys, "argv", ["meseta", "train"])
    assert run_with_restarts(["train"], 2, RestartPolicy(3, 1), run_of(tmp_path)) == 143
    assert len(made) == 1
    assert capsys.readouterr().err == "interrupted; the same command resumes from the last checkpoint\n"


def test_force_applies_once(attempts: Any, tmp_path: Path) -> None:
    """--force is repeated until the new run has saved a checkpoint. A former run's checkpoint of the same step does not
    count."""
    config = run_of(tmp_path)
    saved = config.run_dir / "checkpoints/step-000000003/manifest.json"
    saved.parent.mkdir(parents=True)
    saved.write_text("former")
    again = f"import pathlib; p = pathlib.Path({str(saved)!r}); p.unlink(); p.write_text('new'); {DIES}"
    made = attempts([[DIES], [again], ["exit(0)"]])
    assert run_with_restarts(["train", "--force"], 1, RestartPolicy(3, 1), config) == 0
    assert made == [(["train", "--force"], 1), (["train", "--force"], 1), (["train"], 1)]


@pytest.mark.parametrize(
    ("num_ranks", "killed", "least", "left"),
    [(4, (2,), 3, 3), (4, (2,), 4, 4), (4, (0, 1, 3), 2, 2), (4, (), 1, 4), (4, (0, 1, 2, 3), 1, 4), (1, (0,), 1, 1)],
)
def test_ranks_that_were_killed_are_gone(num_ranks: int, killed: tuple[int, ...], least: int, left: int) -> None:
    assert RestartPolicy(1, least).next_ranks(num_ranks, LaunchResult(1, "rank 0 was killed", killed)) == left


def test_settings_that_forbid_fewer_ranks_are_refused_at_the_start(
    error_of: Callable[..., str], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "plan.yaml": "num_ranks: 4\ntables: {'*': row_wise}\n",
        "named.yaml": "tables: {'*': row_wise, item: {sharding: table_wise, ranks: 3}}\n",
        "topology.yaml": "num_hosts: 1\ndevices_per_host: 4\n",
        "rules.yaml": "tables: {item: {ranks: [3]}}\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    config = write_config(tmp_path / "c.yaml", settings(tiny, tmp_path / "run"))

    def refusal(*words: str) -> str:
        return error_of("train", config, *words).removeprefix("error: ").replace(f"{tmp_path}/", "")

    fewer = ("--nproc", "4", "--max-restarts", "1", "--min-nproc", "3")
    way_out = "so the run cannot resume on 3 ranks; set --min-nproc 4, or use a file without a number of ranks"
    for key, name, why in (
        ("plan", "plan.yaml", "plan file 'plan.yaml' is for 4 ranks"),
        ("plan", "named.yaml", "plan file 'named.yaml' places table 'item' on rank 3"),
        ("planner.topology", "topology.yaml", "topology file 'topology.yaml' has 4 devices"),
        ("planner.constraints", "rules.yaml", "constraints file 'rules.yaml' names rank 3"),
    ):
        assert refusal(f"{key}={tmp_path / name}", *fewer) == f"--min-nproc 3: {why}, {way_out}"
    written = "plan={devices_per_host: 2, tables: {'*': row_wise}}"
    assert refusal(written, *fewer) == f"--min-nproc 3: the plan of the config is for hosts of 2 ranks, {way_out}"
    assert refusal("--nproc", "4", "--max-restarts", "-1") == "--max-restarts must be 0 or more, got -1"
    in_range = "--min-nproc must be in 1..4, the ranks of --nproc, got 5"
    assert refusal("--nproc", "4", "--max-restarts", "1", "--min-nproc", "5") == in_range
    needs = "--min-nproc 3 needs --max-restarts; set both"
    assert refusal("--nproc", "4", "--min-nproc", "3") == needs
    assert refusal("checkpoint.resume=never", "--max-restarts", "1") == (
        "--max-restarts: checkpoint.resume is 'never', so no run can be resumed; set it to auto"
    )
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MesetaError, match="--max-restarts and --min-nproc are for --nproc; torchrun has"):
        _launch_ranks(2, 1, None, run_of(tmp_path))


def test_the_former_option_works_with_a_warning() -> None:
    with pytest.warns(FormerNameWarning, match="option '--restarts' is now '--max-restarts'; rename it"):
        assert _current_max_restarts(0, 2) == 2
    with pytest.raises(MesetaError, match="--restarts is the former name of --max-restarts; remove --restarts"):
        _current_max_restarts(1, 2)
