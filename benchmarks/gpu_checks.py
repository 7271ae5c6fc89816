"""Check on one GPU that training steps are exact and fast, in at most ten minutes.

    python benchmarks/gpu_checks.py [--only NAME ...] [--list] [--max-s SECONDS] [--out runs/gpu_checks]

Each check is a process with a time limit. Time that a check leaves is available to later ones. After each one, table.md
and results.json in the output folder are rewritten, so that an interrupted run loses no result. Next to them are the
output of each check, and the rows of the check in progress. A check that fails, crashes or exceeds its limit is a row,
and the exit code is then 1. Checks that did not run, because the run was interrupted or had no time left, are rows with
the result "skipped". `--only` keeps the stored results of other checks if they are of the same commit, card and
versions.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common.command import make_parser
from common.processes import script_environment
from common.tables import format_table
from gpu_parts.rows import Row, RowWriter, read_rows
from record import ROOT

from meseta.system import git_version
from meseta.system.environment import package_version
from meseta.system.files import write_atomic

MAX_TOTAL_S = 600.0
"""Limit of all checks together."""
HEAD = ("check", "quantity", "value", "limit", "result")
MAX_REASON_LENGTH = 200


class Check(NamedTuple):
    """Check that a process runs."""

    name: str
    command: tuple[str, ...]
    """Command, to which the path of the file of rows is appended."""
    time_limit_s: float


def part(name: str, function: str, time_limit_s: float) -> Check:
    """Return a check of the package `gpu_parts`. `function` is module.name, and its argument is a RowWriter."""
    return Check(name, (sys.executable, str(Path(__file__).resolve()), "--run", function), time_limit_s)


# The most important ones come first, for runs that are interrupted.
CHECKS = (
    part("kernels", "kernels.check", 50),
    part("dcnv2", "dcnv2.check", 65),
    part("models_65536", "models.check_65536", 65),
    part("dcnv2_adagrad", "dcnv2.check_adagrad", 40),
    part("tests", "gpu_tests.check", 100),
    part("replay", "replay.check", 40),
    part("linear", "linear.check", 30),
    part("models_2048", "models.check_2048", 50),
    part("step_time", "step_time.check", 20),
    part("memcheck", "memcheck.check", 45),
    part("data", "main_job.prepare", 20),
    part("main_job", "main_job.check", 40),
    part("models_compiled", "models.check_compiled", 35),
)


def run_check(check: Check, time_limit_s: float, folder: Path) -> list[Row]:
    """Run a check to its end or a time limit, and kill all of its processes. Return its rows."""
    rows_file, log = rows_path(check, folder), folder / f"{check.name}.log"
    rows_file.unlink(missing_ok=True)
    command = (*check.command, str(rows_file))
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=script_environment(), start_new_session=True
        )
        try:
            code: int | None = process.wait(time_limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    rows = read_rows(rows_file)
    if code is None:
        return [*rows, failure(f"no end within {time_limit_s:.0f} s", log)]
    if code != 0:
        return [*rows, failure(f"exit code {code}", log)]
    return rows or [failure("no rows", log)]


def rows_path(check: Check, folder: Path) -> Path:
    """Return the file of rows of a check in progress."""
    return folder / f"{check.name}.jsonl"


def failure(reason: str, log: Path) -> Row:
    """Return the row of a check that did not complete, with the last line of its output."""
    lines = log.read_text(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "none")
    return Row(quantity="completed", value=f"{reason}; last output: {last[:MAX_REASON_LENGTH]}", result="missed")


def describe_machine(commit: str) -> dict[str, str]:
    """Return the values at the head of the table."""
    return {
        "card": torch.cuda.get_device_name(),
        "torch": str(torch.__version__),
        "triton": package_version("triton"),
        "commit": commit or git_version() or "unknown",
    }


class ResultTable:
    """Results of checks, in results.json and table.md."""

    def __init__(self, folder: Path, machine: Mapping[str, str], *, keep: bool) -> None:
        """Start a table. With `keep`, it continues stored results of an equal machine."""
        self._folder, self._machine = folder, dict(machine)
        self._checks: dict[str, Any] = {}
        path = folder / "results.json"
        if keep and path.exists() and (stored := json.loads(path.read_text()))["machine"] == self._machine:
            self._checks = stored["checks"]

    def skip(self, names: Sequence[str], reason: str) -> None:
        """Add or replace checks as skipped, and rewrite both files."""
        for name in names:
            self._set(name, [Row(quantity="run", value=reason, result="skipped")], 0.0)
        self._write()

    def add(self, name: str, rows: Sequence[Row], seconds: float) -> None:
        """Add or replace the rows of a check, and rewrite both files."""
        self._set(name, rows, seconds)
        self._write()

    def _set(self, name: str, rows: Sequence[Row], seconds: float) -> None:
        at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._checks[name] = {"at": at, "seconds": round(seconds, 1), "rows": [asdict(row) for row in rows]}

    def _write(self) -> None:
        document = {"machine": self._machine, "checks": self._checks}
        write_atomic(self._folder / "results.json", json.dumps(document, indent=1) + "\n")
        write_atomic(self._folder / "table.md", self.format())

    def format(self) -> str:
        head = "\n".join(f"- {name}: {value}" for name, value in self._machine.items())
        cells = [
            (f"{name}, {done['seconds']:.0f} s" if index == 0 else "", *Row(**row).cells())
            for name, done in self._checks.items()
            for index, row in enumerate(done["rows"])
        ]
        return f"{head}\n\n{format_table(HEAD, cells)}"


def run_checks(checks: Sequence[Check], folder: Path, results: ResultTable, max_total_s: float = MAX_TOTAL_S) -> bool:
    """Run checks for at most `max_total_s`, and add their rows. Time that a check leaves is available to later ones.

    Return whether nothing was missed or skipped.
    """
    is_met, limit_s, end_s = True, 0.0, time.perf_counter() + max_total_s
    waiting = [check.name for check in checks]
    results.skip(waiting, "the run was interrupted")  # The final rows of a run that is killed.
    try:
        for check in checks:
            start_s = time.perf_counter()
            limit_s = min(limit_s + check.time_limit_s, end_s - start_s)
            if start_s >= end_s:
                results.skip(waiting, f"no time was left of {max_total_s:.0f} s")
                break
            print(f"{check.name} (at most {limit_s:.0f} s)", flush=True)
            rows = run_check(check, limit_s, folder)
            duration_s = time.perf_counter() - start_s
            limit_s = max(limit_s - duration_s, 0.0)
            results.add(check.name, rows, duration_s)
            waiting.remove(check.name)
            rows_path(check, folder).unlink(missing_ok=True)
            is_met &= all(row.result != "missed" for row in rows)
    finally:
        print(f"\n{results.format()}", flush=True)
        if waiting:
            print(f"skipped: {', '.join(waiting)}", flush=True)
    return is_met and not waiting


def make_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[check.name for check in CHECKS])
    parser.add_argument("--list", action="store_true", help="print the checks and their time limits")
    parser.add_argument("--max-s", type=float, default=MAX_TOTAL_S, help="limit of all checks together, in seconds")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu_checks", help="folder of the table")
    parser.add_argument("--commit", default="", help="commit of a copy of the source without .git")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    chosen = make_arguments()
    if chosen.run:
        function, rows_file = chosen.run
        module, name = function.split(".")
        getattr(import_module(f"gpu_parts.{module}"), name)(RowWriter(Path(rows_file)))
        return
    if chosen.list:
        limits = [(check.name, f"{check.time_limit_s:.0f}") for check in CHECKS]
        print(format_table(("check", "seconds, at most"), [*limits, ("total", f"{MAX_TOTAL_S:.0f}")]))
        return
    if not torch.cuda.is_available():
        sys.exit("gpu_checks: torch sees no GPU here, so nothing was checked; run it on a machine with one")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the current check is killed, and others are skipped
    chosen.out.mkdir(parents=True, exist_ok=True)
    results = ResultTable(chosen.out, describe_machine(chosen.commit), keep=chosen.only is not None)
    checks = [check for check in CHECKS if chosen.only is None or check.name in chosen.only]
    sys.exit(not run_checks(checks, chosen.out, results, chosen.max_s))


if __name__ == "__main__":
    main()
