"""Arguments of a row update, and their conversion to the flat arguments of the operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from meseta.ops.common import device_constant
from meseta.ops.row_marks import ROWS_PER_WORD, num_words
from meseta.ops.row_program.optimizer import Hyper, RowOptimizer, RowState
from meseta.ops.row_program.program import RowProgram, trace
from meseta.ops.step_scalars import StepNumbers, StepScalars
from meseta.sparse.shapes import Float, Int
from meseta.spec import MesetaError


@dataclass(frozen=True)
class TableRows:
    """Shard of a table that is updated in place."""

    weight: Float[Tensor, "rows columns"]
    """Contiguous float32, float16 or bfloat16 rows. float64 rows use the reference."""
    state: RowState
    """States by name, [rows, columns] or [rows] each: float32, or float64 for float64 rows."""
    key: int = 0
    """64-bit key for the stochastic rounding of 16-bit rows."""
    first_row: int = 0
    """Row of the whole table at which the shard starts. Random bits depend on rows of the whole table."""
    first_column: int = 0
    """Column of the whole table at which the shard starts, a multiple of 16."""
    row_ids: Int[Tensor, " rows"] | None = None
    """Contiguous int64 tensor with the row of the shard that each row of `weight` currently holds.

    `None` means that row i of `weight` is row i of the shard. Random bits and marks use these rows.
    """
    marks: Int[Tensor, " words"] | None = None
    """int32 marks of updated rows, see `meseta.ops.row_marks`. May end with a log of rows if `row_ids` is `None`."""


@dataclass(frozen=True)
class FeatureGradient:
    """Location of the ids and the gradient of one feature."""

    position: int
    """Index of the feature in the offsets of the bags."""
    table: int
    """Index of the table that the feature looks up."""
    gradient: int
    """Index of the matrix with the gradient of the feature."""
    column: int = 0
    """First column of the gradient in its matrix."""
    per_id: bool = False
    """Whether the matrix has one row per id of this feature. Otherwise it has one per bag."""
    weighted: bool = False
    """Whether the gradient of a bag is multiplied by the weight of each id."""


@dataclass(frozen=True)
class Bags:
    """Ids of a batch."""

    ids: Int[Tensor, " nnz"]
    """int32 or int64 ids in feature-major order."""
    offsets: Int[Tensor, " F_times_B_plus_1"]
    """Offsets into `ids`. Bag b of feature p is ids[offsets[p * B + b] : offsets[p * B + b + 1]]."""
    num_samples: int
    """Number of samples B."""
    weights: Float[Tensor, " nnz"] | None = None
    """Weight of each id, read for weighted features only."""


class SortedRowIds(NamedTuple):
    """Contributions of ids to rows on a GPU, ordered by (row, feature, sample, id). Created by `sort_row_ids`."""

    keys: Int[Tensor, " n"]
    """Number of the row among the rows of all tables, int16, int32 or int64. Ids outside their table come last."""
    bags: Int[Tensor, " n"]
    """feature * num_samples + sample, int32 or int64. The first contribution of a long run has the complement."""
    starts: Int[Tensor, " n_rounded_up"] | None = None
    """Offset of the first contribution of each row in its chunk of contributions, int16, chunk by chunk. Then -1."""
    order: Int[Tensor, " n"] | None = None
    """Number of each contribution before the sort. `None` in an update without gradients per id."""
    begins: Int[Tensor, " F"] | None = None
    """First contribution of each feature before the sort, int64. `None` in an update without gradients per id."""
    scales: Float[Tensor, " n"] | None = None
    """Weight of each contribution. `None` without weights."""


@dataclass(frozen=True)
class UpdateGroup:
    """Tables with one row optimizer and dtype, and the features that look them up. Created once for many steps."""

    optimizer: RowOptimizer
    tables: tuple[TableRows, ...]
    embedding_dims: tuple[int, ...]
    """Number of columns of each whole table. A column shard has fewer."""
    features: tuple[FeatureGradient, ...]
    """Features in the order in which their contributions are added."""

    @cached_property
    def program(self) -> RowProgram:
        """Program of the optimizer."""
        return trace(self.optimizer)

    @cached_property
    def weights(self) -> list[Tensor]:
        """Rows of each table."""
        return [table.weight for table in self.tables]

    @cached_property
    def states(self) -> list[Tensor]:
        """States of all tables, table by table, in the order of the program."""
        for table in self.tables:
            if set(table.state) != set(self.program.state_names):
                raise MesetaError(
                    f"row_update: optimizer {self.optimizer.name!r} needs the states "
                    f"{sorted(self.program.state_names)}, but a table has {sorted(table.state)}"
                )
        return [table.state[name] for table in self.tables for name in self.program.state_names]

    @cached_property
    def state_is_row(self) -> list[bool]:
        """Whether each state has one number per row."""
        return [kind == "row" for kind in self.program.state_kinds]

    @cached_property
    def origins(self) -> list[int]:
        """First row, first column and key of each table, in a flat list."""
        return [n for t in self.tables for n in (t.first_row, t.first_column, to_int64(t.key))]

    @cached_property
    def row_ids(self) -> list[Tensor] | None:
        """Row ids of each table, an empty tensor for tables without. `None` if no table has any."""
        if all(table.row_ids is None for table in self.tables):
            return None
        return [t.weight.new_empty(0, dtype=torch.int64) if t.row_ids is None else t.row_ids for t in self.tables]

    @cached_property
    def marks(self) -> list[Tensor] | None:
        """Marks of each table, an empty tensor for tables without. `None` if no table has any."""
        if all(table.marks is None for table in self.tables):
            return None
        return [t.weight.new_empty(0, dtype=torch.int32) if t.marks is None else t.marks for t in self.tables]

    @cached_property
    def feature_fields(self) -> list[int]:
        """Fields of all features in a flat list."""
        return [n for f in self.features for n in (f.position, f.table, f.gradient, f.column, f.per_id, f.weighted)]

    @cached_property
    def core_fields(self) -> CoreFields:
        """Description of tables and states for the core."""
        return pack_core_fields(self.weights, self.states, self.state_is_row, self.origins, self.row_ids, self.marks)

    def uniforms(self, lr: float, step: int) -> Tensor:
        """Return the uniforms of each table in this step, float64 [tables, uniforms]."""
        values = {d: self.program.uniform_values(Hyper(lr, step, d)) for d in set(self.embedding_dims)}
        return torch.from_numpy(np.array([values[d] for d in self.embedding_dims], dtype=np.float64))

    def uniforms_on_device(self, scalars: StepScalars, lr: float) -> Float[Tensor, "tables n"]:
        """Return the uniforms of each table in the step of `scalars`, then the step, on their device. `lr` is the rate
        before the factor of the step."""
        widths = sorted(set(self.embedding_dims))

        def compute(numbers: StepNumbers) -> list[float]:
            hypers = [Hyper(lr * numbers.lr_factor, numbers.step + 1, width) for width in widths]
            return [n for hyper in hypers for n in (*self.program.uniform_values(hyper), hyper.step)]

        # The scalars keep this group, so that no other group gets its id.
        by_width = scalars.view(("row update", id(self)), torch.float64, compute).view(len(widths), -1)
        if len(widths) == 1:
            return by_width.expand(len(self.tables), -1)
        return by_width[device_constant(tuple(map(widths.index, self.embedding_dims)), by_width.device)]


@dataclass(frozen=True)
class UpdateCall:
    """Arguments of the operator, in the order of its schema."""

    tables: list[Tensor]
    states: list[Tensor]
    """States of all tables, table by table, in the order of the program."""
    code: Tensor
    """Instructions [n, 5] of the program."""
    uniforms: Tensor
    """Uniforms of each table, float64 [tables, uniforms]."""
    state_is_row: list[bool]
    origins: list[int]
    """First row, first column and key of each table, in a flat list."""
    features: list[int]
    """Fields of all features in a flat list, see `FeatureGradient`."""
    ids: Tensor
    offsets: Tensor
    num_bags: int
    gradients: list[Tensor]
    weights: Tensor | None
    step: int
    found_inf: Tensor | None = None
    """Device scalar (float32). If nonzero, nothing is written. `None` means always write."""
    row_ids: list[Tensor] | None = None
    """Row ids of each table, an empty tensor for tables without."""
    marks: list[Tensor] | None = None
    """Marks of each table, an empty tensor for tables without."""

    def shard_rows(self, table: int, places: Tensor) -> Tensor:
        """Return the rows of the shard that are stored at `places`."""
        row_ids = None if self.row_ids is None or not self.row_ids[table].numel() else self.row_ids[table]
        return places if row_ids is None else row_ids[places]


def unpack_features(numbers: Sequence[int]) -> list[FeatureGradient]:
    """Unpack features from the flat list of their fields."""
    fields = [numbers[f : f + NUM_FEATURE_FIELDS] for f in range(0, len(numbers), NUM_FEATURE_FIELDS)]
    return [FeatureGradient(p, t, g, c, bool(per_id), bool(weighted)) for p, t, g, c, per_id, weighted in fields]


CoreFields = tuple[list[int], list[int]]
"""(fields of all tables, addresses of all states)."""
# Fields of a table: address, rows, columns, first row, first column, key, address of its row ids or 0, address of its
# marks or 0, number of words of its marks.


def pack_core_fields(
    tables: Sequence[Tensor],
    states: Sequence[Tensor],
    state_is_row: Sequence[bool],
    origins: Sequence[int],
    row_ids: Sequence[Tensor] | None,
    marks: Sequence[Tensor] | None,
) -> CoreFields:
    """Pack tables and states for the core. Raises MesetaError if one has the wrong dtype, shape or strides."""
    dtype = tables[0].dtype
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    fields, addresses = [], []
    for t, table in enumerate(tables):
        if table.dtype != dtype or table.dim() != 2 or not table.is_contiguous():
            raise MesetaError(
                f"row_update: table {t} is {table.dtype} {list(table.shape)}, but all tables must be contiguous, "
                f"[rows, D] and {dtype} as the first; convert it"
            )
        origin = origins[3 * t : 3 * t + 3]
        check_origin("row_update", origin)
        fields += [table.data_ptr(), table.size(0), table.size(1), origin[0], origin[1], origin[2] % (1 << 64)]
        fields.append(0 if row_ids is None else row_ids_address(table, row_ids[t]))
        fields += marks_address(table, None if marks is None else marks[t], None if row_ids is None else row_ids[t])
        for is_row, state in zip(state_is_row, states[t * len(state_is_row) :], strict=False):
            shape = table.shape[:1] if is_row else table.shape
            if state.dtype != exact or state.shape != shape or not state.is_contiguous():
                raise MesetaError(
                    f"row_update: a state of table {t} is {state.dtype} {list(state.shape)}, "
                    f"but must be contiguous {exact} {list(shape)}"
                )
            addresses.append(state.data_ptr())
    return fields, addresses


def row_ids_address(table: Tensor, row_ids: Tensor | None) -> int:
    """Return the address of row ids, or 0 without. Raises MesetaError if they do not match the table."""
    if row_ids is None or not row_ids.numel():
        return 0
    if row_ids.dtype != torch.int64 or row_ids.shape != table.shape[:1] or not row_ids.is_contiguous():
        raise MesetaError(
            f"row_update: row ids are {row_ids.dtype} {list(row_ids.shape)}; pass contiguous int64 [{table.size(0)}]"
        )
    if row_ids.device != table.device:
        raise MesetaError(f"row_update: row ids are on {row_ids.device}, but rows on {table.device}; move them there")
    return row_ids.data_ptr()


def marks_address(table: Tensor, marks: Tensor | None, row_ids: Tensor | None) -> tuple[int, int]:
    """Return (address, number of words) of marks, or zeros without. Raises MesetaError if they do not match."""
    if marks is None or not marks.numel():
        return 0, 0
    is_in_slots = row_ids is not None and row_ids.numel() > 0  # The core then checks each row.
    least = 1 if is_in_slots else num_words(table.size(0))
    if marks.dtype != torch.int32 or marks.dim() != 1 or marks.numel() < least or not marks.is_contiguous():
        raise MesetaError(
            f"row_update: marks are {marks.dtype} {list(marks.shape)}; pass contiguous int32 [{least}], one word per "
            f"{ROWS_PER_WORD} rows"
        )
    if marks.device != table.device:
        raise MesetaError(f"row_update: marks are on {marks.device}, but rows on {table.device}; move them there")
    return marks.data_ptr(), marks.numel()


NUM_FEATURE_FIELDS = 6
"""Number of fields of a FeatureGradient."""


@dataclass(frozen=True)
class ApplyCall:
    """Arguments of the staged operator, in the order of its schema."""

    table: Tensor
    states: list[Tensor]
    code: Tensor
    uniforms: Tensor
    state_is_row: list[bool]
    origin: list[int]
    """First row, first column and key of the table."""
    rows: Tensor
    gradient: Tensor
    stats: Tensor
    sums: Tensor | None
    step: int
    found_inf: Tensor | None = None
    """Device scalar (float32). If nonzero, rows are not written, but `sums` are. `None` means always write."""
    row_ids: Tensor | None = None
    """Row of the shard that each row of `table` holds, see `TableRows`."""
    marks: Tensor | None = None
    """Words in which updated rows are marked, see `TableRows`."""

    @property
    def shard_rows(self) -> Tensor:
        """Rows of the shard that are stored at `rows`."""
        return self.rows if self.row_ids is None else self.row_ids[self.rows]


def check_program(operator: str, code: Tensor, uniforms: Tensor, num_tables: int, step: int) -> None:
    """Raise MesetaError if instructions are not int32 [n, 5], uniforms not [tables, n], or the step not a uint32."""
    if code.dtype != torch.int32 or code.dim() != 2 or code.shape[1] != 5 or not code.is_contiguous():
        raise MesetaError(f"{operator}: code is {code.dtype} {list(code.shape)}; pass contiguous int32 [n, 5]")
    if uniforms.dim() != 2 or uniforms.shape[0] != num_tables:
        raise MesetaError(f"{operator}: uniforms are {list(uniforms.shape)}; pass [{num_tables}, n], a row per table")
    if not 0 <= step < 1 << 32:
        raise MesetaError(f"{operator}: step is {step}, but must be in 0..2**32-1")


def check_origin(operator: str, origin: Sequence[int]) -> None:
    """Raise MesetaError if `origin` is not (first row, first column, key), or a row or column is negative."""
    if len(origin) != 3 or origin[0] < 0 or origin[1] < 0:
        raise MesetaError(f"{operator}: origin is {list(origin)}; pass a non-negative first row and column, and a key")


def to_int64(key: int) -> int:
    """Convert an unsigned 64-bit key to the signed int of operator schemas."""
    return key - (1 << 64) if key >= 1 << 63 else key
