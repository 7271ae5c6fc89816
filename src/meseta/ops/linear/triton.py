"""Triton kernels of linear layers, and of ReLU's backward with the gradient of a bias."""
# Matrices have contiguous rows. Sizes and strides that are multiples of ALIGN elements, 16 bytes, allow loads of 16
# bytes: x // ALIGN * ALIGN shows that to the compiler. Tiles are functions of shapes, so that results do not depend on
# measurements. Triton parses the source of these functions, so that no decorator that checks types may wrap them.

from __future__ import annotations

from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from meseta.ops.linear import reference
from meseta.ops.triton_shared import VECTOR_BYTES

BLOCK_SAMPLES = tl.constexpr(reference.BLOCK_SAMPLES)
CHUNK_SAMPLES = tl.constexpr(1024)
"""Number of samples over which a program sums a tile of a weight gradient."""
GROUP_ROWS = tl.constexpr(8)
"""Number of tiles below each other that run at the same time, so that they read the same columns from the L2 cache."""
NUM_STAGES = 3
"""Number of steps of a product for which factors are in shared memory or on their way."""
MAX_COLUMNS = 64
"""Maximum number of columns per program of an element-wise kernel."""


class ProductTile(NamedTuple):
    """Part of a product that a program computes, and the number of terms that it adds at a time."""

    rows: int
    columns: int
    terms: int
    num_warps: int


def choose_tile(num_rows: int, num_columns: int, num_terms: int, dtype: torch.dtype) -> ProductTile:
    """Return the tile of a product [num_rows, num_terms] times [num_terms, num_columns]."""
    # An H100 has 132 multiprocessors. Smaller products have smaller tiles, so that all of them have a program.
    size = num_rows * num_columns
    terms = max(triton.next_power_of_2(num_terms), 16)
    if dtype == torch.float32:  # CUDA cores multiply.
        return ProductTile(64, 64, 16, 4) if size >= 64 * 64 * 128 else ProductTile(32, 32, min(terms, 32), 4)
    if size >= 256 * 128 * 128:
        return ProductTile(256, 128, min(terms, 64), 8)
    return (
        ProductTile(128, 128, min(terms, 64), 8) if size >= 128 * 128 * 64 else ProductTile(64, 32, min(terms, 64), 4)
    )


def choose_forward_tile(num_rows: int, num_columns: int, num_terms: int, dtype: torch.dtype) -> ProductTile:
    """Return the tile of x W^T."""
    tile = choose_tile(num_rows, num_columns, num_terms, dtype)
    # In float32, conflicts between the threads of a multiprocessor determine the time, see MAX_FUSED_FLOPS.
    is_tiny = dtype == torch.float32 and num_rows * num_columns < 16 * 16 * 264
    return ProductTile(16, 16, tile.terms, 2) if is_tiny else tile


def limit_rows(tile: ProductTile) -> ProductTile:
    """Return the tile of a product that is followed by reads of other matrices."""
    # Two programs fit on a multiprocessor, so that one multiplies while the other one reads.
    return tile._replace(rows=min(tile.rows, 128))


def choose_block_tile(num_rows: int, num_columns: int, num_terms: int, dtype: torch.dtype) -> ProductTile:
    """Return the tile of a product whose columns are summed over blocks of samples: a program has a whole block."""
    rows = min(max(triton.next_power_of_2(num_rows), 64), BLOCK_SAMPLES.value)
    terms = max(triton.next_power_of_2(num_terms), 16)
    if dtype == torch.float32:
        return ProductTile(rows, 16, min(terms, 32), 8 if rows == BLOCK_SAMPLES.value else 4)
    is_large = num_rows * num_columns >= 256 * 128 * 64
    return ProductTile(rows, 128, min(terms, 64), 8) if is_large else ProductTile(rows, 32, min(terms, 64), 4)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """Implement `meseta.ops.linear.reference.linear` on a GPU for float32 and bfloat16."""
    out = x.new_empty(len(x), len(weight))
    _launch_linear(
        (out, None), (x, weight, bias), (None, None), choose_tile(len(x), len(weight), x.shape[1], x.dtype), relu=relu
    )
    return out


def linear_cross(t: Tensor, weight: Tensor, bias: Tensor | None, x0: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Implement `meseta.ops.linear.reference.linear_cross` on a GPU for float32 and bfloat16."""
    out, p = (t.new_empty(len(t), len(weight)) for _ in range(2))
    tile = limit_rows(choose_forward_tile(len(t), len(weight), t.shape[1], t.dtype))
    _launch_linear((out, p), (t, weight, bias), (x0.contiguous(), x.contiguous()), tile)
    return out, p


def _launch_linear(outputs: Any, operands: Any, factors: Any, tile: ProductTile, *, relu: bool = False) -> None:
    x, weight, bias = operands
    x, weight = _with_contiguous_rows(x), weight.contiguous()
    (num_samples, num_terms), num_outputs = x.shape, len(weight)
    with torch.cuda.device_of(x):
        _linear[(_num_tiles(num_samples, num_outputs, tile),)](
            outputs,
            (x, weight, bias),
            factors,
            num_samples,
            (num_terms, num_outputs, x.stride(0)),
            RELU=relu,
            ALIGNMENTS=(_alignment(x.dtype, num_terms, x.stride(0)), _alignment(x.dtype, num_outputs)),
            TILE=tile[:3],
            num_warps=tile.num_warps,
            num_stages=NUM_STAGES,
        )


def linear_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    needs_input: bool,
    mask: Tensor | None,
    residual: Tensor | None,
    sums: Tensor | None,
    column: int,
) -> tuple[Tensor, Tensor]:
    """Implement `meseta.ops.linear.reference.linear_backward` on a GPU for float32 and bfloat16. More than
    CHUNK_SAMPLES samples need a second launch."""
    num_chunks = triton.cdiv(len(x), CHUNK_SAMPLES.value)
    weight_gradient = x.new_empty(num_chunks, *weight.shape, dtype=torch.float32)
    x_gradient = x.new_empty(x.shape if needs_input else (0, 0))
    sums = None if sums is None or mask is None else sums[:, column:]
    outputs = x_gradient if needs_input else None, weight_gradient, sums
    _launch_backward(outputs, (gradient, x, weight), (mask, residual))
    return x_gradient, weight_gradient[0] if num_chunks == 1 else weight_gradient.sum(dim=0)


def input_gradient(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    residual: Tensor | None,
    sums: Tensor | None,
    column: int,
) -> Tensor:
    """Return the gradient of the input as `linear_backward` does, without the gradient of the weight."""
    x_gradient = x.new_empty(x.shape)
    sums = None if sums is None or mask is None else sums[:, column:]
    _launch_backward((x_gradient, None, sums), (gradient, x, weight), (mask, residual))
    return x_gradient


def _launch_backward(outputs: Any, operands: Any, terms: Any) -> None:
    """Launch the kernel. An input gradient or weight gradient of `None` is not computed."""
    x_gradient, weight_gradient, sums = outputs
    mask, residual = (None if one is None else one.contiguous() for one in terms)
    gradient, x, weight = operands
    gradient, x, weight = _with_contiguous_rows(gradient), _with_contiguous_rows(x), weight.contiguous()
    (num_samples, num_inputs), num_outputs = x.shape, len(weight)
    tile = (choose_tile if mask is None else choose_block_tile)(num_samples, num_inputs, num_outputs, x.dtype)
    tile = tile if residual is None or mask is not None else limit_rows(tile)
    num_chunks = 0 if weight_gradient is None else len(weight_gradient)
    weight_tile = choose_tile(num_chunks * num_outputs, num_inputs, num_samples, x.dtype)
    num_input_tiles = 0 if x_gradient is None else _num_tiles(num_samples, num_inputs, tile)
    num_programs = num_input_tiles + num_chunks * _num_tiles(num_outputs, num_inputs, weight_tile)
    with torch.cuda.device_of(x):
        _linear_backward[(num_programs,)](
            outputs,
            (gradient, x, weight),
            (mask, residual),
            (num_samples, num_input_tiles, 0 if sums is None else sums.stride(0)),
            (num_inputs, num_outputs, gradient.stride(0), x.stride(0)),
            ALIGNMENTS=(
                _alignment(x.dtype, num_inputs, x.stride(0)),
                _alignment(x.dtype, num_outputs, gradient.stride(0)),
            ),
            TILE=tile[:3],
            WEIGHT_TILE=weight_tile[:3],
            num_warps=(weight_tile if x_gradient is None else tile).num_warps,
            num_stages=NUM_STAGES,
        )


def mask_and_sum(gradient: Tensor, output: Tensor, sums: Tensor, column: int) -> Tensor:
    """Implement `meseta.ops.linear.reference.mask_and_sum` on a GPU."""
    masked = gradient.new_empty(gradient.shape)
    gradient = _with_contiguous_rows(gradient)
    num_samples, width = gradient.shape
    with torch.cuda.device_of(gradient):
        _mask_and_sum[block_grid(gradient)](
            masked,
            sums[:, column:],
            gradient,
            output.contiguous(),
            num_samples,
            sums.stride(0),
            gradient.stride(0),
            WIDTH=width,
        )
    return masked


def _num_columns(width: int) -> int:
    # The kernels compute it too.
    return 16 if width <= 16 else MAX_COLUMNS


def block_grid(matrix: Tensor) -> tuple[int, int]:
    """Return the grid of an element-wise kernel: blocks of samples, and blocks of columns."""
    num_samples, width = matrix.shape
    return triton.cdiv(num_samples, reference.BLOCK_SAMPLES), triton.cdiv(width, _num_columns(width))


def _num_tiles(num_rows: int, num_columns: int, tile: ProductTile) -> int:
    return int(triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_columns, tile.columns))


def _alignment(dtype: torch.dtype, *sizes: int) -> int:
    """Return the number of elements of 16 bytes if all sizes are multiples of it, otherwise 1."""
    count = VECTOR_BYTES // dtype.itemsize
    return count if all(size % count == 0 for size in sizes) else 1


def _with_contiguous_rows(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


@triton.jit
@no_type_check
def _multiply(left, left_step, right, right_step, inside, num_terms):
    """Return a tile of a product.

    `left` and `right` have the pointer to the first factors of the tile, and their places [ROWS, TERMS] and [TERMS,
    COLUMNS]. The steps are the distances to the next TERMS terms. `inside` has the valid rows and columns."""
    left_start, left_place = left
    right_start, right_place = right
    is_row, is_column = inside
    TERMS: tl.constexpr = right_place.shape[0]
    total = tl.zeros([left_place.shape[0], right_place.shape[1]], dtype=tl.float32)
    term = tl.arange(0, TERMS)
    for first in range(0, num_terms, TERMS):
        is_term = term < num_terms - first
        values = tl.load(left_start + left_place, mask=is_row[:, None] & is_term[None, :], other=0.0)
        factors = tl.load(right_start + right_place, mask=is_term[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(values, factors, total, input_precision="ieee")
        left_start += left_step
        right_start += right_step
    return total


@triton.jit
@no_type_check
def _find_tile(program, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the first row and column of a program's tile. Groups of tiles below each other follow one another."""
    height, width = tl.cdiv(num_rows, ROWS), tl.cdiv(num_columns, COLUMNS)
    first = program // (GROUP_ROWS * width) * GROUP_ROWS
    count = tl.minimum(height - first, GROUP_ROWS)
    place = program % (GROUP_ROWS * width)
    return (first + place % count) * ROWS, place // count * COLUMNS


@triton.jit(do_not_specialize=["num_samples", "sizes"])
@no_type_check
def _linear(
    outputs, operands, factors, num_samples, sizes, RELU: tl.constexpr, ALIGNMENTS: tl.constexpr, TILE: tl.constexpr
):
    """Write x W^T + b. With `factors` x0 and x, write it as p, and x + x0 * p as the output."""
    out, p = outputs
    x, weight, bias = operands
    x0, residual = factors
    num_terms, num_outputs, stride = sizes
    num_terms, stride = num_terms // ALIGNMENTS[0] * ALIGNMENTS[0], stride // ALIGNMENTS[0] * ALIGNMENTS[0]
    num_outputs = num_outputs // ALIGNMENTS[1] * ALIGNMENTS[1]
    first_row, first_column = _find_tile(tl.program_id(0), num_samples, num_outputs, TILE[0], TILE[1])
    row, column, term = tl.arange(0, TILE[0])[:, None], tl.arange(0, TILE[1]), tl.arange(0, TILE[2])
    is_row, is_column = tl.arange(0, TILE[0]) < num_samples - first_row, column < num_outputs - first_column
    result = _multiply(
        (x + first_row.to(tl.int64) * stride, row * stride + term[None, :]),
        TILE[2],
        (weight + first_column.to(tl.int64) * num_terms, column[None, :] * num_terms + term[:, None]),
        TILE[2],
        (is_row, is_column),
        num_terms,
    )
    if bias is not None:
        result += tl.load(bias + first_column + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if RELU:
        result = tl.where(result <= 0, 0.0, result)  # NaN stays NaN.
    start = first_row.to(tl.int64) * num_outputs + first_column
    place = row * num_outputs + column[None, :]
    inside = is_row[:, None] & is_column[None, :]
    result = result.to(out.dtype.element_ty)
    if x0 is not None:
        tl.store(p + start + place, result, mask=inside)
        factor = tl.load(x0 + start + place, mask=inside, other=0.0).to(tl.float32)
        added = tl.load(residual + start + place, mask=inside, other=0.0).to(tl.float32)
        result = (added + factor * result.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + start + place, result, mask=inside)


@triton.jit(do_not_specialize=["counts", "sizes"])
@no_type_check
def _linear_backward(
    outputs, operands, terms, counts, sizes, ALIGNMENTS: tl.constexpr, TILE: tl.constexpr, WEIGHT_TILE: tl.constexpr
):
    """Some programs write a tile of the input gradient each, and the others one of a weight gradient."""
    x_gradient, weight_gradient, sums = outputs
    num_inputs, num_outputs, gradient_stride, x_stride = sizes
    num_inputs, x_stride = num_inputs // ALIGNMENTS[0] * ALIGNMENTS[0], x_stride // ALIGNMENTS[0] * ALIGNMENTS[0]
    num_outputs = num_outputs // ALIGNMENTS[1] * ALIGNMENTS[1]
    gradient_stride = gradient_stride // ALIGNMENTS[1] * ALIGNMENTS[1]
    program, num_input_tiles = tl.program_id(0), counts[1]
    sizes = num_inputs, num_outputs, gradient_stride, x_stride
    if x_gradient is not None and (weight_gradient is None or program < num_input_tiles):
        _write_input_gradient((x_gradient, sums), operands, terms, program, counts, sizes, TILE)
    if weight_gradient is not None and (x_gradient is None or program >= num_input_tiles):
        program -= num_input_tiles
        _write_weight_gradient(weight_gradient, operands, program, counts, sizes, TILE[2], WEIGHT_TILE)


@triton.jit
@no_type_check
def _write_input_gradient(outputs, operands, terms, program, counts, sizes, TILE: tl.constexpr):
    """Write a tile of G W, and its sums if there is a mask."""
    x_gradient, sums = outputs
    gradient, _, weight = operands
    mask, residual = terms
    num_samples, _, sums_stride = counts
    num_inputs, num_outputs, gradient_stride, _ = sizes
    first_row, first_column = _find_tile(program, num_samples, num_inputs, TILE[0], TILE[1])
    row, column, term = tl.arange(0, TILE[0])[:, None], tl.arange(0, TILE[1]), tl.arange(0, TILE[2])
    is_row, is_column = tl.arange(0, TILE[0]) < num_samples - first_row, column < num_inputs - first_column
    result = _multiply(
        (gradient + first_row.to(tl.int64) * gradient_stride, row * gradient_stride + term[None, :]),
        TILE[2],
        (weight + first_column, term[:, None] * num_inputs + column[None, :]),
        TILE[2] * num_inputs,
        (is_row, is_column),
        num_outputs,
    )
    start = first_row.to(tl.int64) * num_inputs + first_column
    place = row * num_inputs + column[None, :]
    inside = is_row[:, None] & is_column[None, :]
    if residual is not None:
        result += tl.load(residual + start + place, mask=inside, other=0.0).to(tl.float32)
    result = result.to(x_gradient.dtype.element_ty)
    if mask is not None:
        result = tl.where(_is_positive(tl.load(mask + start + place, mask=inside, other=0.0)), result, 0.0)
        line = sums + (first_row // BLOCK_SAMPLES).to(tl.int64) * sums_stride + first_column
        tl.store(line + column, tl.sum(result.to(tl.float32), axis=0), mask=is_column)
    tl.store(x_gradient + start + place, result, mask=inside)


@triton.jit
@no_type_check
def _write_weight_gradient(weight_gradient, operands, program, counts, sizes, TERMS: tl.constexpr, TILE: tl.constexpr):
    """Write a tile of G^T x for a chunk of samples."""
    gradient, x, _ = operands
    num_inputs, num_outputs, gradient_stride, x_stride = sizes
    num_tiles = tl.cdiv(num_outputs, TILE[0]) * tl.cdiv(num_inputs, TILE[1])
    first_row, first_column = _find_tile(program % num_tiles, num_outputs, num_inputs, TILE[0], TILE[1])
    row, column, sample = tl.arange(0, TILE[0])[:, None], tl.arange(0, TILE[1])[None, :], tl.arange(0, TERMS)
    is_row, is_column = (
        tl.arange(0, TILE[0]) < num_outputs - first_row,
        tl.arange(0, TILE[1]) < num_inputs - first_column,
    )
    chunk = program // num_tiles
    first = chunk * CHUNK_SAMPLES
    result = _multiply(
        (gradient + first.to(tl.int64) * gradient_stride + first_row, sample[None, :] * gradient_stride + row),
        TERMS * gradient_stride,
        (x + first.to(tl.int64) * x_stride + first_column, sample[:, None] * x_stride + column),
        TERMS * x_stride,
        (is_row, is_column),
        tl.minimum(counts[0] - first, CHUNK_SAMPLES),
    )
    start = (chunk.to(tl.int64) * num_outputs + first_row) * num_inputs + first_column
    tl.store(weight_gradient + start + row * num_inputs + column, result, mask=is_row[:, None] & is_column[None, :])


@triton.jit
@no_type_check
def _is_positive(values):
    """Return values > 0. NaN is not positive."""
    # After the comparison of bfloat16 numbers as floats, ptxas would not let products of tensor cores overlap.
    if values.dtype == tl.bfloat16:
        bits = values.to(tl.int16, bitcast=True)
        result = (bits > 0) & (bits <= 0x7F80)
    else:
        result = values > 0
    return result


@triton.jit(do_not_specialize=["num_samples"])
@no_type_check
def _mask_and_sum(masked, sums, gradient, output, num_samples, stride, gradient_stride, WIDTH: tl.constexpr):
    """`sums` has a row for each block of samples, and `stride` is the distance of its rows."""
    COLUMNS: tl.constexpr = 16 if WIDTH <= 16 else 64
    ROWS: tl.constexpr = 2048 // COLUMNS
    block = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], dtype=sums.dtype.element_ty)
    for first in range(0, tl.minimum(num_samples - block * BLOCK_SAMPLES, BLOCK_SAMPLES), ROWS):
        row = (block * BLOCK_SAMPLES + first + tl.arange(0, ROWS))[:, None]
        inside = (row < num_samples) & (column < WIDTH)[None, :]
        place = row * WIDTH + column[None, :]
        is_active = tl.load(output + place, mask=inside, other=0.0) > 0
        values = tl.load(gradient + row * gradient_stride + column[None, :], mask=inside, other=0.0)
        values = tl.where(is_active, values, 0.0)
        tl.store(masked + place, values, mask=inside)
        total += values.to(total.dtype)
    tl.store(sums + block * stride + column, tl.sum(total, axis=0), mask=column < WIDTH)
