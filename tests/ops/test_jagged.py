"""Tests of permuted jagged tensors against Python lists."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meseta.measure.threads import use_num_threads
from meseta.ops.jagged import lengths_to_offsets, permute, permute_segments, reference, split
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import MesetaError

Bags = dict[str, list[list[int]]]


@st.composite
def batches(draw: st.DrawFn) -> tuple[Bags, list[torch.dtype], bool]:
    """Draw features with different batch sizes, the dtypes of ids and lengths, and whether ids have weights."""
    bags = {
        key: [draw(st.lists(st.integers(0, 99), max_size=4)) for _ in range(draw(st.integers(0, 4)))]
        for key in "abcdef"[: draw(st.integers(1, 6))]
    }
    return bags, [draw(st.sampled_from([torch.int32, torch.int64])) for _ in range(2)], draw(st.booleans())


def to_kjt(bags: Bags, dtypes: list[torch.dtype], weighted: bool) -> KeyedJaggedTensor:
    values = torch.tensor([i for feature_bags in bags.values() for bag in feature_bags for i in bag], dtype=dtypes[0])
    return KeyedJaggedTensor(
        keys=tuple(bags),
        values=values,
        lengths=torch.tensor([len(bag) for feature_bags in bags.values() for bag in feature_bags], dtype=dtypes[1]),
        weights=values * 0.5 if weighted else None,
        batch_sizes=tuple(len(feature_bags) for feature_bags in bags.values()),
    )


def check(kjt: KeyedJaggedTensor, source: KeyedJaggedTensor, bags: Bags, keys: list[str]) -> None:
    """Check that `kjt` has these keys of `bags`, and that its constructor accepts its tensors."""
    expected = [bag for key in keys for bag in bags[key]]
    assert kjt.keys == tuple(keys) and kjt.batch_sizes == tuple(len(bags[key]) for key in keys)
    assert kjt.values.tolist() == [i for bag in expected for i in bag]
    assert kjt.lengths.tolist() == [len(bag) for bag in expected]
    assert kjt.values.dtype == source.values.dtype and kjt.lengths.dtype == source.lengths.dtype
    assert (kjt.weights is None) == (source.weights is None)
    assert kjt.weights is None or torch.equal(kjt.weights, kjt.values * 0.5)
    again = KeyedJaggedTensor(kjt.keys, kjt.values, kjt.lengths, kjt.weights, kjt.batch_sizes)
    assert again.key_offsets == kjt.key_offsets and torch.equal(again.offsets, kjt.offsets)
    for key in keys:
        assert kjt[key].lengths.tolist() == [len(bag) for bag in bags[key]]


@given(batch=batches(), data=st.data())
def test_permute_and_select(batch: tuple[Bags, list[torch.dtype], bool], data: st.DataObject) -> None:
    bags, kjt = batch[0], to_kjt(*batch)
    keys = data.draw(st.permutations(list(bags)).map(lambda p: p[: data.draw(st.integers(0, len(p)))]))
    check(permute(kjt, keys), kjt, bags, keys)
    check(kjt.select(keys), kjt, bags, keys)


@given(batch=batches(), data=st.data())
def test_split_gives_views(batch: tuple[Bags, list[torch.dtype], bool], data: st.DataObject) -> None:
    bags, kjt = batch[0], to_kjt(*batch)
    cut = data.draw(st.integers(0, len(bags)))
    first, second = split(kjt, [cut, len(bags) - cut])
    check(first, kjt, bags, list(bags)[:cut])
    check(second, kjt, bags, list(bags)[cut:])
    for piece in (first, second):
        assert piece.values.numel() == 0 or piece.values.untyped_storage().data_ptr() == (
            kjt.values.untyped_storage().data_ptr()
        )


@pytest.mark.parametrize("count", [1, 2])
def test_large_batches_on_several_threads(count: int) -> None:
    lengths = torch.randint(0, 4, (4 * 40_000,))
    kjt = KeyedJaggedTensor(("a", "b", "c", "d"), torch.arange(int(lengths.sum())), lengths)
    with use_num_threads(count):
        got = permute(kjt, ["d", "b", "a"])
    assert torch.equal(got.values, torch.cat([kjt[key].values for key in "dba"]))
    assert torch.equal(got.lengths, torch.cat([kjt[key].lengths for key in "dba"]))


def test_wrong_keys_are_refused() -> None:
    kjt = KeyedJaggedTensor.from_lists({"a": [[1]], "b": [[2]], "c": [[]]})
    for function in (permute, KeyedJaggedTensor.select):
        with pytest.raises(MesetaError, match="no key 'x'"):
            function(kjt, ["a", "x"])
        with pytest.raises(MesetaError, match="name a feature twice"):
            function(kjt, ["c", "a", "c"])
    with pytest.raises(MesetaError, match="add up to 3"):
        split(kjt, [1, 1])


@pytest.mark.parametrize(
    ("bounds", "order"), [([0, 2, 1], [0]), ([0, 1, 4], [0]), ([-1, 1, 2], [0]), ([0, 1, 2], [2]), ([0, 1, 2], [-1])]
)
def test_hostile_bounds_and_orders_are_refused(bounds: list[int], order: list[int]) -> None:
    with pytest.raises(MesetaError, match="permute_keys"):
        torch.ops.meseta.permute_keys([torch.zeros(3)], bounds, order)


@given(lengths=st.lists(st.integers(0, 2**31 - 1), max_size=50), dtype=st.sampled_from([torch.int32, torch.int64]))
def test_offsets(lengths: list[int], dtype: torch.dtype) -> None:
    got = lengths_to_offsets(torch.tensor(lengths, dtype=dtype))
    assert got.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)] and got.dtype == torch.int64


@pytest.mark.parametrize("count", [1, 2, 3])
def test_offsets_of_many_lengths(count: int) -> None:
    lengths = torch.randint(0, 9, (100_001,), dtype=torch.int32)
    with use_num_threads(count):
        assert torch.equal(lengths_to_offsets(lengths), reference.lengths_to_offsets(lengths))
        lengths[70_000] = -3
        with pytest.raises(MesetaError, match=r"lengths\[70000\] is -3"):
            lengths_to_offsets(lengths)


def test_operators_are_registered_as_torch_wants() -> None:
    arrays = [torch.arange(5), torch.tensor([2, 1, 2])]
    torch.library.opcheck(torch.ops.meseta.permute_keys.default, (arrays, [0, 3, 5, 0, 2, 3], [1, 0]))
    torch.library.opcheck(torch.ops.meseta.lengths_to_offsets.default, (torch.tensor([2, 0, 1]),))


def test_permute_pieces() -> None:
    assert permute_segments(torch.arange(6), [1, 0, 3, 2], [3, 0, 1, 3]).tolist() == [4, 5, 0, 4, 5]
    assert permute_segments(torch.arange(0), [], []).tolist() == []
    with pytest.raises(MesetaError, match=r"bounds\[2\] is 7"):
        permute_segments(torch.arange(6), [1, 6], [0])
    with pytest.raises(MesetaError, match="an order of keys"):
        permute_segments(torch.arange(6), [1, 5], [2])
