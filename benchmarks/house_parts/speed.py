"""Speed of both checkouts in turns."""

from __future__ import annotations

import csv
import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml
from bench_chosen_split import interval
from house_parts.checkouts import Checkout, Ledger
from house_parts.trained import main_config
from record import record

CASES = ("d16_2k", "d64_2k")
TWO_PROCESSES = "2 x 1"
ONE_PROCESS = re.compile(r"(1 x 2) ([\d.]+) samples/s$")
LEAST = 0.98
MOST_HELP = 1.05
AGAIN = 25
"""Turns of a case that fails the first time."""
NUM_ROWS = 200_000
PLANNED = (1000, 128)
INGEST = """
import json, sys
import bench_ingest as bench
bench.NUM_ROUNDS = 1
tsv, out = sys.argv[1:]
reader = [part.replace("BATCH", "2048").replace("SHUFFLE", "True") for part in bench.READER]
cases = [(bench.IN_MEMORY, [tsv]), (bench.PREPARE, [tsv, out]), (tuple(reader), [out])]
names = ("ids in memory", "prepare", "reader, shuffled")
print(json.dumps(dict(zip(names, [rate for rate, _ in bench.take_turns(cases)]))))
"""
PLANNER = """
import json, sys
import bench_planner as bench
tables, ranks = map(int, sys.argv[1:])
topology = bench.Topology(num_hosts=ranks // 8, devices_per_host=8, device="h100", hbm_bytes=bench.HBM_BYTES)
seconds, _, _ = bench.ours(bench.make_workload(tables), topology)
print(json.dumps({f"{tables} tables, {ranks} ranks": 1 / seconds}))
"""
HELP = """
import contextlib, io, sys
sys.argv = ["meseta", "--help"]
from meseta.cli.main import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main()
print(len(sys.modules))
"""

Rates = dict[str, float]
Measure = Callable[[Checkout, Path], Rates]
"""By case, how much is done in a second; the folder has what `prepare_cases` makes."""


@dataclass(frozen=True)
class Verdict:
    """The mean of paired ratios, after / before, and its 95 % interval."""

    mean: float
    low: float
    high: float
    num_turns: int

    @classmethod
    def of(cls, ratios: list[float]) -> Verdict:
        """By Student's t; of one turn, nothing is known but its ratio."""
        if len(ratios) < 2:
            return cls(ratios[0], float("-inf"), float("inf"), len(ratios))
        return cls(*interval(ratios), len(ratios))

    def passes(self, least: float) -> bool:
        """Whether the interval ends above the bound, and is no proof of a loss."""
        return self.high >= least

    def __str__(self) -> str:
        return f"{self.mean:.3f}, 95 % interval {self.low:.3f} to {self.high:.3f}, {self.num_turns} turns"


def end_to_end(checkout: Checkout, folder: Path) -> Rates:
    """Samples per second of training steps, on one process of two threads and on two processes."""
    out = folder / f"{checkout.name}.csv"
    out.unlink(missing_ok=True)
    done = checkout.command("bench", "e2e", *CASES, "--no-peers", "--rounds", 1, "--starts", 1, "--out", out)
    if done.returncode:
        raise SystemExit(f"{checkout.name}: {done.stderr[-500:]}")
    rates: Rates = {}
    with out.open() as file:
        for row in csv.DictReader(file):  # on two processes, with one process of two threads as its peer
            rates[row["case"]] = float(row["value"])
            layout, rate = ONE_PROCESS.search(row["peer"]).groups()  # type: ignore[union-attr]
            rates[row["case"].replace(TWO_PROCESSES, layout)] = float(rate)
    return rates


def ingest(checkout: Checkout, folder: Path) -> Rates:
    """Rows per second of its own bench_ingest."""
    out = folder / "prepared"
    rates: Rates = json.loads(checkout.python("-c", INGEST, folder / "raw/day_0.tsv", out).splitlines()[-1])
    shutil.rmtree(out)
    return rates


def planner(checkout: Checkout, folder: Path) -> Rates:
    """Plans per second of its own bench_planner."""
    rates: Rates = json.loads(checkout.python("-c", PLANNER, *PLANNED))
    return rates


def resume(checkout: Checkout, folder: Path) -> Rates:
    """How often a second a run that was trained by the checkout before goes on for one step."""
    run_dir = folder / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    shutil.copytree(folder / "half", run_dir)
    return _timed("resume", checkout, "train", folder / "resumed.yaml")


def show_help(checkout: Checkout, folder: Path) -> Rates:
    """How often a second `meseta --help` can be shown."""
    return _timed("help", checkout, "--help")


def _timed(name: str, checkout: Checkout, *arguments: object) -> Rates:
    start = time.perf_counter()
    done = checkout.command(*arguments)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{checkout.name}: {name}: {done.stderr[-500:]}")
    return {name: 1 / seconds}


MEASURES: dict[str, tuple[Measure, float]] = {
    "e2e": (end_to_end, LEAST),
    "ingest": (ingest, LEAST),
    "planner": (planner, LEAST),
    "resume": (resume, LEAST),
    "help": (show_help, 1 / MOST_HELP),
}


def prepare_cases(before: Checkout, folder: Path) -> None:
    """A raw log, its dataset, and a run that stands before its last step."""
    before.succeed("data", "synth", "--out", folder / "raw", "--rows", NUM_ROWS, "--scale", 0.01)
    before.succeed("prepare", folder / "raw/day_0.tsv", "--out", folder / "data")
    document = {**main_config(before, folder / "data"), "run_dir": str(folder / "run")}
    (folder / "half.yaml").write_text(yaml.safe_dump(document))
    document["train"]["max_steps"] += 1
    (folder / "resumed.yaml").write_text(yaml.safe_dump(document))
    before.succeed("train", folder / "half.yaml")
    (folder / "run").rename(folder / "half")


def compare_speed(before: Checkout, after: Checkout, folder: Path, names: list[str], num_turns: int) -> Ledger:
    """The paired ratio of each case; one that fails is repeated once, with more turns."""
    ledger = Ledger("speed")
    folder.mkdir(parents=True, exist_ok=True)
    prepare_cases(before, folder)
    for name in names:
        measure, least = MEASURES[name]
        verdicts = {case: [verdict] for case, verdict in take_turns(measure, before, after, folder, num_turns).items()}
        failed = [case for case, found in verdicts.items() if not found[0].passes(least)]
        if failed:
            again = take_turns(measure, before, after, folder, AGAIN)
            for case in failed:
                verdicts[case].append(again[case])
        for case, found in verdicts.items():
            ledger.num_compared += 1
            ledger.figures.append(f"{name}, {case}: " + "; repeated: ".join(map(str, found)))
            if num_turns > 1:
                metric = f"{name}, after / before"
                record("house", case, metric, found[-1].mean, "times", peer="at least", peer_value=least)
            if not found[-1].passes(least):
                ledger.differ(case, f"speed of {name}", str(found[-1]))
    if "help" in names:
        counts = [int(checkout.python("-c", HELP)) for checkout in (before, after)]
        ledger.num_compared += 1
        ledger.figures.append(f"modules of meseta --help: {counts[0]} before, {counts[1]} after")
        if counts[1] > counts[0]:
            ledger.differ("meseta --help", "modules", f"{counts[0]} became {counts[1]}")
    return ledger


def take_turns(measure: Measure, before: Checkout, after: Checkout, folder: Path, num_turns: int) -> dict[str, Verdict]:
    """The ratios of as many turns; who begins alternates."""
    ratios: dict[str, list[float]] = {}
    for turn in range(num_turns):
        order = (before, after) if turn % 2 == 0 else (after, before)
        rates = {checkout.name: measure(checkout, folder) for checkout in order}
        for case in rates["before"]:
            ratios.setdefault(case, []).append(rates["after"][case] / rates["before"][case])
    return {case: Verdict.of(found) for case, found in ratios.items()}
