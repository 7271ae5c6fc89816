"""Drift: changes of the new rows since the rows on which the parent of a run was trained."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meseta.comm import World
from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.statistics import UnseenValues
from meseta.data.read.rows import IdLists, Rows
from meseta.data.read.selection import RowSelection
from meseta.data.read.split import open_split_rows
from meseta.system.processors import choose_num_threads
from meseta.system.waits import track_activity
from meseta.telemetry.continued import DenseDrift, DriftRecord, LabelDrift, SparseDrift
from meseta.telemetry.formatting import format_percent
from meseta.train.daily.new_ids import NewIds

# Cohen 1988, "Statistical Power Analysis", calls a shift by half a standard deviation a medium effect.
MIN_MEAN_SHIFT = 0.5
"""Minimum shift of a mean, in standard deviations, for a large change."""
MIN_STD_FACTOR = 2.0
"""Minimum factor by which a standard deviation grows or shrinks for a large change."""
MIN_FILL_SHARE = 0.1
"""Minimum change of the share of missing values for a large change."""
MIN_RATE_FACTOR = 1.2
"""Minimum factor by which a label's rate grows or shrinks for a large change."""
MIN_STANDARD_ERRORS = 4.0
"""Minimum number of standard errors of a changed mean or rate. Chance alone then explains one of 16,000 changes."""


def measure_drift(
    dataset: Dataset,
    parent: Dataset,
    new_ids: NewIds,
    world: World,
    num_retired: Mapping[str, int],
    before: DriftRecord | None = None,
) -> tuple[DriftRecord, UnseenValues]:
    """Read all training rows of a dataset once, and compare them with those of its parent.

    Collective, equal on all ranks. Each rank reads a share of the row groups. Means and deviations are relative to the
    encoding, which is the same in both datasets. Preparation encodes a missing value as 0, so both count together.
    Raises MesetaError if a file is damaged.

    Args:
        dataset: New rows, with the means and deviations of the parent.
        parent: Rows on which the parent was trained.
        new_ids: New ids of the dataset.
        world: Ranks of the run.
        num_retired: Number of retired table rows by feature.
        before: Drift of the parent's rows.

    Returns:
        The changes, and the unseen values, whose `check` applies the rule of `meseta predict`.
    """
    with track_activity("measuring the drift of the new rows"):
        parts = _add_up(dataset, new_ids, world)
    features = [feature.name for feature in dataset.sparse if feature.encoding in ("hash", "vocabulary")]
    countable = [name for name in features if name in new_ids.counted]
    dense = _dense_drift(dataset, parts, before)
    labels = _label_drift(dataset, parent)
    unseen = UnseenValues(
        unseen_counts=Counter({name: parts.new_lookups[name] for name in countable}),
        value_counts=Counter({name: parts.lookups[name] for name in countable}),
        uncounted_features=tuple(name for name in features if name not in new_ids.counted),
        test_shares={f.name: f.test_lookups.unseen_share for f in parent.sparse if f.test_lookups is not None},
    )
    record = DriftRecord(
        num_rows=parts.num_rows,
        dense=dense,
        sparse={
            name: SparseDrift(
                new_row_share=parts.new_rows[name] / max(parts.num_rows, 1),
                new_lookup_share=parts.new_lookups[name] / max(parts.lookups[name], 1),
                num_lookups=parts.lookups[name],
                num_added=len(parts.added[name]),
                num_retired=num_retired.get(name, 0),
            )
            for name in countable
        },
        labels=labels,
        large=(
            *_large_dense_changes(dataset, dense, parts.num_rows),
            *unseen.warnings(),
            *_large_label_changes(labels, dataset, parent),
        ),
    )
    return record, unseen


@dataclass(kw_only=True)
class _Totals:
    """Sums over row groups. Sums of dense columns are kept by row group, so that their order does not matter."""

    num_rows: int
    sums: list[NDArray[np.float64]]
    squares: list[NDArray[np.float64]]
    fills: NDArray[np.int64]
    lookups: Counter[str]
    new_lookups: Counter[str]
    new_rows: Counter[str]
    added: dict[str, NDArray[Any]]
    """Distinct new table rows by feature, without the rows of several values."""

    def add(self, other: _Totals) -> None:
        self.num_rows += other.num_rows
        self.sums += other.sums
        self.squares += other.squares
        self.fills = self.fills + other.fills
        self.lookups.update(other.lookups)
        self.new_lookups.update(other.new_lookups)
        self.new_rows.update(other.new_rows)
        for name, rows in other.added.items():
            self.added[name] = np.union1d(self.added[name], rows) if name in self.added else rows


def _empty_totals(dataset: Dataset) -> _Totals:
    return _Totals(
        num_rows=0,
        sums=[],
        squares=[],
        fills=np.zeros(len(dataset.dense), np.int64),
        lookups=Counter(),
        new_lookups=Counter(),
        new_rows=Counter(),
        added={feature.name: np.empty(0, np.int64) for feature in dataset.sparse},
    )


def _add_up(dataset: Dataset, new_ids: NewIds, world: World) -> _Totals:
    totals, error = _empty_totals(dataset), None
    try:
        selection = RowSelection(dataset, condition=None, negative_keep=1.0, seed=0)
        rows = open_split_rows(dataset, "train", selection, shuffle=False)
        groups = range(world.rank, len(rows.group_rows), world.size)
        with ThreadPoolExecutor(choose_num_threads().number, thread_name_prefix="meseta-drift") as pool:
            for part in pool.map(lambda group: _measure(rows.read([group], by_row=False), dataset, new_ids), groups):
                totals.add(part)
    except Exception as failure:
        error = failure
    world.raise_on_all_ranks(error)
    merged = _empty_totals(dataset)
    for part in world.all_gather_object(totals):
        merged.add(part)
    return merged


def _measure(rows: Rows, dataset: Dataset, new_ids: NewIds) -> _Totals:
    totals = _empty_totals(dataset)
    totals.num_rows = len(rows.label)
    totals.sums = [rows.dense.sum(axis=0, dtype=np.float64)]
    totals.squares = [np.square(rows.dense, dtype=np.float64).sum(axis=0)]
    totals.fills = np.count_nonzero(rows.dense == _encoded_fills(dataset), axis=0).astype(np.int64)
    singles, bags = iter(rows.single_ids), iter(rows.bags)
    for feature in dataset.sparse:
        lists = next(bags) if feature.multi_valued else None
        ids = next(singles) if lists is None else lists.values
        is_new = new_ids.mask(feature.name, ids)
        totals.lookups[feature.name] = ids.size
        totals.new_lookups[feature.name] = int(np.count_nonzero(is_new))
        totals.new_rows[feature.name] = _num_marked(is_new, lists)
        new = ids[is_new]
        totals.added[feature.name] = np.unique(new[new_ids.has_own_row(feature.name, new)]).astype(np.int64)
    return totals


def _num_marked(marks: NDArray[np.bool_], lists: IdLists | None) -> int:
    """Return the number of samples with a marked id."""
    if lists is None:
        return int(np.count_nonzero(marks))
    return len(np.unique(np.searchsorted(np.cumsum(lists.lengths), np.flatnonzero(marks), "right")))


def _encoded_fills(dataset: Dataset) -> NDArray[np.float32]:
    """Return the encoded value [num_dense] of a missing value, which is that of 0, as `meseta prepare` computes it."""
    moments = np.array([(feature.mean, feature.std) for feature in dataset.dense]).reshape(-1, 2)
    return ((0.0 - moments[:, 0]) / moments[:, 1]).astype(np.float32)


def _dense_drift(dataset: Dataset, totals: _Totals, before: DriftRecord | None) -> dict[str, DenseDrift]:
    count = max(totals.num_rows, 1)
    drift = {}
    for place, feature in enumerate(dataset.dense):
        mean = math.fsum(sums[place] for sums in totals.sums) / count
        square = math.fsum(squares[place] for squares in totals.squares) / count
        earlier = before.dense.get(feature.name) if before is not None else None
        drift[feature.name] = DenseDrift(
            mean_shift=mean,
            std_ratio=math.sqrt(max(square - mean * mean, 0.0)),
            fill_share=int(totals.fills[place]) / count,
            fill_share_before=None if earlier is None else earlier.fill_share,
        )
    return drift


def _label_drift(dataset: Dataset, parent: Dataset) -> dict[str, LabelDrift]:
    rates, earlier = (_rates(one) for one in (dataset, parent))
    return {name: LabelDrift(rate=rate, rate_before=earlier[name]) for name, rate in rates.items() if name in earlier}


def _rates(dataset: Dataset) -> dict[str, float]:
    split = dataset.splits.get("train")
    rates = {} if split is None or not split.num_rows else split.base_rates
    return {name or dataset.labels[0]: rate for name, rate in rates.items()}


def _large_dense_changes(dataset: Dataset, drift: Mapping[str, DenseDrift], num_rows: int) -> list[str]:
    lines = []
    for feature in dataset.dense:
        # New rows are always as old as the last row on which the encoding was fitted.
        if feature.age is not None or not num_rows:
            continue
        change, name = drift[feature.name], feature.name
        error = change.std_ratio / math.sqrt(num_rows)
        if abs(change.mean_shift) >= max(MIN_MEAN_SHIFT, MIN_STANDARD_ERRORS * error):
            lines.append(f"the mean of {name!r} has shifted by {change.mean_shift:+.2f} standard deviations")
        if not 1 / MIN_STD_FACTOR < change.std_ratio < MIN_STD_FACTOR:
            lines.append(f"the standard deviation of {name!r} is {change.std_ratio:.3g} times that of its encoding")
        earlier = change.fill_share_before
        if earlier is not None and abs(change.fill_share - earlier) >= MIN_FILL_SHARE:
            shares = f"{format_percent(change.fill_share)}, before {format_percent(earlier)}"
            lines.append(f"the share of rows in which {name!r} is missing or 0 is {shares}")
    return lines


def _large_label_changes(drift: Mapping[str, LabelDrift], dataset: Dataset, parent: Dataset) -> list[str]:
    lines = []
    for name, change in drift.items():
        low, high = sorted((change.rate, change.rate_before))
        sizes = [one.splits["train"].known.get(name, one.splits["train"].num_rows) for one in (dataset, parent)]
        error = _rate_error((change.rate, change.rate_before), sizes)
        if high > low * MIN_RATE_FACTOR and high - low >= MIN_STANDARD_ERRORS * error:
            lines.append(f"the rate of label {name!r} is {change.rate:.4g}, before {change.rate_before:.4g}")
    return lines


def _rate_error(rates: Sequence[float], sizes: Sequence[int]) -> float:
    """Return the standard error of the difference of two independent rates."""
    return math.sqrt(sum(rate * (1 - rate) / size for rate, size in zip(rates, sizes, strict=True)))
