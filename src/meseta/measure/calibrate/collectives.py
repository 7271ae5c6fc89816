"""Timing of collectives between processes of this machine, of packing their data, and of matrix products."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import torch

from meseta.comm import ExchangeScope, World
from meseta.measure.harness.target import BenchmarkTarget
from meseta.ops.bucketize import bucketize_features
from meseta.ops.codec import StochasticRounding, decode_columns, encode_columns
from meseta.ops.columns import ColumnMove, pack_moves
from meseta.spec.codecs import CODECS, CodecName

COLLECTIVE_NAME = "measurement"
SMALL_MESSAGE_BYTES = 1024
# More than the private caches of a core hold.
CODEC_SHAPE = (2048, 64)
"""Number of rows and columns that codecs encode and decode."""


class CollectiveTimer(BenchmarkTarget):
    """Benchmark target that times collectives over gloo. All ranks must call the same methods."""

    # Results are the lower quartile of all calls.

    # A system that shares its processors delays up to half of the calls by milliseconds, so the median would vary.

    def __init__(self) -> None:
        super().__init__()
        self.world = World.current()

    def facts(self) -> dict[str, Any]:
        return {"actions": [], "versions": {"torch": torch.__version__}}

    def time_collective(self, kind: str, num_bytes: int, num_rounds: int) -> float:
        """Time an 'all_to_all' or 'all_reduce' and return its seconds.

        `num_bytes` is the size of the all-reduce, or the total that each rank sends to all peers in the all-to-all.
        """
        world = self.world
        if kind == "all_reduce":
            buffer = torch.zeros(max(num_bytes // 4, 1))
            return _lower_quartile(
                _time_calls(lambda: world.all_reduce(buffer, COLLECTIVE_NAME), num_rounds, world.barrier)
            )
        each = max(num_bytes // 4 // max(world.size - 1, 1), 1)
        splits = [0 if rank == world.rank else each for rank in range(world.size)]
        buffer = torch.zeros(sum(splits))
        return _lower_quartile(
            _time_calls(
                lambda: world.all_to_all(buffer, splits, splits, COLLECTIVE_NAME).wait(), num_rounds, world.barrier
            )
        )

    def time_small_all_to_all(self, num_peers: int, num_rounds: int) -> float:
        """Time an all-to-all of SMALL_MESSAGE_BYTES among the first `num_peers` + 1 ranks. Returns seconds."""
        # The remaining ranks wait in the barrier.
        world, ranks = self.world, range(num_peers + 1)
        splits = [SMALL_MESSAGE_BYTES // 4 if rank in ranks and rank != world.rank else 0 for rank in range(world.size)]
        buffer = torch.zeros(sum(splits))

        def call() -> None:
            if world.rank in ranks:
                world.all_to_all(buffer, splits, splits, COLLECTIVE_NAME, scope=ExchangeScope(ranks)).wait()

        return _lower_quartile(_time_calls(call, num_rounds, world.barrier))

    def time_uneven_all_to_all(self, num_bytes: list[list[int]], num_rounds: int) -> float:
        """Return the seconds of the slowest rank in an all-to-all in which rank p sends `num_bytes[p][r]` to rank r."""
        world = self.world
        send = [value // 4 for value in num_bytes[world.rank]]
        receive = [value[world.rank] // 4 for value in num_bytes]
        buffer = torch.zeros(sum(send))
        value = _lower_quartile(
            _time_calls(
                lambda: world.all_to_all(buffer, send, receive, COLLECTIVE_NAME).wait(), num_rounds, world.barrier
            )
        )
        return float(world.all_gather(torch.tensor([value], dtype=torch.float64), COLLECTIVE_NAME).max())


class ComputeTimer(BenchmarkTarget):
    """Benchmark target that times matrix products, copies, bucketizing of ids, and codecs."""

    def facts(self) -> dict[str, Any]:
        return {"actions": [], "versions": {"torch": torch.__version__}}

    def time_matmul(self, dtype: str, shape: list[int], num_rounds: int, threads: int) -> float:
        """Return the median seconds of a product [m, k] @ [k, n]. `shape` is [m, k, n]."""
        torch.set_num_threads(threads)
        m, k, n = shape
        left, right = (torch.randn(size, dtype=getattr(torch, dtype)) for size in ((m, k), (k, n)))
        return _median_seconds(lambda: torch.mm(left, right), num_rounds)

    def time_copy(self, num_bytes: int, num_rounds: int, threads: int) -> float:
        """Return the median seconds to concatenate 64 tensors with `num_bytes` in total."""
        torch.set_num_threads(threads)
        pieces = torch.zeros(num_bytes // 4).chunk(64)
        return _median_seconds(lambda: torch.cat(pieces[::-1]), num_rounds)

    def time_bucketize(self, num_ids: int, num_rounds: int, threads: int) -> float:
        """Return the median seconds to bucketize about `num_ids` ids of eight features by four row ranges."""
        torch.set_num_threads(threads)
        ids = torch.randint(0, 1 << 20, (num_ids // 80 * 80,))
        lengths = torch.full((len(ids) // 10,), 10)
        cuts = [tuple(range(0, (1 << 20) + 1, 1 << 18))] * 8
        return _median_seconds(lambda: bucketize_features(ids, lengths, cuts), num_rounds)

    def time_codec(self, codec: str, stochastic: bool, num_rounds: int, threads: int) -> list[float]:
        """Return the median seconds per element to encode, and to decode."""
        torch.set_num_threads(threads)
        way, (rows, columns) = CODECS[cast("CodecName", codec)], CODEC_SHAPE
        numbers, written = torch.randn(CODEC_SHAPE), torch.empty(rows, way.row_bytes((columns,)), dtype=torch.uint8)
        moves = pack_moves([ColumnMove(0, 0, 0, columns)])
        rounding = StochasticRounding((7,), (0,), 0) if stochastic else None
        encode_s = _median_seconds(
            lambda: encode_columns(written, [numbers], moves, way, (columns,), rounding=rounding), num_rounds
        )
        decode_s = _median_seconds(lambda: decode_columns(numbers, [written], moves, way, [(columns,)]), num_rounds)
        return [encode_s / numbers.numel(), decode_s / numbers.numel()]


def _median_seconds(call: Callable[[], object], num_rounds: int) -> float:
    return statistics.median(_time_calls(call, num_rounds))


def _lower_quartile(seconds: list[float]) -> float:
    return sorted(seconds)[(len(seconds) - 1) // 4]


def _time_calls(
    call: Callable[[], object], num_rounds: int, barrier: Callable[[], object] = lambda: None
) -> list[float]:
    # Return the seconds of each of `num_rounds` calls, after two calls that warm up.
    spent = []
    for _ in range(num_rounds + 2):
        barrier()
        start = time.perf_counter()
        call()
        spent.append(time.perf_counter() - start)
    return spent[2:]
