"""The fused backward pass of a lookup: gradients summed per touched row, and each row's optimizer run once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meseta.ops.core import core
from meseta.ops.library import register
from meseta.ops.pooled_lookup import KINDS
from meseta.ops.row_update import reference
from meseta.ops.row_update.call import FEATURE_FIELDS, Bags, FeatureGradient, TableRows, UpdateCall, UpdateGroup
from meseta.spec import MesetaError

__all__ = ["Bags", "FeatureGradient", "TableRows", "UpdateGroup", "row_update"]


def row_update(group: UpdateGroup, lr: float, step: int, bags: Bags, gradients: Sequence[Tensor]) -> None:
    """Step every row that the bags touch, in place; rows without an id, and their state, stand still.

    `lr` is the learning rate of this step and `step` its number from 1. Contributions to a row are ordered by (feature
    as listed in the group, sample, id) and summed left to right inside blocks of 256 samples; block sums are added left
    to right. So neither threads nor the way a table is cut change a bit. Gradients are float32, [B, columns] or [ids of
    the feature, columns], with contiguous columns. Rows of 16 bits are rounded stochastically by Philox4x32-10 with the
    counter (low and high word of the row, column // 8, step); each of eight columns has sixteen bits of the result.

    No gradient tensor is made for a table (arXiv 2104.05158, the fused backward pass). Raises MesetaError for ids
    outside their table, offsets that fall, and tensors that do not fit together.
    """
    if not group.features or bags.ids.numel() == 0:
        return
    _operator(
        group.weights,
        group.states,
        group.program.whole.instructions,
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
    )


def _cpu(*arguments: Any) -> None:
    call = UpdateCall(*arguments)
    if call.tables[0].dtype not in KINDS:
        reference.row_update(call)
        return
    ids, offsets = call.ids.contiguous(), call.offsets.to(torch.int64).contiguous()
    weights = None if call.weights is None else call.weights.to(torch.float32).contiguous()
    uniforms = call.uniforms.to(torch.float32).contiguous()
    gradients = [
        g if g.dtype == torch.float32 and g.stride(-1) == 1 else g.float().contiguous() for g in call.gradients
    ]
    _check(ids.dtype in (torch.int32, torch.int64), f"ids are {ids.dtype}; give int32 or int64")
    _check(weights is None or weights.numel() == ids.numel(), "there must be one weight per id")
    try:
        core().row_update(
            _table_fields(call),
            _state_addresses(call),
            KINDS[call.tables[0].dtype],
            [int(is_row) for is_row in call.state_is_row],
            call.code.data_ptr(),
            call.code.size(0),
            uniforms.data_ptr(),
            uniforms.size(1),
            _feature_fields(call, gradients, offsets),
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


def _check(fine: bool, problem: str) -> None:
    if not fine:
        raise MesetaError(f"row_update: {problem}")


def _table_fields(call: UpdateCall) -> list[int]:
    """For each table: address, rows, columns, first row, first column, key."""
    fields, dtype, origins = [], call.tables[0].dtype, iter(call.origins)
    for t, table in enumerate(call.tables):
        if table.dtype != dtype or table.dim() != 2 or not table.is_contiguous():
            _check(False, f"table {t} is {table.dtype} {tuple(table.shape)}; all must be contiguous [rows, D] {dtype}")
        key = (next(origins), next(origins), next(origins) % (1 << 64))
        fields += [table.data_ptr(), table.size(0), table.size(1), *key]
    return fields


def _state_addresses(call: UpdateCall) -> list[int]:
    """Where each state of each table lies; raises MesetaError for a state of another shape or type."""
    addresses, num_states = [], len(call.state_is_row)
    for index, state in enumerate(call.states):
        table, is_row = call.tables[index // num_states], call.state_is_row[index % num_states]
        wanted = table.shape[:1] if is_row else table.shape
        if state.dtype != torch.float32 or state.shape != wanted or not state.is_contiguous():
            _check(False, f"a state is {state.dtype} {tuple(state.shape)}, not contiguous float32 {tuple(wanted)}")
        addresses.append(state.data_ptr())
    return addresses


def _feature_fields(call: UpdateCall, gradients: Sequence[Tensor], offsets: Tensor) -> list[int]:
    """For each feature: position, table, address of its gradient, floats from one to the next, per id, weighted."""
    fields, num_bags, num_offsets, given = [], call.num_bags, offsets.numel(), call.features
    matrices = [(g.data_ptr(), g.dim(), g.size(0), g.size(-1), g.stride(0)) for g in gradients]
    for f in range(0, len(given), FEATURE_FIELDS):
        position, table, gradient, column, per_id, weighted = given[f : f + FEATURE_FIELDS]
        address, dims, rows, columns, stride = matrices[gradient]
        lines, width = num_bags, call.tables[table].size(1)
        if position < 0 or (position + 1) * num_bags >= num_offsets:
            _check(False, f"feature {position} with {num_bags} samples lies outside {num_offsets} offsets")
        if per_id:
            lines = int(offsets[(position + 1) * num_bags] - offsets[position * num_bags])
        if dims != 2 or rows != lines or column < 0 or column + width > columns:
            _check(
                False,
                f"feature {position} needs {lines} gradients of {width} columns from column {column} on, "
                f"but its matrix is {tuple(gradients[gradient].shape)}",
            )
        fields += [position, table, address + 4 * column, stride, per_id, weighted]
    return fields


def _gpu(*arguments: Any) -> None:
    from meseta.ops.row_update import triton

    triton.row_update(UpdateCall(*arguments))


def _fake(*_: Any) -> None:
    return None


_operator = register(
    "row_update(Tensor(a!)[] tables, Tensor(b!)[] states, Tensor code, Tensor uniforms, bool[] state_is_row, "
    "int[] origins, int[] features, Tensor ids, Tensor offsets, int num_bags, Tensor[] gradients, Tensor? weights, "
    "int step) -> ()",
    cpu=_cpu,
    cuda=_gpu,
    fake=_fake,
)
