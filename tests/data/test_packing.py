"""Packed batches: equal to the batches, small, and with few layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meseta.data.read.batch import Batch, Position
from meseta.data.read.packing import (
    ALIGNMENT,
    MAX_KINDS,
    MIN_CAPACITY,
    PackedLayout,
    PackedLayouts,
    PackedSection,
    ceil_capacity,
)
from meseta.data.read.tensors import pad_batch
from meseta.ops.id_policy.reference import NUM_REPORT_WORDS
from meseta.pipeline.device_copy import BatchPacker
from meseta.sparse import KeyedJaggedTensor

KEYS = "abcdef"
INT32_IDS = st.integers(-(2**31), 2**31 - 1)
WIDE_IDS = st.integers(-(2**63), 2**63 - 1)
INT_TYPES = st.sampled_from([torch.int32, torch.int64])


def new_buffer(num_bytes: int) -> Tensor:
    return torch.full((num_bytes + 7,), 0xA5, dtype=torch.uint8)


def pack_and_copy(batch: Batch, layouts: PackedLayouts | None = None) -> tuple[PackedLayout, Tensor]:
    """Pack a batch, copy it, and overwrite the buffer."""
    layout, buffer = (layouts or PackedLayouts()).pack(batch, new_buffer)
    on_device = buffer[: layout.num_bytes].clone()
    buffer.fill_(0x5A)
    return layout, on_device


def check_equal(unpacked: Batch, batch: Batch, id_dtype: torch.dtype | None = None) -> None:
    """Check that the tensors and the structure of a batch are equal. `None` accepts int32 and int64 ids."""
    assert id_dtype is None or unpacked.sparse.values.dtype == id_dtype
    assert torch.equal(unpacked.sparse.values.to(batch.sparse.values.dtype), batch.sparse.values)
    for index, (tensor, original) in enumerate(zip(unpacked.tensors, batch.tensors, strict=True)):
        assert tensor.shape == original.shape and tensor.is_contiguous()
        if index != 1:
            assert tensor.dtype == original.dtype and torch.equal(tensor, original)
    for name in ("keys", "batch_sizes", "key_offsets"):
        assert getattr(unpacked.sparse, name) == getattr(batch.sparse, name)
    for name in ("weight", "group", "label_mask"):
        assert (getattr(unpacked, name) is None) == (getattr(batch, name) is None)


def check_padded(unpacked: Batch, batch: Batch, layout: PackedLayout) -> None:
    """Check a batch whose ids have the capacity of its layout."""
    ids, num_ids = unpacked.sparse, batch.sparse.values.numel()
    # The real number of ids is not stored unless it is constant.
    assert ("key_offsets" in ids.__dict__) == (layout.key_offsets is not None)
    for tensor in (ids.values, *([] if ids.weights is None else [ids.weights])):
        assert tensor.shape == (layout.id_capacity,)
        assert not tensor[num_ids:].any()
    weights = None if ids.weights is None else ids.weights[:num_ids]
    exact = KeyedJaggedTensor(ids.keys, ids.values[:num_ids], ids.lengths, weights, ids.batch_sizes)
    check_equal(replace(unpacked, sparse=exact), batch)


class Case(NamedTuple):
    """Contents of batches of one kind. Tensors are made in the test, because their checks draw random numbers."""

    lengths: list[list[list[int]]]
    """Lengths by batch and feature. Features may have different numbers of samples."""
    ids: list[list[int]]
    """Ids of each batch, which are repeated."""
    length_dtype: torch.dtype
    id_dtype: torch.dtype
    num_dense: int
    label_shape: tuple[int, ...]
    weights: torch.dtype | None
    has_weight: bool
    has_group: bool
    has_mask: bool
    num_padding: int
    position: Position | None

    def batches(self) -> list[Batch]:
        return [self._make_batch(number) for number in range(len(self.ids))]

    def _make_batch(self, number: int) -> Batch:
        lengths, ids = self.lengths[number], self.ids[number]
        num_ids, flat = sum(map(sum, lengths)), [n for feature in lengths for n in feature]
        values = torch.tensor([ids[i % len(ids)] for i in range(num_ids)], dtype=self.id_dtype)
        size, generator = self.label_shape[0], torch.Generator().manual_seed(number)
        return Batch(
            dense=torch.randn(size, self.num_dense, generator=generator),
            sparse=KeyedJaggedTensor(
                keys=tuple(KEYS[: len(lengths)]),
                values=values,
                lengths=torch.tensor(flat, dtype=self.length_dtype),
                weights=None if self.weights is None else torch.arange(1, num_ids + 1).to(self.weights),
                batch_sizes=tuple(map(len, lengths)),
            ),
            label=torch.rand(self.label_shape, generator=generator),
            weight=torch.rand(size, generator=generator) if self.has_weight else None,
            group=torch.arange(number, number + size) * 2**40 if self.has_group else None,
            label_mask=torch.rand(self.label_shape, generator=generator) > 0.5 if self.has_mask else None,
            num_padding=self.num_padding,
            position=self.position,
        )


@st.composite
def lengths_of_batch(draw: st.DrawFn, sizes: list[int]) -> list[list[int]]:
    lengths = []
    for num_bags in sizes:
        fixed = st.just(draw(st.integers(0, 3)))
        bag_sizes = draw(st.sampled_from([st.just(1), fixed, st.integers(0, 3)]))
        lengths.append(draw(st.lists(bag_sizes, min_size=num_bags, max_size=num_bags)))
    longest = draw(st.sampled_from([0, 0, 0, 255, 256, 300]))
    if longest and sizes and lengths[0]:
        lengths[0][0] = longest
    return lengths


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size, num_features = draw(st.integers(0, 5)), draw(st.integers(0, len(KEYS)))
    sizes = [size] * num_features
    if num_features and draw(st.integers(0, 4)) == 0:
        sizes[-1] = draw(st.integers(0, 5))
    id_dtype, num_batches = draw(INT_TYPES), draw(st.integers(1, 4))
    ids = INT32_IDS if id_dtype == torch.int32 else draw(st.sampled_from([INT32_IDS, INT32_IDS | WIDE_IDS]))
    return Case(
        lengths=[draw(lengths_of_batch(sizes)) for _ in range(num_batches)],
        ids=[draw(st.lists(ids, min_size=1, max_size=20)) for _ in range(num_batches)],
        length_dtype=draw(INT_TYPES),
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


def fits_int32(batch: Batch) -> bool:
    return all(-(2**31) <= row < 2**31 for row in batch.sparse.values.tolist())


@given(case=cases())
def test_batches_are_unpacked_to_the_same_tensors(case: Case) -> None:
    layouts, batches = PackedLayouts(), case.batches()
    for number, batch in enumerate(batches):
        layout, on_device = pack_and_copy(batch, layouts)
        unpacked = layout.unpack(batch, on_device)
        # Ids remain int64 after the first batch that needs it.
        is_int32 = all(map(fits_int32, batches[: number + 1]))
        check_equal(unpacked, batch, torch.int32 if is_int32 else torch.int64)
        assert (unpacked.num_padding, unpacked.position) == (batch.num_padding, batch.position)
        check_padded(layout.unpack(batch, on_device, padded=True), batch, layout)
        assert layout.num_bytes % ALIGNMENT == 0


@given(case=cases())
def test_a_layout_fits_all_later_batches_that_are_not_larger(case: Case) -> None:
    layouts, batches = PackedLayouts(), case.batches()
    first = [pack_and_copy(batch, layouts)[0] for batch in batches]
    for before, after in pairwise(first):
        for old, new in zip(sections(before), sections(after), strict=True):
            assert old.dtype.itemsize <= new.dtype.itemsize and old.shape <= new.shape
    again = [pack_and_copy(batch, layouts) for batch in batches]
    for (layout, on_device), batch in zip(again, batches, strict=True):
        assert layout is first[-1]
        check_equal(layout.unpack(batch, on_device), batch)
        # A graph that was captured with another batch.
        check_padded(layout.unpack(batches[0], on_device, padded=True), batch, layout)


def sections(layout: PackedLayout) -> tuple[PackedSection, ...]:
    return (*layout.tensors, layout.lengths)


def ragged(draw: np.random.Generator, size: int) -> Any:
    return draw.integers(0, 4, (len(KEYS), size))


def single(draw: np.random.Generator, size: int) -> Any:
    """Return lengths of 1, and rarely others."""
    return np.where(draw.random((len(KEYS), size)) < 3e-4, 3, 1)


def heavy_tailed(draw: np.random.Generator, size: int) -> Any:
    return np.minimum(draw.pareto(1.2, (len(KEYS), size)), 1000).astype(int)


def random_batches(lengths_of: Callable[..., Any], size: int, count: int) -> Iterator[Batch]:
    """Yield batches with ids that rarely exceed int32."""
    draw = np.random.default_rng(0)
    for _ in range(count):
        lengths = lengths_of(draw, size).reshape(-1)
        ids = np.minimum(draw.pareto(0.5, lengths.sum()), 2**40).astype(np.int64)
        sparse = KeyedJaggedTensor(tuple(KEYS), torch.from_numpy(ids), torch.from_numpy(lengths))
        yield Batch(dense=torch.zeros(size, 1), sparse=sparse, label=torch.zeros(size))


@pytest.mark.parametrize("size", [1, 64])
@pytest.mark.parametrize("lengths_of", [ragged, single, heavy_tailed])
def test_thousands_of_batches_need_few_layouts(lengths_of: Callable[..., Any], size: int) -> None:
    layouts = PackedLayouts()
    distinct = {layouts.pack(batch, new_buffer)[0] for batch in random_batches(lengths_of, size, 2000)}
    assert len(distinct) <= (10 if lengths_of is heavy_tailed else 6)


def test_capacities_grow_by_a_quarter_at_most() -> None:
    capacities = [ceil_capacity(num_ids) for num_ids in range(5000)]
    assert all(num_ids <= capacity for num_ids, capacity in enumerate(capacities))
    assert capacities[0] == MIN_CAPACITY and capacities == sorted(capacities)
    ladder = sorted(set(capacities))
    assert ladder[:6] == [64, 80, 96, 112, 128, 160] and set(ladder) == {ceil_capacity(rung) for rung in ladder}
    assert all(rung < other <= 1.25 * rung for rung, other in pairwise(ladder))


def make(lengths: list[list[int]], ids: list[int] | None = None, **more: Any) -> Batch:
    """Return a batch with these lengths of each feature."""
    flat = [n for feature in lengths for n in feature]
    values = torch.arange(sum(flat)) if ids is None else torch.tensor(ids)
    keys, size = tuple(KEYS[: len(lengths)]), len(lengths[0])
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
    check_equal(layout.unpack(batch, on_device), batch, torch.int32)


def test_the_number_of_features_whose_lengths_are_stored_is_a_power_of_two() -> None:
    fixed, layouts, counts = [[300, 300], *[[1, 1]] * 5], PackedLayouts(), []
    for num_varying in range(7):
        batch = make([*fixed[: 6 - num_varying], *[[0, 2]] * num_varying])
        layout, on_device = pack_and_copy(batch, layouts)
        check_equal(layout.unpack(batch, on_device), batch)
        counts.append(layout.lengths.shape[0] // 2)
    assert counts == [0, 1, 2, 4, 4, 6, 6]


def test_bags_of_constant_length_are_computed_once() -> None:
    batches, layouts = [make([[2, 2], [0, 0], [1, 1]], ids) for ids in ([1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1])], []
    unpacked = []
    for batch in batches:
        layout, on_device = pack_and_copy(batch)
        unpacked.append(layout.unpack(batch, on_device).sparse)
        layouts.append(layout)
    assert layouts[0] == layouts[1] and layouts[0].fixed_lengths.num_bytes == layouts[0].lengths.num_bytes == 0
    for ids in unpacked:
        assert ids.offsets.tolist() == [0, 2, 4, 4, 4, 5, 6] and ids.offsets is unpacked[0].offsets
        assert ids.lengths.tolist() == [2, 2, 0, 0, 1, 1] and ids.lengths is unpacked[0].lengths
        zeros = ids.pop_zeros()
        assert zeros is not None and zeros.tolist() == [0] * (3 + NUM_REPORT_WORDS) and ids.pop_zeros() is None


@pytest.mark.parametrize("wide", [2**31, -(2**31) - 1])
def test_ids_are_int64_from_the_first_batch_with_an_id_beyond_int32(wide: int) -> None:
    layouts, dtypes = PackedLayouts(), [torch.int32, torch.int64, torch.int64]
    for ids, dtype in zip([[5, 6], [5, wide], [7, 8]], dtypes, strict=True):
        batch = make([[1, 1]], ids)
        layout, on_device = pack_and_copy(batch, layouts)
        check_equal(layout.unpack(batch, on_device), batch, dtype)


@pytest.mark.parametrize("num_parts", [1, 2])
def test_padding_does_not_widen_the_layout_of_other_batches(num_parts: int) -> None:
    packer = BatchPacker(torch.device("cpu"), num_parts, new_buffer=new_buffer)
    full = make([[1] * 4, [1] * 4], weight=torch.ones(4))
    short = make([[1] * 3, [1] * 3], weight=torch.ones(3))
    before, padded, after = (
        [part.layout for part in packer.pack(batch).parts] for batch in (full, pad_batch(short, 4), full)
    )
    assert before == after and before[-1] != padded[-1]
    assert all(layout.id_capacity == 8 // num_parts for layout in before)


def test_layouts_of_unused_kinds_are_forgotten() -> None:
    layouts, kept, unused = PackedLayouts(), make([[1, 2]]), make([[1, 2, 1]])
    wide = [pack_and_copy(make([[0, 200]]), layouts)[0], pack_and_copy(make([[0, 0, 200]]), layouts)[0]]
    for size in range(4, MAX_KINDS + 4):
        pack_and_copy(make([[1] * size]), layouts)
        pack_and_copy(kept, layouts)
    assert pack_and_copy(kept, layouts)[0] is wide[0]
    assert pack_and_copy(unused, layouts)[0].id_capacity < wide[1].id_capacity


def test_threads_can_pack_at_the_same_time() -> None:
    layouts, batches = PackedLayouts(), [*random_batches(ragged, 8, 400)]
    with ThreadPoolExecutor(4) as pool:
        for batch, (layout, on_device) in zip(
            batches, pool.map(lambda batch: pack_and_copy(batch, layouts), batches), strict=True
        ):
            check_equal(layout.unpack(batch, on_device), batch)
        assert len(set(pool.map(lambda batch: layouts.pack(batch, new_buffer)[0], batches))) == 1


def test_a_batch_of_single_ids_takes_a_third_of_its_bytes() -> None:
    size = 65_536
    keys, draw = [f"f{i}" for i in range(26)], np.random.default_rng(0)
    ids = KeyedJaggedTensor.from_single_ids(keys, torch.from_numpy(draw.integers(0, 10**6, 26 * size)))
    batch = Batch(dense=torch.zeros(size, 13), sparse=ids, label=torch.zeros(size))
    layout, _ = PackedLayouts().pack(batch, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    assert sum(tensor.nbytes for tensor in batch.tensors) == 30_932_992
    assert layout.num_bytes == 10_486_016
    assert layout.id_capacity == 26 * size and layout.key_offsets == ids.key_offsets
