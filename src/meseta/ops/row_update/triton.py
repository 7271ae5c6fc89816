"""Row update on a GPU without host sync: sort contributions by row, sum long runs, update a few rows per program."""
# Numbers that the host does not know, such as the number of touched rows, stay on the device. Launches have the maximum
# size that could be needed, and programs without work return immediately.

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meseta.ops.common import device_constant
from meseta.ops.row_update import reference
from meseta.ops.row_update.call import (
    FeatureGradient,
    SortedRowIds,
    UpdateCall,
    marks_address,
    row_ids_address,
    unpack_features,
)
from meseta.ops.row_update.triton_kernels import CHUNK, RUN_SLOTS, list_keys, order_bags, sum_long_runs
from meseta.ops.row_update.triton_parts import MIN_LONG_RUN, NUM_WORDS, Lines
from meseta.ops.row_update.triton_source import update_kernel
from meseta.ops.triton_shared import (
    ROW_TYPES,
    VECTOR_BYTES,
    TensorMetadata,
    padded_address_count,
    tensor_metadata,
    write_addresses,
)
from meseta.spec import COLUMN_BLOCK, MesetaError

TILE_ELEMENTS = 512
"""Number of elements in the tile of a program with one warp, unless a single row needs more."""
# Registers of a multiprocessor: 65,536 / (168 * 32) = 12 warps. Without a limit ptxas prefers 16, and spills. Twelve
# programs load 12 * 512 * 8 = 49,152 bytes of rows and gradients at a time.
MAX_REGISTERS = 168
"""Maximum number of registers of a thread, unless a single row needs a larger tile."""
INT16_ROWS, INT32_ROWS = 2**16, 2**31
"""Number of rows of all tables from which keys need more than 16 and 32 bits."""
INT32_BAGS = 2**31
"""Number of bags of all features from which their numbers need more than 32 bits."""
INT32_ITEMS = 2**30
"""Number of contributions from which their numbers have 64 bits. Below, sums of two numbers fit 32 bits."""


def row_update(call: UpdateCall) -> None:
    """Implement `meseta.ops.row_update.row_update` on a GPU. Contributions of ids outside their table are ignored.

    `uniforms` on the CPU are copied to the device. To capture a CUDA graph, call the function once before the capture.
    Then pass float64 uniforms [tables, uniforms + 1] on the device and refill them before each replay. Their last
    column is the step, and `step` is ignored. Raises MesetaError if tensors do not match each other.
    """
    if call.tables[0].dtype not in ROW_TYPES:
        reference.row_update(call)
        return
    sorted_ids = sort_row_ids(call.tables, call.features, call.ids, call.offsets, call.num_bags, call.weights)
    if sorted_ids is not None:
        apply_row_update(call, sorted_ids)


def sort_row_ids(
    tables: Sequence[Tensor],
    feature_fields: Sequence[int],
    ids: Tensor,
    offsets: Tensor,
    num_bags: int,
    weights: Tensor | None,
) -> SortedRowIds | None:
    """Sort the contributions of ids to rows. Needs no gradients. Returns `None` if there are no contributions.

    Only the shapes of `tables` are used. Raises MesetaError if ids, offsets or weights do not match each other.
    """
    if ids.dtype not in (torch.int32, torch.int64):
        raise MesetaError(f"row_update: ids are {ids.dtype}; pass int32 or int64")
    if weights is not None and weights.numel() != ids.numel():
        raise MesetaError(f"row_update: {weights.numel()} weights for {ids.numel()} ids; pass one per id")
    shapes = tuple((table.shape[0], table.shape[1]) for table in tables)
    plan = _plan_sort(shapes, tuple(feature_fields), num_bags, offsets.numel())
    if ids.numel() == 0 or plan.max_tables_per_feature == 0 or num_bags == 0:
        return None
    with torch.cuda.device_of(ids):
        used_weights = weights.to(torch.float32).contiguous() if plan.has_weights and weights is not None else None
        return _sort(plan, ids.contiguous(), offsets.contiguous(), used_weights)


@dataclass(frozen=True)
class _SortPlan:
    """Parameters of a sort that depend on tables and features only, so that they can be cached."""

    words: tuple[int, ...]
    """The plan of `list_keys`."""
    num_features: int
    num_bags: int
    num_rows: int
    """Number of rows of all tables."""
    max_tables_per_feature: int
    """Maximum number of tables per feature, several for column shards. Each gets a contribution of each id."""
    has_weights: bool
    has_rows_per_id: bool
    """Whether any gradient has one row per id."""


@lru_cache(maxsize=256)
def _plan_sort(
    shapes: tuple[tuple[int, int], ...], feature_fields: tuple[int, ...], num_bags: int, num_offsets: int
) -> _SortPlan:
    features, (first_keys, bounds) = unpack_features(feature_fields), _key_ranges(shapes)
    words = [len(features), num_bags, bounds[-1][2]]
    for f in features:
        if f.position < 0 or (f.position + 1) * num_bags >= num_offsets:
            raise MesetaError(
                f"row_update: feature {f.position} with {num_bags} samples is outside the {num_offsets} offsets"
            )
        words += [f.position, shapes[f.table][0], first_keys[f.table], int(f.weighted)]
    return _SortPlan(
        words=tuple(words),
        num_features=len(features),
        num_bags=num_bags,
        num_rows=bounds[-1][2],
        max_tables_per_feature=max(Counter(f.position for f in features).values(), default=0),
        has_weights=any(f.weighted for f in features),
        has_rows_per_id=any(f.per_id for f in features),
    )


def _key_ranges(shapes: Sequence[tuple[int, int]]) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Return the key of the first row of each table, and (blocks of 16 columns, first key, end) of each width.

    Blocks are rounded up to a power of two. Keys ascend by width, table and row, so that one launch can update all
    tables of a width.
    """
    blocks = [1 << (-(-columns // COLUMN_BLOCK) - 1).bit_length() for _, columns in shapes]
    first_keys, bounds, next_key = [0] * len(shapes), list[tuple[int, int, int]](), 0
    for t in sorted(range(len(shapes)), key=lambda t: blocks[t]):
        first_keys[t] = next_key
        next_key += shapes[t][0]
        first = bounds.pop()[1] if bounds and bounds[-1][0] == blocks[t] else first_keys[t]
        bounds.append((blocks[t], first, next_key))
    return first_keys, bounds


def _sort(plan: _SortPlan, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> SortedRowIds:
    device, limit = ids.device, ids.numel() * plan.max_tables_per_feature
    grid = (triton.cdiv(limit, CHUNK.value),)
    # torch sorts in one pass per eight bits of the keys. Each reads and writes key and int64 number, such as 24 bytes.
    narrow, small = plan.num_rows < INT16_ROWS, plan.num_rows < INT32_ROWS
    key_type = torch.int16 if narrow else torch.int32 if small else torch.int64
    bag_type = torch.int32 if plan.num_features * plan.num_bags < INT32_BAGS else torch.int64
    form = {"SHIFT": _key_shift(key_type), "INDEX": _index_type(limit)}

    def new(size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def new_scales() -> Tensor | None:
        return None if weights is None else new(limit, torch.float32)

    listed = SortedRowIds(
        keys=new(limit, key_type),
        bags=new(limit, bag_type),
        begins=new(plan.num_features, torch.int64) if plan.has_rows_per_id else None,
        scales=new_scales(),
    )
    words = device_constant(plan.words, device)
    list_keys[grid](listed, words, ids, offsets, weights, limit, **form)
    keys, order = torch.sort(listed.keys, stable=True)
    starts = new(grid[0] * CHUNK.value, torch.int16)
    ordered = SortedRowIds(keys, new(limit, bag_type), starts, order, listed.begins, new_scales())
    order_bags[grid](ordered, listed.bags, listed.scales, plan.num_bags, plan.num_rows, limit, **form)
    return ordered if plan.has_rows_per_id else ordered._replace(order=None)


def _key_shift(key_type: torch.dtype) -> int:
    return 2**15 if key_type == torch.int16 else 0


def _index_type(limit: int) -> Any:
    return tl.int32 if limit < INT32_ITEMS else tl.int64


def apply_row_update(call: UpdateCall, sorted_ids: SortedRowIds) -> None:
    """Update the rows of a call whose ids were sorted by `sort_row_ids`.

    Raises MesetaError if gradients do not match tables and features.
    """
    for matrix in call.gradients:
        if matrix.dim() != 2:
            raise MesetaError(f"row_update: a gradient is {tuple(matrix.shape)}; pass [samples or ids, columns]")
    gradients = [
        g if g.dtype == torch.float32 and g.stride(-1) == 1 else g.float().contiguous() for g in call.gradients
    ]
    plan = _plan_update(
        tensor_metadata(call.tables),
        tensor_metadata(call.states),
        tuple(call.state_is_row),
        _origins(call),
        tuple(call.features),
        tuple((g.shape[1], g.stride(0), g.data_ptr() % VECTOR_BYTES) for g in gradients),
    )
    # The number of gradients of unpooled features changes in every step, and only the device knows it.
    for f in plan.pooled:
        if gradients[f.gradient].shape[0] != call.num_bags:
            raise MesetaError(
                f"row_update: feature {f.position} needs {call.num_bags} gradients, one per sample, but its matrix "
                f"is {tuple(gradients[f.gradient].shape)}; pass one row per sample"
            )
    with torch.cuda.device_of(sorted_ids.keys):
        lines = _sum_long_runs(plan, sorted_ids, gradients, call.num_bags)
        _launch_updates(plan, sorted_ids, lines, call)


@dataclass(frozen=True)
class _UpdatePlan:
    """Parameters of an update that depend on tables and features only, so that they can be cached."""

    words: tuple[int, ...]
    """The plan, see triton_parts.py."""
    bounds: tuple[tuple[int, int, int], ...]
    """(Blocks of 16 columns, first key, end) of each width. Each has its own launch."""
    vector: int
    """Number of elements that are loaded with one instruction. All rows start at multiples of it."""
    form: tuple[int, int, int, int, bool]
    """`FORM` of the kernels for the widest tables, see `load_lines`."""
    pooled: tuple[FeatureGradient, ...]
    """First feature of each gradient matrix that has one row per bag."""


@lru_cache(maxsize=256)
def _plan_update(
    tables: tuple[TensorMetadata, ...],
    states: tuple[TensorMetadata, ...],
    state_is_row: tuple[bool, ...],
    origins: tuple[tuple[int, ...], ...],
    feature_fields: tuple[int, ...],
    lines: tuple[tuple[int, ...], ...],
) -> _UpdatePlan:
    """Plan the launches. `lines` has (columns, stride, misalignment in bytes) of each gradient.

    Raises MesetaError if tables, states, features or gradients do not match each other.
    """
    features, vector = unpack_features(feature_fields), VECTOR_BYTES // tables[0].dtype.itemsize
    table_words, (first_keys, bounds) = [], _key_ranges([(t.shape[0], t.shape[1]) for t in tables])
    for t, table in enumerate(tables):
        table_states = states[t * len(state_is_row) : (t + 1) * len(state_is_row)]
        _check_table(t, table, tables[0].dtype, zip(table_states, state_is_row, strict=True))
        addresses = [state.address for state in table_states]
        table_words.append((table.address, table.shape[1], first_keys[t], *origins[t], *addresses))
        vector = gcd(vector, table.shape[1], table.address // table.dtype.itemsize)
        for address, is_row in zip(addresses, state_is_row, strict=True):
            vector = vector if is_row else gcd(vector, address // 4)
    line_vector, words = gcd(vector, 4), list[int]()
    for f in features:
        num_columns, stride, misalignment = lines[f.gradient]
        width = tables[f.table].shape[1]
        if f.column < 0 or f.column + width > num_columns:
            raise MesetaError(
                f"row_update: feature {f.position} needs gradients of {width} columns from column {f.column} on, but "
                f"its matrix has {num_columns} columns"
            )
        words += [f.gradient, f.column, stride, int(f.per_id), f.table, *table_words[f.table]]
        line_vector = gcd(line_vector, f.column, stride, misalignment // 4)
    columns = bounds[-1][0] * COLUMN_BLOCK
    is_full = all(table.shape[1] == columns for table in tables)
    return _UpdatePlan(
        words=tuple(words),
        bounds=tuple(bounds),
        vector=vector,
        form=(NUM_WORDS.value + len(state_is_row), columns, line_vector, bounds[-1][0], is_full),
        pooled=tuple({f.gradient: f for f in reversed(features) if not f.per_id}.values()),
    )


def _origins(call: UpdateCall) -> tuple[tuple[int, ...], ...]:
    """Return (key of random bits, first row, first column, address of row ids or 0, address of marks or 0) of each
    table."""
    origins = []
    for t, table in enumerate(call.tables):
        first_row, first_column, key = call.origins[3 * t : 3 * t + 3]
        row_ids = None if call.row_ids is None else call.row_ids[t]
        marks, _ = marks_address(table, None if call.marks is None else call.marks[t], row_ids)
        origins.append((key, first_row, first_column, row_ids_address(table, row_ids), marks))
    return tuple(origins)


def _check_table(
    index: int, table: TensorMetadata, dtype: torch.dtype, states: Iterable[tuple[TensorMetadata, bool]]
) -> None:
    if table.dtype != dtype or len(table.shape) != 2 or not table.is_contiguous:
        raise MesetaError(
            f"row_update: table {index} is {table.dtype} {table.shape}; all must be contiguous [rows, D] {dtype}"
        )
    for state, is_row in states:
        shape = table.shape[:1] if is_row else table.shape
        if state.dtype != torch.float32 or state.shape != shape or not state.is_contiguous:
            raise MesetaError(
                f"row_update: a state of table {index} is {state.dtype} {state.shape}, not contiguous float32 {shape}"
            )


def _uniforms_on_device(call: UpdateCall) -> Tensor:
    """Return float64 uniforms [tables, uniforms + 1] on the device. The last column is the step."""
    device = call.tables[0].device
    if device.type == "cuda" and call.uniforms.device == device:
        return call.uniforms if call.uniforms.stride(1) == 1 else call.uniforms.contiguous()
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise MesetaError(
            "row_update: a CUDA graph is being captured, and every replay would use the learning rate and step of this "
            "call; pass `uniforms` on the device, with the step as an additional column"
        )
    steps = torch.full((len(call.tables), 1), call.step, dtype=torch.float64)
    table = torch.cat([call.uniforms.double(), steps], dim=1)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def _sum_long_runs(plan: _UpdatePlan, sorted_ids: SortedRowIds, gradients: Sequence[Tensor], num_bags: int) -> Lines:
    device, limit, length = sorted_ids.keys.device, sorted_ids.keys.numel(), MIN_LONG_RUN.value
    # Gradients have new addresses in every step. A kernel writes them, which a CUDA graph can replay.
    matrices = gradients[0]
    if len(gradients) > 1:
        matrices = torch.empty(padded_address_count(len(gradients)), dtype=torch.int64, device=device)
        write_addresses(matrices, gradients)
    lines = Lines(
        plan=device_constant(plan.words, device),
        gradients=matrices,
        sums=torch.empty((limit // length + 1, plan.form[1]), dtype=torch.float32, device=device),
        lengths=torch.empty(limit // length + 1, dtype=torch.int32, device=device),
    )
    sum_long_runs[(triton.cdiv(limit, length * RUN_SLOTS.value),)](
        sorted_ids,
        lines,
        num_bags,
        limit,
        FORM=plan.form,
        INDEX=_index_type(limit),
        num_warps=1 if plan.form[1] <= 128 else 4,
        enable_fp_fusion=False,
    )
    return lines


def _launch_updates(plan: _UpdatePlan, sorted_ids: SortedRowIds, lines: Lines, call: UpdateCall) -> None:
    """Launch one update per width of tables. Only these kernels write tables, so only they check `found_inf`."""
    kernel = update_kernel(tuple(map(tuple, call.code.tolist())), tuple(call.state_is_row))
    uniforms, limit = _uniforms_on_device(call), sorted_ids.keys.numel()
    for blocks, first_key, end_key in plan.bounds:
        rows = max(1, TILE_ELEMENTS // (blocks * COLUMN_BLOCK))
        kernel[(triton.cdiv(limit, CHUNK.value) * (CHUNK.value // rows),)](
            sorted_ids,
            lines,
            uniforms,
            call.found_inf,
            call.num_bags,
            limit,
            first_key,
            end_key,
            NUM_UNIFORMS=uniforms.shape[1],
            STRIDE=uniforms.stride(0),  # 0 if all tables have the same uniforms
            ROW=ROW_TYPES[call.tables[0].dtype],
            ROWS=rows,
            BLOCKS=blocks,
            CHUNK=CHUNK.value,
            SHIFT=_key_shift(sorted_ids.keys.dtype),
            VECTOR=plan.vector,
            HAS_MARKS=call.marks is not None,
            FORM=(*plan.form[:3], blocks, plan.form[4]),
            INDEX=_index_type(limit),
            num_warps=max(1, blocks * COLUMN_BLOCK // (2 * TILE_ELEMENTS)),
            maxnreg=MAX_REGISTERS if blocks * COLUMN_BLOCK <= TILE_ELEMENTS else None,
            enable_fp_fusion=False,
        )
