"""Correct and faulty user-defined models, named by import path in test_own_model.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meseta.models import MLP, MLPOptions, fill_glorot


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


class NeedsAFile(Plain):
    """Model that loads its weights from a missing file."""

    def __init__(self, embeddings: Any, *, num_dense: int, labels: tuple[str, ...], seed: int):
        raise FileNotFoundError("no weights.bin here")


class Uncalled(Plain):
    """Model that uses the parameters of its layer without calling it."""

    def score(self, dense: Tensor, pooled: Tensor) -> Tensor:
        x = torch.cat([dense.to(pooled.dtype), pooled], dim=1)
        return nn.functional.linear(x, self.linear.weight, self.linear.bias).squeeze(1)


class Regularised(Plain):
    """Model of the documentation page, with dropout and batch norm."""

    def __init__(self, embeddings: Any, *, num_dense: int, labels: tuple[str, ...], seed: int):
        super().__init__(embeddings, num_dense=num_dense, labels=labels, seed=seed)
        options = MLPOptions(dropout=0.2, batch_norm=True, seed=seed)
        self.layers = MLP([self.linear.in_features, 16, 8, len(labels)], relu_last=False, options=options)
        fill_glorot(self.layers, seed)

    def score(self, dense: Tensor, pooled: Tensor) -> Tensor:
        x = torch.cat([dense.to(pooled.dtype), pooled], dim=1)
        return super().score(dense, pooled) + self.layers(x, self.embeddings.batch_slice).squeeze(1)


class TwoBlocks(Plain):
    """Model whose two blocks also learn their mean prediction, as the mutual loss of FinalNet."""

    loss_terms = ("first", "second")

    def __init__(self, embeddings: Any, *, num_dense: int, labels: tuple[str, ...], seed: int):
        super().__init__(embeddings, num_dense=num_dense, labels=labels, seed=seed)
        self.blocks = nn.ModuleList(nn.Linear(self.linear.in_features, len(labels)) for _ in range(2))
        self.linear = nn.Identity()  # type: ignore[assignment]

    def both(self, dense: Tensor, pooled: Tensor) -> list[Tensor]:
        x = torch.cat([dense.to(pooled.dtype), pooled], dim=1)
        return [block(x).squeeze(1) for block in self.blocks]

    def score(self, dense: Tensor, pooled: Tensor) -> Tensor:
        return torch.stack(self.both(dense, pooled)).mean(0)

    def score_with_losses(self, dense: Tensor, pooled: Tensor, label: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        blocks = self.both(dense, pooled)
        logits = torch.stack(blocks).mean(0)
        target = logits.detach().sigmoid()
        losses = [nn.functional.binary_cross_entropy_with_logits(b, target, reduction="none") for b in blocks]
        return logits, dict(zip(self.loss_terms, losses, strict=True))


class GlobalLoss(Plain):
    """Model that also learns to match the base rate of the batch, and to rank positives above negatives."""

    global_loss_terms = ("calibration", "pairs")

    def global_losses(self, logits: Tensor, label: Tensor, weight: Tensor) -> dict[str, Tensor]:
        off = ((logits.sigmoid() - label) * weight).sum() / weight.sum()
        pairs = nn.functional.softplus(logits[None, :] - logits[:, None]) * label[:, None] * (1 - label)[None, :]
        return {"calibration": off.square(), "pairs": pairs.mean()}


class AddsRows(Plain):
    """Model that sums the rows of unpooled features itself."""

    reads_embeddings = True

    def score(self, dense: Tensor, embeddings: Any) -> Tensor:
        bags = []
        for feature in self.embeddings.features:
            rows = embeddings[feature.name]
            if feature.pooling == "none":
                sample = torch.repeat_interleave(torch.arange(len(dense)), rows.lengths)
                rows = rows.values.new_zeros(len(dense), rows.values.shape[1]).index_add(0, sample, rows.values)
            bags.append(rows)
        return super().score(dense, torch.cat(bags, dim=1))


class AsksForNumbers(Plain):
    """Model that reads its scale from a tensor."""

    def score(self, dense: Tensor, pooled: Tensor) -> Tensor:
        return super().score(dense, pooled) * max(self.linear.weight.detach().abs().max().item(), 1.0)


ONES = torch.ones(1)


class KeepsNumbers(Plain):
    """Model that reads a tensor that its module created on import."""

    def score(self, dense: Tensor, pooled: Tensor) -> Tensor:
        return super().score(dense, pooled) * ONES.item()


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


class BeforeAlone(Plain):
    """Model whose `score` does not use its `forward_dense`."""

    def forward_dense(self, dense: Tensor) -> tuple[Tensor]:
        return (dense * 2.0,)


class FormerName(Plain):
    """Model of an earlier Meseta, which called `forward_dense` `before`."""

    def before(self, dense: Tensor) -> tuple[Tensor]:
        return (dense,)


class WithBefore(Plain):
    """Model whose `score` accepts the result of `forward_dense`, or the dense inputs."""

    def forward_dense(self, dense: Tensor) -> tuple[Tensor]:
        return (dense.double(),)

    def score(self, dense: Any, pooled: Tensor) -> Tensor:
        (x,) = dense if isinstance(dense, tuple) else self.forward_dense(dense)
        return super().score(x, pooled)
