"""Row update in stages, for column shards: the ranks sum statistics of rows between the stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meseta.ops.common import DTYPE_CODES, register
from meseta.ops.core import core
from meseta.ops.row_program.lowering import RowCode
from meseta.ops.row_program.optimizer import Hyper, RowOptimizer
from meseta.ops.row_program.program import RowProgram, trace
from meseta.ops.row_update import reference
from meseta.ops.row_update.call import (
    ApplyCall,
    TableRows,
    check_origin,
    check_program,
    marks_address,
    row_ids_address,
    to_int64,
)
from meseta.sparse.shapes import Float, Int
from meseta.spec import COLUMN_BLOCK, MesetaError


@dataclass(frozen=True)
class TouchedRows:
    """Touched rows of one shard with their summed gradients."""

    table: TableRows
    rows: Int[Tensor, " U"]
    """Row numbers, sorted and unique."""
    gradient: Float[Tensor, "U columns"]
    hyper: Hyper


def stage_block_sums(
    optimizer: RowOptimizer, stage: int, touched: TouchedRows, stats: Float[Tensor, "S U"]
) -> Float[Tensor, "n U blocks"]:
    """Return sums over blocks of 16 columns of the n summands of a stage.

    `stats` are the statistics of earlier stages. The statistics of this stage are the block sums of all column shards,
    added from left to right.
    """
    program = trace(optimizer)
    blocks = -(-touched.gradient.shape[1] // COLUMN_BLOCK)
    sums = touched.gradient.new_empty(len(program.stat_names[stage]), touched.rows.numel(), blocks)
    _apply(program, program.stages[stage], touched, stats, sums)
    return sums


def update_with_stats(
    optimizer: RowOptimizer,
    touched: TouchedRows,
    stats: Float[Tensor, "S U"],
    found_inf: Float[Tensor, ""] | None = None,
) -> None:
    """Update rows in place, given statistics of whole rows, unless `found_inf` (float32, on the device) is nonzero."""
    program = trace(optimizer)
    _apply(program, program.staged_update, touched, stats, found_inf=found_inf)


def _apply(
    program: RowProgram,
    code: RowCode,
    touched: TouchedRows,
    stats: Tensor,
    sums: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    table = touched.table
    if touched.rows.numel() == 0:
        return
    _operator(
        table.weight,
        [table.state[name] for name in program.state_names],
        code.instructions,
        torch.tensor(program.uniform_values(touched.hyper), dtype=torch.float64),
        [kind == "row" for kind in program.state_kinds],
        [table.first_row, table.first_column, to_int64(table.key)],
        touched.rows,
        touched.gradient,
        stats,
        sums,
        touched.hyper.step,
        found_inf,
        table.row_ids,
        table.marks,
    )


def _cpu(*arguments: Any) -> None:
    call = ApplyCall(*arguments)
    _check(call)
    if call.sums is None and call.found_inf is not None and call.found_inf.item():
        return
    if call.table.dtype not in DTYPE_CODES:
        if call.rows.numel() and (call.rows[0] < 0 or call.rows[-1] >= len(call.table) or (call.rows.diff() < 1).any()):
            raise MesetaError(f"row update: rows must increase and be in 0..{len(call.table) - 1}")
        try:
            reference.row_apply(call)
        except (LookupError, TypeError) as error:
            raise MesetaError(f"row update: the program does not run ({error}); create it with trace") from None
        return
    rows, gradient = call.rows.contiguous(), call.gradient.to(torch.float32).contiguous()
    stats, uniforms = call.stats.to(torch.float32).contiguous(), call.uniforms.to(torch.float32).contiguous()
    (first_row, first_column, key), row_ids = call.origin, row_ids_address(call.table, call.row_ids)
    marks = marks_address(call.table, call.marks, call.row_ids)
    try:
        core().row_apply(
            [call.table.data_ptr(), *call.table.shape, first_row, first_column, key % (1 << 64), row_ids, *marks],
            [state.data_ptr() for state in call.states],
            DTYPE_CODES[call.table.dtype],
            call.state_is_row,
            call.code.data_ptr(),
            call.code.shape[0],
            uniforms.data_ptr(),
            uniforms.numel(),
            stats.size(0),
            0 if call.sums is None else call.sums.size(0),
            rows.data_ptr(),
            gradient.data_ptr(),
            rows.numel(),
            stats.data_ptr(),
            0 if call.sums is None else call.sums.data_ptr(),
            call.step,
            torch.get_num_threads(),
        )
    except ValueError as error:
        raise MesetaError(f"row update: {error}") from None


def _check(call: ApplyCall) -> None:
    check_program("row update", call.code, call.uniforms[None], 1, call.step)
    check_origin("row update", call.origin)
    if not call.table.is_floating_point() or call.table.dim() != 2:
        raise MesetaError(f"row update: the table is {call.table.dtype} {list(call.table.shape)}; pass rows of floats")
    if len(call.states) != len(call.state_is_row) or call.rows.dtype != torch.int64 or call.rows.dim() != 1:
        raise MesetaError(
            f"row update: {len(call.states)} states instead of {len(call.state_is_row)}, and rows {call.rows.dtype} "
            f"{list(call.rows.shape)}; pass all states, and int64 rows [U]"
        )
    width, count = call.table.size(1), call.rows.numel()
    exact = torch.float64 if call.table.dtype == torch.float64 else torch.float32
    kept = [(s, tuple(call.table.shape)[: 1 if r else 2]) for s, r in zip(call.states, call.state_is_row, strict=True)]
    if call.sums is not None:
        kept.append((call.sums, (*call.sums.shape[:1], count, -(-width // COLUMN_BLOCK))))
    read = [(call.gradient, (count, width)), (call.stats, (*call.stats.shape[:1], count))]
    for tensor, shape in (*kept, *read, (call.table, tuple(call.table.shape))):
        if tuple(tensor.shape) != shape:
            raise MesetaError(f"row update: a tensor is {list(tensor.shape)}, but must be {list(shape)}")
    for tensor in (call.table, *(tensor for tensor, _ in kept)):
        if not tensor.is_contiguous() or (tensor is not call.table and tensor.dtype != exact):
            raise MesetaError(f"row update: a state is {tensor.dtype}, but must be contiguous {exact}")


def _fallback(*arguments: Any) -> None:
    reference.row_apply(ApplyCall(*arguments))


def _fake(*_: Any) -> None:
    return None


_operator = register(
    "row_apply(Tensor(a!) table, Tensor(b!)[] states, Tensor code, Tensor uniforms, bool[] state_is_row, "
    "int[] origin, Tensor rows, Tensor gradient, Tensor stats, Tensor(c!)? sums, int step, "
    "Tensor? found_inf=None, Tensor? row_ids=None, Tensor(d!)? marks=None) -> ()",
    cpu=_cpu,
    cuda=_fallback,
    fake=_fake,
)
