"""Average of the predictions of several runs, with one model in memory at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from typing import IO, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from meseta.data.dataset.dataset import Dataset
from meseta.spec import MesetaError, suggest

Averaged = Literal["probability", "logit"]
"""Predictions whose mean over runs is the prediction of their average."""


class PredictionSums:
    """Sums over runs of the predictions of this rank's rows, in a temporary file without a name.

    The file has 8 bytes per logit for a mean of logits, and 16 for one of probabilities. Memory holds one batch. A
    context manager closes the file.
    """

    def __init__(self, averaged: Averaged) -> None:
        """Create empty sums."""
        self._averaged = averaged
        self._num_runs = 0
        self._file: IO[bytes] = BytesIO()

    def __enter__(self) -> PredictionSums:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, batches: Iterable[tuple[NDArray[Any], Any]]) -> None:
        """Add a run's (logits [B] or [B, T], batch) of all rows. Batches of all runs must have the same rows."""
        with ExitStack() as failing:
            sums = failing.enter_context(tempfile.TemporaryFile())
            for logits, _ in batches:
                self._next(logits).tofile(sums)
            sums.seek(0)
            failing.pop_all()
        self._file.close()
        self._file = sums
        self._num_runs += 1

    def average(self, logits: NDArray[Any]) -> NDArray[np.float64]:
        """Return the average, as logits, of the sums and the last run's `logits` [B] or [B, T] of the next batch."""
        sums = self._next(logits)
        # With probabilities, the divisor cancels out.
        average: NDArray[np.float64] = (
            sums[0] / (self._num_runs + 1) if self._averaged == "logit" else sums[0] - sums[1]
        )
        return average

    def _next(self, logits: NDArray[Any]) -> NDArray[np.float64]:
        """Return the sums of the next batch with `logits`: logits [1, ...], or logs of the sums of probabilities of
        (positives, negatives) [2, ...]."""
        # Infinite logits become NaN, because their probabilities would hide them.
        values = np.where(np.isfinite(logits), logits, np.nan).astype(np.float64)[np.newaxis]
        if self._averaged == "probability":
            values = np.concatenate([-_logaddexp(0.0, -values), -_logaddexp(0.0, values)])
        if not self._num_runs:
            return values
        before = np.fromfile(self._file, count=values.size).reshape(values.shape)
        return before + values if self._averaged == "logit" else _logaddexp(before, values)


def _logaddexp(first: float | NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):  # NumPy warns about NaN.
        return np.logaddexp(first, second)


def check_averaged(averaged: str) -> None:
    """Raise MesetaError unless `averaged` is one of `Averaged`."""
    if averaged not in get_args(Averaged):
        raise MesetaError(f"average: no such kind {averaged!r}; {suggest(averaged, get_args(Averaged))}")


def check_same_labels(datasets: Mapping[Path, Dataset]) -> None:
    """Raise MesetaError if runs predict other labels than the first one. `datasets` are by run folder."""
    (first, expected), *more = ((run_dir, _label_sources(dataset)) for run_dir, dataset in datasets.items())
    for run_dir, sources in more:
        are_equal = all(None in pair or len(set(pair)) == 1 for pair in zip(sources, expected, strict=False))
        if len(sources) != len(expected) or not are_equal:
            raise MesetaError(
                f"average: run {str(run_dir)!r} predicts {_join(sources)}, but run {str(first)!r} predicts "
                f"{_join(expected)}; choose runs with the same labels"
            )


def _label_sources(dataset: Dataset) -> list[str | None]:
    """Return the raw column or condition of each label. `None` means that an older version did not record it."""
    form = dataset.source_form
    if len(dataset.labels) > 1:
        names: list[str | None] = list(dataset.labels)
    elif form is not None and len(form.labels) == 1:
        names = list(form.labels)
    elif dataset.labels == ("label",):
        names = [dataset.label_source]
    else:
        names = list(dataset.labels)
    conditions = {} if form is None else {rule.name: rule.condition for rule in form.label_rules}
    return [None if name is None else conditions.get(name, name) for name in names]


def _join(names: Sequence[str | None]) -> str:
    return ", ".join("an unknown label" if name is None else repr(name) for name in names)
