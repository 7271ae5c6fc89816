"""Jagged tensors for sparse features, with a variable number of ids per sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from numbers import Integral
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from meseta.sparse.arrow_columns import read_id_columns
from meseta.sparse.shapes import Float, Int, Shaped
from meseta.spec import MesetaError, suggest


def _offsets(lengths: Tensor) -> Tensor:
    offsets = lengths.new_zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, dtype=torch.int64, out=offsets[1:])
    return offsets


def _contiguous_runs(order: Sequence[int]) -> list[tuple[int, int]]:
    # [4, 5, 1] gives [(4, 6), (1, 2)].
    runs: list[tuple[int, int]] = []
    for f in order:
        if runs and runs[-1][1] == f:
            runs[-1] = (runs[-1][0], f + 1)
        else:
            runs.append((f, f + 1))
    return runs


def _check_keys(name: str, keys: Sequence[str]) -> tuple[str, ...]:
    if isinstance(keys, str):
        raise MesetaError(f"{name} must be a sequence of names, got the string {keys!r}; give [{keys!r}]")
    keys = tuple(keys)
    if len(set(keys)) != len(keys):
        raise MesetaError(f"{name} {list(keys)} name a feature twice; keys must be unique")
    return keys


def _check_types(kjt: KeyedJaggedTensor) -> None:
    """Raise MesetaError for wrong dtypes. On the CPU, also check the lengths and store `key_offsets`."""
    for name, tensor in (("values", kjt.values), ("lengths", kjt.lengths)):
        if tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64):
            raise MesetaError(
                f"KeyedJaggedTensor: {name} must be a 1-d tensor of int32 or int64, got {tensor.dtype} "
                f"of shape {list(tensor.shape)}"
            )
    if kjt.weights is not None and not kjt.weights.is_floating_point():
        raise MesetaError(f"KeyedJaggedTensor: weights must be floating-point numbers, got {kjt.weights.dtype}")
    if kjt.lengths.device.type == "cpu":  # Reading the lengths on another device would synchronize with it.
        # Use numpy, because torch would wake a pool of threads, and another one in the reader's background thread.
        lengths = kjt.lengths.numpy()
        if lengths.min(initial=0) < 0:
            raise MesetaError("KeyedJaggedTensor: a length is negative; give the number of ids of each (key, sample)")
        if len(set(kjt.batch_sizes)) == 1:
            per_key = lengths.reshape(len(kjt.keys), -1).sum(1, dtype=np.int64).tolist()
        else:
            per_key = [int(lengths[a:b].sum(dtype=np.int64)) for a, b in pairwise(kjt._bag_offsets)]
        key_offsets = tuple(accumulate(per_key, initial=0))
        if key_offsets[-1] != kjt.values.numel():
            raise MesetaError(
                f"KeyedJaggedTensor: the lengths add up to {key_offsets[-1]}, but there are {kjt.values.numel()} values"
            )
        kjt.__dict__["key_offsets"] = key_offsets


@dataclass(frozen=True, eq=False)
class JaggedTensor:
    """Values of one feature, with `lengths[b]` values for sample b. Values of a sample are adjacent."""

    values: Shaped[Tensor, "nnz *D"]  # noqa: F821
    """Ids [nnz], or their embedding rows [nnz, D]."""
    lengths: Int[Tensor, " B"]
    weights: Float[Tensor, " nnz"] | None = None

    @cached_property
    def offsets(self) -> Int[Tensor, " B_plus_1"]:
        """Start of each sample in `values`. Sample b has values[offsets[b] : offsets[b + 1]]."""
        return _offsets(self.lengths)


@dataclass(frozen=True, eq=False, init=False)
class KeyedJaggedTensor:
    """Ids of F features for B samples. All samples of the first feature come first, then those of the second.

         sample 0   sample 1
    "a"  [10, 11]   []            values  = [10, 11, 20, 21]
    "b"  [20]       [21]          lengths = [2, 0, 1, 1]
    """

    keys: tuple[str, ...]
    values: Int[Tensor, " nnz"]
    """Ids (int32 or int64), feature by feature."""
    lengths: Int[Tensor, " F_times_B"]
    """Number of ids of each (feature, sample), feature by feature."""
    weights: Float[Tensor, " nnz"] | None = None
    """Weight of each id. Only weighted features use it."""
    batch_sizes: tuple[int, ...] = ()
    """Number of samples of each feature. By default all features have the same number."""

    # The generated constructor would accept tuples only.
    def __init__(
        self,
        keys: Sequence[str],
        values: Int[Tensor, " nnz"],
        lengths: Int[Tensor, " F_times_B"],
        weights: Float[Tensor, " nnz"] | None = None,
        batch_sizes: Sequence[int] = (),
    ) -> None:
        """Raises MesetaError if the arguments do not match."""
        keys, batch_sizes = _check_keys("KeyedJaggedTensor: keys", keys), tuple(batch_sizes)
        if not batch_sizes:
            num_keys = max(len(keys), 1)
            if lengths.numel() % num_keys:
                raise MesetaError(
                    f"KeyedJaggedTensor: {lengths.numel()} lengths cannot be split over {len(keys)} keys; "
                    "give one length per (key, sample), or batch_sizes"
                )
            batch_sizes = (lengths.numel() // num_keys,) * len(keys)
        # The dataclass is frozen.
        self.__dict__.update(keys=keys, values=values, lengths=lengths, weights=weights, batch_sizes=batch_sizes)
        if len(batch_sizes) != len(keys) or sum(batch_sizes) != lengths.numel():
            raise MesetaError(
                f"KeyedJaggedTensor: batch_sizes {list(batch_sizes)} do not match {len(keys)} keys "
                f"and {lengths.numel()} lengths; give one size per key, with the number of lengths as their sum"
            )
        if weights is not None and weights.shape != values.shape:
            raise MesetaError(
                f"KeyedJaggedTensor: {weights.numel()} weights do not match {values.numel()} values; "
                "give one weight per value"
            )
        _check_types(self)

    @staticmethod
    def from_lists(samples: Mapping[str, Sequence[Sequence[int]]]) -> KeyedJaggedTensor:
        """Create a batch from lists of ids, such as `from_lists({"a": [[10, 11], []], "b": [[20], [21]]})`."""
        bags = [bag for feature in samples.values() for bag in feature]
        for value in (value for bag in bags for value in bag):
            if not isinstance(value, Integral):
                raise MesetaError(f"KeyedJaggedTensor.from_lists: ids must be integers, got {value!r}")
        return KeyedJaggedTensor(
            keys=tuple(samples),
            values=torch.tensor([i for bag in bags for i in bag], dtype=torch.int64),
            lengths=torch.tensor([len(bag) for bag in bags], dtype=torch.int64),
            batch_sizes=tuple(len(feature) for feature in samples.values()),
        )

    @staticmethod
    def from_arrow(table: Any, features: Sequence[str]) -> KeyedJaggedTensor:
        """Create a CPU batch from `features`, columns of an Arrow table. Ids become int64.

        A column has an integer or a list of integers per sample. Null is an empty bag. `table` is a pyarrow Table or
        RecordBatch, or has the method `__arrow_c_stream__`.

        Raises MesetaError if `table` is none of these, `features` has a name twice, a column is missing, occurs twice
        or has another type, an id inside a list is null, or an id does not fit into int64.
        """
        features = _check_keys("KeyedJaggedTensor.from_arrow: features", features)
        values, lengths = read_id_columns(table, features)
        return KeyedJaggedTensor(keys=features, values=values, lengths=lengths)

    @staticmethod
    def from_single_ids(keys: Sequence[str], values: Tensor) -> KeyedJaggedTensor:
        """Create a CPU batch in which each of the F features has one id per sample.

        `values` [F * B] (int32 or int64) is feature-major. Raises MesetaError if its dtype or size does not match.
        """
        # All lengths are 1, so they need no check.
        size, left = divmod(values.numel(), max(len(keys), 1))
        if left or values.dim() != 1 or values.dtype not in (torch.int32, torch.int64):
            raise MesetaError(
                f"KeyedJaggedTensor.from_single_ids: values must have one id per sample for each of {len(keys)} keys, "
                f"got {values.dtype} {list(values.shape)}; give int32 or int64 [{len(keys)} * B]"
            )
        return KeyedJaggedTensor._unchecked(
            keys=tuple(keys),
            values=values,
            lengths=torch.from_numpy(np.ones(values.numel(), np.int64)),
            weights=None,
            batch_sizes=(size,) * len(keys),
            key_offsets=tuple(size * key for key in range(len(keys) + 1)),
        )

    @property
    def batch_size(self) -> int:
        """Number of samples. Raises MesetaError if features have different batch sizes."""
        if len(set(self.batch_sizes)) > 1:
            raise MesetaError(f"KeyedJaggedTensor: features have different batch sizes {list(self.batch_sizes)}")
        return self.batch_sizes[0] if self.batch_sizes else 0

    @cached_property
    def offsets(self) -> Int[Tensor, " F_times_B_plus_1"]:
        """Start of each bag in `values`, feature by feature."""
        return _offsets(self.lengths)

    @cached_property
    def key_offsets(self) -> tuple[int, ...]:
        """Start of each feature in `values` [F + 1]. Feature f has values[key_offsets[f] : key_offsets[f + 1]].

        Synchronizes with the device, unless the batch was moved there by `to`.
        """
        return tuple(self.offsets[torch.tensor(self._bag_offsets, device=self.offsets.device)].tolist())

    @cached_property
    def _bag_offsets(self) -> tuple[int, ...]:
        """Start of each feature in `lengths` [F + 1]."""
        return tuple(accumulate(self.batch_sizes, initial=0))

    @cached_property
    def _key_index(self) -> dict[str, int]:
        return {key: index for index, key in enumerate(self.keys)}

    def __getitem__(self, key: str) -> JaggedTensor:
        """Return one feature as views of the tensors of this batch."""
        index = self._key_index.get(key)
        if index is None:
            raise MesetaError(f"KeyedJaggedTensor: no key {key!r}; {suggest(key, self.keys)}")
        start, stop = self.key_offsets[index], self.key_offsets[index + 1]
        return JaggedTensor(
            values=self.values[start:stop],
            lengths=self.lengths[self._bag_offsets[index] : self._bag_offsets[index + 1]],
            weights=None if self.weights is None else self.weights[start:stop],
        )

    def key_indices(self, keys: Sequence[str]) -> list[int]:
        """Return the indices of features. Raises MesetaError if a key is missing or occurs twice."""
        keys = _check_keys("KeyedJaggedTensor: keys", keys)
        missing = [key for key in keys if key not in self._key_index]
        if missing:
            raise MesetaError(f"KeyedJaggedTensor: no key {missing[0]!r}; {suggest(missing[0], self.keys)}")
        return [self._key_index[key] for key in keys]

    def select(self, keys: Sequence[str]) -> KeyedJaggedTensor:
        """Return a batch with the features `keys` in this order.

        The result is `self` if nothing changes, and has views if the selected features are adjacent.
        """
        if tuple(keys) == self.keys:
            return self
        order = self.key_indices(keys)
        runs = _contiguous_runs(order)  # One slice per run. A single run needs no copy.

        def pick(tensor: Tensor, bounds: Sequence[int]) -> Tensor:
            pieces = [tensor[bounds[first] : bounds[last]] for first, last in runs]
            return pieces[0] if len(pieces) == 1 else torch.cat([tensor[:0], *pieces])

        weights = None if self.weights is None else pick(self.weights, self.key_offsets)
        values, lengths = pick(self.values, self.key_offsets), pick(self.lengths, self._bag_offsets)
        return self.with_permuted_tensors(order, values, lengths, weights)

    def with_permuted_tensors(
        self, order: Sequence[int], values: Int[Tensor, " nnz"], lengths: Int[Tensor, " bags"], weights: Tensor | None
    ) -> KeyedJaggedTensor:
        """Return a batch of features order[0], order[1] and so on, with tensors that are already in this order."""
        sizes = (self.key_offsets[f + 1] - self.key_offsets[f] for f in order)
        return self._unchecked(
            keys=tuple(self.keys[f] for f in order),
            values=values,
            lengths=lengths,
            weights=weights,
            batch_sizes=tuple(self.batch_sizes[f] for f in order),
            key_offsets=tuple(accumulate(sizes, initial=0)),
        )

    @staticmethod
    def _unchecked(**fields: Any) -> KeyedJaggedTensor:
        # Checking fields of a checked batch again would read its lengths, which synchronizes with a device.
        batch = object.__new__(KeyedJaggedTensor)
        batch.__dict__.update(fields)
        return batch

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> KeyedJaggedTensor:
        """Return the batch on `device`, with the `key_offsets` of this batch."""
        if torch.device(device) == self.values.device:
            return self
        weights = None if self.weights is None else self.weights.to(device, non_blocking=non_blocking)
        values, lengths = (tensor.to(device, non_blocking=non_blocking) for tensor in (self.values, self.lengths))
        return self.with_tensors(values, lengths, weights)

    def with_tensors(
        self, values: Int[Tensor, " nnz"], lengths: Int[Tensor, " bags"], weights: Float[Tensor, " nnz"] | None
    ) -> KeyedJaggedTensor:
        """Return a batch with copies of the tensors, for example on another device. Keeps `key_offsets`."""
        return self._unchecked(
            keys=self.keys,
            values=values,
            lengths=lengths,
            weights=weights,
            batch_sizes=self.batch_sizes,
            key_offsets=self.key_offsets,
        )

    def as_padded(self) -> KeyedJaggedTensor:
        """Return the batch with `is_padded`, and without stored `key_offsets`."""
        return self._unchecked(
            keys=self.keys,
            values=self.values,
            lengths=self.lengths,
            weights=self.weights,
            batch_sizes=self.batch_sizes,
            is_padded=True,
        )

    def with_constant_bags(
        self, offsets: Int[Tensor, " F_times_B_plus_1"], zeros: Int[Tensor, " words"]
    ) -> KeyedJaggedTensor:
        """Return a batch with `offsets`, and `zeros` for `pop_zeros`."""
        return self._unchecked(**{**self.__dict__, "offsets": offsets, "zeros": zeros})

    def pop_zeros(self) -> Int[Tensor, " words"] | None:
        """Return zeros [F + 5] once, or `None`."""
        # The check of the ids overwrites them.
        return cast("Tensor | None", self.__dict__.pop("zeros", None))

    @cached_property
    def is_padded(self) -> bool:
        """Whether values may follow that belong to no feature."""
        return False

    def with_values(
        self, values: Int[Tensor, " nnz"], offsets: Int[Tensor, " F_times_B_plus_1"] | None = None
    ) -> KeyedJaggedTensor:
        """Return a batch with other ids, the same lengths and weights, and `offsets` if they are known."""
        if values.shape != self.values.shape or values.dtype not in (torch.int32, torch.int64):
            raise MesetaError(
                f"KeyedJaggedTensor.with_values: values {values.dtype} {list(values.shape)} do not replace "
                f"{self.values.numel()} ids; give one int32 or int64 per id"
            )
        known = {} if offsets is None else {"offsets": offsets}
        return self._unchecked(**{**self.__dict__, "values": values, **known})
