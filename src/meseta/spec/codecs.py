"""Codecs and exchange algorithms for communication between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from meseta.errors import MesetaError, check_choice
from meseta.spec.shards import COLUMN_BLOCK

CodecName = Literal["fp32", "fp16", "bf16", "fp8", "int8"]
ExchangeAlgorithm = Literal["flat", "hierarchical"]
"""Algorithm for exchanging ids, embeddings and their gradients. `flat` sends directly to each rank. `hierarchical` is
hierarchical: between hosts, only ranks with the same local index communicate."""
CrossHostAlgorithm = Literal["cross_host", "chain"]
"""Algorithm for the inter-host phase of a hierarchical all-reduce. `cross_host` exchanges directly between the ranks
with the same local index. `chain` passes sums from host to host."""
FORMER_EXCHANGES = {"two_level": "hierarchical"}
FORMER_DENSE_EXCHANGES = {"twins": "cross_host"}
"""Current name of each former algorithm, in plans and configs."""
AllReduceAlgorithm = Literal["flat", "cross_host", "chain"]
"""Algorithm of an all-reduce: `flat` over all ranks, or hierarchical with the inter-host phase of
`CrossHostAlgorithm`."""
# owners         all-to-all between all ranks and the owners of shards
# host           all-to-all inside each host
# hosts          all-to-all between the ranks with the same local index
# columns        all-to-all between the owners of different columns of the same rows
# sum            all-reduce over all ranks
# gather         all-gather over all ranks
# host gather    all-gather inside each host
# host scatter   reduce-scatter inside each host
# host sum       all-reduce inside each host
# hosts sum      all-reduce between the ranks with the same local index
# hosts chain    as `hosts sum`, along a chain of hosts
CollectiveKind = Literal["owners", "host", "hosts", "columns", "sum", "gather", "host gather", "host scatter",
                         "host sum", "hosts sum", "hosts chain"]  # fmt: skip
"""Kind of collective and the ranks that take part in it."""


@dataclass(frozen=True)
class Codec:
    """Encoding of floating-point numbers for communication."""

    name: CodecName
    element_bytes: int
    """Bytes per encoded element, without scales."""
    scale_bytes: int = 0
    """Bytes of the scale that is sent for each block of `COLUMN_BLOCK` elements. 0 means no scales."""
    max_scaled_value: float = 0.0
    """Largest absolute value of a scaled element. 0 means no scales."""

    @property
    def relative_rounding_error(self) -> float:
        """Maximum rounding error of an element, relative to the largest absolute value in its block."""
        return {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp8": 2.0**-4, "int8": (1 + 2.0**-7) / 254}.get(self.name, 0.0)

    @property
    def is_lossless(self) -> bool:
        return self.name == "fp32"

    @property
    def mean_element_bytes(self) -> float:
        """Mean number of bytes per element of a complete block, including its scale."""
        return self.element_bytes + self.scale_bytes / COLUMN_BLOCK

    def row_bytes(self, pieces: tuple[int, ...]) -> int:
        """Return the encoded bytes of a row of pieces with these columns. Each starts a new block. Scales come last."""
        numbers = sum(pieces) * self.element_bytes
        if not self.scale_bytes:
            return numbers
        # A padding byte aligns the 2-byte scales.
        return numbers + numbers % 2 + self.scale_bytes * num_blocks(pieces)


# Cached because every message needs it, and there are few different rows.
@lru_cache(maxsize=4096)
def num_blocks(pieces: tuple[int, ...]) -> int:
    """Return the number of blocks of a row made of pieces with the given numbers of columns."""
    return sum(-(-width // COLUMN_BLOCK) for width in pieces)


# codec   element        scale per block   a value is encoded as
# fp32    4 bytes        -                 itself (8 bytes in float64 tables)
# fp16    2 bytes        -                 the nearest fp16 to value * 2^k, where all ranks know k
# bf16    2 bytes        -                 the nearest bf16
# fp8     1 byte, e4m3   2 bytes, bf16     value / scale, with scale >= max(abs(block)) / 448
# int8    1 byte         2 bytes, bf16     value / scale, with scale >= max(abs(block)) / 127
#
# A block is 16 columns of a bag, an unpooled row or a replicated row, or 16 elements of a dense parameter. Blocks do
# not depend on the plan, so that a plan does not change how values are rounded.
FP32 = Codec("fp32", 4)
CODECS: dict[CodecName, Codec] = {
    codec.name: codec
    for codec in (FP32, Codec("fp16", 2), Codec("bf16", 2), Codec("fp8", 1, 2, 448.0), Codec("int8", 1, 2, 127.0))
}

Precision = Literal["fp32", "paper", "fp16", "bf16", "fp8", "int8"]
Direction = Literal["forward", "backward", "dense"]
"""Data that a codec applies to: embeddings (`forward`), gradients of embeddings and of replicated rows (`backward`), or
all-reduced dense gradients (`dense`)."""
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
PAPER_CODECS: dict[Direction, CodecName] = {"forward": "fp16", "backward": "bf16", "dense": "bf16"}
"""Codecs of precision `paper` (arXiv 2104.05158, section 5.3.2)."""


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Codecs and exchange algorithms of a run."""

    precision: Precision = "fp32"
    """Codec for all communication of embeddings and gradients. `paper` uses fp16 for embeddings and bf16 for all
    gradients."""
    forward: CodecName | None = None
    """Codec for embeddings. `None` selects the codec of `precision`."""
    backward: CodecName | None = None
    """Codec for gradients of embeddings and of replicated rows. `None` selects the codec of `precision`."""
    dense: CodecName | None = None
    """Codec for the all-reduce of dense gradients. `None` selects the codec of `precision`."""
    exchange: Literal["auto", "flat", "hierarchical"] = "auto"
    """Algorithm for exchanging ids, embeddings and their gradients between hosts. `auto` follows the plan. If the plan
    names none, it selects the algorithm with the lower predicted time."""
    dense_exchange: Literal["auto", "cross_host", "chain"] = "auto"
    """Algorithm of all-reduces between hosts. `auto` follows the plan. If the plan names none, it selects the algorithm
    with the lower predicted time."""

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
                "comm: dense_exchange 'chain' cannot be used with a codec, which would round the sum at each host; "
                "set dense_exchange to 'cross_host', or backward and dense to 'fp32'"
            )

    def codec(self, direction: Direction) -> Codec:
        name: CodecName | None = getattr(self, direction)
        if name is None and self.precision == "paper":
            name = PAPER_CODECS[direction]
        return CODECS[name or self.precision]  # type: ignore[index]

    @property
    def is_lossless(self) -> bool:
        """Whether the codecs of all directions are lossless."""
        return all(self.codec(direction).is_lossless for direction in DIRECTIONS)

    def check_dtype(self, dtype: str) -> None:
        """Raise MesetaError if a lossy codec would be used with float64 tables."""
        # Tables of float64 are for verification, which rounding would defeat.
        if dtype == "float64" and not self.is_lossless:
            raise MesetaError(
                "comm: tables of dtype float64 cannot be used with a codec; set precision to 'fp32', or use "
                "float32 tables"
            )


def all_reduce_algorithm(
    exchange: ExchangeAlgorithm | None, dense_exchange: CrossHostAlgorithm | None, codec: Codec
) -> AllReduceAlgorithm:
    """Return the all-reduce algorithm for these settings."""
    if not codec.is_lossless:  # Codecs encode the sums of hosts, which only a hierarchical all-reduce computes.
        return "cross_host"
    if exchange == "flat":
        return "flat"
    return "chain" if exchange == "hierarchical" and dense_exchange == "chain" else "cross_host"


NUM_CHAIN_CHUNKS = 8
"""Number of chunks of an all-reduce that are pipelined along a chain of hosts."""


def traffic_factors(way: CollectiveKind, num_ranks: int, per_host: int, host: int | None = None) -> tuple[float, float]:
    """Return the bytes that a rank sends (inside its host, to other hosts) per byte of replicated data.

    `host` is the index of the rank's host. It matters only for a chain, and `None` gives the mean over all hosts.
    """
    # An all-reduce over n ranks is a reduce-scatter and an all-gather. Each sends (n - 1) / n of the data per rank.
    # A chain passes all data to the last host and back, so the two ends send once and the hosts between them twice.
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
    """Return the bytes that a rank sends (inside its host, to other hosts) per byte of an all-reduce over all ranks.

    The second factor applies to the encoded size if there is a codec. `host` is as in `traffic_factors`.
    """
    if path == "flat" or per_host == num_ranks:
        return traffic_factors("sum", num_ranks, per_host)
    near, _ = traffic_factors("host sum", num_ranks, per_host)
    _, far = traffic_factors("hosts chain" if path == "chain" else "hosts sum", num_ranks, per_host, host)
    return near, far / per_host
