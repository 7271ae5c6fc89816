"""From upstream gradients to updated rows: coalesce, row statistics, one optimizer step per touched row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meseta.jagged.shapes import Float, Int
from meseta.ops.coalesce import BLOCK_SAMPLES, coalesce
from meseta.ops.row_optimizer import Hyper
from meseta.storage import TableShard


@dataclass(frozen=True)
class Contribution:
    """What one feature adds to the gradient of one table shard."""

    ids: Int[Tensor, " nnz"]
    """Rows of the shard, ordered by (global sample, position)."""
    sample: Int[Tensor, " nnz"]
    """Global sample of each id."""
    gradient: Float[Tensor, "G D"]
    """Upstream gradient, one row per bag or per id."""
    source: Int[Tensor, " nnz"]
    """Row of `gradient` that each id receives."""
    scale: Float[Tensor, " nnz"] | None = None
    """Weight of each id."""


@dataclass(frozen=True)
class RowGradient:
    """Gradient of the touched rows of one shard."""

    rows: Int[Tensor, " U"]
    """Touched rows, ascending."""
    gradient: Float[Tensor, "U D"]
    """Sum of all contributions."""


def samples_of(ids: Sequence[Tensor], lengths: Sequence[Tensor], num_samples: int) -> tuple[Tensor, ...]:
    """The sample of each id, for several features of `num_samples` samples each: [0, 0, 1] for lengths [2, 1].

    One call for all features, since each call of a kernel with several threads has to wake them.
    """
    if not ids:
        return ()
    samples = torch.arange(num_samples, device=ids[0].device).repeat(len(ids))
    sizes = [own.numel() for own in ids]
    return torch.repeat_interleave(samples, torch.cat(list(lengths)), output_size=sum(sizes)).split(sizes)


def sum_contributions(shard: TableShard, parts: Sequence[Contribution], num_samples: int) -> RowGradient:
    """Coalesce the contributions of all features that read a shard, in the order of the features."""
    if len(parts) == 1:
        [part] = parts
        return RowGradient(*coalesce(part.ids, part.source, part.sample // BLOCK_SAMPLES, part.gradient, part.scale))
    num_blocks = -(-num_samples // BLOCK_SAMPLES)
    ids, sources, blocks, first_row = [], [], [], 0
    for index, part in enumerate(parts):
        ids.append(part.ids)
        sources.append(part.source + first_row)
        blocks.append(part.sample // BLOCK_SAMPLES + index * num_blocks)
        first_row += part.gradient.shape[0]
    scale = None
    if any(part.scale is not None for part in parts):
        ones = [
            shard.weight.new_ones(p.ids.numel()) if p.scale is None else p.scale.to(shard.weight.dtype) for p in parts
        ]
        scale = torch.cat(ones)
    gradient = torch.cat([part.gradient for part in parts])
    return RowGradient(*coalesce(torch.cat(ids), torch.cat(sources), torch.cat(blocks), gradient, scale))


def update_rows(
    shards: Sequence[TableShard],
    gradients: Sequence[RowGradient],
    hypers: Sequence[Hyper],
    gather_stats: Callable[[list[Tensor | None]], list[Tensor | None]],
) -> None:
    """Apply each shard's optimizer once to its touched rows, in place.

    `gather_stats` turns the statistics of this rank's shards ([U, blocks] each) into those of whole rows.
    """
    stats = [
        None if shard.optimizer.row_stats is None else shard.optimizer.row_stats(g.gradient)
        for shard, g in zip(shards, gradients, strict=True)
    ]
    for shard, g, hyper, stat in zip(shards, gradients, hypers, gather_stats(stats), strict=True):
        state = {name: value.index_select(0, g.rows) for name, value in shard.state.items()}
        rows = shard.weight.index_select(0, g.rows)
        whole = None if stat is None else sum_blocks(stat)
        rows, state = shard.optimizer.update(rows, g.gradient, state, whole, hyper)
        shard.weight.index_copy_(0, g.rows, rows)
        for name, value in state.items():
            shard.state[name].index_copy_(0, g.rows, value)


def sum_blocks(stats: Float[Tensor, "U blocks"]) -> Float[Tensor, " U"]:
    """Add block statistics from left to right, so that column shards do not change the sum."""
    total = stats[:, 0]
    for block in range(1, stats.shape[1]):
        total = total + stats[:, block]
    return total
