"""Transfers between ranks in a training step, from which the planner predicts times and buffers."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from meseta.spec.codecs import (
    FP32,
    AllReduceAlgorithm,
    Codec,
    CollectiveKind,
    Communication,
    CrossHostAlgorithm,
    Direction,
    ExchangeAlgorithm,
    all_reduce_algorithm,
)
from meseta.spec.plan import Plan
from meseta.spec.shards import HOST_REDUCED_TYPES
from meseta.spec.stages import StepComponent
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
# summed bag number       with exchange 'hierarchical': element of a bag that is one of several row ranges
# handed bag number       with exchange 'hierarchical': element of a bag that is forwarded unchanged
# row number              element of a row that is not pooled
# distinct row number     the same, counted once for each requesting rank
# row statistic           sum over 16 columns of a touched row, for each other owner of columns of the row
# replica number          element of a replicated row
# padded replica number   the same, with the number of columns rounded up to a multiple of 16
# replica row             replicated row
# step                    constant size per step
#
# Units that start with "host" are counted once for all shards of a host that have columns of the same rows.
TrafficUnit = Literal[
    "pair", "twin pair", "route", "host route", "row route", "host row route", "bag", "host bag", "id", "host id",
    "weight", "host weight", "bag number", "partial bag number", "summed bag number", "handed bag number",
    "whole bag number", "row number", "distinct row number", "row statistic", "replica number", "padded replica number",
    "replica row", "step",
]  # fmt: skip
"""Unit that the size of a transfer is proportional to."""

COUNT_BYTES = 8
"""Bytes per id count, and per value that ranks agree on."""
NUM_AGREED_VALUES = 1
"""Number of values that ranks agree on in each step: the sum of losses. The flags of a run are not included."""
NUM_NORM_TERMS = 2
"""Number of float64 values of a rank in `GRADIENT_NORM`: a sum of squares, and its rounding error."""
NUM_MOMENTS = 2
"""Number of float64 sums per column that batch norm exchanges in the forward pass, and again in the backward pass."""
MAX_INT32 = 2**31 - 1
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

    tag_and_size: int
    """Batch size of this rank plus `BATCH_SIZE_RADIX` times the batch tag. The tag must be equal on all ranks."""
    slice_size: int
    """Number of samples in the slice of this rank. With gradient accumulation, it is larger than the batch size."""
    num_padding: int
    """Number of padding samples in the slice of this rank."""
    weight_bits: int
    """Bits of a float64, the sum of the sample weights in the slice of this rank. See `float_bits`."""
    feature: int
    """Index of the feature with the first out-of-range id, or -1 if all ids are valid. `BATCH_REJECTED` rejects the
    whole batch. `EXHAUSTED` means that the rank has no batch left."""
    sample: int
    """Index of the sample with the first out-of-range id on this rank. If `feature` is `EXHAUSTED`, index of the policy
    for uneven inputs."""
    id: int
    """First out-of-range id. If `feature` is `EXHAUSTED`, the number of batches that the rank has processed."""

    @property
    def batch_size(self) -> int:
        return self.tag_and_size % BATCH_SIZE_RADIX

    @property
    def batch_tag(self) -> int:
        """Batch tag, which identifies the batch among those in flight."""
        return self.tag_and_size // BATCH_SIZE_RADIX

    @property
    def weight(self) -> float:
        [weight] = struct.unpack("<d", struct.pack("<q", self.weight_bits))
        return float(weight)


def float_bits(number: float) -> int:
    """Return the bits of a float64 as a signed integer."""
    return int.from_bytes(struct.pack("<d", number), "little", signed=True)


NUM_BATCH_FIELDS = 4
"""Number of leading header fields that a rank knows before it reads ids."""
BATCH_SIZE_RADIX = 2**32
"""Exclusive upper bound of the batch size of a rank, which occupies the low 32 bits of `CountsHeader.tag_and_size`."""
MAX_TAGS = 2**15
"""Radix of batch tags. A tag is a batch number below `MAX_TAGS` plus `MAX_TAGS` times a step."""
NUM_HEADER_FIELDS = len(CountsHeader._fields)
"""Number of header fields before the counts of the routes."""
BATCH_REJECTED, EXHAUSTED = -2, -3
"""Values of `CountsHeader.feature` for a rejected batch, and for a rank without batches."""


@dataclass(frozen=True)
class TransferPart:
    """Part of a transfer whose size is proportional to the number of one unit."""

    unit: TrafficUnit
    num_bytes: float
    """Bytes per unit and step, without scales."""
    collective: CollectiveKind
    scale_bytes: float = 0.0
    """Bytes of the scale of each block of up to 16 columns of a bag or row."""
    codec: Codec = FP32
    """Codec of the elements. Data that is never encoded, such as ids, has `FP32`."""

    @property
    def elements_per_byte(self) -> float:
        """Number of elements per encoded byte in complete blocks, or 0 if the codec is lossless."""
        return 0.0 if self.codec.is_lossless else 1.0 / self.codec.mean_element_bytes


@dataclass(frozen=True)
class Transfer:
    """Collective of a training step."""

    name: str
    """Name by which the transfer is timed and recorded."""
    component: StepComponent
    """Component of the predicted step that includes the transfer."""
    parts: tuple[TransferPart, ...]
    """Parts of the transfer, with the bytes of all calls of a step together."""
    num_calls: int = 1
    sends_to_owners: bool = True
    """Whether data is sent from the ranks of the samples to the owners of the rows, and not in the opposite
    direction."""

    @property
    def is_reduction(self) -> bool:
        return any(
            part.collective in ("sum", "host sum", "hosts sum", "hosts chain", "host scatter") for part in self.parts
        )

    @property
    def algorithm(self) -> AllReduceAlgorithm | None:
        """Algorithm of a reduction, or `None` for other transfers. The phase between hosts determines it, if there is
        one."""
        ways = {part.collective for part in self.parts}
        if "hosts chain" in ways:
            return "chain"
        return "cross_host" if "hosts sum" in ways else "flat" if self.is_reduction else None

    @property
    def depends_on_plan(self) -> bool:
        return self.parts[0].unit != "step"


# tests/distributed/test_traffic.py compares these transfers with the collectives of a step.
#
# Transfers of a step with exchange 'flat', in the order in which they start (arXiv 2104.05158, section 4.2, and section
# 4.2.1 for sums inside a host). Transfers of tables take place only if a table needs them.
#
# component      transfer                       receivers     bytes for each
# -------------  ----------------------------   -----------   --------------------------------------------------
# input_dist     label weights                  all           step, if labels may be missing
#                counts                         owners        pair of ranks, route
#                ids                            owners        bag (its length), id
#                weights                        owners        id
# output_dist    embeddings                     requesters    element of a bag or row
#                embeddings inter-host          requesters    element of a bag that a host has summed
# dense          batch norm, agree              all           step
#                logits                         all           sample, if the loss needs the global batch
#                gradients of batch norm        all           step
# gradient_dist  gradients inter-host           owners        element of a bag that a host has summed
#                gradients                      owners        element of a bag or row
#                replicas                       all           element and row of a replica
#                row statistics                 owners        touched row and 16 columns
# dense          dense                          all           parameter
#                norms, gradient norm           all           step
#
# With exchange 'hierarchical', the transfers of tables have two hops: between cross-host peers, which are the ranks
# with the same local index, and inside a host. A row that is not pooled is sent once for each rank that requests it.
#
# input_dist     counts, counts intra-host      peers, host   pair of ranks, route of a host or rank
#                ids, ids intra-host            peers, host   bag and id, once for each host or owner
#                weights, weights intra-host    peers, host   id, once for each host or owner
# output_dist    embeddings                     host          element of a bag or distinct row
#                embeddings inter-host          peers         element of a bag of a host, element of a distinct row
# gradient_dist  gradients inter-host           peers         element of a bag of a host, element of a row
#                gradients                      host          element of a bag or row
#
# Codecs encode elements that are sent to owners, requesters or peers. Codec 'forward' is for bags and rows, 'backward'
# for their gradients and for sums of replicas between hosts, and 'dense' for sums of dense gradients between hosts. The
# intra-host hop of 'hierarchical' and all ids, counts, weights and row statistics are never encoded.
GRADIENT_TRANSFERS = {
    "embeddings": "gradients",
    "embeddings inter-host": "gradients inter-host",
    "batch norm": "gradients of batch norm",
}
"""Transfers that send gradients in the backward pass, by the corresponding transfer of the forward pass."""
INTRA_HOST_SUFFIX = " intra-host"
"""Suffix of transfer names for the intra-host hop of a hierarchical exchange."""
FORWARDED_TRANSFERS = tuple(name + INTRA_HOST_SUFFIX for name in ("counts", "ids", "weights"))
TABLE_TRANSFERS = ("counts", "ids", "weights", *FORWARDED_TRANSFERS, "embeddings", "embeddings inter-host", "gradients",
                   "gradients inter-host", "replicas", "row statistics")  # fmt: skip
"""Names of the transfers of embedding tables."""
GRADIENT_NORM = "gradient norm"
"""Transfer of squared norms."""
STEP_TRANSFERS = frozenset((*TABLE_TRANSFERS, "label weights", "batch norm", "gradients of batch norm", "logits",
                            "agree", "dense", "norms", GRADIENT_NORM, "parameters", "gradients of parameters",
                            "gradients of hosts"))  # fmt: skip
"""Names of all transfers that `step_transfers` can return."""
FORMER_TRANSFERS = {
    "answers": "embeddings",
    "whole bags": "embeddings inter-host",
    "gradients of whole bags": "gradients inter-host",
    "counts inside": "counts intra-host",
    "ids inside": "ids intra-host",
    "weights inside": "weights intra-host",
}
"""Current name of each former transfer."""
LAST_MICRO_BATCH_TRANSFERS = ("replicas", "row statistics")
"""Names of backward transfers that start only after all ranks have agreed on the loss of the last micro-batch."""
NON_STEP_TRANSFERS = frozenset(
    ("checkpoint blocks", "prefetched embeddings", "out-of-range ids", "clamped elements", "measurement")
)
"""Names of collectives outside of training steps."""


def id_bytes(longest: int) -> int:
    """Return the bytes per id in an exchange. `longest` is the number of rows of the longest row range."""
    # Ids are sent relative to the start of their row range.
    return 4 if longest <= MAX_INT32 else 8


def max_range_rows(tables: Sequence[TableSpec], plan: Plan | None = None) -> int:
    """Return the number of rows of the longest row range in `plan`, or of the longest table if there is no plan."""
    if plan is None:
        return max((table.num_embeddings for table in tables), default=0)
    return max((b - a for entry in plan.tables for a, b in {shard.rows for shard in entry.shards}), default=0)


def element_bytes(tables: Sequence[TableSpec]) -> int:
    """Return the bytes of an unencoded element of a bag, row or gradient in an exchange, and of an id weight."""
    # All tables are exchanged in one type.
    return 8 if any(table.dtype == "float64" for table in tables) else 4


def step_transfers(
    workload: Workload,
    plan: Plan | None,
    num_ranks: int,
    ranks_per_host: int,
    exchange: ExchangeAlgorithm | None = None,
    dense_exchange: CrossHostAlgorithm | None = None,
) -> tuple[Transfer, ...]:
    """List the transfers of one training step, in the order in which they start. Empty on a single rank.

    The batch size of `workload` matters only if the loss needs the global batch. Without a plan, all transfers that any
    plan could need are listed. `exchange` is the algorithm for ids, embeddings and their gradients, and
    `dense_exchange` that of all-reduces between hosts. `None` uses those of the plan.
    """
    if num_ranks == 1:
        return ()
    exchange = exchange or (None if plan is None else plan.exchange)
    dense_exchange = dense_exchange or (None if plan is None else plan.dense_exchange)
    step = _StepTransfers(
        workload.tables,
        workload.features,
        plan,
        num_ranks,
        ranks_per_host,
        workload.dense.parameter_bytes,
        workload.dense_exchange,
        exchange == "hierarchical" and 1 < ranks_per_host < num_ranks,
        workload.comm,
        (exchange, dense_exchange),
    )
    agree = _replicated_transfer("agree", COUNT_BYTES * (NUM_AGREED_VALUES + step.dense.num_flags), 1, "gather")
    back = [*step.dense_backward(), *step.backward()]
    early = (
        []
        if step.num_micro_batches == 1
        else [transfer for transfer in back if transfer.name not in LAST_MICRO_BATCH_TRANSFERS]
    )
    late = [transfer for transfer in back if transfer not in early]
    # With one norm over layers and rows, rows move only after all gradients have arrived.
    norm, statistics = list[Transfer](), list[Transfer]()
    if step.dense.clips_rows:
        norm = [_replicated_transfer(GRADIENT_NORM, NUM_NORM_TERMS * COUNT_BYTES, 1, "gather")]
        statistics = [transfer for transfer in late if transfer.name == "row statistics"]
    num_bytes = step.dense.logit_bytes * -(-workload.batch_size // num_ranks)
    logits = [_replicated_transfer("logits", num_bytes, 1, "gather")] if num_bytes else []
    masked = step.dense.num_masked_tasks
    label_weights = [_replicated_transfer("label weights", COUNT_BYTES * masked, 1, "gather")] if masked else []
    return (
        *label_weights,
        *step.forward(),
        *step.dense_forward(),
        *logits,
        *early,
        agree,
        *(transfer for transfer in late if transfer not in statistics),
        *step.dense_reductions(),
        *norm,
        *statistics,
    )


@dataclass(frozen=True)
class _StepTransfers:
    tables: Sequence[TableSpec]
    features: Sequence[FeatureSpec]
    plan: Plan | None
    num_ranks: int
    ranks_per_host: int
    parameter_bytes: int
    dense: DenseExchange
    is_hierarchical: bool
    comm: Communication
    algorithms: tuple[ExchangeAlgorithm | None, CrossHostAlgorithm | None]

    def forward(self) -> list[Transfer]:
        times, id_width = (
            self.num_micro_batches * self.num_batch_groups,
            id_bytes(max_range_rows(self.tables, self.plan)),
        )
        header, count = times * NUM_HEADER_FIELDS * COUNT_BYTES, self.num_micro_batches * COUNT_BYTES
        weighted = len({feature.batch for feature in self.features if feature.weighted})
        weight = element_bytes(self.tables)
        if not self.is_hierarchical:
            counts = (TransferPart("pair", header, "owners"), TransferPart("route", count, "owners"))
            ids = (TransferPart("bag", id_width, "owners"), TransferPart("id", id_width, "owners"))
            transfers = [Transfer("counts", "input_dist", counts, times), Transfer("ids", "input_dist", ids, times)]
            if weighted:
                weights = (TransferPart("weight", weight, "owners"),)
                transfers.append(Transfer("weights", "input_dist", weights, self.num_micro_batches * weighted))
            return [*transfers, *self.embeddings()]
        across: list[tuple[TrafficUnit, float]] = [
            ("twin pair", header),
            ("host route", count),
            ("host row route", count),
        ]
        inside: list[tuple[TrafficUnit, float]] = [("pair", header), ("route", count), ("row route", count)]
        parts: dict[str, tuple[tuple[TransferPart, ...], tuple[TransferPart, ...]]] = {
            "counts": (
                tuple(TransferPart(each, num_bytes, "hosts") for each, num_bytes in across),
                tuple(TransferPart(each, num_bytes, "host") for each, num_bytes in inside),
            ),
            "ids": (
                (TransferPart("host bag", id_width, "hosts"), TransferPart("host id", id_width, "hosts")),
                (TransferPart("bag", id_width, "host"), TransferPart("id", id_width, "host")),
            ),
            "weights": ((TransferPart("host weight", weight, "hosts"),), (TransferPart("weight", weight, "host"),)),
        }
        number = {"counts": times, "ids": times, "weights": self.num_micro_batches * weighted}
        first = {name: Transfer(name, "input_dist", levels[0], number[name]) for name, levels in parts.items()}
        second = {
            name: Transfer(name + INTRA_HOST_SUFFIX, "input_dist", levels[1], number[name])
            for name, levels in parts.items()
        }
        ids_and_weights = ["ids", *(["weights"] if weighted else [])]
        return [
            first["counts"],
            second["counts"],
            *(first[name] for name in ids_and_weights),
            *(second[name] for name in ids_and_weights),
            *self.embeddings(),
        ]

    def embeddings(self, row: TrafficUnit | None = None, direction: Direction = "forward") -> list[Transfer]:
        """List the transfers of embeddings to the requesting ranks. `row` is the unit of rows in a hierarchical
        exchange."""
        times, number = self.num_micro_batches * self.num_batch_groups, element_bytes(self.tables)
        codec = self.comm.codec(direction)

        def written(each: TrafficUnit, way: CollectiveKind) -> TransferPart:
            return TransferPart(
                each, number if codec.is_lossless else codec.element_bytes, way, codec.scale_bytes, codec
            )

        parts: tuple[TransferPart, ...] = (written("bag number", "owners"), written("row number", "owners"))
        if not self.reduces_within_hosts and not self.is_hierarchical:
            return [Transfer("embeddings", "output_dist", parts, times, sends_to_owners=False)]
        whole = [written("whole bag number", "hosts")]
        partial: TrafficUnit = "partial bag number"
        if self.is_hierarchical:  # The owner encodes once, and forwarding ranks do not encode again.
            row, partial = row or "distinct row number", "summed bag number"
            handed_on = (written(each, "host") for each in ("handed bag number", row))
            parts = tuple(replace(part, codec=FP32) for part in handed_on)
            whole.append(written(row, "hosts"))
        parts = (*parts, TransferPart(partial, number, "host"))
        return [
            Transfer("embeddings", "output_dist", parts, times, sends_to_owners=False),
            Transfer("embeddings inter-host", "output_dist", tuple(whole), times, sends_to_owners=False),
        ]

    def backward(self) -> list[Transfer]:
        number = element_bytes(self.tables)
        transfers = [
            replace(transfer, name=GRADIENT_TRANSFERS[transfer.name], component="gradient_dist", sends_to_owners=True)
            for transfer in reversed(self.embeddings("row number", "backward"))
        ]
        if self.has_replicas:
            each: TrafficUnit = "replica number" if self.comm.codec("backward").is_lossless else "padded replica number"
            parts = (
                *self.all_reduce_parts(each, number, "backward"),
                *self.all_reduce_parts("replica row", number, "backward", counts=1.0),
            )
            # The second hop of gradients starts when the first has arrived, so replicas go between the two.
            transfers.insert(1, Transfer("replicas", "gradient_dist", parts))
        if self.num_statistics_exchanges:
            statistics = (TransferPart("row statistic", number, "columns"),)
            transfers.append(Transfer("row statistics", "gradient_dist", statistics, self.num_statistics_exchanges))
        return transfers

    def dense_forward(self) -> list[Transfer]:
        gathers = [
            _replicated_transfer("parameters", self.num_micro_batches * n, self.num_micro_batches, "host gather")
            for n in self.sharded_module_bytes
        ]
        return [*gathers, *self.batch_norms()]

    def batch_norms(self) -> list[Transfer]:
        size = self.num_micro_batches * NUM_MOMENTS * COUNT_BYTES
        return [
            _replicated_transfer("batch norm", size * width, self.num_micro_batches, "gather")
            for width in self.dense.batch_norm_widths
        ]

    def dense_backward(self) -> list[Transfer]:
        """List the backward transfers of batch norm and of sharded modules, whose parameters are gathered again."""
        transfers = [replace(norm, name=GRADIENT_TRANSFERS[norm.name]) for norm in reversed(self.batch_norms())]
        for size in reversed(self.sharded_module_bytes):
            transfers += [
                _replicated_transfer(
                    "parameters", self.num_micro_batches * size, self.num_micro_batches, "host gather"
                ),
                _replicated_transfer(
                    "gradients of parameters", self.num_micro_batches * size, self.num_micro_batches, "host scatter"
                ),
            ]
            if self.num_ranks > self.ranks_per_host:
                across = self.all_reduce_parts("step", self.num_micro_batches * size * self.ranks_per_host, "dense")[-1]
                transfers.append(Transfer("gradients of hosts", "dense", (across,), self.num_micro_batches))
        return transfers

    def all_reduce_parts(
        self, each: TrafficUnit, num_bytes: float, direction: Direction, counts: float = 0.0
    ) -> tuple[TransferPart, ...]:
        """Return the parts of an all-reduce of `num_bytes` per unit. The share `counts` of them is never encoded."""
        codec, per_host = self.comm.codec(direction), self.ranks_per_host
        path = all_reduce_algorithm(*self.algorithms, codec)
        if path == "flat" or per_host == self.num_ranks:
            return (TransferPart(each, num_bytes, "sum"),)
        near = () if per_host == 1 else (TransferPart(each, num_bytes, "host sum"),)
        across: CollectiveKind = "hosts chain" if path == "chain" else "hosts sum"
        if codec.is_lossless or counts == 1.0:
            return (*near, TransferPart(each, num_bytes / per_host, across))
        width = self.dense.element_bytes if direction == "dense" else element_bytes(self.tables)
        wire = num_bytes * (counts + (1.0 - counts) * codec.mean_element_bytes / width)
        return (*near, TransferPart(each, wire / per_host, across, codec=codec))

    def dense_reductions(self) -> list[Transfer]:
        """List the all-reduce of gradients of unsharded parameters with their counts, and of norms of sharded ones."""
        dense = self.dense
        cut = dense.element_bytes * sum(math.prod(shape) for shapes in dense.sharded_shapes for shape in shapes)
        norms = dense.sharded_shapes and dense.num_gradient_norms
        whole, counts = self.parameter_bytes - cut, dense.num_tensors - sum(map(len, dense.sharded_shapes))
        filling = 0 if self.comm.codec("dense").is_lossless else dense.num_padding_elements * dense.element_bytes
        num_bytes = whole + filling + max(counts, 0) * dense.element_bytes
        parts = self.all_reduce_parts("step", num_bytes, "dense", counts=1.0 - (whole + filling) / max(num_bytes, 1))
        return [
            *([Transfer("dense", "dense", parts)] if whole else []),
            *(
                [
                    _replicated_transfer(
                        "norms", dense.num_gradient_norms * COUNT_BYTES, dense.num_gradient_norms, "host gather"
                    )
                ]
                if norms
                else []
            ),
        ]

    @property
    def num_micro_batches(self) -> int:
        return self.dense.num_micro_batches

    @property
    def num_batch_groups(self) -> int:
        return len({feature.batch for feature in self.features})

    @property
    def reduces_within_hosts(self) -> bool:
        if self.num_ranks == self.ranks_per_host:
            return False
        if self.plan is None:
            return True
        pooled = {feature.table for feature in self.features if feature.pooling != "none"}
        return any(entry.sharding in HOST_REDUCED_TYPES for entry in self.plan.tables if entry.table in pooled)

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
    def num_statistics_exchanges(self) -> int:
        stages = {table.name: ROW_STATISTICS.get(table.optimizer.name, (0, 0))[0] for table in self.tables}
        if self.plan is not None:
            cut = {entry.table for entry in self.plan.tables if len({shard.columns for shard in entry.shards}) > 1}
            stages = {name: number for name, number in stages.items() if name in cut}
        return max(stages.values(), default=0)

    @property
    def sharded_module_bytes(self) -> list[int]:
        """Bytes per rank of each sharded module, padded for equal shards of the first dimension of its parameters."""
        return [
            sum(-(-first // self.ranks_per_host) * math.prod(others) for first, *others in shapes)
            * self.dense.element_bytes
            for shapes in self.dense.sharded_shapes
        ]


def _replicated_transfer(name: str, num_bytes: float, times: int, way: CollectiveKind) -> Transfer:
    return Transfer(name, "dense", (TransferPart("step", num_bytes, way),), times)
