"""Check of gloo: two processes that meet over loopback."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from meseta.machine.rendezvous import Rendezvous
from meseta.measure.doctor.child_processes import run_children
from meseta.measure.doctor.finding import Finding, note, ok, problem

NUM_RANKS = 2
EXPECTED_SUM = 3.0
"""Sum of the numbers 1 and 2, of which each rank has one."""
GLOO_TIMEOUT_S = 60


def check_gloo(torch: Mapping[str, Any], timeout_s: int = GLOO_TIMEOUT_S) -> Finding:
    """Really start two ranks and add up a number of each; `torch` is the probe's fact."""
    if "error" in torch:
        return note("gloo", "not tried, since torch does not load")
    start_s = time.perf_counter()
    with Rendezvous(NUM_RANKS) as meeting:
        # A size of 0: ranks that add up two numbers need no processor of their own.
        alone = {"LOCAL_WORLD_SIZE": "0", "OMP_NUM_THREADS": "1"}
        environments = [meeting.environment(rank) | alone for rank in range(NUM_RANKS)]
        arguments, inherited = [str(timeout_s + 1)], [meeting.descriptor]
        ended = run_children("meseta.measure.doctor.rank", environments, float(timeout_s), arguments, inherited)
    elapsed_s = time.perf_counter() - start_s
    failed = [(rank, child) for rank, child in enumerate(ended) if child.exit_code != 0]
    way = "allow loopback: ip link set lo up, with the address 127.0.0.1, and no rule that closes it"
    if failed:
        # Who ended by itself knows why; who was stopped has only waited for it.
        rank, child = min(failed, key=lambda entry: entry[1].exit_code is None or entry[1].exit_code < 0)
        reason = re.sub(r"\[enforce fail at \S+\] ", "", child.reason)  # lines of gloo's own source
        text = f"two processes cannot work together: rank {rank}: {reason[:400]}"
        return problem("gloo", text, way, seconds=elapsed_s)
    sums = [next((message["sum"] for message in child.messages("sum")), None) for child in ended]
    if any(total != EXPECTED_SUM for total in sums):
        texts = [child.stdout.strip() or "nothing" if total is None else f"sum {total:g}"
                 for child, total in zip(ended, sums, strict=True)]  # fmt: skip
        return problem("gloo", f"ranks that add up 1 and 2 found: {' and '.join(texts)}", way, seconds=elapsed_s)
    return ok("gloo", f"two processes met over loopback and added up, in {elapsed_s:.1f} s", seconds=elapsed_s)
