"""Models such as users write, right and wrong; named by import path in test_own_model.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

SUM_OF_WIDTHS = 16


class Plain(nn.Module):
    """Linear in everything."""

    def __init__(self, embeddings: Any, *, num_dense: int, labels: tuple[str, ...], seed: int, scale: float = 1.0):
        super().__init__()
        self.embeddings = embeddings
        self.scale = scale
        self.seed = seed
        self.linear = nn.Linear(num_dense + sum(t.embedding_dim for t in embeddings.tables), len(labels))

    def score(self, dense: Tensor, pooled: Tensor) -> Tensor:
        return self.scale * self.linear(torch.cat([dense.to(pooled.dtype), pooled], dim=1)).squeeze(1)


class FlatForTwo(Plain):
    def score(self, dense: Tensor, pooled: Tensor) -> Tensor:
        return super().score(dense, pooled).squeeze()


class NotSqueezed(Plain):
    def score(self, dense: Tensor, pooled: Tensor) -> Tensor:
        return super().score(dense, pooled)[:, None]


class Listed(Plain):
    def score(self, dense: Tensor, pooled: Tensor) -> Any:
        return [0.0] * len(dense)


class Breaks(Plain):
    def score(self, dense: Tensor, pooled: Tensor) -> Tensor:
        return super().score(dense, pooled[:, 1:])


class Forgets(Plain):
    def __init__(self, embeddings: Any, **others: Any):
        super().__init__(embeddings, **others)
        self.embeddings = None


class NoScore(nn.Module):
    pass


class NoModule:
    pass


number = 3
