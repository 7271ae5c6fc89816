"""Compare duration and memory of planning with TorchRec's planner.

    PEER_PYTHON=/path/to/peers/bin/python python benchmarks/bench_planner.py [NUM_TABLES NUM_RANKS]...

By default, 1,000 tables on 128 ranks and 4,000 tables on 1,024, in hosts of eight H100, from random tasks
(meseta.measure.calibrate.tasks). Each planner uses one core. Steps of both plans are predicted by our cost model.
"""

from __future__ import annotations

import resource
import time
from dataclasses import replace

from balance.torchrec_plan import Asked, ask
from common.command import make_parser, parse_arguments
from common.processes import check_tests
from peers.installed import peer_python
from record import record

from meseta.measure.calibrate.tasks import random_task
from meseta.planner import find_plan
from meseta.planner.cost.predict import predict
from meseta.spec import Topology, Workload

SIZES = (1000, 128, 4000, 1024)
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
                tables.append(replace(table, name=name))
                features.append(replace(feature, name=f"f_{name}", table=name))
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


def compare(num_tables: int, num_ranks: int) -> None:
    per_host = min(PER_HOST, num_ranks)
    workload = make_workload(num_tables)
    topology = Topology(num_hosts=num_ranks // per_host, devices_per_host=per_host, device="h100", hbm_bytes=HBM_BYTES)
    case = f"{num_tables} tables, {num_ranks} ranks"
    seconds, peak, step_s = ours(workload, topology)
    other = peers(workload, topology, peer_python())
    if isinstance(other, str):
        print(f"planner {case}: {seconds:.1f} s, {peak / 1e6:.0f} MB, step {1e3 * step_s:.3g} ms; TorchRec: {other}")
        return
    for metric, value, unit, peer_value in (
        ("planning", seconds, "s", other[0]),
        ("peak memory", peak / 1e6, "MB", other[1] / 1e6),
        ("predicted step", 1e3 * step_s, "ms", 1e3 * other[2]),
    ):
        record("planner", case, metric, value, unit, peer="TorchRec", peer_value=peer_value, packages=("numpy",))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("sizes", type=int, nargs="*", default=SIZES, help="numbers of tables and ranks")
    sizes = parse_arguments(parser).sizes
    if len(sizes) % 2:
        parser.error("each number of tables needs a number of ranks")
    check_tests("tests/planner/test_search.py")
    for num_tables, num_ranks in zip(sizes[::2], sizes[1::2], strict=True):
        compare(num_tables, num_ranks)


if __name__ == "__main__":
    main()
