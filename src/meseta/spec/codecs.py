"""How ranks write what they send each other, and which way it takes: codecs of the wire, and what a run asks for.

codec   a number       a block of 16     a value is written as
-----   ------------   ---------------   ------------------------------------------------------------------
fp32    4 bytes        -                 itself (float64 rows: 8 bytes)
fp16    2 bytes        -                 the nearest, of the value times a power of two that all ranks know
bf16    2 bytes        -                 the nearest
fp8     1 byte, e4m3   2 bytes, bf16     value / scale, where scale >= largest of the block / 448
int8    1 byte         2 bytes, bf16     value / scale, where scale >= largest of the block / 127

A block never depends on where a table lies: 16 columns of a bag, of a row that is not pooled or of a replica's row, and
16 numbers of a dense parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from meseta.errors import MesetaError, check_choice
from meseta.spec.shards import COLUMN_BLOCK

CodecName = Literal["fp32", "fp16", "bf16", "fp8", "int8"]
ExchangeAlgorithm = Literal["flat", "two_level"]
"""Which way ids, rows and their gradients take between hosts: straight to each rank; or inside a host to the rank with
the place of the one that asked, and across between ranks of one place alone, see `meseta.embedding.routes`."""
CrossHostAlgorithm = Literal["twins", "chain"]
"""How sums over hosts go where they go by host: between all ranks of one place, or along a chain of hosts."""
AllReduceAlgorithm = Literal["flat", "twins", "chain"]
"""Which way sums over ranks take: straight between all; or by host, and there as DensePath says."""
CollectiveKind = Literal["owners", "host", "hosts", "columns", "sum", "gather", "host gather", "host scatter",
                         "host sum",
              "hosts sum", "hosts chain"]  # fmt: skip
"""Between whom: all ranks and the owner of a piece; an owner and the ranks of its host; a host and the ranks that have
the same place in the others; the owners of one row's columns. Of what every rank has alike: a sum over all ranks; a
copy of what each has, on all; inside each host, such a copy, a sum of which each rank gets its part, and that with its
copy on all; a sum over the ranks that have the same place in all hosts, directly or along a chain of them."""


@dataclass(frozen=True)
class Codec:
    """One way to write numbers."""

    name: CodecName
    """As configs have it."""
    element_bytes: int
    """Of a number on the wire."""
    scale_bytes: int = 0
    """Of the scale of a block of COLUMN_BLOCK numbers; 0: it has none."""
    max_scaled_value: float = 0.0
    """What a scale maps the largest number of its block to, at most; 0: no scale."""

    @property
    def relative_rounding_error(self) -> float:
        """Of the largest number of a block, what rounding one of them to the nearest changes at most."""
        return {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp8": 2.0**-4, "int8": (1 + 2.0**-7) / 254}.get(self.name, 0.0)

    @property
    def is_lossless(self) -> bool:
        """Whether numbers travel as they were computed."""
        return self.name == "fp32"

    @property
    def mean_element_bytes(self) -> float:
        """Of a number in a whole block."""
        return self.element_bytes + self.scale_bytes / COLUMN_BLOCK

    def row_bytes(self, pieces: tuple[int, ...]) -> int:
        """Of a row whose columns are those of several pieces side by side, each in blocks from its first column: the
        numbers, an empty byte where the scales would begin at an odd one, the scales."""
        numbers = sum(pieces) * self.element_bytes
        if not self.scale_bytes:
            return numbers
        return numbers + numbers % 2 + self.scale_bytes * num_blocks(pieces)


@lru_cache(maxsize=4096)
def num_blocks(pieces: tuple[int, ...]) -> int:
    """Scales of a row of pieces; they are few, and asked for in every message."""
    return sum(-(-width // COLUMN_BLOCK) for width in pieces)


FP32 = Codec("fp32", 4)
CODECS: dict[CodecName, Codec] = {
    codec.name: codec
    for codec in (FP32, Codec("fp16", 2), Codec("bf16", 2), Codec("fp8", 1, 2, 448.0), Codec("int8", 1, 2, 127.0))
}
"""By name."""

Precision = Literal["fp32", "paper", "fp16", "bf16", "fp8", "int8"]
Direction = Literal["forward", "backward", "dense"]
"""What a codec is chosen for: answers; their gradients and those of replicas; sums of dense gradients."""
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
PAPER_CODECS: dict[Direction, CodecName] = {"forward": "fp16", "backward": "bf16", "dense": "bf16"}
"""Precision 'paper' (arXiv 2104.05158, section 5.3.2)."""


@dataclass(frozen=True, kw_only=True)
class Communication:
    """How a run's ranks write and route what they send each other."""

    precision: Precision = "fp32"
    """Codec of all three directions; 'paper': fp16 forward, bf16 backward and dense."""
    forward: CodecName | None = None
    """Of answers; None: as `precision` says."""
    backward: CodecName | None = None
    """Of gradients of answers and of replicas; None: as `precision` says."""
    dense: CodecName | None = None
    """Of sums of dense gradients; None: as `precision` says."""
    exchange: Literal["auto", "flat", "two_level"] = "auto"
    """Way between hosts, see Exchange; 'auto': that of the plan, else the one that is predicted to take less."""
    dense_exchange: Literal["auto", "twins", "chain"] = "auto"
    """Way of sums between hosts, see DensePath; 'auto': that of the plan, else the one that is predicted to take
    less."""

    def __post_init__(self) -> None:
        check_choice("comm", "precision", self.precision, get_args(Precision))
        for direction in DIRECTIONS:
            if getattr(self, direction) is not None:
                check_choice("comm", direction, getattr(self, direction), get_args(CodecName))
        check_choice("comm", "exchange", self.exchange, ("auto", *get_args(ExchangeAlgorithm)))
        check_choice("comm", "dense_exchange", self.dense_exchange, ("auto", *get_args(CrossHostAlgorithm)))
        if self.dense_exchange == "chain" and not (
            self.codec("dense").is_lossless and self.codec("backward").is_lossless
        ):
            raise MesetaError(
                "comm: dense_exchange 'chain' would round sums at each host that they pass; take 'twins', or leave "
                "backward and dense at 'fp32'"
            )

    def codec(self, direction: Direction) -> Codec:
        """That of one direction."""
        name: CodecName | None = getattr(self, direction)
        if name is None and self.precision == "paper":
            name = PAPER_CODECS[direction]
        return CODECS[name or self.precision]  # type: ignore[index]

    @property
    def is_lossless(self) -> bool:
        """Whether all numbers travel as they were computed."""
        return all(self.codec(direction).is_lossless for direction in DIRECTIONS)

    def check_dtype(self, dtype: str) -> None:
        """Raise MesetaError for codecs beside tables of float64, which are there to verify."""
        if dtype == "float64" and not self.is_lossless:
            raise MesetaError(
                "comm: tables of float64 travel as they are; leave precision at 'fp32', or take tables of float32"
            )


def all_reduce_algorithm(
    exchange: ExchangeAlgorithm | None, dense_exchange: CrossHostAlgorithm | None, codec: Codec
) -> AllReduceAlgorithm:
    """Which way sums over ranks take between hosts: with a codec they go by host, and it writes what crosses."""
    if not codec.is_lossless:
        return "twins"
    if exchange == "flat":
        return "flat"
    return "chain" if exchange == "two_level" and dense_exchange == "chain" else "twins"


NUM_CHAIN_CHUNKS = 8
"""Pieces that follow each other along a chain of hosts, as `meseta.comm.sums` cuts them."""


def traffic_factors(way: CollectiveKind, num_ranks: int, per_host: int, host: int | None = None) -> tuple[float, float]:
    """(inside its host, across hosts): what a rank sends of a byte that every rank has alike.

    A sum over n ranks has two halves, in each of which (n - 1) / n of the bytes leave each rank: pieces go to their
    owners, and back to all. A chain hands all on to the next host, and back: its ends send once, the hosts between
    twice; the mean where `host`, the number of the rank's, is not given.
    """
    hosts = num_ranks // per_host
    if way == "hosts chain" and host is not None:
        return 0.0, float((host > 0) + (host < hosts - 1))
    return {
        "sum": (2 * (per_host - 1) / num_ranks, 2 * (num_ranks - per_host) / num_ranks),
        "gather": (per_host - 1, num_ranks - per_host),
        "host gather": (per_host - 1, 0),
        "host scatter": (per_host - 1, 0),
        "host sum": (2 * (per_host - 1) / per_host, 0),
        "hosts sum": (0, 2 * (hosts - 1) / hosts),
        "hosts chain": (0, 2 * (hosts - 1) / hosts),
    }[way]


def all_reduce_traffic_factors(
    path: AllReduceAlgorithm, num_ranks: int, per_host: int, host: int | None = None
) -> tuple[float, float]:
    """The same of a sum over all ranks by its path: (of a byte as it was computed, of one as it crosses hosts)."""
    if path == "flat" or per_host == num_ranks:
        return traffic_factors("sum", num_ranks, per_host)
    near, _ = traffic_factors("host sum", num_ranks, per_host)
    _, far = traffic_factors("hosts chain" if path == "chain" else "hosts sum", num_ranks, per_host, host)
    return near, far / per_host
