"""Encoding and decoding of columns on a GPU, in one pass over memory.

Each program handles a few rows of a few blocks of 16 columns. It applies the moves, scales, encodes and stores.
"""
# A plan on the device describes the blocks. It has one entry per block, followed by the parts of all blocks. A part is
# the section of a move that is within one block.

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd
from struct import pack, unpack
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from meseta.ops.codec.layout import CODEC_LIST, RowLayout, ScaleBlock, unpack_layouts, unpack_random_source
from meseta.ops.codec.triton_kernels import BLOCKS, HEADER_WORDS, ROWS, decode_blocks, encode_blocks, kernel_variant
from meseta.ops.columns import ColumnMove
from meseta.ops.common import device_constant
from meseta.ops.triton_shared import padded_address_count, write_addresses
from meseta.spec import COLUMN_BLOCK, MesetaError

VECTOR = 4
"""Maximum number of elements that a lane loads with one instruction."""


class LaunchPlan(NamedTuple):
    """Launch parameters that depend on moves, layouts and strides only, so that they can be cached."""

    words: tuple[int, ...]
    num_blocks: int
    vector: int
    """Alignment of float32 columns, in elements. It divides each position at which a part begins or ends."""
    code_vector: int
    """Alignment of encoded columns, in elements."""


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
    """Encode on the GPU. Same arguments as `reference.encode_columns`, and same errors."""
    exponent, (row,) = unpack_layouts("encode_columns", layout)
    draw = unpack_random_source("encode_columns", row, random)
    matrices = [source if source.stride(1) == 1 else source.contiguous() for source in sources]
    shapes = tuple((m.shape[1], m.stride(0), m.data_ptr() // 4 % VECTOR) for m in matrices)
    plan = _encode_plan(row, tuple(moves), shapes, (0,) * len(row.pieces) if draw is None else draw.columns)
    if len(out) == 0 or plan.num_blocks == 0:
        return
    drawn = 0 if draw is None else 1 if rows is None else 2
    codes = gcd(plan.code_vector, out.data_ptr() // row.codec.element_bytes)
    with torch.cuda.device_of(out):
        encode_blocks[_grid(len(out), plan)](
            out,
            _addresses(matrices, out),
            _plan_words(plan, exponent, scale, row.num_bytes, out.device),
            None if draw is None else device_constant((draw.first_row, *draw.keys), out.device),
            rows,
            overflows if row.codec.name == "fp16" else None,
            len(out),
            FORM=kernel_variant(layout[0], drawn, plan.vector, codes),
            num_warps=4,
            enable_fp_fusion=False,
        )


def decode_columns(
    out: Tensor, sources: Sequence[Tensor], moves: Sequence[int], layout: Sequence[int], scale: float
) -> None:
    """Decode on the GPU. Same arguments as `reference.decode_columns`. Raises MesetaError if a move is outside."""
    plan = _decode_plan(tuple(layout), tuple(moves), out.shape[1])
    if len(out) == 0 or plan.num_blocks == 0:
        return
    codec = CODEC_LIST[layout[0]]
    vector = gcd(plan.vector, out.stride(0), out.data_ptr() // 4)
    codes = gcd(plan.code_vector, *(matrix.data_ptr() // codec.element_bytes for matrix in sources))
    with torch.cuda.device_of(out):
        decode_blocks[_grid(len(out), plan)](
            out,
            _addresses(sources, out),
            _plan_words(plan, -layout[1] if codec.name == "fp16" else 0, scale, 0, out.device),
            len(out),
            out.stride(0),
            FORM=kernel_variant(layout[0], 0, vector, codes),
            num_warps=4,
            enable_fp_fusion=False,
        )


# The exponent and the scale may change in every step, so they are not part of the cached plan.
def _plan_words(plan: LaunchPlan, exponent: int, scale: float, row_bytes: int, device: torch.device) -> Tensor:
    (scale_bits,) = unpack("<i", pack("<f", scale))
    return device_constant((plan.num_blocks, (exponent + 127) << 23, scale_bits, row_bytes, *plan.words), device)


def _grid(num_rows: int, plan: LaunchPlan) -> tuple[int, int]:
    return triton.cdiv(num_rows, ROWS.value), triton.cdiv(plan.num_blocks, BLOCKS.value)


def _addresses(matrices: Sequence[Tensor], out: Tensor) -> Tensor:
    addresses = torch.empty(max(padded_address_count(len(matrices)), 1), dtype=torch.int64, device=out.device)
    write_addresses(addresses, matrices)
    return addresses


def _check_moves(operator: str, moves: tuple[int, ...], widths: Sequence[int], num_columns: int) -> list[ColumnMove]:
    """Unpack moves and drop empty ones. Raises MesetaError if a source or a column does not exist."""
    checked = [ColumnMove(*moves[at : at + 5]) for at in range(0, len(moves), 5)]
    for move in checked:
        if not 0 <= move.source < len(widths):
            raise MesetaError(f"{operator}: source {move.source} is outside 0..{len(widths) - 1}")
        limit = widths[move.source]
        if (
            move.width < 0
            or not 0 <= move.start <= limit - move.width
            or not 0 <= move.target <= num_columns - move.width
        ):
            raise MesetaError(
                f"{operator}: {move.width} columns from column {move.start} of {limit} cannot move to column "
                f"{move.target} of {num_columns}"
            )
    return [move for move in checked if move.width]


def _pack_blocks(lines: Sequence[tuple[tuple[int, ...], list[tuple[int, ...]]]]) -> tuple[int, ...]:
    """Return the entry of each block with the position and number of its parts, followed by all parts."""
    words: list[int] = []
    parts: list[int] = []
    num_words = HEADER_WORDS.value + sum(len(line) + 2 for line, _ in lines)
    for line, of_block in lines:
        words += [*line, num_words + len(parts), len(of_block)]
        parts += [word for part in of_block for word in part]
    return (*words, *parts)


@lru_cache(maxsize=256)
def _encode_plan(
    row: RowLayout, moves: tuple[int, ...], shapes: tuple[tuple[int, int, int], ...], columns: tuple[int, ...]
) -> LaunchPlan:
    """Plan the encoding of a row. Arguments are hashable for the cache.

    `shapes` has the number of columns, the row stride and the alignment of the address of each source, in elements.
    `columns` are the columns of the table at which pieces start.
    """
    checked = _check_moves("encode_columns", moves, [width for width, _, _ in shapes], row.num_columns)
    lines, vector, codes = [], VECTOR, gcd(VECTOR, row.num_bytes // row.codec.element_bytes)
    for index, block in enumerate(row.blocks()):
        parts: list[tuple[int, ...]] = []
        for move in checked:
            low, high = (
                max(move.target, block.first_column),
                min(move.target + move.width, block.first_column + block.width),
            )
            if low < high:
                _, stride, place = shapes[move.source]
                start = move.start - move.target + block.first_column
                first, last = low - block.first_column, high - block.first_column
                parts.append((move.source, start, stride, first, last, move.add))
                vector = gcd(vector, place, start, stride, first, last)
        codes = gcd(codes, block.first_column, block.width)
        # The last block also writes the padding byte before the scales.
        is_odd = row.codec.scale_bytes and row.num_columns % 2 and index == len(row.blocks()) - 1
        scale_at = row.scales_offset + 2 * index
        lines.append(
            (
                (
                    block.first_column,
                    block.width,
                    scale_at,
                    int(bool(is_odd)),
                    block.piece,
                    columns[block.piece] + block.piece_column,
                ),
                parts,
            )
        )
    return LaunchPlan(_pack_blocks(lines), len(lines), vector, codes)


@lru_cache(maxsize=256)
def _decode_plan(layout: tuple[int, ...], moves: tuple[int, ...], num_columns: int) -> LaunchPlan:
    """Plan the decoding. Blocks are those of the output. Each part is within one scale block of its source."""
    _, rows = unpack_layouts("decode_columns", layout)
    checked = _check_moves("decode_columns", moves, [row.num_columns for row in rows], num_columns)
    parts: dict[int, list[tuple[int, ...]]] = {}
    vector = codes = VECTOR
    for move in checked:
        row = rows[move.source]
        codes = gcd(codes, row.num_bytes // row.codec.element_bytes)
        for index, block in enumerate(_scale_blocks(row)):
            low, high = (
                max(move.start, block.first_column),
                min(move.start + move.width, block.first_column + block.width),
            )
            while low < high:  # Split at the blocks of the output.
                to = move.target + low - move.start
                first = to % COLUMN_BLOCK
                last = min(COLUMN_BLOCK, first + high - low)
                part = (move.source, low - first, row.num_bytes, first, last, move.add, row.scales_offset + 2 * index)
                vector, codes = gcd(vector, first, last), gcd(codes, low - first, first, last)
                parts.setdefault(to // COLUMN_BLOCK, []).append(part)
                low += last - first
    lines = [
        ((block * COLUMN_BLOCK, int(any(part[5] for part in of_block))), of_block)
        for block, of_block in sorted(parts.items())
    ]
    return LaunchPlan(_pack_blocks(lines), len(lines), vector, codes)


def _scale_blocks(row: RowLayout) -> Sequence[ScaleBlock]:
    """Return the columns that share a scale, or one block with all columns for codecs without scales."""
    return row.blocks() if row.codec.scale_bytes else (ScaleBlock(0, 0, row.num_columns, 0),)
