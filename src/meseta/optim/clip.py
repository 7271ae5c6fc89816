"""Clipping of gradients, with bits that do not depend on the number of threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from meseta.spec import MesetaError

NORM_EPSILON = 1e-6
"""Added to a norm that is divided by, as torch.nn.utils.clip_grad_norm_ does."""
CHUNK_ELEMENTS = 4096
"""Numbers whose norm is taken by one thread."""


SumOverRanks = Callable[[float], float]
"""Adds a number over the ranks that hold the parts of cut tensors; the same bits on all."""


def to_local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that may be cut over ranks; the same memory."""
    return cast(Any, tensor).to_local() if hasattr(tensor, "to_local") else tensor


def global_norm(tensors: Iterable[Tensor], sum_over_ranks: SumOverRanks | None = None) -> float:
    """The Euclidean norm of all numbers of the tensors together, in float64; of tensors that are cut over ranks,
    `sum_over_ranks` adds what each rank has, and every rank calls this alike.

    torch cuts a sum to one number over its threads, and the last bits with it. Here only norms of chunks are torch's,
    and their squares are added exactly.
    """
    tensors = list(tensors)
    cut = [tensor for tensor in tensors if hasattr(tensor, "to_local")]
    square = _sum_of_squares(tensor for tensor in tensors if not hasattr(tensor, "to_local"))
    if sum_over_ranks is not None and cut:
        square += sum_over_ranks(_sum_of_squares(map(to_local, cut)))
    return math.sqrt(square)


def rows_norm(matrices: Iterable[Tensor]) -> float:
    """That of all numbers of the matrices together, whatever the order of their rows."""
    return math.sqrt(_add_squares(matrices))


def _sum_of_squares(tensors: Iterable[Tensor]) -> float:
    def chunks() -> Iterator[Tensor]:
        for tensor in tensors:
            flat = tensor.detach().reshape(-1)
            whole = flat.numel() // CHUNK_ELEMENTS * CHUNK_ELEMENTS
            yield from (flat[:whole].view(-1, CHUNK_ELEMENTS), flat[whole:].view(1, -1))

    return _add_squares(chunks())


def _add_squares(matrices: Iterable[Tensor]) -> float:
    """NaN where a number is not finite."""
    squares: list[float] = []
    for matrix in matrices:
        squares += torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float64).square().tolist()
    return math.fsum(squares) if all(map(math.isfinite, squares)) else math.nan


@dataclass(frozen=True, kw_only=True)
class GradientClipper:
    """What limits the gradients of dense parameters, and by one norm those of rows too; the value is applied before
    the norm."""

    value: float | None = None
    """Every element is limited to -value..value."""
    norm: float | None = None
    """All gradients together are scaled to this norm where theirs is larger (arXiv 1211.5063, algorithm 1)."""
    includes_rows: bool = False
    """Whether gradients of rows of tables are among them, each that of its row, summed over the batch."""
    sum_over_ranks: SumOverRanks | None = None
    """Of gradients that are cut over ranks."""

    def __call__(self, parameters: Iterable[Tensor], rows: Sequence[Tensor] = ()) -> float:
        """Limit the gradients in place; raises MesetaError where one is not finite and a norm is asked for. Returns
        what they were multiplied by, which those of `rows`, that count in the norm, are to be as well.

        Gradients that are the same on all ranks stay so, and all ranks raise alike.
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
                f"the gradients{whose} are not finite, so that {key}.clip_norm cannot scale them; "
                "lower the learning rates, or set dense.clip_value, which limits each element"
            )
        if norm <= self.norm:
            return 1.0
        factor = self.norm / (norm + NORM_EPSILON)
        if local:
            torch._foreach_mul_(local, factor)
        return factor
