"""Tests of columns with fewer bits: the stated error is a bound, restored values have the same codes, and numpy reads
them."""

from __future__ import annotations

import runpy

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from meseta.checkpoint.files.layout import BlockSchema, Column
from meseta.checkpoint.files.quantization import candidate_formats, decode_column, encode_column
from meseta.config.row_bits import ROW_BIT_WIDTHS, RowBits, min_bits_for_restores
from meseta.storage import as_stored
from source_tree import ROOT

restore = runpy.run_path(str(ROOT / "examples/02_read_checkpoint.py"))["restore"]
TYPES = ("float32", "float16", "bfloat16")
NAN, INF, TINY, HUGE = float("nan"), float("inf"), float(np.finfo(np.float32).smallest_subnormal), 3.4e38
EDGES = (0.0, -0.0, TINY, -TINY, 2.0**-126, 2.0**-25, 1 / 3, 2049.0, 32768.0, 65504.0, -65504.0)


def values_of(seed: int, shape: tuple[int, int], dtype: str, size: float, kind: str, rogue: float | None) -> np.ndarray:
    """Return values as in a file: normal rows, equal rows, numbers at the limits of types, and the number `rogue`."""
    random = np.random.default_rng(seed)
    values = random.normal(size=shape) * size
    if kind == "constant":
        values[:] = values[:, :1]
    elif kind == "edges":
        values = random.choice(EDGES, shape)
    if rogue is not None:
        values[random.integers(shape[0]), random.integers(shape[1])] = rogue
    return as_stored(torch.from_numpy(values).to(getattr(torch, dtype))).numpy()


def schema_of(dtype: str, dim: int) -> BlockSchema:
    columns = [Column("row", "element", dtype), Column("moment", "element", dtype), Column("sum", "row", "float32")]
    return BlockSchema(embedding_dim=dim, columns=tuple(columns))


def as_float64(stored: np.ndarray, dtype: str) -> np.ndarray:
    """Return the numbers that a file's values represent, without torch."""
    if dtype == "bfloat16":
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float64)


@given(
    seed=st.integers(0, 10**6),
    shape=st.tuples(st.sampled_from([1, 2, 37]), st.sampled_from([1, 3, 8, 17, 64])),
    dtype=st.sampled_from(TYPES),
    size=st.sampled_from([1e-42, 1e-3, 1.0, 3e4]),
    kind=st.sampled_from(["normal", "constant", "edges"]),
    rogue=st.sampled_from([None, None, TINY, 1e5, HUGE, NAN, INF, -INF]),
    bits=st.sampled_from(ROW_BIT_WIDTHS),
    name=st.sampled_from(["row", "moment"]),
)
@example(0, (2, 64), "float32", 1.0, "normal", HUGE, 8, "moment")  # it overflows in bf16
def test_the_error_is_a_bound_and_a_second_save_has_the_same_bytes(
    seed: int, shape: tuple[int, int], dtype: str, size: float, kind: str, rogue: float | None, bits: RowBits, name: str
) -> None:
    schema = schema_of(dtype, shape[1])
    column = next(c for c in schema.columns if c.name == name)
    values = values_of(seed, shape, dtype, size, kind, rogue)
    stored = encode_column(schema, column, values, bits)
    if stored.row_format is None:
        assert stored.error == 0
        assert stored.values.tobytes() == values.tobytes()
        numbers = as_float64(values, dtype)
        assert (
            not candidate_formats(schema, column, bits)
            or np.abs(numbers).max() > 2.0**15
            or not np.isfinite(numbers).all()
        )
        return
    assert stored.row_format in candidate_formats(schema, column, bits)
    assert stored.values.nbytes < values.nbytes
    restored = decode_column(schema, column, stored.values, stored.row_format)
    assert (restored.dtype, restored.shape) == (values.dtype, values.shape)
    difference = np.abs(as_float64(values, dtype) - as_float64(restored, dtype)).max()
    assert difference <= stored.error <= difference * (1 + 1e-15)
    expected = restore(stored.values, stored.row_format, shape[1]).astype(np.float64)
    np.testing.assert_array_equal(as_float64(restored, dtype), expected)
    again = encode_column(schema, column, restored, bits)
    if stored.row_format == candidate_formats(schema, column, bits)[0]:
        assert (again.row_format, again.error) == (stored.row_format, 0)
        assert again.values.tobytes() == stored.values.tobytes()


def test_wider_codes_hold_what_narrower_ones_restored() -> None:
    schema = schema_of("float32", 64)
    row, values = schema.columns[0], values_of(1, (100, 64), "float32", 0.1, "normal", None)
    for bits in reversed(ROW_BIT_WIDTHS):
        stored = encode_column(schema, row, values, 2)
        restored = decode_column(schema, row, stored.values, stored.row_format)
        assert encode_column(schema, row, restored, bits).error == 0


@pytest.mark.parametrize(
    ("name", "dtype", "dim", "bits", "expected"),
    [
        ("row", "float32", 64, 8, ("int8",)),
        ("row", "float32", 64, 3, ("int3", "int8")),
        ("row", "float32", 2, 4, ("int4",)),  # int8 has two scales of 4 bytes
        ("row", "float32", 1, 2, ()),
        ("row", "bfloat16", 8, 8, ()),
        ("row", "bfloat16", 8, 2, ("int2",)),
        ("row", "float64", 64, 2, ()),
        ("moment", "float32", 64, 2, ("bf16",)),
        ("moment", "float16", 64, 2, ()),
        ("sum", "float32", 64, 2, ()),
    ],
)
def test_what_a_column_may_be_stored_in(
    name: str, dtype: str, dim: int, bits: RowBits, expected: tuple[str, ...]
) -> None:
    schema = schema_of(dtype, dim)
    column = next(c for c in schema.columns if c.name == name)
    assert candidate_formats(schema, column, bits) == expected


@pytest.mark.parametrize(("rogue", "expected"), [(1e5, "int8"), (HUGE, None), (NAN, None), (INF, None)])
def test_values_beyond_a_width_take_wider_codes_or_none(rogue: float, expected: str | None) -> None:
    schema = schema_of("float32", 64)
    values = values_of(3, (5, 64), "float32", 1.0, "normal", rogue)
    assert encode_column(schema, schema.columns[0], values, 4).row_format == expected


def test_small_second_moments_stay() -> None:
    """A linear scale of 8 bits would round them to zero, and the next step would divide by zero."""
    schema = schema_of("float32", 4)
    moments = np.array([[1e-2, 1e-9, 1e-12, 0.0]], np.float32)
    stored = encode_column(schema, schema.columns[1], moments, 8)
    restored = decode_column(schema, schema.columns[1], stored.values, stored.row_format)
    np.testing.assert_allclose(restored, moments, rtol=2**-8, atol=0)


def test_bits_for_restores() -> None:
    assert [min_bits_for_restores(n) for n in (0, 1, 2, 3, 4, 20, 21, 10**6)] == [2, 2, 3, 3, 4, 4, 8, 8]
