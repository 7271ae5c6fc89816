"""Encoding of matrix columns for communication, and decoding.

The codecs are similar to FBGEMM's quantized communication (`QuantizedCommCodec`). fp8 and int8 have one scale per small
block, as the OCP microscaling formats (2023). Stochastic rounding is that of Gupta et al., "Deep Learning with Limited
Numerical Precision", ICML 2015, section 3.
"""
# Layout of an encoded row, all little-endian. The pieces of a row follow each other.
#
#   numbers   per column 2 bytes (fp16, bf16) or 1 byte (int8, and fp8: e4m3 of the OCP 8-bit floating point
#             specification, 2023)
#   padding   a zero byte if the scales would start at an odd offset
#   scales    fp8 and int8 only: a bfloat16 per block of 16 columns, counted from the first column of each piece
#
# Encoding of a value v as a number q, and decoding of q:
#
#   fp16        q = round(v * 2**exponent), decoded as q * 2**-exponent. Finite numbers beyond 65504 are clamped to
#               +-65504 and counted.
#   bf16        q = round(v), decoded as q.
#   fp8, int8   q = round(v / s), decoded as q * s. s is max(abs(block)) / 448 or / 127 in float32, rounded up to a
#               bfloat16, and at least the smallest subnormal one. For a block of zeros s = 0, and for a block with a
#               non-finite number s = NaN. The numbers of both are 0.
#
# Rounding is to nearest even unless it is stochastic. In fp16 and bf16 infinities are kept, and every NaN becomes the
# quiet NaN without a sign. All arithmetic is float32, with one rounding per operation.

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meseta.ops.codec.layout import INT64_SIGN_BIT, RowLayout, pack_layouts, unpack_layouts, unpack_random_source
from meseta.ops.common import register
from meseta.ops.core import core
from meseta.spec import MesetaError
from meseta.spec.codecs import Codec

NUM_MOVE_FIELDS = 5


@dataclass(frozen=True)
class StochasticRounding:
    """Stochastic rounding of fp8 and int8. The mean over keys of a rounded number is the exact value."""

    # int8 rounds the quotient down, or up if the upper 24 bits of the cell's random word, as a fraction, are below the
    # fractional part of the quotient. fp8 rounds the magnitude of the quotient in the same way, in steps of its grid.
    # The word is that of meseta.ops.random_rows.random_bits for the key of the piece, the row number and the column of
    # the table.

    keys: tuple[int, ...]
    """64-bit generator key for each piece."""
    columns: tuple[int, ...]
    """Column of the table at which each piece starts, a multiple of 16."""
    row_numbers: int | Tensor
    """Number of the first row of the matrix, or an int64 tensor [B] with the number of each row."""


@dataclass(frozen=True)
class HalfRange:
    """Scaling of values for fp16, which has fewer exponents than float32."""

    exponent: int = 0
    """Values are multiplied by 2**exponent. Range: -126..126."""
    num_clamped: Tensor | None = None
    """int64 tensor [1], incremented by the number of clamped finite values. On a GPU the host does not wait for it."""


def encode_columns(
    out: Tensor,
    sources: Sequence[Tensor],
    moves: Sequence[int],
    codec: Codec,
    pieces: Sequence[int],
    *,
    scale: float = 1.0,
    rounding: StochasticRounding | None = None,
    half_range: HalfRange | None = None,
) -> None:
    """Encode columns of several matrices into `out`.

    Args:
        out: Contiguous uint8 [B, codec.row_bytes(pieces)] at an even address.
        sources: float32 [B, any] each.
        moves: Result of `meseta.ops.columns.pack_moves`. Targets are columns of the concatenated pieces. Moves are
            applied in order, and columns without a move are 0.
        codec: Any codec except fp32, for which `place_columns` is sufficient.
        pieces: Number of columns of each piece.
        scale: Factor by which values are multiplied.
        rounding: Stochastic rounding for fp8 and int8. Otherwise numbers are rounded to nearest even.
        half_range: Scaling for fp16.

    Raises:
        MesetaError: The codec is fp32, tensors do not match each other or are not float32, a move is outside the
            columns, or a 16-bit codec has `rounding`.
    """
    numbers: list[int] = []
    rows = None
    if rounding is not None:
        rows = rounding.row_numbers if isinstance(rounding.row_numbers, Tensor) else None
        first = rounding.row_numbers if isinstance(rounding.row_numbers, int) else 0
        numbers = [*map(_key_to_int64, rounding.keys), *rounding.columns, first]
    half_range = HalfRange() if half_range is None else half_range
    layout = pack_layouts(codec, half_range.exponent, [pieces])
    _encode(out, list(sources), list(moves), layout, scale, numbers, rows, half_range.num_clamped)


def decode_columns(
    out: Tensor,
    sources: Sequence[Tensor],
    moves: Sequence[int],
    codec: Codec,
    pieces: Sequence[Sequence[int]],
    *,
    exponent: int = 0,
    scale: float = 1.0,
) -> None:
    """Decode columns of several encoded matrices into `out`.

    Args:
        out: float32 [B, any]. Columns without a move are unchanged.
        sources: uint8 [B, codec.row_bytes(pieces[i])] each, as written by `encode_columns`.
        moves: Result of `meseta.ops.columns.pack_moves`. Sources are columns of the concatenated pieces of a matrix.
            Moves are applied in order, and only their columns are read.
        codec: Codec of all sources.
        pieces: Number of columns of each piece, for each source.
        exponent: Exponent with which fp16 numbers were encoded.
        scale: Factor by which decoded values are multiplied.

    Raises:
        MesetaError: The codec is fp32, tensors do not match each other, or a move is outside the columns.
    """
    if len(pieces) != len(sources):
        raise MesetaError(
            f"decode_columns: {len(pieces)} lists of pieces for {len(sources)} matrices; pass one list per matrix"
        )
    _decode(out, list(sources), list(moves), pack_layouts(codec, exponent, pieces), scale)


def rounding_key(seed: int, step: int, name: str) -> int:
    """Return the 64-bit key for stochastic rounding of the numbers called `name` in a step: a BLAKE2b hash."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=8).digest(), "little")


def _key_to_int64(key: int) -> int:
    if not 0 <= key < 2 * INT64_SIGN_BIT:
        raise MesetaError(f"encode_columns: key {key} must be in 0..2**64-1; create it with codec.rounding_key")
    return key - 2 * INT64_SIGN_BIT if key >= INT64_SIGN_BIT else key


def _check_encoded(operator: str, matrix: Tensor, row: RowLayout, num_rows: int) -> None:
    shape, size = (num_rows, row.num_bytes), list(matrix.shape)
    if matrix.dtype != torch.uint8 or matrix.shape != shape or not matrix.is_contiguous() or matrix.data_ptr() % 2:
        raise MesetaError(
            f"{operator}: the encoded matrix is {matrix.dtype} {size} with strides {matrix.stride()}; {row.codec.name} "
            f"rows of pieces {list(row.pieces)} need contiguous uint8 {list(shape)} at an even address"
        )


def _check_floats(operator: str, matrices: Sequence[Tensor], num_rows: int, moves: Sequence[int]) -> None:
    for index, matrix in enumerate(matrices):
        if matrix.dtype != torch.float32 or matrix.dim() != 2 or matrix.shape[0] != num_rows:
            raise MesetaError(
                f"{operator}: matrix {index} is {matrix.dtype} {list(matrix.shape)}, but codecs need float32 "
                f"[{num_rows}, any]; use place_columns for other dtypes"
            )
    if len(moves) % NUM_MOVE_FIELDS:
        raise MesetaError(
            f"{operator}: moves have {len(moves)} numbers, not {NUM_MOVE_FIELDS} per move; pass the result of "
            "pack_moves"
        )


def _check_encode_arguments(
    out: Tensor,
    sources: list[Tensor],
    moves: list[int],
    layout: list[int],
    random: list[int],
    rows: Tensor | None,
    overflows: Tensor | None,
) -> None:
    operator = "encode_columns"
    _, each = unpack_layouts(operator, layout)
    if len(each) != 1 or out.dim() != 2:
        raise MesetaError(
            f"{operator}: got {len(each)} lists of pieces and an output of shape {list(out.shape)}; pass one list and "
            "an output [B, bytes]"
        )
    num_rows = out.shape[0]
    _check_encoded(operator, out, each[0], num_rows)
    _check_floats(operator, sources, num_rows, moves)
    unpack_random_source(operator, each[0], random)
    for name, tensor, count in (("numbers of rows", rows, num_rows), ("overflows", overflows, 1)):
        if tensor is None:
            continue
        fits = tensor.dtype == torch.int64 and tensor.shape == (count,) and tensor.is_contiguous()
        if not fits or tensor.device != out.device:
            raise MesetaError(
                f"{operator}: {name} are {tensor.dtype} {list(tensor.shape)} on {tensor.device}; pass contiguous int64 "
                f"[{count}] on {out.device}"
            )


def _check_decode_arguments(out: Tensor, sources: list[Tensor], moves: list[int], layout: list[int]) -> None:
    operator = "decode_columns"
    _, each = unpack_layouts(operator, layout)
    num_rows = out.shape[0] if out.dim() == 2 else 0
    _check_floats(operator, [out], num_rows, moves)
    if len(each) != len(sources):
        raise MesetaError(f"{operator}: {len(each)} lists of pieces for {len(sources)} matrices; pass one per matrix")
    if out.numel() > 0 and out.stride(1) != 1:  # Strides of an empty NumPy matrix are 0.
        raise MesetaError(f"{operator}: the output has strides {out.stride()}; its columns must be contiguous")
    for matrix, row in zip(sources, each, strict=True):
        _check_encoded(operator, matrix, row, num_rows)


def _encode_cpu(
    out: Tensor,
    sources: list[Tensor],
    moves: list[int],
    layout: list[int],
    scale: float,
    random: list[int],
    rows: Tensor | None,
    overflows: Tensor | None,
) -> None:
    _check_encode_arguments(out, sources, moves, layout, random, rows, overflows)
    matrices = [source if source.stride(1) == 1 else source.contiguous() for source in sources]
    try:
        core().encode_columns(
            [out.data_ptr(), out.size(0), out.size(1)],
            [number for m in matrices for number in (m.data_ptr(), m.size(1), m.stride(0))],
            moves,
            layout,
            scale,
            random,
            [0 if tensor is None else tensor.data_ptr() for tensor in (rows, overflows)],
            torch.get_num_threads(),
        )
    except ValueError as error:
        raise MesetaError(f"encode_columns: {error}") from None


def _encode_gpu(
    out: Tensor,
    sources: list[Tensor],
    moves: list[int],
    layout: list[int],
    scale: float,
    random: list[int],
    rows: Tensor | None,
    overflows: Tensor | None,
) -> None:
    _check_encode_arguments(out, sources, moves, layout, random, rows, overflows)
    from meseta.ops.codec import triton

    triton.encode_columns(out, sources, moves, layout, scale, random, rows, overflows)


def _encode_fake(
    out: Tensor,
    sources: list[Tensor],
    moves: list[int],
    layout: list[int],
    scale: float,
    random: list[int],
    rows: Tensor | None,
    overflows: Tensor | None,
) -> None:
    return None


def _decode_cpu(out: Tensor, sources: list[Tensor], moves: list[int], layout: list[int], scale: float) -> None:
    _check_decode_arguments(out, sources, moves, layout)
    try:
        core().decode_columns(
            [out.data_ptr(), out.size(0), out.size(1), out.stride(0)],
            [matrix.data_ptr() for matrix in sources],
            moves,
            layout,
            scale,
            torch.get_num_threads(),
        )
    except ValueError as error:
        raise MesetaError(f"decode_columns: {error}") from None


def _decode_gpu(out: Tensor, sources: list[Tensor], moves: list[int], layout: list[int], scale: float) -> None:
    _check_decode_arguments(out, sources, moves, layout)
    from meseta.ops.codec import triton

    triton.decode_columns(out, sources, moves, layout, scale)


def _decode_fake(out: Tensor, sources: list[Tensor], moves: list[int], layout: list[int], scale: float) -> None:
    return None


_encode = register(
    "encode_columns(Tensor(a!) out, Tensor[] sources, int[] moves, int[] layout, float scale, int[] random, "
    "Tensor? rows, Tensor(b!)? overflows) -> ()",
    cpu=_encode_cpu,
    cuda=_encode_gpu,
    fake=_encode_fake,
)
_decode = register(
    "decode_columns(Tensor(a!) out, Tensor[] sources, int[] moves, int[] layout, float scale) -> ()",
    cpu=_decode_cpu,
    cuda=_decode_gpu,
    fake=_decode_fake,
)
