"""Our lookup and update on pieces of random tables, timed: in a process of their own, on memory that is taken once."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meseta.measure.calibrate.collectives import ComputeTimer
from meseta.measure.quiet import processor_s
from meseta.measure.tasks import Task, cut_bags, draw_bags
from meseta.ops.memory import empty
from meseta.ops.pooled_lookup import LookupGroup, lookup_group
from meseta.ops.row_optimizer import RowOptimizer
from meseta.ops.row_update import Bags, FeatureGradient, TableRows, UpdateGroup, row_update
from meseta.optim import make_row_optimizer
from meseta.spec import MesetaError, OptimizerSpec

FOOTPRINT_BYTES = 96e6
"""Rows and gradients that the batches of one measurement touch together, at least: three times a large cache."""
MIN_BATCHES, MAX_BATCHES = 3, 10
MIN_CALLS = 6
Piece = tuple[int, tuple[int, int], tuple[int, int]]
"""(index of the table, rows, columns)."""


class PieceTimer(ComputeTimer):
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
        self.used = dict.fromkeys(self.memory, 0)

    def time_pieces(self, task: dict[str, Any], pieces: list[Any], num_rounds: int, threads: int) -> list[float]:
        """Median seconds of (a lookup, an update) of pieces that one rank holds, and the processors that others kept
        busy meanwhile. Raises MesetaError where they take more than the memory taken at the start."""
        torch.set_num_threads(threads)
        rank = _Rank(self, Task.from_dict(task), [(t, (r[0], r[1]), (c[0], c[1])) for t, r, c in pieces])
        before, start_s = processor_s([os.getpid()]), time.perf_counter()
        # The turns of other programs on its processor need not lengthen what one thread computes.
        seconds = rank.time(num_rounds, time.process_time if threads == 1 else time.perf_counter)
        others = processor_s([os.getpid()]).others_since(before, time.perf_counter() - start_s)
        return [*seconds, others]

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next bytes, aligned to a page."""
        memory, first, count = self.memory[dtype.itemsize], self.used[dtype.itemsize], math.prod(shape)
        self.used[dtype.itemsize] += -(-count // 4096) * 4096
        if self.used[dtype.itemsize] > memory.numel():
            raise MesetaError(f"the pieces take more than the {memory.nbytes:,} bytes set aside for them")
        return memory[first : first + count].view(dtype).view(shape)


class _Rank:
    """The pieces of one rank and the batches that visit them."""

    def __init__(self, timer: PieceTimer, task: Task, pieces: list[Piece]) -> None:
        timer.used = dict.fromkeys(timer.memory, 0)
        self.batch_size, self.pieces = task.batch_size, pieces
        optimizer = make_row_optimizer(OptimizerSpec(name=task.optimizer))
        dtype = getattr(torch, task.dtype)
        tables = []
        for _, rows, (left, right) in pieces:
            weight = timer.take((rows[1] - rows[0], right - left), dtype)
            tables.append(TableRows(weight, _state(timer, optimizer, weight)))
        widths = [right - left for _, _, (left, right) in pieces]
        ends = np.cumsum([0, *widths]).tolist()
        self.lookup = LookupGroup(tuple(table.weight for table in tables), (False,) * len(pieces))
        self.update = UpdateGroup(
            optimizer=optimizer,
            tables=tuple(tables),
            embedding_dims=tuple(task.tables[t].dim for t, _, _ in pieces),
            features=tuple(FeatureGradient(n, n, 0, ends[n]) for n in range(len(pieces))),
        )
        self.gradient = 0.01 * torch.randn(self.batch_size, ends[-1])
        first = self._bags(task, 0)
        touched = sum(int(n) * w * 4 for n, w in zip(self._ids(first), widths, strict=True)) + self.gradient.nbytes
        number = min(max(math.ceil(FOOTPRINT_BYTES / max(touched, 1)), MIN_BATCHES), MAX_BATCHES)
        self.batches = [first, *(self._bags(task, k) for k in range(1, number))]

    def _bags(self, task: Task, number: int) -> Bags:
        drawn: dict[int, tuple[Any, Any]] = {}
        ids, lengths = [], []
        for t, rows, _ in self.pieces:
            if t not in drawn:
                drawn[t] = draw_bags(task.tables[t], task.batch_size, [task.seed, t, number])
            whole = rows == (0, task.tables[t].num_rows)
            own = drawn[t] if whole else cut_bags(*drawn[t], rows)
            ids.append(own[0])
            lengths.append(own[1])
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
        # A sharded embedding receives its ids as 32 bits.
        values = torch.from_numpy(np.concatenate(ids).astype(np.int32))
        return Bags(values, torch.from_numpy(offsets), task.batch_size)

    def _ids(self, bags: Bags) -> list[int]:
        """Of each piece."""
        ends: list[int] = bags.offsets[:: self.batch_size].tolist()
        return [b - a for a, b in pairwise(ends)]

    def time(self, num_rounds: int, clock: Callable[[], float]) -> tuple[float, float]:
        """Median seconds of a lookup and of an update, in turns, after one round over all batches that warms up; at
        least MIN_CALLS of each."""
        spent: tuple[list[float], list[float]] = ([], [])
        num_rounds = max(num_rounds, math.ceil(MIN_CALLS / len(self.batches)))
        for step in range(len(self.batches) * (num_rounds + 1)):
            bags = self.batches[step % len(self.batches)]
            start = clock()
            lookup_group(self.lookup, bags.ids, bags.offsets, None)
            middle = clock()
            row_update(self.update, 0.01, step + 1, bags, [self.gradient])
            end = clock()
            if step >= len(self.batches):
                spent[0].append(middle - start)
                spent[1].append(end - middle)
        return statistics.median(spent[0]), statistics.median(spent[1])


def _state(timer: PieceTimer, optimizer: RowOptimizer, weight: Tensor) -> dict[str, Tensor]:
    """State as the optimizer starts it, on memory that was taken before; its values do not matter here."""
    small = optimizer.init(weight[:1])
    shapes = {name: (weight.shape[0], *own.shape[1:]) for name, own in small.items()}
    return {name: timer.take(shape, small[name].dtype) for name, shape in shapes.items()}
