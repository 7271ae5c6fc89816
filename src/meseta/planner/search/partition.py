"""From an option per unit to an assignment: longest processing time first, and Karmarkar and Karp's largest
differencing."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meseta.planner.search.assignment import (
    Assignment,
    BusySeconds,
    Cluster,
    Floats,
    Ints,
    RankScore,
    ShardingOptions,
    UsedBytes,
)


def place_greedily(
    options: ShardingOptions, machine: Cluster, choice: Ints, score: RankScore | None = None
) -> Assignment | None:
    """Units by their longest piece, longest first, each to the ranks that `score` puts first and that have room.

    Source: R. L. Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17 (1969), with memory.
    Where a unit finds no room, once more by bytes, largest first, each to the emptiest ranks.

    Args:
        options: all options of all units.
        machine: room of ranks and hosts.
        choice: int64 [U], the option of each unit.
        score: what a rank is chosen by; None: the seconds that it carries.

    Returns None where that does not fit either.
    """
    assignment, left = place_units(
        Assignment(options, machine, choice), choice, order_by_seconds(options, choice), score or BusySeconds()
    )
    if left:
        assignment, left = place_units(
            Assignment(options, machine, choice), choice, order_by_bytes(options, choice), UsedBytes()
        )
    return None if left or not assignment.fits() else assignment


def order_by_seconds(options: ShardingOptions, choice: Ints) -> Ints:
    """Units, the one with the longest piece first; given ranks, then those that hosts share, before all others."""
    longest = _max_by_unit(options, choice, options.shard_s)
    free = np.array([option not in options.fixed_ranks for option in choice.tolist()], np.int64)
    return np.lexsort((np.arange(len(choice)), -longest, free * (1 + (options.block_size[choice] == 0))))


def order_by_bytes(options: ShardingOptions, choice: Ints) -> Ints:
    """Units, the one with the largest piece first; given ranks before all others."""
    largest = _max_by_unit(
        options, choice, (options.rank_demand[:, 0] + options.host_demand.sum(axis=1)).astype(np.float64)
    )
    free = np.array([option not in options.fixed_ranks for option in choice.tolist()])
    return np.lexsort((np.arange(len(choice)), -largest, free))


def _max_by_unit(options: ShardingOptions, choice: Ints, values: Floats) -> Floats:
    """[U]: the largest value of the pieces of each unit's option; 0 for one without pieces."""
    starts, ends = options.first_shard[choice], options.first_shard[choice + 1]
    return np.array([values[a:b].max() if b > a else 0.0 for a, b in zip(starts, ends, strict=True)])


def place_units(
    assignment: Assignment, choice: Ints, order: Sequence[int] | Ints, score: RankScore
) -> tuple[Assignment, list[int]]:
    """Add units in their order to an assignment; returns it and the units that found no room."""
    left = []
    for unit in order:
        ranks = assignment.find_ranks(int(choice[unit]), score)
        if ranks is None:
            left.append(int(unit))
        else:
            assignment.place(int(choice[unit]), ranks)
    return assignment, left


@dataclass
class _PartialPartition:
    """A partial partition: seconds of its parts, descending, and the chain of pieces in each; absent parts are 0."""

    seconds: Floats
    chain_heads: Ints
    chain_tails: Ints


def place_by_differencing(options: ShardingOptions, machine: Cluster, choice: Ints) -> Assignment | None:
    """The partial partitions whose parts differ most are joined, largest part to smallest, until one is left.

    Pieces of one unit start in different parts and so never meet. Units whose pieces share a host are placed greedily
    beforehand; what memory and constraints forbid is taken back and placed greedily afterwards.

    Source: N. Karmarkar and R. Karp, "The differencing method of set partitioning", UCB/CSD 82/113 (1982), in its form
    for k parts (R. E. Korf, "Multi-option number partitioning", IJCAI 2009).

    Args:
        options: all options of all units.
        machine: room of ranks and hosts.
        choice: int64 [U], the option of each unit.

    Returns None where the units do not fit.
    """
    assignment = Assignment(options, machine, choice)
    sizes = np.diff(options.first_shard)[choice]
    bound = [
        int(unit)
        for unit in order_by_seconds(options, choice)
        if options.block_size[choice[unit]] or not sizes[unit] or int(choice[unit]) in options.fixed_ranks
    ]
    assignment, left = place_units(assignment, choice, bound, BusySeconds())
    if left:
        return None
    units = [unit for unit in range(len(choice)) if assignment.option[unit] < 0]
    if not units:
        return assignment if assignment.fits() else None
    places = _assign_by_differencing(assignment, options, choice, units)
    for unit in units:
        assignment.place(int(choice[unit]), places[unit])
    return _repair(assignment, choice, units)


def _assign_by_differencing(
    assignment: Assignment, options: ShardingOptions, choice: Ints, units: Sequence[int]
) -> dict[int, Ints]:
    """By unit: the ranks of its pieces, seconds alone considered."""
    num_ranks = assignment.cluster.num_ranks
    pieces = [
        range(options.shard_slice(int(choice[unit])).start, options.shard_slice(int(choice[unit])).stop)
        for unit in units
    ]
    owner = np.repeat(np.arange(len(units)), [len(span) for span in pieces])
    index = np.array([piece for span in pieces for piece in span], np.int64)
    seconds = options.shard_s[index]
    chain = np.full(len(index) + num_ranks, -1, np.int64)  # the next piece of a part; ranks stand after the pieces
    starts = np.searchsorted(owner, np.arange(len(units) + 1))
    tuples = []
    for unit in range(len(units)):
        mine = np.arange(starts[unit], starts[unit + 1])
        mine = mine[np.argsort(-seconds[mine], kind="stable")]
        tuples.append(_PartialPartition(seconds[mine], mine, mine))
    base = options.weighted_seconds(assignment.load.T)
    order = np.argsort(-base, kind="stable")
    tuples.append(_PartialPartition(base[order], len(index) + order, len(index) + order))
    heap = [(-_max_difference(parts, num_ranks), number, parts) for number, parts in enumerate(tuples)]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        joined = _combine(one, other, chain, num_ranks)
        heapq.heappush(heap, (-_max_difference(joined, num_ranks), number, joined))
        number += 1
    rank_of = _ranks_from_chains(heap[0][2], chain, len(index))
    return {unit: rank_of[starts[i] : starts[i + 1]] for i, unit in enumerate(units)}


def _max_difference(parts: _PartialPartition, num_parts: int) -> float:
    least = parts.seconds[-1] if len(parts.seconds) == num_parts else 0.0
    return float(parts.seconds[0] - least)


def _combine(one: _PartialPartition, other: _PartialPartition, chain: Ints, num_parts: int) -> _PartialPartition:
    """The largest parts of one with the smallest of the other; the common least is taken off all."""
    if len(one.seconds) < len(other.seconds):
        one, other = other, one
    shared = max(len(one.seconds) + len(other.seconds) - num_parts, 0)
    # `other` descending meets `one` ascending; what has no partner among num_parts parts stays alone.
    mine, theirs = slice(len(one.seconds) - shared, None), slice(len(other.seconds) - shared, None)
    seconds, heads, tails = one.seconds.copy(), one.chain_heads.copy(), one.chain_tails.copy()
    if shared:
        turned = slice(None, None, -1)
        partner = other.chain_heads[theirs][turned]
        seconds[mine] += other.seconds[theirs][turned]
        chain[tails[mine]] = partner
        tails[mine] = other.chain_tails[theirs][turned]
    alone = slice(0, len(other.seconds) - shared)
    seconds = np.concatenate([seconds, other.seconds[alone]])
    heads, tails = np.concatenate([heads, other.chain_heads[alone]]), np.concatenate([tails, other.chain_tails[alone]])
    order = np.argsort(-seconds, kind="stable")
    seconds = seconds[order]
    if len(seconds) == num_parts:
        seconds = seconds - seconds[-1]
    return _PartialPartition(seconds, heads[order], tails[order])


def _ranks_from_chains(parts: _PartialPartition, chain: Ints, num_pieces: int) -> Ints:
    """[num_pieces]: the rank at one place of each chain is the rank of all its pieces."""
    rank_of = np.zeros(num_pieces, np.int64)
    for start in parts.chain_heads:
        members, rank, head = [], -1, int(start)
        while head >= 0:
            if head < num_pieces:
                members.append(head)
            else:
                rank = head - num_pieces
            head = int(chain[head])
        rank_of[members] = rank
    return rank_of


def _repair(assignment: Assignment, choice: Ints, units: Sequence[int]) -> Assignment | None:
    """Take back what has no room, or lies where it must not, and place it greedily."""
    options, machine = assignment.options, assignment.cluster
    host_of = np.arange(machine.num_ranks) // machine.devices_per_host
    taken: dict[int, None] = {}
    for unit in sorted(
        units, key=lambda unit: (options.rank_demand[options.shard_slice(int(choice[unit])), 0].max(), unit)
    ):
        ranks = assignment.ranks[unit]
        mask = assignment.allowed_ranks(unit)
        full = (assignment.rank_used[ranks] > machine.rank_capacity[ranks]).any() or (
            assignment.host_used[host_of[ranks]] > machine.host_capacity[host_of[ranks]]
        ).any()
        if full or (mask is not None and not mask[ranks].all()):
            assignment.remove(unit)
            taken[unit] = None
    order = [unit for unit in order_by_seconds(options, choice).tolist() if unit in taken]
    assignment, left = place_units(assignment, choice, order, BusySeconds())
    if left:
        assignment, left = place_units(assignment, choice, left, UsedBytes())
    return None if left or not assignment.fits() else assignment
