"""Tests of KeyedJaggedTensor against lists of lists."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meseta.sparse import JaggedTensor, KeyedJaggedTensor
from meseta.spec import MesetaError

Lists = dict[str, list[list[int]]]
bags = st.lists(st.integers(0, 2**40), max_size=4)


def features(same_batch_size: bool) -> st.SearchStrategy[Lists]:
    """Draw a few features, each with one list of ids per sample."""
    keys = st.lists(st.sampled_from("abcdefg"), unique=True, max_size=5)
    if same_batch_size:
        shapes = st.tuples(keys, st.integers(0, 4))
        return shapes.flatmap(
            lambda s: st.fixed_dictionaries({key: st.lists(bags, min_size=s[1], max_size=s[1]) for key in s[0]})
        )
    return keys.flatmap(lambda names: st.fixed_dictionaries({key: st.lists(bags, max_size=4) for key in names}))


def lists_of(jagged: JaggedTensor, values: Tensor) -> list[list[Any]]:
    """Return one list per sample, using only the lengths."""
    rest, lists = values.tolist(), []
    for length in jagged.lengths.tolist():
        lists.append(rest[:length])
        rest = rest[length:]
    assert not rest
    return lists


def make(samples: Lists, *, weighted: bool = False, dtype: torch.dtype = torch.int64) -> KeyedJaggedTensor:
    kjt = KeyedJaggedTensor.from_lists(samples)
    return KeyedJaggedTensor(
        keys=kjt.keys,
        values=kjt.values,
        lengths=kjt.lengths.to(dtype),
        weights=kjt.values.double() / 7 if weighted else None,
        batch_sizes=kjt.batch_sizes,
    )


@given(features(same_batch_size=False), st.booleans(), st.sampled_from([torch.int32, torch.int64]))
def test_getitem_gives_back_the_lists(samples: Lists, weighted: bool, dtype: torch.dtype) -> None:
    kjt = make(samples, weighted=weighted, dtype=dtype)
    assert kjt.keys == tuple(samples) and kjt.batch_sizes == tuple(map(len, samples.values()))
    for key, expected in samples.items():
        jagged = kjt[key]
        assert lists_of(jagged, jagged.values) == expected
        assert jagged.offsets.tolist() == [sum(map(len, expected[:b])) for b in range(len(expected) + 1)]
        assert jagged.offsets.dtype == torch.int64
        assert (jagged.weights is not None) == weighted
        if jagged.weights is not None:
            assert lists_of(jagged, jagged.weights) == [[i / 7 for i in bag] for bag in expected]


@given(features(same_batch_size=False), st.booleans(), st.data())
def test_select_takes_features_in_the_given_order(samples: Lists, weighted: bool, data: st.DataObject) -> None:
    kjt = make(samples, weighted=weighted)
    order = data.draw(st.permutations(list(samples)))
    keys = order[: data.draw(st.integers(0, len(order)))]
    chosen, expected = kjt.select(keys), make({key: samples[key] for key in keys}, weighted=weighted)
    assert chosen.keys == tuple(keys) and chosen.batch_sizes == expected.batch_sizes
    assert chosen.values.dtype == torch.int64 and torch.equal(chosen.values, expected.values)
    assert torch.equal(chosen.lengths, expected.lengths) and (chosen.weights is None) == (not weighted)
    if weighted:
        assert torch.equal(chosen.weights, expected.weights)
    assert (chosen is kjt) == (list(keys) == list(samples))


@given(features(same_batch_size=True))
def test_offsets_and_batch_size(samples: Lists) -> None:
    kjt = make(samples)
    every_bag = [bag for feature in samples.values() for bag in feature]
    assert kjt.offsets.tolist() == [sum(map(len, every_bag[:g])) for g in range(len(every_bag) + 1)]
    assert kjt.batch_size == (len(next(iter(samples.values()))) if samples else 0)
    per_feature = [sum(map(len, feature)) for feature in samples.values()]
    assert kjt.key_offsets == tuple(sum(per_feature[:f]) for f in range(len(per_feature) + 1))
    # Without batch_sizes they follow from the lengths.
    again = KeyedJaggedTensor(keys=kjt.keys, values=kjt.values, lengths=kjt.lengths)
    assert again.batch_sizes == kjt.batch_sizes


def test_the_picture_in_the_docstring() -> None:
    kjt = KeyedJaggedTensor.from_lists({"a": [[10, 11], []], "b": [[20], [21]]})
    assert (kjt.values.tolist(), kjt.lengths.tolist()) == ([10, 11, 20, 21], [2, 0, 1, 1])
    assert kjt["a"].values.data_ptr() == kjt.values.data_ptr()  # a view


def test_keys_and_batch_sizes_may_be_lists() -> None:
    kjt = KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.tensor([1, 2]),
        lengths=torch.tensor([1, 1]),
        batch_sizes=[1, 1],
    )
    assert kjt.keys == ("a", "b") and kjt.batch_sizes == (1, 1)
    assert kjt.select(["a", "b"]) is kjt


def test_identity_not_values_makes_equality() -> None:
    one, other = (KeyedJaggedTensor.from_lists({"a": [[1, 2]]}) for _ in range(2))
    assert one != other and len({one, other}) == 2
    assert one["a"] != other["a"]


def test_to_the_same_device_is_free() -> None:
    kjt = make({"a": [[1]]}, weighted=True)
    assert kjt.to("cpu") is kjt
    moved = kjt.to("meta")
    assert {t.device.type for t in (moved.values, moved.lengths, moved.weights) if t is not None} == {"meta"}
    assert moved.keys == kjt.keys and moved.batch_sizes == kjt.batch_sizes


@pytest.fixture
def as_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the type checks of the test run, which would fail before the tested errors."""
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)


GOOD: dict[str, Any] = {"keys": ("a", "b"), "values": torch.tensor([1, 2, 3]), "lengths": torch.tensor([2, 1])}


@pytest.mark.usefixtures("as_for_users")
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"lengths": torch.tensor([1, 1, 1])}, ["3 lengths cannot be split over 2 keys", "batch_sizes"]),
        ({"batch_sizes": (2,)}, ["batch_sizes [2] do not match 2 keys"]),
        ({"batch_sizes": (2, 1)}, ["batch_sizes [2, 1] do not match", "2 lengths"]),
        ({"keys": "ab"}, ["keys must be a sequence of names", "give ['ab']"]),
        ({"keys": ("a", "a")}, ["keys ['a', 'a'] name a feature twice"]),
        ({"weights": torch.ones(2)}, ["2 weights do not match 3 values"]),
        ({"weights": torch.ones(3, dtype=torch.int64)}, ["weights must be floating-point numbers", "int64"]),
        ({"values": torch.ones(3)}, ["values must be a 1-d tensor of int32 or int64", "float32"]),
        ({"values": torch.ones(3, 1, dtype=torch.int64)}, ["values must be a 1-d tensor", "[3, 1]"]),
        ({"lengths": torch.tensor([2.0, 1.0])}, ["lengths must be a 1-d tensor of int32 or int64", "float32"]),
        ({"lengths": torch.tensor([4, -1])}, ["a length is negative"]),
        ({"lengths": torch.tensor([2, 2])}, ["lengths add up to 4", "3 values"]),
        ({"keys": ()}, ["batch_sizes [] do not match 0 keys and 2 lengths"]),
    ],
)
def test_what_does_not_fit_together_is_named(keys: dict[str, Any], words: list[str]) -> None:
    KeyedJaggedTensor(**GOOD)
    with pytest.raises(MesetaError) as caught:
        KeyedJaggedTensor(**{**GOOD, **keys})
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.usefixtures("as_for_users")
def test_other_errors_are_named() -> None:
    kjt = KeyedJaggedTensor.from_lists({"user": [[1]], "item": [[2], [3]]})
    bad: list[tuple[Any, str]] = [
        (lambda: kjt["usr"], "no key 'usr'; did you mean 'user'?"),
        (lambda: kjt.select(["item", "usr"]), "no key 'usr'"),
        (lambda: kjt.select(["item", "item"]), "name a feature twice"),
        (lambda: kjt.batch_size, "different batch sizes [1, 2]"),
        (lambda: KeyedJaggedTensor.from_lists({"a": [[1.5]]}), "ids must be integers, got 1.5"),  # type: ignore[list-item]
    ]
    for make_bad, words in bad:
        with pytest.raises(MesetaError) as caught:
            make_bad()
        assert words in str(caught.value), str(caught.value)


@given(st.lists(st.sampled_from("abcdefg"), unique=True, max_size=5), st.integers(0, 4))
def test_single_ids_are_bags_of_one(keys: list[str], batch_size: int) -> None:
    values = torch.arange(len(keys) * batch_size)
    one, whole = (
        KeyedJaggedTensor.from_single_ids(keys, values),
        KeyedJaggedTensor(
            keys=tuple(keys), values=values, lengths=torch.ones_like(values), batch_sizes=(batch_size,) * len(keys)
        ),
    )
    assert (one.keys, one.batch_sizes, one.key_offsets) == (whole.keys, whole.batch_sizes, whole.key_offsets)
    assert one.lengths.dtype == whole.lengths.dtype and torch.equal(one.lengths, whole.lengths)
    assert torch.equal(one.offsets, whole.offsets) and one.weights is None


@pytest.mark.parametrize("values", [torch.arange(5), torch.zeros(2, 2, dtype=torch.int64), torch.zeros(4)])
def test_single_ids_that_fit_no_keys(values: Tensor) -> None:
    with pytest.raises(MesetaError, match=r"from_single_ids: .*give int32 or int64 \[2 \* B\]"):
        KeyedJaggedTensor.from_single_ids(("a", "b"), values)
