"""From upstream gradients to updated rows: coalesce, row statistics, one optimizer step per touched row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meseta.jagged.shapes import Float, Int
from meseta.ops.coalesce import BLOCK_SAMPLES, coalesce
from meseta.ops.row_optimizer import Hyper, Values, apply_update, as_values, block_sums, sum_blocks
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
    gather_stats: Callable[[list[Tensor | None]], list[Tensor | None]] = list,
    num_exchanges: int = 0,
) -> None:
    """Apply each shard's optimizer once to its touched rows, in place.

    `gather_stats` turns the statistics of this rank's shards, [n U, blocks] each for n statistics, into those of whole
    rows; it is called for each of the first `num_exchanges` stages, on every rank alike.
    """
    rows = [shard.weight.index_select(0, g.rows) for shard, g in zip(shards, gradients, strict=True)]
    states = [
        {name: value.index_select(0, g.rows) for name, value in shard.state.items()}
        for shard, g in zip(shards, gradients, strict=True)
    ]
    stats: list[Values] = [{} for _ in shards]
    for stage in range(max([num_exchanges, *(len(shard.optimizer.row_stats) for shard in shards)])):
        names: list[list[str]] = [[] for _ in shards]
        parts: list[Tensor | None] = [None] * len(shards)
        for k, shard in enumerate(shards):
            if stage < len(shard.optimizer.row_stats):
                summands = shard.optimizer.row_stats[stage](
                    rows[k], gradients[k].gradient, as_values(states[k]), stats[k], hypers[k]
                )
                names[k] = list(summands)
                parts[k] = torch.cat([block_sums(summand) for summand in summands.values()])
        for k, part in enumerate(gather_stats(parts) if stage < num_exchanges else parts):
            if part is not None:
                sums = sum_blocks(part).view(len(names[k]), -1, 1)
                stats[k] |= dict(zip(names[k], sums, strict=True))
    for k, (shard, g, hyper) in enumerate(zip(shards, gradients, hypers, strict=True)):
        new_rows, state = apply_update(shard.optimizer, rows[k], g.gradient, states[k], stats[k], hyper)
        shard.weight.index_copy_(0, g.rows, new_rows)
        for name, value in state.items():
            shard.state[name].index_copy_(0, g.rows, value)
