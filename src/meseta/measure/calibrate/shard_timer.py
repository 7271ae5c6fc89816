"""Timing of lookups and updates of shards of random tables, in a separate process with memory reserved once."""

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
"""Minimum bytes of rows and gradients that all batches of a measurement touch, three times a large hardware cache."""
MIN_BATCHES, MAX_BATCHES = 3, 10
MIN_CALLS = 6


class ShardTimer(ComputeTimer):
    """Benchmark target for the operators that a rank runs on its shards. Calls them as the sharded embedding does."""

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
        """Time the shards of one rank.

        Args:
            task: Result of `ShardingTask.to_dict`.
            shards: Shards of the rank, each a `TaskShard` decoded from JSON.
            num_rounds: Minimum number of rounds over all batches.
            threads: Number of threads.

        Returns:
            Median seconds of a lookup, median seconds of an update, and the mean number of processors that other
            programs used.

        Raises MesetaError if the shards need more than the reserved memory.
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

        One round over all batches warms up and is not counted. Returns the median seconds of each function, and the
        mean number of processors that other programs used.
        """
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
    """Return the number of batches, each touching `touched_bytes`, that together exceed any hardware cache.

    The number is between MIN_BATCHES and MAX_BATCHES.
    """
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
