"""Tests of cut links between hosts and stopped ranks, without a launcher: each side names the unresponsive ranks."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hosts.links import INTERFACE

from hosts import Hosts, why_impossible
from meseta.system.time_limits import HANG_EXIT_CODE
from sampling import sample
from small_run import environment, settings, write_config

SILENT_S, SOON_S, PATIENCE_S = 6.0, 30.0, 120.0
NAMED = ["unshare", "--uts", "sh", "-c", 'hostname host$GROUP_RANK && exec "$@"', "sh"]
"""Command prefix that names the host, as hosts of the testbed share everything except their network."""
COMMAND = [*NAMED, sys.executable, "-P", "-m", "meseta.cli.main"]
pytestmark = pytest.mark.skipif(why_impossible() is not None, reason=f"no network namespaces: {why_impossible()}")


def cases() -> list[Any]:
    """Return all cases, which run only in `make soak`."""
    moments = [(num_hosts, n) for num_hosts, count in ((2, 10), (4, 3)) for n in range(count)]
    return sample([{"kind": k, "hosts": h, "number": n} for k in ("link", "stop") for h, n in moments], k=0, seed=0)


@pytest.mark.parametrize("case", cases())
def test_each_side_names_the_unresponsive_ranks(case: dict[str, Any], tmp_path: Path, tiny: Path) -> None:
    draw, num_hosts = random.Random(str(case)), case["hosts"]
    limits = {"heartbeat_timeout_s": SILENT_S, "stall_timeout_s": 120.0}
    document = settings(tiny, tmp_path / "run", train__epochs=200, checkpoint__every_steps=100_000, comm=limits)
    config = write_config(tmp_path / "c.yaml", document)
    with Hosts(num_hosts, ranks=2) as hosts:
        ranks = []
        try:
            for rank in range(hosts.num_ranks):
                added = {**environment(), **hosts.variables(rank)}
                ranks.append(
                    hosts._start([*COMMAND, "train", str(config), "--verbose"], added, tmp_path / str(rank), rank)
                )
            wait_for(lambda: "step 4/" in words(tmp_path, 0), "the first line")
            time.sleep(draw.uniform(0, 2))
            host, begun_s = draw.randrange(num_hosts), time.monotonic()
            if case["kind"] == "link":
                hosts._hosts[host].configure("ip", [f"link set {INTERFACE} down"])
                silent = (2 * host, 2 * host + 1)
            else:
                silent = (draw.randrange(hosts.num_ranks),)
                os.kill(ranks[silent[0]].pid, signal.SIGSTOP)
            running = [rank for rank in range(hosts.num_ranks) if case["kind"] == "link" or rank not in silent]
            wait_for(lambda: all(ranks[rank].poll() is not None for rank in running), "the end")
            assert time.monotonic() - begun_s < SOON_S
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        assert {ranks[rank].returncode for rank in running} == {HANG_EXIT_CODE}
        for rank in running:
            check_line(words(tmp_path, rank), silent, is_inside=rank in silent, num_ranks=hosts.num_ranks)


def check_line(text: str, silent: Sequence[int], *, is_inside: bool, num_ranks: int) -> None:
    """Check that there is one error and that it names the unresponsive ranks."""
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in text, text
    if len(silent) == 1:
        assert errors[0].startswith(f"error: rank {silent[0]} on host"), errors
        return
    unresponsive = [rank for rank in range(num_ranks) if rank not in silent] if is_inside else silent
    if " the store at " in errors[0]:
        assert re.search(r"the link from host\d to ", errors[0]), errors
    else:
        assert re.search(r"the link between host\d and host\d.* is cut, or nothing runs there", errors[0]), errors
        for rank in unresponsive:
            assert re.search(rf"has not heard .*\b{rank}\b", errors[0]), errors


def words(folder: Path, rank: int) -> str:
    return (folder / f"{rank}.err").read_text()


def wait_for(condition: Any, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.05)
