"""The fused backward pass of a lookup: gradients summed per touched row, and each row's optimizer run once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meseta.jagged.shapes import Float
from meseta.ops.core import core
from meseta.ops.library import can_bypass_dispatcher, register
from meseta.ops.row_update import reference
from meseta.ops.row_update.call import (
    NUM_FEATURE_FIELDS,
    Bags,
    CoreFields,
    FeatureGradient,
    TableRows,
    UpdateCall,
    UpdateGroup,
    check_program,
    pack_core_fields,
)
from meseta.ops.tables import DTYPE_CODES, contiguous_ids
from meseta.spec import MesetaError

__all__ = ["Bags", "FeatureGradient", "TableRows", "UpdateGroup", "row_update"]

CHECK_ONLY_CODE = 3
"""The core's number for rows that it does not step: it checks the call, and the reference steps them."""


def row_update(
    group: UpdateGroup,
    lr: float,
    step: int,
    bags: Bags,
    gradients: Sequence[Tensor],
    found_inf: Float[Tensor, ""] | None = None,
) -> None:
    """Step every row that the bags touch, in place; rows without an id, and their state, stand still.

    `lr` is the learning rate of this step and `step` its number from 1. Contributions to a row are ordered by (feature
    as listed in the group, sample, id) and summed left to right inside blocks of 256 samples; block sums are added left
    to right. So neither threads nor the way a table is cut change a bit. Gradients are float32, [B, columns] or [ids of
    the feature, columns], with contiguous columns. Rows of 16 bits are rounded stochastically by Philox4x32-10 with the
    counter (low and high word of the row, column // 8, step); each of eight columns has sixteen bits of the result.
    The row is that of the whole table, wherever it lies: see TableRows.row_ids. Stepped rows are marked, where
    TableRows.marks are kept.

    Where `found_inf`, float32 beside the rows, is not 0, nothing is written: a device reads it when it comes to that,
    and the host need not know it.

    No gradient tensor is made for a table (arXiv 2104.05158, the fused backward pass). Raises MesetaError for offsets
    that fall and tensors that do not fit together, before anything is written; and for ids outside their table, which
    a thread may see when others have stepped rows: meseta.ops.id_policy, which embeddings ask first, sees to those.
    """
    if not group.features or bags.ids.numel() == 0:
        return
    call = (
        group.weights,
        group.states,
        group.program.fused_update.instructions,
        group.uniforms(lr, step),
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
    if can_bypass_dispatcher(bags.ids):
        _run_core(UpdateCall(*call), group.core_fields)
    else:
        _operator(*call)


def _cpu(*arguments: Any) -> None:
    call = UpdateCall(*arguments)
    _check_counts(call)
    _run_core(
        call, pack_core_fields(call.tables, call.states, call.state_is_row, call.origins, call.row_ids, call.marks)
    )


def _run_core(call: UpdateCall, fields: CoreFields) -> None:
    _require(0 <= call.step < 1 << 32, f"step is {call.step}; it must be in 0..2**32-1")
    if call.found_inf is not None and call.found_inf.item():
        return
    dtype = call.tables[0].dtype
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    ids = contiguous_ids("row_update", call.ids)
    offsets = contiguous_ids("row_update", call.offsets, "offsets").to(torch.int64)
    weights = None if call.weights is None else call.weights.to(exact).contiguous()
    _require(all(g.dim() == 2 for g in call.gradients), "gradients must be [B, columns] or [ids, columns]")
    _require(weights is None or weights.numel() == ids.numel(), "there must be one weight per id")
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
            raise MesetaError(f"row_update: the program does not run ({error}); make it with trace") from None


def _require(fine: bool, problem: str) -> None:
    if not fine:
        raise MesetaError(f"row_update: {problem}")


def _check_counts(call: UpdateCall) -> None:
    """Raise MesetaError unless there are as many of everything as the tables, states and features need."""
    num_tables, num_states = len(call.tables), len(call.tables) * len(call.state_is_row)
    _require(num_tables > 0, "no table was given")
    _require(call.tables[0].is_floating_point(), f"rows are {call.tables[0].dtype}")
    check_program("row_update", call.code, call.uniforms, num_tables, call.step)
    _require(len(call.states) == num_states, f"{len(call.states)} states were given, and {num_states} are needed")
    _require(
        len(call.origins) == 3 * num_tables, f"{len(call.origins)} origins for {num_tables} tables; give 3 for each"
    )
    _require(
        call.row_ids is None or len(call.row_ids) == num_tables, "there must be row ids for each table, or for none"
    )
    _require(call.marks is None or len(call.marks) == num_tables, "there must be marks for each table, or for none")
    _require(len(call.features) % NUM_FEATURE_FIELDS == 0, f"{len(call.features)} numbers of features; give 6 for each")
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
