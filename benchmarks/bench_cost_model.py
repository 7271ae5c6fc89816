"""Compare predicted with measured seconds of lookup, update and collectives, on tasks that were not used for fitting.

    python benchmarks/bench_cost_model.py [cost.yaml [num_tasks]]

Without a cost model, one is calibrated. Tables of random tasks are assigned to four devices at random, and each device
is timed alone, in five alternating rounds. Errors are relative to the median of the rounds. Networks are compared with
constants if the cost model has any.
"""

import statistics
import subprocess
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from common.command import make_parser, parse_arguments
from common.processes import MESETA, check_tests
from record import record

from meseta.measure.calibrate.calibration import NUM_CALLS, RankShards, ShardTimings, measure_shards
from meseta.measure.calibrate.collectives import CollectiveTimer
from meseta.measure.calibrate.neural import predict_collective, predict_rank
from meseta.measure.calibrate.rank_timer import ShardTimer
from meseta.measure.calibrate.tasks import ShardingTask, random_task
from meseta.measure.harness.worker_group import TargetSpec, WorkerGroup
from meseta.planner.cost.exchange import Collective
from meseta.spec import CostModel

FIRST_SEED = 1000
NUM_DEVICES = 4
DEVICE_BYTES = 4_000_000_000
NUM_ROUNDS = 5
NUM_EXCHANGES = 12


@dataclass
class Case:
    """Predicted quantity with its measurements."""

    kind: str
    predicted_s: float
    measured_s: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return statistics.median(self.measured_s)

    @property
    def error(self) -> float:
        return abs(self.predicted_s / self.median_s - 1.0)

    @property
    def spread(self) -> float:
        """Median relative distance of a measurement from the median."""
        return statistics.median(abs(seconds / self.median_s - 1.0) for seconds in self.measured_s)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("cost", nargs="?", help="cost model of meseta calibrate")
    parser.add_argument("num_tasks", type=int, nargs="?", default=10)
    options = parse_arguments(parser)
    check_tests("tests/distributed/test_traffic.py")
    model = CostModel.load(options.cost) if options.cost else calibrated()
    cases = [*operator_cases(model, options.num_tasks), *exchange_cases(model)]
    for kind in dict.fromkeys(case.kind for case in cases):
        of_kind = [case for case in cases if case.kind == kind]
        errors, spread = [case.error for case in of_kind], 100 * statistics.median(case.spread for case in of_kind)
        for metric, share in (("median error", 50), ("95th percentile", 95)):
            value = 100 * float(np.percentile(errors, share))
            record("cost_model", f"{kind}, {len(of_kind)} cases", metric, value, "%", peer="repeats", peer_value=spread)


def calibrated() -> CostModel:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cost.yaml"
        subprocess.run([*MESETA, "calibrate", "--out", str(out)], check=True)
        return CostModel.load(out)


def dealt(task: ShardingTask) -> list[RankShards]:
    """Assign whole tables to random devices with enough memory. Tables without such a device are omitted."""
    random, left = np.random.default_rng(task.seed), [0.95 * DEVICE_BYTES] * NUM_DEVICES
    hands: list[list[tuple[int, tuple[int, int], tuple[int, int]]]] = [[] for _ in left]
    for number, table in enumerate(task.tables):
        size = table.num_rows * (4.0 * table.dim + 4.0) + 2 * 16_384
        for device in random.permutation(NUM_DEVICES):
            if size <= left[device]:
                left[device] -= size
                hands[device].append((number, (0, table.num_rows), (0, table.dim)))
                break
    return [tuple(hand) for hand in hands if hand]


def operator_cases(model: CostModel, num_tasks: int) -> list[Case]:
    tasks = [random_task(seed) for seed in range(FIRST_SEED, FIRST_SEED + num_tasks)]
    ranks = [(task, hand) for task in tasks for hand in dealt(task)]
    cases: list[list[tuple[Case, Case]]] = []
    for task, hand in ranks:
        timings = ShardTimings(task, hand, 1.0, 1.0)
        predicted = [(name, predict_rank(timings, one)) for name, one in judged(model)]
        cases.append([(Case(f"lookup{name}", pair[0]), Case(f"update{name}", pair[1])) for name, pair in predicted])
    arguments = {"memory_bytes": DEVICE_BYTES}
    member = TargetSpec(name="operators", target_class=ShardTimer, arguments=arguments)
    with WorkerGroup(member) as team:
        for _ in range(NUM_ROUNDS):
            for (task, hand), pairs in zip(ranks, cases, strict=True):
                timing = measure_shards(team, task, hand, model.num_threads)
                for lookup, update in pairs:
                    lookup.measured_s.append(timing.lookup_s)
                    update.measured_s.append(timing.update_s)
    return [case for pairs in cases for pair in pairs for case in pair]


def judged(model: CostModel) -> list[tuple[str, CostModel]]:
    """Return the cost model without networks, and with them if it has any."""
    networks = [] if model.neural is None else [(" with networks", model)]
    return [("", replace(model, neural=None)), *networks]


def exchange_cases(model: CostModel) -> list[Case]:
    """Measure collectives of random sizes between two processes."""
    random, nothing = np.random.default_rng(FIRST_SEED), np.zeros(2)
    sizes = np.exp(random.uniform(np.log(8e3), np.log(3e7), NUM_EXCHANGES)).astype(int)
    cases = []
    for kind in ("all_to_all", "all_reduce"):
        for size in sizes.tolist():
            sent = np.full(2, float(size))
            reduces = kind == "all_reduce"
            exchange = Collective(kind, "backward", sent, nothing, sent, nothing, reduces=reduces)
            variants = [Case(f"{kind}{name}", predict_collective(exchange, one)) for name, one in judged(model)]
            cases.append((kind, size, variants))
    member = TargetSpec(
        name="collectives", target_class=CollectiveTimer, arguments={}, num_ranks=2, thread_counts=(model.num_threads,)
    )
    with WorkerGroup(member) as team:
        for _ in range(NUM_ROUNDS):
            for kind, size, variants in cases:
                seconds = team.call("time_collective", kind=kind, num_bytes=size, num_rounds=NUM_CALLS)
                for case in variants:
                    case.measured_s.append(seconds)
    return [case for _, _, variants in cases for case in variants]


if __name__ == "__main__":
    main()
