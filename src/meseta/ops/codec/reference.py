"""Reference of the codecs in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from meseta.ops.codec.layout import CodecLayouts, RandomSource, RowLayout, unpack_layouts, unpack_random_source
from meseta.ops.columns import reference as columns
from meseta.ops.quantize.reference import to_short
from meseta.ops.random_rows.reference import cell_bits
from meseta.spec import COLUMN_BLOCK

MAX_FP16 = 65504.0
_NAN_BITS = {"fp16": 0x7E00, "bf16": 0x7FC0}
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


def encode_columns(
    out: Tensor,
    sources: Sequence[Tensor],
    moves: Sequence[int],
    layout: Sequence[int],
    scale: float,
    random: Sequence[int],
    rows: Tensor | None,
    overflows: Tensor | None,
) -> None:
    """Implement `meseta.ops.codec.encode_columns` in plain PyTorch, with the arguments of the registered operator."""
    exponent, (row,) = unpack_layouts("encode_columns", layout)
    draw = unpack_random_source("encode_columns", row, random)
    values = torch.zeros(len(out), row.num_columns, device=out.device)
    columns.place_columns(values, sources, moves, scale)
    if not row.codec.scale_bytes:
        out.copy_(_encode_16_bits(values, row, exponent, overflows))
    else:
        out.copy_(_encode_blocks(values, row, None if draw is None else _cell_words(draw, row, out, rows)))


def decode_columns(
    out: Tensor, sources: Sequence[Tensor], moves: Sequence[int], layout: Sequence[int], scale: float
) -> None:
    """Implement `meseta.ops.codec.decode_columns` in plain PyTorch, with the arguments of the registered operator."""
    layouts = unpack_layouts("decode_columns", layout)
    rows = [_decode(matrix, row, layouts) for matrix, row in zip(sources, layouts.rows, strict=True)]
    columns.place_columns(out, rows, moves, scale)


def _encode_16_bits(values: Tensor, row: RowLayout, exponent: int, overflows: Tensor | None) -> Tensor:
    is_nan = values.isnan()
    if row.codec.name == "fp16":
        scaled = values * 2.0**exponent
        beyond = values.isfinite() & (scaled.abs() > MAX_FP16)
        if overflows is not None:
            overflows += beyond.sum()
        values = torch.where(beyond, torch.full_like(values, MAX_FP16).copysign(values), scaled)
    codes = values.to(_DTYPES[row.codec.name]).view(torch.int16)
    return _view_as(torch.where(is_nan, _NAN_BITS[row.codec.name], codes), torch.uint8)


def _encode_blocks(values: Tensor, row: RowLayout, bits: Tensor | None) -> Tensor:
    blocks = _pad_to_blocks(values, row)
    largest = blocks.abs().amax(2, keepdim=True) if blocks.numel() else blocks[:, :, :1]
    # Torch divides a number by a tensor as a product with the reciprocal, which rounds twice.
    exact = largest / torch.full_like(largest, row.codec.max_scaled_value)
    # Round up to a bfloat16. Quotients are then within the range of the codec, unless the scale is subnormal.
    up = ((exact.view(torch.int32) + 0xFFFF) >> 16).clamp(min=1)
    good = (largest > 0) & largest.isfinite()
    unit = torch.where(good, (up << 16).view(torch.float32), 1.0)
    quotients = torch.where(good, blocks / unit, 0.0).clamp(-row.codec.max_scaled_value, row.codec.max_scaled_value)
    words = None if bits is None else _pad_to_blocks(bits, row)
    if row.codec.name == "fp8":
        codes = to_short(quotients, "fp8_e4m3", words)
    elif words is None:
        codes = quotients.round().to(torch.int8)
    else:
        down = quotients.floor()
        codes = (down + ((words >> 8).float() * 2.0**-24 < quotients - down)).to(torch.int8)
    scales = torch.where(good, up, torch.where(largest == 0, 0, _NAN_BITS["bf16"])).to(torch.int16)
    numbers = codes.view(torch.uint8).flatten(1)[:, _padded_positions(row, values.device)]
    return torch.cat([pad(numbers, (0, row.num_columns % 2)), _view_as(scales.flatten(1), torch.uint8)], dim=1)


def _decode(matrix: Tensor, row: RowLayout, layouts: CodecLayouts) -> Tensor:
    dtype = _DTYPES[row.codec.name]
    numbers = _view_as(matrix[:, : row.num_columns * row.codec.element_bytes], dtype).float()
    if not row.codec.scale_bytes:
        return numbers * 2.0**-layouts.exponent if row.codec.name == "fp16" else numbers
    scales = _view_as(matrix[:, row.scales_offset :], torch.bfloat16).float()
    return numbers * scales[:, _padded_positions(row, matrix.device) // COLUMN_BLOCK]


def _cell_words(draw: RandomSource, row: RowLayout, out: Tensor, rows: Tensor | None) -> Tensor:
    numbers = torch.arange(draw.first_row, draw.first_row + len(out), device=out.device) if rows is None else rows
    corners = zip(draw.keys, draw.columns, row.pieces, strict=True)
    each = [cell_bits(key % 2**64, numbers, (first, first + width)) for key, first, width in corners]
    return torch.cat(each, dim=1) if each else numbers.new_empty(len(numbers), 0)


def _pad_to_blocks(values: Tensor, row: RowLayout) -> Tensor:
    """Pad each piece with zeros to a multiple of 16 columns, and split rows into blocks: [B, columns] -> [B, n, 16]."""
    pieces = [pad(piece, (0, -piece.shape[1] % COLUMN_BLOCK)) for piece in values.split(list(row.pieces), dim=1)]
    whole = torch.cat(pieces, dim=1) if pieces else values
    return whole.view(len(values), whole.shape[1] // COLUMN_BLOCK, COLUMN_BLOCK)


def _padded_positions(row: RowLayout, device: torch.device) -> Tensor:
    """Return the position of each column within the padded blocks, int64 [columns]."""
    places = [n * COLUMN_BLOCK + i for n, block in enumerate(row.blocks()) for i in range(block.width)]
    return torch.tensor(places, dtype=torch.int64, device=device)


def _view_as(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    # The copy aligns the bytes, because `view` needs aligned storage.
    size = matrix.shape[1] * matrix.element_size() // dtype.itemsize
    return matrix.flatten().clone().view(dtype).view(len(matrix), size)
