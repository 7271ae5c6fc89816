"""Tests of ranks that stop: one line names the stopped rank and the ranks that wait, and no process remains."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import faulty_model
from cli.processes import Command
from meseta.system.time_limits import HANG_EXIT_CODE
from sampling import product, sample
from small_run import settings, write_config

SILENT_S, STALL_S = 2.0, 60.0
SOON_S = 30.0
"""Time within which a stopped rank must be named."""
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
TOLD = ("without objects", "swapped", "twice", "other broadcast")
"""Faults that only the watchdog can detect."""
SAID = ("without gather", "without sum", "shorter", "longer", "other dtype")
"""Faults that the ranks report."""


def begin(folder: Path, tiny: Path, size: int, **options: object) -> Command:
    """Start a run. Four or more ranks are on hosts of two."""
    folder.mkdir()
    shutil.copy(faulty_model.__file__, folder)
    limits = {"heartbeat_timeout_s": SILENT_S, "stall_timeout_s": STALL_S}
    document = settings(tiny, folder / "run", train__epochs=50, checkpoint__every_steps=1000, comm=limits)
    document["model"] = {"embedding_dim": 4, "name": "faulty_model:Faulty", "options": options}
    document["plan"] = {"tables": {"*": "row_wise"}, **({"devices_per_host": 2} if size > 2 else {})}
    return Command(folder, "train", write_config(folder / "c.yaml", document), "--nproc", size)


def check_error(command: Command, rank: int, since_s: float) -> str:
    """Check that the command ends soon with one error that names the rank first, and leaves no process. Return the
    error.

    If two ranks are at different collectives, either one may be wrong, and the error names both.
    """
    assert command.wait() == HANG_EXIT_CODE, command.err.read_text()
    assert time.monotonic() - since_s < SOON_S
    errors = [line for line in command.err.read_text().splitlines() if line.startswith("error: ")]
    blamed = (0, 1) if " and on rank " in errors[0] else (rank,)
    assert len(errors) == 1 and errors[0].startswith(tuple(f"error: rank {r} on " for r in blamed)), errors
    assert "Traceback" not in command.err.read_text()
    assert command.members() == []
    return errors[0]


def moments(k: int, seed: int, **kinds: Sequence[str]) -> list[Any]:
    """Return random moments: ten on two hosts, three on four hosts, ten on two ranks. `k` of all run in `make test`."""
    each = [{"size": size, "number": n} for size, count in ((4, 10), (8, 3), (2, 10)) for n in range(count)]
    return sample([{**kind, **moment} for kind in product(**kinds) for moment in each], k=k, seed=seed)


@pytest.mark.parametrize("case", moments(k=1, seed=3, kind=["stop", "kill"]))
def test_a_rank_that_does_not_run(case: dict[str, Any], tmp_path: Path, tiny: Path) -> None:
    kind, size = case["kind"], case["size"]
    draw = random.Random(str(case))
    command = begin(tmp_path / "a", tiny, size)
    command.until(lambda: "step 4/" in command.err.read_text(), "the first line")
    time.sleep(draw.uniform(0, 2))
    rank = draw.choice([0, draw.randrange(size)])
    ranks, since_s = command.ranks(), time.monotonic()
    os.kill(ranks[rank], SIGNALS[kind])
    if kind == "kill":
        assert command.wait() == 1
        assert f"error: rank {rank} was killed by SIGKILL; all ranks were stopped" in command.err.read_text()
        assert command.members() == []
        return
    error = check_error(command, rank, since_s)
    words = (rf"\(process {ranks[rank]}\) has been silent for \d.* s, stopped by a signal, at ", "step", "wait")
    assert re.search(".*".join(words), error), error


@pytest.mark.parametrize("case", moments(k=1, seed=1, fault=TOLD))
def test_a_diverged_rank(case: dict[str, Any], tmp_path: Path, tiny: Path) -> None:
    fault, size = case["fault"], case["size"]
    draw = random.Random(str(case))
    rank, step = draw.randrange(size), draw.randrange(3, 40)
    begun_s = time.monotonic()
    error = check_error(begin(tmp_path / "a", tiny, size, fault=fault, fault_rank=rank, fault_step=step), rank, begun_s)
    assert "every rank must take the same transfers, of the same types and lengths, in the same order" in error
    assert f"at step {step}, stage dense_forward" in error or "gradient_dist" in error or "lane rows" in error, error


@pytest.mark.parametrize("case", moments(k=0, seed=0, fault=SAID))
def test_a_rank_that_says_so_itself(case: dict[str, Any], tmp_path: Path, tiny: Path) -> None:
    fault, size = case["fault"], case["size"]
    draw = random.Random(str(case))
    rank, step = draw.randrange(size), draw.randrange(3, 40)
    begun_s = time.monotonic()
    command = begin(tmp_path / "a", tiny, size, fault=fault, fault_rank=rank, fault_step=step)
    assert command.wait() in (1, HANG_EXIT_CODE), command.err.read_text()
    assert time.monotonic() - begun_s < SOON_S + 30
    assert f"rank {rank}" in command.err.read_text().splitlines()[-1] and command.members() == []


def test_a_late_reader_ends_nothing(tmp_path: Path, tiny: Path) -> None:
    folder = tmp_path / "a"
    command = begin(folder, tiny, 2, fault="late reader", seconds=2 * SILENT_S)
    command.until(lambda: "step 16/" in command.err.read_text(), "a step after it")
    command.send(signal.SIGTERM, to_all=False)
    assert command.wait() == 128 + signal.SIGTERM
    assert "error" not in command.err.read_text()
