"""Quantization of embedding rows. Each row has its own scale."""
# Layout of a quantized row with D columns, little-endian and without padding between rows:
#
#   format                codes                                   then                     value of code q
#   int8                  D bytes 0..255                          scale, offset: float32   q * scale + offset
#   int4, int3, int2      4, 3 or 2 bits each, in                 scale, offset: float16   q * scale + offset
#                         ceil(D * bits / 8) bytes
#   fp8_e4m3, fp8_e5m2    D bytes (OCP 8-bit floating point       scale: float32           q * scale
#                         specification, 2023)
#   fp16, bf16            D times 2 bytes                         nothing                  q
#
# Codes of 4, 3 and 2 bits form one stream: code c has bits c * width to (c + 1) * width, counted from the low bit of
# the first byte. Unused bits at the end are zero. Eight columns a..h, low bits first:
#
#   byte  0        1        2        3
#   int4  aaaabbbb ccccdddd eeeeffff gggghhhh
#   int3  aaabbbcc cdddeeef ffggghhh
#   int2  aabbccdd eeffgghh
#
# int8 is the layout that FBGEMM calls fused 8-bit row-wise, int4 and int2 are its fused n-bit row-wise.

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from meseta.ops.common import DTYPE_CODES, register
from meseta.ops.core import core
from meseta.ops.memory import empty
from meseta.ops.quantize import reference
from meseta.ops.quantize.reference import CODE_BITS, FORMATS, row_bytes
from meseta.sparse.shapes import Float, Shaped
from meseta.spec import MesetaError, suggest

RowFormat = Literal["int8", "int4", "int3", "int2", "fp8_e4m3", "fp8_e5m2", "fp16", "bf16"]


def quantize_rows(
    rows: Float[Tensor, "n D"],
    row_format: RowFormat,
    *,
    adaptive: bool = False,
    stochastic: bool = False,
    key: int = 0,
    first_row: int = 0,
    first_column: int = 0,
) -> Shaped[Tensor, "n row_bytes"]:
    """Quantize rows of float32, float16 or bfloat16 to uint8 [n, row_bytes(row_format, D)].

    int8 scales by the smallest and largest value of the row. fp8 scales the largest magnitude of the row to the largest
    number of the format. In fp16, values of 65520 and more become infinite.

    Args:
        rows: Rows to quantize.
        row_format: Format of the result.
        adaptive: Search for a better range for int8, int4, int3 and int2. The result is then idempotent: quantizing
            the dequantized rows returns the same bytes. Rows that the codes can represent are represented exactly,
            except the sign of zero. A row of equal values keeps 22 bits of the value, or all in int8. Magnitudes may be
            up to 65504, in 16-bit rows 32768; in int8 up to 2^126, in float16 rows 32768.
        stochastic: Round to one of the two neighbors, so that the mean over keys is the value. Otherwise round to
            nearest even.
        key: Generator key for stochastic rounding, 0..2^64-1.
        first_row: Number of the first row for stochastic rounding.
        first_column: Number of the first column for stochastic rounding.

    Raises:
        MesetaError: The format is unknown, or `adaptive` is combined with another format or with `stochastic`. On a
            CPU also if a value is outside the range of `adaptive`, or if values or their range are not finite in the
            type of the scale. fp16 and bf16 keep non-finite values.
    """
    # Stochastic rounding of cell (first_row + r, first_column + c) uses the word that random_bits returns for `key`.
    #
    # The adaptive search of int4, int3 and int2 moves either end of the range inwards in steps of 1/32 of the range, up
    # to half of it. Each step moves the end that leaves the smaller squared error (Check-N-Run, NSDI 2022, section 5).
    # The best range on the way is then fitted to its codes by least squares, three times. int8 keeps the full range.
    #
    # The result is idempotent because no level is rounded, neither in float32 nor in the dtype of `rows`. Levels are
    # multiples of 2^-22 of the largest value of the row (int8: 2^-21; float16 rows: 2^-9; bfloat16 rows: 2^-6).
    _check_call(row_format, adaptive, stochastic)
    if not 0 <= key < 2**64:
        raise MesetaError(f"quantize_rows: key {key} must be in 0..2**64-1")
    signed = key - 2**64 if key >= 2**63 else key
    codes: Tensor = _quantize(rows, row_format, adaptive, stochastic, signed, first_row, first_column)
    return codes


def dequantize_rows(codes: Shaped[Tensor, "n row_bytes"], row_format: RowFormat, dim: int) -> Float[Tensor, "n D"]:
    """Return the float32 rows [n, dim] of the bytes that `quantize_rows` returned.

    Raises MesetaError if the format is unknown, or if a row of `dim` columns has another number of bytes.
    """
    _check_format("dequantize_rows", row_format)
    if codes.dtype != torch.uint8 or dim < 0 or codes.shape[1] != row_bytes(row_format, dim):
        raise MesetaError(
            f"dequantize_rows: codes are {codes.dtype} {list(codes.shape)}, but {dim} columns of {row_format} need "
            f"uint8 [n, {row_bytes(row_format, max(dim, 0))}]"
        )
    rows: Tensor = _dequantize(codes, row_format, dim)
    return rows


def _check_format(operator: str, row_format: str) -> None:
    if row_format not in FORMATS:
        raise MesetaError(
            f"{operator}: row_format {row_format!r} is unknown; {suggest(row_format, get_args(RowFormat))}"
        )


def _check_call(row_format: str, adaptive: bool, stochastic: bool) -> None:
    _check_format("quantize_rows", row_format)
    if adaptive and row_format not in CODE_BITS:
        raise MesetaError(f"quantize_rows: {row_format} has no adaptive range; use int8, int4, int3 or int2")
    if adaptive and stochastic:
        raise MesetaError("quantize_rows: adaptive excludes stochastic rounding; set only one of them")


def _quantize_cpu(
    rows: Tensor, row_format: str, adaptive: bool, stochastic: bool, key: int, first_row: int, first_column: int
) -> Tensor:
    _check_call(row_format, adaptive, stochastic)
    if rows.dim() != 2 or rows.dtype not in DTYPE_CODES:
        raise MesetaError(
            f"quantize_rows: rows are {rows.dtype} {list(rows.shape)}; pass [n, D] of float32, float16 or bfloat16"
        )
    if first_row < 0 or first_column < 0:
        raise MesetaError(f"quantize_rows: first_row {first_row} and first_column {first_column} must not be negative")
    rows = rows.contiguous()
    codes = empty((rows.shape[0], row_bytes(row_format, rows.shape[1])), torch.uint8)
    origin = [key, first_row, first_column] if stochastic else []
    try:
        core().quantize_rows(
            rows.data_ptr(),
            DTYPE_CODES[rows.dtype],
            [rows.shape[0], rows.shape[1]],
            FORMATS.index(row_format),
            adaptive,
            origin,
            codes.data_ptr(),
            torch.get_num_threads(),
        )
    except ValueError as error:
        raise MesetaError(f"quantize_rows: {error}") from None
    return codes


def _quantize_fake(
    rows: Tensor, row_format: str, adaptive: bool, stochastic: bool, key: int, first_row: int, first_column: int
) -> Tensor:
    return rows.new_empty(rows.shape[0], row_bytes(row_format, rows.shape[1]), dtype=torch.uint8)


def _dequantize_cpu(codes: Tensor, row_format: str, dim: int) -> Tensor:
    _check_format("dequantize_rows", row_format)
    fits = codes.dim() == 2 and codes.dtype == torch.uint8 and codes.shape[1] == row_bytes(row_format, dim)
    if dim < 0 or not fits:
        raise MesetaError(f"dequantize_rows: {codes.dtype} {list(codes.shape)} are not rows of {dim} {row_format}")
    codes = codes.contiguous()
    rows = empty((codes.shape[0], dim), torch.float32)
    core().dequantize_rows(
        codes.data_ptr(), [codes.shape[0], dim], FORMATS.index(row_format), rows.data_ptr(), torch.get_num_threads()
    )
    return rows


def _dequantize_fake(codes: Tensor, row_format: str, dim: int) -> Tensor:
    return codes.new_empty(codes.shape[0], dim, dtype=torch.float32)


_quantize = register(
    "quantize_rows(Tensor rows, str row_format, bool adaptive, bool stochastic, "
    "int key, int first_row, int first_column) -> Tensor",
    cpu=_quantize_cpu,
    cuda=reference.quantize_rows,
    fake=_quantize_fake,
)
_dequantize = register(
    "dequantize_rows(Tensor codes, str row_format, int dim) -> Tensor",
    cpu=_dequantize_cpu,
    cuda=reference.dequantize_rows,
    fake=_dequantize_fake,
)
