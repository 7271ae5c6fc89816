"""A world's own formula, with every number of it learned: what is left of its regret is the price of learning them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meseta.data.synth.teacher import DENSE_PRODUCTS
from meseta.data.synth.worlds import find_world
from meseta.models.layers import pooled_dims
from meseta.spec import MesetaError

MAX_ABS_INPUT = 2.5
"""Standardised dense inputs are clipped to it, as the law clips them."""


class LearnedFormula(nn.Module):
    """logit = bias + dense part + sum of main effects + sum of planted products, as docs/data_synth.md writes it.

    `model.name: meseta.train.quality.formula:LearnedFormula`. It is told which features each planted product takes, and
    which products of dense inputs there are; learned are the line and the parabola of every dense input, the weight of
    every product, and of every id its main effect (column 0 of its row) and its latent vector (columns 1 to
    latent_dim).
    """

    def __init__(
        self,
        embeddings: nn.Module,
        *,
        num_dense: int,
        labels: Sequence[str],
        seed: int,
        world: str = "pairs",
        main_scale: float = 0.1,
        latent_scale: float = 1.0,
    ) -> None:
        """For a dataset of a `world`, whose columns are named as `meseta prepare` names them.

        Args:
            embeddings: the tables, of 1 + latent_dim columns.
            num_dense: dense inputs, 13.
            labels: one.
            seed: unused, since all of its own begins at 0 or 1.
            world: the name of the law.
            main_scale: factor on main effects, so that one initial scale and one rate of rows do for both.
            latent_scale: factor on latent vectors.

        Raises MesetaError for an unknown world, tables of another width, and columns that are not a world's.
        """
        super().__init__()
        law = find_world(world)
        dims = pooled_dims("LearnedFormula", embeddings)
        width = 1 + law.latent_dim
        if set(dims.values()) != {width}:
            raise MesetaError(
                f"LearnedFormula: rows of world {world!r} have {width} numbers, a main effect and {law.latent_dim} of "
                f"its latent vector; set model.embedding_dim to {width}"
            )
        places = {name: place for place, name in enumerate(dims)}
        missing = [f"cat_{f}" for f in law.planted_features if f"cat_{f}" not in places]
        num_needed = 1 + max(max(pair) for pair in DENSE_PRODUCTS)
        if missing or num_dense < num_needed or len(labels) != 1:
            raise MesetaError(
                f"LearnedFormula: the data are not those of world {world!r}, which have the features "
                f"{', '.join(missing) or 'cat_0 to cat_25'}, 13 dense inputs and one label"
            )
        self.embeddings = embeddings
        self.num_features, self.width = len(dims), width
        self.main_scale, self.latent_scale = main_scale, latent_scale
        self.bias = nn.Parameter(torch.zeros(()))
        self.line = nn.Parameter(torch.zeros(num_dense))
        self.parabola = nn.Parameter(torch.zeros(num_dense))
        self.dense_products = nn.Parameter(torch.zeros(len(DENSE_PRODUCTS)))
        self.planted = nn.Parameter(torch.tensor([float(product.sign) for product in law.planted]))
        self._factors = [[places[f"cat_{f}"] for f in product.features] for product in law.planted]

    def score(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """Logits [B] of dense inputs [B, num_dense] and rows side by side [B, num_features * width]."""
        x = dense.to(pooled.dtype).clamp(-MAX_ABS_INPUT, MAX_ABS_INPUT)
        rows = pooled.reshape(len(pooled), self.num_features, self.width)
        crossed = torch.stack([x[:, a] * x[:, b] for a, b in DENSE_PRODUCTS], dim=1)
        dense_part = (x * (self.line + self.parabola * x)).sum(1) + (crossed * self.dense_products).sum(1)
        main_part = self.main_scale * rows[:, :, 0].sum(1)
        latents = self.latent_scale * rows[:, :, 1:]
        products = torch.stack([math.prod(latents[:, f] for f in fs[1:]) * latents[:, fs[0]] for fs in self._factors])
        planted_part = (self.planted[:, None] * products.sum(2)).sum(0)
        return self.bias + dense_part + main_part + planted_part
