"""Compare the cost of our plans with other planners, measured with the real operators.

    PEER_PYTHON=/path/to/peers/bin/python python benchmarks/bench_balance.py [--cost cost.yaml] [--tasks N] [--out FILE]

Tasks of 10 to 60 tables (meseta.measure.calibrate.tasks) are placed on four devices of 4 GB by our planner, by
baselines for whole tables (balance.baselines) and by TorchRec. TorchRec plans for GPUs, because it shards no rows on
CPUs, with the bandwidths of our cost model instead of its defaults for V100, and the kernels 'fused' and 'dense'.

The cost of a plan is the measured time of its slowest device for lookup and update, plus predicted collectives. Each
device is measured alone. Ratios are over tasks in which both planners have a plan.

Each task is appended to --out, and a later run continues from there. Without --cost, a cost model is calibrated.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from balance.baselines import BASELINES, baseline_plans
from balance.outcome import BalanceOutcome, ratios_to, read_outcomes, success, versus
from balance.shares import judge, measure_share, why_too_large
from balance.torchrec_plan import Answer, Asked, ask
from bench_cost_model import calibrated
from common.command import make_parser, parse_arguments
from common.processes import check_tests
from peers.installed import find_peers
from record import ROOT, record

from meseta.measure.calibrate.rank_timer import RankTimer
from meseta.measure.calibrate.tasks import ShardingTask, random_task
from meseta.measure.harness.worker_group import TargetSpec, WorkerGroup
from meseta.planner import DoesNotFitError, find_plan
from meseta.planner.cost.loads import WorkloadLoads
from meseta.planner.cost.operators import operator_seconds
from meseta.spec import CostModel, MesetaError, Plan, Topology

TESTS = ("tests/measure/test_balance.py", "tests/planner/test_search.py")
FIRST_SEED = 5000
DEVICE_BYTES = 4_000_000_000
TOPOLOGY = Topology(devices_per_host=4, hbm_bytes=DEVICE_BYTES)
NUM_ROUNDS = 3
OURS, TORCHREC = "ours", "TorchRec"
OTHERS = (*BASELINES, TORCHREC)
ASKED_AT_ONCE = 10
"""Number of tasks that one process of TorchRec plans."""
PEER_LIMIT_S = 600.0


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--cost", type=Path, help="what meseta calibrate measured")
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "balance.jsonl")
    options = parse_arguments(parser)
    check_tests(*TESTS)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    model = cost_model(options.cost, options.out)
    judged_by = hashlib.sha256(repr(model).encode()).hexdigest()[:12]
    peers = find_peers(None, enabled=True)
    has_peer = TORCHREC in peers.available
    if not has_peer:
        print(next(line for line in peers.missing if line.startswith(TORCHREC)))
    outcomes = {outcome.seed: outcome for outcome in read_outcomes(options.out, judged_by)}
    seeds = range(FIRST_SEED, FIRST_SEED + options.tasks)
    needed = OTHERS if has_peer else tuple(BASELINES)
    missing = [seed for seed in seeds if seed not in outcomes or not outcomes[seed].has(needed)]
    arguments = {"memory_bytes": DEVICE_BYTES}
    member = TargetSpec(name="shares", target_class=RankTimer, arguments=arguments, thread_counts=(model.num_threads,))
    with WorkerGroup(member) as team, options.out.open("a") as file:
        for start in range(0, len(missing), ASKED_AT_ONCE):
            tasks = [random_task(seed) for seed in missing[start : start + ASKED_AT_ONCE]]
            answers: list[Answer | str | None] = [None] * len(tasks)
            if has_peer:
                answers = [*ask([asked(task, model) for task in tasks], peers.python, PEER_LIMIT_S)]
            for task, answer in zip(tasks, answers, strict=True):
                begin_s = time.perf_counter()
                outcome = judged(team, task, answer, model, judged_by)
                outcomes[task.seed] = outcome
                file.write(outcome.to_json() + "\n")
                file.flush()
                done = options.tasks - len(missing) + missing.index(task.seed) + 1
                tell(outcome, task, f"{done}/{options.tasks}", time.perf_counter() - begin_s)
    report([outcomes[seed] for seed in seeds])


def cost_model(cost_file: Path | None, out: Path) -> CostModel:
    """Load the given cost model, or calibrate one and store it next to `--out`."""
    kept = out.with_suffix(".cost.yaml")
    if cost_file is None and not kept.exists():
        calibrated().save(kept)
    return CostModel.load(cost_file or kept)


def asked(task: ShardingTask, model: CostModel) -> Asked:
    """Return TorchRec's input, with the bandwidths of our cost model."""
    workload = task.workload()
    loads = WorkloadLoads(workload)
    whole = loads.shard_loads(loads.whole_tables())
    lookup_s, _ = operator_seconds(model, whole)
    per_ms = {
        "intra_host_bw": model.exchange.inside_all_to_all.bytes_per_s / 1e3,
        "hbm_mem_bw": float((whole.num_ids * whole.row_bytes).sum() / lookup_s.sum()) / 1e3,
    }
    return Asked(workload=workload, topology=TOPOLOGY, bandwidths=per_ms, kernels=("fused", "dense"))


def judged(
    team: WorkerGroup, task: ShardingTask, answer: Answer | str | None, model: CostModel, judged_by: str
) -> BalanceOutcome:
    workload = task.workload()
    candidates: dict[str, Plan | str] = {}
    try:
        candidates[OURS] = find_plan(workload, TOPOLOGY, model).plan
    except DoesNotFitError as error:
        candidates[OURS] = error.certificate
    for name, plan in baseline_plans(workload, TOPOLOGY, model, task.seed).items():
        candidates[name] = plan or "no placement of whole tables fits"
    if answer is not None:
        candidates[TORCHREC] = answer if isinstance(answer, str) else answer.plan
    plans: dict[str, Plan] = {}
    failures: dict[str, str] = {}
    for name, plan in candidates.items():
        why = plan if isinstance(plan, str) else why_unfit(plan, task, model)
        if why is None and isinstance(plan, Plan):
            plans[name] = plan
        else:
            failures[name] = str(why)
    time_share = partial(measure_share, team, task, num_ranks=TOPOLOGY.num_ranks, num_threads=model.num_threads)
    costs = judge(plans, workload, TOPOLOGY, model, time_share, NUM_ROUNDS)
    return BalanceOutcome(seed=task.seed, judged_by=judged_by, costs=costs, failures=failures)


def why_unfit(plan: Plan, task: ShardingTask, model: CostModel) -> str | None:
    """Return why a plan cannot run on the devices, or `None`."""
    workload = task.workload()
    try:
        plan.check(workload.tables)
    except MesetaError as error:
        return str(error)
    return why_too_large(plan, workload, TOPOLOGY, model)


def tell(outcome: BalanceOutcome, task: ShardingTask, where: str, seconds: float) -> None:
    steps = [
        f"{name} {1e3 * outcome.costs[name].step_s:.2f}" if name in outcome.costs else f"{name} -"
        for name in (OURS, *OTHERS)
    ]
    print(f"{where}  {len(task.tables)} tables, {seconds:.0f} s; ms: {', '.join(steps)}", flush=True)
    for name in (OURS, TORCHREC):
        if name in outcome.failures:
            print(f"    {name}: {outcome.failures[name]}", flush=True)


def report(outcomes: Sequence[BalanceOutcome]) -> None:
    """Print and record our cost relative to each planner, how often it is lower, and the success rates."""
    packages = ("torch", "numpy")
    for name, others in (*((other, (other,)) for other in OTHERS), ("the best baseline", OTHERS)):
        ratios = ratios_to(outcomes, OURS, others)
        if not ratios:
            print(f"balance: no task in which {OURS} and {name} have plans")
            continue
        comparison, our_success, their_success = versus(ratios), success(outcomes, (OURS,)), success(outcomes, others)
        case = f"{comparison.num_tasks} tasks of {len(outcomes)}, {name}"
        for metric, value, unit, peer, beside in (
            ("mean cost", comparison.mean, "of theirs", name, 1.0),
            ("worst cost", comparison.worst, "of theirs", name, 1.0),
            ("won", 100 * comparison.wins, "%", "even odds", 50.0),
            ("success", 100 * our_success, "%", name, 100 * their_success),
        ):
            record("balance", case, metric, value, unit, peer=peer, peer_value=beside, packages=packages)


if __name__ == "__main__":
    main()
