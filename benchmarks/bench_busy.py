"""Training while other programs use the processors: what a run keeps of its speed with a busy loop on each core.

    python benchmarks/bench_busy.py [--rounds N] [--window-s S]

Runs of `meseta train`'s own loop, reader included: with threads that wait as its commands choose
(meseta.system.wait_policy) and of which steps take as many as is faster (meseta.measure.threads), and with
threads that spin, as OpenMP's do by themselves. One process of two threads and two ranks of one, on batches of 64 and
of 2,048, on two cores. All take turns window by window, quiet and beside the loops: one per core, at the same priority,
so that a fair share is half of the processors. Loops are stopped in between, end with this program, and after half an
hour anyway.

Figures are medians of the windows; ours beside spinning threads is the median over pairs of neighbouring windows. Quiet
windows in which others used the processors are repeated, so it takes a machine with nothing else running: ten minutes.
Runs the correctness tests first and reports nothing when they fail. Appends to benchmarks/results.csv.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from record import ROOT, record

from meseta.measure.harness.interleaved import TimingOptions
from meseta.measure.harness.target import BenchmarkTarget
from meseta.measure.harness.worker_group import TargetSpec, WorkerGroup
from meseta.system.wait_policy import WAIT_POLICY, WAIT_POLICY_VARIABLES

TESTS = (
    "tests/measure/test_waiting.py",
    "tests/measure/test_step_threads.py",
    "tests/train/test_trainer.py::test_more_threads_give_the_same_bits",
    "tests/train/test_trainer.py::test_threads_that_change_between_steps_change_no_bit",
)
BATCHES = (64, 2048)
LAYOUTS = {(1, 2): 0.4, (2, 1): 0.35}
"""(Processes, threads of each) -> what it has to keep."""
QUIET = 0.98
"""What ours has to reach of spinning threads on a quiet machine."""
OURS, SPINNING = "ours", "spinning"
POLICIES: dict[str, dict[str, str]] = {OURS: dict(WAIT_POLICY), SPINNING: {}}
FAIR = 0.5
MAX_OTHERS, NUM_RETRIES = TimingOptions().max_background_load, 8
SETTLE_S = 1.6
"""Until a run has seen that others have stopped: meseta.measure.threads."""
_LOOP = """
import os, sys, time
core, parent = int(sys.argv[1]), int(sys.argv[2])
os.sched_setaffinity(0, [core])
end = time.monotonic() + 1800
while time.monotonic() < end and os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


class Training(BenchmarkTarget):
    """The trainer's loop: a batch from the reader, a step, figures every 50 steps. No evaluation, no checkpoint."""

    def __init__(self, data: str, run_dir: str, batch_size: int, num_threads: int) -> None:
        super().__init__()
        import yaml

        from meseta.config import RunConfig
        from meseta.train.session import session
        from meseta.train.trainer import Trainer

        document: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "configs" / "main.yaml").read_text())
        document |= {"run_dir": run_dir, "num_threads": num_threads, "data": {"dir": data}}
        document["train"] |= {"batch_size": batch_size, "epochs": 1_000_000}
        config = RunConfig.model_validate(document)
        self._session = session(config)
        self._world = self._session.__enter__()
        self._trainer = Trainer(config, self._world)
        self.actions = {"step": self._step}

    def facts(self) -> dict[str, Any]:
        return {"actions": list(self.actions)}

    def set_threads(self, num_threads: int) -> None:
        """The config has said how many."""

    def barrier(self) -> None:
        self._world.barrier()

    def _step(self, call: int) -> None:
        trainer = self._trainer
        with trainer.train_step.stage_times.stage("data"):
            batch = next(trainer._batches)
        trainer._record(trainer._run_step(batch), batch)
        if trainer.step % 50 == 0:
            trainer.running_metrics.pop_metrics()
            trainer.train_step.stage_times.pop_means()


@dataclass
class Rates:
    """Samples a second, window by window."""

    quiet: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    disturbed: int = 0
    """Quiet windows in which others used the processors all the same."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--window-s", type=float, default=1.0)
    options = parser.parse_args()
    for name in WAIT_POLICY_VARIABLES:  # members alone say how their threads wait
        os.environ.pop(name, None)
    subprocess.run([sys.executable, "-m", "pytest", "-q", *TESTS], check=True, cwd=ROOT)
    missed = []
    with tempfile.TemporaryDirectory(prefix="meseta-busy-") as folder:
        data = make_data(Path(folder))
        for layout, least in LAYOUTS.items():
            for batch_size in BATCHES:
                rates = measure(data, layout, batch_size, options.rounds, options.window_s)
                missed += report(layout, batch_size, least, rates)
    for line in missed:
        print(f"missed: {line}")
    sys.exit(1 if missed else 0)


def make_data(folder: Path) -> Path:
    """100,000 rows in the shape of Criteo's, prepared."""
    command = [sys.executable, "-m", "meseta.cli.main"]
    synth = ["data", "synth", "--out", str(folder / "raw"), "--rows", "120000", "--files", "6", "--scale", "0.01"]
    prepare = ["prepare", str(folder / "raw" / "*.tsv"), "--out", str(folder / "data")]
    prepare += ["--test-files", str(folder / "raw" / "day_5.tsv")]
    for arguments in (synth, prepare):
        subprocess.run([*command, *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return folder / "data"


def measure(
    data: Path, layout: tuple[int, int], batch_size: int, num_rounds: int, window_s: float
) -> Mapping[str, Rates]:
    """Windows of every policy in turns: all of them quiet, then all of them beside the loops, and again."""
    num_ranks, num_threads = layout
    rates = {name: Rates() for name in POLICIES}
    with ExitStack() as stack:
        teams = {}
        for name, policy in POLICIES.items():
            run_dir = data.parent / f"{name}-{num_ranks}-{batch_size}"
            member = TargetSpec(
                name=name,
                target_class=importlib.import_module("bench_busy").Training,
                arguments={
                    "data": str(data), "run_dir": str(run_dir), "batch_size": batch_size, "num_threads": num_threads
                },
                environment={**policy, "PYTHONPATH": str(Path(__file__).parent)},
                num_ranks=num_ranks,
                thread_counts=(num_threads,),
            )  # fmt: skip
            teams[name] = stack.enter_context(WorkerGroup(member))
        quiet = {name: num_calls(team, num_threads, window_s) for name, team in teams.items()}
        with busy_loops() as loops:
            busy: dict[str, int] = {}
            for _ in range(num_rounds):
                for name, team in teams.items():
                    rate, was_quiet = quiet_window(team, quiet[name], num_threads, batch_size)
                    rates[name].quiet.append(rate)
                    rates[name].disturbed += not was_quiet
                with going_on(loops):
                    busy = busy or {name: num_calls(team, num_threads, window_s) for name, team in teams.items()}
                    for name, team in teams.items():
                        window = team.time("step", busy[name], num_threads)
                        rates[name].busy.append(batch_size / window.seconds_per_call)
    return rates


def num_calls(team: WorkerGroup, num_threads: int, window_s: float) -> int:
    """Steps that fill a window; warms up on the way."""
    calls = 4
    while True:
        spent_s = calls * team.time("step", calls, num_threads).seconds_per_call
        if spent_s > window_s / 2:
            return max(2, round(calls * window_s / spent_s))
        calls *= 2


def quiet_window(team: WorkerGroup, calls: int, num_threads: int, batch_size: int) -> tuple[float, bool]:
    """Samples a second in a window in which nobody else used the processors; in the quietest where there is none."""
    windows = []
    time.sleep(SETTLE_S)
    while not windows or (windows[-1].background_load > MAX_OTHERS and len(windows) <= NUM_RETRIES):
        windows.append(team.time("step", calls, num_threads))
    best = min(windows, key=lambda window: window.background_load)
    return batch_size / best.seconds_per_call, best.background_load <= MAX_OTHERS


@contextmanager
def busy_loops() -> Iterator[list[subprocess.Popen[bytes]]]:
    """A loop bound to each core that this process may use, stopped until `going_on`."""
    loops: list[subprocess.Popen[bytes]] = []
    try:
        for core in sorted(os.sched_getaffinity(0)):
            loops.append(subprocess.Popen([sys.executable, "-c", _LOOP, str(core), str(os.getpid())]))
            loops[-1].send_signal(signal.SIGSTOP)
        yield loops
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextmanager
def going_on(loops: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """The loops run inside."""
    for loop in loops:
        loop.send_signal(signal.SIGCONT)
    time.sleep(0.3)  # their interpreters have started, too
    try:
        yield
    finally:
        for loop in loops:
            loop.send_signal(signal.SIGSTOP)


def report(layout: tuple[int, int], batch_size: int, least: float, rates: Mapping[str, Rates]) -> list[str]:
    """Print and record the figures of a case; a line for each that is too low."""
    case = f"{layout[0]} x {layout[1]}, batches of {batch_size}"
    quiet, busy = (
        {name: statistics.median(getattr(r, kind)) for name, r in rates.items()} for kind in ("quiet", "busy")
    )
    beside = statistics.median(a / b for a, b in zip(rates[OURS].quiet, rates[SPINNING].quiet, strict=True))
    kept = {name: busy[name] / quiet[name] for name in rates}
    for metric, value, unit, peer, peer_value in (
        ("quiet", quiet[OURS], "samples/s", "spinning threads", quiet[SPINNING]),
        ("a loop on each core", busy[OURS], "samples/s", "spinning threads", busy[SPINNING]),
        ("quiet, by pairs", beside, "of spinning", "at least", QUIET),
        ("kept", kept[OURS], "of quiet", "fair share", FAIR),
        ("kept", kept[OURS], "of quiet", "spinning threads", kept[SPINNING]),
    ):
        record("busy", case, metric, value, unit, peer=peer, peer_value=peer_value)
    disturbed = sum(r.disturbed for r in rates.values())
    if disturbed:
        print(f"{case}: others used the processors in {disturbed} of the quiet windows")
    missed = [f"{case}: {beside:.3f} of spinning threads' speed when quiet, {QUIET} wanted"] if beside < QUIET else []
    if kept[OURS] < least:
        missed.append(f"{case}: {kept[OURS]:.3f} of its own quiet speed beside loops, {least} wanted")
    return missed


if __name__ == "__main__":
    main()
