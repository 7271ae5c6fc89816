"""Click logs of planted useful and noise columns of the same kinds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

MIN_GAIN, MAX_GAIN = 0.001, 0.02
"""Limits of the gain of a useful column, in nats of log loss per row."""
NUM_ROWS = 28_500
# Variance of a label around its probability, about that of the logs.
_INFORMATION = 0.18
_INTERCEPT = -1.0
KINDS = {"few ids": 3, "many ids": 3, "number": 3, "list": 1}
"""Number of useful columns of each kind, and of noise columns, in a log."""


@dataclass(frozen=True)
class PlantedColumn:
    name: str
    kind: str
    gain: float
    """Decrease of the log loss by the best estimate of its effect from the training rows. 0 for a noise column."""


def draw_log(path: Path, seed: int) -> tuple[PlantedColumn, ...]:
    """Write a log to `path`, and return its columns."""
    draw = np.random.default_rng([seed, 55])
    kinds = [(kind, is_useful) for kind, number in KINDS.items() for is_useful in (True, False) for _ in range(number)]
    names = [f"c{place:02d}" for place in draw.permutation(len(kinds))]
    logits, columns, content = np.full(NUM_ROWS, _INTERCEPT), [], {}
    for name, (kind, is_useful) in zip(names, kinds, strict=True):
        gain = float(np.exp(draw.uniform(np.log(MIN_GAIN), np.log(MAX_GAIN)))) if is_useful else 0.0
        content[name], effect = _DRAW[kind](draw, gain)
        logits += effect
        columns.append(PlantedColumn(name, kind, gain))
    label = (draw.random(NUM_ROWS) < 1 / (1 + np.exp(-logits))).astype(np.int64)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"clicked": label, **dict(sorted(content.items()))}), path)
    return tuple(columns)


def effect_variance(gain: float, counts: NDArray[np.int64]) -> float:
    """Return the variance of the effects of ids with which their best estimates lower the log loss by `gain`.

    The estimate of an id's effect is shrunk: of its variance v, the share n I v / (1 + n I v) is known from n rows that
    each have the information I.

    Args:
        gain: Decrease of the log loss, in nats per row.
        counts: Number of occurrences of each id [m].
    """
    low, high = 0.0, 1e3
    for _ in range(60):
        variance = (low + high) / 2
        information = counts * _INFORMATION * variance
        known = float((counts * variance * information / (1 + information)).sum()) / NUM_ROWS
        low, high = (variance, high) if known * _INFORMATION / 2 < gain else (low, variance)
    return high


_Column = tuple[Any, NDArray[np.float64]]
"""Values of a column, and their effects on the logit."""


def _draw_ids(draw: np.random.Generator, gain: float, low: float, high: float) -> _Column:
    num_ids = round(np.exp(draw.uniform(np.log(low), np.log(high))))
    shares = np.arange(1, num_ids + 1) ** -draw.uniform(0, 0.8)
    ids = draw.choice(num_ids, NUM_ROWS, p=shares / shares.sum())
    variance = effect_variance(gain, np.bincount(ids, minlength=num_ids))
    effects = draw.normal(0, 1, num_ids)[ids]
    # Few ids have effects of just this size, not only on average.
    effects = (effects - effects.mean()) / effects.std() if num_ids <= 30 else effects
    return [f"v{number}" for number in ids], effects * variance**0.5


def _draw_few_ids(draw: np.random.Generator, gain: float) -> _Column:
    return _draw_ids(draw, gain, 3, 30)


def _draw_many_ids(draw: np.random.Generator, gain: float) -> _Column:
    return _draw_ids(draw, gain, 200, NUM_ROWS / 8)


_CURVES: tuple[Callable[[NDArray[np.float64]], NDArray[np.float64]], ...] = (
    lambda values: values,
    np.tanh,
    np.abs,
    lambda values: (values > 0.5).astype(np.float64),
    lambda values: np.sin(2 * values),
)


def _draw_number(draw: np.random.Generator, gain: float) -> _Column:
    values = draw.normal(0, 1, NUM_ROWS)
    effects = _CURVES[draw.integers(len(_CURVES))](values)
    effects = (effects - effects.mean()) / effects.std()
    stored = np.round(np.exp(values + 3), 2) if draw.random() < 0.5 else np.round(values, 4)
    return stored, effects * (2 * gain / _INFORMATION) ** 0.5


def _draw_list(draw: np.random.Generator, gain: float) -> _Column:
    num_ids = round(np.exp(draw.uniform(np.log(20), np.log(500))))
    lengths = draw.integers(0, 5, NUM_ROWS)
    ids = draw.integers(0, num_ids, lengths.sum())
    variance = effect_variance(gain, np.bincount(ids, minlength=num_ids))
    effects = draw.normal(0, variance**0.5, num_ids)
    rows = np.repeat(np.arange(NUM_ROWS), lengths)
    lists = np.split(ids, np.cumsum(lengths)[:-1])
    return pa.array([part.tolist() for part in lists], pa.list_(pa.int64())), np.bincount(rows, effects[ids], NUM_ROWS)


_DRAW = {"few ids": _draw_few_ids, "many ids": _draw_many_ids, "number": _draw_number, "list": _draw_list}
