"""Our lookup and update on pieces of random tables, timed: in a process of their own, on memory that is taken once."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meseta.measure.calibrate.collectives import ComputeTimer
from meseta.measure.calibrate.tasks import ShardingTask, TaskShard, draw_bags, slice_bags
from meseta.measure.cpu_usage import read_cpu_time
from meseta.ops.memory import empty
from meseta.ops.pooled_lookup import LookupGroup, lookup_group
from meseta.ops.row_program.optimizer import RowOptimizer
from meseta.ops.row_update import Bags, FeatureGradient, TableRows, UpdateGroup, row_update
from meseta.optim import make_row_optimizer
from meseta.spec import MesetaError, OptimizerSpec

FOOTPRINT_BYTES = 96e6
"""Rows and gradients that the batches of one measurement touch together, at least: three times a large cache."""
MIN_BATCHES, MAX_BATCHES = 3, 10
MIN_CALLS = 6


class ShardTimer(ComputeTimer):
    """Times the operators that a rank runs on its pieces, as the sharded embedding calls them."""

    def __init__(self, memory_bytes: int) -> None:
        """Reserve `memory_bytes` for rows and state, and half as much on top for rows of 16 bits.

        The system gives memory that is zero, page by page when a measurement first touches it, which takes seconds for
        a gigabyte; measurements share it, so most find it there."""
        super().__init__()
        # Numbers of one type are never read as another: bits of 16-bit rows are denormal numbers of 32 bits, and slow.
        self.memory = {
            4: empty((memory_bytes // 4,), torch.float32, keep=False),
            2: empty((memory_bytes // 4,), torch.float16, keep=False),
        }
        self.num_used = dict.fromkeys(self.memory, 0)
        self._batches: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._batches_task: ShardingTask | None = None

    def time_shards(self, task: dict[str, Any], shards: list[Any], num_rounds: int, threads: int) -> list[float]:
        """Median seconds of (a lookup, an update) of pieces that one rank holds, and the processors that others kept
        busy meanwhile. Raises MesetaError where they take more than the memory taken at the start."""
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
        """Median seconds of look_up(batch) and of step(batch, running number), in turns, after one round over all
        batches that warms up; and the processors that others kept busy."""
        torch.set_num_threads(threads)
        before, start_s = read_cpu_time([os.getpid()]), time.perf_counter()
        # The turns of other programs on its processor need not lengthen what one thread computes.
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
        """Batch `number` of a table, as `draw_bags` gives it; those of the last task are kept, since its pieces are
        timed in many hands."""
        if task != self._batches_task:
            self._batches, self._batches_task = {}, task
        if (table, number) not in self._batches:
            self._batches[table, number] = draw_bags(task.tables[table], task.batch_size, [task.seed, table, number])
        return self._batches[table, number]

    def free_all(self) -> None:
        """Take back all memory that was taken."""
        self.num_used = dict.fromkeys(self.memory, 0)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next bytes, aligned to a page."""
        memory, first, count = self.memory[dtype.itemsize], self.num_used[dtype.itemsize], math.prod(shape)
        self.num_used[dtype.itemsize] += -(-count // 4096) * 4096
        if self.num_used[dtype.itemsize] > memory.numel():
            raise MesetaError(f"the pieces take more than the {memory.nbytes:,} bytes set aside for them")
        return memory[first : first + count].view(dtype).view(shape)


def parse_shards(found: Sequence[Any]) -> list[TaskShard]:
    """Pieces that came as JSON."""
    return [(t, (r[0], r[1]), (c[0], c[1])) for t, r, c in found]


class TimedShards:
    """The pieces of one rank, and the batches that visit them."""

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
        """Draw batches until there are so many."""
        self.batches += [self._bags(k) for k in range(len(self.batches), number)]

    def run_lookup(self, batch: int) -> None:
        """One lookup of all pieces."""
        bags = self.batches[batch]
        lookup_group(self.lookup_tables, bags.ids, bags.offsets, None)

    def run_update(self, batch: int, number: int) -> None:
        """One update of all pieces, as step `number`."""
        row_update(self.update_tables, 0.01, number, self.batches[batch], [self.gradient])

    def _bags(self, number: int) -> Bags:
        bags = []
        for t, rows, _ in self.task_shards:
            drawn = self.timer.draw_batch(self.task, t, number)
            bags.append(drawn if rows == (0, self.task.tables[t].num_rows) else slice_bags(*drawn, rows))
        return join_bags(bags, self.task.batch_size)


def join_bags(bags: Sequence[tuple[Any, Any]], num_samples: int) -> Bags:
    """(ids, lengths) of several pieces as one batch; a sharded embedding receives its ids as 32 bits."""
    offsets = np.concatenate([[0], np.cumsum(np.concatenate([lengths for _, lengths in bags]))])
    values = torch.from_numpy(np.concatenate([ids for ids, _ in bags]).astype(np.int32))
    return Bags(values, torch.from_numpy(offsets), num_samples)


def ids_per_shard(bags: Bags) -> list[int]:
    """Of each piece."""
    ends: list[int] = bags.offsets[:: bags.num_samples].tolist()
    return [b - a for a, b in pairwise(ends)]


def num_batches_beyond_cache(touched_bytes: int) -> int:
    """So many batches of `touched_bytes` that no cache keeps what one of them read until it comes again."""
    return min(max(math.ceil(FOOTPRINT_BYTES / max(touched_bytes, 1)), MIN_BATCHES), MAX_BATCHES)


def allocate_tables(
    timer: ShardTimer, task: ShardingTask, optimizer: RowOptimizer, pieces: Sequence[TaskShard]
) -> list[TableRows]:
    """Rows and state of pieces, on memory that was taken before; their values do not matter here."""
    tables = []
    for _, rows, (left, right) in pieces:
        weight = timer.allocate((rows[1] - rows[0], right - left), getattr(torch, task.dtype))
        small = optimizer.init(weight[:1])
        shapes = {name: (weight.shape[0], *own.shape[1:]) for name, own in small.items()}
        tables.append(
            TableRows(weight, {name: timer.allocate(shape, small[name].dtype) for name, shape in shapes.items()})
        )
    return tables
