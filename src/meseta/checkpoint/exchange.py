"""Exchange of parts of blocks with the ranks that write them.

All sizes follow from the plan. For a delta, ranks first exchange how many rows each shard has selected in each block.
"""

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

from meseta.checkpoint.files.block import allocate_transient
from meseta.checkpoint.files.layout import ID, BlockSchema, Column, TableLayout
from meseta.comm import World
from meseta.ops.memory import empty
from meseta.spec import MesetaError, Shard, TablePlan
from meseta.storage import SelectedRows, TableStorage, as_stored

LocalShards = Mapping[Shard, TableStorage | SelectedRows]
SelectedCounts = Mapping[Shard, Mapping[int, int]]
"""Number of selected rows by shard and by first row of a block. Blocks without selected rows are left out."""
ID_COLUMN = Column(name=ID, kind="row", dtype="uint32")
"""Column with the ids of selected rows, counted from the first row of the block."""


@dataclass(frozen=True)
class ShardSlice:
    """Part of a block that one shard holds: its columns and optimizer state of all or of the selected rows in
    `rows`."""

    shard: Shard
    rows: tuple[int, int]
    schema: BlockSchema
    num_rows: int
    """Number of rows in this slice: all of the range `rows`, or the selected ones."""
    block_start: int | None = None
    """First row of the block, from which row ids are counted. `None` if the block is written completely."""

    @property
    def sender(self) -> int:
        """Rank that sends the slice: the owner, or the first rank that holds a replica."""
        # One rank for all replicas, so that the checkpoint has rows as they were on one rank.
        return self.shard.ranks[0]

    @cached_property
    def segments(self) -> tuple[tuple[Column, tuple[int, ...], int], ...]:
        """Tuples (column, shape, bytes) in the order in which the columns are sent.

        Bytes are rounded up to a multiple of 8, so that all segments are aligned. The shard with the first table column
        also sends the columns that have one value per row.
        """
        rows = self.num_rows
        entries: list[tuple[Column, tuple[int, ...], int]] = []
        for column in (*([] if self.block_start is None else [ID_COLUMN]), *self.schema.columns):
            if column.kind == "element" or self.shard.columns[0] == 0:
                shape: tuple[int, ...] = (rows, self.shard.num_columns) if column.kind == "element" else (rows,)
                entries.append((column, shape, -(-np.dtype(column.stored_dtype).itemsize * math.prod(shape) // 8) * 8))
        return tuple(entries)

    @cached_property
    def num_bytes(self) -> int:
        return sum(num_bytes for _, _, num_bytes in self.segments)


@dataclass(frozen=True)
class BlockJob:
    """Block of a table, or its selected rows, to be written by one rank."""

    layout: TableLayout
    rows: tuple[int, int]
    writer: int
    """Rank that writes the block. It does not send its own slices."""
    slices: tuple[ShardSlice, ...]
    """Parts of the block, ordered by sender."""
    num_rows: int

    @staticmethod
    def from_plan(
        layout: TableLayout,
        rows: tuple[int, int],
        writer: int,
        plan: TablePlan,
        selected: SelectedCounts | None = None,
    ) -> BlockJob:
        """Create the job of one block under `plan`. If all rows of a block are selected, it is written like a block of
        a full checkpoint.

        Raises MesetaError if shards of the same rows have selected different numbers of rows.
        """
        counts: dict[tuple[int, int], int] = {}
        pieces = []
        for shard in plan.shards:
            overlap = max(rows[0], shard.rows[0]), min(rows[1], shard.rows[1])
            if overlap[0] >= overlap[1]:
                continue
            num_rows = overlap[1] - overlap[0] if selected is None else selected[shard].get(rows[0], 0)
            if counts.setdefault(overlap, num_rows) != num_rows:
                raise MesetaError(
                    f"checkpoint: table {layout.spec.name!r}, rows {overlap[0]}..{overlap[1] - 1}: column shards must "
                    f"have the same changed rows, got {counts[overlap]} and {num_rows} rows; set checkpoint.deltas to "
                    "'none' to save full checkpoints"
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
        return self.num_rows == self.rows[1] - self.rows[0]

    def slices_sent_by(self, rank: int) -> list[ShardSlice]:
        """Return the slices that `rank` sends to the writer."""
        return [piece for piece in self.slices if piece.sender == rank != self.writer]


def group_into_rounds(jobs: Sequence[BlockJob], limit_bytes: int) -> list[list[BlockJob]]:
    """Group consecutive jobs into rounds that are exchanged together. Each round is ordered by writer.

    A round has at most `limit_bytes` for each writer and from each sender, but at least one job.
    """
    groups: list[list[BlockJob]] = []
    # Without rounds of several jobs, a model of thousands of small tables would wait for all ranks once per table.
    written, sent = Counter[int](), Counter[int]()
    for job in jobs:
        size = sum(piece.num_bytes for piece in job.slices)
        sends = Counter[int]()
        for piece in job.slices:
            sends[piece.sender] += piece.num_bytes if piece.sender != job.writer else 0
        is_full = written[job.writer] + size > limit_bytes and written[job.writer] > 0
        if not groups or is_full or any(sent[rank] and sent[rank] + sends[rank] > limit_bytes for rank in sends):
            groups.append([])
            written, sent = Counter(), Counter()
        groups[-1].append(job)
        written[job.writer] += size
        sent += sends
    return [sorted(together, key=lambda job: job.writer) for together in groups]


def pack(world: World, jobs: Sequence[BlockJob], local: LocalShards) -> Tensor:
    """Pack this rank's slices for all jobs, ordered by writer, into a uint8 buffer [bytes] on the world's device."""
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
    """Send and receive the slices of all jobs. Collective.

    Return the jobs that this rank writes, each with one uint8 CPU tensor of shape [bytes] for each slice from another
    rank.
    """
    send_splits, receive_splits = [0] * world.size, [0] * world.size
    local_jobs = [job for job in jobs if job.writer == world.rank]
    for job in jobs:
        send_splits[job.writer] += sum(piece.num_bytes for piece in job.slices_sent_by(world.rank))
    sent = [
        (index, piece)
        for rank in range(world.size)
        for index, job in enumerate(local_jobs)
        for piece in job.slices_sent_by(rank)
    ]
    for _, piece in sent:
        receive_splits[piece.sender] += piece.num_bytes
    blocks = world.all_to_all(packed, send_splits, receive_splits, "checkpoint blocks", keep=False)
    received = blocks.wait().cpu()
    parts: list[list[Tensor]] = [[] for _ in local_jobs]
    for (index, _), part in zip(sent, received.split([piece.num_bytes for _, piece in sent]), strict=True):
        parts[index].append(part)
    return list(zip(local_jobs, parts, strict=True))


def unpack(job: BlockJob, received: Sequence[Tensor], local: LocalShards) -> dict[str, np.ndarray]:
    """Combine the slices of a block into its columns by name, of shape [rows, D] or [rows].

    Columns are not copied if the block consists of one slice. If only some rows are written, the result includes their
    ids.
    """
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
    first, storage = piece.shard.rows[0], local[piece.shard]
    begin, end = piece.rows[0] - first, piece.rows[1] - first
    values = {name: as_stored(value) for name, value in storage.read(begin, end).items()}
    if piece.block_start is not None:
        assert isinstance(storage, SelectedRows)
        values[ID] = (storage.rows.rows(begin, end) + (first - piece.block_start)).to(torch.uint32)
    return values


def _column_views(piece: ShardSlice, packed: Tensor) -> dict[str, Tensor]:
    columns, offset = {}, 0
    for column, shape, num_bytes in piece.segments:
        columns[column.name] = _view_as_column(packed[offset : offset + num_bytes], column, shape)
        offset += num_bytes
    return columns


def _view_as_column(segment: Tensor, column: Column, shape: tuple[int, ...]) -> Tensor:
    # The segment may end with padding.
    dtype: torch.dtype = getattr(torch, column.stored_dtype)
    return segment[: dtype.itemsize * math.prod(shape)].view(dtype).view(shape)
