"""Replicated rows: local lookups, and gradients that are summed over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from zlib import crc32

import torch
from torch import Tensor

from meseta.comm import PendingCollective, World
from meseta.comm.sums import SumCodec, round_up_to_blocks
from meseta.embedding.input_dist import OwnedIds
from meseta.embedding.sharded_lookup import ShardedLookup
from meseta.embedding.update import FusedShards, group_shards, ids_by_table, lookup_penalty
from meseta.ops.common import DTYPE_CODES, device_constant
from meseta.ops.row_program.optimizer import Hyper, RowOptimizer, RowState, Value, Values, compute_dtype, row_state
from meseta.ops.row_update import Bags, FeatureGradient, TableRows, UpdateGroup, row_update
from meseta.sparse.shapes import Float
from meseta.spec import COLUMN_BLOCK, Plan, Shard, TableSpec
from meseta.storage import TableStorage


def _init_rank_count(weight: Tensor) -> RowState:
    return {"ranks": row_state(weight)}


def _add_gradient(rows: Value, gradient: Value, state: Values, stats: Values, hyper: Hyper) -> tuple[Value, Values]:
    return rows + gradient, {"ranks": state["ranks"] + 1}


MakeSumCodec = Callable[[int], SumCodec]
"""Function that returns the codec of inter-host sums for a number of elements in this step."""
SUM_OPTIMIZER = RowOptimizer(name="sum", init=_init_rank_count, update=_add_gradient)
"""Row optimizer that adds gradients to the rows, and counts the ranks that touched each row."""


@dataclass(frozen=True)
class ReplicaGradients:
    """Gradients of all replicated rows, summed over the samples of a rank and then over ranks."""

    buffer: Tensor
    """Buffer with the gradients of all rows, then the number of ranks that touched each row. It is reused in each
    step."""
    gradients: list[Tensor]
    """View [rows, D] of `buffer` for each table."""
    rank_counts: list[Tensor]
    """View [rows] of `buffer` with the number of ranks for each table."""
    group: UpdateGroup


class ReplicatedRows:
    """Update of replicated rows, which are whole tables or the hot rows of tables."""

    def __init__(
        self, lookups: Sequence[ShardedLookup], shards: Sequence[TableStorage], plan: Plan, world: World
    ) -> None:
        """Create the update, given the lookups of all feature groups and all shards of this rank."""
        self.world = world
        self._lookups = lookups
        shards_by_table = {s.shard.table: s for s in shards if plan[s.shard.table].is_replica(s.shard)}
        table_names = dict.fromkeys(route.shard.table for look in lookups for route in look.routing.replicated)
        self._trained_shards = [
            shards_by_table[table] for table in table_names if shards_by_table[table].spec.optimizer.name != "frozen"
        ]
        self.has_trained_tables = bool(self._trained_shards)
        self._fused_shards: tuple[FusedShards, ...] = ()
        self.selects_on_device = world.device.type == "cuda" and all(
            s.dtype in DTYPE_CODES for s in self._trained_shards
        )
        """Whether kernels skip untouched rows. Otherwise the host counts the touched rows."""

    def start_update(
        self, replicated: OwnedIds, gradients: Sequence[Tensor], share: float, make_coding: MakeSumCodec | None
    ) -> PendingCollective:
        """Add the gradients of this rank's samples, weighted by `share`, and start to sum them over ranks.

        `replicated` and `gradients` are those of the groups with replicated rows, group by group.
        """
        sums = self._gradients
        sums.buffer.zero_()
        row_update(sums.group, 1.0, 1, replicated.bags, gradients)
        # The counts of ranks at the end of the buffer are not weighted.
        sums.buffer[: -sum(rank_counts.numel() for rank_counts in sums.rank_counts)] *= share
        self._add_penalties(sums, replicated.bags)
        if make_coding is None:
            return self.world.start_all_reduce(sums.buffer, "replicas")
        coding = make_coding(sum(whole.numel() for whole in self._padded_gradients))
        if coding.codec.scale_bytes:
            coding = replace(coding, block_ids=self._block_ids)
        return self.world.start_all_reduce(self._pad(sums), "replicas", coding)

    def _add_penalties(self, sums: ReplicaGradients, bags: Bags) -> None:
        penalised = [shard.spec.optimizer.stepped_rows == "looked_up" for shard in self._trained_shards]
        if not any(penalised) or not bags.num_samples:
            return
        looked_up = ids_by_table(sums.group.features, bags, len(self._trained_shards))
        for index in (index for index, has in enumerate(penalised) if has):
            weight = self._weights[index]
            rows, penalty = lookup_penalty(self._trained_shards[index].spec.optimizer, weight, looked_up[index])
            sums.gradients[index][rows] += penalty

    @cached_property
    def _padded_gradients(self) -> list[Tensor]:
        """Views [rows, columns rounded up to blocks] of a buffer for each table. The counts of ranks follow."""
        sums = self._gradients
        widths = [round_up_to_blocks(gradient.shape[1]) for gradient in sums.gradients]
        sizes = [gradient.shape[0] * width for gradient, width in zip(sums.gradients, widths, strict=True)]
        num_ranks = sum(rank_counts.numel() for rank_counts in sums.rank_counts)
        self._padded_buffer = (
            sums.buffer
            if sum(sizes) + num_ranks == sums.buffer.numel()
            else sums.buffer.new_zeros(sum(sizes) + num_ranks)
        )
        pieces = self._padded_buffer[: sum(sizes)].split(sizes)
        return [piece.view(-1, width) for piece, width in zip(pieces, widths, strict=True)]

    @cached_property
    def _block_ids(self) -> Tensor:
        """Number of each block in the key of stochastic rounding. It combines the table name and the index in the
        table."""
        numbers = []
        for shard, whole in zip(self._trained_shards, self._padded_gradients, strict=True):
            first = (crc32(shard.spec.name.encode()) & 0x7FFF) << 48
            numbers.append(first + torch.arange(whole.numel() // COLUMN_BLOCK, device=whole.device))
        return torch.cat(numbers)

    def _pad(self, sums: ReplicaGradients) -> Tensor:
        whole = self._padded_gradients
        if self._padded_buffer is not sums.buffer:
            for gradient, blocks in zip(sums.gradients, whole, strict=True):
                blocks[:, : gradient.shape[1]] = gradient
            num_ranks = sum(rank_counts.numel() for rank_counts in sums.rank_counts)
            self._padded_buffer[-num_ranks:] = sums.buffer[-num_ranks:]
        return self._padded_buffer

    def _unpad(self, received: Tensor, sums: ReplicaGradients) -> None:
        if received is sums.buffer:
            return
        for gradient, blocks in zip(sums.gradients, self._padded_gradients, strict=True):
            gradient.copy_(blocks[:, : gradient.shape[1]])
        num_ranks = sum(rank_counts.numel() for rank_counts in sums.rank_counts)
        sums.buffer[-num_ranks:] = received[-num_ranks:]

    def finish_sum(self, pending: PendingCollective) -> list[Tensor]:
        """Wait for the sums over all ranks, and return the gradients [rows, D] of each table."""
        self._unpad(pending.wait(), self._gradients)
        return self._gradients.gradients

    def update(
        self,
        lr: Callable[[TableSpec], float],
        step: int,
        found_inf: Float[Tensor, ""] | None = None,
        factor: float = 1.0,
    ) -> None:
        """Update replicas equally by the sums over all ranks times `factor`, unless `found_inf` is nonzero."""
        sums = self._gradients
        if factor != 1.0:
            torch._foreach_mul_(sums.gradients, factor)
        for shard, rank_counts in zip(self._trained_shards, sums.rank_counts, strict=True):
            # These optimizers update untouched rows too.
            if shard.spec.optimizer.stepped_rows == "all":
                rank_counts.fill_(1)
        bags, gradients = self._touched_rows(sums)
        for fused in self._fused_shards:
            row_update(fused.group, lr(fused.spec), step, bags, gradients, found_inf)

    def _touched_rows(self, sums: ReplicaGradients) -> tuple[Bags, list[Tensor]]:
        first_rows = list(accumulate((rank_counts.numel() for rank_counts in sums.rank_counts), initial=0))
        if self.selects_on_device:
            # Kernels skip ids of -1, so the host need not wait for the number of touched rows.
            each = [torch.arange(rank_counts.numel(), device=rank_counts.device) for rank_counts in sums.rank_counts]
            marked = [
                torch.where(rank_counts > 0, rows, -1) for rank_counts, rows in zip(sums.rank_counts, each, strict=True)
            ]
            bounds = device_constant(tuple(first_rows), sums.buffer.device)
            return Bags(torch.cat(marked), bounds, 1), sums.gradients
        touched = torch.cat(sums.rank_counts).nonzero().squeeze(1)
        bounds = torch.searchsorted(touched, torch.tensor(first_rows, device=touched.device))
        stops = bounds.tolist()
        rows = [touched[a:b] - first for (a, b), first in zip(pairwise(stops), first_rows, strict=False)]
        gradients = [total[touched_rows] for total, touched_rows in zip(sums.gradients, rows, strict=True)]
        return Bags(torch.cat(rows), bounds, 1), gradients

    def bind_rows(self, rows: Mapping[Shard, TableRows]) -> None:
        """Update the rows of these shards from now on. The gradients of a table are one matrix, with one row per id."""
        places = [FeatureGradient(index, index, index, per_id=True) for index in range(len(self._trained_shards))]
        shard_rows = [rows[shard.shard] for shard in self._trained_shards]
        self._weights = [table_rows.weight for table_rows in shard_rows]
        self._fused_shards = group_shards(self._trained_shards, shard_rows, places)

    @cached_property
    def _gradients(self) -> ReplicaGradients:
        shapes = [(shard.shard.num_rows, shard.shard.num_columns) for shard in self._trained_shards]
        sizes = [*(rows * columns for rows, columns in shapes), *(rows for rows, _ in shapes)]
        dtype = compute_dtype(self._trained_shards[0].dtype)
        buffer = torch.zeros(sum(sizes), dtype=dtype, device=self.world.device)
        pieces = buffer.split(sizes)
        gradients = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=False)]
        ranks = list(pieces[len(shapes) :])
        group = UpdateGroup(
            optimizer=SUM_OPTIMIZER,
            tables=tuple(TableRows(total, {"ranks": counts}) for total, counts in zip(gradients, ranks, strict=True)),
            embedding_dims=tuple(shape[1] for shape in shapes),
            features=self._gradient_layout,
        )
        return ReplicaGradients(buffer, gradients, ranks, group)

    @property
    def _gradient_layout(self) -> tuple[FeatureGradient, ...]:
        """Position of the gradients in the arguments of `start_update`, ordered by feature as in one process."""
        tables = {shard.spec.name: index for index, shard in enumerate(self._trained_shards)}
        places: dict[int, FeatureGradient] = {}
        position = matrix = 0
        for look in self._lookups:
            replicated = look.routing.replicated
            if replicated:
                places |= look.replica_gradient_layout(tables, position, matrix)
                position += len(replicated)
                matrix += 1 + len(replicated) - len(look.routing.pooled_replicated)
        return tuple(places[feature] for feature in sorted(places))
