"""Transfers between ranks in a training step, from which the planner predicts times and buffers."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from meseta.spec.codecs import (
    FP32,
    Codec,
    Communication,
    DensePath,
    Direction,
    Exchange,
    SumPath,
    Way,
    sum_path,
)
from meseta.spec.plan import Plan
from meseta.spec.shards import SUMMED_IN_HOST
from meseta.spec.stages import Component
from meseta.spec.tables import FeatureSpec, TableSpec
from meseta.spec.workload import DenseExchange, Workload

# pair                    pair of ranks
# twin pair               pair of ranks with the same local index on different hosts
# route                   feature that reads a shard, for each requesting rank
# row route               route of a feature without pooling
# bag, id, weight         bag, id or weight of an id, for each shard that reads it
# bag number              element of a bag
# partial bag number      element of a bag that is summed inside a host
# whole bag number        element of the sum of such bags
# summed bag number       with exchange 'two_level': element of a bag that is one of several row ranges
# handed bag number       with exchange 'two_level': element of a bag that is forwarded unchanged
# row number              element of a row that is not pooled
# distinct row number     the same, counted once for each requesting rank
# row statistic           sum over 16 columns of a touched row, for each other owner of columns of the row
# replica number          element of a replicated row
# padded replica number   the same, with the number of columns rounded up to a multiple of 16
# replica row             replicated row
# step                    constant size per step
#
# Units that start with "host" are counted once for all shards of a host that have columns of the same rows.
Each = Literal[
    "pair", "twin pair", "route", "host route", "row route", "host row route", "bag", "host bag", "id", "host id",
    "weight", "host weight", "bag number", "partial bag number", "summed bag number", "handed bag number",
    "whole bag number", "row number", "distinct row number", "row statistic", "replica number", "padded replica number",
    "replica row", "step",
]  # fmt: skip
"""Unit that the size of a transfer is proportional to."""

COUNT_BYTES = 8
"""Bytes per id count, and per value that ranks agree on."""
NUM_AGREED = 1
"""Number of values that ranks agree on in each step: the sum of losses. The flags of a run are not included."""
MOMENTS = 2
"""Number of float64 sums per column that batch norm exchanges in the forward pass, and again in the backward pass."""
INT32_MAX = 2**31 - 1
ROW_STATISTICS = {
    **dict.fromkeys(("rowwise_adagrad", "rowwise_adam"), (1, 1)),
    **dict.fromkeys(("lars", "lamb"), (1, 2)),
    "rowwise_lamb": (2, 3),
}
"""Exchange of row statistics that column shards need, by row optimizer: (number of exchanges per step, total number of
values per row and block of 16 columns)."""


class CountsHeader(NamedTuple):
    """Header that a rank sends to each owner of rows, followed by the number of ids of each route, all in int64.

    From the headers of all ranks, each rank derives the denominator of the global loss and the offset of its samples in
    the global batch before it computes anything. If an id is out of range under policy 'error', all ranks learn its
    position and raise the same error.
    """

    # Example with features a and b, where b is split into two row ranges. After sorting its ids, a rank has the values
    #
    #     index     0      1      2        3        4     5     6        7       8    9          10
    #     value     start  slice  padding  weight | a     b   | feature  sample  id | b range 0  b range 1
    #
    # and sends
    #
    #     to the owner of a           [start  slice  padding  weight  feature  sample  id | a        ]
    #     to the owner of b, range 1  [start  slice  padding  weight  feature  sample  id | b range 1]

    start: int
    """Batch size of this rank plus `BATCH_SIZES` times the batch tag. The tag must be equal on all ranks."""
    slice_size: int
    """Number of samples in the slice of this rank. With gradient accumulation, it is larger than the batch size."""
    num_padding: int
    """Number of padding samples in the slice of this rank."""
    weight_bits: int
    """Bits of a float64, the sum of the sample weights in the slice of this rank. See `float_bits`."""
    feature: int
    """Index of the feature with the first out-of-range id, or -1 if all ids are valid. `REFUSED` rejects the whole
    batch. `RAN_OUT` means that the rank has no batch left."""
    sample: int
    """Index of the sample with the first out-of-range id on this rank. If `feature` is `RAN_OUT`, index of the policy
    for uneven inputs."""
    id: int
    """First out-of-range id. If `feature` is `RAN_OUT`, the number of batches that the rank has processed."""

    @property
    def batch_size(self) -> int:
        return self.start % BATCH_SIZES

    @property
    def mark(self) -> int:
        """Batch tag, which identifies the batch among those in flight."""
        return self.start // BATCH_SIZES

    @property
    def weight(self) -> float:
        [weight] = struct.unpack("<d", struct.pack("<q", self.weight_bits))
        return float(weight)


def float_bits(number: float) -> int:
    """Return the bits of a float64 as a signed integer."""
    return int.from_bytes(struct.pack("<d", number), "little", signed=True)


NUM_LEADING = 4
"""Number of leading header fields that a rank knows before it reads ids."""
BATCH_SIZES = 2**32
"""Exclusive upper bound of the batch size of a rank, which occupies the low 32 bits of `CountsHeader.start`."""
MARKS = 2**15
"""Radix of batch tags. A tag is a batch number below `MARKS` plus `MARKS` times a step."""
HEADER = len(CountsHeader._fields)
"""Number of header fields before the counts of the routes."""
REFUSED, RAN_OUT = -2, -3
"""Values of `CountsHeader.feature` for a rejected batch, and for a rank without batches."""


@dataclass(frozen=True)
class Part:
    """Part of a transfer whose size is proportional to the number of one unit."""

    each: Each
    num_bytes: float
    """Bytes per unit and step, without scales."""
    way: Way
    block_bytes: float = 0.0
    """Bytes of the scale of each block of up to 16 columns of a bag or row."""
    codec: Codec = FP32
    """Codec of the elements. Data that is never encoded, such as ids, has `FP32`."""

    @property
    def byte_numbers(self) -> float:
        """Number of elements per encoded byte in complete blocks, or 0 if the codec is lossless."""
        return 0.0 if self.codec.is_whole else 1.0 / self.codec.each_bytes


@dataclass(frozen=True)
class Transfer:
    """Collective of a training step."""

    name: str
    """Name by which the transfer is timed and recorded."""
    stage: Component
    """Component of the predicted step that includes the transfer."""
    parts: tuple[Part, ...]
    """Parts of the transfer, with the bytes of all calls of a step together."""
    times: int = 1
    """Number of calls per step."""
    to_owners: bool = True
    """Whether data is sent from the ranks of the samples to the owners of the rows, and not in the opposite
    direction."""

    @property
    def is_sum(self) -> bool:
        """Whether the transfer is an all-reduce or a reduce-scatter."""
        return any(part.way in ("sum", "host sum", "hosts sum", "hosts chain", "host scatter") for part in self.parts)

    @property
    def path(self) -> SumPath | None:
        """Algorithm of a reduction, or `None` for other transfers. The phase between hosts determines it, if there is
        one."""
        ways = {part.way for part in self.parts}
        if "hosts chain" in ways:
            return "chain"
        return "twins" if "hosts sum" in ways else "flat" if self.is_sum else None

    @property
    def is_of_tables(self) -> bool:
        """Whether the size of the transfer depends on the plan."""
        return self.parts[0].each != "step"


# tests/distributed/test_traffic.py compares these transfers with the collectives of a step.
#
# Transfers of a step with exchange 'flat', in the order in which they start (arXiv 2104.05158, section 4.2, and section
# 4.2.1 for sums inside a host). Transfers of tables take place only if a table needs them.
#
# component    transfer                       receivers     bytes for each
# ----------   ----------------------------   -----------   --------------------------------------------------
# input_dist   label weights                  all           step, if labels may be missing
#              counts                         owners        pair of ranks, route
#              ids                            owners        bag (its length), id
#              weights                        owners        id
# output_dist  answers                        requesters    element of a bag or row
#              whole bags                     requesters    element of a bag that a host has summed
# dense        batch norm, agree              all           step
#              logits                         all           sample, if the loss needs the global batch
#              gradients of batch norm        all           step
# backward     gradients of whole bags        owners        element of a bag that a host has summed
#              gradients                      owners        element of a bag or row
#              replicas                       all           element and row of a replica
#              row statistics                 owners        touched row and 16 columns
# dense        dense                          all           parameter
#              norms                          all           step
#
# With exchange 'two_level', the transfers of tables have two hops: between cross-host peers, which are the ranks with
# the same local index, and inside a host. A row that is not pooled is sent once for each rank that requests it.
#
# input_dist   counts, counts inside          peers, host   pair of ranks, route of a host or rank
#              ids, ids inside                peers, host   bag and id, once for each host or owner
#              weights, weights inside        peers, host   id, once for each host or owner
# output_dist  answers                        host          element of a bag or distinct row
#              whole bags                     peers         element of a bag of a host, element of a distinct row
# backward     gradients of whole bags        peers         element of a bag of a host, element of a row
#              gradients                      host          element of a bag or row
#
# Codecs encode elements that are sent to owners, requesters or peers. Codec 'forward' is for bags and rows, 'backward'
# for their gradients and for sums of replicas between hosts, and 'dense' for sums of dense gradients between hosts. The
# intra-host hop of 'two_level' and all ids, counts, weights and row statistics are never encoded.
GRADIENTS_OF = {
    "answers": "gradients",
    "whole bags": "gradients of whole bags",
    "batch norm": "gradients of batch norm",
}
"""Transfers that send gradients in the backward pass, by the corresponding transfer of the forward pass."""
INSIDE = " inside"
"""Suffix of transfer names for the intra-host hop of a hierarchical exchange."""
HANDED_ON = tuple(name + INSIDE for name in ("counts", "ids", "weights"))
OF_TABLES = ("counts", "ids", "weights", *HANDED_ON, "answers", "whole bags", "gradients", "gradients of whole bags",
             "replicas", "row statistics")  # fmt: skip
"""Names of the transfers of embedding tables."""
OF_STEPS = frozenset((*OF_TABLES, "label weights", "batch norm", "gradients of batch norm", "logits", "agree", "dense",
                      "norms", "parameters", "gradients of parameters", "gradients of hosts"))  # fmt: skip
"""Names of all transfers that `step_transfers` can return."""
OF_LAST_PART = ("replicas", "row statistics")
"""Names of backward transfers that start only after all ranks have agreed on the loss of the last micro-batch."""
BETWEEN_STEPS = frozenset(
    ("blocks of a checkpoint", "carried answers", "ids outside", "numbers clamped", "a measurement")
)
"""Names of collectives outside of training steps."""


def id_bytes(longest: int) -> int:
    """Return the bytes per id in an exchange. `longest` is the number of rows of the longest row range."""
    # Ids are sent relative to the start of their row range.
    return 4 if longest <= INT32_MAX else 8


def longest_range(tables: Sequence[TableSpec], plan: Plan | None = None) -> int:
    """Return the number of rows of the longest row range in `plan`, or of the longest table if there is no plan."""
    if plan is None:
        return max((table.num_embeddings for table in tables), default=0)
    return max((b - a for entry in plan.tables for a, b in {shard.rows for shard in entry.shards}), default=0)


def number_bytes(tables: Sequence[TableSpec]) -> int:
    """Return the bytes of an unencoded element of a bag, row or gradient in an exchange, and of an id weight."""
    # All tables are exchanged in one type.
    return 8 if any(table.dtype == "float64" for table in tables) else 4


def step_transfers(
    workload: Workload,
    plan: Plan | None,
    num_ranks: int,
    per_host: int,
    exchange: Exchange | None = None,
    dense_exchange: DensePath | None = None,
) -> tuple[Transfer, ...]:
    """List the transfers of one training step, in the order in which they start.

    Args:
        workload: Tables, features and dense part. The batch size matters only if the loss needs the global batch.
        plan: Placement of the tables. `None` lists the transfers that any plan could need.
        num_ranks: Number of ranks.
        per_host: Number of ranks per host.
        exchange: Algorithm for exchanging ids, embeddings and their gradients. `None` uses that of the plan.
        dense_exchange: Algorithm of all-reduces between hosts. `None` uses that of the plan.

    Returns:
        Transfers of a step. Empty on a single rank.
    """
    if num_ranks == 1:
        return ()
    exchange = exchange or (None if plan is None else plan.exchange)
    dense_exchange = dense_exchange or (None if plan is None else plan.dense_exchange)
    step = _Step(
        workload.tables,
        workload.features,
        plan,
        num_ranks,
        per_host,
        workload.dense.parameter_bytes,
        workload.dense_exchange,
        exchange == "two_level" and 1 < per_host < num_ranks,
        workload.comm,
        (exchange, dense_exchange),
    )
    agree = _alike("agree", COUNT_BYTES * (NUM_AGREED + step.dense.num_flags), 1, "gather")
    back = [*step.backward_of_dense(), *step.backward()]
    early = [] if step.num_parts == 1 else [transfer for transfer in back if transfer.name not in OF_LAST_PART]
    late = [transfer for transfer in back if transfer not in early]
    num_bytes = step.dense.logit_bytes * -(-workload.batch_size // num_ranks)
    logits = [_alike("logits", num_bytes, 1, "gather")] if num_bytes else []
    masked = step.dense.num_masked_tasks
    label_weights = [_alike("label weights", COUNT_BYTES * masked, 1, "gather")] if masked else []
    return (
        *label_weights,
        *step.forward(),
        *step.forward_of_dense(),
        *logits,
        *early,
        agree,
        *late,
        *step.sums_of_dense(),
    )


@dataclass(frozen=True)
class _Step:
    """Settings that determine the transfers of a step."""

    tables: Sequence[TableSpec]
    features: Sequence[FeatureSpec]
    plan: Plan | None
    num_ranks: int
    per_host: int
    parameter_bytes: int
    dense: DenseExchange
    two_level: bool
    comm: Communication
    ways: tuple[Exchange | None, DensePath | None]

    def forward(self) -> list[Transfer]:
        times, id_width = self.num_parts * self.num_batches, id_bytes(longest_range(self.tables, self.plan))
        header, count = times * HEADER * COUNT_BYTES, self.num_parts * COUNT_BYTES
        weighted = len({feature.batch for feature in self.features if feature.weighted})
        weight = number_bytes(self.tables)
        if not self.two_level:
            counts = (Part("pair", header, "owners"), Part("route", count, "owners"))
            ids = (Part("bag", id_width, "owners"), Part("id", id_width, "owners"))
            transfers = [Transfer("counts", "input_dist", counts, times), Transfer("ids", "input_dist", ids, times)]
            if weighted:
                weights = (Part("weight", weight, "owners"),)
                transfers.append(Transfer("weights", "input_dist", weights, self.num_parts * weighted))
            return [*transfers, *self.answers()]
        across: list[tuple[Each, float]] = [("twin pair", header), ("host route", count), ("host row route", count)]
        inside: list[tuple[Each, float]] = [("pair", header), ("route", count), ("row route", count)]
        parts: dict[str, tuple[tuple[Part, ...], tuple[Part, ...]]] = {
            "counts": (
                tuple(Part(each, num_bytes, "hosts") for each, num_bytes in across),
                tuple(Part(each, num_bytes, "host") for each, num_bytes in inside),
            ),
            "ids": (
                (Part("host bag", id_width, "hosts"), Part("host id", id_width, "hosts")),
                (Part("bag", id_width, "host"), Part("id", id_width, "host")),
            ),
            "weights": ((Part("host weight", weight, "hosts"),), (Part("weight", weight, "host"),)),
        }
        number = {"counts": times, "ids": times, "weights": self.num_parts * weighted}
        first = {name: Transfer(name, "input_dist", levels[0], number[name]) for name, levels in parts.items()}
        second = {
            name: Transfer(name + INSIDE, "input_dist", levels[1], number[name]) for name, levels in parts.items()
        }
        ids_and_weights = ["ids", *(["weights"] if weighted else [])]
        return [
            first["counts"],
            second["counts"],
            *(first[name] for name in ids_and_weights),
            *(second[name] for name in ids_and_weights),
            *self.answers(),
        ]

    def answers(self, row: Each | None = None, direction: Direction = "forward") -> list[Transfer]:
        """List the transfers of embeddings to the requesting ranks. `row` is the unit of rows in a hierarchical
        exchange."""
        times, number = self.num_parts * self.num_batches, number_bytes(self.tables)
        codec = self.comm.codec(direction)

        def written(each: Each, way: Way) -> Part:
            return Part(each, number if codec.is_whole else codec.number_bytes, way, codec.block_bytes, codec)

        parts: tuple[Part, ...] = (written("bag number", "owners"), written("row number", "owners"))
        if not self.sums_in_hosts and not self.two_level:
            return [Transfer("answers", "output_dist", parts, times, to_owners=False)]
        whole = [written("whole bag number", "hosts")]
        partial: Each = "partial bag number"
        if self.two_level:  # The owner encodes once, and forwarding ranks do not encode again.
            row, partial = row or "distinct row number", "summed bag number"
            handed_on = (written(each, "host") for each in ("handed bag number", row))
            parts = tuple(replace(part, codec=FP32) for part in handed_on)
            whole.append(written(row, "hosts"))
        parts = (*parts, Part(partial, number, "host"))
        return [
            Transfer("answers", "output_dist", parts, times, to_owners=False),
            Transfer("whole bags", "output_dist", tuple(whole), times, to_owners=False),
        ]

    def backward(self) -> list[Transfer]:
        number = number_bytes(self.tables)
        transfers = [
            replace(transfer, name=GRADIENTS_OF[transfer.name], stage="backward", to_owners=True)
            for transfer in reversed(self.answers("row number", "backward"))
        ]
        if self.has_replicas:
            each: Each = "replica number" if self.comm.codec("backward").is_whole else "padded replica number"
            parts = (
                *self.summed(each, number, "backward"),
                *self.summed("replica row", number, "backward", counts=1.0),
            )
            # The second hop of gradients starts when the first has arrived, so replicas go between the two.
            transfers.insert(1, Transfer("replicas", "backward", parts))
        if self.num_stages:
            statistics = (Part("row statistic", number, "columns"),)
            transfers.append(Transfer("row statistics", "backward", statistics, self.num_stages))
        return transfers

    def forward_of_dense(self) -> list[Transfer]:
        gathers = [_alike("parameters", self.num_parts * n, self.num_parts, "host gather") for n in self.cut_bytes]
        return [*gathers, *self.batch_norms()]

    def batch_norms(self) -> list[Transfer]:
        size = self.num_parts * MOMENTS * COUNT_BYTES
        return [_alike("batch norm", size * width, self.num_parts, "gather") for width in self.dense.norm_widths]

    def backward_of_dense(self) -> list[Transfer]:
        """List the backward transfers of batch norm and of sharded modules, whose parameters are gathered again."""
        transfers = [replace(norm, name=GRADIENTS_OF[norm.name]) for norm in reversed(self.batch_norms())]
        for size in reversed(self.cut_bytes):
            transfers += [
                _alike("parameters", self.num_parts * size, self.num_parts, "host gather"),
                _alike("gradients of parameters", self.num_parts * size, self.num_parts, "host scatter"),
            ]
            if self.num_ranks > self.per_host:
                across = self.summed("step", self.num_parts * size * self.per_host, "dense")[-1]
                transfers.append(Transfer("gradients of hosts", "dense", (across,), self.num_parts))
        return transfers

    def summed(self, each: Each, num_bytes: float, direction: Direction, counts: float = 0.0) -> tuple[Part, ...]:
        """Return the parts of an all-reduce of `num_bytes` per unit. The share `counts` of them is never encoded."""
        codec, per_host = self.comm.codec(direction), self.per_host
        path = sum_path(*self.ways, codec)
        if path == "flat" or per_host == self.num_ranks:
            return (Part(each, num_bytes, "sum"),)
        near = () if per_host == 1 else (Part(each, num_bytes, "host sum"),)
        across: Way = "hosts chain" if path == "chain" else "hosts sum"
        if codec.is_whole or counts == 1.0:
            return (*near, Part(each, num_bytes / per_host, across))
        width = self.dense.number_bytes if direction == "dense" else number_bytes(self.tables)
        wire = num_bytes * (counts + (1.0 - counts) * codec.each_bytes / width)
        return (*near, Part(each, wire / per_host, across, codec=codec))

    def sums_of_dense(self) -> list[Transfer]:
        """List the all-reduce of gradients of unsharded parameters with their counts, and of norms of sharded ones."""
        dense = self.dense
        cut = dense.number_bytes * sum(math.prod(shape) for shapes in dense.cut_shapes for shape in shapes)
        norms = dense.cut_shapes and dense.num_norms
        whole, counts = self.parameter_bytes - cut, dense.num_tensors - sum(map(len, dense.cut_shapes))
        filling = 0 if self.comm.codec("dense").is_whole else dense.num_filling * dense.number_bytes
        num_bytes = whole + filling + max(counts, 0) * dense.number_bytes
        parts = self.summed("step", num_bytes, "dense", counts=1.0 - (whole + filling) / max(num_bytes, 1))
        return [
            *([Transfer("dense", "dense", parts)] if whole else []),
            *([_alike("norms", dense.num_norms * COUNT_BYTES, dense.num_norms, "host gather")] if norms else []),
        ]

    @property
    def num_parts(self) -> int:
        return self.dense.num_parts

    @property
    def num_batches(self) -> int:
        """Number of feature groups, each with its own batch size."""
        return len({feature.batch for feature in self.features})

    @property
    def sums_in_hosts(self) -> bool:
        if self.num_ranks == self.per_host:
            return False
        if self.plan is None:
            return True
        pooled = {feature.table for feature in self.features if feature.pooling != "none"}
        return any(entry.sharding in SUMMED_IN_HOST for entry in self.plan.tables if entry.table in pooled)

    @property
    def has_replicas(self) -> bool:
        read = {feature.table for feature in self.features}
        learning = {table.name for table in self.tables if table.optimizer.name != "frozen"} & read
        if self.plan is None:
            return bool(learning)
        return any(
            entry.is_replica(shard) for entry in self.plan.tables if entry.table in learning for shard in entry.shards
        )

    @property
    def num_stages(self) -> int:
        stages = {table.name: ROW_STATISTICS.get(table.optimizer.name, (0, 0))[0] for table in self.tables}
        if self.plan is not None:
            cut = {entry.table for entry in self.plan.tables if len({shard.columns for shard in entry.shards}) > 1}
            stages = {name: number for name, number in stages.items() if name in cut}
        return max(stages.values(), default=0)

    @property
    def cut_bytes(self) -> list[int]:
        """Bytes per rank of each sharded module. The first dimension of its parameters is padded for equal shards."""
        return [
            sum(-(-first // self.per_host) * math.prod(others) for first, *others in shapes) * self.dense.number_bytes
            for shapes in self.dense.cut_shapes
        ]


def _alike(name: str, num_bytes: float, times: int, way: Way) -> Transfer:
    return Transfer(name, "dense", (Part("step", num_bytes, way),), times)
