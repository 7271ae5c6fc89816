"""Packed batches: equal to the batches, and small."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meseta.data.read.batch import Batch, Position
from meseta.data.read.packing import ALIGNMENT, HEADER, PackedLayout, pack
from meseta.sparse import KeyedJaggedTensor

INT32_IDS = st.integers(-(2**31), 2**31 - 1)
WIDE_IDS = st.integers(-(2**63), 2**63 - 1)
INT_TYPES = st.sampled_from([torch.int32, torch.int64])


def new_buffer(num_bytes: int) -> Tensor:
    return torch.full((num_bytes + 7,), 0xA5, dtype=torch.uint8)


def pack_and_copy(batch: Batch, weight: float = 0.0) -> tuple[PackedLayout, Tensor]:
    """Pack a batch, copy it, and overwrite the buffer."""
    layout, buffer = pack(batch, weight, new_buffer)
    on_device = buffer[: layout.num_bytes].clone()
    buffer.fill_(0x5A)
    return layout, on_device


def check_equal(unpacked: Batch, batch: Batch, id_dtype: torch.dtype) -> None:
    assert unpacked.sparse.values.dtype == id_dtype
    assert torch.equal(unpacked.sparse.values.to(batch.sparse.values.dtype), batch.sparse.values)
    for index, (tensor, original) in enumerate(zip(unpacked.tensors, batch.tensors, strict=True)):
        assert tensor.shape == original.shape and tensor.is_contiguous()
        if index != 1:
            assert tensor.dtype == original.dtype and torch.equal(tensor, original)
    for name in ("keys", "batch_sizes", "key_offsets"):
        assert getattr(unpacked.sparse, name) == getattr(batch.sparse, name)
    assert (unpacked.num_padding, unpacked.position) == (batch.num_padding, batch.position)
    for name in ("weight", "group", "label_mask"):
        assert (getattr(unpacked, name) is None) == (getattr(batch, name) is None)


class Case(NamedTuple):
    """Contents of a batch. Tensors are made in the test, because their checks draw random numbers."""

    lengths: list[list[int]]
    """Lengths by feature. Features may have different numbers of samples."""
    length_dtype: torch.dtype
    ids: list[int]
    """Ids, which are repeated."""
    id_dtype: torch.dtype
    num_dense: int
    label_shape: tuple[int, ...]
    weights: torch.dtype | None
    has_weight: bool
    has_group: bool
    has_mask: bool
    num_padding: int
    position: Position | None

    def batch(self) -> Batch:
        num_ids, flat = sum(map(sum, self.lengths)), [n for feature in self.lengths for n in feature]
        values = torch.tensor([self.ids[i % len(self.ids)] for i in range(num_ids)], dtype=self.id_dtype)
        size, generator = self.label_shape[0], torch.Generator().manual_seed(1)
        return Batch(
            dense=torch.randn(size, self.num_dense, generator=generator),
            sparse=KeyedJaggedTensor(
                keys=tuple("abcd"[: len(self.lengths)]),
                values=values,
                lengths=torch.tensor(flat, dtype=self.length_dtype),
                weights=None if self.weights is None else torch.arange(num_ids).to(self.weights),
                batch_sizes=tuple(map(len, self.lengths)),
            ),
            label=torch.rand(self.label_shape, generator=generator),
            weight=torch.rand(size, generator=generator) if self.has_weight else None,
            group=torch.arange(size) * 2**40 if self.has_group else None,
            label_mask=torch.rand(self.label_shape, generator=generator) > 0.5 if self.has_mask else None,
            num_padding=self.num_padding,
            position=self.position,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size, num_features = draw(st.integers(0, 5)), draw(st.integers(0, 4))
    sizes = [size] * num_features
    if num_features and draw(st.integers(0, 4)) == 0:
        sizes[-1] = draw(st.integers(0, 5))
    lengths = []
    for num_bags in sizes:
        fixed = st.just(draw(st.integers(0, 3)))
        bag_sizes = draw(st.sampled_from([st.just(1), fixed, st.integers(0, 3)]))
        lengths.append(draw(st.lists(bag_sizes, min_size=num_bags, max_size=num_bags)))
    longest = draw(st.sampled_from([0, 0, 255, 256, 300]))
    if longest and num_features and lengths[0]:
        lengths[0][0] = longest
    id_dtype = draw(INT_TYPES)
    return Case(
        lengths=lengths,
        length_dtype=draw(INT_TYPES),
        ids=draw(st.lists(INT32_IDS if id_dtype == torch.int32 else INT32_IDS | WIDE_IDS, min_size=1, max_size=20)),
        id_dtype=id_dtype,
        num_dense=draw(st.integers(0, 3)),
        label_shape=(size, *draw(st.sampled_from([(), (1,), (2,)]))),
        weights=draw(st.sampled_from([None, torch.float32, torch.bfloat16, torch.float64])),
        has_weight=draw(st.booleans()),
        has_group=draw(st.booleans()),
        has_mask=draw(st.booleans()),
        num_padding=draw(st.integers(0, size)),
        position=draw(st.sampled_from([None, Position(1, 7)])),
    )


@given(case=cases(), weight=st.floats(0, 1e6))
def test_a_batch_is_unpacked_to_the_same_tensors(case: Case, weight: float) -> None:
    batch = case.batch()
    layout, on_device = pack_and_copy(batch, weight)
    fits = all(-(2**31) <= row < 2**31 for row in batch.sparse.values.tolist())
    check_equal(layout.unpack(on_device), batch, torch.int32 if fits else torch.int64)
    assert layout.num_bytes % ALIGNMENT == 0
    header = on_device.numpy()[: HEADER.itemsize].view(HEADER)[0].tolist()
    assert header == (batch.batch_size, batch.num_padding, batch.sparse.values.numel(), weight)


def make(lengths: list[list[int]], ids: list[int] | None = None, **more: Any) -> Batch:
    """Return a batch with these lengths of each feature."""
    flat = [n for feature in lengths for n in feature]
    values = torch.arange(sum(flat)) if ids is None else torch.tensor(ids)
    keys, size = tuple("abcd"[: len(lengths)]), len(lengths[0])
    sparse = KeyedJaggedTensor(keys, values, torch.tensor(flat))
    return Batch(dense=torch.zeros(size, 1), sparse=sparse, label=torch.zeros(size), **more)


@pytest.mark.parametrize(
    ("longest", "dtype"),
    [(255, torch.uint8), (256, torch.int16), (2**15 - 1, torch.int16), (2**15, torch.int32)],
)
def test_lengths_have_8_16_or_32_bits(longest: int, dtype: torch.dtype) -> None:
    batch = make([[1, 1], [longest, 0], [2, 2]])
    layout, on_device = pack_and_copy(batch)
    assert (layout.lengths.dtype, layout.lengths.shape) == (dtype, (2,))
    assert layout.fixed_lengths.view(on_device)[[0, 2]].tolist() == [1, 2]
    assert layout.varying.view(on_device).tolist() == [1]
    check_equal(layout.unpack(on_device), batch, torch.int32)


@pytest.mark.parametrize("wide", [2**31, -(2**31) - 1])
def test_a_batch_with_an_id_beyond_int32_keeps_all_ids(wide: int) -> None:
    layout, on_device = pack_and_copy(make([[1, 1]], [5, wide]))
    assert layout.unpack(on_device).sparse.values.tolist() == [5, wide]


def test_a_batch_of_single_ids_takes_a_third_of_its_bytes() -> None:
    size = 65_536
    keys, draw = [f"f{i}" for i in range(26)], np.random.default_rng(0)
    ids = KeyedJaggedTensor.from_single_ids(keys, torch.from_numpy(draw.integers(0, 10**6, 26 * size)))
    batch = Batch(dense=torch.zeros(size, 13), sparse=ids, label=torch.zeros(size))
    layout, _ = pack(batch, 0.0, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    assert sum(tensor.nbytes for tensor in batch.tensors) == 30_932_992
    assert layout.num_bytes == 10_486_272
