"""Groups of samples by UTC hour and by new ids, and their exact metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meseta.telemetry.continued import EpochMetricsRecord
from meseta.train.metrics import base_rate_entropy
from meseta.train.metrics.grouped import sum_sorted_groups
from meseta.train.metrics.samples import WeightedSamples, as_samples, losses_and_predictions

MAX_HOURS = 168
"""Maximum number of groups by hour. Rows of more hours are grouped by hour of the day."""
UNKNOWN_HOUR, NO_HOUR = -(1 << 40), -(1 << 41)
"""Hours of samples without a time, and of samples of data without times."""
UNKNOWN = "unknown"
MAX_CODE_RANGE = 1 << 20
"""Range of codes for which a table of all of them is faster than sorting. It covers sixty years."""
_HOUR_SECONDS = 3600.0
_FIRST_HOUR, _LAST_HOUR = (int(datetime(year, 1, 2, tzinfo=UTC).timestamp() // _HOUR_SECONDS) for year in (1, 9999))


def to_hours(times: NDArray[np.float64] | None, num_samples: int) -> NDArray[np.int64]:
    """Return the hours [n] since 1970-01-01 UTC of times [n] in seconds. `None` means data without times."""
    if times is None:
        return np.full(num_samples, NO_HOUR, np.int64)
    hours = np.floor(times / _HOUR_SECONDS)
    with np.errstate(invalid="ignore"):
        is_valid = (hours >= _FIRST_HOUR) & (hours <= _LAST_HOUR)
    return np.where(is_valid, hours, UNKNOWN_HOUR).astype(np.int64)


def to_codes(hours: NDArray[np.int64], is_new: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return one number per sample for its hour and whether it has a new id, see `split_codes`."""
    return 2 * hours + is_new


def split_codes(codes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return (hours, whether there is a new id) [n] of codes [n]."""
    return codes >> 1, (codes & 1).astype(np.bool_)


def is_by_day(hours: NDArray[np.int64]) -> bool:
    """Whether distinct `hours` are too many, so that samples are grouped by hour of the day."""
    return int(np.count_nonzero(hours >= _FIRST_HOUR)) > MAX_HOURS


def hour_of_day(hours: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return hours 0..23 of `hours`. The hours of samples without a time are unchanged."""
    return np.where(hours >= _FIRST_HOUR, hours % 24, hours)


def hour_name(hour: int, *, by_day: bool) -> str:
    """Return the name of an hour, such as 2026-11-27T14, or 14 for an hour of the day."""
    if hour == UNKNOWN_HOUR:
        return UNKNOWN
    if by_day:
        return f"{hour:02}"
    return datetime.fromtimestamp(hour * _HOUR_SECONDS, UTC).strftime("%Y-%m-%dT%H")


class HourIndex(NamedTuple):
    """Distinct hours of samples, and the group of each code."""

    hours: NDArray[np.int64]
    """Distinct hours [h], ascending."""
    by_day: bool
    groups: NDArray[np.int64]
    """Group of each of k distinct codes: 2 * (index of the hour) + (1 if there is a new id)."""

    @staticmethod
    def from_codes(codes: NDArray[np.int64]) -> HourIndex:
        """Number the groups of distinct codes [k]."""
        hours, is_new = split_codes(codes)
        by_day = is_by_day(np.unique(hours))
        distinct, index = np.unique(hour_of_day(hours) if by_day else hours, return_inverse=True)
        return HourIndex(distinct, by_day, 2 * index + is_new)

    def name_hours(self, documents: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
        """Return documents [h] by the names of their hours. Empty for data without times."""
        pairs = zip(self.hours.tolist(), documents, strict=True)
        return {hour_name(hour, by_day=self.by_day): one for hour, one in pairs if hour != NO_HOUR}


def find_distinct(values: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """Return (distinct values [k], index [n] of each value among them). Fast if all values are in a small range."""
    if not len(values) or values.max() - values.min() > MAX_CODE_RANGE:
        distinct, index = np.unique(values, return_inverse=True)
        return distinct, index
    low = values.min()
    offsets = values - low
    is_present = np.bincount(offsets) > 0
    return np.flatnonzero(is_present) + low, (np.cumsum(is_present) - 1)[offsets]


def sort_samples(columns: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the columns of a `MetricWindow` with group codes, in an order that depends on the set of samples only."""
    logits = columns["logits"] + columns["logits"].dtype.type(0)  # -0.0 becomes 0.0.
    columns = {**columns, "logits": logits}
    _, index = find_distinct(columns["groups"])
    order = _sort_order([logits, index, columns["labels"], columns.get("weights")])
    return {name: column[order] for name, column in columns.items()}


def _sort_order(keys: Sequence[NDArray[Any] | None]) -> NDArray[np.intp]:
    """Return the order [n] that sorts samples by the first key, then by the second, and so on."""
    order: NDArray[np.intp] | None = None
    # Stable sorts of 16 bits at a time. numpy sorts such integers by radix, several times faster than wider numbers.
    for key in reversed([key for key in keys if key is not None]):
        for digit in _sort_digits(key):
            step = np.argsort(digit if order is None else digit.take(order), kind="stable")
            order = step if order is None else order.take(step)
    return np.arange(len(keys[0]) if keys[0] is not None else 0) if order is None else order


def _sort_digits(key: NDArray[Any]) -> Iterator[NDArray[np.uint16]]:
    """Yield digits [n] of 16 bits, the lowest first, of numbers with the order of `key` [n]. Digits that are equal in
    all numbers are left out."""
    if key.dtype.kind == "f":
        bits = (key + key.dtype.type(0)).view(f"i{key.itemsize}")  # -0.0 becomes 0.0.
        limits = np.iinfo(bits.dtype)
        # Negative numbers are ordered by descending magnitude.
        bits = bits ^ (bits >> (limits.bits - 1) & limits.max) ^ limits.min
    else:
        bits = key.astype(np.int64)
    digits = bits.view(np.uint16).reshape(-1, bits.itemsize // 2)  # The lowest first, as processors are little-endian.
    for place in range(digits.shape[1]):
        digit = np.ascontiguousarray(digits[:, place])
        if len(digit) and (digit != digit[0]).any():
            yield digit


def compute_exact(windows: Mapping[str, Mapping[str, NDArray[Any]]]) -> EpochMetricsRecord:
    """Return the exact metrics of windows with group codes, by task, in total and by group.

    Raises MesetaError under the conditions of `MetricWindow.compute`.
    """
    parts = {task: _compute_task(columns) for task, columns in windows.items()}
    return make_record(parts)


class TaskGroups(NamedTuple):
    """Metrics of one task as plain data."""

    total: dict[str, Any]
    by_new: list[dict[str, Any]]
    """Metrics of the samples without and with a new id."""
    by_hour: Mapping[str, Mapping[str, Any]]


def make_record(tasks: Mapping[str, TaskGroups]) -> EpochMetricsRecord:
    """Combine the metrics of the tasks, which may have different hours if labels are missing."""
    hours = dict.fromkeys(sorted((name for task in tasks.values() for name in task.by_hour), key=_unknown_last))
    empty = _describe(_EMPTY)

    def combine(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        by_task = {"tasks": dict(zip(tasks, documents, strict=True))} if len(tasks) > 1 else {}
        return {**documents[0], **by_task}

    groups = list(tasks.values())
    return EpochMetricsRecord.model_validate(
        {
            "total": combine([task.total for task in groups]),
            "with_new_ids": combine([task.by_new[1] for task in groups]),
            "without_new_ids": combine([task.by_new[0] for task in groups]),
            "by_hour": {name: combine([task.by_hour.get(name, empty) for task in groups]) for name in hours},
        }
    )


def _unknown_last(name: str) -> tuple[bool, str]:
    return name == UNKNOWN, name


class _Sums(NamedTuple):
    num_samples: int
    num_positives: int
    weight: float
    positive_weight: float
    loss: float
    prediction: float
    auc: float


_EMPTY = _Sums(0, 0, 0.0, 0.0, 0.0, 0.0, math.nan)


def _describe(sums: _Sums) -> dict[str, Any]:
    logloss = sums.loss / sums.weight if sums.weight else math.nan
    entropy = base_rate_entropy(sums.positive_weight, sums.weight)
    values = {
        "logloss": logloss,
        "ne": logloss / entropy if entropy > 0.0 else math.nan,
        "auc": sums.auc,
        "calibration": sums.prediction / sums.positive_weight if sums.positive_weight else math.nan,
    }
    return {
        "num_samples": sums.num_samples,
        "num_positives": sums.num_positives,
        "weight": sums.weight,
        **{name: None if math.isnan(value) else value for name, value in values.items()},
    }


def _compute_task(columns: Mapping[str, NDArray[Any]]) -> TaskGroups:
    samples = as_samples(**columns).validate()
    assert samples.groups is not None
    codes, index = find_distinct(samples.groups)
    hours = HourIndex.from_codes(codes)
    num_hours = len(hours.hours)
    # There are at most 2 * (MAX_HOURS + 2) groups.
    groups = hours.groups.astype(np.uint16).take(index)
    # Equal logits of one class have equal losses, so only weights make a difference within them.
    order = _sort_order([samples.logits, samples.labels, samples.weights])
    by_logit = WeightedSamples(
        logits=samples.logits.take(order),
        labels=samples.labels.take(order),
        weights=None if samples.weights is None else samples.weights.take(order),
        scale=samples.scale,
    )
    groups = groups.take(order)
    fine = _sum_groups(by_logit, groups, 2 * num_hours).reshape(num_hours, 2, 6)
    return TaskGroups(
        total=_describe_groups(fine.reshape(1, -1, 6), _aucs(by_logit, None, 1))[0],
        by_new=_describe_groups(fine.swapaxes(0, 1), _aucs(by_logit, groups & 1, 2)),
        by_hour=hours.name_hours(_describe_groups(fine, _aucs(by_logit, groups >> 1, num_hours))),
    )


def _sum_groups(samples: WeightedSamples, groups: NDArray[np.uint16], num_groups: int) -> NDArray[np.float64]:
    """Return sums [num_groups, 6] over samples in their order: the fields of `_Sums` without the AUC."""
    is_positive = samples.labels == 1
    losses, predictions = losses_and_predictions(samples.logits, np.where(is_positive, -1.0, 1.0))
    classes = 2 * groups + is_positive

    def total(values: NDArray[np.float64] | None) -> NDArray[Any]:
        return np.bincount(classes, weights=values, minlength=2 * num_groups).reshape(num_groups, 2)

    counts = total(None)
    weights = counts * samples.scale
    if samples.weights is None:
        losses, predictions = losses * samples.scale, predictions * samples.scale
    else:
        weights = total(samples.weights)
        losses, predictions = losses * samples.weights, predictions * samples.weights
    sums = [counts.sum(1), counts[:, 1], weights.sum(1), weights[:, 1], total(losses).sum(1), total(predictions).sum(1)]
    return np.stack(sums, axis=1)


def _aucs(samples: WeightedSamples, groups: NDArray[Any] | None, num_groups: int) -> NDArray[np.float64]:
    """Return the AUC of each group [num_groups] of sorted samples. nan if a class is missing."""
    aucs = np.full(num_groups, math.nan)
    scores, is_positive, weights = samples.logits, samples.labels == 1, samples.weights
    if not len(samples):
        return aucs
    if groups is None or num_groups == 1:
        groups = np.zeros(len(samples), np.uint16)
    else:
        order = np.argsort(groups, kind="stable")  # Keeps the order of logits.
        groups, scores, is_positive = groups.take(order), scores.take(order), is_positive.take(order)
        weights = None if weights is None else weights.take(order)
    counts = np.bincount(groups, minlength=num_groups)
    aucs[counts > 0] = sum_sorted_groups(groups, scores, is_positive, weights).aucs()
    return aucs


def _describe_groups(sums: NDArray[np.float64], aucs: NDArray[np.float64]) -> list[dict[str, Any]]:
    """Return documents [g] of the sums [g, k, 6] over k subgroups."""
    documents = []
    for (num_samples, num_positives, weight, positive_weight, loss, prediction), auc in zip(
        sums.sum(axis=1).tolist(), aucs.tolist(), strict=True
    ):
        group = _Sums(int(num_samples), int(num_positives), weight, positive_weight, loss, prediction, auc)
        documents.append(_describe(group))
    return documents
