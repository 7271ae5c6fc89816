"""Neural cost model of `meseta calibrate --neural`: training of its networks, and comparison with constants alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date

import numpy as np

from meseta.measure.calibrate.calibration import (
    HELD_OUT_STRIDE,
    Calibration,
    ErrorStatistics,
    ShardTimings,
    error_statistics,
    rank_loads,
)
from meseta.measure.calibrate.collectives import CollectiveTimer
from meseta.measure.calibrate.networks import NUM_MEMBERS, Floats, TrainingExamples, to_arrays, train_ensemble
from meseta.measure.harness.worker_group import TargetSpec, WorkerGroup
from meseta.measure.threads import use_num_threads
from meseta.planner.cost.exchange import Collective
from meseta.planner.cost.neural import collective_correction, collective_inputs, rank_inputs, rank_seconds, shard_inputs
from meseta.planner.cost.operators import operator_seconds
from meseta.spec import CostModel, Topology
from meseta.spec.cost_model import Network, NeuralCost

DEVICE_COUNTS = (2, 4)
"""Numbers of devices for which collectives are always measured."""
NUM_COLLECTIVES = 100
"""Number of measured collectives for each number of devices."""
MIN_BYTES, MAX_BYTES = 4e3, 6e7
"""Range of the total bytes of a collective over all ranks."""
NUM_CALLS = 11
"""Number of calls per measurement."""
_IDS_TRANSFER = "ids"


@dataclass(frozen=True)
class FitScore:
    """Accuracy of one cost model on held-out measurements."""

    error: ErrorStatistics
    rank_correlation: float
    """Spearman correlation of predicted and measured seconds. 0 with fewer than two measurements."""


@dataclass(frozen=True)
class FitComparison:
    """Accuracy of the constants alone, and of the constants with networks that correct them."""

    constants: FitScore
    networks: FitScore


@dataclass(frozen=True)
class CollectiveTiming:
    """Measured time of a collective between devices of one host."""

    collective: Collective
    seconds: float


def calibrate_networks(
    found: Calibration, num_ranks: int, log: Callable[[str, float], None]
) -> tuple[CostModel, dict[str, FitComparison]]:
    """Measure more collectives and train networks on them and on the measurements of a calibration.

    `log` and the result are as in `train_networks`. Raises MesetaError if a process fails.
    """
    model = found.cost_model
    exchanged = [
        timing
        for number in sorted({num_ranks, *DEVICE_COUNTS})
        for timing in measure_collectives(number, model.num_threads, log)
    ]
    source = f"meseta calibrate --neural, {date.today().isoformat()}, {len(found.timings)} combinations of tables"
    return train_networks(found.timings, found.held_out_rounds, exchanged, model, source=source, log=log)


def train_networks(
    measured: Sequence[ShardTimings],
    rounds: Sequence[Sequence[ShardTimings]],
    exchanged: Sequence[CollectiveTiming],
    cost_model: CostModel,
    *,
    source: str,
    log: Callable[[str, float], None],
) -> tuple[CostModel, dict[str, FitComparison]]:
    """Train networks that correct a fitted cost model. Deterministic.

    The networks are small versions of those in NeuroShard (D. Zha et al., arXiv 2305.01868, section 3.2), with two
    changes. They predict the logarithm of measured over predicted seconds. Shards are weighted by their shares of the
    predicted seconds.

    `rounds` are repeated timings of the held-out operators. `log` is called with a description of the current work and
    its completed share. Returns the cost model with its networks, and the accuracy on held-out measurements by
    'lookup', 'update' and 'collectives, R devices'. Every eighth measurement is held out.
    """
    # Weights that sum to 1 keep the inputs of the head in the trained range, however many shards a rank has.
    with use_num_threads(1):  # The products are small, and results would depend on the number of threads.
        networks = {}
        for number, name in enumerate(("lookup", "update")):
            examples = make_examples(measured, cost_model, number)
            networks[name] = _train_network(examples, name, log)
        collectives = {}
        for num_ranks in sorted({len(selected.collective.sent_intra_host) for selected in exchanged}):
            selected = [one for one in exchanged if len(one.collective.sent_intra_host) == num_ranks]
            collectives[num_ranks] = _train_network(
                _make_collective_examples(selected, cost_model), f"{num_ranks} devices", log
            )
    corrected = replace(cost_model, neural=NeuralCost(**networks, collectives=collectives, source=source))
    return corrected, compare_fits(rounds, exchanged, corrected)


def compare_fits(
    rounds: Sequence[Sequence[ShardTimings]], exchanged: Sequence[CollectiveTiming], cost_model: CostModel
) -> dict[str, FitComparison]:
    """Compare the constants of a cost model alone and with networks on held-out measurements.

    `rounds` are repeated timings of the held-out combinations. Every eighth of the collectives is held out.
    """
    models = (replace(cost_model, neural=None), cost_model)
    took = np.array([[(item.lookup_s, item.update_s) for item in part] for part in rounds])
    predicted = [np.array([predict_rank(item, model) for item in rounds[0]]) for model in models]
    comparisons = {}
    for number, name in enumerate(("lookup", "update")):
        comparisons[name] = FitComparison(*(score_fit(item[:, number], took[:, :, number]) for item in predicted))
    for num_ranks in cost_model.neural.collectives if cost_model.neural else ():
        every = [one for one in exchanged if len(one.collective.sent_intra_host) == num_ranks]
        held = [one for number, one in enumerate(every) if _is_held_out(number)]
        seconds = np.array([[one.seconds for one in held]])
        both = [np.array([predict_collective(one.collective, model) for one in held]) for model in models]
        comparisons[f"collectives, {num_ranks} devices"] = FitComparison(*(score_fit(item, seconds) for item in both))
    return comparisons


def predict_rank(measured: ShardTimings, cost_model: CostModel) -> tuple[float, float]:
    """Predict the seconds of (lookup, update) for the shards of one rank."""
    loads = rank_loads(measured, cost_model.cache.cache_bytes)
    lookup, update = rank_seconds(cost_model, loads, np.zeros(len(measured.shards), np.int64), 1)
    return float(lookup[0]), float(update[0])


def predict_collective(own: Collective, cost_model: CostModel) -> float:
    """Predict the seconds of a collective between devices of one host, without packing."""
    topology = Topology(devices_per_host=len(own.sent_intra_host))
    return float(own.seconds(cost_model, topology).max()) * collective_correction(cost_model, topology, own)


def score_fit(predicted: Floats, measured: Floats) -> FitScore:
    """Compare predictions [n] with the medians over rounds of measurements [r, n]."""
    if len(predicted) < 2:
        return FitScore(error_statistics(predicted, measured), 0.0)
    both = np.stack([predicted, np.median(measured, axis=0)])
    ranks = np.argsort(np.argsort(both, axis=1, kind="stable"), axis=1)
    correlation = np.atleast_2d(np.corrcoef(ranks))
    return FitScore(error_statistics(predicted, measured), float(correlation[0, 1]))


def make_examples(measured: Sequence[ShardTimings], cost_model: CostModel, number: int) -> TrainingExamples:
    """Create training examples from lookups (`number` 0) or updates (`number` 1) of all measured ranks."""
    call_s = (cost_model.lookup.call_s, cost_model.update.call_s)[number]
    ranks, target = [], []
    for timing in measured:
        loads = rank_loads(timing, cost_model.cache.cache_bytes)
        seconds = operator_seconds(cost_model, loads)[number]
        one = np.zeros(len(timing.shards), np.int64)
        parts, rank_features = rank_inputs(seconds, loads.num_features, one, 1, call_s)
        ranks.append((shard_inputs(loads), seconds / max(float(parts[0]), 1e-9), rank_features[0]))
        target.append(np.log((timing.lookup_s, timing.update_s)[number] / (float(parts[0]) + call_s)))
    return TrainingExamples.from_ranks(ranks, np.array(target))


def _make_collective_examples(exchanged: Sequence[CollectiveTiming], cost_model: CostModel) -> TrainingExamples:
    features = np.stack([collective_inputs(timing.collective) for timing in exchanged])
    constants = replace(cost_model, neural=None)
    # The target is relative to the constants alone.
    predicted = np.array([predict_collective(timing.collective, constants) for timing in exchanged])
    seconds = np.array([timing.seconds for timing in exchanged])
    return TrainingExamples(features, np.log(seconds / predicted))


def _train_network(examples: TrainingExamples, name: str, log: Callable[[str, float], None]) -> Network:
    seen = examples.select([number for number in range(len(examples.target)) if not _is_held_out(number)])
    members = train_ensemble(
        seen, lambda member: log(f"network of {name}, {member + 1} of {NUM_MEMBERS}", member / NUM_MEMBERS)
    )
    return to_arrays(members, seen.target)


def _is_held_out(number: int) -> bool:
    return number % HELD_OUT_STRIDE == HELD_OUT_STRIDE - 1


def measure_collectives(num_ranks: int, num_threads: int, log: Callable[[str, float], None]) -> list[CollectiveTiming]:
    """Measure `random_collectives` between `num_ranks` local processes. Raises MesetaError if a process fails."""
    member = TargetSpec(
        name=f"collectives of {num_ranks}",
        target_class=CollectiveTimer,
        arguments={},
        num_ranks=num_ranks,
        thread_counts=(num_threads,),
    )
    with WorkerGroup(member) as team:
        timings = []
        for number, collective in enumerate(random_collectives(num_ranks)):
            log(f"collectives between {num_ranks} processes", number / NUM_COLLECTIVES)
            if collective.reduces:
                num_bytes = round(collective.sent_intra_host[0] * num_ranks / (2 * (num_ranks - 1)))
                seconds = team.call("time_collective", kind="all_reduce", num_bytes=num_bytes, num_rounds=NUM_CALLS)
            else:
                seconds = team.call(
                    "time_uneven_all_to_all", num_bytes=pairwise_bytes(collective), num_rounds=NUM_CALLS
                )
            timings.append(CollectiveTiming(collective, seconds))
    return timings


def random_collectives(num_ranks: int) -> list[Collective]:
    """Return NUM_COLLECTIVES collectives: all-reduces and exchanges with equal and random loads. They depend on
    `num_ranks` only."""
    random, nothing, collectives = np.random.default_rng([11, num_ranks]), np.zeros(num_ranks), []
    for number in range(NUM_COLLECTIVES):
        total = float(np.exp(random.uniform(np.log(MIN_BYTES), np.log(MAX_BYTES))))
        if number % 4 == 0:
            sent = np.full(num_ranks, 2 * (num_ranks - 1) / num_ranks * total / num_ranks)
            collectives.append(Collective("sum", "gradient_dist", sent, nothing, sent, nothing, reduces=True))
            continue
        even = np.full(num_ranks, 1.0 / num_ranks)
        owned = total * (even if random.random() < 1 / 3 else random.dirichlet(2.0 * num_ranks * even))
        requester_bytes, owner_bytes = (owned.sum() - owned) / num_ranks, owned * (num_ranks - 1) / num_ranks
        if random.random() < 0.5:
            collectives.append(Collective(_IDS_TRANSFER, "input_dist", requester_bytes, nothing, owner_bytes, nothing))
        else:
            collectives.append(Collective("embeddings", "output_dist", owner_bytes, nothing, requester_bytes, nothing))
    return collectives


def pairwise_bytes(own: Collective) -> list[list[int]]:
    """Return the bytes [R][R] that each device sends to each other one."""
    # An owner exchanges the same number of bytes with every peer.
    num_ranks, is_there = len(own.sent_intra_host), own.name == _IDS_TRANSFER
    each = (own.received_intra_host if is_there else own.sent_intra_host) / (num_ranks - 1)
    sent = np.broadcast_to(each if is_there else each[:, None], (num_ranks, num_ranks)) * (1 - np.eye(num_ranks))
    matrix: list[list[int]] = np.round(sent).astype(int).tolist()
    return matrix
