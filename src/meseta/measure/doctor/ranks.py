"""Check of gloo: two processes that meet over loopback."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping
from typing import Any

from meseta.measure.doctor.children import run_children
from meseta.measure.doctor.finding import Finding, note, ok, problem

NUM_RANKS = 2
LIMIT_S = 60


def check_gloo(torch: Mapping[str, Any], limit_s: int = LIMIT_S) -> Finding:
    """Really start two ranks and add up a number of each; `torch` is the probe's fact."""
    if "error" in torch:
        return note("gloo", "not tried, since torch does not load")
    start_s = time.perf_counter()
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
    except OSError as error:
        return problem("gloo", f"no port can be opened on 127.0.0.1: {error}", "allow loopback: ip link set lo up")
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(NUM_RANKS), "OMP_NUM_THREADS": "1"}
    # Variables that torchrun may have left must not reach the ranks: they start on their own.
    common |= {"LOCAL_WORLD_SIZE": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    environments = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(NUM_RANKS)]
    ended = run_children("meseta.measure.doctor.rank", environments, float(limit_s), [str(limit_s + 1)])
    elapsed_s = time.perf_counter() - start_s
    failed = [(rank, child) for rank, child in enumerate(ended) if child.code != 0]
    way = "one machine: export GLOO_SOCKET_IFNAME=lo; several: give each a hostname that the others can resolve"
    if failed:
        # Who ended by itself knows why; who was stopped has only waited for it.
        rank, child = min(failed, key=lambda entry: entry[1].code is None or entry[1].code < 0)
        reason = re.sub(r"\[enforce fail at \S+\] ", "", child.reason)  # lines of gloo's own source
        text = f"two processes cannot work together: rank {rank}: {reason[:400]}"
        return problem("gloo", text, way, seconds=elapsed_s)
    if any("sum 3" not in child.out for child in ended):
        sums = " and ".join(child.out.strip() or "nothing" for child in ended)
        return problem("gloo", f"ranks that add up 1 and 2 found: {sums}", way, seconds=elapsed_s)
    return ok("gloo", f"two processes met over loopback and added up, in {elapsed_s:.1f} s", seconds=elapsed_s)
