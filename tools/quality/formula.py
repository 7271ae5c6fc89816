"""Model with the exact formula of a synthetic world, in which all coefficients are learned."""

# The regret that remains is the cost of learning the coefficients from a finite number of samples.

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meseta.data.synth import find_world
from meseta.embedding import EmbeddingBagCollection
from meseta.spec import MesetaError

DENSE_PRODUCTS = ((0, 4), (2, 6), (5, 12), (7, 10))
"""Pairs of dense inputs whose products are part of the formula."""
MAX_ABS_INPUT = 2.5
"""Bound to which standardized dense inputs are clipped, as in the world's own formula."""


class LearnedFormula(nn.Module):
    """logit = bias + dense part + sum of main effects + sum of planted products, as in docs/data_synth.md.

    Select it with `model.name: tools.quality.formula:LearnedFormula`. The model knows the features of each
    planted product and the products of dense inputs. It learns a linear and a quadratic coefficient per dense input,
    and a weight per product. For each id it learns the main effect (column 0 of its row) and the latent vector (columns
    1 to latent_dim).
    """

    def __init__(
        self,
        embeddings: EmbeddingBagCollection,
        *,
        num_dense: int,
        labels: Sequence[str],
        seed: int,
        world: str = "pairs",
        main_scale: float = 0.1,
        latent_scale: float = 1.0,
    ) -> None:
        """Create the model for a dataset of `world`, with columns named as `meseta prepare` names them.

        Raises MesetaError if the world is unknown, or tables or columns do not match the world.

        Args:
            embeddings: Tables with 1 + latent_dim columns.
            num_dense: Number of dense inputs, 13.
            labels: The single label.
            seed: Unused, because all parameters of the dense part start at constants.
            world: Name of the world.
            main_scale: Factor on main effects, so that one initial scale and one learning rate suit both parts of a
                row.
            latent_scale: Factor on latent vectors.
        """
        super().__init__()
        law = find_world(world)
        width = 1 + law.latent_dim
        widths = {table.name: table.embedding_dim for table in embeddings.tables}
        dims = {feature.name: widths[feature.table] for feature in embeddings.features}
        if set(dims.values()) != {width}:
            raise MesetaError(
                f"LearnedFormula: world {world!r} requires tables with {width} columns, for a main effect and "
                f"{law.latent_dim} latent factors; set model.embedding_dim to {width}"
            )
        places = {name: place for place, name in enumerate(dims)}
        missing = [f"cat_{f}" for f in law.planted_features if f"cat_{f}" not in places]
        num_needed = 1 + max(max(pair) for pair in DENSE_PRODUCTS)
        if missing or num_dense < num_needed or len(labels) != 1:
            raise MesetaError(
                f"LearnedFormula: data of world {world!r} must have the features "
                f"{', '.join(missing) or 'cat_0 to cat_25'}, 13 dense inputs and one label; use data of this world"
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
        """Return logits [B] from dense inputs [B, num_dense] and rows [B, num_features * width]."""
        x = dense.to(pooled.dtype).clamp(-MAX_ABS_INPUT, MAX_ABS_INPUT)
        rows = pooled.reshape(len(pooled), self.num_features, self.width)
        crossed = torch.stack([x[:, a] * x[:, b] for a, b in DENSE_PRODUCTS], dim=1)
        dense_part = (x * (self.line + self.parabola * x)).sum(1) + (crossed * self.dense_products).sum(1)
        main_part = self.main_scale * rows[:, :, 0].sum(1)
        latents = self.latent_scale * rows[:, :, 1:]
        products = torch.stack([math.prod(latents[:, f] for f in fs[1:]) * latents[:, fs[0]] for fs in self._factors])
        planted_part = (self.planted[:, None] * products.sum(2)).sum(0)
        return self.bias + dense_part + main_part + planted_part
