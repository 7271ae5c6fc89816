"""Timing of lookups and updates of shards of random tables, in a separate process with memory reserved once."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meseta.embedding.replicas import SUM_OPTIMIZER
from meseta.embedding.update import (
    GradientContribution,
    group_shards,
    sample_indices,
    step_shards,
    sum_contributions,
    update_rows,
)
from meseta.measure.calibrate.collectives import ComputeTimer
from meseta.measure.calibrate.tasks import ShardingTask, TaskShard, draw_bags, slice_bags
from meseta.measure.threads import read_cpu_time
from meseta.ops.memory import empty
from meseta.ops.pooled_lookup import LookupGroup, lookup_group
from meseta.ops.row_program.optimizer import Hyper, RowOptimizer
from meseta.ops.row_update import Bags, FeatureGradient, TableRows, UpdateGroup, row_update
from meseta.optim import make_row_optimizer
from meseta.spec import COLUMN_BLOCK, MesetaError, OptimizerSpec, Shard
from meseta.storage import TableShard

FOOTPRINT_BYTES = 96e6
MIN_BATCHES, MAX_BATCHES = 3, 10
MIN_CALLS = 6


class ShardTimer(ComputeTimer):
    """Benchmark target for the operators that a rank runs on its shards."""

    # Calls them as the sharded embedding does.

    def __init__(self, memory_bytes: int) -> None:
        """Reserve `memory_bytes` for rows and states, and half as much in addition for 16-bit rows."""
        super().__init__()
        # All measurements share the memory. The system clears each page on first access, which takes seconds per GB.
        # Each element size has a separate buffer. Bits of 16-bit rows, read as float32, would be slow denormal numbers.
        self.memory = {
            4: empty((memory_bytes // 4,), torch.float32, keep=False),
            2: empty((memory_bytes // 4,), torch.float16, keep=False),
        }
        self.num_used = dict.fromkeys(self.memory, 0)
        self._batches: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._batches_task: ShardingTask | None = None

    def time_shards(self, task: dict[str, Any], shards: list[Any], num_rounds: int, threads: int) -> list[float]:
        """Time the shards of one rank, in at least `num_rounds` rounds over all batches.

        `task` and `shards` are decoded from JSON. Returns the median seconds of a lookup and of an update, and the mean
        number of processors that other programs used. Raises MesetaError if the shards need more than the reserved
        memory.
        """
        self.free_all()
        rank = TimedShards(self, ShardingTask.from_dict(task), parse_shards(shards))
        num_rounds = max(num_rounds, math.ceil(MIN_CALLS / len(rank.batches)))
        return self.time_steps(rank.run_lookup, rank.run_update, len(rank.batches), num_rounds, threads)

    def time_steps(
        self,
        look_up: Callable[[int], None],
        step: Callable[[int, int], None],
        num_batches: int,
        num_rounds: int,
        threads: int,
    ) -> list[float]:
        """Time alternating calls of look_up(batch index) and step(batch index, step number), starting at step 1.

        Returns the median seconds of each function, and the mean number of processors that other programs used.
        """
        # One round over all batches warms up and is not counted.
        torch.set_num_threads(threads)
        before, start_s = read_cpu_time([os.getpid()]), time.perf_counter()
        # The CPU time of a single thread excludes the time slices of other programs on its processor.
        clock = time.process_time if threads == 1 else time.perf_counter
        spent: tuple[list[float], list[float]] = ([], [])
        for number in range(num_batches * (num_rounds + 1)):
            batch = number % num_batches
            start = clock()
            look_up(batch)
            middle = clock()
            step(batch, number + 1)
            end = clock()
            if number >= num_batches:
                spent[0].append(middle - start)
                spent[1].append(end - middle)
        others = read_cpu_time([os.getpid()]).background_load_since(before, time.perf_counter() - start_s)
        return [statistics.median(spent[0]), statistics.median(spent[1]), others]

    def draw_batch(self, task: ShardingTask, table: int, number: int) -> tuple[Any, Any]:
        """Return the (ids, lengths) of batch `number` for the table with index `table`."""
        # Batches of the last task are cached, because its shards are timed under several plans.
        if task != self._batches_task:
            self._batches, self._batches_task = {}, task
        if (table, number) not in self._batches:
            self._batches[table, number] = draw_bags(task.tables[table], task.batch_size, [task.seed, table, number])
        return self._batches[table, number]

    def free_all(self) -> None:
        """Free all tensors from `allocate`. They must no longer be used, because their memory is reused."""
        self.num_used = dict.fromkeys(self.memory, 0)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor in the reserved memory, aligned to 4,096 elements."""
        memory, first, count = self.memory[dtype.itemsize], self.num_used[dtype.itemsize], math.prod(shape)
        self.num_used[dtype.itemsize] += -(-count // 4096) * 4096
        if self.num_used[dtype.itemsize] > memory.numel():
            raise MesetaError(
                f"the shards need more than the {memory.nbytes:,} bytes reserved for them; reserve more, or use "
                "smaller tables"
            )
        return memory[first : first + count].view(dtype).view(shape)


def parse_shards(found: Sequence[Any]) -> list[TaskShard]:
    """Convert shards decoded from JSON, which are nested lists, to tuples."""
    return [(t, (r[0], r[1]), (c[0], c[1])) for t, r, c in found]


class TimedShards:
    """Shards of one rank and batches for them, ready to be timed."""

    def __init__(self, timer: ShardTimer, task: ShardingTask, pieces: list[TaskShard]) -> None:
        self.timer, self.task, self.task_shards = timer, task, pieces
        self.optimizer = make_row_optimizer(OptimizerSpec(name=task.optimizer))
        self.tables = allocate_tables(timer, task, self.optimizer, pieces)
        self.widths = [right - left for _, _, (left, right) in pieces]
        self.column_ends = np.cumsum([0, *self.widths]).tolist()
        self.lookup_tables = LookupGroup(tuple(table.weight for table in self.tables), (False,) * len(pieces))
        self.update_tables = UpdateGroup(
            optimizer=self.optimizer,
            tables=tuple(self.tables),
            embedding_dims=tuple(task.tables[t].dim for t, _, _ in pieces),
            features=tuple(FeatureGradient(n, n, 0, self.column_ends[n]) for n in range(len(pieces))),
        )
        self.gradient = 0.01 * torch.randn(task.batch_size, self.column_ends[-1])
        first = self._bags(0)
        self.touched_bytes = self.gradient.nbytes + sum(
            num_ids * width * 4 for num_ids, width in zip(ids_per_shard(first), self.widths, strict=True)
        )
        self.batches = [first]
        self.draw_batches(num_batches_beyond_cache(self.touched_bytes))

    def draw_batches(self, number: int) -> None:
        """Draw batches until there are `number` of them."""
        self.batches += [self._bags(k) for k in range(len(self.batches), number)]

    def run_lookup(self, batch: int) -> None:
        """Look up all shards once, with the batch of this index."""
        bags = self.batches[batch]
        lookup_group(self.lookup_tables, bags.ids, bags.offsets, None)

    def run_update(self, batch: int, number: int) -> None:
        """Update all shards once, as step `number`."""
        row_update(self.update_tables, 0.01, number, self.batches[batch], [self.gradient])

    def _bags(self, number: int) -> Bags:
        bags = []
        for t, rows, _ in self.task_shards:
            drawn = self.timer.draw_batch(self.task, t, number)
            bags.append(drawn if rows == (0, self.task.tables[t].num_rows) else slice_bags(*drawn, rows))
        return join_bags(bags, self.task.batch_size)


def join_bags(bags: Sequence[tuple[Any, Any]], num_samples: int) -> Bags:
    """Concatenate the (ids, lengths) of several shards to one batch."""
    offsets = np.concatenate([[0], np.cumsum(np.concatenate([lengths for _, lengths in bags]))])
    # A sharded embedding receives its ids as int32.
    values = torch.from_numpy(np.concatenate([ids for ids, _ in bags]).astype(np.int32))
    return Bags(values, torch.from_numpy(offsets), num_samples)


def ids_per_shard(bags: Bags) -> list[int]:
    """Return the number of ids of each shard."""
    ends: list[int] = bags.offsets[:: bags.num_samples].tolist()
    return [b - a for a, b in pairwise(ends)]


def num_batches_beyond_cache(touched_bytes: int) -> int:
    """Return the number of batches of `touched_bytes`, MIN_BATCHES to MAX_BATCHES, that exceed any hardware cache."""
    return min(max(math.ceil(FOOTPRINT_BYTES / max(touched_bytes, 1)), MIN_BATCHES), MAX_BATCHES)


def allocate_tables(
    timer: ShardTimer, task: ShardingTask, optimizer: RowOptimizer, pieces: Sequence[TaskShard]
) -> list[TableRows]:
    """Allocate rows and optimizer states of `pieces` in the memory of `timer`, without initializing them."""
    tables = []
    for _, rows, (left, right) in pieces:
        weight = timer.allocate((rows[1] - rows[0], right - left), getattr(torch, task.dtype))
        small = optimizer.init(weight[:1])
        shapes = {name: (weight.shape[0], *state.shape[1:]) for name, state in small.items()}
        tables.append(
            TableRows(weight, {name: timer.allocate(shape, small[name].dtype) for name, shape in shapes.items()})
        )
    return tables


LEARNING_RATE = 0.01


@dataclass(frozen=True, kw_only=True)
class DeviceShards:
    """Shards of one device."""

    shards: tuple[TaskShard, ...]
    """Shards that only this device holds, sorted."""
    replicas: tuple[TaskShard, ...]
    """Shards that all devices hold."""

    @property
    def is_empty(self) -> bool:
        """Whether the device holds no shard and no replica."""
        return not (self.shards or self.replicas)


class RankTimer(ShardTimer):
    """Benchmark target for the operators of one rank of several."""

    # Calls them as the sharded embedding does.

    def time_device(
        self, task: dict[str, Any], shards: list[Any], replicas: list[Any], num_ranks: int, threads: int
    ) -> list[float]:
        """Time the shards of one rank together with its replicas, which all `num_ranks` ranks hold.

        Arguments and result are as in `ShardTimer.time_shards`. Raises MesetaError if they need more than the reserved
        memory.
        """
        self.free_all()
        parsed = ShardingTask.from_dict(task)
        parts: list[_StagedShards | _ReplicatedShards] = []
        if shards:
            parts.append(_StagedShards(self, parsed, parse_shards(shards)))
        if replicas:
            parts.append(_ReplicatedShards(self, parsed, parse_shards(replicas), num_ranks))
        number = num_batches_beyond_cache(sum(part.touched_bytes for part in parts))
        for part in parts:
            part.draw_batches(number)

        def look_up(batch: int) -> None:
            for part in parts:
                part.run_lookup(batch)

        def step(batch: int, number: int) -> None:
            for part in parts:
                part.run_update(batch, number)

        return self.time_steps(look_up, step, number, 1, threads)


class _StagedShards(TimedShards):
    """Shards of one rank, updated either in stages or in one fused pass."""

    # Shards with only some columns are updated in stages if their optimizer needs sums over whole rows.

    def __init__(self, timer: ShardTimer, task: ShardingTask, pieces: list[TaskShard]) -> None:
        super().__init__(timer, task, pieces)
        self.table_shards = _make_table_shards(task, pieces, self.tables)
        self.rows = [shard.acquire() for shard in self.table_shards]
        dims = [task.tables[t].dim for t, _, _ in pieces]
        self.staged = [
            n for n, width in enumerate(self.widths) if width < dims[n] and self.table_shards[n].optimizer.row_stats
        ]
        self.fused = group_shards(
            self.table_shards,
            self.rows,
            [FeatureGradient(n, n, 0, self.column_ends[n]) for n in range(len(pieces)) if n not in self.staged],
        )
        self.num_blocks = [-(-dim // COLUMN_BLOCK) for dim in dims]

    def run_update(self, batch: int, number: int) -> None:
        bags = self.batches[batch]
        for fused in self.fused:
            step_shards(fused, LEARNING_RATE, number, bags, [self.gradient])
        if self.staged:
            self._step_staged(bags, number)

    def _step_staged(self, bags: Bags, number: int) -> None:
        ids = bags.ids.split(ids_per_shard(bags))
        lengths = bags.offsets.diff().split(bags.num_samples)
        staged = self.staged
        samples = sample_indices([ids[n] for n in staged], [lengths[n] for n in staged], bags.num_samples)
        used, sums = [self.table_shards[n] for n in staged], []
        for n, of_ids in zip(staged, samples, strict=True):
            gradient = self.gradient[:, self.column_ends[n] : self.column_ends[n + 1]]
            sums.append(
                sum_contributions(
                    self.table_shards[n], [GradientContribution(ids[n], of_ids, gradient, of_ids)], bags.num_samples
                )
            )
        hypers = [Hyper(LEARNING_RATE, number, shard.spec.embedding_dim) for shard in used]
        update_rows(used, [self.rows[n] for n in staged], sums, hypers, self._gather, len(used[0].optimizer.row_stats))

    def _gather(self, parts: list[Tensor | None]) -> list[Tensor | None]:
        """Extend the row statistics of this rank's columns to all columns."""
        # Training receives the other statistics from other ranks. The cost model predicts that collective separately,
        # so copies of this rank's statistics are sufficient here.
        whole: list[Tensor | None] = []
        for n, part in zip(self.staged, parts, strict=True):
            if part is None:
                whole.append(None)
                continue
            blocks = self.num_blocks[n]
            whole.append(part.repeat(1, -(-blocks // part.shape[1]))[:, :blocks].contiguous())
        return whole


class _ReplicatedShards:
    """Replicated shards of one rank."""

    # A rank looks up the rows of its samples and sums their gradients. It then updates all rows that the global batch
    # touches.

    def __init__(self, timer: ShardTimer, task: ShardingTask, pieces: list[TaskShard], num_ranks: int) -> None:
        self.timer, self.task, self.task_shards, self.num_samples = timer, task, pieces, task.batch_size // num_ranks
        self.batch_share = 1.0 / num_ranks
        tables = allocate_tables(timer, task, make_row_optimizer(OptimizerSpec(name=task.optimizer)), pieces)
        widths = [table.weight.shape[1] for table in tables]
        rows = [table.weight.shape[0] for table in tables]
        self.lookup_tables = LookupGroup(tuple(table.weight for table in tables), (False,) * len(pieces))
        self.gradient = 0.01 * torch.randn(self.num_samples, sum(widths))
        sizes = [*(a * b for a, b in zip(rows, widths, strict=True)), *rows]
        self.buffer = timer.allocate((sum(sizes),), torch.float32)
        parts = self.buffer.split(sizes)
        self.sums = [part.view(a, b) for part, a, b in zip(parts, rows, widths, strict=False)]
        self.num_rows = sum(rows)
        self.row_offsets = [sum(rows[:n]) for n in range(len(rows) + 1)]
        self.sum_group = UpdateGroup(
            optimizer=SUM_OPTIMIZER,
            tables=tuple(TableRows(a, {"ranks": b}) for a, b in zip(self.sums, parts[len(rows) :], strict=True)),
            embedding_dims=tuple(widths),
            features=tuple(FeatureGradient(n, n, 0, sum(widths[:n])) for n in range(len(rows))),
        )
        shards = _make_table_shards(task, pieces, tables)
        places = [FeatureGradient(n, n, n, per_id=True) for n in range(len(rows))]
        self.fused = group_shards(shards, [shard.acquire() for shard in shards], places)
        self.batches: list[tuple[Bags, Tensor]] = []
        self.draw_batches(1)
        touched = sum(count * width for count, width in zip(ids_per_shard(self.batches[0][0]), widths, strict=True))
        self.touched_bytes = 4 * touched + self.gradient.nbytes + self.buffer.nbytes

    def draw_batches(self, number: int) -> None:
        """Draw batches until there are `number` of them.

        A batch has the ids of this rank's samples, and marks [rows] of the rows that the global batch touches. In
        training, ranks get the marks with the sum of gradients.
        """
        for batch in range(len(self.batches), number):
            slices, marks = [], torch.zeros(self.num_rows)
            for (t, rows, _), first in zip(self.task_shards, self.row_offsets, strict=False):
                ids, lengths = slice_bags(*self.timer.draw_batch(self.task, t, batch), rows)
                marks[first + torch.from_numpy(ids)] = 1.0
                slices.append((ids[: lengths[: self.num_samples].sum()], lengths[: self.num_samples]))
            bags = join_bags(slices, self.num_samples)
            # Ids of replicated rows are not sent to other ranks, so they remain int64.
            self.batches.append((replace(bags, ids=bags.ids.to(torch.int64)), marks))

    def run_lookup(self, batch: int) -> None:
        bags, _ = self.batches[batch]
        lookup_group(self.lookup_tables, bags.ids, bags.offsets, None)

    def run_update(self, batch: int, number: int) -> None:
        """Update the rows as `meseta.embedding.replicas` does, without the sum over ranks."""
        bags, marks = self.batches[batch]
        self.buffer.zero_()
        row_update(self.sum_group, 1.0, 1, bags, [self.gradient])
        # The last `num_rows` elements count ranks and are not scaled.
        self.buffer[: -self.num_rows] *= self.batch_share
        touched = marks.nonzero().squeeze(1)
        bounds = torch.searchsorted(touched, torch.tensor(self.row_offsets))
        stops = bounds.tolist()
        rows = [touched[a:b] - first for a, b, first in zip(stops[:-1], stops[1:], self.row_offsets[:-1], strict=True)]
        gradients = [total[indices] for total, indices in zip(self.sums, rows, strict=True)]
        for fused in self.fused:
            step_shards(fused, LEARNING_RATE, number, Bags(torch.cat(rows), bounds, 1), gradients)


def _make_table_shards(task: ShardingTask, pieces: list[TaskShard], tables: list[TableRows]) -> list[TableShard]:
    specs, shards = task.workload().tables, []
    for (t, rows, columns), table_rows in zip(pieces, tables, strict=True):
        shard = Shard(table=specs[t].name, rows=rows, columns=columns, ranks=(0,))
        optimizer = make_row_optimizer(specs[t].optimizer)
        shards.append(
            TableShard(
                spec=specs[t], shard=shard, weight=table_rows.weight, state=table_rows.state, optimizer=optimizer
            )
        )
    return shards
