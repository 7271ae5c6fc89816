"""Tests of the adaptive quantization range: round trips, errors compared with torch's search, bits of the reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from instruction_sets import each_core
from meseta.measure.threads import use_num_threads
from meseta.ops import quantize
from meseta.ops.quantize import RowFormat, dequantize_rows, quantize_rows, reference
from meseta.spec import MesetaError

WIDTHS: dict[RowFormat, int] = {"int8": 8, "int4": 4, "int3": 3, "int2": 2}
TYPES = [torch.float32, torch.float16, torch.bfloat16]
TINY = float(np.finfo(np.float32).smallest_subnormal)
EDGES = [
    0.0,
    -0.0,
    TINY,
    -TINY,
    2.0**-126,
    1e-9,
    2.0**-24,
    2.0**-25,
    1.0,
    -1.0,
    1 / 3,
    2049.0,
    32768.0,
    65504.0,
    -65504.0,
]


def make(seed: int, n: int, dim: int, size: float, mean: float, dtype: torch.dtype, kind: str) -> Tensor:
    """Return normal rows, rows with outliers, with few values or on a grid, or numbers at the limits of the types."""
    random = np.random.default_rng(seed)
    rows = random.normal(size=(n, dim)) * size + mean * size
    if kind == "outliers":
        rows *= np.where(random.random((n, dim)) < 0.1, 30, 1)
    elif kind == "few values":
        rows = np.take_along_axis(rows, random.integers(0, min(dim, 3), (n, dim)), axis=1)
    elif kind == "grid":
        rows = random.integers(0, random.integers(1, 20), (n, dim)) * rows[:, :1] + rows[:, -1:]
    elif kind == "edges":
        rows = random.choice(EDGES, (n, dim))
    largest = 65504 if dtype == torch.float32 else 32768
    return torch.from_numpy(rows).clamp(-largest, largest).to(dtype)


rows_of = st.builds(
    make,
    seed=st.integers(0, 2**32),
    n=st.integers(0, 20),
    dim=st.one_of(st.integers(1, 5), st.integers(1, 40)),
    size=st.sampled_from([TINY, 1e-30, 1e-7, 1e-4, 1.0, 30.0, 3e3]),
    mean=st.sampled_from([0.0, 1.0, -20.0, 3e4]),
    dtype=st.sampled_from(TYPES),
    kind=st.sampled_from(["normal", "outliers", "few values", "grid", "edges"]),
)
floats_of = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-65504, max_value=65504)
formats = st.sampled_from(list(WIDTHS))


def restore(codes: Tensor, row_format: RowFormat, dim: int) -> Tensor:
    return dequantize_rows(codes, row_format, dim)


@given(rows=rows_of, row_format=formats)
def test_restored_rows_have_the_bytes_they_came_from(rows: Tensor, row_format: RowFormat) -> None:
    codes = quantize_rows(rows, row_format, adaptive=True)
    back = restore(codes, row_format, rows.shape[1])
    assert torch.equal(back.to(rows.dtype).float(), back)
    assert torch.equal(quantize_rows(back.to(rows.dtype), row_format, adaptive=True), codes)
    assert back.isfinite().all() and not back[back == 0].signbit().any()


@given(values=st.lists(floats_of, min_size=1, max_size=12), row_format=formats)
@example(values=[-0.0, 0.0], row_format="int2")
@example(values=[65504.0, -65504.0, 1.0], row_format="int2")
@example(values=[65504.0, 0.0, 65500.0, 43669.0], row_format="int4")
@example(values=[100.0, 100.00001], row_format="int4")
@example(values=[TINY, 0.0, -TINY], row_format="int8")
@example(values=[-65504.0], row_format="int3")
def test_any_floats_give_the_bits_of_the_reference(values: list[float], row_format: RowFormat) -> None:
    rows = torch.tensor([values])
    codes = quantize_rows(rows, row_format, adaptive=True)
    assert torch.equal(codes, reference.quantize_rows(rows, row_format, True, False, 0, 0, 0))
    back = restore(codes, row_format, len(values))
    assert torch.equal(quantize_rows(back, row_format, adaptive=True), codes)


@given(rows=rows_of, row_format=formats)
def test_has_the_bits_of_the_reference(rows: Tensor, row_format: RowFormat) -> None:
    codes = quantize_rows(rows, row_format, adaptive=True)
    assert torch.equal(codes, reference.quantize_rows(rows, row_format, True, False, 0, 0, 0))


@given(seed=st.integers(0, 2**32), row_format=formats, dim=st.integers(1, 40), exponent=st.integers(-20, 8))
def test_representable_rows_are_exact(seed: int, row_format: RowFormat, dim: int, exponent: int) -> None:
    random = np.random.default_rng(seed)
    codes = random.integers(0, 2 ** WIDTHS[row_format], (7, dim))
    step, offset = random.integers(1, 2**6, (7, 1)), random.integers(-(2**6), 2**6, (7, 1))
    rows = torch.from_numpy((codes * step + offset) * 2.0**exponent).float()
    assert torch.equal(restore(quantize_rows(rows, row_format, adaptive=True), row_format, dim), rows)


@given(seed=st.integers(0, 2**32), size=st.sampled_from([1e-3, 1.0, 1e3]), row_format=formats)
def test_a_constant_row_keeps_22_bits(seed: int, size: float, row_format: RowFormat) -> None:
    rows = torch.from_numpy(np.random.default_rng(seed).normal(size=(5, 1)) * size).float().expand(5, 9)
    back = restore(quantize_rows(rows, row_format, adaptive=True), row_format, 9)
    slack = 0.0 if row_format == "int8" else 2.0**-22
    assert ((back - rows).abs() <= rows.abs() * slack + (2.0**-25 if slack else 0)).all()


@given(rows=rows_of, row_format=st.sampled_from(["int4", "int3", "int2"]))
def test_the_error_is_no_larger_than_over_the_whole_range(rows: Tensor, row_format: RowFormat) -> None:
    exact, dim = rows.double(), rows.shape[1]
    plain, adaptive_errors = (
        (restore(quantize_rows(rows, row_format, adaptive=adaptive), row_format, dim).double() - exact).square().sum(1)
        for adaptive in (False, True)
    )
    # Levels are multiples of a part of the row's largest value, or of 2^-24.
    part = {torch.float32: 2.0**-22, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}[rows.dtype]
    slack = 2 ** WIDTHS[row_format] * (exact.abs().amax(1) if len(rows) else exact.sum(1)) * part + 2.0**-23
    assert (adaptive_errors.sqrt() <= plain.sqrt() * (1 + 1e-3) + math.sqrt(dim) * slack).all()


@given(rows=rows_of)
def test_int8_errs_by_half_a_step(rows: Tensor) -> None:
    exact = rows.double()
    back = restore(quantize_rows(rows, "int8", adaptive=True), "int8", rows.shape[1]).double()
    step = (exact.amax(1, keepdim=True) - exact.amin(1, keepdim=True)) / 255
    largest = exact.abs().amax(1, keepdim=True)
    part = {torch.float32: 2.0**-21, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}[rows.dtype]
    least = 2.0**-24 if rows.dtype == torch.float16 else 2.0**-126
    assert ((back - exact).abs() <= step / 2 * (1 + 1e-5) + largest * part + least).all()


@pytest.mark.parametrize("kind", ["normal", "outliers"])
@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("width", [4, 2])
def test_errs_no_more_than_torchs_search(kind: str, dim: int, width: int) -> None:
    rows = make(5, 300, dim, 0.05, 0.0, torch.float32, kind)
    prepack = getattr(torch.ops.quantized, f"embedding_bag_{width}bit_prepack")
    unpack = getattr(torch.ops.quantized, f"embedding_bag_{width}bit_unpack")
    row_format: RowFormat = "int4" if width == 4 else "int2"
    torch_rows = unpack(prepack(rows, optimized_qparams=True))
    # The same layout: torch reads ours.
    ours = unpack(quantize_rows(rows, row_format, adaptive=True))
    errors = [(got.double() - rows.double()).square().mean() for got in (ours, torch_rows)]
    assert errors[0] <= 1.01 * errors[1]


@pytest.mark.parametrize("row_format", list(WIDTHS))
def test_same_bytes_for_any_number_of_threads_and_rows(row_format: RowFormat) -> None:
    rows = make(1, 1300, 33, 1.0, 1.0, torch.float32, "normal")
    whole = quantize_rows(rows, row_format, adaptive=True)
    assert torch.equal(torch.cat([quantize_rows(part, row_format, adaptive=True) for part in rows.split(307)]), whole)
    with use_num_threads(2):
        assert torch.equal(quantize_rows(rows, row_format, adaptive=True), whole)


@pytest.mark.parametrize("row_format", list(WIDTHS))
def test_every_instruction_set_gives_the_same_bytes(row_format: RowFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ["normal", "outliers", "few values", "grid", "edges"]
    cases = [make(seed, 50, 1 + seed * 9, 1.0, 0.5, dtype, kinds[seed]) for seed in range(5) for dtype in TYPES]
    outcomes = set()
    for _ in each_core(quantize, monkeypatch):
        codes = [quantize_rows(rows, row_format, adaptive=True) for rows in cases]
        back = [restore(part, row_format, rows.shape[1]) for part, rows in zip(codes, cases, strict=True)]
        outcomes.add(b"".join(x.numpy().tobytes() for x in codes + back))
    assert len(outcomes) == 1


@pytest.mark.parametrize("row_format", list(WIDTHS))
def test_rows_without_a_range_are_refused(row_format: RowFormat) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        rows = torch.zeros(40, 40)
        rows[33, 20] = bad
        with pytest.raises(MesetaError, match="row 33 has a non-finite value"):
            quantize_rows(rows, row_format, adaptive=True)
    rule = r"limited to 8\.\d*e\+37.*use bf16" if row_format == "int8" else "limited to 65504; use int8"
    for values in ([-1e38, 0.0, 3.0], [1e38]):
        with pytest.raises(MesetaError, match=f"row 0 spans .*{rule}"):
            quantize_rows(torch.tensor([values]), row_format, adaptive=True)
    with pytest.raises(MesetaError, match=r"limited to 32768; use bf16"):
        quantize_rows(torch.tensor([[0.1, 40000.0, 0.3]]).half(), row_format, adaptive=True)
    for shape in ((0, 4), (3, 0)):
        codes = quantize_rows(torch.zeros(shape), row_format, adaptive=True)
        assert restore(codes, row_format, shape[1]).shape == shape


def test_calls_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(MesetaError, match="fp16 has no adaptive range; use int8"):
        quantize_rows(torch.zeros(2, 4), "fp16", adaptive=True)
    with pytest.raises(MesetaError, match="adaptive excludes stochastic rounding"):
        quantize_rows(torch.zeros(2, 4), "int4", adaptive=True, stochastic=True)
    with pytest.raises(MesetaError, match="adaptive excludes stochastic rounding"):
        torch.ops.meseta.quantize_rows(torch.zeros(2, 4), "int4", True, True, 0, 0, 0)
