"""Fused backward pass of a lookup: sums gradients per touched row, and runs the optimizer of each row once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meseta.ops.common import DTYPE_CODES, can_bypass_dispatcher, contiguous_ids, register
from meseta.ops.core import core
from meseta.ops.row_update import reference
from meseta.ops.row_update.call import (
    NUM_FEATURE_FIELDS,
    Bags,
    CoreFields,
    FeatureGradient,
    SortedRowIds,
    TableRows,
    UpdateCall,
    UpdateGroup,
    check_program,
    pack_core_fields,
)
from meseta.sparse.shapes import Float
from meseta.spec import MesetaError

__all__ = [
    "Bags",
    "FeatureGradient",
    "SortedRowIds",
    "TableRows",
    "UpdateGroup",
    "apply_row_update",
    "row_update",
    "sort_row_ids",
]

CHECK_ONLY_CODE = 3
"""Code for dtypes that the core does not update. It only checks the call, and the reference updates the rows."""


def row_update(
    group: UpdateGroup,
    lr: float,
    step: int,
    bags: Bags,
    gradients: Sequence[Tensor],
    found_inf: Float[Tensor, ""] | None = None,
    uniforms: Float[Tensor, "tables n"] | None = None,
) -> None:
    """Update all touched rows in place. Other rows and their state are not changed.

    No gradient tensor of a whole table is created (arXiv 2104.05158, fused backward pass). The result does not depend
    on threads or on sharding. Marks of updated rows are set if the tables have any.

    Args:
        group: Tables with their optimizer.
        lr: Learning rate of this step.
        step: Number of this step, starting at 1.
        bags: Ids of the batch.
        gradients: float32 [B, columns] or [ids of the feature, columns] for each feature, with contiguous columns.
        found_inf: Device scalar (float32). If nonzero, nothing is written, and the host does not need to know.
        uniforms: Result of `UpdateGroup.uniforms_on_device`, float64, for a GPU. `lr` and `step` are ignored then, so
            that a CUDA graph can capture the update. `None` computes them from `lr` and `step`.

    Raises:
        MesetaError: Offsets decrease or tensors do not match each other. Nothing is written then. Also if an id is
            outside its table, which may be detected after other rows were updated. Apply `meseta.ops.id_policy` first.
    """
    # Contributions to a row are ordered by (feature as listed in the group, sample, id). They are summed from left to
    # right within blocks of 256 samples, and then the block sums from left to right.
    #
    # 16-bit rows are rounded stochastically by Philox4x32-10 with the counter (low and high word of the row, column //
    # 8, step). Each of eight columns has sixteen bits of the result. The row is that of the whole table, see
    # TableRows.row_ids.
    if not group.features or bags.ids.numel() == 0:
        return
    call = _pack(group, lr, step, bags, gradients, found_inf, uniforms)
    if can_bypass_dispatcher(bags.ids):
        _run_core(UpdateCall(*call), group.core_fields)
    else:
        _operator(*call)


def sort_row_ids(group: UpdateGroup, bags: Bags) -> SortedRowIds | None:
    """Sort the ids of a batch by row on a GPU, ahead of `apply_row_update`. Needs no gradients and reads no rows.

    Returns `None` if `row_update` needs no such sort: on a CPU, for float64 rows, and without ids. Raises MesetaError
    if ids, offsets and weights do not match each other.
    """
    if not bags.ids.is_cuda or group.weights[0].dtype not in DTYPE_CODES:
        return None
    from meseta.ops.row_update import triton

    return triton.sort_row_ids(
        group.weights, group.feature_fields, bags.ids, bags.offsets, bags.num_samples, bags.weights
    )


def apply_row_update(
    sorted_ids: SortedRowIds,
    group: UpdateGroup,
    lr: float,
    step: int,
    bags: Bags,
    gradients: Sequence[Tensor],
    found_inf: Float[Tensor, ""] | None = None,
    uniforms: Float[Tensor, "tables n"] | None = None,
) -> None:
    """Do `row_update` with the result of `sort_row_ids` for the same group and bags, with the same bits."""
    from meseta.ops.row_update import triton

    call = UpdateCall(*_pack(group, lr, step, bags, gradients, found_inf, uniforms))
    triton.apply_row_update(call, sorted_ids)


def _pack(
    group: UpdateGroup,
    lr: float,
    step: int,
    bags: Bags,
    gradients: Sequence[Tensor],
    found_inf: Tensor | None,
    uniforms: Tensor | None,
) -> tuple[Any, ...]:
    """Return the arguments of the operator."""
    return (
        group.weights,
        group.states,
        group.program.fused_update.instructions,
        group.uniforms(lr, step) if uniforms is None else uniforms,
        group.state_is_row,
        group.origins,
        group.feature_fields,
        bags.ids,
        bags.offsets,
        bags.num_samples,
        gradients if isinstance(gradients, list) else list(gradients),
        bags.weights,
        step,
        found_inf,
        group.row_ids,
        group.marks,
    )


def _cpu(*arguments: Any) -> None:
    call = UpdateCall(*arguments)
    _check_counts(call)
    _run_core(
        call, pack_core_fields(call.tables, call.states, call.state_is_row, call.origins, call.row_ids, call.marks)
    )


def _run_core(call: UpdateCall, fields: CoreFields) -> None:
    _require(0 <= call.step < 1 << 32, f"step is {call.step}, but must be in 0..2**32-1")
    if call.found_inf is not None and call.found_inf.item():
        return
    dtype = call.tables[0].dtype
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    ids = contiguous_ids("row_update", call.ids)
    offsets = contiguous_ids("row_update", call.offsets, "offsets").to(torch.int64)
    weights = None if call.weights is None else call.weights.to(exact).contiguous()
    _require(all(g.dim() == 2 for g in call.gradients), "gradients must be [B, columns] or [ids, columns]")
    _require(weights is None or weights.numel() == ids.numel(), "pass one weight per id")
    uniforms = call.uniforms.to(torch.float32).contiguous()
    gradients = [g if g.dtype == exact and g.stride(-1) == 1 else g.to(exact).contiguous() for g in call.gradients]
    try:
        core().row_update(
            *fields,
            DTYPE_CODES.get(dtype, CHECK_ONLY_CODE),
            call.state_is_row,
            call.code.data_ptr(),
            call.code.size(0),
            uniforms.data_ptr(),
            uniforms.size(1),
            call.features,
            [n for g in gradients for n in (g.data_ptr(), g.size(0), g.size(1), g.stride(0))],
            ids.data_ptr(),
            ids.numel(),
            ids.dtype == torch.int64,
            offsets.data_ptr(),
            offsets.numel(),
            call.num_bags,
            0 if weights is None else weights.data_ptr(),
            call.step,
            torch.get_num_threads(),
        )
    except ValueError as error:
        raise MesetaError(f"row_update: {error}") from None
    if dtype not in DTYPE_CODES:
        try:
            reference.row_update(call)
        except (LookupError, TypeError) as error:
            raise MesetaError(f"row_update: the program does not run ({error}); create it with trace") from None


def _require(fine: bool, problem: str) -> None:
    if not fine:
        raise MesetaError(f"row_update: {problem}")


def _check_counts(call: UpdateCall) -> None:
    """Raise MesetaError if the lists of the call do not match the number of tables, states or features."""
    num_tables, num_states = len(call.tables), len(call.tables) * len(call.state_is_row)
    _require(num_tables > 0, "no table was given")
    _require(call.tables[0].is_floating_point(), f"rows are {call.tables[0].dtype}")
    check_program("row_update", call.code, call.uniforms, num_tables, call.step)
    _require(len(call.states) == num_states, f"got {len(call.states)} states; pass {num_states}")
    _require(
        len(call.origins) == 3 * num_tables, f"{len(call.origins)} origins for {num_tables} tables; pass 3 per table"
    )
    _require(call.row_ids is None or len(call.row_ids) == num_tables, "pass row ids for each table, or for none")
    _require(call.marks is None or len(call.marks) == num_tables, "pass marks for each table, or for none")
    _require(len(call.features) % NUM_FEATURE_FIELDS == 0, f"{len(call.features)} feature numbers; pass 6 per feature")
    _require(call.num_bags >= 0, f"the number of samples is {call.num_bags}")


def _gpu(*arguments: Any) -> None:
    from meseta.ops.row_update import triton

    triton.row_update(UpdateCall(*arguments))


def _fake(*_: Any) -> None:
    return None


_operator = register(
    "row_update(Tensor(a!)[] tables, Tensor(b!)[] states, Tensor code, Tensor uniforms, bool[] state_is_row, "
    "int[] origins, int[] features, Tensor ids, Tensor offsets, int num_bags, Tensor[] gradients, Tensor? weights, "
    "int step, Tensor? found_inf=None, Tensor[]? row_ids=None, Tensor(c!)[]? marks=None) -> ()",
    cpu=_cpu,
    cuda=_gpu,
    fake=_fake,
)
