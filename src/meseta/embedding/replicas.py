"""Tables that every rank holds whole: looked up at home, their gradients added over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from zlib import crc32

import torch
from torch import Tensor

from meseta.comm import PendingCollective, World
from meseta.comm.sum_codec import SumCodec, round_up_to_blocks
from meseta.embedding.input_dist import OwnedIds
from meseta.embedding.sharded_lookup import ShardedLookup
from meseta.embedding.update import FusedShards, group_shards, ids_by_table, lookup_penalty
from meseta.jagged.shapes import Float
from meseta.ops.device_constants import device_constant
from meseta.ops.row_program.optimizer import Hyper, RowOptimizer, RowState, Value, Values, compute_dtype, row_state
from meseta.ops.row_update import Bags, FeatureGradient, TableRows, UpdateGroup, row_update
from meseta.ops.tables import DTYPE_CODES
from meseta.spec import COLUMN_BLOCK, Plan, Shard, TableSpec
from meseta.storage import TableStorage


def _init_rank_count(weight: Tensor) -> RowState:
    return {"ranks": row_state(weight)}


def _add_gradient(rows: Value, gradient: Value, state: Values, stats: Values, hyper: Hyper) -> tuple[Value, Values]:
    return rows + gradient, {"ranks": state["ranks"] + 1}


MakeSumCodec = Callable[[int], SumCodec]
"""How so many numbers cross hosts in this step."""
SUM_OPTIMIZER = RowOptimizer(name="sum", init=_init_rank_count, update=_add_gradient)
"""Adds gradients up instead of learning, and counts the ranks whose batches have the row."""


@dataclass(frozen=True)
class ReplicaGradients:
    """Gradients of replicas, added over the samples of one rank and then over ranks, in one buffer."""

    buffer: Tensor
    """[gradients of all rows | ranks that touched each]; kept from step to step."""
    gradients: list[Tensor]
    """[rows, D] of each table."""
    rank_counts: list[Tensor]
    """[rows] of each table."""
    group: UpdateGroup
    """Adds to them."""


class ReplicatedRows:
    """The step of the rows that every rank holds: whole tables, and the hot rows of others."""

    def __init__(
        self, lookups: Sequence[ShardedLookup], shards: Sequence[TableStorage], plan: Plan, world: World
    ) -> None:
        """`shards` are all of this rank."""
        self.world = world
        self._lookups = lookups
        held = {s.shard.table: s for s in shards if plan[s.shard.table].is_replica(s.shard)}
        read = dict.fromkeys(route.shard.table for look in lookups for route in look.routing.replicated)
        self._trained_shards = [held[table] for table in read if held[table].spec.optimizer.name != "frozen"]
        self._fused_shards: tuple[FusedShards, ...] = ()
        self.selects_on_device = world.device.type == "cuda" and all(
            s.dtype in DTYPE_CODES for s in self._trained_shards
        )
        """Whether the kernels themselves leave out the rows that nobody has touched; else the host counts these."""

    @property
    def has_trained_tables(self) -> bool:
        """Whether a table is replicated that is not frozen."""
        return bool(self._trained_shards)

    def start_update(
        self, replicated: OwnedIds, gradients: Sequence[Tensor], share: float, make_coding: MakeSumCodec | None
    ) -> PendingCollective:
        """Add up what each row gets from this rank's samples, times `share`, and begin to add over ranks; `replicated`
        and `gradients` are of the groups that read replicas, one after the other."""
        sums = self._gradients
        sums.buffer.zero_()
        row_update(sums.group, 1.0, 1, replicated.bags, gradients)
        sums.buffer[: -sum(own.numel() for own in sums.rank_counts)] *= share
        self._add_penalties(sums, replicated.bags)
        if make_coding is None:
            return self.world.start_all_reduce(sums.buffer, "replicas")
        coding = make_coding(sum(whole.numel() for whole in self._padded_gradients))
        if coding.codec.scale_bytes:
            coding = replace(coding, block_ids=self._block_ids)
        return self.world.start_all_reduce(self._pad(sums), "replicas", coding)

    def _add_penalties(self, sums: ReplicaGradients, bags: Bags) -> None:
        """Add those of lookups, of which each rank knows its own."""
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
        """[rows, whole blocks] of each table, one behind the other in a buffer that ends with the ranks."""
        sums = self._gradients
        widths = [round_up_to_blocks(gradient.shape[1]) for gradient in sums.gradients]
        sizes = [gradient.shape[0] * width for gradient, width in zip(sums.gradients, widths, strict=True)]
        num_ranks = sum(own.numel() for own in sums.rank_counts)
        self._padded_buffer = (
            sums.buffer
            if sum(sizes) + num_ranks == sums.buffer.numel()
            else sums.buffer.new_zeros(sum(sizes) + num_ranks)
        )
        pieces = self._padded_buffer[: sum(sizes)].split(sizes)
        return [piece.view(-1, width) for piece, width in zip(pieces, widths, strict=True)]

    @cached_property
    def _block_ids(self) -> Tensor:
        """What the blocks of each table are drawn by: its name, and their place in it."""
        numbers = []
        for held, whole in zip(self._trained_shards, self._padded_gradients, strict=True):
            first = (crc32(held.spec.name.encode()) & 0x7FFF) << 48
            numbers.append(first + torch.arange(whole.numel() // COLUMN_BLOCK, device=whole.device))
        return torch.cat(numbers)

    def _pad(self, sums: ReplicaGradients) -> Tensor:
        """The buffer with the columns of each row rounded up to whole blocks."""
        whole = self._padded_gradients
        if self._padded_buffer is not sums.buffer:
            for gradient, blocks in zip(sums.gradients, whole, strict=True):
                blocks[:, : gradient.shape[1]] = gradient
            num_ranks = sum(own.numel() for own in sums.rank_counts)
            self._padded_buffer[-num_ranks:] = sums.buffer[-num_ranks:]
        return self._padded_buffer

    def _unpad(self, received: Tensor, sums: ReplicaGradients) -> None:
        """Columns of whole blocks, where they were added."""
        if received is sums.buffer:
            return
        for gradient, blocks in zip(sums.gradients, self._padded_gradients, strict=True):
            gradient.copy_(blocks[:, : gradient.shape[1]])
        num_ranks = sum(own.numel() for own in sums.rank_counts)
        sums.buffer[-num_ranks:] = received[-num_ranks:]

    def finish_update(
        self,
        pending: PendingCollective | None,
        lr: Callable[[TableSpec], float],
        step: int,
        found_inf: Float[Tensor, ""] | None = None,
    ) -> None:
        """Wait for the sums of all ranks, and step each replica alike; none where `found_inf` is not 0."""
        if pending is None:
            return
        sums = self._gradients
        self._unpad(pending.wait(), sums)
        for shard, own in zip(self._trained_shards, sums.rank_counts, strict=True):
            if shard.spec.optimizer.stepped_rows == "all":
                own.fill_(1)
        bags, gradients = self._touched_rows(sums)
        for fused in self._fused_shards:
            row_update(fused.group, lr(fused.spec), step, bags, gradients, found_inf)

    def _touched_rows(self, sums: ReplicaGradients) -> tuple[Bags, list[Tensor]]:
        """Rows of each table that a rank has touched, as one sample has them, and what each gets."""
        first_rows = list(accumulate((own.numel() for own in sums.rank_counts), initial=0))
        if self.selects_on_device:
            each = [torch.arange(own.numel(), device=own.device) for own in sums.rank_counts]
            marked = [torch.where(own > 0, rows, -1) for own, rows in zip(sums.rank_counts, each, strict=True)]
            bounds = device_constant(tuple(first_rows), sums.buffer.device)
            return Bags(torch.cat(marked), bounds, 1), sums.gradients
        touched = torch.cat(sums.rank_counts).nonzero().squeeze(1)
        bounds = torch.searchsorted(touched, torch.tensor(first_rows, device=touched.device))
        stops = bounds.tolist()
        rows = [touched[a:b] - first for (a, b), first in zip(pairwise(stops), first_rows, strict=False)]
        gradients = [total[own] for total, own in zip(sums.gradients, rows, strict=True)]
        return Bags(torch.cat(rows), bounds, 1), gradients

    def bind_rows(self, rows: Mapping[Shard, TableRows]) -> None:
        """Step the rows of these shards from now on; what each touched row gets is one row of its table's matrix."""
        places = [FeatureGradient(index, index, index, per_id=True) for index in range(len(self._trained_shards))]
        lent = [rows[held.shard] for held in self._trained_shards]
        self._weights = [own.weight for own in lent]
        """Of each table that learns."""
        self._fused_shards = group_shards(self._trained_shards, lent, places)

    @cached_property
    def _gradients(self) -> ReplicaGradients:
        shapes = [(held.shard.num_rows, held.shard.num_columns) for held in self._trained_shards]
        sizes = [*(rows * columns for rows, columns in shapes), *(rows for rows, _ in shapes)]
        dtype = compute_dtype(self._trained_shards[0].dtype)
        buffer = torch.zeros(sum(sizes), dtype=dtype, device=self.world.device)
        pieces = buffer.split(sizes)
        gradients = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=False)]
        ranks = list(pieces[len(shapes) :])
        group = UpdateGroup(
            optimizer=SUM_OPTIMIZER,
            tables=tuple(TableRows(total, {"ranks": own}) for total, own in zip(gradients, ranks, strict=True)),
            embedding_dims=tuple(shape[1] for shape in shapes),
            features=self._gradient_layout,
        )
        return ReplicaGradients(buffer, gradients, ranks, group)

    @property
    def _gradient_layout(self) -> tuple[FeatureGradient, ...]:
        """Where gradients lie in what `start_update` is given, ordered by feature as in one process."""
        tables = {shard.spec.name: index for index, shard in enumerate(self._trained_shards)}
        found: dict[int, FeatureGradient] = {}
        position = matrix = 0
        for look in self._lookups:
            replicated = look.routing.replicated
            if replicated:
                found |= look.replica_gradient_layout(tables, position, matrix)
                position += len(replicated)
                matrix += 1 + len(replicated) - len(look.routing.pooled_replicated)
        return tuple(found[at] for at in sorted(found))
