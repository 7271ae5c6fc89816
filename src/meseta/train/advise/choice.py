"""Of each table's widths the ones that take the fewest bytes together, within what they may lose together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meseta.config.row_bits import RowBits

_MAX_POINTS = 20_000
"""Best choices for the tables so far that are kept; where there are more, losses are rounded up to this many steps."""
_BACKOFF_FACTOR = 0.8
"""What a choice that loses too much may lose at most in the next round, of what it was thought to lose."""


@dataclass(frozen=True, kw_only=True)
class MeasuredWidth:
    """One table in one width."""

    bits: RowBits | None
    """Of its rows; None: exact."""
    num_bytes: int
    """Of the table in a checkpoint that holds all of its rows."""
    ne_loss: float
    """By what part the normalised entropy rises."""


def choose_widths(
    widths: Mapping[str, Sequence[MeasuredWidth]], budget: float, measure: Callable[[Mapping[str, RowBits]], float]
) -> tuple[dict[str, MeasuredWidth], float]:
    """One width per table, and what they lose together by `measure` of the tables that are not exact: at most `budget`.

    Losses of single tables are added first; where a choice loses more together than it should, less is allowed, until
    one holds. Each table has an exact width, which loses nothing, so there is one.
    """
    least = budget / (1000 * len(widths))
    """A width that gained by chance, and so is thought free, must give way as well."""
    losses = {name: [0.0 if w.bits is None else max(w.ne_loss, least) for w in of] for name, of in widths.items()}
    allowed = budget
    while True:
        places = _minimize_bytes([[w.num_bytes for w in of] for of in widths.values()], [*losses.values()], allowed)
        chosen = {name: of[place] for (name, of), place in zip(widths.items(), places, strict=True)}
        narrow = {name: width.bits for name, width in chosen.items() if width.bits is not None}
        together = measure(narrow) if narrow else 0.0
        if together <= budget:
            return chosen, together
        added = sum(losses[name][place] for name, place in zip(widths, places, strict=True))
        allowed = added * min(_BACKOFF_FACTOR, budget / together)


def _minimize_bytes(sizes: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], allowed: float) -> list[int]:
    """Which entry of each table to take, so that the sizes sum to the least while the losses sum to `allowed` at most.

    Table by table, of all sums of losses and sizes those are kept that no other one beats in both.
    """
    loss, size = np.zeros(1), np.zeros(1)
    steps: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for of_sizes, of_losses in zip(sizes, losses, strict=True):
        all_losses = (loss[:, None] + np.asarray(of_losses)).ravel()
        all_sizes = (size[:, None] + np.asarray(of_sizes, np.float64)).ravel()
        if len(all_losses) > _MAX_POINTS:
            step = allowed / _MAX_POINTS
            all_losses = np.ceil(all_losses / step) * step
        order = np.lexsort((all_losses, all_sizes))  # by size, the smallest loss first among equals
        order = order[all_losses[order] <= allowed]
        best_before = np.minimum.accumulate(np.concatenate([[np.inf], all_losses[order]]))[:-1]
        order = order[all_losses[order] < best_before]
        steps.append((order // len(of_sizes), order % len(of_sizes)))
        loss, size = all_losses[order], all_sizes[order]
    place, places = 0, list[int]()  # the smallest size comes first
    for before, taken in reversed(steps):
        places.append(int(taken[place]))
        place = int(before[place])
    return places[::-1]
