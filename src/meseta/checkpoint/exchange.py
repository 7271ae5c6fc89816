"""Pieces of blocks travel to the ranks that write them; every size follows from the plan, and of a delta from how many
rows each shard has selected of each block, which ranks tell each other once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from meseta.checkpoint.files.chain import allocate_transient
from meseta.checkpoint.files.layout import ID, BlockSchema, Column, TableLayout
from meseta.comm import World
from meseta.ops.memory import empty
from meseta.spec import MesetaError, Shard, TablePlan
from meseta.storage import SelectedRows, TableStorage, as_stored

LocalShards = Mapping[Shard, TableStorage | SelectedRows]
SelectedCounts = Mapping[Shard, Mapping[int, int]]
"""By shard and by first row of a block, how many rows of the block the shard has selected; those without any are left
out."""
ID_COLUMN = Column(name=ID, kind="row", dtype="uint32")
"""Of some rows of a block, counted from its first."""


@dataclass(frozen=True)
class ShardSlice:
    """What one shard gives to one block: its columns of the rows first..last-1, or of those that are selected, and
    their state."""

    shard: Shard
    rows: tuple[int, int]
    schema: BlockSchema
    num_rows: int
    """Of them."""
    block_start: int | None = None
    """Where rows are selected, the first row of the block, from which ids count."""

    @property
    def sender(self) -> int:
        """The owner; of replicas the first, so that a checkpoint is what one rank really held."""
        return self.shard.ranks[0]

    @cached_property
    def segments(self) -> tuple[tuple[Column, tuple[int, ...], int], ...]:
        """(column, shape, bytes rounded up to 8, so that every segment is aligned) in the order they are sent.

        What a row has one of is sent by the shard that holds its first column.
        """
        rows = self.num_rows
        found: list[tuple[Column, tuple[int, ...], int]] = []
        for column in (*([] if self.block_start is None else [ID_COLUMN]), *self.schema.columns):
            if column.kind == "element" or self.shard.columns[0] == 0:
                shape: tuple[int, ...] = (rows, self.shard.num_columns) if column.kind == "element" else (rows,)
                found.append((column, shape, -(-np.dtype(column.stored_dtype).itemsize * math.prod(shape) // 8) * 8))
        return tuple(found)

    @cached_property
    def num_bytes(self) -> int:
        """Of all segments."""
        return sum(num_bytes for _, _, num_bytes in self.segments)


@dataclass(frozen=True)
class BlockJob:
    """One block to be written, or the selected rows of one, and the pieces that it is made of, ordered by sender."""

    layout: TableLayout
    rows: tuple[int, int]
    writer: int
    """The rank that writes it. Its own pieces are not sent: it reads them where they lie."""
    slices: tuple[ShardSlice, ...]
    num_rows: int
    """That are written of the block."""

    @staticmethod
    def from_plan(
        layout: TableLayout,
        rows: tuple[int, int],
        writer: int,
        plan: TablePlan,
        selected: SelectedCounts | None = None,
    ) -> BlockJob:
        """The block of these rows when the table lies as `plan` says. A block of which all rows are selected is one
        like any other. Raises MesetaError where shards of the same rows have selected other numbers of them."""
        counts: dict[tuple[int, int], int] = {}
        pieces = []
        for shard in plan.shards:
            overlap = max(rows[0], shard.rows[0]), min(rows[1], shard.rows[1])
            if overlap[0] >= overlap[1]:
                continue
            num_rows = overlap[1] - overlap[0] if selected is None else selected[shard].get(rows[0], 0)
            if counts.setdefault(overlap, num_rows) != num_rows:
                raise MesetaError(
                    f"checkpoint: table {layout.spec.name!r}: of the rows {overlap[0]}..{overlap[1] - 1}, "
                    f"{counts[overlap]} have changed in some columns and {num_rows} in others; save whole checkpoints "
                    "(deltas 'none')"
                )
            if num_rows:
                pieces.append(ShardSlice(shard=shard, rows=overlap, schema=layout.schema, num_rows=num_rows))
        total = sum(counts.values())
        if total < rows[1] - rows[0]:
            pieces = [replace(piece, block_start=rows[0]) for piece in pieces]
        by_sender = tuple(sorted(pieces, key=lambda piece: piece.sender))
        return BlockJob(layout=layout, rows=rows, writer=writer, slices=by_sender, num_rows=total)

    @property
    def is_full(self) -> bool:
        """Whether all rows of the block are written."""
        return self.num_rows == self.rows[1] - self.rows[0]

    def slices_sent_by(self, rank: int) -> list[ShardSlice]:
        """Pieces that travel from this rank to the writer."""
        return [piece for piece in self.slices if piece.sender == rank != self.writer]


def group_into_rounds(jobs: Sequence[BlockJob], limit_bytes: int) -> list[list[BlockJob]]:
    """Consecutive jobs that are exchanged at once, ordered by writer: as many as have no more than `limit_bytes` for
    each writer and from each sender, at least one. A model of thousands of small tables would else wait for the ranks
    at every table.
    """
    found: list[list[BlockJob]] = []
    written, sent = Counter[int](), Counter[int]()
    for job in jobs:
        size = sum(piece.num_bytes for piece in job.slices)
        sends = Counter[int]()
        for piece in job.slices:
            sends[piece.sender] += piece.num_bytes if piece.sender != job.writer else 0
        is_full = written[job.writer] + size > limit_bytes and written[job.writer] > 0
        if not found or is_full or any(sent[rank] and sent[rank] + sends[rank] > limit_bytes for rank in sends):
            found.append([])
            written, sent = Counter(), Counter()
        found[-1].append(job)
        written[job.writer] += size
        sent += sends
    return [sorted(together, key=lambda job: job.writer) for together in found]


def pack(world: World, jobs: Sequence[BlockJob], local: LocalShards) -> Tensor:
    """[bytes] uint8 on the world's device: what this rank sends of all jobs, which are ordered by writer."""
    pieces = [piece for job in jobs for piece in job.slices_sent_by(world.rank)]
    buffer = empty((sum(piece.num_bytes for piece in pieces),), torch.uint8, world.device, keep=False)
    offset = 0
    for piece in pieces:
        values = _read_local(local, piece)
        for name, target in _column_views(piece, buffer[offset : offset + piece.num_bytes]).items():
            target.copy_(values[name])
        offset += piece.num_bytes
    return buffer


def exchange(world: World, jobs: Sequence[BlockJob], packed: Tensor) -> list[tuple[BlockJob, list[Tensor]]]:
    """The jobs of this rank, each with [bytes] uint8 on the CPU of every piece that other ranks send for it."""
    send_splits, receive_splits = [0] * world.size, [0] * world.size
    mine = [job for job in jobs if job.writer == world.rank]
    for job in jobs:
        send_splits[job.writer] += sum(piece.num_bytes for piece in job.slices_sent_by(world.rank))
    sent = [
        (index, piece)
        for rank in range(world.size)
        for index, job in enumerate(mine)
        for piece in job.slices_sent_by(rank)
    ]
    for _, piece in sent:
        receive_splits[piece.sender] += piece.num_bytes
    blocks = world.all_to_all(packed, send_splits, receive_splits, "checkpoint blocks", keep=False)
    received = blocks.wait().cpu()
    parts: list[list[Tensor]] = [[] for _ in mine]
    for (index, _), part in zip(sent, received.split([piece.num_bytes for _, piece in sent]), strict=True):
        parts[index].append(part)
    return list(zip(mine, parts, strict=True))


def unpack(job: BlockJob, received: Sequence[Tensor], local: LocalShards) -> dict[str, np.ndarray]:
    """Columns of the block by name, [rows, D] or [rows]; no copy where they come in one piece. Of a block of which not
    all rows are written, ids are among them."""
    schema = job.layout.schema
    columns = schema.columns if job.is_full else (ID_COLUMN, *schema.columns)
    whole = len(job.slices) == 1
    values = (
        {} if whole else {c.name: allocate_transient(schema.shape(c, job.num_rows), c.stored_dtype) for c in columns}
    )
    arrived = iter(received)
    counts = sorted({piece.rows: piece.num_rows for piece in job.slices}.items())
    ends = dict(zip((span for span, _ in counts), accumulate(count for _, count in counts), strict=True))
    for piece in job.slices:
        rows = slice(ends[piece.rows] - piece.num_rows, ends[piece.rows])
        parts = _read_local(local, piece) if piece.sender == job.writer else _column_views(piece, next(arrived))
        for column, _, _ in piece.segments:
            part = parts[column.name].cpu().numpy()
            if whole:
                values[column.name] = part
            elif column.kind == "element":
                values[column.name][rows, slice(*piece.shard.columns)] = part
            else:
                values[column.name][rows] = part
    return values


def _read_local(local: LocalShards, piece: ShardSlice) -> dict[str, Tensor]:
    """A piece's rows by column, as this rank keeps them, in the types that files have."""
    first, storage = piece.shard.rows[0], local[piece.shard]
    begin, end = piece.rows[0] - first, piece.rows[1] - first
    values = {name: as_stored(value) for name, value in storage.read(begin, end).items()}
    if piece.block_start is not None:
        assert isinstance(storage, SelectedRows)
        values[ID] = (storage.rows.rows(begin, end) + (first - piece.block_start)).to(torch.uint32)
    return values


def _column_views(piece: ShardSlice, packed: Tensor) -> dict[str, Tensor]:
    """Views of the columns of a piece in the bytes that travel."""
    columns, offset = {}, 0
    for column, shape, num_bytes in piece.segments:
        columns[column.name] = _view_as_column(packed[offset : offset + num_bytes], column, shape)
        offset += num_bytes
    return columns


def _view_as_column(segment: Tensor, column: Column, shape: tuple[int, ...]) -> Tensor:
    """A view of bytes [n] as values [shape], leaving out the padding."""
    dtype: torch.dtype = getattr(torch, column.stored_dtype)
    return segment[: dtype.itemsize * math.prod(shape)].view(dtype).view(shape)
