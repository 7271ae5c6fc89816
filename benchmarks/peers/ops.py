"""Targets of bench_ops.py for one workload, and comparison of their rates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from record import PeerComparison

from meseta.measure.harness.interleaved import TimingOptions, TimingResult, run_interleaved
from meseta.measure.harness.worker_group import TargetSpec, WorkerGroup
from meseta.measure.synthetic_batches import LookupWorkload
from meseta.spec import MesetaError
from peers.correctness import OperatorCheck
from peers.installed import IMPORT_PATH, TUNED_MALLOC, Peers
from peers.ops_meseta import MesetaOperators
from peers.ops_peers import FbgemmOperators, PyTorchOperators, TorchRecOperators
from peers.workloads import shrink

BASE_OPTIMIZER = "rowwise_adagrad"
"""Row optimizer with which the steps of all other optimizers are compared."""
MAX_STEP_RATIO = 1.3
"""Upper limit for `OpsResult.step_ratio`. It is printed with the results."""
PEER_OPTIMIZERS = {
    "rowwise_adagrad": (("FBGEMM", "float32"), ("TorchRec", "float32"), ("FBGEMM", "float16")),
    "sgd": (("PyTorch", "float32"), ("FBGEMM", "float32"), ("TorchRec", "float32"), ("FBGEMM", "float16")),
    "adagrad": (("PyTorch", "float32"), ("FBGEMM", "float32"), ("TorchRec", "float32")),
    "adam": (("PyTorch", "float32"),),
}
"""Peers that support each optimizer on CPUs, with the dtype of their rows."""
_PEER_TARGETS = {"FBGEMM": FbgemmOperators, "TorchRec": TorchRecOperators, "PyTorch": PyTorchOperators}
_NUM_STATES = {
    "sgd": 0,
    "rowwise_adagrad": 0,
    "adagrad": 1,
    "rmsprop": 1,
    "rowwise_adam": 1,
    "lars": 1,
    "sgd_momentum": 1,
}
_PROCESS_BYTES = 0.8e9


@dataclass(frozen=True)
class OperatorMeasurement:
    """Rates of one target with one number of threads. A value is `None` if it was not measured."""

    target: TargetSpec
    num_threads: int
    lookups_per_s: float | None
    """Ids per second in forward passes of the module."""
    operator_lookups_per_s: float | None
    """Ids per second of the lookup operator alone."""
    trained_lookups_per_s: float | None
    step_s: float | None
    gather_limit_per_s: float | None
    """Maximum rate at which memory delivers rows of this dtype, in rows per second."""
    bytes_per_id: float
    is_noisy: bool
    update_bytes: float | None
    """Bytes that an update reads and writes per unique row. Known for Meseta only."""


@dataclass(frozen=True)
class OpsResult:
    """Measurements of Meseta and all peers for one workload and optimizer."""

    workload: LookupWorkload
    optimizer: str
    measurements: tuple[OperatorMeasurement, ...]
    timing_result: TimingResult

    def find(self, name: str, variant: tuple[str, str], num_threads: int) -> OperatorMeasurement | None:
        """Return the measurement of a target with `num_threads` threads, or `None` if it was not measured."""
        for line in self.measurements:
            if (line.target.name, line.target.variant, line.num_threads) == (name, variant, num_threads):
                return line
        return None

    def baseline(self, line: OperatorMeasurement) -> OperatorMeasurement | None:
        """Return the measurement of Meseta with which `line` is compared.

        A peer is compared with Meseta in the same dtype. Meseta is compared with itself in float32. If float32 was not
        measured, the result is `line`.
        """
        optimizer, dtype = line.target.variant
        if line.target.name != "ours":
            return self.find("ours", (optimizer, dtype), line.num_threads)
        return self.find("ours", (optimizer, "float32"), line.num_threads) or line

    def single_thread(self, line: OperatorMeasurement) -> OperatorMeasurement | None:
        """Return the measurement of the same target with one thread. `None` for peers, and if `line` has one thread."""
        optimizer, dtype = line.target.variant
        several = line.target.name == "ours" and line.num_threads > 1
        return self.find("ours", (optimizer, dtype), 1) if several else None

    def step_ratio(self, line: OperatorMeasurement) -> float | None:
        """Return the step time relative to the time expected from the number of bytes that an update touches.

        The expected time is that of row-wise Adagrad, scaled by the bytes per row. `None` for row-wise Adagrad and for
        peers.
        """
        optimizer, dtype = line.target.variant
        base = self.find("ours", (BASE_OPTIMIZER, dtype), line.num_threads)
        if line.target.name != "ours" or optimizer == BASE_OPTIMIZER or base is None:
            return None
        if not (line.step_s and base.step_s and line.update_bytes and base.update_bytes):
            return None
        return line.step_s / (base.step_s * line.update_bytes / base.update_bytes)


def check_operators(traffics: Sequence[LookupWorkload], variants: Sequence[tuple[str, str]]) -> None:
    """Compare Meseta's lookups and train steps with plain torch in float64, on the same tables with fewer rows.

    `variants` are pairs of an optimizer and a dtype. Raises MesetaError if results differ.
    """
    check = TargetSpec(name="check", target_class=OperatorCheck, arguments={}, import_path=IMPORT_PATH)
    wrong: list[str] = []
    with WorkerGroup(check) as team:
        for traffic in traffics:
            shape = dataclasses.asdict(shrink(traffic, max_rows=500, max_batch=256, max_tables=8))
            for optimizer, dtype in variants:
                lines = team.call("check", workload=shape, optimizer=optimizer, dtype=dtype)
                wrong += [f"{optimizer} {dtype}: {line}" for line in lines]
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise MesetaError(
            f"bench: Meseta's operators deviate from the reference, so nothing is measured: "
            f"{'; '.join(wrong[:3])}{more}; run the tests of src/meseta/ops"
        )


def contests(
    traffic: LookupWorkload,
    optimizers: Sequence[str],
    dtypes: Sequence[str] | None,
    threads: tuple[int, ...],
    peers: Peers,
) -> Iterator[tuple[str, list[TargetSpec]]]:
    """Yield (optimizer, targets to compare) for each optimizer on one workload.

    If `dtypes` is `None`, row-wise Adagrad runs with all dtypes of rows, and the other optimizers with float32.
    """
    for optimizer in optimizers:
        row_dtypes = dtypes or (("float32", "float16", "bfloat16") if optimizer == BASE_OPTIMIZER else ("float32",))
        variants = [] if optimizer == BASE_OPTIMIZER else [(BASE_OPTIMIZER, dtype) for dtype in row_dtypes]
        members = [
            _meseta_target(traffic, variant, threads) for variant in [*variants, *((optimizer, d) for d in row_dtypes)]
        ]
        members += [
            _peer_target(traffic, name, (optimizer, dtype), threads, peers)
            for name, dtype in PEER_OPTIMIZERS.get(optimizer, ())
            if name in peers.available and dtype in row_dtypes
        ]
        yield optimizer, members


def measure_operators(
    traffic: LookupWorkload,
    optimizer: str,
    members: Sequence[TargetSpec],
    timing: TimingOptions,
    log: Callable[[str], None],
) -> OpsResult:
    outcome = run_interleaved(members, timing, lambda text: log(f"{traffic.name}: {text}"))
    lines = []
    for member in members:
        if member.title in outcome.failures:
            continue
        lines += [_measurement(member, threads, outcome, members) for threads in member.thread_counts]
    return OpsResult(workload=traffic, optimizer=optimizer, measurements=tuple(lines), timing_result=outcome)


def comparisons(result: OpsResult) -> list[PeerComparison]:
    """Return comparisons of Meseta with peers, the gather limit, one thread and row-wise Adagrad."""
    pairs = []
    for line in result.measurements:
        base = result.baseline(line)
        if base is None:
            continue
        ours, other = (line, base) if line.target.name == "ours" else (base, line)
        threads = f"{line.num_threads} thread{'s' * (line.num_threads > 1)}"
        for metric, value, unit, peer, peer_value in _metric_pairs(result, line, ours, other):
            if not value or not peer_value:
                continue
            comparison = PeerComparison(
                benchmark="ops",
                case=f"{result.workload.name} {threads} {' '.join(ours.target.variant)}",
                metric=metric,
                value=value,
                unit=unit,
                peer=peer,
                peer_value=peer_value,
                versions={**_versions(result, ours), **_versions(result, other)},
            )
            pairs.append(comparison)
    return pairs


_MetricPair = tuple[str, float | None, str, str, float | None]


def _metric_pairs(
    result: OpsResult, line: OperatorMeasurement, ours: OperatorMeasurement, other: OperatorMeasurement
) -> Iterator[_MetricPair]:
    """Yield (metric, value, unit, peer, value of the peer) for one measurement. Values are `None` if not measured."""
    rate = "lookups/s"
    if ours is not other:
        yield "lookup", ours.lookups_per_s, rate, other.target.title, other.lookups_per_s
        yield "train", ours.trained_lookups_per_s, rate, other.target.title, other.trained_lookups_per_s
    if line.target.name != "ours":
        return
    yield "lookup", line.lookups_per_s, rate, "gather limit", line.gather_limit_per_s
    yield "bare operator", line.operator_lookups_per_s, rate, "gather limit", line.gather_limit_per_s
    alone = result.single_thread(line)
    if alone is not None:
        yield "lookup", line.lookups_per_s, rate, "1 thread", alone.lookups_per_s
        yield "train", line.trained_lookups_per_s, rate, "1 thread", alone.trained_lookups_per_s
        yield "gather limit", line.gather_limit_per_s, rate, "1 thread", alone.gather_limit_per_s
    share = result.step_ratio(line)
    if share is not None and line.step_s is not None:
        yield "train step", 1e3 * line.step_s, "ms", f"bytes x {BASE_OPTIMIZER}'s step", 1e3 * line.step_s / share


def _versions(result: OpsResult, line: OperatorMeasurement) -> dict[str, str]:
    versions: dict[str, str] = result.timing_result.facts[line.target.title]["versions"]
    return versions


def _measurement(
    member: TargetSpec, threads: int, outcome: TimingResult, members: Sequence[TargetSpec]
) -> OperatorMeasurement:
    facts = outcome.facts[member.title]
    seconds = {action: outcome.seconds(member, action, threads) for action in ("lookup", "operator", "step")}

    def rate(action: str) -> float | None:
        spent_s = seconds[action]
        return facts["ids_per_call"][action] / spent_s if spent_s else None

    limit, bytes_per_id = None, 0.0
    # Only processes of Meseta measure the limit. It is equal for tables of the same shape and dtype.
    for other in members:
        facts_of_other = outcome.facts.get(other.title, {})
        spent_s = outcome.seconds(other, "limit", threads)
        if (
            other.name == "ours"
            and other.variant[1] == member.variant[1]
            and spent_s
            and "bytes_per_id" in facts_of_other
        ):
            limit, bytes_per_id = facts_of_other["ids_per_call"]["limit"] / spent_s, facts_of_other["bytes_per_id"]
            if other is member or other.variant == member.variant:
                break
    timings = [timing for key, timing in outcome.timings.items() if key[0] == member.title and key[2] == threads]
    return OperatorMeasurement(
        target=member,
        num_threads=threads,
        lookups_per_s=rate("lookup"),
        operator_lookups_per_s=rate("operator"),
        trained_lookups_per_s=rate("step"),
        step_s=seconds["step"],
        gather_limit_per_s=limit,
        bytes_per_id=bytes_per_id,
        is_noisy=any(timing.is_noisy for timing in timings),
        update_bytes=facts.get("update_bytes"),
    )


def _meseta_target(traffic: LookupWorkload, variant: tuple[str, str], threads: tuple[int, ...]) -> TargetSpec:
    optimizer, dtype = variant
    element_bytes = {"float64": 8, "float32": 4}.get(dtype, 2)
    states = _NUM_STATES.get(optimizer, 2)
    return TargetSpec(
        name="ours",
        variant=variant,
        target_class=MesetaOperators,
        arguments={"workload": dataclasses.asdict(traffic), "optimizer": optimizer, "dtype": dtype},
        import_path=IMPORT_PATH,
        thread_counts=threads,
        memory_bytes=_PROCESS_BYTES + traffic.num_elements * (element_bytes + 4 * states),
    )


def _peer_target(
    traffic: LookupWorkload, name: str, variant: tuple[str, str], threads: tuple[int, ...], peers: Peers
) -> TargetSpec:
    ours = _meseta_target(traffic, variant, threads)
    return dataclasses.replace(
        ours,
        name=name,
        target_class=_PEER_TARGETS[name],
        environment=TUNED_MALLOC,
        # PyTorch runs in this interpreter, so that both use the same version of torch.
        python=ours.python if name == "PyTorch" else peers.python,
    )
