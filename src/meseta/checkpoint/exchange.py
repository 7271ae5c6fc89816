"""Pieces of blocks travel to the ranks that write them; every size follows from the plan, so none is exchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from meseta.checkpoint.layout import ROW, BlockSchema, Column, TableLayout
from meseta.comm import World
from meseta.spec import Shard, TablePlan
from meseta.storage import TableShard

LocalShards = Mapping[Shard, TableShard]


@dataclass(frozen=True)
class Piece:
    """What one shard gives to one block: its columns of the rows first..last-1, and their state."""

    shard: Shard
    rows: tuple[int, int]
    schema: BlockSchema

    @property
    def sender(self) -> int:
        """The owner; of replicas the first, so that a checkpoint is what one rank really held."""
        return self.shard.ranks[0]

    def segments(self) -> list[tuple[Column, tuple[int, ...], int]]:
        """(column, shape, bytes rounded up to 8, so that every segment is aligned) in the order they are sent.

        What a row has one of is sent by the shard that holds its first column.
        """
        num_rows = self.rows[1] - self.rows[0]
        found: list[tuple[Column, tuple[int, ...], int]] = []
        for column in self.schema.columns:
            if column.kind == "element" or self.shard.columns[0] == 0:
                shape: tuple[int, ...] = (num_rows, self.shard.num_columns) if column.kind == "element" else (num_rows,)
                found.append((column, shape, -(-np.dtype(column.dtype).itemsize * int(np.prod(shape)) // 8) * 8))
        return found

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for _, _, num_bytes in self.segments())


@dataclass(frozen=True)
class Job:
    """One block to be written, and the pieces that it is made of, ordered by sender."""

    layout: TableLayout
    rows: tuple[int, int]
    pieces: tuple[Piece, ...]

    @staticmethod
    def of(layout: TableLayout, rows: tuple[int, int], plan: TablePlan) -> Job:
        """The block of these rows when the table lies as `plan` says."""
        pieces = []
        for shard in plan.shards:
            overlap = max(rows[0], shard.rows[0]), min(rows[1], shard.rows[1])
            if overlap[0] < overlap[1]:
                pieces.append(Piece(shard=shard, rows=overlap, schema=layout.schema))
        return Job(layout=layout, rows=rows, pieces=tuple(sorted(pieces, key=lambda piece: piece.sender)))


def pack(world: World, jobs: Sequence[Job], local: LocalShards) -> Tensor:
    """[bytes] uint8 on the world's device: this rank's pieces of all jobs, where job w goes to rank w."""
    pieces = [piece for job in jobs for piece in job.pieces if piece.sender == world.rank]
    buffer = torch.empty(sum(piece.num_bytes for piece in pieces), dtype=torch.uint8, device=world.device)
    offset = 0
    for piece in pieces:
        held = local[piece.shard]
        first = piece.rows[0] - piece.shard.rows[0]
        for column, shape, num_bytes in piece.segments():
            source = held.weight if column.name == ROW else held.state[column.name]
            _typed(buffer[offset : offset + num_bytes], column, shape).copy_(source.detach()[first : first + shape[0]])
            offset += num_bytes
    return buffer


def exchange(world: World, jobs: Sequence[Job], packed: Tensor) -> Tensor:
    """[bytes] uint8 on the CPU: the pieces of the block that this rank writes, if any, ordered as in its job."""
    send_splits = [sum(p.num_bytes for p in job.pieces if p.sender == world.rank) for job in jobs]
    receive_splits = [0] * world.size
    for piece in jobs[world.rank].pieces if world.rank < len(jobs) else ():
        receive_splits[piece.sender] += piece.num_bytes
    send_splits += [0] * (world.size - len(jobs))
    return world.all_to_all(packed, send_splits, receive_splits).wait().cpu()


def unpack(job: Job, received: Tensor) -> dict[str, np.ndarray]:
    """Columns of the block by name, [rows, D] or [rows], from the bytes of its pieces."""
    num_rows = job.rows[1] - job.rows[0]
    schema = job.layout.schema
    whole = len(job.pieces) == 1
    values = {} if whole else {c.name: np.empty(schema.shape(c, num_rows), dtype=c.dtype) for c in schema.columns}
    offset = 0
    for piece in job.pieces:
        rows = slice(piece.rows[0] - job.rows[0], piece.rows[1] - job.rows[0])
        for column, shape, num_bytes in piece.segments():
            part = _typed(received[offset : offset + num_bytes], column, shape).numpy()
            if whole:
                values[column.name] = part
            elif column.kind == "element":
                values[column.name][rows, slice(*piece.shard.columns)] = part
            else:
                values[column.name][rows] = part
            offset += num_bytes
    return values


def _typed(segment: Tensor, column: Column, shape: tuple[int, ...]) -> Tensor:
    """A view of bytes [n] as values [shape], leaving out the padding."""
    dtype: torch.dtype = getattr(torch, column.dtype)
    return segment[: dtype.itemsize * int(np.prod(shape))].view(dtype).view(shape)
