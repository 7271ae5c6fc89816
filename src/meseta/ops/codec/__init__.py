"""Columns of several matrices as one matrix of encoded rows, as `place_columns` puts them side by side, and back.

An encoded row has the columns of its pieces one after the other. All bytes are little-endian:

| part | bytes |
| --- | --- |
| numbers | 2 a column in fp16 and bf16, 1 in fp8 (e4m3 of the OCP 8-bit floating point specification, 2023) and int8 |
| nothing | a zero byte where the scales would begin at an odd one |
| scales | fp8 and int8: a bfloat16 for each block of 16 columns, counted from the first column of each piece |

What is written for a value v, and what is read for a number q:

- fp16: the nearest to v * 2**exponent; finite ones beyond 65504 become +-65504 and are counted. Read: q * 2**-exponent.
- bf16: the nearest. Read: q.
- fp8, int8: the nearest to v / s, read as q * s. s is the largest |v| of the block over 448 or 127, in float32, rounded
  up to a bfloat16, the smallest subnormal one at least. A block of zeros has s = 0, and one with a number that is not
  finite s = NaN, both with numbers 0.

The nearest is that with the even last bit where there are two. In fp16 and bf16 infinities stay, and every NaN becomes
the quiet one without a sign. All arithmetic is float32 with one rounding an operation. Numbers of 8 and 16 bits on the
wire have their precedent in FBGEMM's quantized communication (`QuantizedCommCodec`), small blocks on one scale in the
OCP microscaling formats (2023); stochastic rounding is Gupta et al., "Deep Learning with Limited Numerical Precision",
ICML 2015, section 3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meseta.ops.codec.layout import INT64_SIGN_BIT, RowLayout, pack_layouts, unpack_layouts, unpack_random_source
from meseta.ops.core import core
from meseta.ops.library import register
from meseta.spec import MesetaError
from meseta.spec.codecs import Codec

NUM_MOVE_FIELDS = 5


@dataclass(frozen=True)
class StochasticRounding:
    """Stochastic rounding of fp8 and int8: to one of the two neighbours, so that the mean over keys is the value.

    int8 takes the floor of the quotient, or one more where the 24 high bits of the cell's word, as a fraction, lie
    below what is above the floor; fp8 does the same with the quotient's magnitude, in steps of its grid. The word of a
    cell is that of meseta.ops.random_rows.random_bits for the piece's key, the row's number and the table's column.
    """

    keys: tuple[int, ...]
    """A 64-bit generator key for each piece."""
    columns: tuple[int, ...]
    """Column of its table that each piece begins with, a multiple of 16."""
    row_numbers: int | Tensor
    """Number of the first row of the matrix, which the others follow, or int64 [B], the number of each."""


@dataclass(frozen=True)
class HalfRange:
    """How fp16 holds values that it has no exponents for."""

    exponent: int = 0
    """Of the power of two that values are multiplied by, -126..126."""
    num_clamped: Tensor | None = None
    """int64 [1]: the count of finite values that were too large is added to it. On a GPU nobody waits for it."""


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
    """Write columns of the sources, float32 [B, any] each, times `scale`, encoded, to `out`, in place.

    `out` is uint8 [B, codec.row_bytes(pieces)], contiguous, at an even address. `moves` are those of
    meseta.ops.columns.pack_moves, to the columns of the pieces side by side, and are done in their order; columns that
    none names are 0. `half_range` is of fp16 alone. Without `rounding` numbers are the nearest.

    Raises MesetaError for fp32, which is `place_columns`; for tensors that do not fit together, float64 ones among
    them; for moves outside the columns; and for rounding of 16 bits.
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
    """Write columns of encoded matrices, decoded, times `scale` to `out`, float32 [B, any], in place.

    `sources` are uint8 [B, codec.row_bytes(pieces[i])] as `encode_columns` writes them, and `moves` name columns of
    their pieces side by side; only those are read. Moves are done in their order, and columns of `out` that none names
    stay. `exponent` is the one of fp16 that was encoded with.

    Raises MesetaError as `encode_columns` does.
    """
    if len(pieces) != len(sources):
        raise MesetaError(
            f"decode_columns: {len(pieces)} lists of pieces for {len(sources)} matrices; give one for each"
        )
    _decode(out, list(sources), list(moves), pack_layouts(codec, exponent, pieces), scale)


def rounding_key(seed: int, step: int, name: str) -> int:
    """The 64-bit key by which numbers of `name` round in a step: BLAKE2b of the three."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=8).digest(), "little")


def _key_to_int64(key: int) -> int:
    if not 0 <= key < 2 * INT64_SIGN_BIT:
        raise MesetaError(f"encode_columns: key {key} must be in 0..2**64-1; meseta.ops.codec.rounding_key makes one")
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
                f"{operator}: matrix {index} is {matrix.dtype} {list(matrix.shape)}; codecs take float32 "
                f"[{num_rows}, any]; take the codec fp32, which is place_columns, for other types"
            )
    if len(moves) % NUM_MOVE_FIELDS:
        raise MesetaError(
            f"{operator}: {len(moves)} numbers of moves; give the {NUM_MOVE_FIELDS} that pack_moves makes of each"
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
            f"{operator}: {len(each)} lists of pieces and a result of shape {list(out.shape)}; give one, [B, bytes]"
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
                f"{operator}: {name} are {tensor.dtype} {list(tensor.shape)} on {tensor.device}; give contiguous int64 "
                f"[{count}] on {out.device}"
            )


def _check_decode_arguments(out: Tensor, sources: list[Tensor], moves: list[int], layout: list[int]) -> None:
    operator = "decode_columns"
    _, each = unpack_layouts(operator, layout)
    num_rows = out.shape[0] if out.dim() == 2 else 0
    _check_floats(operator, [out], num_rows, moves)
    if len(each) != len(sources):
        raise MesetaError(f"{operator}: {len(each)} lists of pieces for {len(sources)} matrices; give one for each")
    if out.numel() > 0 and out.stride(1) != 1:  # an empty matrix of numpy has strides of 0
        raise MesetaError(f"{operator}: the result has strides {out.stride()}; its columns must be contiguous")
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
