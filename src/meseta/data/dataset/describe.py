"""What a prepared dataset holds: figures of every column, counted on all cores, one column per thread."""

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

from meseta.data.dataset.dataset import Dataset, DenseFeature, SparseFeature
from meseta.data.dataset.part_files import PART_ERRORS, open_part
from meseta.data.dataset.vocabulary import read_vocabulary_values
from meseta.data.raw_rows import signed_expm1, signed_log1p
from meseta.errors import error_summary
from meseta.machine.files import resolve_inside
from meseta.machine.processors import num_cores
from meseta.spec import MesetaError, Reuse

NUM_BINS = 24
NUM_TOP_IDS = 5
TOP_10 = 10
TOP_100 = 100

RowsReadCallback = Callable[[float], None]


@dataclass(frozen=True, kw_only=True)
class ValueSummary:
    """Numbers of one column."""

    mean: float
    std: float
    """Population standard deviation."""
    min: float
    max: float
    share_zero: float


@dataclass(frozen=True, kw_only=True)
class SplitSummary:
    """Rows, and what belongs to them, of one split."""

    num_rows: int
    labels: dict[str, float]
    """Sum of each label."""
    base_rates: dict[str, float | None]
    """Mean of each label over the samples that have it; None if there are none."""
    weights: ValueSummary | None
    """Of the samples; None where they have none."""
    num_groups: int | None
    """Distinct keys of groups; None where there are none."""
    max_group_rows: int | None
    """Rows of the largest group."""
    time_range: tuple[float, float] | None
    """First and last time in seconds since 1970-01-01 UTC; None where the data have no time."""


@dataclass(frozen=True, kw_only=True)
class DenseSummary:
    """One dense feature over all splits, in the unit of the source: the scaling of `meseta prepare` is undone."""

    name: str
    values: ValueSummary
    """`share_zero` counts what prepare takes for zero too: missing values and, unless signed, those below zero."""
    bins: tuple[int, ...]
    """Values in equal intervals of log(1 + x), below zero of -log(1 - x), from the smallest to the largest [24]."""
    test_shift: float | None
    """Mean of log(1 + x) in the test split less that in training, in standard deviations; None: no test rows."""


@dataclass(frozen=True, kw_only=True)
class FrequentId:
    """One of the most frequent ids."""

    id: int
    value: str | None
    """What the vocabulary calls it; None for hashes, and for row 0 of a vocabulary."""
    count: int
    """Lookups in the training split."""


@dataclass(frozen=True, kw_only=True)
class SparseSummary:
    """One sparse feature, in the training split unless said otherwise."""

    name: str
    num_embeddings: int
    """Rows of its table."""
    num_lookups: int
    num_uniques: int
    """Distinct ids."""
    coverage: float
    """Share of the table's rows that occur."""
    mean_pooling_factor: float
    """Ids per sample."""
    max_pooling_factor: int
    share_empty: float
    """Samples without an id."""
    top: tuple[FrequentId, ...]
    """The five most frequent ids; among equals, the smaller id first."""
    top_shares: tuple[float, float, float]
    """Share of the lookups that the most frequent id takes, the 10, and the 100 most frequent ones."""
    num_half: int
    """Fewest ids that take half of the lookups."""
    unseen_lookups: float | None
    """Share of the lookups of the test split whose id training has not seen; None: it has no lookups."""
    unseen_uniques: float | None
    """Share of the distinct ids of the test split that training has not seen."""
    reuse: Reuse
    """As counted by `meseta prepare`."""


@dataclass(frozen=True, kw_only=True)
class DatasetSummary:
    """What `describe` found."""

    splits: dict[str, SplitSummary]
    dense: tuple[DenseSummary, ...]
    sparse: tuple[SparseSummary, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; the reuse histograms, which dataset.json has, are left out."""
        document = asdict(self)
        for figures in document["sparse"]:
            del figures["reuse"]
        return document


def describe(dataset: Dataset, on_rows: RowsReadCallback | None = None) -> DatasetSummary:
    """Read all of `dataset` and count.

    Memory holds, per core, 4 bytes for each table row that occurs, or 8 for each group. `on_rows` is called with the
    rows read since the last call, a column counting as its share of a row. Raises MesetaError for files that cannot be
    read, for ids outside their table and for a recipe; `meseta data check` says all that is wrong.
    """
    dataset.check_has_files("`meseta data stats`")
    jobs: list[Callable[[], Any]] = [partial(_summarize_sparse, dataset, feature) for feature in dataset.sparse]
    jobs += [partial(_summarize_dense, dataset, feature) for feature in dataset.dense]
    jobs += [partial(_summarize_split, dataset, name) for name in dataset.splits]
    num_rows = sum(split.num_rows for split in dataset.splits.values())
    with ThreadPoolExecutor(num_cores(), thread_name_prefix="meseta-stats") as pool:
        try:
            futures = [pool.submit(job) for job in jobs]
            for future in as_completed(futures):
                future.result()
                if on_rows is not None:
                    on_rows(num_rows / len(jobs))
        finally:
            pool.shutdown(cancel_futures=True)
    results: Iterator[Any] = (future.result() for future in futures)
    return DatasetSummary(
        sparse=tuple(next(results) for _ in dataset.sparse),
        dense=tuple(next(results) for _ in dataset.dense),
        splits={name: next(results) for name in dataset.splits},
    )


def _read_column(dataset: Dataset, split: str, column: str) -> Iterator[pa.Array]:
    """One column of a split, row group by row group."""
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
                f"`meseta data check {dataset.dir}` says all that is wrong"
            ) from None


def _read_numbers(dataset: Dataset, split: str, column: str) -> Iterator[NDArray[np.float64]]:
    for array in _read_column(dataset, split, column):
        yield array.to_numpy(zero_copy_only=False).astype(np.float64)


class _RunningSums:
    """Values of one column, added up block by block."""

    def __init__(self) -> None:
        self.count, self.zeros = 0, 0
        self.total, self.squares = 0.0, 0.0
        self.min, self.max = math.inf, -math.inf
        self._shift = 0.0

    def add(self, values: NDArray[np.float64], num_zeros: int) -> None:
        """Sums are of the distances from the first value, so that the variance keeps its digits."""
        if not values.size:
            return
        if not self.count:
            self._shift = float(values[0])
        away = values - self._shift
        self.count += values.size
        self.zeros += num_zeros
        self.total += float(away.sum())
        self.squares += float(away @ away)
        self.min, self.max = min(self.min, float(values.min())), max(self.max, float(values.max()))

    def result(self) -> ValueSummary:
        """Zeros where there was no value."""
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
    known = {label: split.known.get(label, split.num_rows) for label in sums}
    return SplitSummary(
        num_rows=split.num_rows,
        labels=sums,
        base_rates={label: total / known[label] if known[label] else None for label, total in sums.items()},
        weights=None if dataset.weight is None else weights.result(),
        num_groups=None if sizes is None else sizes.size,
        max_group_rows=None if sizes is None else int(sizes.max(initial=0)),
        time_range=(times.min, times.max) if times.count else None,
    )


def _group_sizes(dataset: Dataset, split: str) -> NDArray[np.int64] | None:
    """Rows of each group; equal keys are merged whenever what waits has outgrown what is merged."""
    if dataset.group is None:
        return None
    keys, sizes = np.zeros(0, np.int64), np.zeros(0, np.int64)
    waiting: list[tuple[NDArray[Any], NDArray[Any]]] = []
    num_waiting = 0
    for array in _read_column(dataset, split, dataset.group):
        waiting.append(np.unique(array.to_numpy(zero_copy_only=False), return_counts=True))
        num_waiting += waiting[-1][0].size
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
    """Two passes: the bins need the extremes."""
    raw, scaled = _RunningSums(), {name: _RunningSums() for name in dataset.splits}
    for name in dataset.splits:
        for stored in _read_numbers(dataset, name, feature.name):
            logs = _unscale(feature, stored)
            scaled[name].add(stored, 0)
            raw.add(signed_expm1(logs), int((logs == 0).sum()))
    values = raw.result()
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
    """Logarithms of the values as they came; exactly 0 for what prepare wrote for 0."""
    zero = np.float32(-feature.mean / feature.std)
    logs = stored * feature.std + feature.mean
    if feature.signed:
        return np.where(stored == zero, 0.0, logs)
    return np.where(stored <= zero, 0.0, np.maximum(logs, 0.0))


def _summarize_sparse(dataset: Dataset, feature: SparseFeature) -> SparseSummary:
    counts = np.zeros(feature.num_embeddings, np.uint32)  # pages that no id touches are never given memory
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
    """The ids of one row group, and how many each sample has; None: one."""
    ids = (array.flatten() if feature.multi_valued else array).to_numpy(zero_copy_only=False)
    if ids.size and not (ids.min() >= 0 and ids.max() < feature.num_embeddings):
        raise MesetaError(
            f"dataset {str(dataset.dir)!r}: ids of {feature.name!r} must be in 0..{feature.num_embeddings - 1}, but "
            f"there are some in {ids.min()}..{ids.max()}; `meseta data check {dataset.dir}` says where"
        )
    return ids, np.diff(array.offsets.to_numpy()).astype(np.int64) if feature.multi_valued else None


def _unseen_shares(
    dataset: Dataset, feature: SparseFeature, counts: NDArray[np.uint32]
) -> tuple[float | None, float | None]:
    """Shares of the test split's lookups, and of its distinct ids, that are not in `counts`."""
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
    """What the vocabulary calls these ids."""
    if feature.vocabulary is None:
        return [None] * ids.size
    try:
        values = read_vocabulary_values(dataset.dir, feature).take(pa.array(ids)).to_pylist()
    except IndexError:
        raise MesetaError(
            f"vocabulary {feature.vocabulary!r} lacks ids of feature {feature.name!r}; "
            f"`meseta data check {dataset.dir}` says what is wrong"
        ) from None
    return [None if value is None else value.decode(errors="replace") for value in values]
