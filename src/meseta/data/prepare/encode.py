"""Parsed rows to columns of numbers: hashed rows at once, values of a vocabulary as hashes until it is complete."""

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
from meseta.data.hash_categories import hash_categories, hash_to_rows
from meseta.data.layout import RawLayout
from meseta.data.prepare.splitting import NO_SPLIT, TRAIN, Splitter
from meseta.data.raw_rows import RawRows, RawSparse
from meseta.spec import MesetaError

MAX_PREFILTER_SHARE = 0.5
"""Of the rows of a block: where fewer are wanted, to take them out and parse them alone costs less than all."""


@dataclass(frozen=True, kw_only=True)
class EncodedBlock:
    """The rows of one block, parted into the splits."""

    splits: dict[str, pa.RecordBatch]
    """Those of SPLITS that have rows of it."""
    value_counts: dict[str, pa.Table]
    """Values in the training rows of each feature that gets a vocabulary, and their counts."""
    num_non_finite: tuple[int, ...]
    """As `RawRows.num_non_finite`."""
    num_unlabeled: int
    """Rows that were left out because they have none of several labels."""
    block: Block
    split_ids: NDArray[np.int8]
    """Place in SPLITS of the split that each row goes to [num_rows]; NO_SPLIT if it was left out."""


class Encoder:
    """Turns blocks into numbers; holds no state that changes, so any number of threads may call it."""

    def __init__(
        self,
        layout: RawLayout,
        splitter: Splitter,
        *,
        hash_seeds: Mapping[str, int],
        hash_rows: Mapping[str, int],
        keep_unlabeled: bool = False,
    ) -> None:
        """`hash_seeds`: of each sparse feature; `hash_rows`: table rows of those that are hashed to them, the
        others have vocabularies. `keep_unlabeled` keeps rows that have none of several labels, for prediction."""
        self.layout = layout
        self.hash_rows = hash_rows
        self.hash_seeds = hash_seeds
        self.splitter = splitter
        self._drops_unlabeled = len(layout.labels) > 1 and not keep_unlabeled

    @property
    def fixed_num_rows(self) -> dict[str, int]:
        """Table rows of the sparse features without a vocabulary."""
        cut = {c.name: c.buckets.num_rows if c.buckets else 1 for c in self.layout.sparse if c.has_row_ids}
        return {**cut, **self.hash_rows}

    def encode(self, block: Block, first_global_row: int) -> EncodedBlock:
        """Parse, split and encode one block, whose first row is row `first_global_row` of all sources."""
        rows = block.source.format.parse(block, self.layout)
        split = self._assign_splits(block, first_global_row, rows)
        batch = self._record_batch(rows)
        splits = {}
        for place, name in enumerate(SPLITS):
            mask = split == place
            if mask.all():
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
        """The rows of one split alone, as `encode` gives them; none where the block has none. `prefilter`: whether
        others need not be parsed where they can be told before, as in blocks without bad rows. Raises MesetaError as
        `encode` does."""
        place = SPLITS.index(split)
        if prefilter and (known := self.splitter.assign_splits_by_number(block, first_global_row)) is not None:
            mask = known == place
            if 0 < mask.sum() < MAX_PREFILTER_SHARE * mask.size:
                raw_format = block.source.format
                with suppress(MesetaError):  # which would not tell the row
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
        labels = [pa.array(label, from_pandas=True) for label in rows.labels]  # NaN, a missing one, becomes null
        others = [pa.array(part) for part in (rows.weight, rows.group, rows.time) if part is not None]
        columns = dict(zip(self.layout.sample_columns, [*labels, *others], strict=True))
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
    """`values` themselves, or cut into lists of the given lengths."""
    if lengths is None:
        return values
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values)


def _training_values(sparse: RawSparse, training: NDArray[np.bool_]) -> pa.Array:
    if training.all():
        return sparse.values
    keep = training if sparse.lengths is None else np.repeat(training, sparse.lengths)
    return sparse.values.filter(pa.array(keep))
