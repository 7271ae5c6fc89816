"""What a step takes where transfers are hidden: the longest of a few sums over components, and the mix of these that
says most about every plan.

The seconds of a step are those of the longest cycle of its schedule, and every cycle is a sum of durations. The search
looks at those that are longest for one of many mixtures of durations about as long as they will be. None of them is
ever longer than the step, so what follows from them holds for every plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meseta.planner.cost.schedule import Schedule
from meseta.planner.search.assignment import Floats, Ints, Mask, StepPaths

COMPUTE_COMPONENTS = ("compute", "lookup", "table_update")
"""The first components: of each rank lookup and update together, and each by itself, of which a path has one."""
MAX_UNITS_WIDE_SAMPLING = 300
"""Of more, durations are known well, and paths cost time: they are looked for near what is expected."""
NUM_SAMPLES, NUM_NARROW_SAMPLES = 384, 96
WIDE_SPREAD, NARROW_SPREAD = 1.0, 0.7
"""Durations are tried up to so many powers of ten around what is expected of them."""
NUM_ROUNDS = 60
"""Of the search for a mix."""


@dataclass(frozen=True, kw_only=True)
class DurationTerms:
    """Where the seconds of a step come from, by the names of its schedules."""

    components: Sequence[str]
    """[K]: the name that the seconds of each component are of; COMPUTE first."""
    fixed_s: Mapping[str, float]
    """Of every plan."""
    optional_s: Sequence[Mapping[str, float]]
    """[C]: of each thing that takes place only where some table needs it."""

    def for_names(self, names: Sequence[str]) -> tuple[Floats, Floats, Floats]:
        """Of a schedule's `names` [S]: seconds of components ([S, K]: 1 where one is of a name), fixed ones [S], and of
        uses [C, S]."""
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
    """(paths, seconds of a step without any table).

    Args:
        schedules: each with what has to be used for it [C], nothing in the first.
        durations: where the seconds come from.
        expected: [E, K]: what components may take.
        averages: what every option takes of the average rank [W, K], and the first option of each unit [U].
    """
    draw, is_near = np.random.default_rng(0), len(averages[1]) > MAX_UNITS_WIDE_SAMPLING
    count, spread = (NUM_NARROW_SAMPLES, NARROW_SPREAD) if is_near else (NUM_SAMPLES, WIDE_SPREAD)
    factors = 10.0 ** draw.uniform(-spread, spread, (count, len(durations.components)))
    factors[: len(expected)] = 1.0
    tried = expected[np.arange(count) % len(expected)] * factors
    parts = [_longest_paths(schedule, needs, durations, tried) for schedule, needs in schedules]
    coefs, fixed_s, use_s, needs = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    least_s = float(fixed_s[~needs.any(axis=1)].max())
    found = StepPaths(
        coefs=coefs, fixed_s=fixed_s - least_s, optional_s=use_s, required_costs=needs, weights=np.ones(coefs.shape[1])
    )
    values, starts = averages
    mix = best_mix(found, values @ found.coefs.T, starts)
    return StepPaths(
        coefs=coefs, fixed_s=found.fixed_s, optional_s=use_s, required_costs=needs, weights=mix @ coefs
    ), least_s


def _longest_paths(
    schedule: Schedule, needs: Mask, durations: DurationTerms, tried: Floats
) -> tuple[Floats, Floats, Floats, Mask]:
    """(coefficients of components [P, K], fixed seconds [P], seconds of uses [P, C], needs [P, C]) of the longest
    cycles, were components to take what was `tried` [N, K]."""
    of_component, fixed, uses = durations.for_names(schedule.timed_names)
    seconds = tried @ of_component.T + fixed + uses.sum(axis=0)
    _, found = schedule.longest_cycle(seconds)
    found = np.unique(found.round(9), axis=0)
    coefs = found @ of_component
    lookup, update = (coefs[:, COMPUTE_COMPONENTS.index(name)].copy() for name in ("lookup", "table_update"))
    both = np.minimum(lookup, update)
    coefs[:, : len(COMPUTE_COMPONENTS)] = np.stack([both, lookup - both, update - both], axis=1)
    return coefs, found @ fixed, found @ uses.T, np.tile(needs, (len(found), 1))


def best_mix(paths: StepPaths, values: Floats, starts: Ints) -> Floats:
    """[P]: weights of paths, 1 together and 0 of those that need something, under which the cheapest options of all
    units, `values` [W, P] each, take most: a step is no shorter than any mix of its paths.

    Found by multiplicative weights (Y. Freund and R. Schapire, Games and Economic Behavior 29, 1999): paths that the
    cheapest options make long get more weight.
    """
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
