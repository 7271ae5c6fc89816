"""Dot interaction on a GPU: one launch forward and one backward, whose programs handle a few samples each."""
# A program holds BLOCK vectors of each of its samples, and multiplies them with the vectors of each block in turn.
# Vector 0 is the dense vector x, and the others are those of `pooled`. Tiles are [samples, vectors, columns]. A thread
# has its part of both factors of a product in registers, which limits the inner dimension. Many small programs hide the
# latency of loads. Pipelined loads of larger tiles need up to 320 KiB of shared memory, more than a multiprocessor has.

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_COLUMNS = tl.constexpr(64)
"""Number of columns of all samples of a program, per tile."""
INNER = tl.constexpr(16)
"""Number of vectors by whose products a gradient is summed at a time."""
OPTIONS = {"num_stages": 1, "maxnreg": 168}
"""Options of both launches. With a free choice of registers, the assembler spills some for more programs per
multiprocessor."""


def dot_interaction(x: Tensor, pooled: Tensor) -> Tensor:
    """Implement `meseta.ops.dot_interaction.dot_interaction` on a GPU for float32 `pooled`."""
    num_samples, dim = x.shape
    num_features = pooled.shape[1] // dim
    out = x.new_empty(num_samples, dim + num_features * (num_features + 1) // 2)
    if num_samples:
        with torch.cuda.device_of(x):
            _multiply_pairs[_grid(num_samples, num_features, dim)](
                out, x.contiguous(), pooled.contiguous(), num_samples, FEATURES=num_features, DIM=dim, **OPTIONS
            )
    return out


def dot_interaction_backward(gradient: Tensor, x: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor]:
    """Implement the backward pass on a GPU. Returns the gradients of x and pooled."""
    num_samples, dim = x.shape
    num_features = pooled.shape[1] // dim
    x_gradient, pooled_gradient = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, pooled))
    if num_samples:
        with torch.cuda.device_of(x):
            _sum_scaled_vectors[_grid(num_samples, num_features, dim)](
                x_gradient,
                pooled_gradient,
                gradient.contiguous(),
                x.contiguous(),
                pooled.contiguous(),
                num_samples,
                FEATURES=num_features,
                DIM=dim,
                **OPTIONS,
            )
    return x_gradient, pooled_gradient


def _grid(num_samples: int, num_features: int, dim: int) -> tuple[int, int]:
    # The kernels compute the numbers of columns and of vectors per block too.
    columns = 16 if dim <= 16 else 32 if dim <= 32 else 64
    num_blocks = triton.cdiv(num_features + 1, 16 if num_features < 16 else 32)
    return triton.cdiv(num_samples, TILE_COLUMNS.value // columns), num_blocks


@triton.jit
@no_type_check  # Triton parses the source, so that no decorator that checks types may wrap the function.
def _load_vectors(x, pooled, sample, vector, column, num_samples, FEATURES: tl.constexpr, DIM: tl.constexpr):
    """Return vectors of samples as float32. `sample`, `vector` and `column` are broadcast to a tile."""
    column = column + tl.zeros_like(vector) + tl.zeros_like(sample)
    inside = (column < DIM) & (sample < num_samples)
    dense = tl.load(x + sample * DIM + column, mask=inside & (vector == 0), other=0.0).to(tl.float32)
    place = (sample * FEATURES + vector - 1) * DIM + column
    sparse = tl.load(pooled + place, mask=inside & (vector > 0) & (vector <= FEATURES), other=0.0)
    return tl.where(vector == 0, dense, sparse)


@triton.jit(do_not_specialize=["num_samples"])
@no_type_check
def _multiply_pairs(out, x, pooled, num_samples, FEATURES: tl.constexpr, DIM: tl.constexpr):
    BLOCK: tl.constexpr = 16 if FEATURES < 16 else 32
    COLUMNS: tl.constexpr = 16 if DIM <= 16 else 32 if DIM <= 32 else 64
    SAMPLES: tl.constexpr = TILE_COLUMNS // COLUMNS
    sample = (tl.program_id(0).to(tl.int64) * SAMPLES + tl.arange(0, SAMPLES))[:, None, None]
    line = out + sample * (DIM + FEATURES * (FEATURES + 1) // 2)
    left = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :, None]
    inner = tl.arange(0, COLUMNS)[None, None, :]
    if tl.program_id(1) == 0:
        for first in range(0, DIM, COLUMNS):
            column = first + inner
            inside = (column < DIM) & (sample < num_samples)
            tl.store(line + column, tl.load(x + sample * DIM + column, mask=inside), mask=inside)
    # Only pairs below the diagonal are stored, so that the blocks after this one are not needed.
    for other in range(tl.program_id(1) + 1):
        right = other * BLOCK + tl.arange(0, BLOCK)
        products = tl.zeros([SAMPLES, BLOCK, BLOCK], dtype=tl.float32)
        for first in range(0, DIM, COLUMNS):
            rows = _load_vectors(x, pooled, sample, left, first + inner, num_samples, FEATURES, DIM)
            others = rows
            if FEATURES >= BLOCK:
                others = _load_vectors(
                    x, pooled, sample, right[None, :, None], first + inner, num_samples, FEATURES, DIM
                )
            products = tl.dot(rows, tl.permute(others, (0, 2, 1)), products, input_precision="ieee")
        right = right[None, None, :]
        place = DIM + left * (left - 1) // 2 + right
        inside = (right < left) & (left <= FEATURES) & (sample < num_samples)
        tl.store(line + place, products.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_samples"])
@no_type_check
def _sum_scaled_vectors(
    x_gradient, pooled_gradient, gradient, x, pooled, num_samples, FEATURES: tl.constexpr, DIM: tl.constexpr
):
    BLOCK: tl.constexpr = 16 if FEATURES < 16 else 32
    COLUMNS: tl.constexpr = 16 if DIM <= 16 else 32 if DIM <= 32 else 64
    SAMPLES: tl.constexpr = TILE_COLUMNS // COLUMNS
    sample = (tl.program_id(0).to(tl.int64) * SAMPLES + tl.arange(0, SAMPLES))[:, None, None]
    line = gradient + sample * (DIM + FEATURES * (FEATURES + 1) // 2)
    vector = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :, None]
    for first in range(0, DIM, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, None, :] + tl.zeros_like(vector) + tl.zeros_like(sample)
        inside = (column < DIM) & (sample < num_samples)
        sums = tl.load(line + column, mask=inside & (vector == 0), other=0.0).to(tl.float32)
        for start in range(0, FEATURES + 1, INNER):
            right = start + tl.arange(0, INNER)
            high, low = tl.maximum(vector, right[None, None, :]), tl.minimum(vector, right[None, None, :])
            is_pair = (high <= FEATURES) & (low < high) & (sample < num_samples)
            scales = tl.load(line + DIM + high * (high - 1) // 2 + low, mask=is_pair, other=0.0)
            others = first + tl.arange(0, COLUMNS)[None, None, :]
            vectors = _load_vectors(x, pooled, sample, right[None, :, None], others, num_samples, FEATURES, DIM)
            sums = tl.dot(scales.to(tl.float32), vectors, sums, input_precision="ieee")
        tl.store(x_gradient + sample * DIM + column, sums.to(x_gradient.dtype.element_ty), mask=inside & (vector == 0))
        place = (sample * FEATURES + vector - 1) * DIM + column
        tl.store(pooled_gradient + place, sums, mask=inside & (vector > 0) & (vector <= FEATURES))
