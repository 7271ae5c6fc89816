"""New ids: values for which the parent of a run has no row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from meseta.data.dataset.dataset import Dataset
from meseta.data.read.batch import Batch
from meseta.spec import MesetaError

Ids = NDArray[np.integer]


class NewIds:
    """Set of the table rows whose values are new to the parent of a run.

    An id outside of its table may count as new or not, but raises no error.
    """

    def __init__(self, dataset: Dataset, masks: Mapping[str, NDArray[np.bool_]]) -> None:
        """Create the set from a mask [num_embeddings] per feature. Features without a mask have no new ids.

        Row 0 of a vocabulary with a mask is new, because all values without a row have it. Raises MesetaError if a mask
        does not belong to a feature, or does not match the size of its table.
        """
        features = {feature.name: feature for feature in dataset.sparse}
        for name, mask in masks.items():
            if name not in features or len(mask) != features[name].num_embeddings:
                expected = f"{features[name].num_embeddings:,} rows" if name in features else "no such feature"
                raise MesetaError(
                    f"new ids: the mask of feature {name!r} has {len(mask):,} rows, but dataset {str(dataset.dir)!r} "
                    f"has {expected}; make the masks for this dataset"
                )
        self.counted = frozenset(masks)
        """Features with a mask, whose new ids can be counted."""
        self._with_unknown = {
            name for name in masks if features[name].encoding == "vocabulary" and features[name].num_embeddings
        }
        bits = {name: self._pack(name, masks[name]) for name in features if name in masks}
        # One bit per row, because the bytes of a large table would not fit into a cache of the processor.
        self._bits = {name: part for name, part in bits.items() if part.any()}
        self._all_bits = np.concatenate([np.zeros(1, np.uint8), *self._bits.values()])
        sizes = [part.size for part in self._bits.values()]
        self._first_bytes = np.cumsum([1, *sizes])[:-1]

    def _pack(self, name: str, mask: NDArray[np.bool_]) -> NDArray[np.uint8]:
        bits = np.packbits(mask, bitorder="little")
        if name in self._with_unknown:
            bits[0] |= 1
        return bits

    @property
    def features(self) -> tuple[str, ...]:
        """Features of which some rows are new, in the order of the dataset."""
        return tuple(self._bits)

    def mask(self, feature: str, ids: Ids) -> NDArray[np.bool_]:
        """Return which ids [n] of a feature are new."""
        bits = self._bits.get(feature)
        return np.zeros(ids.size, np.bool_) if bits is None else _test_bits(bits, ids >> 3, ids)

    def has_own_row(self, feature: str, ids: Ids) -> NDArray[np.bool_]:
        """Return which ids [n] of a feature are not the row of all values without a row."""
        return ids != 0 if feature in self._with_unknown else np.ones(ids.size, np.bool_)

    def of_batch(self, batch: Batch) -> NDArray[np.bool_]:
        """Return which samples [B] of a batch in host memory have a new id of any feature."""
        num_samples, is_new = batch.batch_size, np.zeros(batch.batch_size, np.bool_)
        if not self._bits or not num_samples:
            return is_new
        sparse = batch.sparse.select(self.features)
        # A single lookup for all features, because numpy calls on few ids cost more than their work.
        ids, lengths = sparse.values.numpy(), sparse.lengths.numpy()
        if ids.size == lengths.size and lengths.min() == 1:
            by_feature = ids.reshape(-1, num_samples)
            marks = _test_bits(self._all_bits, (by_feature >> 3) + self._first_bytes[:, None], by_feature)
            return np.logical_or.reduce(marks, axis=0, out=is_new)
        first_bytes = np.repeat(self._first_bytes, np.diff(sparse.key_offsets))
        places = np.flatnonzero(_test_bits(self._all_bits, (ids >> 3) + first_bytes, ids))
        bags = np.searchsorted(np.cumsum(lengths), places, "right")
        is_new[bags % num_samples] = True
        return is_new

    def hide(self, batch: Batch) -> Batch:
        """Return a batch in host memory with the ids that the parent gives to its values.

        New values of vocabularies get row 0. Hashed features are unchanged, because the parent has rows for all values.
        """
        sparse = batch.sparse
        values = sparse.values.clone()
        for key, (start, stop) in zip(sparse.keys, pairwise(sparse.key_offsets), strict=True):
            if key in self._with_unknown:
                values[start:stop][torch.from_numpy(self.mask(key, values[start:stop].numpy()))] = 0
        return replace(batch, sparse=sparse.with_values(values))


def _test_bits(bits: NDArray[np.uint8], places: Ids, ids: Ids) -> NDArray[np.bool_]:
    """Return for each id whether bit `ids & 7` of byte `places` is set."""
    shifted = bits.take(places, mode="clip") >> (ids & 7).astype(np.uint8)
    return (shifted & 1).view(np.bool_)
