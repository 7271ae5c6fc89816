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
from torch import Tensor

from meseta.ops.coalesce import BLOCK_SAMPLES
from meseta.ops.common import device_constant
from meseta.ops.row_update import reference
from meseta.ops.row_update.call import FeatureGradient, UpdateCall, marks_address, row_ids_address, unpack_features
from meseta.ops.row_update.triton_kernels import (
    ITEMS_PER_PROGRAM,
    MIN_LONG_RUN,
    RUN_SLOTS,
    SEGMENT_ITEMS,
    list_items,
    mark_segments,
    order_items,
    sum_long_runs,
)
from meseta.ops.row_update.triton_parts import PLAN_WORDS, TABLE_WORDS
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
"""Number of elements in the tile of a program, unless a single row needs more."""


def row_update(call: UpdateCall) -> None:
    """Implement `meseta.ops.row_update.row_update` on a GPU. Contributions of ids outside their table are ignored.

    `uniforms` on the CPU are copied to the device. To capture a CUDA graph, call the function once before the capture.
    Then pass float64 uniforms [tables, uniforms + 1] on the device and refill them before each replay. Their last
    column is the step, and `step` is ignored. Raises MesetaError if tensors do not match each other.
    """
    if call.tables[0].dtype not in ROW_TYPES:
        reference.row_update(call)
        return
    _check_ids(call)
    gradients = [
        g if g.dtype == torch.float32 and g.stride(-1) == 1 else g.float().contiguous() for g in call.gradients
    ]
    launch = _plan_launch(
        tensor_metadata(call.tables),
        tensor_metadata(call.states),
        tuple(call.state_is_row),
        _origins(call),
        tuple(call.features),
        tuple((g.shape[1], g.stride(0), g.data_ptr() % VECTOR_BYTES) for g in gradients),
        call.num_bags,
        call.offsets.numel(),
    )
    # The number of gradients of unpooled features changes in every step, and only the device knows it.
    for f in launch.pooled:
        if gradients[f.gradient].shape[0] != call.num_bags:
            raise MesetaError(
                f"row_update: feature {f.position} needs {call.num_bags} gradients, one per sample, but its matrix "
                f"is {tuple(gradients[f.gradient].shape)}; pass one row per sample"
            )
    limit = call.ids.numel() * launch.max_tables_per_feature
    if limit == 0 or call.num_bags == 0:
        return
    layout = launch.layout
    with torch.cuda.device_of(call.ids):
        bags = _DeviceBags(
            plan=device_constant(launch.words, call.ids.device),
            ids=call.ids.contiguous(),
            offsets=call.offsets.contiguous(),
            weights=call.weights.to(torch.float32).contiguous() if call.weights is not None else None,
            max_contributions=limit,
        )
        contributions = _list_contributions(bags, layout, gradients)
        sums = _sum_long_runs(bags, contributions, layout.group_blocks[-1] * COLUMN_BLOCK, launch.line_vector)
        kernel = update_kernel(tuple(map(tuple, call.code.tolist())), tuple(call.state_is_row))
        _launch_updates(
            kernel, bags, layout, contributions, _uniforms_on_device(call), call.found_inf, launch.line_vector
        )
        del sums  # Items contain addresses in `sums`, so it must live until here.


@dataclass(frozen=True)
class _KeyLayout:
    """Keys by which the rows of all tables are sorted. They ascend by width of the table, table and row."""

    words: tuple[int, ...]
    """Words of all tables, see triton_parts.py."""
    table_words: int
    """Number of words per table."""
    group_blocks: tuple[int, ...]
    """Blocks of 16 columns per group of tables, rounded up to a power of two. Each group has its own launch."""
    bounds: tuple[int, ...]
    """First key of each group, followed by the number of all rows."""
    vector: int
    """Number of elements that are loaded with one instruction. All rows start at multiples of it."""
    dtype: torch.dtype


@dataclass(frozen=True)
class _DeviceBags:
    """Arguments of the update on the device."""

    plan: Tensor
    """int64 plan, see triton_parts.py."""
    ids: Tensor
    offsets: Tensor
    weights: Tensor | None
    max_contributions: int
    """Upper bound for the number of contributions."""


@dataclass(frozen=True)
class _Contributions:
    """Contributions to rows, ordered by (row, feature, sample, id)."""

    keys: Tensor
    """Keys [limit], sorted. Unused entries have the number of all rows as key, and come last."""
    items: Tensor
    """int64 items [limit, 2], see triton_kernels.py."""
    scales: Tensor | None
    """float32 weights of the ids, [limit]. `None` if the call has no weights."""
    segments: Tensor
    """First item of each touched row, int64 [limit + 1]."""
    ranges: Tensor
    """First segment of each group of tables, int64 [groups + 1]."""


@dataclass(frozen=True)
class _UpdateLaunch:
    """Launch parameters that depend on tables and features only, so that they can be cached."""

    layout: _KeyLayout
    words: tuple[int, ...]
    """The plan, see triton_parts.py."""
    max_tables_per_feature: int
    """Maximum number of tables per feature, several for column shards. Each gets a contribution of each id."""
    line_vector: int
    """Number of elements of a gradient that are loaded with one instruction."""
    pooled: tuple[FeatureGradient, ...]
    """First feature of each gradient matrix that has one row per bag."""


@lru_cache(maxsize=256)
def _plan_launch(
    tables: tuple[TensorMetadata, ...],
    states: tuple[TensorMetadata, ...],
    state_is_row: tuple[bool, ...],
    origins: tuple[tuple[int, ...], ...],
    feature_fields: tuple[int, ...],
    lines: tuple[tuple[int, ...], ...],
    num_bags: int,
    num_offsets: int,
) -> _UpdateLaunch:
    """Plan the launches. `lines` has (columns, stride, misalignment in bytes) of each gradient.

    Raises MesetaError if tables, states, features or gradients do not match each other.
    """
    layout, features = _make_layout(tables, states, state_is_row, origins), unpack_features(feature_fields)
    line_vector, words = gcd(layout.vector, 4), list[int]()
    for f in features:
        num_columns, stride, misalignment = lines[f.gradient]
        width = tables[f.table].shape[1]
        if f.position < 0 or (f.position + 1) * num_bags >= num_offsets:
            raise MesetaError(
                f"row_update: feature {f.position} with {num_bags} samples is outside the {num_offsets} offsets"
            )
        if f.column < 0 or f.column + width > num_columns:
            raise MesetaError(
                f"row_update: feature {f.position} needs {num_bags} gradients of {width} columns from column "
                f"{f.column} on, but its matrix has {num_columns} columns"
            )
        words += [f.position, f.table, f.gradient, f.column, stride, int(f.per_id), int(f.weighted)]
        line_vector = gcd(line_vector, f.column, stride, misalignment // 4)
    tables_at = PLAN_WORDS.value + len(words)
    words += layout.words
    bounds_at = PLAN_WORDS.value + len(words)
    num_blocks, num_groups = triton.cdiv(num_bags, BLOCK_SAMPLES), len(layout.group_blocks)
    head = (len(features), num_bags, layout.bounds[-1], num_blocks, tables_at, layout.table_words)
    return _UpdateLaunch(
        layout=layout,
        words=(*head, bounds_at, num_groups, *words, *layout.bounds),
        max_tables_per_feature=max(Counter(f.position for f in features).values(), default=0),
        line_vector=line_vector,
        pooled=tuple({f.gradient: f for f in reversed(features) if not f.per_id}.values()),
    )


def _origins(call: UpdateCall) -> tuple[tuple[int, ...], ...]:
    """Return (first row, first column, key, address of row ids or 0, address of marks or 0) of each table."""
    origins = []
    for t, table in enumerate(call.tables):
        first_row, first_column, key = call.origins[3 * t : 3 * t + 3]
        row_ids = None if call.row_ids is None else call.row_ids[t]
        marks, _ = marks_address(table, None if call.marks is None else call.marks[t], row_ids)
        origins.append((first_row, first_column, key, row_ids_address(table, row_ids), marks))
    return tuple(origins)


def _make_layout(
    tables: Sequence[TensorMetadata],
    states: Sequence[TensorMetadata],
    state_is_row: Sequence[bool],
    origins: Sequence[tuple[int, ...]],
) -> _KeyLayout:
    dtype, num_states = tables[0].dtype, len(state_is_row)
    vector, next_key = (8 if dtype.itemsize == 2 else 4), 0
    for t, table in enumerate(tables):
        _check_table(t, table, dtype, zip(states[t * num_states : (t + 1) * num_states], state_is_row, strict=True))
    blocks = [1 << (-(-table.shape[1] // COLUMN_BLOCK) - 1).bit_length() for table in tables]
    words: list[tuple[int, ...]] = [()] * len(blocks)
    bounds: dict[int, int] = {}
    # Tables of similar width are adjacent, so that one launch handles a range of keys.
    for t in sorted(range(len(blocks)), key=lambda t: blocks[t]):
        bounds.setdefault(blocks[t], next_key)
        first_row, first_column, key, row_ids, marks = origins[t]
        addresses = [state.address for state in states[t * num_states : (t + 1) * num_states]]
        rows, columns = tables[t].shape
        head = (tables[t].address, columns, rows, next_key, key, first_row, first_column, row_ids, marks)
        words[t] = (*head, *addresses)
        next_key += rows
        vector = gcd(vector, columns, tables[t].address // dtype.itemsize)
        for address, is_row in zip(addresses, state_is_row, strict=True):
            vector = vector if is_row else gcd(vector, address // 4)
    return _KeyLayout(
        words=tuple(word for table_words in words for word in table_words),
        table_words=TABLE_WORDS.value + num_states,
        group_blocks=tuple(bounds),
        bounds=(*bounds.values(), next_key),
        vector=vector,
        dtype=dtype,
    )


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


def _check_ids(call: UpdateCall) -> None:
    if call.ids.dtype not in (torch.int32, torch.int64):
        raise MesetaError(f"row_update: ids are {call.ids.dtype}; pass int32 or int64")
    if call.weights is not None and call.weights.numel() != call.ids.numel():
        raise MesetaError(f"row_update: {call.weights.numel()} weights for {call.ids.numel()} ids; pass one per id")
    for matrix in call.gradients:
        if matrix.dim() != 2:
            raise MesetaError(f"row_update: a gradient is {tuple(matrix.shape)}; pass [samples or ids, columns]")


def _uniforms_on_device(call: UpdateCall) -> Tensor:
    """Return float64 uniforms [tables, uniforms + 1] on the device. The last column is the step."""
    device = call.ids.device
    if device.type == "cuda" and call.uniforms.device == device:
        return call.uniforms.contiguous()
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise MesetaError(
            "row_update: a CUDA graph is being captured, and every replay would use the learning rate and step of this "
            "call; pass `uniforms` on the device, with the step as an additional column"
        )
    steps = torch.full((len(call.tables), 1), call.step, dtype=torch.float64)
    table = torch.cat([call.uniforms.double(), steps], dim=1)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def _list_contributions(bags: _DeviceBags, layout: _KeyLayout, gradients: Sequence[Tensor]) -> _Contributions:
    limit, device = bags.max_contributions, bags.ids.device
    key_type = torch.int32 if layout.bounds[-1] < 2**31 - 1 else torch.int64
    grid = (triton.cdiv(limit, ITEMS_PER_PROGRAM.value),)
    keys = torch.empty(limit, dtype=key_type, device=device)
    items = torch.empty((limit, 2), dtype=torch.int64, device=device)
    # Gradients have new addresses in every step. A kernel writes them, which a CUDA graph can replay.
    matrices = gradients[0]
    if len(gradients) > 1:
        matrices = torch.empty(padded_address_count(len(gradients)), dtype=torch.int64, device=device)
        write_addresses(matrices, gradients)
    list_items[grid](keys, items, bags.plan, bags.ids, bags.offsets, bags.weights, matrices, limit)
    keys, order = torch.sort(keys, stable=True)
    ordered = torch.empty_like(items)
    scales = None if bags.weights is None else torch.empty(limit, dtype=torch.float32, device=device)
    num_keys = torch.empty(grid, dtype=torch.int32, device=device)
    order_items[grid](ordered, scales, num_keys, items, keys, order, bags.plan, limit)
    segments = torch.empty(limit + 1, dtype=torch.int64, device=device)
    ranges = torch.empty(len(layout.bounds), dtype=torch.int64, device=device)
    segment_grid = (triton.cdiv(limit, SEGMENT_ITEMS.value),)
    mark_segments[segment_grid](segments, ranges, keys, num_keys, bags.plan, limit, num_warps=8)
    return _Contributions(keys=keys, items=ordered, scales=scales, segments=segments, ranges=ranges)


def _sum_long_runs(bags: _DeviceBags, contributions: _Contributions, columns: int, vector: int) -> Tensor:
    """Return the sums of long runs, [limit // MIN_LONG_RUN + 1, columns]. Items of these runs then point to them."""
    length = MIN_LONG_RUN.value
    sums = torch.empty((bags.max_contributions // length + 1, columns), dtype=torch.float32, device=bags.ids.device)
    sum_long_runs[(triton.cdiv(bags.max_contributions, length * RUN_SLOTS.value),)](
        sums,
        contributions.items,
        contributions.scales,
        contributions.keys,
        bags.plan,
        bags.max_contributions,
        COLUMNS=columns,
        VECTOR=vector,
        num_warps=1 if columns <= 128 else 4,
        enable_fp_fusion=False,
    )
    return sums


def _launch_updates(
    kernel: Any,
    bags: _DeviceBags,
    layout: _KeyLayout,
    contributions: _Contributions,
    uniforms: Tensor,
    found_inf: Tensor | None,
    line_vector: int,
) -> None:
    """Launch one update per group of tables of similar width. Only these kernels write tables, so only they check
    `found_inf`."""
    for group, blocks in enumerate(layout.group_blocks):
        rows = max(1, TILE_ELEMENTS // (blocks * COLUMN_BLOCK))
        most = min(bags.max_contributions, layout.bounds[group + 1] - layout.bounds[group])
        kernel[(triton.cdiv(most, rows),)](
            bags.plan,
            uniforms,
            contributions.keys,
            contributions.items,
            contributions.scales,
            contributions.segments,
            contributions.ranges,
            found_inf,
            group,
            NUM_UNIFORMS=uniforms.shape[1],
            ROW=ROW_TYPES[layout.dtype],
            ROWS=rows,
            BLOCKS=blocks,
            VECTOR=layout.vector,
            LINE_VECTOR=line_vector,
            num_warps=2,
            enable_fp_fusion=False,
        )
