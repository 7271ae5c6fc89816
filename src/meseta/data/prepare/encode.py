"""Assignment of rows to the training, valid and test splits."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from meseta.data.dataset.dataset import SPLITS
from meseta.data.dataset.vocabulary import count_values
from meseta.data.formats.format import Block
from meseta.data.hash_categories import hash_categories, hash_to_rows
from meseta.data.read.order import random_words
from meseta.data.schema.layout import RawLayout, RawRows, RawSparse
from meseta.spec import MesetaError

SplitBy = Literal["time", "group"]
TRAIN, VALID, TEST = range(len(SPLITS))
NO_SPLIT = -1
"""Split of a row that is left out."""
# A separate key, so that the random words of groups differ from those of row numbers.
_GROUPS_KEY = 1


@dataclass(frozen=True, kw_only=True)
class Splitter:
    """Assigns each row to a split, independently of other rows."""

    seed: int
    test_fraction: float = 0.0
    """Share of the rows or groups in the test split. They are drawn by `seed`, or are the last rows if split by
    time."""
    valid_fraction: float = 0.0
    """Share of the rows or groups in the valid split. They are drawn by `seed`, or precede the test split if split by
    time."""
    by: SplitBy | None = None
    """Column that decides the split. `None` means that the row number decides."""
    test_from: float | None = None
    """First second of the test split. `None` if it is unknown yet, or if there is no such split by time."""
    valid_from: float | None = None
    """First second of the valid split. `None` if it is unknown yet, or if there is no such split by time."""
    is_valid_by_time: bool = False
    """Whether the valid split are the last rows that another rule leaves out of the test split. Rows without a time are
    not among them."""

    def assign_splits(self, block: Block, first_global_row: int, rows: RawRows) -> NDArray[np.int8]:
        """Return TRAIN, VALID or TEST for each row [n] of a block. `first_global_row` is its first row in all sources.

        The split of a row depends on its file, its time, or the seed with its group or row number. It does not depend
        on the block size. Raises MesetaError if a row without a time is split by time.
        """
        if block.source.split != "both":
            return np.full(block.num_rows, SPLITS.index(block.source.split), np.int8)
        if self.by == "time":
            assert rows.time is not None
            self._check_times(block, rows.time)
            return self._by_time(rows.time)
        if self.by == "group":
            assert rows.group is not None
            return self._by_word(random_words(rows.group, self.seed, _GROUPS_KEY))
        splits = self._by_number(block, first_global_row)
        if self.is_valid_by_time and self.valid_from is not None:
            assert rows.time is not None
            splits[(splits == TRAIN) & (rows.time >= self.valid_from)] = VALID
        return splits

    def assign_splits_by_number(self, block: Block, first_global_row: int) -> NDArray[np.int8] | None:
        """Return the splits of `assign_splits` if row numbers alone decide them, or `None` otherwise."""
        is_drawn = block.source.split == "both" and self.by is None and not self.is_valid_by_time
        return self._by_number(block, first_global_row) if is_drawn else None

    def check_order(self) -> None:
        """Raise MesetaError unless the valid split starts before the test split."""
        if self.valid_from is not None and self.test_from is not None and self.valid_from >= self.test_from:
            raise MesetaError(
                f"prepare: --valid-after is {self.valid_from:.17g} in seconds, but the test split begins at "
                f"{self.test_from:.17g}; use an earlier --valid-after"
            )

    def _by_time(self, time: NDArray[np.float64]) -> NDArray[np.int8]:
        splits = np.full(time.size, TRAIN, np.int8)
        if self.valid_from is not None:
            splits[time >= self.valid_from] = VALID
        if self.test_from is not None:
            splits[time >= self.test_from] = TEST
        return splits

    def _by_number(self, block: Block, first_global_row: int) -> NDArray[np.int8]:
        numbers = np.arange(first_global_row, first_global_row + block.num_rows)
        return self._by_word(random_words(numbers, self.seed))

    def _by_word(self, words: NDArray[np.uint64]) -> NDArray[np.int8]:
        # Test rows have the smallest words and valid rows the next ones. The test split is then the same with and
        # without a valid split.
        valid_fraction = 0.0 if self.is_valid_by_time else self.valid_fraction
        test, valid = (int(share * 2**64) for share in (self.test_fraction, valid_fraction))
        splits = np.full(words.size, TRAIN, np.int8)
        for limit, place in ((test + valid, VALID), (test, TEST)):
            # A limit of 2**64 does not fit into uint64.
            splits[words < np.uint64(min(limit, 2**64 - 1))] = place
        return splits

    def _check_times(self, block: Block, time: NDArray[np.float64]) -> None:
        missing = np.flatnonzero(np.isnan(time))
        if missing.size:
            raise MesetaError(
                f"source {str(block.source.path)!r}, row {block.first_row + int(missing[0]) + 1}: the row has no time, "
                "so it cannot be split by time; add the time, remove the row, or use another split"
            )


MAX_PREFILTER_SHARE = 0.5
"""Maximum share of a block's rows for which selecting their lines before parsing is cheaper than parsing all lines."""


@dataclass(frozen=True, kw_only=True)
class EncodedBlock:
    """Encoded rows of one block by split."""

    splits: dict[str, pa.RecordBatch]
    """Rows by split. Splits without rows are left out."""
    value_counts: dict[str, pa.Table]
    """Values in the training rows and their counts, for each feature with a vocabulary."""
    num_non_finite: tuple[int, ...]
    """Number of inf and NaN values in each dense feature, as in `RawRows.num_non_finite`."""
    num_unlabeled: int
    """Number of rows left out because they have none of several labels."""
    block: Block
    split_ids: NDArray[np.int8]
    """Index in SPLITS of the split of each row [num_rows], or NO_SPLIT if the row was left out."""


class Encoder:
    """Thread-safe, stateless encoder of blocks."""

    def __init__(
        self,
        layout: RawLayout,
        splitter: Splitter,
        *,
        hash_seeds: Mapping[str, int],
        hash_rows: Mapping[str, int],
        keep_unlabeled: bool = False,
        uncounted: Collection[str] = (),
    ) -> None:
        """Create an encoder.

        `hash_seeds` has a seed for each sparse feature, and `hash_rows` the number of table rows of each hashed
        feature. Other features have vocabularies, for which values are counted except those of `uncounted`. With
        `keep_unlabeled`, rows without any of several labels are kept, for prediction.
        """
        self.layout = layout
        self.hash_rows = hash_rows
        self.hash_seeds = hash_seeds
        self.splitter = splitter
        self.uncounted = uncounted
        self._drops_unlabeled = len(layout.labels) > 1 and not keep_unlabeled

    @property
    def fixed_num_rows(self) -> dict[str, int]:
        """Number of table rows of each sparse feature without a vocabulary."""
        cut = {column.name: column.num_row_ids for column in self.layout.sparse if column.has_row_ids}
        return {**cut, **self.hash_rows}

    def encode(self, block: Block, first_global_row: int) -> EncodedBlock:
        """Parse, split and encode one block. `first_global_row` is the number of its first row in all sources."""
        rows = block.source.format.parse(block, self.layout)
        split = self._assign_splits(block, first_global_row, rows)
        batch = self._record_batch(rows)
        splits = {}
        for place, name in enumerate(SPLITS):
            mask = split == place
            if mask.all():
                # Filtering would copy the batch.
                splits[name] = batch
            elif mask.any():
                splits[name] = batch.filter(pa.array(mask))
        counted = {}
        training = split == TRAIN
        if training.any():
            for column, sparse in zip(self.layout.sparse, rows.sparse, strict=True):
                if column.has_row_ids or column.name in self.hash_rows or column.name in self.uncounted:
                    continue
                counted[column.name] = count_values(_training_values(sparse, training))
        return EncodedBlock(
            splits=splits,
            value_counts=counted,
            num_non_finite=rows.num_non_finite,
            num_unlabeled=int(np.count_nonzero(split == NO_SPLIT)),
            block=block,
            split_ids=split,
        )

    def encode_split(self, block: Block, first_global_row: int, split: str, *, prefilter: bool) -> pa.RecordBatch:
        """Return the rows of one split, encoded as by `encode`. The result may have no rows.

        With `prefilter`, rows of other splits may be dropped without parsing them. Use it only for blocks without bad
        rows. Raises MesetaError as `encode` does.
        """
        place = SPLITS.index(split)
        if prefilter and (split_ids := self.splitter.assign_splits_by_number(block, first_global_row)) is not None:
            mask = split_ids == place
            if 0 < mask.sum() < MAX_PREFILTER_SHARE * mask.size:
                raw_format = block.source.format
                with suppress(MesetaError):  # Parsing the whole block below raises it with the row.
                    rows = raw_format.parse(raw_format.filter_rows(block, mask), self.layout)
                    batch = self._record_batch(rows)
                    return batch.filter(pa.array(~rows.unlabeled_mask)) if self._drops_unlabeled else batch
        rows = block.source.format.parse(block, self.layout)
        mask = self._assign_splits(block, first_global_row, rows) == place
        batch = self._record_batch(rows)
        return batch if mask.all() else batch.filter(pa.array(mask))

    def _assign_splits(self, block: Block, first_global_row: int, rows: RawRows) -> NDArray[np.int8]:
        split = self.splitter.assign_splits(block, first_global_row, rows)
        return np.where(rows.unlabeled_mask, np.int8(NO_SPLIT), split) if self._drops_unlabeled else split

    def _record_batch(self, rows: RawRows) -> pa.RecordBatch:
        labels = [pa.array(label, from_pandas=True) for label in rows.labels]  # NaN means missing and becomes null.
        sample_values = [pa.array(part) for part in (rows.weight, rows.group, rows.time) if part is not None]
        columns = dict(zip(self.layout.sample_columns, [*labels, *sample_values], strict=True))
        for name, values in zip(self.layout.dense, rows.dense, strict=True):
            columns[name] = pa.array(values)
        for column, sparse in zip(self.layout.sparse, rows.sparse, strict=True):
            seed = self.hash_seeds[column.name]
            if column.has_row_ids:
                ids = sparse.values
            elif column.name not in self.hash_rows:
                ids = pa.array(hash_categories(sparse.values, seed))
            else:
                ids = pa.array(hash_to_rows(sparse.values, self.hash_rows[column.name], seed))
            columns[column.name] = to_list_array(ids, sparse.lengths)
            if sparse.weights is not None:
                columns[f"{column.name}.weight"] = to_list_array(pa.array(sparse.weights), sparse.lengths)
        return pa.RecordBatch.from_pydict(columns)


def to_list_array(values: pa.Array, lengths: NDArray[np.int64] | None) -> pa.Array:
    """Return `values` split into lists of the given lengths, or unchanged if `lengths` is `None`."""
    if lengths is None:
        return values
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values)


def _training_values(sparse: RawSparse, training: NDArray[np.bool_]) -> pa.Array:
    if training.all():
        return sparse.values
    keep = training if sparse.lengths is None else np.repeat(training, sparse.lengths)
    return sparse.values.filter(pa.array(keep))
