"""Encoding of parsed rows as numbers. Values of a vocabulary become hashes until the vocabulary is complete."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from meseta.data.dataset.dataset import SPLITS
from meseta.data.dataset.vocabulary import count_values
from meseta.data.formats.format import Block
from meseta.data.formats.raw_rows import RawRows, RawSparse
from meseta.data.hash_categories import hash_categories, hash_to_rows
from meseta.data.prepare.splitting import NO_SPLIT, TRAIN, Splitter
from meseta.data.schema.layout import RawLayout
from meseta.spec import MesetaError

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
    ) -> None:
        """Create an encoder.

        `hash_seeds` has a seed for each sparse feature, and `hash_rows` the number of table rows of each hashed
        feature. Other features have vocabularies. With `keep_unlabeled`, rows without any of several labels are kept,
        for prediction.
        """
        self.layout = layout
        self.hash_rows = hash_rows
        self.hash_seeds = hash_seeds
        self.splitter = splitter
        self._drops_unlabeled = len(layout.labels) > 1 and not keep_unlabeled

    @property
    def fixed_num_rows(self) -> dict[str, int]:
        """Number of table rows of each sparse feature without a vocabulary."""
        cut = {c.name: c.buckets.num_rows if c.buckets else 1 for c in self.layout.sparse if c.has_row_ids}
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
                if column.has_row_ids or column.name in self.hash_rows:
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
