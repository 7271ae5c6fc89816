"""What travels between ranks in a training step: one list, which the step sends by and the planner multiplies by.

Each collective of a step is a Transfer: it has a name, which `World` is told with the data, and parts, each so many
bytes for each thing of one kind that a batch has. A step under a plan is

    stage        transfer                       to       so many bytes for each
    -----------  -----------------------------  -------  -----------------------------------------------
    input_dist   label weights                  all      step, if labels may be missing
                 counts                         owners   pair of ranks, route
                 ids                            owners   bag (its length), id
                 weights                        owners   id
    output_dist  answers                        askers   number of a bag or row
                 whole bags                     askers   number of a bag that a host has summed
    dense        batch norm, agree              all      step
                 logits                         all      sample, where a loss is of the whole batch
                 gradients of batch norm        all      step
    backward     gradients of whole bags        owners   number of a bag that a host has summed
                 gradients                      owners   number of a bag or row
                 replicas                       all      number and row of a replica
                 row statistics                 owners   touched row and 16 columns
    dense        dense                          all      parameter
                 norms                          all      step

of which those of tables take place only where a table needs them (arXiv 2104.05158, section 4.2: input all-to-all,
pooled all-to-all, and their mirrors; section 4.2.1 for the sums inside a host). With exchange 'two_level' ids come in
two steps, bags and rows go as those that a host sums, and a row that is not pooled once for each rank that asks:

    input_dist   counts, counts inside          twins, mates   pair of twins or mates, route of a host, route
                 ids, ids inside                twins, mates   bag and id: once for each host, and for each owner
                 weights, weights inside        twins, mates   id, likewise
    output_dist  answers                        mates          number of a bag, number of a distinct row
                 whole bags                     twins          number of a bag of a host, number of a distinct row
    backward     gradients of whole bags        twins          number of a bag of a host, number of a row
                 gradients                      mates          number of a bag, number of a row

A codec writes numbers that go to owners, to askers or to twins: codec 'forward' those of bags and rows, 'backward'
their gradients and, between hosts, the sums of replicas, 'dense' the sums of dense gradients, between hosts too. What
mates exchange travels as it was computed, and so do ids, counts, weights and row statistics everywhere.
"""

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

TrafficUnit = Literal[
    "pair", "twin pair", "route", "host route", "row route", "host row route", "bag", "host bag", "id", "host id",
    "weight", "host weight", "bag number", "partial bag number", "summed bag number", "handed bag number",
    "whole bag number", "row number", "distinct row number", "row statistic", "replica number", "padded replica number",
    "replica row", "step",
]  # fmt: skip
"""What a part counts. A route is a feature that reads a piece of a table: one for each rank that asks; a row route is
one that is not pooled. A bag number is one column of one bag; partial ones are summed inside a host, to whole ones; of
these, with two levels, those that are one of several ranges of rows are summed, and others handed on as they are; a
row number is one column of a row that is not pooled, a distinct one is counted once for each rank that asks. What is a
host's is counted once for all pieces of a host that hold columns of the same rows. A row statistic is a sum over a
touched row's part of 16 columns, for each other owner of columns of the row. Padded are numbers of rows whose columns
are rounded up to 16."""

COUNT_BYTES = 8
"""Of a count, and of a number that ranks agree on."""
NUM_AGREED_VALUES = 1
"""Numbers that ranks agree on in a step, beside the flags that a run adds: the sum of losses."""
NUM_MOMENTS = 2
"""Numbers of a column that batch norm adds up, in 64 bits; as many on the way back."""
MAX_INT32 = 2**31 - 1
"""The largest number of 32 bits."""
ROW_STATISTICS = {
    **dict.fromkeys(("rowwise_adagrad", "rowwise_adam"), (1, 1)),
    **dict.fromkeys(("lars", "lamb"), (1, 2)),
    "rowwise_lamb": (2, 3),
}
"""By row optimizer: exchanges a step, and numbers per row and 16 columns in them all, where columns are cut."""


class CountsHeader(NamedTuple):
    """What a rank tells each owner of rows before the number of ids of each route: `[header | routes ...]`, in 64 bits.

    With it all ranks know what the loss of the global batch is divided by, and where their samples lie in it, before
    any is computed. An id that is outside of its table under policy 'error' is told with its place, so that all ranks
    raise alike. Of what a rank knows after sorting its ids, with features a and b, b cut into two row ranges:

        place     0      1      2        3        4     5     6        7       8    9          10
        known     start  slice  padding  weight | a     b   | feature  sample  id | b range 0  b range 1

        to the owner of a           [start  slice  padding  weight  feature  sample  id | a        ]
        to the owner of b, range 1  [start  slice  padding  weight  feature  sample  id | b range 1]
    """

    tag_and_size: int
    """Samples of this rank, below BATCH_SIZES, and above them the mark of the batch: all ranks must be at one."""
    slice_size: int
    """Samples of this rank in the global batch: more than the above where gradients are accumulated."""
    num_padding: int
    """Of these, samples that only fill it up."""
    weight_bits: int
    """Sum of the weights of these, a float64 as the 64 bits that it is; see `float_bits`."""
    feature: int
    """Index of the feature of the first refused id; -1 where none is, REFUSED where the batch is, as a whole, EXHAUSTED
    where there is none any more."""
    sample: int
    """Of the first refused id, on this rank; or what is to come of a loop whose ranks run out unevenly."""
    id: int
    """The first refused id; or the batches that the rank has had."""

    @property
    def batch_size(self) -> int:
        """Samples of this rank."""
        return self.tag_and_size % BATCH_SIZE_RADIX

    @property
    def batch_tag(self) -> int:
        """What tells the batch from those before and after it."""
        return self.tag_and_size // BATCH_SIZE_RADIX

    @property
    def weight(self) -> float:
        """Sum of the weights of this rank's samples."""
        [weight] = struct.unpack("<d", struct.pack("<q", self.weight_bits))
        return float(weight)


def float_bits(number: float) -> int:
    """The bits of a float64 as an integer."""
    return int.from_bytes(struct.pack("<d", number), "little", signed=True)


NUM_BATCH_FIELDS = 4
"""Numbers of a header that a rank knows before it looks at ids."""
BATCH_SIZE_RADIX = 2**32
"""More than the samples of any rank."""
MAX_TAGS = 2**15
"""The mark of a batch is its number below this, and as many times its step."""
NUM_HEADER_FIELDS = len(CountsHeader._fields)
"""Numbers before the counts of the routes."""
BATCH_REJECTED, EXHAUSTED = -2, -3
"""Stand for the feature where a batch was refused as a whole, and where a rank has no batch left."""


@dataclass(frozen=True)
class TransferPart:
    """So many bytes for each of something."""

    unit: TrafficUnit
    """What is counted."""
    num_bytes: float
    """Of one of them, in a step."""
    collective: CollectiveKind
    """Between whom they travel."""
    scale_bytes: float = 0.0
    """Beside those of its numbers, of each 16 columns of a bag or row, the last perhaps fewer."""
    codec: Codec = FP32
    """How numbers are written; what is not float32 numbers travels as it is, too."""

    @property
    def elements_per_byte(self) -> float:
        """How many numbers a codec writes in a byte of this part, in whole blocks; 0 where it writes none."""
        return 0.0 if self.codec.is_lossless else 1.0 / self.codec.mean_element_bytes


@dataclass(frozen=True)
class Transfer:
    """One collective of a step."""

    name: str
    """What it is called, also where it begins."""
    component: StepComponent
    """When it takes place."""
    parts: tuple[TransferPart, ...]
    """Bytes of all `times` together."""
    num_calls: int = 1
    """How often it takes place in a step."""
    sends_to_owners: bool = True
    """Whether it goes from the ranks of the samples to those of the rows; answers go the other way."""

    @property
    def is_reduction(self) -> bool:
        """Whether it is an all-reduce, or half of one."""
        return any(
            part.collective in ("sum", "host sum", "hosts sum", "hosts chain", "host scatter") for part in self.parts
        )

    @property
    def algorithm(self) -> AllReduceAlgorithm | None:
        """Which way a sum takes; None where it is none. One between hosts alone takes that of its second half."""
        ways = {part.collective for part in self.parts}
        if "hosts chain" in ways:
            return "chain"
        return "twins" if "hosts sum" in ways else "flat" if self.is_reduction else None

    @property
    def depends_on_plan(self) -> bool:
        """Whether what travels depends on where tables lie."""
        return self.parts[0].unit != "step"


GRADIENT_TRANSFERS = {
    "answers": "gradients",
    "whole bags": "gradients of whole bags",
    "batch norm": "gradients of batch norm",
}
"""Names of the ways back."""
INTRA_HOST_SUFFIX = " inside"
"""Ends the name of what a host hands on among its ranks."""
FORWARDED_TRANSFERS = tuple(name + INTRA_HOST_SUFFIX for name in ("counts", "ids", "weights"))
TABLE_TRANSFERS = ("counts", "ids", "weights", *FORWARDED_TRANSFERS, "answers", "whole bags", "gradients",
                   "gradients of whole bags",
             "replicas", "row statistics")  # fmt: skip
"""Names of the transfers of tables."""
STEP_TRANSFERS = frozenset((*TABLE_TRANSFERS, "label weights", "batch norm",
                             "gradients of batch norm", "logits", "agree", "dense",
                      "norms", "parameters", "gradients of parameters", "gradients of hosts"))  # fmt: skip
"""Names of all transfers that `step_transfers` may list."""
LAST_MICRO_BATCH_TRANSFERS = ("replicas", "row statistics")
"""Names of those of a backward pass that begin with the last micro-batch, whose loss all ranks have agreed on."""
NON_STEP_TRANSFERS = frozenset(
    ("blocks of a checkpoint", "carried answers", "ids outside", "numbers clamped", "a measurement")
)
"""Names of collectives that are part of no step."""


def id_bytes(longest: int) -> int:
    """Of an id on the wire, where the longest range of rows that one rank holds has `longest` rows: an id travels as a
    row of its range."""
    return 4 if longest <= MAX_INT32 else 8


def max_range_rows(tables: Sequence[TableSpec], plan: Plan | None = None) -> int:
    """Rows of the longest range of rows that `plan` cuts a table into; of the longest table without one."""
    if plan is None:
        return max((table.num_embeddings for table in tables), default=0)
    return max((b - a for entry in plan.tables for a, b in {shard.rows for shard in entry.shards}), default=0)


def element_bytes(tables: Sequence[TableSpec]) -> int:
    """Of a number of a bag, a row or a gradient on the wire, and of a weight: tables have one type for them all."""
    return 8 if any(table.dtype == "float64" for table in tables) else 4


def step_transfers(
    workload: Workload,
    plan: Plan | None,
    num_ranks: int,
    ranks_per_host: int,
    exchange: ExchangeAlgorithm | None = None,
    dense_exchange: CrossHostAlgorithm | None = None,
) -> tuple[Transfer, ...]:
    """All transfers of one training step on `num_ranks` ranks, in the order in which they begin; none on one rank.

    Args:
        workload: tables, features and the dense part; the size of the batch matters for a loss of all of it alone.
        plan: where tables lie; None: anywhere, so that the list has all that some plan needs.
        num_ranks: all ranks.
        ranks_per_host: ranks of a host.
        exchange: which way they take between hosts; None: as the plan says.
        dense_exchange: which way sums take there; None: as the plan says.
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
        exchange == "two_level" and 1 < ranks_per_host < num_ranks,
        workload.comm,
        (exchange, dense_exchange),
    )
    agree = _replicated_transfer("agree", COUNT_BYTES * (NUM_AGREED_VALUES + step.dense.num_flags), 1, "gather")
    back = [*step.dense_backward(), *step.backward()]
    early = [] if step.num_micro_batches == 1 else [own for own in back if own.name not in LAST_MICRO_BATCH_TRANSFERS]
    late = [own for own in back if own not in early]
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
        *late,
        *step.dense_reductions(),
    )


@dataclass(frozen=True)
class _StepTransfers:
    """What a list follows from."""

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
    """Of the plan, between hosts."""

    def forward(self) -> list[Transfer]:
        """Ids to the owners of their rows, and what is looked up back."""
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
            found = [Transfer("counts", "input_dist", counts, times), Transfer("ids", "input_dist", ids, times)]
            if weighted:
                weights = (TransferPart("weight", weight, "owners"),)
                found.append(Transfer("weights", "input_dist", weights, self.num_micro_batches * weighted))
            return [*found, *self.embeddings()]
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
        """Bags and rows to the ranks that asked; with two levels `row` is what rows are counted by."""
        times, number = self.num_micro_batches * self.num_batch_groups, element_bytes(self.tables)
        codec = self.comm.codec(direction)

        def written(each: TrafficUnit, way: CollectiveKind) -> TransferPart:
            return TransferPart(
                each, number if codec.is_lossless else codec.element_bytes, way, codec.scale_bytes, codec
            )

        parts: tuple[TransferPart, ...] = (written("bag number", "owners"), written("row number", "owners"))
        if not self.reduces_within_hosts and not self.is_hierarchical:
            return [Transfer("answers", "output_dist", parts, times, sends_to_owners=False)]
        whole = [written("whole bag number", "hosts")]
        partial: TrafficUnit = "partial bag number"
        if self.is_hierarchical:  # what is handed on is written once, by its owner
            row, partial = row or "distinct row number", "summed bag number"
            handed_on = (written(each, "host") for each in ("handed bag number", row))
            parts = tuple(replace(part, codec=FP32) for part in handed_on)
            whole.append(written(row, "hosts"))
        parts = (*parts, TransferPart(partial, number, "host"))
        return [
            Transfer("answers", "output_dist", parts, times, sends_to_owners=False),
            Transfer("whole bags", "output_dist", tuple(whole), times, sends_to_owners=False),
        ]

    def backward(self) -> list[Transfer]:
        """Gradients to the owners of rows, sums of those of replicas, sums over rows whose columns are cut."""
        number = element_bytes(self.tables)
        found = [
            replace(own, name=GRADIENT_TRANSFERS[own.name], component="backward", sends_to_owners=True)
            for own in reversed(self.embeddings("row number", "backward"))
        ]
        if self.has_replicas:
            each: TrafficUnit = "replica number" if self.comm.codec("backward").is_lossless else "padded replica number"
            parts = (
                *self.all_reduce_parts(each, number, "backward"),
                *self.all_reduce_parts("replica row", number, "backward", counts=1.0),
            )
            found.insert(1, Transfer("replicas", "backward", parts))  # a second level begins when the first is there
        if self.num_statistics_exchanges:
            statistics = (TransferPart("row statistic", number, "columns"),)
            found.append(Transfer("row statistics", "backward", statistics, self.num_statistics_exchanges))
        return found

    def dense_forward(self) -> list[Transfer]:
        """Parameters of modules that are cut over a host, and moments of batch norm."""
        gathers = [
            _replicated_transfer("parameters", self.num_micro_batches * n, self.num_micro_batches, "host gather")
            for n in self.sharded_module_bytes
        ]
        return [*gathers, *self.batch_norms()]

    def batch_norms(self) -> list[Transfer]:
        """Moments of each layer of batch norm."""
        size = self.num_micro_batches * NUM_MOMENTS * COUNT_BYTES
        return [
            _replicated_transfer("batch norm", size * width, self.num_micro_batches, "gather")
            for width in self.dense.batch_norm_widths
        ]

    def dense_backward(self) -> list[Transfer]:
        """The same backwards, and gradients of what is cut."""
        found = [replace(own, name=GRADIENT_TRANSFERS[own.name]) for own in reversed(self.batch_norms())]
        for size in reversed(self.sharded_module_bytes):
            found += [
                _replicated_transfer(
                    "parameters", self.num_micro_batches * size, self.num_micro_batches, "host gather"
                ),
                _replicated_transfer(
                    "gradients of parameters", self.num_micro_batches * size, self.num_micro_batches, "host scatter"
                ),
            ]
            if self.num_ranks > self.ranks_per_host:
                across = self.all_reduce_parts("step", self.num_micro_batches * size * self.ranks_per_host, "dense")[-1]
                found.append(Transfer("gradients of hosts", "dense", (across,), self.num_micro_batches))
        return found

    def all_reduce_parts(
        self, each: TrafficUnit, num_bytes: float, direction: Direction, counts: float = 0.0
    ) -> tuple[TransferPart, ...]:
        """The parts of a sum over ranks of so many bytes, of which the part `counts` is never encoded."""
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
        """Gradients of what every rank has whole, each beside a count; the norm of those that are cut."""
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
        """Micro-batches of a rank."""
        return self.dense.num_micro_batches

    @property
    def num_batch_groups(self) -> int:
        """Groups of features that share a batch size."""
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
        """Exchanges of row statistics."""
        stages = {table.name: ROW_STATISTICS.get(table.optimizer.name, (0, 0))[0] for table in self.tables}
        if self.plan is not None:
            cut = {entry.table for entry in self.plan.tables if len({shard.columns for shard in entry.shards}) > 1}
            stages = {name: number for name, number in stages.items() if name in cut}
        return max(stages.values(), default=0)

    @property
    def sharded_module_bytes(self) -> list[int]:
        """Of each module that is cut: what a rank keeps, its parameters' first dimensions rounded up."""
        return [
            sum(-(-first // self.ranks_per_host) * math.prod(others) for first, *others in shapes)
            * self.dense.element_bytes
            for shapes in self.dense.sharded_shapes
        ]


def _replicated_transfer(name: str, num_bytes: float, times: int, way: CollectiveKind) -> Transfer:
    """Of what every rank has alike, so many bytes in a step."""
    return Transfer(name, "dense", (TransferPart("step", num_bytes, way),), times)
