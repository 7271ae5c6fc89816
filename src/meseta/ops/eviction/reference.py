"""The policy of meseta.ops.eviction, slot after slot in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence

SCORE_STEPS = 8
"""Of a score, to twice as much."""
REQUEST_SCORE = 24 * SCORE_STEPS
"""Score of a request where no part of a half-life has passed."""
WINDOW_FACTOR, MIN_WINDOW = 8, 64
"""Slots that are looked at for each that is needed, and in all at least."""


def add_scores(one: int, other: int) -> int:
    """The score of two scores together."""
    return min(255, max(one, other) + int(SCORE_STEPS * math.log2(1 + 2 ** (-abs(one - other) / SCORE_STEPS)) + 0.5))


def choose_victims(scores: Sequence[int], pins: Sequence[int], count: int, hand: int) -> tuple[list[int], int] | None:
    """The slots that leave, in the order in which the hand meets them, and where it is then; None where too few may."""
    order = [*range(hand, len(scores)), *range(hand)]
    seen = min(max(count * WINDOW_FACTOR, MIN_WINDOW), len(scores))
    while seen < len(scores) and sum(pins[slot] == 0 for slot in order[:seen]) < count:
        seen += 1
    candidates = [slot for slot in order[:seen] if pins[slot] == 0]
    if len(candidates) < count:
        return None
    leaving = set(sorted(candidates, key=lambda slot: scores[slot])[:count])  # sorted keeps the order of equal ones
    return [slot for slot in candidates if slot in leaving], hand if seen == len(scores) else order[seen]
