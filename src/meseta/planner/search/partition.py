"""Placement of all units on ranks, greedily or by the largest differencing method."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meseta.planner.cost.schedule import Schedule
from meseta.planner.search.assignment import (
    Assignment,
    BusySeconds,
    Cluster,
    Floats,
    Ints,
    Mask,
    RankScore,
    ShardingOptions,
    StepPaths,
    UsedBytes,
)


def place_greedily(
    options: ShardingOptions, machine: Cluster, choice: Ints, score: RankScore | None = None
) -> Assignment | None:
    """Place each unit on the ranks with the lowest score, in descending order of their longest shards.

    Returns `None` if the units do not fit.

    Args:
        options: Options of all units.
        machine: Memory of ranks and hosts.
        choice: Option of each unit, int64 [U].
        score: Score of ranks. `None` means the seconds of the units placed so far.
    """
    # R. L. Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17 (1969), with memory limits.
    assignment, left = place_units(
        Assignment(options, machine, choice), choice, order_by_seconds(options, choice), score or BusySeconds()
    )
    # If a unit does not fit, start again in descending order of bytes, on the emptiest ranks.
    if left:
        assignment, left = place_units(
            Assignment(options, machine, choice), choice, order_by_bytes(options, choice), UsedBytes()
        )
    return None if left or not assignment.fits() else assignment


def order_by_seconds(options: ShardingOptions, choice: Ints) -> Ints:
    """Return the units in descending order of their longest shard. Units with fixed ranks are first, followed by units
    whose shards share a host."""
    longest = _max_by_unit(options, choice, options.shard_s)
    free = np.array([option not in options.fixed_ranks for option in choice.tolist()], np.int64)
    return np.lexsort((np.arange(len(choice)), -longest, free * (1 + (options.block_size[choice] == 0))))


def order_by_bytes(options: ShardingOptions, choice: Ints) -> Ints:
    """Return the units in descending order of their largest shard. Units with fixed ranks are first."""
    largest = _max_by_unit(
        options, choice, (options.rank_demand[:, 0] + options.host_demand.sum(axis=1)).astype(np.float64)
    )
    free = np.array([option not in options.fixed_ranks for option in choice.tolist()])
    return np.lexsort((np.arange(len(choice)), -largest, free))


def _max_by_unit(options: ShardingOptions, choice: Ints, values: Floats) -> Floats:
    """Return the maximum over the shards of each unit's option [U], or 0 without shards."""
    starts, ends = options.first_shard[choice], options.first_shard[choice + 1]
    return np.array([values[a:b].max() if b > a else 0.0 for a, b in zip(starts, ends, strict=True)])


def place_units(
    assignment: Assignment, choice: Ints, order: Sequence[int] | Ints, score: RankScore
) -> tuple[Assignment, list[int]]:
    """Place units in the given order. Returns the assignment, and the units that do not fit."""
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
    """Partial partition: seconds of its parts in descending order, and a linked list of shards per part. Missing parts
    have 0 seconds."""

    seconds: Floats
    chain_heads: Ints
    chain_tails: Ints


def place_by_differencing(options: ShardingOptions, machine: Cluster, choice: Ints) -> Assignment | None:
    """Place units by the largest differencing method, or return `None` if they do not fit.

    It repeatedly combines the two partial partitions with the largest differences.

    Args:
        options: Options of all units.
        machine: Memory of ranks and hosts.
        choice: Option of each unit, int64 [U].
    """
    assignment = Assignment(options, machine, choice)
    # N. Karmarkar and R. Karp, "The differencing method of set partitioning", UCB/CSD 82/113 (1982), for k parts (R. E.
    # Korf, "Multi-way number partitioning", IJCAI 2009). Units whose shards share a host are placed greedily before,
    # and shards that violate memory limits or constraints after it.
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
    """Return the ranks of each unit's shards, considering only seconds."""
    num_ranks = assignment.cluster.num_ranks
    pieces = [
        range(options.shard_slice(int(choice[unit])).start, options.shard_slice(int(choice[unit])).stop)
        for unit in units
    ]
    owner = np.repeat(np.arange(len(units)), [len(span) for span in pieces])
    index = np.array([piece for span in pieces for piece in span], np.int64)
    seconds = options.shard_s[index]
    chain = np.full(
        len(index) + num_ranks, -1, np.int64
    )  # Next entry of each list. Entries of ranks follow the shards.
    starts = np.searchsorted(owner, np.arange(len(units) + 1))
    # Shards of one unit start in different parts, so they are never on the same rank.
    tuples = []
    for unit in range(len(units)):
        shards = np.arange(starts[unit], starts[unit + 1])
        shards = shards[np.argsort(-seconds[shards], kind="stable")]
        tuples.append(_PartialPartition(seconds[shards], shards, shards))
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
    """Combine the largest parts of each partition with the smallest parts of the other, and subtract the common
    minimum."""
    if len(one.seconds) < len(other.seconds):
        one, other = other, one
    shared = max(len(one.seconds) + len(other.seconds) - num_parts, 0)
    # The smallest parts of `one` are combined with the largest of `other`. Parts without a partner are appended.
    last_of_one, last_of_other = slice(len(one.seconds) - shared, None), slice(len(other.seconds) - shared, None)
    seconds, heads, tails = one.seconds.copy(), one.chain_heads.copy(), one.chain_tails.copy()
    if shared:
        turned = slice(None, None, -1)
        partner = other.chain_heads[last_of_other][turned]
        seconds[last_of_one] += other.seconds[last_of_other][turned]
        chain[tails[last_of_one]] = partner
        tails[last_of_one] = other.chain_tails[last_of_other][turned]
    alone = slice(0, len(other.seconds) - shared)
    seconds = np.concatenate([seconds, other.seconds[alone]])
    heads, tails = np.concatenate([heads, other.chain_heads[alone]]), np.concatenate([tails, other.chain_tails[alone]])
    order = np.argsort(-seconds, kind="stable")
    seconds = seconds[order]
    if len(seconds) == num_parts:
        seconds = seconds - seconds[-1]
    return _PartialPartition(seconds, heads[order], tails[order])


def _ranks_from_chains(parts: _PartialPartition, chain: Ints, num_pieces: int) -> Ints:
    """Return the rank of each shard [num_pieces]. Each list of shards contains one rank."""
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
    """Remove units that exceed memory limits or violate constraints, and place them greedily."""
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


COMPUTE_COMPONENTS = ("compute", "lookup", "table_update")
"""First components of each rank: lookup and update together, lookup alone, and update alone. A path contains one of
them."""
# With many units, durations are known better, and sampling takes longer.
MAX_UNITS_WIDE_SAMPLING = 300
"""Maximum number of units for which `WIDE_SPREAD` is used."""
NUM_SAMPLES, NUM_NARROW_SAMPLES = 384, 96
WIDE_SPREAD, NARROW_SPREAD = 1.0, 0.7
"""Range of sampled durations around their expected value, in powers of ten."""
NUM_ROUNDS = 60
"""Number of iterations of `best_mix`."""


@dataclass(frozen=True, kw_only=True)
class DurationTerms:
    """Terms of the durations in a schedule, by the names of `Schedule.timed_names`."""

    components: Sequence[str]
    """Schedule name of each component [K]. The first ones are `COMPUTE_COMPONENTS`."""
    fixed_s: Mapping[str, float]
    """Seconds in every plan."""
    optional_s: Sequence[Mapping[str, float]]
    """Seconds of each optional cost [C], which applies only if some table needs it."""

    def for_names(self, names: Sequence[str]) -> tuple[Floats, Floats, Floats]:
        """Return the terms for the S `names` of a schedule: component indicators [S, K], fixed seconds [S], and
        optional seconds [C, S]."""
        of_component = np.array([[float(name == one) for one in self.components] for name in names])
        fixed = np.array([self.fixed_s.get(name, 0.0) for name in names])
        uses = np.array([[seconds.get(name, 0.0) for name in names] for seconds in self.optional_s])
        return of_component, fixed, uses.reshape(len(self.optional_s), len(names))


def find_paths(
    schedules: Sequence[tuple[Schedule, Mask]],
    durations: DurationTerms,
    expected: Floats,
    averages: tuple[Floats, Ints],
) -> tuple[StepPaths, float]:
    """Return the paths of a step, and the seconds of a step without tables.

    Args:
        schedules: Schedules with the optional costs that each requires [C]. The first one requires none.
        durations: Terms of the durations.
        expected: Expected seconds of the components [E, K].
        averages: Seconds that each option adds to the average rank [W, K], and the first option of each unit [U].
    """
    draw, is_near = np.random.default_rng(0), len(averages[1]) > MAX_UNITS_WIDE_SAMPLING
    count, spread = (NUM_NARROW_SAMPLES, NARROW_SPREAD) if is_near else (NUM_SAMPLES, WIDE_SPREAD)
    factors = 10.0 ** draw.uniform(-spread, spread, (count, len(durations.components)))
    factors[: len(expected)] = 1.0
    tried = expected[np.arange(count) % len(expected)] * factors
    # No cycle is longer than the step, so bounds that follow from the sampled cycles hold for every plan.
    parts = [_longest_paths(schedule, needs, durations, tried) for schedule, needs in schedules]
    coefs, fixed_s, use_s, needs = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    least_s = float(fixed_s[~needs.any(axis=1)].max())
    paths = StepPaths(
        coefs=coefs, fixed_s=fixed_s - least_s, optional_s=use_s, required_costs=needs, weights=np.ones(coefs.shape[1])
    )
    values, starts = averages
    mix = best_mix(paths, values @ paths.coefs.T, starts)
    return StepPaths(
        coefs=coefs, fixed_s=paths.fixed_s, optional_s=use_s, required_costs=needs, weights=mix @ coefs
    ), least_s


def _longest_paths(
    schedule: Schedule, needs: Mask, durations: DurationTerms, tried: Floats
) -> tuple[Floats, Floats, Floats, Mask]:
    """Return the longest cycles for the sampled durations `tried` [N, K]: component counts [P, K], fixed seconds [P],
    optional seconds [P, C], and required costs [P, C]."""
    of_component, fixed, uses = durations.for_names(schedule.timed_names)
    seconds = tried @ of_component.T + fixed + uses.sum(axis=0)
    _, counts = schedule.longest_cycle(seconds)
    counts = np.unique(counts.round(9), axis=0)
    coefs = counts @ of_component
    lookup, update = (coefs[:, COMPUTE_COMPONENTS.index(name)].copy() for name in ("lookup", "table_update"))
    both = np.minimum(lookup, update)
    coefs[:, : len(COMPUTE_COMPONENTS)] = np.stack([both, lookup - both, update - both], axis=1)
    return coefs, counts @ fixed, counts @ uses.T, np.tile(needs, (len(counts), 1))


def best_mix(paths: StepPaths, values: Floats, starts: Ints) -> Floats:
    """Return the weights of paths [P] that maximize the total of all units, each in its cheapest option.

    Weights sum to 1, and are 0 for paths with required costs. A step is never shorter than the weighted mean of its
    paths. `values` [W, P] are the seconds of each option.
    """
    # Multiplicative weights (Y. Freund and R. Schapire, Games and Economic Behavior 29, 1999): paths that are long
    # under the cheapest options get more weight.
    free = ~paths.required_costs.any(axis=1)
    mix = free / free.sum()
    best, best_s = mix, -np.inf
    ends = np.append(starts[1:], len(values))
    unit = np.repeat(np.arange(len(starts)), ends - starts)
    for number in range(NUM_ROUNDS):
        weighed = values @ mix
        least = np.minimum.reduceat(weighed, starts)
        hits = np.flatnonzero(weighed == least[unit])
        chosen = hits[np.unique(unit[hits], return_index=True)[1]]
        each = values[chosen].sum(axis=0) + paths.fixed_s
        step_s = float(least.sum() + mix @ paths.fixed_s)
        if step_s > best_s:
            best, best_s = mix, step_s
        scale = np.abs(each[free]).max() or 1.0
        mix = mix * np.exp((4.0 / (1.0 + 0.1 * number)) * (each - each[free].max()) / scale)
        mix = np.where(free, mix, 0.0)
        mix = mix / mix.sum()
    return best
