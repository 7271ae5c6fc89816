"""`meseta calibrate --neural`: networks trained on what was measured, and how they compare with the constants alone."""

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
from meseta.measure.calibrate.fit import Floats
from meseta.measure.calibrate.networks import NUM_MEMBERS, TrainingExamples, to_arrays, train_ensemble
from meseta.measure.harness.worker_group import TargetSpec, WorkerGroup
from meseta.measure.threads import use_num_threads
from meseta.planner.cost.exchange import Collective
from meseta.planner.cost.neural import collective_correction, collective_inputs, rank_inputs, rank_seconds, shard_inputs
from meseta.planner.cost.operators import operator_seconds
from meseta.spec import CostModel, Topology
from meseta.spec.neural_cost import Network, NeuralCost

DEVICE_COUNTS = (2, 4)
"""Numbers of devices that collectives are learned for."""
NUM_COLLECTIVES = 100
"""Collectives that are measured between so many devices."""
MIN_BYTES, MAX_BYTES = 4e3, 6e7
"""Of a collective, all ranks together."""
NUM_CALLS = 11
"""Calls of one measurement."""
_IDS_TRANSFER = "ids"
"""Name of exchanges in which owners receive; in the others they send."""


@dataclass(frozen=True)
class FitScore:
    """How well one cost model predicts what it has not seen."""

    error: ErrorStatistics
    rank_correlation: float
    """Spearman's, between predicted and measured seconds; 0 where there are fewer than two."""


@dataclass(frozen=True)
class FitComparison:
    """The constants alone beside the networks that correct them."""

    constants: FitScore
    networks: FitScore


@dataclass(frozen=True)
class CollectiveTiming:
    """What a collective between devices of one host took."""

    collective: Collective
    seconds: float


def calibrate_networks(
    found: Calibration, num_ranks: int, log: Callable[[str, float], None]
) -> tuple[CostModel, dict[str, FitComparison]]:
    """Measure more collectives, between `num_ranks` and DEVICES processes, and train networks on them and on what a
    calibration has measured; `log` and the result are as in `train_networks`. Raises MesetaError where a process fails.
    """
    model = found.cost_model
    exchanged = [
        own
        for number in sorted({num_ranks, *DEVICE_COUNTS})
        for own in measure_collectives(number, model.num_threads, log)
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
    """Train networks for a fitted cost model on what it was fitted to.

    Each network is a small copy of NeuroShard's (D. Zha et al., arXiv 2305.01868, section 3.2), with two changes: it
    gives the logarithm of the ratio to what the constants predict, and pieces are summed by their shares of that, so
    that ranks with more pieces than any that was measured stay within what the head knows. `log` is told what happens,
    and the share that is done. Deterministic.

    Returns the cost model with its networks, and by 'lookup', 'update' and 'collectives, R devices' how it does on
    each eighth measurement, which neither constants nor networks have seen; `rounds` repeats those of operators.
    """
    with use_num_threads(1):  # the products are small, and sums over threads would depend on their number
        networks = {}
        for number, name in enumerate(("lookup", "update")):
            examples = make_examples(measured, cost_model, number)
            networks[name] = _train_network(examples, name, log)
        collectives = {}
        for num_ranks in sorted({len(own.collective.sent_intra_host) for own in exchanged}):
            own = [one for one in exchanged if len(one.collective.sent_intra_host) == num_ranks]
            collectives[num_ranks] = _train_network(
                _make_collective_examples(own, cost_model), f"{num_ranks} devices", log
            )
    found = replace(cost_model, neural=NeuralCost(**networks, collectives=collectives, source=source))
    return found, compare_fits(rounds, exchanged, found)


def compare_fits(
    rounds: Sequence[Sequence[ShardTimings]], exchanged: Sequence[CollectiveTiming], cost_model: CostModel
) -> dict[str, FitComparison]:
    """Constants and networks of a cost model on what they have not seen: all measurements of the same combinations, and
    each eighth collective."""
    models = (replace(cost_model, neural=None), cost_model)
    took = np.array([[(own.lookup_s, own.update_s) for own in part] for part in rounds])
    predicted = [np.array([predict_rank(own, model) for own in rounds[0]]) for model in models]
    found = {}
    for number, name in enumerate(("lookup", "update")):
        found[name] = FitComparison(*(score_fit(own[:, number], took[:, :, number]) for own in predicted))
    for num_ranks in cost_model.neural.collectives if cost_model.neural else ():
        every = [one for one in exchanged if len(one.collective.sent_intra_host) == num_ranks]
        held = [one for number, one in enumerate(every) if _is_held_out(number)]
        seconds = np.array([[one.seconds for one in held]])
        both = [np.array([predict_collective(one.collective, model) for one in held]) for model in models]
        found[f"collectives, {num_ranks} devices"] = FitComparison(*(score_fit(own, seconds) for own in both))
    return found


def predict_rank(measured: ShardTimings, cost_model: CostModel) -> tuple[float, float]:
    """Predicted seconds of (lookup, update) of one rank with these pieces."""
    loads = rank_loads(measured, cost_model.cache.cache_bytes)
    lookup, update = rank_seconds(cost_model, loads, np.zeros(len(measured.shards), np.int64), 1)
    return float(lookup[0]), float(update[0])


def predict_collective(own: Collective, cost_model: CostModel) -> float:
    """Predicted seconds of a collective between devices of one host, without packing."""
    topology = Topology(devices_per_host=len(own.sent_intra_host))
    return float(own.seconds(cost_model, topology).max()) * collective_correction(cost_model, topology, own)


def score_fit(predicted: Floats, measured: Floats) -> FitScore:
    """Errors of predictions [n] of the medians of rounds [r, n], and the correlation of the ranks of both."""
    if len(predicted) < 2:
        return FitScore(error_statistics(predicted, measured), 0.0)
    both = np.stack([predicted, np.median(measured, axis=0)])
    ranks = np.argsort(np.argsort(both, axis=1, kind="stable"), axis=1)
    correlation = np.atleast_2d(np.corrcoef(ranks))
    return FitScore(error_statistics(predicted, measured), float(correlation[0, 1]))


def make_examples(measured: Sequence[ShardTimings], cost_model: CostModel, number: int) -> TrainingExamples:
    """Lookups (0) or updates (1) of all measured ranks."""
    call_s = (cost_model.lookup.call_s, cost_model.update.call_s)[number]
    ranks, target = [], []
    for own in measured:
        loads = rank_loads(own, cost_model.cache.cache_bytes)
        seconds = operator_seconds(cost_model, loads)[number]
        one = np.zeros(len(own.shards), np.int64)
        parts, told = rank_inputs(seconds, loads.num_features, one, 1, call_s)
        ranks.append((shard_inputs(loads), seconds / max(float(parts[0]), 1e-9), told[0]))
        target.append(np.log((own.lookup_s, own.update_s)[number] / (float(parts[0]) + call_s)))
    return TrainingExamples.from_ranks(ranks, np.array(target))


def _make_collective_examples(exchanged: Sequence[CollectiveTiming], cost_model: CostModel) -> TrainingExamples:
    told = np.stack([collective_inputs(own.collective) for own in exchanged])
    constants = replace(cost_model, neural=None)
    predicted = np.array([predict_collective(own.collective, constants) for own in exchanged])
    seconds = np.array([own.seconds for own in exchanged])
    return TrainingExamples(told, np.log(seconds / predicted))


def _train_network(examples: TrainingExamples, name: str, log: Callable[[str, float], None]) -> Network:
    seen = examples.select([number for number in range(len(examples.target)) if not _is_held_out(number)])
    members = train_ensemble(
        seen, lambda member: log(f"network of {name}, {member + 1} of {NUM_MEMBERS}", member / NUM_MEMBERS)
    )
    return to_arrays(members, seen.target)


def _is_held_out(number: int) -> bool:
    return number % HELD_OUT_STRIDE == HELD_OUT_STRIDE - 1


def measure_collectives(num_ranks: int, num_threads: int, log: Callable[[str, float], None]) -> list[CollectiveTiming]:
    """Random collectives between `num_ranks` processes of this machine: sums, and exchanges in which devices own parts
    of any size, on the way to the owners and back. Raises MesetaError where a process fails."""
    member = TargetSpec(
        name=f"collectives of {num_ranks}",
        target_class=CollectiveTimer,
        arguments={},
        num_ranks=num_ranks,
        thread_counts=(num_threads,),
    )
    with WorkerGroup(member) as team:
        found = []
        for number, own in enumerate(random_collectives(num_ranks)):
            log(f"collectives between {num_ranks} processes", number / NUM_COLLECTIVES)
            if own.reduces:
                num_bytes = round(own.sent_intra_host[0] * num_ranks / (2 * (num_ranks - 1)))
                seconds = team.call("time_collective", kind="all_reduce", num_bytes=num_bytes, num_rounds=NUM_CALLS)
            else:
                seconds = team.call("time_uneven_all_to_all", num_bytes=pairwise_bytes(own), num_rounds=NUM_CALLS)
            found.append(CollectiveTiming(own, seconds))
    return found


def random_collectives(num_ranks: int) -> list[Collective]:
    """NUM_EXCHANGES collectives, always the same: a quarter are sums; of the others, a third among equal owners."""
    random, nothing, found = np.random.default_rng([11, num_ranks]), np.zeros(num_ranks), []
    for number in range(NUM_COLLECTIVES):
        total = float(np.exp(random.uniform(np.log(MIN_BYTES), np.log(MAX_BYTES))))
        if number % 4 == 0:
            sent = np.full(num_ranks, 2 * (num_ranks - 1) / num_ranks * total / num_ranks)
            found.append(Collective("sum", "gradient_dist", sent, nothing, sent, nothing, reduces=True))
            continue
        even = np.full(num_ranks, 1.0 / num_ranks)
        owned = total * (even if random.random() < 1 / 3 else random.dirichlet(2.0 * num_ranks * even))
        others, own = (owned.sum() - owned) / num_ranks, owned * (num_ranks - 1) / num_ranks
        if random.random() < 0.5:
            found.append(Collective(_IDS_TRANSFER, "input_dist", others, nothing, own, nothing))
        else:
            found.append(Collective("embeddings", "output_dist", own, nothing, others, nothing))
    return found


def pairwise_bytes(own: Collective) -> list[list[int]]:
    """[R][R]: what each device sends to each: owners are sent, or send, alike by all and to all."""
    num_ranks, is_there = len(own.sent_intra_host), own.name == _IDS_TRANSFER
    each = (own.received_intra_host if is_there else own.sent_intra_host) / (num_ranks - 1)
    sent = np.broadcast_to(each if is_there else each[:, None], (num_ranks, num_ranks)) * (1 - np.eye(num_ranks))
    found: list[list[int]] = np.round(sent).astype(int).tolist()
    return found
