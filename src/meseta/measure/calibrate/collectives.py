"""Collectives between processes of this machine, packing before and after them, and matrix products, timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import torch

from meseta.comm import Scope, World
from meseta.measure.contest.contender import Contender
from meseta.ops.bucketize import bucketize_features
from meseta.ops.codec import Rounding, decode_columns, encode_columns
from meseta.ops.columns import Move, join_moves
from meseta.spec.codecs import CODECS, CodecName

NAME = "a measurement"
FEW_BYTES = 1024
"""That a rank sends each other one where what peers take is measured."""
CODED = (2048, 64)
"""Rows and columns that codecs write and read: more than the caches next to a core hold, less than memory."""


class CollectiveTimer(Contender):
    """One of several ranks over gloo."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World.current()

    def facts(self) -> dict[str, Any]:
        return {"actions": [], "versions": {"torch": torch.__version__}}

    def time_collective(self, kind: str, num_bytes: int, num_rounds: int) -> float:
        """Seconds of an 'all_to_all' in which every rank sends `num_bytes` to all others together, or of an
        'all_reduce' of `num_bytes`: the lower quartile of the calls, since a system that shares its processors makes
        some of them wait for their turn for milliseconds, up to half of them, now more, now fewer."""
        world = self.world
        if kind == "all_reduce":
            buffer = torch.zeros(max(num_bytes // 4, 1))
            return _quartile(_seconds(lambda: world.all_reduce(buffer, NAME), num_rounds, world.barrier))
        each = max(num_bytes // 4 // max(world.size - 1, 1), 1)
        splits = [0 if rank == world.rank else each for rank in range(world.size)]
        buffer = torch.zeros(sum(splits))
        return _quartile(
            _seconds(lambda: world.all_to_all(buffer, splits, splits, NAME).wait(), num_rounds, world.barrier)
        )

    def time_few(self, num_peers: int, num_rounds: int) -> float:
        """Seconds, so too, of an all-to-all in which the first ranks send FEW_BYTES to each of so many others; the rest
        wait."""
        world, ranks = self.world, range(num_peers + 1)
        splits = [FEW_BYTES // 4 if rank in ranks and rank != world.rank else 0 for rank in range(world.size)]
        buffer = torch.zeros(sum(splits))

        def call() -> None:
            if world.rank in ranks:
                world.all_to_all(buffer, splits, splits, NAME, scope=Scope(ranks)).wait()

        return _quartile(_seconds(call, num_rounds, world.barrier))

    def time_exchange(self, num_bytes: list[list[int]], num_rounds: int) -> float:
        """Seconds, so too, of an all-to-all in which rank p sends `num_bytes[p][r]` to rank r, of the slowest rank."""
        world = self.world
        send = [own // 4 for own in num_bytes[world.rank]]
        receive = [own[world.rank] // 4 for own in num_bytes]
        buffer = torch.zeros(sum(send))
        own = _quartile(
            _seconds(lambda: world.all_to_all(buffer, send, receive, NAME).wait(), num_rounds, world.barrier)
        )
        return float(world.all_gather(torch.tensor([own], dtype=torch.float64), NAME).max())


class ComputeTimer(Contender):
    """What else a rank computes in a step."""

    def facts(self) -> dict[str, Any]:
        return {"actions": [], "versions": {"torch": torch.__version__}}

    def time_product(self, dtype: str, shape: list[int], num_rounds: int, threads: int) -> float:
        """Median seconds of [m, k] @ [k, n]."""
        torch.set_num_threads(threads)
        m, k, n = shape
        left, right = (torch.randn(size, dtype=getattr(torch, dtype)) for size in ((m, k), (k, n)))
        return _median(lambda: torch.mm(left, right), num_rounds)

    def time_copy(self, num_bytes: int, num_rounds: int, threads: int) -> float:
        """Median seconds of joining 64 pieces of `num_bytes` together."""
        torch.set_num_threads(threads)
        pieces = torch.zeros(num_bytes // 4).chunk(64)
        return _median(lambda: torch.cat(pieces[::-1]), num_rounds)

    def time_buckets(self, num_ids: int, num_rounds: int, threads: int) -> float:
        """Median seconds of sorting `num_ids` ids of eight features by four row ranges."""
        torch.set_num_threads(threads)
        ids = torch.randint(0, 1 << 20, (num_ids // 80 * 80,))
        lengths = torch.full((len(ids) // 10,), 10)
        cuts = [tuple(range(0, (1 << 20) + 1, 1 << 18))] * 8
        return _median(lambda: bucketize_features(ids, lengths, cuts), num_rounds)

    def time_codec(self, codec: str, drawn: bool, num_rounds: int, threads: int) -> list[float]:
        """Median seconds of (writing a number, reading it)."""
        torch.set_num_threads(threads)
        way, (rows, columns) = CODECS[cast("CodecName", codec)], CODED
        numbers, written = torch.randn(CODED), torch.empty(rows, way.row_bytes((columns,)), dtype=torch.uint8)
        moves = join_moves([Move(0, 0, 0, columns)])
        rounding = Rounding((7,), (0,), 0) if drawn else None
        encode_s = _median(
            lambda: encode_columns(written, [numbers], moves, way, (columns,), rounding=rounding), num_rounds
        )
        decode_s = _median(lambda: decode_columns(numbers, [written], moves, way, [(columns,)]), num_rounds)
        return [encode_s / numbers.numel(), decode_s / numbers.numel()]


def _median(call: Callable[[], object], num_rounds: int) -> float:
    """Seconds of a call."""
    return statistics.median(_seconds(call, num_rounds))


def _quartile(seconds: list[float]) -> float:
    """The lower one."""
    return sorted(seconds)[(len(seconds) - 1) // 4]


def _seconds(call: Callable[[], object], num_rounds: int, barrier: Callable[[], object] = lambda: None) -> list[float]:
    """Of each call, after two that warm up."""
    spent = []
    for _ in range(num_rounds + 2):
        barrier()
        start = time.perf_counter()
        call()
        spent.append(time.perf_counter() - start)
    return spent[2:]
