"""Permutation and splitting of keyed jagged tensors, and conversion of lengths to offsets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from meseta.ops.common import check_bounds, contiguous_ids, register
from meseta.ops.core import core
from meseta.ops.jagged import reference
from meseta.ops.memory import empty
from meseta.sparse import KeyedJaggedTensor
from meseta.sparse.shapes import Int, Shaped
from meseta.spec import MesetaError


def permute(kjt: KeyedJaggedTensor, keys: Sequence[str]) -> KeyedJaggedTensor:
    """Return the given keys of `kjt` in the given order.

    The tensors are views if the keys are consecutive in `kjt`, otherwise copies. Features may have different batch
    sizes. Raises MesetaError if a key is missing in `kjt` or given twice.
    """
    order = kjt.key_indices(keys)
    if all(b == a + 1 for a, b in pairwise(order)):
        return kjt.select(keys)
    arrays = [kjt.values, kjt.lengths] + ([] if kjt.weights is None else [kjt.weights])
    first_bags = list(accumulate(kjt.batch_sizes, initial=0))
    bounds = [*kjt.key_offsets, *first_bags, *([] if kjt.weights is None else kjt.key_offsets)]
    values, lengths, *weights = _permute(arrays, bounds, order)
    return kjt.with_permuted_tensors(order, values, lengths, weights[0] if weights else None)


def split(kjt: KeyedJaggedTensor, num_keys: Sequence[int]) -> list[KeyedJaggedTensor]:
    """Split `kjt` into consecutive views with num_keys[0], num_keys[1], ... keys. Raises MesetaError if the numbers are
    negative or do not add up."""
    ends = list(accumulate(num_keys, initial=0))
    if min(num_keys, default=0) < 0 or ends[-1] != len(kjt.keys):
        raise MesetaError(f"split: {list(num_keys)} must be numbers that add up to {len(kjt.keys)}, the number of keys")
    return [kjt.select(kjt.keys[start:stop]) for start, stop in pairwise(ends)]


def permute_segments(array: Shaped[Tensor, " n"], sizes: Iterable[int], order: Sequence[int]) -> Shaped[Tensor, " m"]:
    """Concatenate segments of an array in this order. Raises MesetaError if sizes exceed it or a segment is missing."""
    permuted: Tensor = _permute([array], list(accumulate(sizes, initial=0)), list(order))[0]
    return permuted


def lengths_to_offsets(lengths: Int[Tensor, " n"]) -> Int[Tensor, " n_plus_1"]:
    """Return 0 and the cumulative sums of int32 or int64 lengths, as int64: [2, 0, 1] -> [0, 2, 2, 3]. Raises
    MesetaError, on a CPU, if a length is negative."""
    offsets: Tensor = _offsets(lengths)
    return offsets


def _permute_cpu(arrays: list[Tensor], bounds: list[int], order: list[int]) -> list[Tensor]:
    step = len(bounds) // max(len(arrays), 1)
    fits = step > 0 and len(bounds) == step * len(arrays) and set(order) <= set(range(step - 1))
    if not arrays or not fits or any(array.dim() != 1 for array in arrays):
        raise MesetaError(
            f"permute_keys: {len(bounds)} bounds and the order {order} do not fit {len(arrays)} arrays; pass 1-d "
            "arrays, keys + 1 bounds per array, and an order of keys"
        )
    arrays = [array.contiguous() for array in arrays]
    for index, array in enumerate(arrays):
        check_bounds("permute_keys", bounds[index * step : (index + 1) * step], array.numel())
    # Repeated keys are allowed here, so the sizes follow from the order.
    out = [empty((size,), array.dtype) for array, size in zip(arrays, _sizes(len(arrays), bounds, order), strict=True)]
    described = [
        number
        for array, new in zip(arrays, out, strict=True)
        for number in (array.data_ptr(), array.element_size(), array.numel(), new.data_ptr())
    ]
    try:
        core().permute_keys(described, bounds, order, torch.get_num_threads())
    except ValueError as error:
        raise MesetaError(f"permute_keys: {error}") from None
    return out


def _sizes(num_arrays: int, bounds: list[int], order: list[int]) -> list[int]:
    step = len(bounds) // num_arrays
    return [
        sum(max(bounds[a * step + key + 1] - bounds[a * step + key], 0) for key in order) for a in range(num_arrays)
    ]


def _permute_fake(arrays: list[Tensor], bounds: list[int], order: list[int]) -> list[Tensor]:
    sizes = _sizes(len(arrays), bounds, order)
    return [array.new_empty(size) for array, size in zip(arrays, sizes, strict=True)]


def _offsets_cpu(lengths: Tensor) -> Tensor:
    lengths = contiguous_ids("lengths_to_offsets", lengths)
    offsets = empty((lengths.numel() + 1,), torch.int64)
    wide = lengths.dtype == torch.int64
    try:
        core().lengths_to_offsets(
            lengths.data_ptr(), lengths.numel(), wide, offsets.data_ptr(), torch.get_num_threads()
        )
    except ValueError as error:
        raise MesetaError(f"lengths_to_offsets: {error}") from None
    return offsets


def _offsets_fake(lengths: Tensor) -> Tensor:
    return lengths.new_empty(lengths.shape[0] + 1, dtype=torch.int64)


# Key k of array a starts at bounds[a * (keys + 1) + k].
_permute = register(
    "permute_keys(Tensor[] arrays, int[] bounds, int[] order) -> Tensor[]",
    cpu=_permute_cpu,
    cuda=reference.permute_keys,
    fake=_permute_fake,
)
_offsets = register(
    "lengths_to_offsets(Tensor lengths) -> Tensor",
    cpu=_offsets_cpu,
    cuda=reference.lengths_to_offsets,
    fake=_offsets_fake,
)
