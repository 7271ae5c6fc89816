"""Reference of the eviction policy in plain Python, one slot at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

SCORE_STEPS = 8
"""Number of score steps per factor of two."""
REQUEST_SCORE = 24 * SCORE_STEPS
"""Score of a request with age 0."""
WINDOW_FACTOR, MIN_WINDOW = 8, 64
"""Number of slots in the window per victim, and minimum size of the window."""


def add_scores(one: int, other: int) -> int:
    """Return the score of the sum of two scores, which are logarithms."""
    return min(255, max(one, other) + int(SCORE_STEPS * math.log2(1 + 2 ** (-abs(one - other) / SCORE_STEPS)) + 0.5))


def choose_victims(scores: Sequence[int], pins: Sequence[int], count: int, hand: int) -> tuple[list[int], int] | None:
    """Return (victims in the order of the hand, its new position), or `None` if fewer than `count` are unpinned."""
    order = [*range(hand, len(scores)), *range(hand)]
    seen = min(max(count * WINDOW_FACTOR, MIN_WINDOW), len(scores))
    while seen < len(scores) and sum(pins[slot] == 0 for slot in order[:seen]) < count:
        seen += 1
    candidates = [slot for slot in order[:seen] if pins[slot] == 0]
    if len(candidates) < count:
        return None
    leaving = set(sorted(candidates, key=lambda slot: scores[slot])[:count])  # Stable for equal scores.
    return [slot for slot in candidates if slot in leaving], hand if seen == len(scores) else order[seen]
