"""Random combinations of tables on one rank, to which the cost model is fitted."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from typing import Any

import numpy as np

from meseta.measure.calibrate.collectives import CollectiveTimer
from meseta.measure.calibrate.networks import Floats, fit_relative, nnls, relative_errors
from meseta.measure.calibrate.rank_timer import RankTimer
from meseta.measure.calibrate.tasks import (
    DIMS,
    ID_DISTRIBUTIONS,
    MIN_ROWS,
    ShardingTask,
    TaskShard,
    TaskTable,
    random_table,
)
from meseta.measure.harness.worker_group import TargetSpec, WorkerGroup
from meseta.measure.threads import read_cpu_time
from meseta.planner import documented_cost_model
from meseta.planner.cost.loads import ShardArrays, ShardLoads, WorkloadLoads, shard_storage_bytes
from meseta.planner.cost.operators import lookup_terms, update_terms
from meseta.spec import CostModel, Link, OptimizerSpec, TableSpec
from meseta.spec.codecs import CODECS
from meseta.spec.cost_model import STOCHASTIC_SUFFIX, DenseCost, ExchangeCost, HardwareCacheCost, LookupCost, UpdateCost
from meseta.system.kernel import KernelFiles, free_memory_bytes, read_cgroup_limits

OPTIMIZERS = ("rowwise_adagrad", "sgd", "adagrad", "adam")
DTYPES = ("float32", "float16", "bfloat16")
BATCH_SIZES = (512, 1024, 2048, 4096)
MAX_TABLES = 24
# With this number of ids, one measurement takes about 0.1 s.
MAX_BATCH_IDS = 300_000
"""Maximum number of ids in a batch with several tables."""


def random_combination(seed: int, memory_bytes: float) -> ShardingTask:
    """Return the random combination of a seed: 1 to 24 tables (log-uniform) that fit in `memory_bytes` with states."""
    random = np.random.default_rng([7, seed])
    # Most models use float32 with row-wise Adagrad, so two thirds of the combinations do.
    plain = random.random() < 0.67
    dtype = "float32" if plain else str(random.choice(DTYPES))
    optimizer = OPTIMIZERS[0] if plain else str(random.choice(OPTIMIZERS))
    # In half of the combinations all tables have one dimension, so that a fit can separate costs per row and per byte.
    dims = [int(random.choice(DIMS))] if random.random() < 0.5 else list(DIMS)
    batch_size, distribution = int(random.choice(BATCH_SIZES)), int(random.integers(len(ID_DISTRIBUTIONS)))
    number = round(float(np.exp(random.uniform(0.0, np.log(MAX_TABLES)))))
    tables: list[TaskTable] = []
    left, ids = memory_bytes, 0.0
    for _ in range(number):
        table = random_table(random, dims, distribution)
        spec = TableSpec(
            name="t", num_embeddings=table.num_rows, embedding_dim=table.dim, optimizer=OptimizerSpec(name=optimizer)
        )
        size = shard_storage_bytes(spec, spec.num_embeddings, spec.embedding_dim)
        if size > left or (tables and ids + table.pooling_factor * batch_size > MAX_BATCH_IDS):
            continue
        left, ids = left - size, ids + table.pooling_factor * batch_size
        tables.append(table)
    if not tables:
        tables = [TaskTable(num_rows=int(MIN_ROWS), dim=dims[0], pooling_factor=1.0, distribution_index=distribution)]
    return ShardingTask(seed=seed, tables=tuple(tables), batch_size=batch_size, dtype=dtype, optimizer=optimizer)


TABLE_SHAPES = ((1_000_000, 64, 10.0), (500_000, 128, 3.0), (100_000, 32, 20.0), (10_000, 64, 10.0),
                (1_000_000, 32, 1.0),
          (300_000, 128, 20.0), (3_000, 32, 30.0), (100_000, 64, 2.0))  # fmt: skip
"""Rows, columns and ids per sample of the measured tables."""
# One half of the columns is timed.
STAGED_COSTS = ("staged_shard_s", "staged_id_s", "staged_row_s")
"""Constants of UpdateCost that only this calibration determines."""
NUM_TRIES = 3


def measure_staged(team: WorkerGroup, num_threads: int, memory_bytes: float) -> Floats:
    """Measure STAGED_COSTS [3], in about two seconds, by updates in stages and in one fused pass. Skips shards above
    `memory_bytes`."""
    terms, extra_s = [], []
    for seed, (num_rows, dim, pooling) in enumerate(TABLE_SHAPES):
        if num_rows * (dim // 2 + 1) * 4 > memory_bytes:  # Rows in float32, and one sum of squares per row.
            continue
        task = ShardingTask(
            seed=seed,
            tables=(TaskTable(num_rows=num_rows, dim=dim, pooling_factor=pooling, distribution_index=seed % 3),),
        )
        pieces = [(0, (0, num_rows), (0, dim // 2))]
        shared = {"task": task.to_dict(), "shards": pieces, "threads": num_threads}
        staged_s = min(team.call("time_device", **shared, replicas=[], num_ranks=2)[1] for _ in range(NUM_TRIES))
        fused_s = min(team.call("time_shards", **shared, num_rounds=1)[1] for _ in range(NUM_TRIES))
        loads = WorkloadLoads(task.workload())
        load = loads.shard_loads(ShardArrays.from_values(0, (0, num_rows), (0, dim // 2)))
        terms.append([1.0, float(load.num_ids[0]), float(load.num_distinct_rows[0])])
        extra_s.append(max(staged_s - fused_s, 0.0))
    return fit_staged(np.array(terms), np.array(extra_s))


def fit_staged(terms: Floats, extra_s: Floats) -> Floats:
    """Fit non-negative constants [3] of STAGED_COSTS such that terms [n, 3] @ constants approximates `extra_s` [n].

    Columns of `terms` are the numbers of shards, ids and distinct rows. Errors count relative to `extra_s`.
    """
    weights = 1.0 / np.maximum(extra_s, 1e-5)[:, None]
    scale = np.maximum(np.abs(terms * weights).max(axis=0), 1e-300)
    return nnls(terms * weights / scale, extra_s * weights[:, 0]) / scale


def with_staged(update: UpdateCost, constants: Floats) -> UpdateCost:
    """Return a copy of `update` with the constants [3] of STAGED_COSTS."""
    shard_s, id_s, row_s = constants.tolist()
    return replace(update, staged_shard_s=shard_s, staged_id_s=id_s, staged_row_s=row_s)


MAX_MEMORY_BYTES = 3_000_000_000
"""Maximum bytes of rows and states of a combination."""
# At most a quarter of the free memory is used.
CACHE_BYTES_CANDIDATES = (1e6, 2e6, 4e6, 8e6, 16e6, 32e6)
"""Sizes of the hardware cache that the fit tries."""
MESSAGE_BYTES = (4_096, 32_768, 262_144, 1_048_576, 4_194_304, 16_777_216)
HELD_OUT_MESSAGE_BYTES = (11_000, 90_000, 520_000, 2_000_000, 8_000_000, 12_000_000)
"""Message sizes that are held out from the fit of links."""
NUM_ROUNDS = 3
# Scheduling delays some calls by milliseconds, so one measurement needs many calls.
NUM_CALLS = 20
"""Number of calls per measurement."""
MATMUL_SHAPES = ((256, 512, 256), (512, 512, 512), (2048, 512, 256), (2048, 1024, 1024))
MIN_COMBINATIONS = 50
MAX_BACKGROUND_LOAD = 0.2
MAX_TRIES = 2
HELD_OUT_STRIDE = 8
_REPEAT_SHARE = 0.25
MIN_REPEATS = 2
"""Minimum number of repetitions of held-out measurements."""


@dataclass(frozen=True)
class ErrorStatistics:
    """Relative errors of predictions on held-out measurements."""

    median: float
    p95: float
    """95th percentile of the errors."""
    count: int
    repeat_spread: float


@dataclass(frozen=True)
class Calibration:
    """Fitted cost model, its errors, and the measurements of operators."""

    cost_model: CostModel
    errors: Mapping[str, ErrorStatistics]
    """Errors on held-out measurements. Keys are 'lookup', 'update', 'all_to_all' and 'all_reduce'."""
    background_load: float
    elapsed_s: float
    """Duration of the calibration."""
    timings: Sequence[ShardTimings] = ()
    held_out_rounds: Sequence[Sequence[ShardTimings]] = ()
    """First and repeated timings of the held-out combinations, one sequence per round."""


RankShards = tuple[TaskShard, ...]
"""Shards of one rank."""


@dataclass(frozen=True)
class ShardTimings:
    """Measured times of the shards of one rank."""

    task: ShardingTask
    shards: RankShards
    lookup_s: float
    update_s: float

    @cached_property
    def workload(self) -> WorkloadLoads:
        """Loads of the task for the planner."""
        return WorkloadLoads(self.task.workload())


def calibrate(num_threads: int, num_ranks: int, budget_s: float, log: Callable[[str, float], None]) -> Calibration:
    """Measure operators and collectives on this machine for about `budget_s` seconds, and fit a cost model to them.

    Collectives are measured between `num_ranks` processes. `log` is called with a description of the current work and
    the used share of the budget. Raises MesetaError if a process fails.
    """
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
    # The worker processes count as other programs here. They use about `num_threads` processors.
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
    # Time budget of a calibration and its progress.

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
    # Measure random combinations. Returns their timings, and rounds of timings of the held-out ones.
    measured: list[ShardTimings] = []
    while _needs_more_combinations(clock.elapsed_s, (1.0 - _REPEAT_SHARE) * clock.budget_s, len(measured)):
        clock.report(f"operators, {len(measured)} combinations")
        # Half of the combinations get less memory, so that the rows of many fit in the hardware cache.
        task = random_combination(len(measured), 0.95 * memory_bytes * (1.0 if len(measured) % 2 else 0.4))
        pieces = tuple((n, (0, item.num_rows), (0, item.dim)) for n, item in enumerate(task.tables))
        measured.append(measure_shards(team, task, pieces, num_threads))
    rounds = [measured[HELD_OUT_STRIDE - 1 :: HELD_OUT_STRIDE]]
    while len(rounds) <= MIN_REPEATS or clock.elapsed_s < clock.budget_s:
        clock.report(f"operators, repeat {len(rounds)}")
        rounds.append([measure_shards(team, item.task, item.shards, num_threads) for item in rounds[0]])
    return measured, rounds


def _memory_bytes() -> int:
    system = KernelFiles()
    free = free_memory_bytes(system, read_cgroup_limits(system))
    return MAX_MEMORY_BYTES if free is None else min(MAX_MEMORY_BYTES, free // 4)


def _needs_more_combinations(elapsed_s: float, budget_s: float, num_measured: int) -> bool:
    # At least two combinations must be held out, whatever the time.
    if elapsed_s < budget_s or num_measured < 2 * HELD_OUT_STRIDE:
        return True
    # Exceed the budget a little rather than fit too few combinations.
    return num_measured < MIN_COMBINATIONS and elapsed_s < 1.3 * budget_s


def rank_loads(measured: ShardTimings, cache_bytes: float) -> ShardLoads:
    """Return the loads of the measured shards, given the size of the hardware cache."""
    table, rows, columns = (np.array(part) for part in zip(*measured.shards, strict=True))
    pieces = ShardArrays.from_values(table, (rows[:, 0], rows[:, 1]), (columns[:, 0], columns[:, 1]))
    held = measured.workload.hardware_cached_samples(pieces, np.zeros(len(table), np.int64), 1, cache_bytes)
    rank_bytes = float(measured.workload.stored_bytes(pieces).sum())
    return measured.workload.shard_loads(pieces, hardware_cached_samples=float(held[0]), rank_bytes=rank_bytes)


def fit_operators(
    measured: Sequence[ShardTimings], rounds: Sequence[Sequence[ShardTimings]], source: str
) -> tuple[LookupCost, UpdateCost, HardwareCacheCost, dict[str, ErrorStatistics]]:
    """Fit constants of lookup and update, and choose the size of the hardware cache with the lowest error.

    `rounds` are repeated timings of the held-out measurements. The last result has the errors on them.
    """
    seconds = np.array([(item.lookup_s, item.update_s) for item in measured]).T
    unseen = np.arange(len(measured)) % HELD_OUT_STRIDE == HELD_OUT_STRIDE - 1
    best: tuple[float, float, list[dict[str, float]], list[Floats]] | None = None
    for cache_bytes in CACHE_BYTES_CANDIDATES:
        loads = [rank_loads(item, cache_bytes) for item in measured]
        fitted, predicted = [], []
        for took, terms in zip(seconds, (lookup_terms, update_terms), strict=True):
            totals = [{name: float(term.sum()) for name, term in terms(item).items()} for item in loads]
            names = [*dict.fromkeys(name for total in totals for name in total if name not in STAGED_COSTS)]
            matrix = np.array([[1.0, *(total.get(name, 0.0) for name in names)] for total in totals])
            constants = fit_relative(matrix[~unseen], took[~unseen])
            fitted.append(dict(zip(["call_s", *names], constants.tolist(), strict=True)))
            predicted.append(matrix @ constants)
        seen = [relative_errors(item[~unseen], took[~unseen]) for item, took in zip(predicted, seconds, strict=True)]
        total = float(sum(error.mean() for error in seen))
        if best is None or total < best[0]:
            best = (total, cache_bytes, fitted, predicted)
    assert best is not None
    _, cache_bytes, (lookup, update), predicted = best
    numbers = {name: update.pop(name) for name in OPTIMIZERS if name in update}
    again = np.array([[(item.lookup_s, item.update_s) for item in part] for part in rounds])
    errors = {
        name: error_statistics(item[unseen], again[:, :, index])
        for index, (name, item) in enumerate(zip(("lookup", "update"), predicted, strict=True))
    }
    return (
        LookupCost(**lookup, measured=True, source=source),
        UpdateCost(**update, number_s=numbers, measured=True, source=source),
        HardwareCacheCost(cache_bytes=cache_bytes, measured=True, source=source),
        errors,
    )


def error_statistics(predicted: Floats, measured: Floats) -> ErrorStatistics:
    """Compute relative errors of predictions [n] against the medians over rounds of measurements [r, n]."""
    if not predicted.size:
        return ErrorStatistics(0.0, 0.0, 0, 0.0)
    medians = np.median(measured, axis=0)
    errors, spread = relative_errors(predicted, medians), relative_errors(measured, medians)
    return ErrorStatistics(
        float(np.median(errors)), float(np.percentile(errors, 95)), errors.size, float(np.median(spread))
    )


def measure_shards(team: WorkerGroup, task: ShardingTask, pieces: RankShards, num_threads: int) -> ShardTimings:
    """Time the shards of one rank. Repeats the measurement if other programs use the processors."""
    arguments = {"task": task.to_dict(), "shards": pieces, "num_rounds": 1, "threads": num_threads}
    return ShardTimings(task, pieces, *measure_uncontended(lambda: team.call("time_shards", **arguments)))


def measure_uncontended(measure: Callable[[], list[float]]) -> tuple[float, float]:
    """Return the fastest seconds of (a lookup, an update), measured again if other programs used more than
    MAX_BACKGROUND_LOAD processors."""
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
            # An all-reduce is a reduce-scatter followed by an all-gather.
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
    """Measure the additional seconds per peer in an all-to-all of few bytes. Returns `None` with two ranks."""
    # Compares the exchange among all ranks with that between two.
    if num_ranks == 2:
        return None
    rounds = [
        [team.call("time_small_all_to_all", num_peers=peers, num_rounds=NUM_CALLS) for peers in (1, num_ranks - 1)]
        for _ in range(NUM_ROUNDS)
    ]
    few, many = np.median(np.array(rounds), axis=0)
    return max(float(many - few) / (num_ranks - 2), 0.0)


def split_peer_latency(link: Link, peer_s: float, num_ranks: int) -> Link:
    """Move the latency per peer out of the latency of a link that was fitted between `num_ranks` ranks."""
    # At most half of the latency is moved.
    # The latency without peers must remain positive.
    peer_s = min(peer_s, link.latency_s / (2 * (num_ranks - 1)))
    return replace(link, latency_s=link.latency_s - (num_ranks - 1) * peer_s, peer_s=peer_s)


def fit_link(sizes: Floats, seconds: Floats) -> Link:
    """Fit latency and bandwidth of a link to the bytes that each rank sends [n] and the seconds [n]."""
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
    """Measure the seconds per element that each codec takes to encode and to decode, without copying the bytes."""
    # Codecs without a measurement keep the values of `known`.
    encode, decode = dict(known.encode_number_s), dict(known.decode_number_s)
    for name, codec in CODECS.items():
        for is_drawn in (False, True) if codec.scale_bytes else (False,) if not codec.is_lossless else ():
            seconds = team.call("time_codec", codec=name, stochastic=is_drawn, num_rounds=9, threads=num_threads)
            if seconds:
                write_s, read_s = (max(spent - codec.mean_element_bytes * copy_byte_s, 0.0) for spent in seconds)
                encode[name + STOCHASTIC_SUFFIX * is_drawn] = write_s
                decode[name] = read_s
    return encode, decode
