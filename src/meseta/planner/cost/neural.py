"""What a rank and a collective take by a cost model whose networks correct its constants, in numpy alone."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meseta.planner.cost.exchange import Collective
from meseta.planner.cost.loads import OFFLOADED_TIER_INDICES, Indices, ShardLoads
from meseta.planner.cost.operators import operator_seconds
from meseta.planner.cost.reuse import Floats
from meseta.spec import CostModel, Topology
from meseta.spec.neural_cost import SHARD_INPUTS, Float32Array, Network
from meseta.spec.tiers import HBM, TIERS

_OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad", "adam")
"""Those that networks are trained on."""
_MIN_S = 1e-9
"""Seconds and shares are divided by no less."""


def rank_seconds(cost_model: CostModel, loads: ShardLoads, owner: Indices, num_ranks: int) -> tuple[Floats, Floats]:
    """Seconds of lookup and of update of every rank, [R] and [R], for pieces with one `owner` [n] each.

    The constants are added up over the pieces of a rank; where the cost model has networks, what they predict for the
    pieces in the device's memory is multiplied by the correction of the rank, which depends on all of them together.
    Rows of other tiers, and the update of tables whose optimizer no network has seen, cost as the constants say.
    """
    neural = cost_model.neural
    pairs = operator_seconds(cost_model, loads)
    calls = np.array([cost_model.lookup.call_s, cost_model.update.call_s])
    busy = np.bincount(owner, loads.num_features, num_ranks) > 0
    totals = [
        np.bincount(owner, own, num_ranks).astype(np.float64) + call * busy
        for own, call in zip(pairs, calls, strict=True)
    ]
    totals[0] = totals[0] + cost_model.tiers.cache_call_s * (
        np.bincount(owner, np.isin(loads.tier_index, OFFLOADED_TIER_INDICES), num_ranks) > 0
    )
    if neural is None or not busy.any():
        return totals[0], totals[1]
    for number, network in enumerate((neural.lookup, neural.update)):
        known = np.flatnonzero(_has_network(loads, is_update=number == 1))
        if len(known):
            pieces, ranks = loads.take(known), owner[known]
            parts, told = rank_inputs(pairs[number][known], pieces.num_features, ranks, num_ranks, float(calls[number]))
            shares = pairs[number][known] / np.maximum(parts, _MIN_S)[ranks]
            ratio = np.exp(rank_corrections(network, shard_inputs(pieces), shares, ranks, told))
            has = np.bincount(ranks, minlength=num_ranks) > 0
            totals[number] = totals[number] + np.where(has, (ratio - 1.0) * (parts + calls[number]), 0.0)
    return totals[0], totals[1]


def collective_correction(cost_model: CostModel, topology: Topology, own: Collective) -> float:
    """What a collective takes, over what latency and bandwidth say: 1.0 where no network of so many devices on one host
    is there, or the topology gives a link of its own."""
    if cost_model.neural is None or topology.num_hosts > 1 or topology.inside is not None:
        return 1.0
    network = cost_model.neural.collectives.get(topology.num_ranks)
    if network is None or not own.sent_intra_host.any():
        return 1.0
    arrays = {name: _decode_array(part) for name, part in network.items()}
    told = _normalize(collective_inputs(own)[None], arrays, "")
    return float(np.exp(_apply_head(arrays, [told] * len(arrays["head_out"])))[0])


def shard_inputs(loads: ShardLoads) -> Floats:
    """[n, len(SHARD_INPUTS)]: what a network is told of each piece."""
    logs = {
        "ids": loads.num_ids,
        "bags": loads.num_bags,
        "distinct": loads.num_distinct_rows,
        "lookup_misses": loads.lookup_misses,
        "update_misses": loads.update_misses,
        "update_bytes": loads.update_bytes * loads.update_miss_share,
        "walks": loads.page_walks,
        "id_bytes": loads.num_ids * loads.row_bytes,
        "miss_bytes": loads.lookup_misses * loads.row_bytes,
        "out_bytes": loads.num_output_rows * loads.num_columns * loads.element_bytes,
        "columns": loads.num_columns,
        "row_bytes": loads.row_bytes,
        "num_rows": loads.num_rows,
        "stored_bytes": loads.stored_bytes,
    }
    found = {name: np.log2(1.0 + values) for name, values in logs.items()}
    found |= {"is_unaligned": loads.is_unaligned, "is_half": loads.is_half}
    names = np.array(loads.optimizers)[loads.optimizer_index]
    found |= {name: names == name for name in _OPTIMIZERS}
    return np.stack([found[name].astype(np.float64) for name in SHARD_INPUTS], axis=1)


def rank_inputs(
    seconds: Floats, shards: Floats, owner: Indices, num_ranks: int, call_s: float
) -> tuple[Floats, Floats]:
    """(seconds of the pieces [R], what a network is told of each rank [R, 2])."""
    parts = np.bincount(owner, seconds, num_ranks).astype(np.float64)
    counts = np.bincount(owner, shards, num_ranks)
    told = np.stack([np.log2(np.maximum(parts + call_s, _MIN_S)), np.log2(1.0 + counts)], axis=1)
    return parts, told


def collective_inputs(own: Collective) -> Floats:
    """[R + 2]: bytes that each device sends in a call, the largest first; the most that one receives; whether they are
    summed."""
    sent, received = own.sent_intra_host / own.num_calls, own.received_intra_host / own.num_calls
    numbers = [*np.sort(sent)[::-1], received.max()]
    return np.array([*np.log2(1.0 + np.array(numbers)), float(own.reduces)])


def rank_corrections(network: Network, inputs: Floats, shares: Floats, owner: Indices, told: Floats) -> Floats:
    """[R]: logarithm of the ratio between what ranks take and what the constants predict for them.

    Args:
        network: of lookups or updates.
        inputs: of the pieces [n, F], as `shard_inputs` gives them.
        shares: part of the predicted seconds of its rank that each piece has [n].
        owner: rank of each piece [n].
        told: of the ranks [R, 2], as `rank_inputs` gives it.
    """
    arrays = {name: _decode_array(part) for name, part in network.items()}
    pieces, ranks = _normalize(inputs, arrays, ""), _normalize(told, arrays, "rank_")
    heads = []
    for member in range(len(arrays["head_out"])):
        hidden = np.maximum(pieces @ arrays["table_in"][member] + arrays["table_in_bias"][member], 0.0)
        own = (hidden @ arrays["table_out"][member] + arrays["table_out_bias"][member]) * shares[:, None]
        summed = np.zeros((len(told), own.shape[1]))
        np.add.at(summed, owner, own)
        heads.append(np.concatenate([summed, ranks], axis=1))
    return _apply_head(arrays, heads)


def _has_network(loads: ShardLoads, *, is_update: bool) -> NDArray[np.bool_]:
    """[n]: whether networks have seen pieces of this kind."""
    here = loads.tier_index == TIERS.index(HBM)
    if is_update:
        trained = np.isin(np.array(loads.optimizers), _OPTIMIZERS)
        here = here & trained[loads.optimizer_index] & ~loads.is_frozen
    return here


def _normalize(inputs: Floats, arrays: dict[str, Floats], prefix: str) -> Floats:
    """Inputs in units of their spread; beyond what was measured, as at its edge."""
    inside = np.clip(inputs, arrays[f"{prefix}least"], arrays[f"{prefix}most"])
    return (inside - arrays[f"{prefix}center"]) / arrays[f"{prefix}scale"]


def _apply_head(arrays: dict[str, Floats], inputs: list[Floats]) -> Floats:
    """[n]: the mean over the members of what their last two layers make of their `inputs` [n, H], within the limits."""
    found = np.zeros(len(inputs[0]))
    for member, own in enumerate(inputs):
        hidden = np.maximum(own @ arrays["head_in"][member] + arrays["head_in_bias"][member], 0.0)
        found += hidden @ arrays["head_out"][member] + arrays["head_out_bias"][member]
    least, most = arrays["limits"]
    return np.clip(found / len(inputs), least, most)


@lru_cache(maxsize=256)
def _decode_array(part: Float32Array) -> Floats:
    return part.to_array()
