"""Covering arrays: few cases in which every pair of values of any two axes is met, for matrices too large to be run."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Setting = tuple[str, Any]
"""An axis and one of its values."""
Pair = tuple[Setting, Setting]
"""Of two axes, in their order."""


def allowed_pairs(axes: Mapping[str, Sequence[Any]], can_meet: Callable[[Setting, Setting], bool]) -> list[Pair]:
    """Every pair of values of two axes that one case may have."""
    pairs = [((a, x), (b, y)) for a, b in combinations(axes, 2) for x in axes[a] for y in axes[b]]
    return [pair for pair in pairs if can_meet(*pair) and can_meet(*reversed(pair))]


def pairs_of(case: Mapping[str, Any]) -> list[Pair]:
    """Those that are met in a case, whose axes have the order of all."""
    return list(combinations(case.items(), 2))


def covering(
    axes: Mapping[str, Sequence[Any]], can_meet: Callable[[Setting, Setting], bool], *, times: int, seed: int
) -> list[dict[str, Any]]:
    """Cases in which every allowed pair of values is met `times` times at least, and no other pair is.

    Made one after the other, each from a pair that is still missing and, axis by axis in random order, the values that
    meet most of what is missing: the greedy algorithm of D. Cohen et al., The AETG system, IEEE Transactions on
    Software Engineering, 1997, with one candidate for a case. `can_meet(one, other)` is asked both ways round. Whatever
    is chosen for some axes, each other one must have a value that can meet it; raises LookupError where it has none.
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
            met = {value: [in_order((axis, value), one) for one in chosen] for value in axes[axis]}
            possible = [value for value, pairs in met.items() if allowed.issuperset(pairs)]
            if not possible:
                raise LookupError(f"no value of {axis!r} can meet {case}")
            draw.shuffle(possible)
            case[axis] = max(possible, key=lambda value: sum(missing.get(pair, 0) for pair in met[value]))
        cases.append({axis: case[axis] for axis in axes})
        for pair in pairs_of(cases[-1]):
            left = missing.pop(pair, 0) - 1
            if left > 0:
                missing[pair] = left
    return cases


def times_met(cases: Sequence[Mapping[str, Any]]) -> Counter[Pair]:
    """How often each pair of values is."""
    return Counter(pair for case in cases for pair in pairs_of(case))
