"""One calibration: what is measured in which order, what is fitted to it, and how well the fit predicts the rest."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from typing import Any

import numpy as np

from meseta.machine.kernel import KernelFiles, free_memory_bytes, read_cgroup_limits
from meseta.measure.calibrate.collectives import CollectiveTimer
from meseta.measure.calibrate.combinations import OPTIMIZERS, random_combination
from meseta.measure.calibrate.fit import Floats, fit_relative, relative_errors
from meseta.measure.calibrate.rank_timer import RankTimer
from meseta.measure.calibrate.staged import STAGED_COSTS, measure_staged, with_staged
from meseta.measure.calibrate.tasks import ShardingTask, TaskShard
from meseta.measure.cpu_usage import read_cpu_time
from meseta.measure.harness.worker_group import TargetSpec, WorkerGroup
from meseta.planner import documented_cost_model
from meseta.planner.cost.loads import ShardArrays, ShardLoads, WorkloadLoads
from meseta.planner.cost.operators import lookup_terms, update_terms
from meseta.spec import CostModel, Link
from meseta.spec.codecs import CODECS
from meseta.spec.cost_model import STOCHASTIC_SUFFIX, DenseCost, ExchangeCost, HardwareCacheCost, LookupCost, UpdateCost

MAX_MEMORY_BYTES = 3_000_000_000
"""Rows and state of the largest combination; less where the machine has less than four times as much free."""
CACHE_BYTES_CANDIDATES = (1e6, 2e6, 4e6, 8e6, 16e6, 32e6)
"""Sizes of the cache that are tried."""
MESSAGE_BYTES = (4_096, 32_768, 262_144, 1_048_576, 4_194_304, 16_777_216)
HELD_OUT_MESSAGE_BYTES = (11_000, 90_000, 520_000, 2_000_000, 8_000_000, 12_000_000)
"""Sizes that links are judged by."""
NUM_ROUNDS = 3
"""Measurements of a collective, in turns, whose median counts."""
NUM_CALLS = 20
"""Calls of one measurement. The system now and then lets a process wait for milliseconds until it goes on."""
MATMUL_SHAPES = ((256, 512, 256), (512, 512, 512), (2048, 512, 256), (2048, 1024, 1024))
MIN_COMBINATIONS = 50
"""Combinations that a fit should have; where the machine is slow or busy, up to 30 % more time is spent on them."""
MAX_BACKGROUND_LOAD = 0.2
"""A measurement during which others kept more processors busy is repeated."""
MAX_TRIES = 2
"""Of such a measurement; the fastest counts."""
HELD_OUT_STRIDE = 8
"""Each so many-th measurement is kept from the fit, to judge it by; these are repeated, and their medians count."""
_REPEAT_SHARE = 0.25
"""Share of the time that repeating takes."""
MIN_REPEATS = 2


@dataclass(frozen=True)
class ErrorStatistics:
    """Relative errors of predictions of what the fit has not seen."""

    median: float
    p95: float
    """The 95th percentile."""
    count: int
    repeat_spread: float
    """Median distance of repeated measurements from their median."""


@dataclass(frozen=True)
class Calibration:
    """A fitted model and how good it is."""

    cost_model: CostModel
    errors: Mapping[str, ErrorStatistics]
    """Of 'lookup', 'update', 'all_to_all', 'all_reduce'."""
    background_load: float
    """Processors that other programs kept busy meanwhile, on average."""
    elapsed_s: float
    """That it took."""
    timings: Sequence[ShardTimings] = ()
    """Combinations of tables, each eighth kept from the fit."""
    held_out_rounds: Sequence[Sequence[ShardTimings]] = ()
    """All measurements of those that were kept."""


RankShards = tuple[TaskShard, ...]
"""What one rank holds."""


@dataclass(frozen=True)
class ShardTimings:
    """What one rank's pieces took."""

    task: ShardingTask
    shards: RankShards
    lookup_s: float
    update_s: float

    @cached_property
    def workload(self) -> WorkloadLoads:
        """Of the task."""
        return WorkloadLoads(self.task.workload())


def calibrate(num_threads: int, num_ranks: int, budget_s: float, log: Callable[[str, float], None]) -> Calibration:
    """Measure collectives between `num_ranks` processes, matrix products and operators with `num_threads` threads,
    until `budget_s` seconds are over, and fit. `log` is told what happens, and the share that is done.

    Raises MesetaError where a process fails."""
    clock, before = _TimeBudget(time.perf_counter(), budget_s, log), read_cpu_time([os.getpid()])
    model = replace(documented_cost_model("cpu"), num_threads=num_threads)
    source = f"meseta calibrate, {date.today().isoformat()}, {num_threads} threads a rank"
    clock.report("collectives")
    exchange, errors = _measure_exchange(num_ranks, num_threads, source, model.exchange)
    memory_bytes = _memory_bytes()
    member = TargetSpec(
        name="operators",
        target_class=RankTimer,
        arguments={"memory_bytes": memory_bytes},
        thread_counts=(num_threads,),
    )
    clock.report("matrix products")
    with WorkerGroup(member) as team:
        dense, exchange = _measure_compute(team, num_threads, source, exchange)
        staged = measure_staged(team, num_threads, 0.95 * memory_bytes)
        measured, rounds = _measure_operators(team, num_threads, memory_bytes, clock)
    log("fit", 1.0)
    lookup, update, cache, more = fit_operators(measured, rounds, source)
    update = with_staged(update, staged)
    elapsed_s = clock.elapsed_s
    others = read_cpu_time([os.getpid()]).background_load_since(before, elapsed_s) - num_threads
    return Calibration(
        cost_model=replace(model, lookup=lookup, update=update, cache=cache, dense=dense, exchange=exchange),
        errors={**more, **errors},
        background_load=max(others, 0.0),
        elapsed_s=elapsed_s,
        timings=measured,
        held_out_rounds=rounds,
    )


@dataclass(frozen=True)
class _TimeBudget:
    """Time that a calibration may take."""

    start_s: float
    budget_s: float
    log: Callable[[str, float], None]

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.start_s

    def report(self, text: str) -> None:
        self.log(text, self.elapsed_s / self.budget_s)


def _measure_operators(
    team: WorkerGroup, num_threads: int, memory_bytes: int, clock: _TimeBudget
) -> tuple[list[ShardTimings], list[list[ShardTimings]]]:
    """Random combinations, and all measurements of those that are kept from the fit."""
    measured: list[ShardTimings] = []
    while _needs_more_combinations(clock.elapsed_s, (1.0 - _REPEAT_SHARE) * clock.budget_s, len(measured)):
        clock.report(f"operators, {len(measured)} combinations")
        # Half of them in little memory, where many have room for their rows in a cache.
        task = random_combination(len(measured), 0.95 * memory_bytes * (1.0 if len(measured) % 2 else 0.4))
        pieces = tuple((n, (0, own.num_rows), (0, own.dim)) for n, own in enumerate(task.tables))
        measured.append(measure_shards(team, task, pieces, num_threads))
    rounds = [measured[HELD_OUT_STRIDE - 1 :: HELD_OUT_STRIDE]]
    while len(rounds) <= MIN_REPEATS or clock.elapsed_s < clock.budget_s:
        clock.report(f"operators, repeat {len(rounds)}")
        rounds.append([measure_shards(team, own.task, own.shards, num_threads) for own in rounds[0]])
    return measured, rounds


def _memory_bytes() -> int:
    system = KernelFiles()
    free = free_memory_bytes(system, read_cgroup_limits(system))
    return MAX_MEMORY_BYTES if free is None else min(MAX_MEMORY_BYTES, free // 4)


def _needs_more_combinations(elapsed_s: float, budget_s: float, num_measured: int) -> bool:
    """Whether to measure one more combination: time is left, or a little more is taken since few are known."""
    if elapsed_s < budget_s or num_measured < 2 * HELD_OUT_STRIDE:
        return True
    return num_measured < MIN_COMBINATIONS and elapsed_s < 1.3 * budget_s


def rank_loads(measured: ShardTimings, cache_bytes: float) -> ShardLoads:
    """What a rank with these pieces has to do."""
    table, rows, columns = (np.array(part) for part in zip(*measured.shards, strict=True))
    pieces = ShardArrays.from_values(table, (rows[:, 0], rows[:, 1]), (columns[:, 0], columns[:, 1]))
    held = measured.workload.hardware_cached_samples(pieces, np.zeros(len(table), np.int64), 1, cache_bytes)
    rank_bytes = float(measured.workload.stored_bytes(pieces).sum())
    return measured.workload.shard_loads(pieces, hardware_cached_samples=float(held[0]), rank_bytes=rank_bytes)


def fit_operators(
    measured: Sequence[ShardTimings], rounds: Sequence[Sequence[ShardTimings]], source: str
) -> tuple[LookupCost, UpdateCost, HardwareCacheCost, dict[str, ErrorStatistics]]:
    """Constants of lookup and update, and their errors on each eighth measurement, which the fit has not seen and which
    `rounds` repeat."""
    seconds = np.array([(own.lookup_s, own.update_s) for own in measured]).T
    unseen = np.arange(len(measured)) % HELD_OUT_STRIDE == HELD_OUT_STRIDE - 1
    best: tuple[float, float, list[dict[str, float]], list[Floats]] | None = None
    for cache_bytes in CACHE_BYTES_CANDIDATES:
        loads = [rank_loads(own, cache_bytes) for own in measured]
        found, predicted = [], []
        for took, terms in zip(seconds, (lookup_terms, update_terms), strict=True):
            totals = [{name: float(term.sum()) for name, term in terms(own).items()} for own in loads]
            names = [*dict.fromkeys(name for total in totals for name in total if name not in STAGED_COSTS)]
            matrix = np.array([[1.0, *(total.get(name, 0.0) for name in names)] for total in totals])
            constants = fit_relative(matrix[~unseen], took[~unseen])
            found.append(dict(zip(["call_s", *names], constants.tolist(), strict=True)))
            predicted.append(matrix @ constants)
        seen = [relative_errors(own[~unseen], took[~unseen]) for own, took in zip(predicted, seconds, strict=True)]
        total = float(sum(error.mean() for error in seen))
        if best is None or total < best[0]:
            best = (total, cache_bytes, found, predicted)
    assert best is not None
    _, cache_bytes, (lookup, update), predicted = best
    numbers = {name: update.pop(name) for name in OPTIMIZERS if name in update}
    again = np.array([[(own.lookup_s, own.update_s) for own in part] for part in rounds])
    errors = {
        name: error_statistics(own[unseen], again[:, :, index])
        for index, (name, own) in enumerate(zip(("lookup", "update"), predicted, strict=True))
    }
    return (
        LookupCost(**lookup, measured=True, source=source),
        UpdateCost(**update, number_s=numbers, measured=True, source=source),
        HardwareCacheCost(cache_bytes=cache_bytes, measured=True, source=source),
        errors,
    )


def error_statistics(predicted: Floats, measured: Floats) -> ErrorStatistics:
    """Median and 95th percentile of the relative errors of predictions [n] of the medians of rounds [r, n]."""
    if not predicted.size:
        return ErrorStatistics(0.0, 0.0, 0, 0.0)
    medians = np.median(measured, axis=0)
    errors, spread = relative_errors(predicted, medians), relative_errors(measured, medians)
    return ErrorStatistics(
        float(np.median(errors)), float(np.percentile(errors, 95)), errors.size, float(np.median(spread))
    )


def measure_shards(team: WorkerGroup, task: ShardingTask, pieces: RankShards, num_threads: int) -> ShardTimings:
    """Time the pieces of one rank, again where others disturb it."""
    arguments = {"task": task.to_dict(), "shards": pieces, "num_rounds": 1, "threads": num_threads}
    return ShardTimings(task, pieces, *measure_uncontended(lambda: team.call("time_shards", **arguments)))


def measure_uncontended(measure: Callable[[], list[float]]) -> tuple[float, float]:
    """Seconds of (a lookup, an update) by what gives both, and the processors that others kept busy meanwhile; measured
    again where these were many."""
    fastest = (float("inf"), float("inf"))
    for _ in range(MAX_TRIES):
        lookup_s, update_s, others = measure()
        fastest = (min(fastest[0], lookup_s), min(fastest[1], update_s))
        if others <= MAX_BACKGROUND_LOAD:
            break
    return fastest


def _measure_exchange(
    num_ranks: int, num_threads: int, source: str, known: ExchangeCost
) -> tuple[ExchangeCost, dict[str, ErrorStatistics]]:
    member = TargetSpec(
        name="collectives", target_class=CollectiveTimer, arguments={}, num_ranks=num_ranks,
        thread_counts=(num_threads,),
    )  # fmt: skip
    links: dict[str, Link] = {}
    errors: dict[str, ErrorStatistics] = {}
    with WorkerGroup(member) as team:
        peer_s = _peer_seconds(team, num_ranks)
        for kind, share in (("all_to_all", 1.0), ("all_reduce", 2 * (num_ranks - 1) / num_ranks)):
            sizes = np.array(MESSAGE_BYTES + HELD_OUT_MESSAGE_BYTES)
            rounds = np.array([
                [team.call("time_collective", kind=kind, num_bytes=int(size), num_rounds=NUM_CALLS) for size in sizes]
                for _ in range(NUM_ROUNDS)
            ])  # fmt: skip
            num_bytes, seen = sizes * share, np.arange(len(sizes)) < len(MESSAGE_BYTES)
            link = fit_link(num_bytes[seen], np.median(rounds, axis=0)[seen])
            phases = 2 if kind == "all_reduce" else 1
            links[kind] = split_peer_latency(
                link, known.inside_all_to_all.peer_s if peer_s is None else phases * peer_s, num_ranks
            )
            errors[kind] = error_statistics(link.latency_s + num_bytes[~seen] / link.bytes_per_s, rounds[:, ~seen])
    exchange = replace(
        known, inside_all_to_all=links["all_to_all"], inside_all_reduce=links["all_reduce"], measured=True,
        source=f"{source}; gloo between {num_ranks} processes; between hosts: {known.source}",
    )  # fmt: skip
    return exchange, errors


def _peer_seconds(team: WorkerGroup, num_ranks: int) -> float | None:
    """What one more rank takes in an all-to-all of few bytes: among all ranks, over among two; None of two alone."""
    if num_ranks == 2:
        return None
    rounds = [
        [team.call("time_small_all_to_all", num_peers=peers, num_rounds=NUM_CALLS) for peers in (1, num_ranks - 1)]
        for _ in range(NUM_ROUNDS)
    ]
    few, many = np.median(np.array(rounds), axis=0)
    return max(float(many - few) / (num_ranks - 2), 0.0)


def split_peer_latency(link: Link, peer_s: float, num_ranks: int) -> Link:
    """A link that was fitted between so many ranks, with what peers take apart from its latency: half of it at most."""
    peer_s = min(peer_s, link.latency_s / (2 * (num_ranks - 1)))
    return replace(link, latency_s=link.latency_s - (num_ranks - 1) * peer_s, peer_s=peer_s)


def fit_link(sizes: Floats, seconds: Floats) -> Link:
    """Latency and bandwidth from the bytes that each rank sends [n]."""
    latency_s, byte_s = fit_relative(np.stack([np.ones_like(sizes), sizes], axis=1), seconds)
    return Link(latency_s=float(latency_s), bytes_per_s=1.0 / max(float(byte_s), 1e-15))


def _measure_compute(
    team: WorkerGroup, num_threads: int, source: str, exchange: ExchangeCost
) -> tuple[DenseCost, ExchangeCost]:
    def ask(method: str, **arguments: Any) -> float:
        return float(team.call(method, **arguments, num_rounds=9, threads=num_threads))

    rates: dict[str, float] = {}
    for dtype in ("float32", "bfloat16"):
        flops = np.array([2.0 * m * k * n for m, k, n in MATMUL_SHAPES])
        seconds = np.array([ask("time_matmul", dtype=dtype, shape=list(shape)) for shape in MATMUL_SHAPES])
        rates[dtype] = float(np.median(flops / seconds))
    copy_byte_s = ask("time_copy", num_bytes=1 << 22) / (1 << 22)
    bucket_id_s = ask("time_bucketize", num_ids=160_000) / 160_000
    dense = DenseCost(
        float32_flops_per_s=rates["float32"], bfloat16_flops_per_s=rates["bfloat16"],
        call_s=documented_cost_model("cpu").dense.call_s, measured=True, source=source,
    )  # fmt: skip
    encode, decode = _measure_codecs(team, num_threads, copy_byte_s, exchange)
    exchange = replace(exchange, encode_number_s=encode, decode_number_s=decode)
    return dense, replace(exchange, copy_byte_s=copy_byte_s, bucket_id_s=bucket_id_s)


def _measure_codecs(
    team: WorkerGroup, num_threads: int, copy_byte_s: float, known: ExchangeCost
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of a number that each codec writes, and reads, beside the copy of its bytes; documented ones where a
    build has no codecs."""
    encode, decode = dict(known.encode_number_s), dict(known.decode_number_s)
    for name, codec in CODECS.items():
        for is_drawn in (False, True) if codec.scale_bytes else (False,) if not codec.is_lossless else ():
            seconds = team.call("time_codec", codec=name, stochastic=is_drawn, num_rounds=9, threads=num_threads)
            if seconds:
                write_s, read_s = (max(spent - codec.mean_element_bytes * copy_byte_s, 0.0) for spent in seconds)
                encode[name + STOCHASTIC_SUFFIX * is_drawn] = write_s
                decode[name] = read_s
    return encode, decode
