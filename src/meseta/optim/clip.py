"""Gradient clipping, bitwise identical for any number of threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from meseta.spec import MesetaError

NORM_EPSILON = 1e-6
"""Added to a norm before division, as in torch.nn.utils.clip_grad_norm_."""
CHUNK_ELEMENTS = 4096
"""Number of elements per norm. Torch computes such a norm in one thread."""


SumOverRanks = Callable[[float], float]
"""Function that sums a number over the ranks that hold shards of tensors. All ranks get bitwise identical results."""


def to_local(tensor: Tensor) -> Tensor:
    """Return the local shard of a sharded tensor, or the tensor itself. Shares its memory."""
    return cast(Any, tensor).to_local() if hasattr(tensor, "to_local") else tensor


def global_norm(tensors: Iterable[Tensor], sum_over_ranks: SumOverRanks | None = None) -> float:
    """Return the Euclidean norm of all tensors together, computed in float64.

    `sum_over_ranks` is used for sharded tensors. All ranks must then call this function together.
    """
    # Torch splits a sum to a scalar between its threads, which changes the last bits. Therefore torch computes only
    # norms of chunks, and their squares are added exactly.
    tensors = list(tensors)
    cut = [tensor for tensor in tensors if hasattr(tensor, "to_local")]
    square = _sum_of_squares(tensor for tensor in tensors if not hasattr(tensor, "to_local"))
    if sum_over_ranks is not None and cut:
        square += sum_over_ranks(_sum_of_squares(map(to_local, cut)))
    return math.sqrt(square)


def rows_norm(matrices: Iterable[Tensor]) -> float:
    """Return the Euclidean norm of all matrices together. It does not depend on the order of rows."""
    return math.sqrt(_add_squares(matrices))


def _sum_of_squares(tensors: Iterable[Tensor]) -> float:
    def chunks() -> Iterator[Tensor]:
        for tensor in tensors:
            flat = tensor.detach().reshape(-1)
            whole = flat.numel() // CHUNK_ELEMENTS * CHUNK_ELEMENTS
            yield from (flat[:whole].view(-1, CHUNK_ELEMENTS), flat[whole:].view(1, -1))

    return _add_squares(chunks())


def _add_squares(matrices: Iterable[Tensor]) -> float:
    """Return the sum of the squares of all elements, or NaN if an element is not finite."""
    squares: list[float] = []
    for matrix in matrices:
        squares += torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float64).square().tolist()
    return math.fsum(squares) if all(map(math.isfinite, squares)) else math.nan


@dataclass(frozen=True, kw_only=True)
class GradientClipper:
    """Clipping of dense gradients, optionally with one norm that includes gradients of embedding rows.

    Values are clipped before the norm is computed.
    """

    value: float | None = None
    """Limit for each element: -value..value. `None` means no limit."""
    norm: float | None = None
    """Maximum norm of all gradients together (arXiv 1211.5063, algorithm 1). `None` means no limit."""
    includes_rows: bool = False
    """Whether row gradients are part of the norm. The gradient of a row is its sum over the batch."""
    sum_over_ranks: SumOverRanks | None = None
    """Sum for gradients that are sharded over ranks."""

    def __call__(self, parameters: Iterable[Tensor], rows: Sequence[Tensor] = ()) -> float:
        """Clip the gradients in place and return the factor applied by `norm`. The caller must scale `rows` by it.

        Replicated gradients stay identical on all ranks. Raises MesetaError, on all ranks, if `norm` is set and a
        gradient is not finite.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        local = [to_local(gradient) for gradient in gradients]
        if self.value is not None and local:
            torch._foreach_clamp_min_(local, -self.value)
            torch._foreach_clamp_max_(local, self.value)
        if self.norm is None:
            return 1.0
        norm = math.hypot(global_norm(gradients, self.sum_over_ranks), rows_norm(rows))
        if not math.isfinite(norm):
            whose, key = ("", "train") if self.includes_rows else (" of the dense part", "dense")
            raise MesetaError(
                f"the gradients{whose} are not finite, so {key}.clip_norm cannot scale them; "
                "lower the learning rates, or set dense.clip_value to limit each element"
            )
        if norm <= self.norm:
            return 1.0
        factor = self.norm / (norm + NORM_EPSILON)
        if local:
            torch._foreach_mul_(local, factor)
        return factor
