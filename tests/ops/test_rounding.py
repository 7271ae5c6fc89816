"""Tests of stochastic rounding in every build of the core: each 16-bit number, and values at the rounding threshold."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from instruction_sets import SUPPORTED, load_core
from meseta.ops.random_rows import reference
from meseta.ops.row_update import Bags, FeatureGradient, TableRows, UpdateGroup, row_update
from meseta.optim import make_row_optimizer
from meseta.spec import OptimizerSpec

TYPES = {torch.bfloat16: (16, -133), torch.float16: (13, -24)}
"""Number of bits that a float32 loses, and the exponent of the smallest number."""
KEY, STEP, FIRST_ROW, FIRST_COLUMN = 0x9876543210FEDCBA, 0xFFFFFFF0, 2**32 - 700, 48


@pytest.fixture(params=SUPPORTED)
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load_core(request.param)
    monkeypatch.setattr("meseta.ops.row_update.core", lambda: module)
    return module


def random_halves(num_rows: int, dim: int) -> Tensor:
    """Return int64 [num_rows, dim] random halves as documented by row_update."""
    rows = torch.arange(num_rows) + FIRST_ROW
    groups = torch.arange(-(-dim // 8)) + FIRST_COLUMN // 8
    zeros = torch.zeros(num_rows, groups.numel(), dtype=torch.int64)
    counter = (zeros + (rows & 0xFFFFFFFF)[:, None], zeros + (rows >> 32)[:, None], zeros + groups, zeros + STEP)
    words = torch.stack(reference.philox(counter, KEY), dim=-1)
    return torch.stack([words & 0xFFFF, words >> 16], dim=-1).flatten(1)[:, :dim]


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of zeros after a step that adds `values` [rows, dim]."""
    zero = torch.zeros(()).copysign(values).to(dtype)  # a negative zero plus nothing stays one
    table = TableRows(weight=zero, state={}, first_row=FIRST_ROW, first_column=FIRST_COLUMN, key=KEY)
    sgd = make_row_optimizer(OptimizerSpec(name="sgd"))
    group = UpdateGroup(sgd, (table,), (values.shape[1],), (FeatureGradient(0, 0, 0),))
    num_rows = values.shape[0]
    row_update(group, 1.0, STEP, Bags(torch.arange(num_rows), torch.arange(num_rows + 1), num_rows), [-values])
    return table.weight


def in_rows(flat: Tensor, dim: int) -> Tensor:
    """Return the values as [rows, dim], repeated to fill the last row."""
    num_rows = -(-flat.numel() // dim)
    return flat[torch.arange(num_rows * dim) % flat.numel()].view(num_rows, dim)


@pytest.mark.parametrize("dim", [8, 40, 64, 150])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_number_moves_up_at_its_threshold(build: ModuleType, dtype: torch.dtype, dim: int) -> None:
    patterns = in_rows(torch.arange(1 << 16).repeat(3), dim)
    kinds = in_rows(torch.arange(3).repeat_interleave(1 << 16), dim)  # the number itself, just too little, just enough
    dropped, lowest = TYPES[dtype]
    whole = 1 << dropped
    random = random_halves(*patterns.shape) >> (16 - dropped)
    share = torch.where(kinds == 0, 0, whole - random - (kinds == 1).long()).double() / whole
    number = patterns.to(torch.uint16).view(dtype)
    magnitude = number.double().abs()
    exponent = torch.frexp(magnitude).exponent - 24 + dropped  # of the last place
    exponent = torch.where(magnitude == 0, lowest, exponent.clamp(min=lowest))
    gap = torch.from_numpy(np.ldexp(1.0, exponent.numpy()))
    values = (magnitude + share * gap).copysign(number.double()).float()
    finite = number.isfinite()
    values = torch.where(finite, values, number.float())
    got = rounded(values, dtype).view(torch.uint16).long()
    assert torch.equal(got[finite], (patterns + (kinds == 2).long())[finite])
    infinite = number.isinf()
    assert torch.equal(got[infinite], patterns[infinite])
    assert got[number.isnan()].to(torch.uint16).view(dtype).isnan().all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_floats_beyond_the_halves(build: ModuleType, sign: float) -> None:
    large = torch.tensor([65536.0, 65537.0, 1e6, 2.0**100, 3.4028235e38, torch.inf]).repeat(500, 4) * sign
    assert torch.equal(rounded(large, torch.float16), torch.full(large.shape, torch.inf * sign).half())
    # A share below 2^-13 of the smallest half never moves up to it.
    tiny = torch.tensor([2.0**-149, 1e-45, 2.0**-126, 1e-30, 2.0**-64, 2.0**-50]).repeat(500, 4) * sign
    zeros = rounded(tiny, torch.float16)
    assert not zeros.any() and (zeros.signbit() == (sign < 0)).all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_all_random_bits_meet_a_value_between_two_numbers(build: ModuleType, dtype: torch.dtype) -> None:
    # 1.25 of the smallest number, and of the last place of one: up from the lower one in a quarter of the bits.
    lowest = TYPES[dtype][1]
    places = [2.0**lowest * 1.25, 1.0 + torch.finfo(dtype).eps / 4]
    for value, low in zip(places, [1, int(torch.ones((), dtype=dtype).view(torch.int16))], strict=True):
        values = torch.full((4096, 64), value)
        random = random_halves(4096, 64)
        up = rounded(values, dtype).view(torch.int16).long() - low
        assert torch.equal(up, (random >= 49152).long())
        assert random.unique().numel() > 64000


@example(build=SUPPORTED[-1], key=0, first=(0, 1), shape=(1, 1024))  # 256 counters, of whose first a word is skipped
@given(
    build=st.sampled_from(SUPPORTED),
    key=st.integers(0, 2**64 - 1),
    first=st.tuples(st.integers(0, 2**33), st.integers(0, 300)),
    shape=st.tuples(st.integers(1, 70), st.integers(1, 70) | st.integers(1000, 1100)),
)
def test_random_words_of_every_build(build: str, key: int, first: tuple[int, int], shape: tuple[int, int]) -> None:
    rows, columns = (first[0], first[0] + shape[0]), (first[1], first[1] + shape[1])
    got = np.empty(shape, dtype=np.int64)
    load_core(build).random_bits(key, rows[0], columns[0], got, 1)
    assert torch.equal(torch.from_numpy(got), reference.random_bits(key, rows, columns, "cpu"))
