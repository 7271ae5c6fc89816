"""Dot interaction on a GPU: one launch forward and one backward, whose programs handle a few samples each."""
# A program holds BLOCK vectors of each of its samples, and multiplies them with the vectors of each block in turn.
# Vector 0 is the dense vector x, and the others are those of `pooled`. Tiles are [SAMPLES, vectors, columns].

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

SAMPLES = tl.constexpr(4)
"""Number of samples per program."""


def dot_interaction(x: Tensor, pooled: Tensor) -> Tensor:
    """Implement `meseta.ops.dot_interaction.dot_interaction` on a GPU for float32 `pooled`."""
    num_samples, dim = x.shape
    num_features = pooled.shape[1] // dim
    out = x.new_empty(num_samples, dim + num_features * (num_features + 1) // 2)
    if num_samples:
        with torch.cuda.device_of(x):
            _multiply_pairs[_grid(num_samples, num_features)](
                out, x.contiguous(), pooled.contiguous(), num_samples, FEATURES=num_features, DIM=dim
            )
    return out


def dot_interaction_backward(gradient: Tensor, x: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor]:
    """Implement the backward pass on a GPU. Returns the gradients of x and pooled."""
    num_samples, dim = x.shape
    num_features = pooled.shape[1] // dim
    x_gradient, pooled_gradient = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, pooled))
    if num_samples:
        with torch.cuda.device_of(x):
            _sum_scaled_vectors[_grid(num_samples, num_features)](
                x_gradient,
                pooled_gradient,
                gradient.contiguous(),
                x.contiguous(),
                pooled.contiguous(),
                num_samples,
                FEATURES=num_features,
                DIM=dim,
            )
    return x_gradient, pooled_gradient


def _grid(num_samples: int, num_features: int) -> tuple[int, int]:
    # The kernels compute the number of vectors per block too.
    return triton.cdiv(num_samples, SAMPLES.value), triton.cdiv(num_features + 1, 16 if num_features < 16 else 32)


@triton.jit
@no_type_check  # Triton parses the source, so that no decorator that checks types may wrap the function.
def _load_vectors(x, pooled, sample, vector, column, num_samples, num_features, dim):
    """Return vectors of samples as float32. `sample`, `vector` and `column` are broadcast to a tile."""
    column = column + tl.zeros_like(vector) + tl.zeros_like(sample)
    inside = (column < dim) & (sample < num_samples)
    dense = tl.load(x + sample * dim + column, mask=inside & (vector == 0), other=0.0).to(tl.float32)
    place = (sample * num_features + vector - 1) * dim + column
    sparse = tl.load(pooled + place, mask=inside & (vector > 0) & (vector <= num_features), other=0.0)
    return tl.where(vector == 0, dense, sparse)


@triton.jit(do_not_specialize=["num_samples"])
@no_type_check
def _multiply_pairs(out, x, pooled, num_samples, FEATURES: tl.constexpr, DIM: tl.constexpr):
    BLOCK: tl.constexpr = 16 if FEATURES < 16 else 32
    COLUMNS: tl.constexpr = 16 if DIM <= 16 else 64
    sample = (tl.program_id(0).to(tl.int64) * SAMPLES + tl.arange(0, SAMPLES))[:, None, None]
    line = out + sample * (DIM + FEATURES * (FEATURES + 1) // 2)
    left = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :, None]
    inner = tl.arange(0, COLUMNS)
    if tl.program_id(1) == 0:
        for first in range(0, DIM, COLUMNS):
            column = first + inner[None, None, :]
            inside = (column < DIM) & (sample < num_samples)
            tl.store(line + column, tl.load(x + sample * DIM + column, mask=inside), mask=inside)
    # Only pairs below the diagonal are stored, so that the blocks after this one are not needed.
    for other in range(tl.program_id(1) + 1):
        right = other * BLOCK + tl.arange(0, BLOCK)[None, None, :]
        products = tl.zeros([SAMPLES, BLOCK, BLOCK], dtype=tl.float32)
        for first in range(0, DIM, COLUMNS):
            column = first + inner
            rows = _load_vectors(x, pooled, sample, left, column[None, None, :], num_samples, FEATURES, DIM)
            columns = _load_vectors(x, pooled, sample, right, column[None, :, None], num_samples, FEATURES, DIM)
            products = tl.dot(rows, columns, products, input_precision="ieee")
        place = DIM + left * (left - 1) // 2 + right
        inside = (right < left) & (left <= FEATURES) & (sample < num_samples)
        tl.store(line + place, products.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_samples"])
@no_type_check
def _sum_scaled_vectors(
    x_gradient, pooled_gradient, gradient, x, pooled, num_samples, FEATURES: tl.constexpr, DIM: tl.constexpr
):
    BLOCK: tl.constexpr = 16 if FEATURES < 16 else 32
    COLUMNS: tl.constexpr = 16 if DIM <= 16 else 64
    sample = (tl.program_id(0).to(tl.int64) * SAMPLES + tl.arange(0, SAMPLES))[:, None, None]
    line = gradient + sample * (DIM + FEATURES * (FEATURES + 1) // 2)
    vector = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :, None]
    for first in range(0, DIM, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, None, :] + tl.zeros_like(vector) + tl.zeros_like(sample)
        inside = (column < DIM) & (sample < num_samples)
        sums = tl.load(line + column, mask=inside & (vector == 0), other=0.0).to(tl.float32)
        for other in range(tl.num_programs(1)):
            right = other * BLOCK + tl.arange(0, BLOCK)
            high, low = tl.maximum(vector, right[None, None, :]), tl.minimum(vector, right[None, None, :])
            is_pair = (high <= FEATURES) & (low < high) & (sample < num_samples)
            scales = tl.load(line + DIM + high * (high - 1) // 2 + low, mask=is_pair, other=0.0)
            vectors = _load_vectors(x, pooled, sample, right[None, :, None], column, num_samples, FEATURES, DIM)
            sums = tl.dot(scales.to(tl.float32), vectors, sums, input_precision="ieee")
        tl.store(x_gradient + sample * DIM + column, sums.to(x_gradient.dtype.element_ty), mask=inside & (vector == 0))
        place = (sample * FEATURES + vector - 1) * DIM + column
        tl.store(pooled_gradient + place, sums, mask=inside & (vector > 0) & (vector <= FEATURES))
