"""Duration of a step with overlap, as the longest of several paths. Each path is a cycle of the schedule, and a sum of
components."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meseta.planner.cost.schedule import Schedule
from meseta.planner.search.assignment import Floats, Ints, Mask, StepPaths

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
