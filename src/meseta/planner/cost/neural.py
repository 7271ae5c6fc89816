"""Predicted seconds of ranks and collectives for a cost model with correction networks. Does not need torch."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meseta.planner.cost.exchange import Collective
from meseta.planner.cost.loads import OFFLOADED_TIER_INDICES, Indices, ShardLoads
from meseta.planner.cost.operators import operator_seconds
from meseta.planner.cost.reuse import Floats
from meseta.spec import CostModel, Topology
from meseta.spec.cost_model import SHARD_INPUTS, Float32Array, Network
from meseta.spec.tiers import HBM, TIERS

_OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad", "adam")
"""Row optimizers that the networks are trained on."""
_MIN_S = 1e-9
"""Lower bound of seconds that are used as a divisor or in a logarithm."""


def rank_seconds(cost_model: CostModel, loads: ShardLoads, owner: Indices, num_ranks: int) -> tuple[Floats, Floats]:
    """Return the seconds of (lookup, update) per rank, both [R], for shards [n] with one `owner` each.

    Constants predict the sum over the shards of a rank. Networks multiply the part of shards in device memory by a
    correction. Updates are corrected only for row optimizers that the networks are trained on.
    """
    neural = cost_model.neural
    pairs = operator_seconds(cost_model, loads)
    calls = np.array([cost_model.lookup.call_s, cost_model.update.call_s])
    busy = np.bincount(owner, loads.num_features, num_ranks) > 0
    totals = [
        np.bincount(owner, seconds, num_ranks).astype(np.float64) + call * busy
        for seconds, call in zip(pairs, calls, strict=True)
    ]
    totals[0] = totals[0] + cost_model.tiers.cache_call_s * (
        np.bincount(owner, np.isin(loads.tier_index, OFFLOADED_TIER_INDICES), num_ranks) > 0
    )
    if neural is None or not busy.any():
        return totals[0], totals[1]
    for number, network in enumerate((neural.lookup, neural.update)):
        indices = np.flatnonzero(_has_network(loads, is_update=number == 1))
        if len(indices):
            pieces, ranks = loads.take(indices), owner[indices]
            parts, extra_inputs = rank_inputs(
                pairs[number][indices], pieces.num_features, ranks, num_ranks, float(calls[number])
            )
            shares = pairs[number][indices] / np.maximum(parts, _MIN_S)[ranks]
            ratio = np.exp(rank_corrections(network, shard_inputs(pieces), shares, ranks, extra_inputs))
            has = np.bincount(ranks, minlength=num_ranks) > 0
            totals[number] = totals[number] + np.where(has, (ratio - 1.0) * (parts + calls[number]), 0.0)
    return totals[0], totals[1]


def collective_correction(cost_model: CostModel, topology: Topology, collective: Collective) -> float:
    """Return the factor by which a network corrects the predicted seconds of a collective.

    It is 1.0 on several hosts, without a network for this number of ranks, and if the topology specifies its intra-host
    link.
    """
    if cost_model.neural is None or topology.num_hosts > 1 or topology.inside is not None:
        return 1.0
    network = cost_model.neural.collectives.get(topology.num_ranks)
    if network is None or not collective.sent_intra_host.any():
        return 1.0
    arrays = {name: _decode_array(part) for name, part in network.items()}
    inputs = _normalize(collective_inputs(collective)[None], arrays, "")
    return float(np.exp(_apply_head(arrays, [inputs] * len(arrays["head_out"])))[0])


def shard_inputs(loads: ShardLoads) -> Floats:
    """Return the input of the networks for each shard, with shape [n, len(SHARD_INPUTS)]."""
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
    features = {name: np.log2(1.0 + values) for name, values in logs.items()}
    features |= {"is_unaligned": loads.is_unaligned, "is_half": loads.is_half}
    names = np.array(loads.optimizers)[loads.optimizer_index]
    features |= {name: names == name for name in _OPTIMIZERS}
    return np.stack([features[name].astype(np.float64) for name in SHARD_INPUTS], axis=1)


def rank_inputs(
    seconds: Floats, shards: Floats, owner: Indices, num_ranks: int, call_s: float
) -> tuple[Floats, Floats]:
    """Return the predicted seconds of each rank's shards [R], and the inputs of the networks for each rank [R, 2]."""
    parts = np.bincount(owner, seconds, num_ranks).astype(np.float64)
    counts = np.bincount(owner, shards, num_ranks)
    extra_inputs = np.stack([np.log2(np.maximum(parts + call_s, _MIN_S)), np.log2(1.0 + counts)], axis=1)
    return parts, extra_inputs


def collective_inputs(collective: Collective) -> Floats:
    """Return the input of the networks for a collective [R + 2]: sent bytes per rank and call in descending order,
    maximum received bytes, and whether it is a reduction."""
    sent, received = (
        collective.sent_intra_host / collective.num_calls,
        collective.received_intra_host / collective.num_calls,
    )
    numbers = [*np.sort(sent)[::-1], received.max()]
    return np.array([*np.log2(1.0 + np.array(numbers)), float(collective.reduces)])


def rank_corrections(network: Network, inputs: Floats, shares: Floats, owner: Indices, extra_inputs: Floats) -> Floats:
    """Return the logarithm of the ratio of corrected to predicted seconds for each rank [R].

    Args:
        network: Network of lookups or updates.
        inputs: Inputs for the shards, as returned by `shard_inputs` [n, F].
        shares: Share of each shard in the predicted seconds of its rank [n].
        owner: Rank that owns each shard [n].
        extra_inputs: Inputs for the ranks, as returned by `rank_inputs` [R, 2].
    """
    arrays = {name: _decode_array(part) for name, part in network.items()}
    pieces, ranks = _normalize(inputs, arrays, ""), _normalize(extra_inputs, arrays, "rank_")
    heads = []
    for member in range(len(arrays["head_out"])):
        hidden = np.maximum(pieces @ arrays["table_in"][member] + arrays["table_in_bias"][member], 0.0)
        output = (hidden @ arrays["table_out"][member] + arrays["table_out_bias"][member]) * shares[:, None]
        summed = np.zeros((len(extra_inputs), output.shape[1]))
        np.add.at(summed, owner, output)
        heads.append(np.concatenate([summed, ranks], axis=1))
    return _apply_head(arrays, heads)


def _has_network(loads: ShardLoads, *, is_update: bool) -> NDArray[np.bool_]:
    here = loads.tier_index == TIERS.index(HBM)
    if is_update:
        trained = np.isin(np.array(loads.optimizers), _OPTIMIZERS)
        here = here & trained[loads.optimizer_index] & ~loads.is_frozen
    return here


def _normalize(inputs: Floats, arrays: dict[str, Floats], prefix: str) -> Floats:
    """Scale inputs to zero mean and unit variance, after clipping them to the range of the measurements."""
    inside = np.clip(inputs, arrays[f"{prefix}least"], arrays[f"{prefix}most"])
    return (inside - arrays[f"{prefix}center"]) / arrays[f"{prefix}scale"]


def _apply_head(arrays: dict[str, Floats], inputs: list[Floats]) -> Floats:
    """Return the mean output of the heads of all ensemble members, clipped to the limits of the network [n]."""
    total = np.zeros(len(inputs[0]))
    for member, member_inputs in enumerate(inputs):
        hidden = np.maximum(member_inputs @ arrays["head_in"][member] + arrays["head_in_bias"][member], 0.0)
        total += hidden @ arrays["head_out"][member] + arrays["head_out_bias"][member]
    least, most = arrays["limits"]
    return np.clip(total / len(inputs), least, most)


@lru_cache(maxsize=256)
def _decode_array(part: Float32Array) -> Floats:
    return part.to_array()
