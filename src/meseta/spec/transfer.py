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

Each = Literal[
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
NUM_AGREED = 1
"""Numbers that ranks agree on in a step, beside the flags that a run adds: the sum of losses."""
MOMENTS = 2
"""Numbers of a column that batch norm adds up, in 64 bits; as many on the way back."""
INT32_MAX = 2**31 - 1
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

    start: int
    """Samples of this rank, below BATCH_SIZES, and above them the mark of the batch: all ranks must be at one."""
    slice_size: int
    """Samples of this rank in the global batch: more than the above where gradients are accumulated."""
    num_padding: int
    """Of these, samples that only fill it up."""
    weight_bits: int
    """Sum of the weights of these, a float64 as the 64 bits that it is; see `float_bits`."""
    feature: int
    """Index of the feature of the first refused id; -1 where none is, REFUSED where the batch is, as a whole, RAN_OUT
    where there is none any more."""
    sample: int
    """Of the first refused id, on this rank; or what is to come of a loop whose ranks run out unevenly."""
    id: int
    """The first refused id; or the batches that the rank has had."""

    @property
    def batch_size(self) -> int:
        """Samples of this rank."""
        return self.start % BATCH_SIZES

    @property
    def mark(self) -> int:
        """What tells the batch from those before and after it."""
        return self.start // BATCH_SIZES

    @property
    def weight(self) -> float:
        """Sum of the weights of this rank's samples."""
        [weight] = struct.unpack("<d", struct.pack("<q", self.weight_bits))
        return float(weight)


def float_bits(number: float) -> int:
    """The bits of a float64 as an integer."""
    return int.from_bytes(struct.pack("<d", number), "little", signed=True)


NUM_LEADING = 4
"""Numbers of a header that a rank knows before it looks at ids."""
BATCH_SIZES = 2**32
"""More than the samples of any rank."""
MARKS = 2**15
"""The mark of a batch is its number below this, and as many times its step."""
HEADER = len(CountsHeader._fields)
"""Numbers before the counts of the routes."""
REFUSED, RAN_OUT = -2, -3
"""Stand for the feature where a batch was refused as a whole, and where a rank has no batch left."""


@dataclass(frozen=True)
class Part:
    """So many bytes for each of something."""

    each: Each
    """What is counted."""
    num_bytes: float
    """Of one of them, in a step."""
    way: Way
    """Between whom they travel."""
    block_bytes: float = 0.0
    """Beside those of its numbers, of each 16 columns of a bag or row, the last perhaps fewer."""
    codec: Codec = FP32
    """How numbers are written; what is not float32 numbers travels as it is, too."""

    @property
    def byte_numbers(self) -> float:
        """How many numbers a codec writes in a byte of this part, in whole blocks; 0 where it writes none."""
        return 0.0 if self.codec.is_whole else 1.0 / self.codec.each_bytes


@dataclass(frozen=True)
class Transfer:
    """One collective of a step."""

    name: str
    """What it is called, also where it begins."""
    stage: Component
    """When it takes place."""
    parts: tuple[Part, ...]
    """Bytes of all `times` together."""
    times: int = 1
    """How often it takes place in a step."""
    to_owners: bool = True
    """Whether it goes from the ranks of the samples to those of the rows; answers go the other way."""

    @property
    def is_sum(self) -> bool:
        """Whether it is an all-reduce, or half of one."""
        return any(part.way in ("sum", "host sum", "hosts sum", "hosts chain", "host scatter") for part in self.parts)

    @property
    def path(self) -> SumPath | None:
        """Which way a sum takes; None where it is none. One between hosts alone takes that of its second half."""
        ways = {part.way for part in self.parts}
        if "hosts chain" in ways:
            return "chain"
        return "twins" if "hosts sum" in ways else "flat" if self.is_sum else None

    @property
    def is_of_tables(self) -> bool:
        """Whether what travels depends on where tables lie."""
        return self.parts[0].each != "step"


GRADIENTS_OF = {
    "answers": "gradients",
    "whole bags": "gradients of whole bags",
    "batch norm": "gradients of batch norm",
}
"""Names of the ways back."""
INSIDE = " inside"
"""Ends the name of what a host hands on among its ranks."""
HANDED_ON = tuple(name + INSIDE for name in ("counts", "ids", "weights"))
OF_TABLES = ("counts", "ids", "weights", *HANDED_ON, "answers", "whole bags", "gradients", "gradients of whole bags",
             "replicas", "row statistics")  # fmt: skip
"""Names of the transfers of tables."""
OF_STEPS = frozenset((*OF_TABLES, "label weights", "batch norm", "gradients of batch norm", "logits", "agree", "dense",
                      "norms", "parameters", "gradients of parameters", "gradients of hosts"))  # fmt: skip
"""Names of all transfers that `step_transfers` may list."""
OF_LAST_PART = ("replicas", "row statistics")
"""Names of those of a backward pass that begin with the last micro-batch, whose loss all ranks have agreed on."""
BETWEEN_STEPS = frozenset(
    ("blocks of a checkpoint", "carried answers", "ids outside", "numbers clamped", "a measurement")
)
"""Names of collectives that are part of no step."""


def id_bytes(longest: int) -> int:
    """Of an id on the wire, where the longest range of rows that one rank holds has `longest` rows: an id travels as a
    row of its range."""
    return 4 if longest <= INT32_MAX else 8


def longest_range(tables: Sequence[TableSpec], plan: Plan | None = None) -> int:
    """Rows of the longest range of rows that `plan` cuts a table into; of the longest table without one."""
    if plan is None:
        return max((table.num_embeddings for table in tables), default=0)
    return max((b - a for entry in plan.tables for a, b in {shard.rows for shard in entry.shards}), default=0)


def number_bytes(tables: Sequence[TableSpec]) -> int:
    """Of a number of a bag, a row or a gradient on the wire, and of a weight: tables have one type for them all."""
    return 8 if any(table.dtype == "float64" for table in tables) else 4


def step_transfers(
    workload: Workload,
    plan: Plan | None,
    num_ranks: int,
    per_host: int,
    exchange: Exchange | None = None,
    dense_exchange: DensePath | None = None,
) -> tuple[Transfer, ...]:
    """All transfers of one training step on `num_ranks` ranks, in the order in which they begin; none on one rank.

    Args:
        workload: tables, features and the dense part; the size of the batch matters for a loss of all of it alone.
        plan: where tables lie; None: anywhere, so that the list has all that some plan needs.
        num_ranks: all ranks.
        per_host: ranks of a host.
        exchange: which way they take between hosts; None: as the plan says.
        dense_exchange: which way sums take there; None: as the plan says.
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
    early = [] if step.num_parts == 1 else [own for own in back if own.name not in OF_LAST_PART]
    late = [own for own in back if own not in early]
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
    """What a list follows from."""

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
    """Of the plan, between hosts."""

    def forward(self) -> list[Transfer]:
        """Ids to the owners of their rows, and what is looked up back."""
        times, id_width = self.num_parts * self.num_batches, id_bytes(longest_range(self.tables, self.plan))
        header, count = times * HEADER * COUNT_BYTES, self.num_parts * COUNT_BYTES
        weighted = len({feature.batch for feature in self.features if feature.weighted})
        weight = number_bytes(self.tables)
        if not self.two_level:
            counts = (Part("pair", header, "owners"), Part("route", count, "owners"))
            ids = (Part("bag", id_width, "owners"), Part("id", id_width, "owners"))
            found = [Transfer("counts", "input_dist", counts, times), Transfer("ids", "input_dist", ids, times)]
            if weighted:
                weights = (Part("weight", weight, "owners"),)
                found.append(Transfer("weights", "input_dist", weights, self.num_parts * weighted))
            return [*found, *self.answers()]
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
        """Bags and rows to the ranks that asked; with two levels `row` is what rows are counted by."""
        times, number = self.num_parts * self.num_batches, number_bytes(self.tables)
        codec = self.comm.codec(direction)

        def written(each: Each, way: Way) -> Part:
            return Part(each, number if codec.is_whole else codec.number_bytes, way, codec.block_bytes, codec)

        parts: tuple[Part, ...] = (written("bag number", "owners"), written("row number", "owners"))
        if not self.sums_in_hosts and not self.two_level:
            return [Transfer("answers", "output_dist", parts, times, to_owners=False)]
        whole = [written("whole bag number", "hosts")]
        partial: Each = "partial bag number"
        if self.two_level:  # what is handed on is written once, by its owner
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
        """Gradients to the owners of rows, sums of those of replicas, sums over rows whose columns are cut."""
        number = number_bytes(self.tables)
        found = [
            replace(own, name=GRADIENTS_OF[own.name], stage="backward", to_owners=True)
            for own in reversed(self.answers("row number", "backward"))
        ]
        if self.has_replicas:
            each: Each = "replica number" if self.comm.codec("backward").is_whole else "padded replica number"
            parts = (
                *self.summed(each, number, "backward"),
                *self.summed("replica row", number, "backward", counts=1.0),
            )
            found.insert(1, Transfer("replicas", "backward", parts))  # a second level begins when the first is there
        if self.num_stages:
            statistics = (Part("row statistic", number, "columns"),)
            found.append(Transfer("row statistics", "backward", statistics, self.num_stages))
        return found

    def forward_of_dense(self) -> list[Transfer]:
        """Parameters of modules that are cut over a host, and moments of batch norm."""
        gathers = [_alike("parameters", self.num_parts * n, self.num_parts, "host gather") for n in self.cut_bytes]
        return [*gathers, *self.batch_norms()]

    def batch_norms(self) -> list[Transfer]:
        """Moments of each layer of batch norm."""
        size = self.num_parts * MOMENTS * COUNT_BYTES
        return [_alike("batch norm", size * width, self.num_parts, "gather") for width in self.dense.norm_widths]

    def backward_of_dense(self) -> list[Transfer]:
        """The same backwards, and gradients of what is cut."""
        found = [replace(own, name=GRADIENTS_OF[own.name]) for own in reversed(self.batch_norms())]
        for size in reversed(self.cut_bytes):
            found += [
                _alike("parameters", self.num_parts * size, self.num_parts, "host gather"),
                _alike("gradients of parameters", self.num_parts * size, self.num_parts, "host scatter"),
            ]
            if self.num_ranks > self.per_host:
                across = self.summed("step", self.num_parts * size * self.per_host, "dense")[-1]
                found.append(Transfer("gradients of hosts", "dense", (across,), self.num_parts))
        return found

    def summed(self, each: Each, num_bytes: float, direction: Direction, counts: float = 0.0) -> tuple[Part, ...]:
        """The parts of a sum over ranks of so many bytes, of which the part `counts` is never encoded."""
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
        """Gradients of what every rank has whole, each beside a count; the norm of those that are cut."""
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
        """Micro-batches of a rank."""
        return self.dense.num_parts

    @property
    def num_batches(self) -> int:
        """Groups of features that share a batch size."""
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
        """Exchanges of row statistics."""
        stages = {table.name: ROW_STATISTICS.get(table.optimizer.name, (0, 0))[0] for table in self.tables}
        if self.plan is not None:
            cut = {entry.table for entry in self.plan.tables if len({shard.columns for shard in entry.shards}) > 1}
            stages = {name: number for name, number in stages.items() if name in cut}
        return max(stages.values(), default=0)

    @property
    def cut_bytes(self) -> list[int]:
        """Of each module that is cut: what a rank keeps, its parameters' first dimensions rounded up."""
        return [
            sum(-(-first // self.per_host) * math.prod(others) for first, *others in shapes) * self.dense.number_bytes
            for shapes in self.dense.cut_shapes
        ]


def _alike(name: str, num_bytes: float, times: int, way: Way) -> Transfer:
    """Of what every rank has alike, so many bytes in a step."""
    return Transfer(name, "dense", (Part("step", num_bytes, way),), times)
