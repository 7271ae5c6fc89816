"""Dropout, batch norm and layer norm that do not depend on the number of ranks and threads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from meseta.comm import BatchSlice
from meseta.ops.common import column_sums
from meseta.ops.random_rows import random_bits, table_key
from meseta.sparse.shapes import Bool, Float, Int

DROPOUT_RESOLUTION = 1 << 16
"""Inverse of the step to which dropout rates are rounded. 32 random bits decide about two values."""
MOMENTUM = 0.1
"""Weight of the batch in running statistics, the default of torch."""
EPS = 1e-5
"""Constant that is added to variances, the default of torch."""


def dropout_mask(rate: float, seed: int, layer: str, batch: BatchSlice, width: int) -> Bool[Tensor, "B width"]:
    """Return which values of this rank's samples dropout keeps, each with probability 1 - rate up to 1 / 2^17.

    The mask depends only on seed, layer, step, position of the sample in the global batch, and column.
    """
    # Bits of Philox4x32-10, see `meseta.ops.random_rows`.
    key = _step_key(seed, layer, batch)
    first, size = batch.first_sample, batch.batch_size_per_rank[batch.world.rank]
    num_words = (width + 1) // 2
    words = random_bits(key, (first, first + size), (0, num_words), batch.world.device)
    halves = words.view(torch.int16).view(size, num_words, 4)[..., :2]  # The low 32 of 64 bits, as two numbers.
    return halves.reshape(size, 2 * num_words)[:, :width] >= _drop_threshold(rate) - DROPOUT_RESOLUTION // 2


def _step_key(seed: int, layer: str, batch: BatchSlice) -> int | Int[Tensor, ""]:
    # On a GPU the key has the same address in all steps, so that a CUDA graph can read it.
    if batch.scalars is None:
        return table_key(seed, f"dropout/{layer}/{batch.step}")
    name = ("dropout", seed, layer)
    keys = batch.scalars.view(name, torch.int64, lambda now: [table_key(seed, f"dropout/{layer}/{now.step}")])
    return keys[0]


def dropout(x: Float[Tensor, "B N"], rate: float, seed: int, layer: str, batch: BatchSlice) -> Float[Tensor, "B N"]:
    """Apply `dropout_mask`, scaled by the inverse probability (Srivastava et al., JMLR 2014, section 10). NaN stays."""
    kept = dropout_mask(rate, seed, layer, batch, x.shape[1])
    return x * (kept.to(x.dtype) * (DROPOUT_RESOLUTION / (DROPOUT_RESOLUTION - _drop_threshold(rate))))


def _drop_threshold(rate: float) -> int:
    # Number of the `DROPOUT_RESOLUTION` random numbers that drop a value, never all of them.
    return min(round(rate * DROPOUT_RESOLUTION), DROPOUT_RESOLUTION - 1)


class LayerNorm(nn.Module):
    """Layer normalization of the last dimension (arXiv 1607.06450, equation 4) with torch's eps, in parameter dtype."""

    def __init__(self, *shape: int) -> None:
        """Create the layer. `shape` is [N], or [M, N] for M vectors per sample with separate weights."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))
        self.bias = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Float[Tensor, "B *M N"]) -> Float[Tensor, "B *M N"]:
        """Normalize `x`, which ends with the dimensions of the parameters."""
        normal = _normalize(x.to(self.weight.dtype))
        if x.device.type != "cpu" or torch.compiler.is_exporting():
            return (normal * self.weight + self.bias).to(x.dtype)
        result: Tensor = _AffineFunction.apply(normal, self.weight, self.bias)
        return result.to(x.dtype)


def _normalize(x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], eps=EPS)


class _AffineFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, normal: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(normal, weight)
        return torch.addcmul(bias, normal, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        normal, weight = ctx.saved_tensors
        # Sums of whole columns do not depend on the number of threads.
        of_weight, of_bias = (
            column_sums(of_each.reshape(-1, weight.numel())).view(weight.shape)
            for of_each in (gradient * normal, gradient)
        )
        return gradient * weight, of_weight, of_bias


class SyncBatchNorm(nn.Module):
    """Batch normalization with statistics of the global batch (Ioffe and Szegedy, arXiv 1502.03167, algorithms 1 and
    2).

    Evaluation uses running statistics, which are buffers with unbiased variance as in torch.nn.BatchNorm1d. The layer
    computes in the type of the parameters.
    """

    # Each rank sends the mean and the sum of squared deviations of its samples. They are merged in float64 in the order
    # of ranks (Chan, Golub and LeVeque, 1979), and so are the two sums of the backward pass. Running statistics are
    # updated in the backward pass, so that a step with a non-finite loss does not change them.
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))
        # If set, forward passes replace the running statistics by means over batches, and count them.
        self.num_recomputed: int | None = None

    def forward(self, x: Float[Tensor, "B N"], batch: BatchSlice | None) -> Float[Tensor, "B N"]:
        """Normalize the columns of `x`. `batch` is `None` in evaluation. Collective in training."""
        if batch is None:
            scale = self.weight * torch.rsqrt(self.running_var + EPS)
            return ((x.to(scale.dtype) - self.running_mean) * scale + self.bias).to(x.dtype)
        result: Tensor = _BatchNormFunction.apply(x, self.weight, self.bias, self, batch)
        return result

    def update_running_stats(
        self, mean: Float[Tensor, " N"], unbiased: Float[Tensor, " N"], weight: float = MOMENTUM
    ) -> None:
        """Update the running statistics with those of a global batch."""
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), weight)

    def _add_recomputed(self, mean: Float[Tensor, " N"], unbiased: Float[Tensor, " N"]) -> None:
        assert self.num_recomputed is not None
        self.num_recomputed += 1
        self.update_running_stats(mean, unbiased, 1 / self.num_recomputed)


class _BatchNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, layer: SyncBatchNorm, batch: BatchSlice) -> Tensor:
        wide = x.to(weight.dtype)
        mean, squares = _global_moments(wide, batch)
        if layer.num_recomputed is not None and batch.num_samples:
            layer._add_recomputed(mean, squares / max(batch.num_samples - 1, 1))
        scale = torch.rsqrt(squares / max(batch.num_samples, 1) + EPS).to(wide.dtype)
        normal = (wide - mean.to(wide.dtype)) * scale
        ctx.save_for_backward(normal, weight * scale, mean, squares)
        ctx.layer, ctx.batch = layer, batch
        return torch.addcmul(bias, normal, weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        normal, scale, mean, squares = ctx.saved_tensors
        batch: BatchSlice = ctx.batch
        wide = gradient.to(normal.dtype)
        sums = torch.stack([column_sums(wide), column_sums(wide * normal)])
        # The incoming gradient is that of the local mean of the loss. `local_share` scales it to the global mean. The
        # result is scaled back to the local mean.
        share = batch.local_share
        every = batch.world.all_gather(sums.double() * share, "gradients of batch norm")
        total = every[0].clone()
        for of_rank in every[1:]:
            total += of_rank
        per_sample = (total / (max(batch.num_samples, 1) * (share or 1.0))).to(normal.dtype)
        gradient_x = scale * (wide - per_sample[0] - normal * per_sample[1])
        if batch.num_samples:
            ctx.layer.update_running_stats(mean, squares / max(batch.num_samples - 1, 1))
        return gradient_x.to(gradient.dtype), sums[1], sums[0], None, None


def _global_moments(x: Tensor, batch: BatchSlice) -> tuple[Tensor, Tensor]:
    mean = column_sums(x) / max(len(x), 1)
    squares = column_sums((x - mean).square_())
    every = batch.world.all_gather(torch.stack([mean, squares]).double(), "batch norm")
    mean, squares, count = every.new_zeros(x.shape[1]), every.new_zeros(x.shape[1]), 0
    for size, (other_mean, other_squares) in zip(batch.batch_size_per_rank, every, strict=True):
        if size:
            count += size
            away = other_mean - mean
            mean = mean + away * (size / count)
            squares = squares + other_squares + away.square() * ((count - size) * size / count)
    return mean, squares
