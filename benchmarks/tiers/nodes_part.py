"""Hosts that published models need with and without disks, modeled with documented constants."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from published_models import DISK_BYTES, Case, cases, paper_cluster
from record import record

from meseta.planner import DoesNotFitError, find_plan

HOSTS = (1, 2, 4, 8, 16)
WITHIN = 1.1
"""Maximum step relative to the published cluster."""
LIMITS = {"F": ("capacity", 4.0), "I": ("lookups", 1.0), "A": ("dense layers", None)}
"""Limiting resource of a model, and the required reduction of hosts. `None` has no requirement."""


def step_s(case: Case, hosts: int, disk_bytes: int) -> float | None:
    """Return the predicted step, or `None` if the model does not fit."""
    share = hosts / case.topology.num_hosts
    workload = replace(case.workload, batch_size=int(case.workload.batch_size * share))
    topology = replace(paper_cluster(disk_bytes), num_hosts=hosts)
    try:
        return find_plan(workload, topology).prediction.step_s
    except DoesNotFitError:
        return None


def measure_nodes(options: argparse.Namespace) -> bool:
    good = True
    for case in cases():
        name = case.name.split(":", maxsplit=1)[0]
        if name not in options.models.split(","):
            continue
        steps_by_disks: dict[str, dict[int, float]] = {"without": {}, "with": {}}
        for label, disk_bytes in (("without", 0), ("with", DISK_BYTES)):
            for hosts in reversed(HOSTS):
                start = time.perf_counter()
                seconds = step_s(case, hosts, disk_bytes)
                text = "does not fit" if seconds is None else f"{1e3 * seconds:.3g} ms"
                print(f"{name} {hosts:2} hosts {label} disks: {text}, {time.perf_counter() - start:.0f} s", flush=True)
                if seconds is None:
                    break
                steps_by_disks[label][hosts] = seconds
        limit_s = WITHIN * steps_by_disks["without"][max(HOSTS)]
        fewest = {
            label: min(n for n, seconds in steps.items() if seconds <= limit_s)
            for label, steps in steps_by_disks.items()
        }
        times = fewest["without"] / fewest["with"]
        bound, limit = LIMITS[name]
        if limit is not None:
            good &= times >= limit if bound == "capacity" else times <= limit
        record("tiers", f"{case.name}, bound by {bound}, modelled", "fewest hosts", fewest["with"], "hosts",
               peer="without disks", peer_value=fewest["without"], packages=("numpy",))  # fmt: skip
    return good
