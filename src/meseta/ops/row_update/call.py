"""What an update is given: tables, features, bags; and the same as the flat arguments of the operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from meseta.jagged.shapes import Float, Int
from meseta.ops.row_marks import ROWS_PER_WORD, num_words
from meseta.ops.row_program.optimizer import Hyper, RowOptimizer, RowState
from meseta.ops.row_program.program import RowProgram, trace
from meseta.spec import MesetaError


@dataclass(frozen=True)
class TableRows:
    """A shard of a table, updated in place."""

    weight: Float[Tensor, "rows columns"]
    """Contiguous; float32, float16, bfloat16 or (through the reference) float64."""
    state: RowState
    """By name: [rows, columns] or [rows], float32 (float64 beside float64 rows)."""
    key: int = 0
    """64-bit key of the random bits that round 16-bit rows."""
    first_row: int = 0
    """Row of the whole table that is row 0 here; the random bits go by the rows of the whole table."""
    first_column: int = 0
    """Likewise; a multiple of 16."""
    row_ids: Int[Tensor, " rows"] | None = None
    """int64, contiguous and beside the rows: which row, counted from `first_row`, each row of `weight` is now; random
    bits go by it. None: each is at its own place."""
    marks: Int[Tensor, " words"] | None = None
    """int32 beside the rows: where each stepped row is marked, counted from `first_row`; where rows are at their own
    places there may be a log behind them. See meseta.ops.row_marks."""


@dataclass(frozen=True)
class FeatureGradient:
    """Where the ids and the gradient of one feature lie."""

    position: int
    """Which of the features in the offsets it is."""
    table: int
    """Index of the table that the feature reads."""
    gradient: int
    """Index of the matrix that holds its gradient."""
    column: int = 0
    """First column of its gradient there."""
    per_id: bool = False
    """False: one row of the matrix per bag (pooled). True: one per id of this feature (not pooled)."""
    weighted: bool = False
    """Whether the contribution of an id is the bag's gradient times the id's weight."""


@dataclass(frozen=True)
class Bags:
    """Ids of a batch."""

    ids: Int[Tensor, " nnz"]
    """Feature-major, int32 or int64."""
    offsets: Int[Tensor, " F_times_B_plus_1"]
    """Bag b of the feature at position p is ids[offsets[p * B + b] : offsets[p * B + b + 1]]."""
    num_samples: int
    """B."""
    weights: Float[Tensor, " nnz"] | None = None
    """One per id, read for weighted features."""


@dataclass(frozen=True)
class UpdateGroup:
    """Tables of one row optimizer and one type of rows, and the features that read them; made once, stepped often."""

    optimizer: RowOptimizer
    tables: tuple[TableRows, ...]
    embedding_dims: tuple[int, ...]
    """Columns of each whole table, whatever its shard holds."""
    features: tuple[FeatureGradient, ...]
    """In the order in which their contributions are added."""

    @cached_property
    def program(self) -> RowProgram:
        """What runs on each row."""
        return trace(self.optimizer)

    @cached_property
    def weights(self) -> list[Tensor]:
        """Rows of each table."""
        return [table.weight for table in self.tables]

    @cached_property
    def states(self) -> list[Tensor]:
        """All states of the first table, then of the second, in the order of the program."""
        for table in self.tables:
            if set(table.state) != set(self.program.state_names):
                raise MesetaError(
                    f"row_update: optimizer {self.optimizer.name!r} keeps {sorted(self.program.state_names)}, "
                    f"but a table has the states {sorted(table.state)}"
                )
        return [table.state[name] for table in self.tables for name in self.program.state_names]

    @cached_property
    def state_is_row(self) -> list[bool]:
        """Whether a state has one number per row."""
        return [kind == "row" for kind in self.program.state_kinds]

    @cached_property
    def origins(self) -> list[int]:
        """For each table: first row, first column, key."""
        return [n for t in self.tables for n in (t.first_row, t.first_column, to_int64(t.key))]

    @cached_property
    def row_ids(self) -> list[Tensor] | None:
        """Of each table; empty where rows are at their own places, None where all are."""
        if all(table.row_ids is None for table in self.tables):
            return None
        return [t.weight.new_empty(0, dtype=torch.int64) if t.row_ids is None else t.row_ids for t in self.tables]

    @cached_property
    def marks(self) -> list[Tensor] | None:
        """Of each table; empty where none are kept, None where no table has any."""
        if all(table.marks is None for table in self.tables):
            return None
        return [t.weight.new_empty(0, dtype=torch.int32) if t.marks is None else t.marks for t in self.tables]

    @cached_property
    def feature_fields(self) -> list[int]:
        """For each feature: the fields of FeatureGradient."""
        return [n for f in self.features for n in (f.position, f.table, f.gradient, f.column, f.per_id, f.weighted)]

    @cached_property
    def core_fields(self) -> CoreFields:
        """What the core is told of the tables and states."""
        return pack_core_fields(self.weights, self.states, self.state_is_row, self.origins, self.row_ids, self.marks)

    def uniforms(self, lr: float, step: int) -> Tensor:
        """The uniforms of each table in this step, float64 [tables, uniforms]."""
        values = {d: self.program.uniform_values(Hyper(lr, step, d)) for d in set(self.embedding_dims)}
        return torch.from_numpy(np.array([values[d] for d in self.embedding_dims], dtype=np.float64))


@dataclass(frozen=True)
class UpdateCall:
    """The operator's arguments, in the order of its schema."""

    tables: list[Tensor]
    states: list[Tensor]
    """All states of the first table, then of the second, in the order of the program."""
    code: Tensor
    """Instructions [n, 5] of meseta.ops.row_program.program."""
    uniforms: Tensor
    """float64 [tables, uniforms]."""
    state_is_row: list[bool]
    origins: list[int]
    """For each table: first row, first column, key."""
    features: list[int]
    """For each feature: the fields of FeatureGradient."""
    ids: Tensor
    offsets: Tensor
    num_bags: int
    gradients: list[Tensor]
    weights: Tensor | None
    step: int
    found_inf: Tensor | None = None
    """float32, one number beside the rows: where it is not 0, nothing is written."""
    row_ids: list[Tensor] | None = None
    """As those of UpdateGroup."""
    marks: list[Tensor] | None = None
    """Likewise."""

    def shard_rows(self, table: int, places: Tensor) -> Tensor:
        """Which rows of a shard lie there."""
        row_ids = None if self.row_ids is None or not self.row_ids[table].numel() else self.row_ids[table]
        return places if row_ids is None else row_ids[places]


def unpack_features(numbers: Sequence[int]) -> list[FeatureGradient]:
    """The features of which these are the fields."""
    fields = [numbers[f : f + NUM_FEATURE_FIELDS] for f in range(0, len(numbers), NUM_FEATURE_FIELDS)]
    return [FeatureGradient(p, t, g, c, bool(per_id), bool(weighted)) for p, t, g, c, per_id, weighted in fields]


CoreFields = tuple[list[int], list[int]]
"""For each table: address, rows, columns, first row, first column, key, address of its row ids or 0, address of its
marks or 0 and their words; and the address of each state."""


def pack_core_fields(
    tables: Sequence[Tensor],
    states: Sequence[Tensor],
    state_is_row: Sequence[bool],
    origins: Sequence[int],
    row_ids: Sequence[Tensor] | None,
    marks: Sequence[Tensor] | None,
) -> CoreFields:
    """What the core is told of tables and states; raises MesetaError for one of another type or shape."""
    dtype = tables[0].dtype
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    fields, addresses = [], []
    for t, table in enumerate(tables):
        if table.dtype != dtype or table.dim() != 2 or not table.is_contiguous():
            raise MesetaError(
                f"row_update: table {t} is {table.dtype} {list(table.shape)}, but all must be contiguous, [rows, D] "
                f"and {dtype} as the first; convert it"
            )
        origin = origins[3 * t : 3 * t + 3]
        check_origin("row_update", origin)
        fields += [table.data_ptr(), table.size(0), table.size(1), origin[0], origin[1], origin[2] % (1 << 64)]
        fields.append(0 if row_ids is None else row_ids_address(table, row_ids[t]))
        fields += marks_address(table, None if marks is None else marks[t], None if row_ids is None else row_ids[t])
        for is_row, state in zip(state_is_row, states[t * len(state_is_row) :], strict=False):
            wanted = table.shape[:1] if is_row else table.shape
            if state.dtype != exact or state.shape != wanted or not state.is_contiguous():
                raise MesetaError(
                    f"row_update: a state of table {t} is {state.dtype} {list(state.shape)}; "
                    f"it must be contiguous {exact} {list(wanted)}"
                )
            addresses.append(state.data_ptr())
    return fields, addresses


def row_ids_address(table: Tensor, row_ids: Tensor | None) -> int:
    """0 where there are none; raises MesetaError for those that do not fit the table."""
    if row_ids is None or not row_ids.numel():
        return 0
    if row_ids.dtype != torch.int64 or row_ids.shape != table.shape[:1] or not row_ids.is_contiguous():
        raise MesetaError(
            f"row_update: row ids are {row_ids.dtype} {list(row_ids.shape)}; give contiguous int64 [{table.size(0)}]"
        )
    if row_ids.device != table.device:
        raise MesetaError(f"row_update: row ids are on {row_ids.device}, and rows on {table.device}; put them there")
    return row_ids.data_ptr()


def marks_address(table: Tensor, marks: Tensor | None, row_ids: Tensor | None) -> tuple[int, int]:
    """Address and words, 0 where there are none; raises MesetaError for marks that do not fit the table."""
    if marks is None or not marks.numel():
        return 0, 0
    is_in_slots = row_ids is not None and row_ids.numel() > 0  # the core checks each row then
    least = 1 if is_in_slots else num_words(table.size(0))
    if marks.dtype != torch.int32 or marks.dim() != 1 or marks.numel() < least or not marks.is_contiguous():
        raise MesetaError(
            f"row_update: marks are {marks.dtype} {list(marks.shape)}; give contiguous int32 [{least}], a word for "
            f"{ROWS_PER_WORD} rows"
        )
    if marks.device != table.device:
        raise MesetaError(f"row_update: marks are on {marks.device}, and rows on {table.device}; put them there")
    return marks.data_ptr(), marks.numel()


NUM_FEATURE_FIELDS = 6
"""Numbers of a FeatureGradient."""


@dataclass(frozen=True)
class ApplyCall:
    """Arguments of the staged operator, in the order of its schema."""

    table: Tensor
    states: list[Tensor]
    code: Tensor
    uniforms: Tensor
    state_is_row: list[bool]
    origin: list[int]
    """First row, first column, key."""
    rows: Tensor
    gradient: Tensor
    stats: Tensor
    sums: Tensor | None
    step: int
    found_inf: Tensor | None = None
    """As that of UpdateCall; `sums` are written all the same."""
    row_ids: Tensor | None = None
    """As that of TableRows."""
    marks: Tensor | None = None
    """Likewise."""

    @property
    def shard_rows(self) -> Tensor:
        """Which rows of the shard lie at `rows`."""
        return self.rows if self.row_ids is None else self.row_ids[self.rows]


def check_program(operator: str, code: Tensor, uniforms: Tensor, num_tables: int, step: int) -> None:
    """Raise MesetaError unless these are instructions [n, 5], uniforms [tables, any] and a step of 32 bits."""
    if code.dtype != torch.int32 or code.dim() != 2 or code.shape[1] != 5 or not code.is_contiguous():
        raise MesetaError(f"{operator}: code is {code.dtype} {list(code.shape)}; give contiguous int32 [n, 5]")
    if uniforms.dim() != 2 or uniforms.shape[0] != num_tables:
        raise MesetaError(f"{operator}: uniforms are {list(uniforms.shape)}; give [{num_tables}, n], a row per table")
    if not 0 <= step < 1 << 32:
        raise MesetaError(f"{operator}: step is {step}; it must be in 0..2**32-1")


def check_origin(operator: str, origin: Sequence[int]) -> None:
    """Raise MesetaError unless these are a first row, a first column and a key that an int64 holds."""
    if len(origin) != 3 or origin[0] < 0 or origin[1] < 0:
        raise MesetaError(f"{operator}: origin {list(origin)}; give a first row and column, not negative, and a key")


def to_int64(key: int) -> int:
    """A 64-bit key as the int of a schema."""
    return key - (1 << 64) if key >= 1 << 63 else key
