"""Summary of the columns of a prepared dataset, computed on all cores with one column per thread."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.part_files import PART_ERRORS, open_part
from meseta.data.dataset.records import DenseFeature, SparseFeature
from meseta.data.dataset.vocabulary import read_vocabulary_values
from meseta.data.schema.layout import signed_expm1, signed_log1p
from meseta.errors import error_summary
from meseta.spec import MesetaError, Reuse
from meseta.system.files import resolve_inside
from meseta.system.processors import choose_num_threads

NUM_BINS = 24
NUM_TOP_IDS = 5
TOP_10 = 10
TOP_100 = 100

RowsReadCallback = Callable[[float], None]


@dataclass(frozen=True, kw_only=True)
class ValueSummary:
    """Moments and extremes of one column."""

    mean: float
    std: float
    """Population standard deviation."""
    min: float
    max: float
    share_zero: float


@dataclass(frozen=True, kw_only=True)
class SplitSummary:
    """Row counts, labels, weights, groups and times of one split."""

    num_rows: int
    labels: dict[str, float]
    base_rates: dict[str, float | None]
    """Mean of each label over the samples that have it. `None` if no sample has it."""
    weights: ValueSummary | None
    """Summary of the sample weights. `None` without weights."""
    num_groups: int | None
    max_group_rows: int | None
    """Number of rows of the largest group. `None` without groups."""
    time_range: tuple[float, float] | None
    """First and last time in seconds since 1970-01-01 UTC. `None` if there are no times."""


@dataclass(frozen=True, kw_only=True)
class DenseSummary:
    """Summary of one dense feature over all splits, in raw units: the scaling of `meseta prepare` is reversed."""

    name: str
    # Preparation maps missing values to 0, and negative ones too unless the feature is signed.
    values: ValueSummary
    """Moments and extremes of the raw values. `share_zero` includes missing values and, if the feature is unsigned,
    negative ones."""
    bins: tuple[int, ...]
    """Histogram with 24 equal intervals of sign(x) * log(1 + |x|) from the smallest to the largest value."""
    test_shift: float | None
    """Mean logarithm of the test split minus that of the training split, in standard deviations of the latter. `None`
    if a split has no rows."""


@dataclass(frozen=True, kw_only=True)
class FrequentId:
    """One of the most frequent ids of a feature."""

    id: int
    value: str | None
    """Value of the id in the vocabulary. `None` for hashed ids, and for row 0."""
    count: int


@dataclass(frozen=True, kw_only=True)
class SparseSummary:
    """Summary of one sparse feature in the training split."""

    name: str
    num_embeddings: int
    num_lookups: int
    num_uniques: int
    coverage: float
    """Share of the table's rows that are looked up."""
    mean_pooling_factor: float
    max_pooling_factor: int
    share_empty: float
    top: tuple[FrequentId, ...]
    """The five most frequent ids, in order of decreasing count and then of increasing id."""
    top_shares: tuple[float, float, float]
    """Shares of the lookups that belong to the most frequent 1, 10 and 100 ids."""
    num_half: int
    """Smallest number of ids that have at least half of the lookups."""
    unseen_lookups: float | None
    """Share of the lookups of the test split whose ids do not occur in training. `None` if the test split has no
    lookups."""
    unseen_uniques: float | None
    """Share of the distinct ids of the test split that do not occur in training. `None` if the test split has no
    lookups."""
    reuse: Reuse


@dataclass(frozen=True, kw_only=True)
class DatasetSummary:
    """Summary of a prepared dataset."""

    splits: dict[str, SplitSummary]
    dense: tuple[DenseSummary, ...]
    sparse: tuple[SparseSummary, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON. Reuse histograms are left out, because dataset.json contains them."""
        document = asdict(self)
        for feature in document["sparse"]:
            del feature["reuse"]
        return document


def describe(dataset: Dataset, on_rows: RowsReadCallback | None = None) -> DatasetSummary:
    """Read all rows of `dataset` and summarize its columns.

    Each core needs 4 bytes for each table row that occurs, or 8 bytes for each group. `on_rows` receives the rows read
    since the last call, where each column counts as a fraction of a row. Raises MesetaError if a file cannot be read,
    an id is out of range or the dataset is a recipe.
    """
    dataset.check_has_files("`meseta data stats`")
    jobs: list[Callable[[], Any]] = [partial(_summarize_sparse, dataset, feature) for feature in dataset.sparse]
    jobs += [partial(_summarize_dense, dataset, feature) for feature in dataset.dense]
    jobs += [partial(_summarize_split, dataset, name) for name in dataset.splits]
    num_rows = sum(split.num_rows for split in dataset.splits.values())
    with ThreadPoolExecutor(choose_num_threads().number, thread_name_prefix="meseta-stats") as pool:
        try:
            futures = [pool.submit(job) for job in jobs]
            for future in as_completed(futures):
                future.result()
                if on_rows is not None:
                    on_rows(num_rows / len(jobs))
        finally:
            # After an error, do not start the remaining columns.
            pool.shutdown(cancel_futures=True)
    results: Iterator[Any] = (future.result() for future in futures)
    return DatasetSummary(
        sparse=tuple(next(results) for _ in dataset.sparse),
        dense=tuple(next(results) for _ in dataset.dense),
        splits={name: next(results) for name in dataset.splits},
    )


def _read_column(dataset: Dataset, split: str, column: str) -> Iterator[pa.Array]:
    for file in dataset.splits[split].files if split in dataset.splits else ():
        path = dataset.dir / file.path
        try:
            with open_part(resolve_inside(dataset.dir, file.path)) as opened:
                for index in range(opened.metadata.num_row_groups):
                    table = opened.read_row_group(index, columns=[column], use_threads=False)
                    yield from table.column(column).chunks
        except (*PART_ERRORS, KeyError) as error:
            reason = error_summary(error)
            raise MesetaError(
                f"dataset file {str(path)!r}: column {column!r} cannot be read ({reason}); "
                f"run `meseta data check {dataset.dir}` for a list of all faults"
            ) from None


def _read_numbers(dataset: Dataset, split: str, column: str) -> Iterator[NDArray[np.float64]]:
    for array in _read_column(dataset, split, column):
        yield array.to_numpy(zero_copy_only=False).astype(np.float64)


class _RunningSums:
    def __init__(self) -> None:
        self.count, self.zeros = 0, 0
        self.total, self.squares = 0.0, 0.0
        self.min, self.max = math.inf, -math.inf
        self._shift = 0.0

    def add(self, values: NDArray[np.float64], num_zeros: int) -> None:
        if not values.size:
            return
        # Sum the distances from the first value. Sums of the values themselves would cancel in the variance.
        if not self.count:
            self._shift = float(values[0])
        away = values - self._shift
        self.count += values.size
        self.zeros += num_zeros
        self.total += float(away.sum())
        self.squares += float(away @ away)
        self.min, self.max = min(self.min, float(values.min())), max(self.max, float(values.max()))

    def result(self) -> ValueSummary:
        """Return the summary, or zeros if there are no values."""
        if not self.count:
            return ValueSummary(mean=0.0, std=0.0, min=0.0, max=0.0, share_zero=0.0)
        mean = self.total / self.count
        return ValueSummary(
            mean=self._shift + mean,
            std=math.sqrt(max(self.squares / self.count - mean * mean, 0.0)),
            min=self.min,
            max=self.max,
            share_zero=self.zeros / self.count,
        )


def _summarize_split(dataset: Dataset, name: str) -> SplitSummary:
    weights, times = _RunningSums(), _RunningSums()
    if dataset.weight is not None:
        for values in _read_numbers(dataset, name, dataset.weight):
            weights.add(values, int((values == 0).sum()))
    if dataset.time is not None:
        for values in _read_numbers(dataset, name, dataset.time):
            times.add(values[np.isfinite(values)], 0)
    sizes = _group_sizes(dataset, name)
    split = dataset.splits[name]
    sums = {
        label: sum(float(np.nansum(v)) for v in _read_numbers(dataset, name, label)) for label in dataset.label_columns
    }
    label_counts = {label: split.known.get(label, split.num_rows) for label in sums}
    return SplitSummary(
        num_rows=split.num_rows,
        labels=sums,
        base_rates={
            label: total / label_counts[label] if label_counts[label] else None for label, total in sums.items()
        },
        weights=None if dataset.weight is None else weights.result(),
        num_groups=None if sizes is None else sizes.size,
        max_group_rows=None if sizes is None else int(sizes.max(initial=0)),
        time_range=(times.min, times.max) if times.count else None,
    )


def _group_sizes(dataset: Dataset, split: str) -> NDArray[np.int64] | None:
    if dataset.group is None:
        return None
    keys, sizes = np.zeros(0, np.int64), np.zeros(0, np.int64)
    waiting: list[tuple[NDArray[Any], NDArray[Any]]] = []
    num_waiting = 0
    for array in _read_column(dataset, split, dataset.group):
        waiting.append(np.unique(array.to_numpy(zero_copy_only=False), return_counts=True))
        num_waiting += waiting[-1][0].size
        # Merge only when the pending keys outgrow the merged ones, so that each key takes part in few merges.
        if num_waiting > max(keys.size, 1 << 20):
            keys, sizes = _merge_counts([(keys, sizes), *waiting])
            waiting, num_waiting = [], 0
    return _merge_counts([(keys, sizes), *waiting])[1]


def _merge_counts(parts: list[tuple[NDArray[Any], NDArray[Any]]]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    keys, places = np.unique(np.concatenate([part[0] for part in parts]), return_inverse=True)
    sizes = np.zeros(keys.size, np.int64)
    np.add.at(sizes, places, np.concatenate([part[1] for part in parts]))
    return keys, sizes


def _summarize_dense(dataset: Dataset, feature: DenseFeature) -> DenseSummary:
    raw, scaled = _RunningSums(), {name: _RunningSums() for name in dataset.splits}
    for name in dataset.splits:
        for stored in _read_numbers(dataset, name, feature.name):
            logs = _unscale(feature, stored)
            scaled[name].add(stored, 0)
            raw.add(signed_expm1(logs), int((logs == 0).sum()))
    values = raw.result()
    # A second traversal: the range of the bins is known only now.
    bins = np.zeros(NUM_BINS, np.int64)
    low, high = signed_log1p(np.array([values.min, values.max])).tolist()
    for name in dataset.splits if high > low else ():
        for stored in _read_numbers(dataset, name, feature.name):
            places = (_unscale(feature, stored) - low) * (NUM_BINS / (high - low))
            bins += np.bincount(np.clip(places.astype(np.int64), 0, NUM_BINS - 1), minlength=NUM_BINS)
    train, test = scaled.get("train", _RunningSums()), scaled.get("test", _RunningSums())
    is_comparable = train.count and test.count
    return DenseSummary(
        name=feature.name,
        values=values,
        bins=tuple(bins.tolist()),
        test_shift=test.result().mean - train.result().mean if is_comparable else None,
    )


def _unscale(feature: DenseFeature, stored: NDArray[np.float64]) -> NDArray[np.float64]:
    # The stored value of 0 was rounded to float32, so the formula below may give a small number instead of 0.
    zero = np.float32(-feature.mean / feature.std)
    logs = stored * feature.std + feature.mean
    if feature.signed:
        return np.where(stored == zero, 0.0, logs)
    return np.where(stored <= zero, 0.0, np.maximum(logs, 0.0))


def _summarize_sparse(dataset: Dataset, feature: SparseFeature) -> SparseSummary:
    counts = np.zeros(feature.num_embeddings, np.uint32)  # The OS allocates only pages that ids touch.
    num_rows, num_lookups, longest, num_empty = 0, 0, 0, 0
    for array in _read_column(dataset, "train", feature.name):
        ids, lengths = _read_ids(dataset, feature, array)
        uniques, times = np.unique(ids, return_counts=True)
        counts[uniques] += times.astype(np.uint32)
        num_rows += len(array)
        num_lookups += ids.size
        if lengths is not None and lengths.size:
            longest, num_empty = max(longest, int(lengths.max())), num_empty + int((lengths == 0).sum())
    present = np.flatnonzero(counts)
    order = present[np.lexsort((present, -counts[present].astype(np.int64)))]
    falling = np.cumsum(counts[order], dtype=np.int64)
    shares = [
        float(falling[min(n, falling.size) - 1]) / num_lookups if num_lookups else 0.0 for n in (1, TOP_10, TOP_100)
    ]
    unseen_lookups, unseen_uniques = _unseen_shares(dataset, feature, counts)
    names = _vocabulary_values(dataset, feature, order[:NUM_TOP_IDS])
    return SparseSummary(
        name=feature.name,
        num_embeddings=feature.num_embeddings,
        num_lookups=num_lookups,
        num_uniques=present.size,
        coverage=present.size / feature.num_embeddings,
        mean_pooling_factor=num_lookups / max(num_rows, 1),
        max_pooling_factor=longest if feature.multi_valued else min(num_rows, 1),
        share_empty=num_empty / max(num_rows, 1),
        top=tuple(
            FrequentId(id=int(i), value=name, count=int(counts[i]))
            for i, name in zip(order[:NUM_TOP_IDS], names, strict=True)
        ),
        top_shares=(shares[0], shares[1], shares[2]),
        num_half=int(np.searchsorted(falling, num_lookups / 2)) + 1 if num_lookups else 0,
        unseen_lookups=unseen_lookups,
        unseen_uniques=unseen_uniques,
        reuse=feature.statistics.reuse,
    )


def _read_ids(
    dataset: Dataset, feature: SparseFeature, array: pa.Array
) -> tuple[NDArray[np.integer], NDArray[np.int64] | None]:
    """Return (ids, ids per sample). The second is `None` if each sample has one id."""
    ids = (array.flatten() if feature.multi_valued else array).to_numpy(zero_copy_only=False)
    if ids.size and not (ids.min() >= 0 and ids.max() < feature.num_embeddings):
        raise MesetaError(
            f"dataset {str(dataset.dir)!r}: ids of {feature.name!r} must be in 0..{feature.num_embeddings - 1}, got "
            f"ids in {ids.min()}..{ids.max()}; run `meseta data check {dataset.dir}` to locate them"
        )
    return ids, np.diff(array.offsets.to_numpy()).astype(np.int64) if feature.multi_valued else None


def _unseen_shares(
    dataset: Dataset, feature: SparseFeature, counts: NDArray[np.uint32]
) -> tuple[float | None, float | None]:
    """Return the unseen shares of (lookups, distinct ids) in the test split. `counts` are the training lookups of each
    row."""
    seen = np.zeros(counts.size, bool)
    num_lookups, num_new = 0, 0
    for array in _read_column(dataset, "test", feature.name):
        ids, _ = _read_ids(dataset, feature, array)
        num_lookups += ids.size
        num_new += int((counts[ids] == 0).sum())
        seen[ids] = True
    if not num_lookups:
        return None, None
    return num_new / num_lookups, int((seen & (counts == 0)).sum()) / int(seen.sum())


def _vocabulary_values(dataset: Dataset, feature: SparseFeature, ids: NDArray[np.int64]) -> list[str | None]:
    if feature.vocabulary is None:
        return [None] * ids.size
    try:
        values = read_vocabulary_values(dataset.dir, feature).take(pa.array(ids)).to_pylist()
    except IndexError:
        raise MesetaError(
            f"vocabulary {feature.vocabulary!r} lacks ids of feature {feature.name!r}; "
            f"run `meseta data check {dataset.dir}` for a list of all faults"
        ) from None
    return [None if value is None else value.decode(errors="replace") for value in values]
