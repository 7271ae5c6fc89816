"""Choice of one width per table that minimizes the total size within a loss budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meseta.config.row_bits import RowBits

# Maximum number of candidate points per table. Above it, losses are rounded up to this many levels.
_MAX_POINTS = 20_000
# Factor by which the allowed loss is reduced, at least, after a choice exceeds the budget.
_BACKOFF_FACTOR = 0.8


@dataclass(frozen=True, kw_only=True)
class MeasuredWidth:
    """Size and loss of one table at one width."""

    bits: RowBits | None
    """Width of the rows. `None` means exact."""
    num_bytes: int
    """Size of the table in a full checkpoint."""
    ne_loss: float
    """Relative increase of the normalized entropy."""


def choose_widths(
    widths: Mapping[str, Sequence[MeasuredWidth]], budget: float, measure: Callable[[Mapping[str, RowBits]], float]
) -> tuple[dict[str, MeasuredWidth], float]:
    """Choose one width per table. Return (widths by table, measured loss of all chosen widths together), within
    `budget`.

    Args:
        widths: Measured widths of each table, including an exact one.
        budget: Maximum relative increase of the normalized entropy.
        measure: Measures the loss of a choice, given the tables that are not exact.
    """
    # A width may improve the metric by chance. Count a small loss, so that it can still be replaced if a choice exceeds
    # the budget.
    least = budget / (1000 * len(widths))
    losses = {name: [0.0 if w.bits is None else max(w.ne_loss, least) for w in of] for name, of in widths.items()}
    allowed = budget
    # Losses of single tables are added. If the measured loss of a choice exceeds the budget, repeat with a smaller sum.
    # This ends, because exact widths have no loss.
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
    """Return the index of the entry of each table with the smallest total size whose total loss is at most
    `allowed`."""
    # Dynamic program over tables. Points that another one beats in both loss and size are dropped.
    loss, size = np.zeros(1), np.zeros(1)
    steps: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for of_sizes, of_losses in zip(sizes, losses, strict=True):
        all_losses = (loss[:, None] + np.asarray(of_losses)).ravel()
        all_sizes = (size[:, None] + np.asarray(of_sizes, np.float64)).ravel()
        if len(all_losses) > _MAX_POINTS:
            step = allowed / _MAX_POINTS
            all_losses = np.ceil(all_losses / step) * step
        order = np.lexsort((all_losses, all_sizes))  # By (size, loss).
        order = order[all_losses[order] <= allowed]
        best_before = np.minimum.accumulate(np.concatenate([[np.inf], all_losses[order]]))[:-1]
        order = order[all_losses[order] < best_before]
        steps.append((order // len(of_sizes), order % len(of_sizes)))
        loss, size = all_losses[order], all_sizes[order]
    place, places = 0, list[int]()  # The first point has the smallest size.
    for before, taken in reversed(steps):
        places.append(int(taken[place]))
        place = int(before[place])
    return places[::-1]
