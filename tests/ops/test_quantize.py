"""Tests of quantized rows against closed forms of the error, torch's dtypes, FBGEMM's bytes and means of stochastic
rounding.

test_adaptive.py tests the adaptive range.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meseta.measure.threads import use_num_threads
from meseta.ops.quantize import RowFormat, dequantize_rows, quantize_rows, reference, row_bytes
from meseta.spec import MesetaError

FORMATS: list[RowFormat] = ["int8", "int4", "int3", "int2", "fp8_e4m3", "fp8_e5m2", "fp16", "bf16"]
PACKED: dict[RowFormat, int] = {"int4": 4, "int3": 3, "int2": 2}
FP8 = {"fp8_e4m3": (torch.float8_e4m3fn, 448.0, 3, -6), "fp8_e5m2": (torch.float8_e5m2, 57344.0, 2, -14)}
VECTORS = json.loads((Path(__file__).parent / "vectors" / "fbgemm_rowwise.json").read_text())


def make(seed: int, n: int, dim: int, size: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal rows of different sizes around different means, every third one constant."""
    random = np.random.default_rng(seed)
    rows = random.normal(size=(n, dim)) * size + random.normal(size=(n, 1)) * size
    rows[2::3] = rows[2::3, :1]
    return torch.from_numpy(rows).to(dtype)


rows_of = st.builds(
    make,
    seed=st.integers(0, 2**32),
    n=st.integers(0, 6),
    dim=st.integers(1, 40),
    size=st.sampled_from([1e-4, 1.0, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)


@given(rows=rows_of, row_format=st.sampled_from(FORMATS), stochastic=st.booleans(), key=st.integers(0, 2**64 - 1))
def test_has_the_bytes_of_the_reference(rows: Tensor, row_format: RowFormat, stochastic: bool, key: int) -> None:
    got = quantize_rows(rows, row_format, stochastic=stochastic, key=key, first_row=2**33, first_column=16)
    plain = reference.quantize_rows(rows, row_format, False, stochastic, key, 2**33, 16)
    assert got.shape == (len(rows), row_bytes(row_format, rows.shape[1])) and torch.equal(got, plain)
    back = dequantize_rows(got, row_format, rows.shape[1])
    assert torch.equal(back, reference.dequantize_rows(got, row_format, rows.shape[1]))


@given(rows=rows_of, stochastic=st.booleans())
def test_int8_errs_by_half_a_step(rows: Tensor, stochastic: bool) -> None:
    exact = rows.double()
    got = dequantize_rows(quantize_rows(rows, "int8", stochastic=stochastic), "int8", rows.shape[1]).double()
    # 256 levels over the range; 1e-8 keeps a constant row from a division by zero and moves codes by as much.
    step = (exact.amax(1, keepdim=True) - exact.amin(1, keepdim=True)) / 255
    slack = 3e-8 + 4 * torch.finfo(torch.float32).eps * exact.abs().amax(1, keepdim=True)
    assert ((got - exact).abs() <= step * (1.0 if stochastic else 0.5) * (1 + 1e-5) + slack).all()


@given(rows=rows_of, row_format=st.sampled_from(list(PACKED)), stochastic=st.booleans())
def test_packed_codes_err_by_half_a_step_and_its_halves(rows: Tensor, row_format: RowFormat, stochastic: bool) -> None:
    exact, top = rows.double(), 2 ** PACKED[row_format] - 1
    got = dequantize_rows(quantize_rows(rows, row_format, stochastic=stochastic), row_format, rows.shape[1]).double()
    low, high = exact.amin(1, keepdim=True), exact.amax(1, keepdim=True)
    step = (high - low) / top
    # Offset and scale are float16: the offset moves a row by 2^-11 of it, the scale its top by top * 2^-11 of a step.
    halves = low.abs() * 2.0**-11 + top * step * 2.0**-11 + (top + 1) * 2.0**-24
    assert ((got - exact).abs() <= step * (1.0 if stochastic else 0.5) * 1.01 + 2 * halves).all()


@pytest.mark.parametrize("row_format", list(FP8))
@given(rows=rows_of)
def test_fp8_is_torchs_type_on_a_scale(row_format: RowFormat, rows: Tensor) -> None:
    dtype, largest, mantissa, smallest = FP8[row_format]
    codes, dim = quantize_rows(rows, row_format), rows.shape[1]
    scale = codes[:, dim:].flatten().clone().view(torch.float32)[:, None]
    expected = (rows.float() / scale).clamp(-largest, largest).to(dtype)
    assert torch.equal(codes[:, :dim], expected.view(torch.uint8))
    top = rows.float().abs().amax(1, keepdim=True) if len(rows) else scale
    assert torch.equal(scale, torch.where(top == 0, 1.0, top / largest))
    exact, got = rows.double(), dequantize_rows(codes, row_format, dim).double()
    # Half a unit in the last place: relative to a normal number, absolute below the smallest one.
    bound = torch.maximum(exact.abs(), scale.double() * 2.0**smallest) * 2.0 ** -(mantissa + 1)
    assert ((got - exact).abs() <= bound * (1 + 1e-5)).all()


@pytest.mark.parametrize(("row_format", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
@given(patterns=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=60))
def test_16_bit_floats_are_torchs(row_format: RowFormat, dtype: torch.dtype, patterns: list[int]) -> None:
    # Any float32 at all: subnormal, infinite, NaN.
    rows = torch.from_numpy(np.array(patterns, np.uint32).view(np.float32))[None]
    codes = quantize_rows(rows, row_format)
    expected, got = rows.to(dtype), codes.view(dtype)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(0.5), expected.nan_to_num(0.5))
    assert torch.equal(
        dequantize_rows(codes, row_format, len(patterns)).nan_to_num(0.5), expected.float().nan_to_num(0.5)
    )


@pytest.mark.parametrize("row_format", list(FP8))
def test_every_fp8_code_is_torchs(row_format: RowFormat) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    row = torch.cat([codes, torch.tensor([2.0]).view(torch.uint8)])[None]
    got, expected = dequantize_rows(row, row_format, 256)[0], codes.view(FP8[row_format][0]).float() * 2.0
    assert torch.equal(got.nan_to_num(0.5), expected.nan_to_num(0.5))


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["name"])
@pytest.mark.parametrize("row_format", ["int8", "int4"])
def test_bytes_and_rows_of_fbgemm(case: dict[str, Any], row_format: RowFormat) -> None:
    rows, stored = torch.tensor(case["rows"]), case[row_format]
    codes = torch.tensor(stored["codes"], dtype=torch.uint8)
    # FBGEMM fuses the product and the sum, which shows where offset and value nearly cancel.
    back, slack = (
        dequantize_rows(codes, row_format, rows.shape[1]),
        2 * torch.finfo(torch.float32).eps * rows.abs().max(),
    )
    assert (back - torch.tensor(stored["rows"])).abs().max() <= slack
    assert torch.equal(quantize_rows(rows, row_format), codes)


@given(rows=rows_of, row_format=st.sampled_from(list(PACKED)))
def test_packed_codes_are_read_with_numpy_alone(rows: Tensor, row_format: RowFormat) -> None:
    (n, dim), width = rows.shape, PACKED[row_format]
    data = quantize_rows(rows, row_format).numpy()
    stream = np.unpackbits(data[:, :-4], axis=1, bitorder="little")
    codes = stream[:, : dim * width].reshape(n, dim, width) @ (1 << np.arange(width))
    scale, offset = np.hsplit(data[:, -4:].copy().view("<f2").astype(np.float32), 2)
    values = codes.astype(np.float32) * scale + offset
    assert not stream[:, dim * width :].any()
    assert np.array_equal(values, dequantize_rows(torch.from_numpy(data), row_format, dim).numpy())


@given(rows=rows_of)
def test_int2_has_the_bytes_of_torchs_prepack(rows: Tensor) -> None:
    rows = rows[:, : rows.shape[1] // 4 * 4].float().contiguous()  # torch wants whole bytes
    if rows.numel():
        assert torch.equal(quantize_rows(rows, "int2"), torch.ops.quantized.embedding_bag_2bit_prepack(rows))


@pytest.mark.parametrize("row_format", FORMATS)
def test_stochastic_rounding_gives_neighbors_and_the_mean(row_format: RowFormat) -> None:
    row = torch.tensor([[0.0, 1.0, 0.1, 0.26, 0.333, 0.77, 0.9999, 0.5]])
    many = torch.cat(
        [
            dequantize_rows(quantize_rows(row.repeat(30, 1), row_format, stochastic=True, key=k), row_format, 8)
            for k in range(100)
        ]
    ).double()
    gap = many.amax(0) - many.amin(0)
    assert all(len(column.unique()) <= 2 for column in many.T)
    nearest = dequantize_rows(quantize_rows(row, row_format), row_format, 8).double()[0]
    assert ((nearest - many.amin(0)).abs().minimum((nearest - many.amax(0)).abs()) < 1e-6).all()
    # A Bernoulli variable of that gap; packed codes' top may be clamped, where the scale was rounded down.
    bound = 5 * gap / 2 / math.sqrt(3000) + (1e-3 if row_format in PACKED else 1e-6)
    assert ((many.mean(0) - row[0].double()).abs() <= bound).all()


def test_random_bits_go_by_the_cell() -> None:
    rows = make(3, 10, 40, 1.0)
    whole = quantize_rows(rows, "bf16", stochastic=True, key=9)
    piece = quantize_rows(rows[4:7, 8:30], "bf16", stochastic=True, key=9, first_row=4, first_column=8)
    assert torch.equal(piece, whole[4:7, 16:60])


@pytest.mark.parametrize("row_format", FORMATS)
def test_same_bytes_for_any_number_of_threads(row_format: RowFormat) -> None:
    rows = make(1, 3000, 33, 1.0)
    first = quantize_rows(rows, row_format, stochastic=True)
    with use_num_threads(2):
        assert torch.equal(quantize_rows(rows, row_format, stochastic=True), first)
        back = dequantize_rows(first, row_format, 33)
    assert torch.equal(back, dequantize_rows(first, row_format, 33))


@pytest.mark.parametrize("row_format", FORMATS)
def test_no_rows_and_no_columns(row_format: RowFormat) -> None:
    for shape in ((0, 4), (3, 0)):
        codes = quantize_rows(torch.zeros(shape), row_format)
        assert codes.shape == (shape[0], row_bytes(row_format, shape[1]))
        assert dequantize_rows(codes, row_format, shape[1]).shape == shape


def test_rows_that_have_no_scale_are_refused() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        rows = torch.zeros(3, 40)
        rows[1, 20] = bad
        for row_format in FORMATS[:6]:
            with pytest.raises(MesetaError, match="row 1 has a non-finite value"):
                quantize_rows(rows, row_format)
    with pytest.raises(MesetaError, match="row 0 has a non-finite"):
        quantize_rows(torch.tensor([[3e38, -3e38]]), "int8")
    with pytest.raises(MesetaError, match="beyond the range of float16 scales"):
        quantize_rows(torch.tensor([[0.0, 1e7]]), "int4")


def test_wrong_inputs_are_refused() -> None:
    with pytest.raises(MesetaError, match="4 columns of int8 need uint8"):
        dequantize_rows(torch.zeros(2, 4, dtype=torch.uint8), "int8", 4)
    with pytest.raises(MesetaError, match=r"are torch\.float64"):
        quantize_rows(torch.zeros(2, 4, dtype=torch.float64), "int8")
    with pytest.raises(MesetaError, match="key -1"):
        quantize_rows(torch.zeros(2, 4), "int8", key=-1)


@pytest.mark.parametrize("row_format", FORMATS)
def test_operators_are_registered_as_torch_wants(row_format: RowFormat) -> None:
    rows = make(1, 3, 6, 1.0)
    torch.library.opcheck(torch.ops.meseta.quantize_rows.default, (rows, row_format, False, True, 3, 0, 0))
    codes = quantize_rows(rows, row_format)
    torch.library.opcheck(torch.ops.meseta.dequantize_rows.default, (codes, row_format, 6))
