"""Compare duration and memory of planning with TorchRec's planner.

    PEER_PYTHON=/path/to/peers/bin/python python benchmarks/bench_planner.py [NUM_TABLES NUM_RANKS]...

By default, 1,000 tables on 128 ranks and 4,000 tables on 1,024, in hosts of eight H100, from random tasks
(meseta.measure.calibrate.tasks). Each planner uses one core. Steps of both plans are predicted by our cost model.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from record import record
from torchrec_plan import Asked, ask

from meseta.measure.calibrate.tasks import random_task
from meseta.planner import find_plan
from meseta.planner.cost.predict import predict
from meseta.spec import Topology, Workload

ROOT = Path(__file__).resolve().parent.parent
SIZES = ((1000, 128), (4000, 1024))
LIMIT_S = 600
PER_HOST = 8
HBM_BYTES = 80_000_000_000
BATCH_SIZE = 65_536


def make_workload(num_tables: int) -> Workload:
    """Combine random tasks until they have enough tables."""
    tables, features, loads = [], [], {}
    seed = 0
    while len(tables) < num_tables:
        task = random_task(seed).workload()
        for table, feature in zip(task.tables, task.features, strict=True):
            if len(tables) < num_tables:
                name = f"t{len(tables)}"
                tables.append(type(table)(**{**vars(table), "name": name}))
                features.append(type(feature)(**{**vars(feature), "name": f"f_{name}", "table": name}))
                loads[f"f_{name}"] = task.loads[feature.name]
        seed += 1
    return Workload(tables=tuple(tables), features=tuple(features), batch_size=BATCH_SIZE, loads=loads)


def ours(workload: Workload, topology: Topology) -> tuple[float, float, float]:
    """Return (seconds, peak bytes of this process, predicted step) of our planner."""
    start = time.perf_counter()
    planned = find_plan(workload, topology)
    seconds = time.perf_counter() - start
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, planned.prediction.step_s


def peers(workload: Workload, topology: Topology, python: str) -> tuple[float, float, float] | str:
    """Return the same quantities of TorchRec, or why there is no plan."""
    [result] = ask([Asked(workload=workload, topology=topology)], python, LIMIT_S)
    if isinstance(result, str):
        return result
    return result.seconds, result.peak_bytes, predict(result.plan, workload, topology).step_s


def main(sizes: list[tuple[int, int]]) -> None:
    test = str(ROOT / "tests/planner/test_search.py")
    subprocess.run([sys.executable, "-m", "pytest", "-q", test], check=True, cwd=ROOT)
    python = os.environ.get("PEER_PYTHON", sys.executable)
    for num_tables, num_ranks in sizes:
        workload = make_workload(num_tables)
        per_host = min(PER_HOST, num_ranks)
        topology = Topology(
            num_hosts=num_ranks // per_host, devices_per_host=per_host, device="h100", hbm_bytes=HBM_BYTES
        )
        case = f"{num_tables} tables, {num_ranks} ranks"
        seconds, peak, step_s = ours(workload, topology)
        other = peers(workload, topology, python)
        if isinstance(other, str):
            print(
                f"planner {case}: {seconds:.1f} s, {peak / 1e6:.0f} MB, step {1e3 * step_s:.3g} ms; TorchRec: {other}"
            )
            continue
        for metric, value, unit, peer_value in (
            ("planning", seconds, "s", other[0]),
            ("peak memory", peak / 1e6, "MB", other[1] / 1e6),
            ("predicted step", 1e3 * step_s, "ms", 1e3 * other[2]),
        ):
            record("planner", case, metric, value, unit, peer="TorchRec", peer_value=peer_value, packages=("numpy",))


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    main(list(zip(numbers[::2], numbers[1::2], strict=True)) or list(SIZES))
