"""From upstream gradients to updated rows: one fused pass where rows are whole; else coalesce, statistics, update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meseta.embedding.input_dist import OwnedIds
from meseta.jagged.shapes import Float, Int
from meseta.ops.coalesce import BLOCK_SAMPLES, coalesce
from meseta.ops.device_constants import device_constant
from meseta.ops.row_program.optimizer import Hyper, compute_dtype, sum_across_blocks
from meseta.ops.row_update import Bags, FeatureGradient, TableRows, UpdateGroup, row_update
from meseta.ops.row_update.staged import TouchedRows, stage_block_sums, update_with_stats
from meseta.spec import OptimizerSpec, TableSpec
from meseta.storage import TableStorage


@dataclass(frozen=True)
class FusedShards:
    """Shards of one row optimizer that are stepped by one operator call."""

    spec: TableSpec
    """One of their tables; all have its optimizer."""
    group: UpdateGroup


def group_shards(
    shards: Sequence[TableStorage], rows: Sequence[TableRows], features: Sequence[FeatureGradient]
) -> tuple[FusedShards, ...]:
    """The shards that `features` name by index, by their row optimizer; those of optimizer 'frozen' are left out.
    `rows` are those that each has lent.

    Contributions will be added in the order of `features`. Shards must hold whole rows, or have an optimizer without
    statistics of rows.
    """
    members: dict[OptimizerSpec, list[int]] = {}
    for index in dict.fromkeys(feature.table for feature in features):
        if shards[index].spec.optimizer.name != "frozen":
            members.setdefault(shards[index].spec.optimizer, []).append(index)
    groups = []
    for indices in members.values():
        number = {index: n for n, index in enumerate(indices)}
        group = UpdateGroup(
            optimizer=shards[indices[0]].optimizer,
            tables=tuple(rows[index] for index in indices),
            embedding_dims=tuple(shards[index].spec.embedding_dim for index in indices),
            features=tuple(replace(f, table=number[f.table]) for f in features if f.table in number),
        )
        groups.append(FusedShards(spec=shards[indices[0]].spec, group=group))
    return tuple(groups)


def step_shards(
    fused: FusedShards,
    lr: float,
    step: int,
    bags: Bags,
    gradients: Sequence[Tensor],
    found_inf: Float[Tensor, ""] | None = None,
) -> None:
    """Step the rows that the bags touch, or every row where the optimizer asks for it; none where `found_inf` is not
    0."""
    group, moved, optimizer = fused.group, list(gradients), fused.spec.optimizer
    if optimizer.stepped_rows == "looked_up" and bags.num_samples:
        looked_up = ids_by_table(group.features, bags, len(group.tables))
        more = [
            lookup_penalty(optimizer, table.weight, ids) for table, ids in zip(group.tables, looked_up, strict=True)
        ]
        sizes = torch.tensor([rows.numel() for rows, _ in more], device=bags.offsets.device)
        group, bags, moved = _append_rows(group, bags, moved, more, sizes)
    if optimizer.stepped_rows == "all" and bags.num_samples:
        sizes = device_constant(tuple(table.weight.shape[0] for table in group.tables), bags.offsets.device)
        group, bags, moved = _append_rows(group, bags, moved, [_all_rows(t, moved[0]) for t in group.tables], sizes)
    row_update(group, lr, step, bags, moved, found_inf)


def ids_by_table(features: Sequence[FeatureGradient], bags: Bags, num_tables: int) -> list[Int[Tensor, " nnz"]]:
    """What the features of each table look up."""
    bounds = bags.offsets[:: bags.num_samples].tolist()
    ids: list[list[Tensor]] = [[] for _ in range(num_tables)]
    for feature in features:
        ids[feature.table].append(bags.ids[bounds[feature.position] : bounds[feature.position + 1]])
    return [torch.cat(own) for own in ids]


def lookup_penalty(
    optimizer: OptimizerSpec, weight: Float[Tensor, "rows D"], ids: Int[Tensor, " nnz"]
) -> tuple[Int[Tensor, " U"], Float[Tensor, "U D"]]:
    """The rows that `ids` look up, ascending, and the gradient of their penalties: that of
    weight_decay / 2 * |row|^2 + l1 * (sum of |row|), times the lookups of the row."""
    rows, counts = torch.unique(ids, return_counts=True)
    looked_up = weight[rows].to(compute_dtype(weight.dtype))
    each = optimizer.weight_decay * looked_up + optimizer.l1 * looked_up.sign()
    return rows, each * counts[:, None]


def _all_rows(table: TableRows, like: Tensor) -> tuple[Tensor, Tensor]:
    """All rows of a shard, and zeros: one row that is read again and again."""
    num_rows = table.weight.shape[0]
    return torch.arange(num_rows, device=like.device), like.new_zeros(1, table.weight.shape[1]).expand(num_rows, -1)


def _append_rows(
    group: UpdateGroup, bags: Bags, gradients: list[Tensor], more: Sequence[tuple[Tensor, Tensor]], sizes: Tensor
) -> tuple[UpdateGroup, Bags, list[Tensor]]:
    """The same with one more feature per table, whose first sample has rows `more` of it, each with its gradient;
    `sizes` says how many.

    They come last, so the sums of other contributions keep their bits.
    """
    num_features = (bags.offsets.numel() - 1) // bags.num_samples
    ends = bags.ids.numel() + sizes.cumsum(0)
    places = [
        FeatureGradient(num_features + table, table, len(gradients) + table, per_id=True)
        for table in range(len(group.tables))
    ]
    weights = bags.weights
    if weights is not None:
        weights = torch.cat([weights, weights.new_ones(sum(rows.numel() for rows, _ in more))])
    offsets = torch.cat([bags.offsets, ends.to(bags.offsets.dtype).repeat_interleave(bags.num_samples)])
    ids = torch.cat([bags.ids, *(rows.to(bags.ids.dtype) for rows, _ in more)])
    group = replace(group, features=(*group.features, *places))
    return group, Bags(ids, offsets, bags.num_samples, weights), [*gradients, *(gradient for _, gradient in more)]


def zero_contribution(shard: TableStorage) -> GradientContribution:
    """Zeros for all rows of a shard, so that every one of them is stepped; listed behind all other contributions."""
    device, num_rows, width = shard.device, shard.shard.num_rows, shard.shard.num_columns
    nothing = torch.zeros(num_rows, dtype=torch.int64, device=device)
    zeros = torch.zeros(1, width, dtype=compute_dtype(shard.dtype), device=device)
    return GradientContribution(torch.arange(num_rows, device=device), nothing, zeros, nothing)


def penalty_contribution(
    shard: TableStorage, rows: TableRows, parts: Sequence[GradientContribution]
) -> GradientContribution:
    """What the penalties of each lookup of `parts` add to the gradient of a shard; listed behind them."""
    looked_up, penalty = lookup_penalty(shard.spec.optimizer, rows.weight, torch.cat([part.ids for part in parts]))
    source = torch.arange(looked_up.numel(), device=looked_up.device)
    return GradientContribution(looked_up, torch.zeros_like(source), penalty, source)


@dataclass(frozen=True)
class GradientContribution:
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


def sample_indices(ids: Sequence[Tensor], lengths: Sequence[Tensor], num_samples: int) -> tuple[Tensor, ...]:
    """The sample of each id, for several features of `num_samples` samples each: [0, 0, 1] for lengths [2, 1].

    One call for all features, since each call of a kernel with several threads has to wake them.
    """
    if not ids:
        return ()
    samples = torch.arange(num_samples, device=ids[0].device).repeat(len(ids))
    sizes = [own.numel() for own in ids]
    return torch.repeat_interleave(samples, torch.cat(list(lengths)), output_size=sum(sizes)).split(sizes)


def sum_contributions(shard: TableStorage, parts: Sequence[GradientContribution], num_samples: int) -> RowGradient:
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
            p.gradient.new_ones(p.ids.numel(), dtype=shard.dtype) if p.scale is None else p.scale.to(shard.dtype)
            for p in parts
        ]
        scale = torch.cat(ones)
    gradient = torch.cat([part.gradient for part in parts])
    return RowGradient(*coalesce(torch.cat(ids), torch.cat(sources), torch.cat(blocks), gradient, scale))


def sum_gradients(
    shards: Sequence[TableStorage],
    rows: Sequence[TableRows],
    places: Sequence[FeatureGradient],
    owned: OwnedIds,
    gradients: Sequence[Tensor],
) -> dict[int, RowGradient]:
    """What each row gets, of the shards that `places` name by index, with what their optimizers ask for beside: every
    row, or the penalties of lookups. `rows` are those that each shard has lent."""
    num_samples, ids = owned.bags.num_samples, owned.ids_by_route()
    lengths = owned.lengths.split(num_samples) if num_samples else [owned.lengths] * len(ids)
    samples, weights = sample_indices(ids, lengths, num_samples), owned.bags.weights
    parts: dict[int, list[GradientContribution]] = {}
    for at in places:
        width, k = shards[at.table].shard.num_columns, at.position
        source = torch.arange(ids[k].numel(), device=ids[k].device) if at.per_id else samples[k]
        scale = weights.split(owned.sizes)[k] if at.weighted and weights is not None else None
        gradient = gradients[at.gradient][:, at.column : at.column + width]
        parts.setdefault(at.table, []).append(GradientContribution(ids[k], samples[k], gradient, source, scale))
    for index, own in parts.items():
        if shards[index].spec.optimizer.stepped_rows == "all":
            own.append(zero_contribution(shards[index]))
        elif shards[index].spec.optimizer.stepped_rows == "looked_up":
            own.append(penalty_contribution(shards[index], rows[index], own))
    return {index: sum_contributions(shards[index], parts[index], num_samples) for index in sorted(parts)}


def update_rows(
    shards: Sequence[TableStorage],
    rows: Sequence[TableRows],
    gradients: Sequence[RowGradient],
    hypers: Sequence[Hyper],
    gather_stats: Callable[[list[Tensor | None]], list[Tensor | None]] = list,
    num_exchanges: int = 0,
    found_inf: Float[Tensor, ""] | None = None,
) -> None:
    """Apply each shard's optimizer once to its touched rows, in place, but not where `found_inf` is not 0; `rows` are
    those that each has lent.

    `gather_stats` turns the statistics of this rank's shards, [n U, blocks] each for n statistics, into those of whole
    rows; it is called for each of the first `num_exchanges` stages, on every rank alike. They are listed by row, since
    ranks may have the columns of a row in slots of other order.
    """
    touched = [
        TouchedRows(lent, g.rows, g.gradient, hyper) for lent, g, hyper in zip(rows, gradients, hypers, strict=True)
    ]
    stats = [g.gradient.new_empty(0, g.rows.numel()) for g in gradients]
    orders = [
        None if lent.row_ids is None else lent.row_ids[g.rows].argsort()
        for lent, g in zip(rows, gradients, strict=True)
    ]
    for stage in range(max([num_exchanges, *(len(shard.optimizer.row_stats) for shard in shards)])):
        sums: list[Tensor | None] = [
            stage_block_sums(shard.optimizer, stage, touched[k], stats[k])
            if stage < len(shard.optimizer.row_stats)
            else None
            for k, shard in enumerate(shards)
        ]
        of_rows = [
            own if own is None or order is None else own[:, order] for own, order in zip(sums, orders, strict=True)
        ]
        parts = [None if own is None else own.flatten(0, 1) for own in of_rows]
        for k, part in enumerate(gather_stats(parts) if stage < num_exchanges else parts):
            own = sums[k]
            if part is not None and own is not None:
                whole, order = sum_across_blocks(part).view(own.shape[:2]), orders[k]
                whole = whole if order is None else torch.empty_like(whole).index_copy_(1, order, whole)
                stats[k] = torch.cat([stats[k], whole])
    for shard, touched_rows, stat in zip(shards, touched, stats, strict=True):
        if shard.spec.optimizer.name != "frozen":
            update_with_stats(shard.optimizer, touched_rows, stat, found_inf)
