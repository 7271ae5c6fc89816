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
from meseta.ops.row_update.call import (
    FEATURE_FIELDS,
    Bags,
    FeatureGradient,
    TableRows,
    UpdateCall,
    UpdateGroup,
    check_origin,
    check_program,
)
from meseta.ops.tables import check_bounds, plain_ids
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
    _check_counts(call)
    dtype = call.tables[0].dtype
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    ids = plain_ids("row_update", call.ids)
    offsets = plain_ids("row_update", call.offsets, "offsets").to(torch.int64)
    weights = None if call.weights is None else call.weights.to(exact).contiguous()
    _check(weights is None or weights.numel() == ids.numel(), "there must be one weight per id")
    uniforms = call.uniforms.to(torch.float32).contiguous()
    gradients = [g if g.dtype == exact and g.stride(-1) == 1 else g.to(exact).contiguous() for g in call.gradients]
    tables, states = _table_fields(call), _state_addresses(call, exact)
    features = _feature_fields(call, gradients, offsets)
    if dtype not in KINDS:
        _check_ids(call)
        try:
            reference.row_update(call)
        except (LookupError, TypeError) as error:
            raise MesetaError(f"row_update: the program does not run ({error}); make it with trace") from None
        return
    try:
        core().row_update(
            tables,
            states,
            KINDS[dtype],
            [int(is_row) for is_row in call.state_is_row],
            call.code.data_ptr(),
            call.code.size(0),
            uniforms.data_ptr(),
            uniforms.size(1),
            features,
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


def _check_counts(call: UpdateCall) -> None:
    """Raise MesetaError unless there are as many of everything as the tables, states and features need."""
    num_tables, num_states = len(call.tables), len(call.tables) * len(call.state_is_row)
    _check(num_tables > 0, "no table was given")
    _check(call.tables[0].is_floating_point(), f"rows are {call.tables[0].dtype}")
    _check(all(g.dim() == 2 for g in call.gradients), "gradients must be [B, columns] or [ids, columns]")
    check_program("row_update", call.code, call.uniforms, num_tables, call.step)
    _check(len(call.states) == num_states, f"{len(call.states)} states were given, and {num_states} are needed")
    _check(len(call.origins) == 3 * num_tables, f"{len(call.origins)} origins for {num_tables} tables; give 3 for each")
    _check(len(call.features) % FEATURE_FIELDS == 0, f"{len(call.features)} numbers of features; give 6 for each")
    _check(call.num_bags >= 0, f"the number of samples is {call.num_bags}")


def _check_ids(call: UpdateCall) -> None:
    """What the core checks, for the reference: it would take id -1 as the last row."""
    check_bounds("row_update", call.offsets.tolist(), call.ids.numel())
    for f in call.features_as_read():
        bounds = call.offsets[f.position * call.num_bags], call.offsets[(f.position + 1) * call.num_bags]
        own = call.ids[int(bounds[0]) : int(bounds[1])]
        rows = call.tables[f.table].shape[0]
        _check(not bool(((own < 0) | (own >= rows)).any()), f"an id of feature {f.position} is outside 0..{rows - 1}")


def _table_fields(call: UpdateCall) -> list[int]:
    """For each table: address, rows, columns, first row, first column, key."""
    fields, dtype, origins = [], call.tables[0].dtype, iter(call.origins)
    for t, table in enumerate(call.tables):
        if table.dtype != dtype or table.dim() != 2 or not table.is_contiguous():
            _check(False, f"table {t} is {table.dtype} {tuple(table.shape)}; all must be contiguous [rows, D] {dtype}")
        origin = (next(origins), next(origins), next(origins))
        check_origin("row_update", origin)
        fields += [table.data_ptr(), table.size(0), table.size(1), origin[0], origin[1], origin[2] % (1 << 64)]
    return fields


def _state_addresses(call: UpdateCall, dtype: torch.dtype) -> list[int]:
    """Where each state of each table lies; raises MesetaError for a state of another shape or type."""
    addresses, num_states = [], len(call.state_is_row)
    for index, state in enumerate(call.states):
        table, is_row = call.tables[index // num_states], call.state_is_row[index % num_states]
        wanted = table.shape[:1] if is_row else table.shape
        if state.dtype != dtype or state.shape != wanted or not state.is_contiguous():
            _check(False, f"a state is {state.dtype} {tuple(state.shape)}, not contiguous {dtype} {tuple(wanted)}")
        addresses.append(state.data_ptr())
    return addresses


def _feature_fields(call: UpdateCall, gradients: Sequence[Tensor], offsets: Tensor) -> list[int]:
    """For each feature: position, table, address of its gradient, floats from one to the next, per id, weighted."""
    fields, num_bags, num_offsets, given = [], call.num_bags, offsets.numel(), call.features
    matrices = [(g.data_ptr(), g.size(0), g.size(1), g.stride(0)) for g in gradients]
    for f in range(0, len(given), FEATURE_FIELDS):
        position, table, gradient, column, per_id, weighted = given[f : f + FEATURE_FIELDS]
        if not (0 <= table < len(call.tables) and 0 <= gradient < len(matrices)):
            _check(False, f"feature {position} names table {table} and gradient {gradient}, which were not given")
        address, rows, columns, stride = matrices[gradient]
        lines, width = num_bags, call.tables[table].size(1)
        if position < 0 or (position + 1) * num_bags >= num_offsets:
            _check(False, f"feature {position} with {num_bags} samples lies outside {num_offsets} offsets")
        if per_id:
            lines = int(offsets[(position + 1) * num_bags] - offsets[position * num_bags])
        if rows != lines or column < 0 or column + width > columns:
            _check(
                False,
                f"feature {position} needs {lines} gradients of {width} columns from column {column} on, "
                f"but its matrix is {tuple(gradients[gradient].shape)}",
            )
        fields += [position, table, address + 4 * column, stride, bool(per_id), bool(weighted)]
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
