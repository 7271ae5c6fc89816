"""Covering arrays: few cases that together contain every pair of values of any two axes of a large matrix."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Setting = tuple[str, Any]
"""An axis and one of its values."""
Pair = tuple[Setting, Setting]
"""Settings of two axes, in the order of the axes."""


def allowed_pairs(axes: Mapping[str, Sequence[Any]], can_meet: Callable[[Setting, Setting], bool]) -> list[Pair]:
    """Return every pair of values of two axes that one case may have."""
    pairs = [((a, x), (b, y)) for a, b in combinations(axes, 2) for x in axes[a] for y in axes[b]]
    return [pair for pair in pairs if can_meet(*pair) and can_meet(*reversed(pair))]


def pairs_of(case: Mapping[str, Any]) -> list[Pair]:
    """Return the pairs in a case."""
    return list(combinations(case.items(), 2))


def covering(
    axes: Mapping[str, Sequence[Any]], can_meet: Callable[[Setting, Setting], bool], *, times: int, seed: int
) -> list[dict[str, Any]]:
    """Return cases that contain every allowed pair of values at least `times` times, and no other pair.

    Each case begins with a missing pair. Axis by axis in random order, it takes the value with the most missing pairs:
    the greedy algorithm of D. Cohen et al., The AETG system, IEEE Transactions on Software Engineering, 1997, with one
    candidate per case. `can_meet(one, other)` is called in both orders. Raises LookupError if an axis has no value that
    can be combined with the values chosen before.
    """
    draw, missing = random.Random(seed), dict.fromkeys(allowed_pairs(axes, can_meet), times)
    allowed, cases = frozenset(missing), []
    place = {axis: number for number, axis in enumerate(axes)}

    def in_order(one: Setting, other: Setting) -> Pair:
        return (one, other) if place[one[0]] < place[other[0]] else (other, one)

    while missing:
        case = dict(next(iter(missing)))
        for axis in draw.sample([*axes], len(axes)):
            if axis in case:
                continue
            chosen = list(case.items())
            pairs_by_value = {value: [in_order((axis, value), one) for one in chosen] for value in axes[axis]}
            possible = [value for value, pairs in pairs_by_value.items() if allowed.issuperset(pairs)]
            if not possible:
                raise LookupError(f"no value of {axis!r} can meet {case}")
            draw.shuffle(possible)
            case[axis] = max(possible, key=lambda value: sum(missing.get(pair, 0) for pair in pairs_by_value[value]))
        cases.append({axis: case[axis] for axis in axes})
        for pair in pairs_of(cases[-1]):
            left = missing.pop(pair, 0) - 1
            if left > 0:
                missing[pair] = left
    return cases


def times_met(cases: Sequence[Mapping[str, Any]]) -> Counter[Pair]:
    """Count the cases with each pair of values."""
    return Counter(pair for case in cases for pair in pairs_of(case))
