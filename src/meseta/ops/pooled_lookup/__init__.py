"""Look up and add the rows of every bag, all tables of a rank in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from meseta.jagged.shapes import Float, Int


def pooled_lookup(
    tables: Sequence[Tensor],
    ids: Int[Tensor, " nnz"],
    offsets: Int[Tensor, " F_times_B_plus_1"],
    bounds: Sequence[int],
    weights: Float[Tensor, " nnz"] | None = None,
    weighted: Sequence[bool] = (),
) -> Float[Tensor, "B sum_of_dims"]:
    """Sum of the rows of each bag for F features side by side; an empty bag gives zeros.

    Feature f reads `tables[f]` [R_f, D_f] and owns ids[bounds[f] : bounds[f + 1]]; bag b of feature f is
    ids[offsets[f * B + b] : offsets[f * B + b + 1]], added from left to right. `weighted[f]` multiplies each row by its
    weight first. Ids must be valid rows; meseta.ops.id_policy sees to that.
    """
    num_bags = (offsets.numel() - 1) // len(tables)
    pooled = []
    for f, table in enumerate(tables):
        start, stop = bounds[f], bounds[f + 1]
        use_weights = weights is not None and bool(weighted) and weighted[f]
        pooled.append(
            functional.embedding_bag(
                ids[start:stop],
                table,
                offsets[f * num_bags : (f + 1) * num_bags + 1] - start,
                mode="sum",
                include_last_offset=True,
                per_sample_weights=weights[start:stop].to(table.dtype) if use_weights and weights is not None else None,
            )
        )
    return torch.cat(pooled, dim=1) if len(pooled) != 1 else pooled[0]
