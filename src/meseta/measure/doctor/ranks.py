"""Check of gloo: two processes that communicate over loopback."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from meseta.measure.doctor.child_processes import run_children
from meseta.measure.doctor.finding import Finding, note, ok, problem
from meseta.system.rendezvous import Rendezvous

NUM_RANKS = 2
EXPECTED_SUM = 3.0
"""Sum of 1 and 2, the numbers that the two ranks contribute."""
GLOO_TIMEOUT_S = 60


def check_gloo(torch: Mapping[str, Any], timeout_s: int = GLOO_TIMEOUT_S) -> Finding:
    """Start two ranks that all-reduce one number each over gloo. `torch` is the result of the probe 'torch'."""
    if "error" in torch:
        return note("gloo", "not tried, since torch does not load")
    start_s = time.perf_counter()
    with Rendezvous(NUM_RANKS) as meeting:
        # With a size of 0, ranks are not pinned to separate processors. This check does not need that.
        alone = {"LOCAL_WORLD_SIZE": "0", "OMP_NUM_THREADS": "1"}
        environments = [meeting.environment(rank) | alone for rank in range(NUM_RANKS)]
        arguments, inherited = [str(timeout_s + 1)], [meeting.descriptor]
        ended = run_children("meseta.measure.doctor.rank", environments, float(timeout_s), arguments, inherited)
    elapsed_s = time.perf_counter() - start_s
    failed = [(rank, child) for rank, child in enumerate(ended) if child.exit_code != 0]
    way = "enable loopback: ip link set lo up, with the address 127.0.0.1, and no firewall rule that blocks it"
    if failed:
        # A rank that ended by itself reports the cause. A killed one only waited for it.
        rank, child = min(failed, key=lambda entry: entry[1].exit_code is None or entry[1].exit_code < 0)
        reason = re.sub(r"\[enforce fail at \S+\] ", "", child.reason)  # Source lines of gloo.
        text = f"two processes cannot communicate: rank {rank}: {reason[:400]}"
        return problem("gloo", text, way, seconds=elapsed_s)
    sums = [next((message["sum"] for message in child.messages("sum")), None) for child in ended]
    if any(total != EXPECTED_SUM for total in sums):
        texts = [child.stdout.strip() or "nothing" if total is None else f"sum {total:g}"
                 for child, total in zip(ended, sums, strict=True)]  # fmt: skip
        return problem("gloo", f"an all-reduce of 1 and 2 returned {' and '.join(texts)}", way, seconds=elapsed_s)
    return ok("gloo", f"two processes communicate over loopback, tested in {elapsed_s:.1f} s", seconds=elapsed_s)
