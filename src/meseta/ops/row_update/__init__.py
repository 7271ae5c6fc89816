"""The fused backward pass of a lookup: gradients summed per touched row, and each row's optimizer run once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meseta.jagged.shapes import Float, Int
from meseta.ops.core import core
from meseta.ops.library import register
from meseta.ops.pooled_lookup import KINDS
from meseta.ops.row_optimizer import Hyper, RowOptimizer, RowState
from meseta.ops.row_program import trace
from meseta.ops.row_update import reference
from meseta.spec import MesetaError


@dataclass(frozen=True)
class TableRows:
    """A shard of a table, updated in place."""

    weight: Float[Tensor, "rows columns"]
    """Contiguous; float32, float16, bfloat16 or (through the reference) float64."""
    state: RowState
    """By name: [rows, columns] or [rows], float32 (float64 beside float64 rows)."""
    hyper: Hyper
    """Learning rate, step and width of the whole table."""
    key: int = 0
    """64-bit key of the random bits that round 16-bit rows."""
    first_row: int = 0
    """Row of the whole table that is row 0 here; the random bits go by the rows of the whole table."""
    first_column: int = 0
    """Likewise; a multiple of 16."""


@dataclass(frozen=True)
class FeatureGradient:
    """Where the gradient of one feature lies."""

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


def row_update(
    optimizer: RowOptimizer,
    tables: Sequence[TableRows],
    features: Sequence[FeatureGradient],
    ids: Int[Tensor, " nnz"],
    offsets: Int[Tensor, " F_times_B_plus_1"],
    gradients: Sequence[Tensor],
    weights: Float[Tensor, " nnz"] | None = None,
) -> None:
    """Step every row that `ids` touch, in place; rows without an id, and their state, stand still.

    All tables have one optimizer and one type of rows. Bag b of feature f is ids[offsets[f * B + b] : offsets[f * B + b
    + 1]], int32 or int64. Contributions to a row are ordered by (feature, sample, position) and summed left to right
    inside blocks of 256 samples; block sums are added left to right; so neither threads nor the way a table is cut
    change a bit. Gradients are float32, [B, columns] or [ids of the feature, columns], with contiguous columns. Rows of
    16 bits are rounded stochastically by Philox4x32-10 with the counter (low and high word of the row, column // 8,
    step); sixteen bits of the result belong to each of eight columns.

    No gradient tensor is made for a table (arXiv 2104.05158, section 4.1.1, "fused" backward). Raises MesetaError for
    ids outside their table, offsets that fall, and tensors that do not fit together.
    """
    if not features or ids.numel() == 0:
        return
    program = trace(optimizer)
    states = [_state_of(table, name, optimizer) for table in tables for name in program.state_names]
    uniforms = torch.tensor([program.uniform_values(table.hyper) for table in tables], dtype=torch.float64)
    _operator(
        [table.weight for table in tables],
        states,
        program.whole.instructions,
        uniforms,
        [kind == "row" for kind in program.state_kinds],
        [number for table in tables for number in (table.first_row, table.first_column, _signed(table.key))],
        [number for f in features for number in (f.table, f.gradient, f.column, f.per_id, f.weighted)],
        ids,
        offsets,
        list(gradients),
        weights,
        tables[0].hyper.step,
    )


def _state_of(table: TableRows, name: str, optimizer: RowOptimizer) -> Tensor:
    try:
        return table.state[name]
    except KeyError:
        raise MesetaError(
            f"row_update: optimizer {optimizer.name!r} keeps the state {name!r}, but the table has {sorted(table.state)}"
        ) from None


def _signed(key: int) -> int:
    """The 64-bit key as the schema's int."""
    return key - (1 << 64) if key >= 1 << 63 else key


def _cpu(
    tables: list[Tensor],
    states: list[Tensor],
    code: Tensor,
    uniforms: Tensor,
    state_is_row: list[bool],
    origins: list[int],
    features: list[int],
    ids: Tensor,
    offsets: Tensor,
    gradients: list[Tensor],
    weights: Tensor | None,
    step: int,
) -> None:
    if tables[0].dtype not in KINDS:
        reference.row_update(
            tables, states, code, uniforms, state_is_row, origins, features, ids, offsets, gradients, weights, step
        )
        return
    ids, offsets = ids.contiguous(), offsets.to(torch.int64).contiguous()
    gradients = [g if g.dtype == torch.float32 and g.stride(-1) == 1 else g.float().contiguous() for g in gradients]
    weights = None if weights is None else weights.to(torch.float32).contiguous()
    values = uniforms.to(torch.float32).contiguous()
    num_bags, rest = divmod(offsets.numel() - 1, len(features) // FEATURE_FIELDS)
    _check(rest == 0, f"{offsets.numel()} offsets do not fit {len(features) // FEATURE_FIELDS} features")
    _check(ids.dtype in (torch.int32, torch.int64), f"ids are {ids.dtype}; give int32 or int64")
    _check(weights is None or weights.numel() == ids.numel(), "there must be one weight per id")
    try:
        core().row_update(
            _table_fields(tables, origins),
            state_addresses(tables, states, state_is_row),
            KINDS[tables[0].dtype],
            [int(is_row) for is_row in state_is_row],
            code.data_ptr(),
            code.size(0),
            values.data_ptr(),
            values.size(1),
            _feature_fields(features, tables, gradients, offsets, num_bags),
            ids.data_ptr(),
            ids.numel(),
            ids.dtype == torch.int64,
            offsets.data_ptr(),
            num_bags,
            0 if weights is None else weights.data_ptr(),
            step,
            torch.get_num_threads(),
        )
    except ValueError as error:
        raise MesetaError(f"row_update: {error}") from None


def _check(fine: bool, problem: str) -> None:
    if not fine:
        raise MesetaError(f"row_update: {problem}")


def _table_fields(tables: Sequence[Tensor], origins: Sequence[int]) -> list[int]:
    """For each table: address, rows, columns, first row, first column, key."""
    fields = []
    for t, table in enumerate(tables):
        _check(
            table.dtype == tables[0].dtype and table.dim() == 2 and table.is_contiguous(),
            f"table {t} is {table.dtype} {tuple(table.shape)}; all must be contiguous, [rows, columns], of one type",
        )
        first_row, first_column, key = origins[3 * t : 3 * t + 3]
        fields += [table.data_ptr(), table.size(0), table.size(1), first_row, first_column, key % (1 << 64)]
    return fields


def state_addresses(tables: Sequence[Tensor], states: Sequence[Tensor], state_is_row: Sequence[bool]) -> list[int]:
    """Where each state of each table lies; raises MesetaError for a state of another shape or type."""
    addresses = []
    for index, state in enumerate(states):
        table, is_row = tables[index // len(state_is_row)], state_is_row[index % len(state_is_row)]
        wanted = table.shape[:1] if is_row else table.shape
        _check(
            state.dtype == torch.float32 and state.shape == wanted and state.is_contiguous(),
            f"a state is {state.dtype} {tuple(state.shape)}, but must be contiguous float32 {tuple(wanted)}",
        )
        addresses.append(state.data_ptr())
    return addresses


def _feature_fields(
    features: Sequence[int], tables: Sequence[Tensor], gradients: Sequence[Tensor], offsets: Tensor, num_bags: int
) -> list[int]:
    """For each feature: table, address of its gradient, floats from one line to the next, per id, weighted."""
    fields = []
    for f in range(len(features) // FEATURE_FIELDS):
        table, gradient, column, per_id, weighted = features[FEATURE_FIELDS * f : FEATURE_FIELDS * (f + 1)]
        matrix, lines = gradients[gradient], num_bags
        if per_id:
            lines = int(offsets[(f + 1) * num_bags] - offsets[f * num_bags])
        _check(
            matrix.dim() == 2 and matrix.size(0) == lines and column + tables[table].size(1) <= matrix.size(1),
            f"feature {f} needs {lines} gradients of {tables[table].size(1)} columns from column {column} on, but "
            f"its matrix is {tuple(matrix.shape)}",
        )
        fields += [table, matrix.data_ptr() + 4 * column, matrix.stride(0), per_id, weighted]
    return fields


def _fake(*_: object) -> None:
    return None


FEATURE_FIELDS = 5
"""Numbers that stand for a FeatureGradient in the operator's list."""

_operator = register(
    "row_update(Tensor(a!)[] tables, Tensor(b!)[] states, Tensor code, Tensor uniforms, bool[] state_is_row, "
    "int[] origins, int[] features, Tensor ids, Tensor offsets, Tensor[] gradients, Tensor? weights, int step) -> ()",
    cpu=_cpu,
    cuda=reference.row_update,
    fake=_fake,
)
