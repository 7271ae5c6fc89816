"""Reference of the row update in plain PyTorch. It also handles float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meseta.ops.coalesce import BLOCK_SAMPLES, coalesce
from meseta.ops.random_rows.reference import philox
from meseta.ops.row_marks import mark_words
from meseta.ops.row_program.lowering import RowCode
from meseta.ops.row_program.optimizer import compute_dtype, sum_in_blocks
from meseta.ops.row_program.program import interpret
from meseta.ops.row_update.call import ApplyCall, FeatureGradient, UpdateCall, unpack_features


def row_update(call: UpdateCall) -> None:
    """Implement the operator behind `meseta.ops.row_update.row_update` in plain PyTorch."""
    num_states, features = len(call.state_is_row), unpack_features(call.features)
    for t, table in enumerate(call.tables):
        rows, sums = _sum_gradients(call, table, [f for f in features if f.table == t])
        if rows.numel() == 0:
            continue
        kept = call.states[t * num_states : (t + 1) * num_states]
        picked = [state[rows] if state.dim() == 2 else state[rows][:, None] for state in kept]
        program = RowCode(instructions=call.code, num_element_registers=0, num_row_registers=0)
        done = interpret(program, call.uniforms[t].tolist(), table[rows].to(sums.dtype), sums, picked, [])
        _, first_column, key = call.origins[3 * t : 3 * t + 3]
        shard_rows = call.shard_rows(t, rows)
        first_row = call.origins[3 * t]
        stepped = round_rows(done.weight, table.dtype, shard_rows + first_row, first_column, key, call.step)
        if call.marks is not None and call.marks[t].numel():
            _mark_if_finite(call.found_inf, call.marks[t], shard_rows)
        _store_if_finite(call.found_inf, table, rows, stepped)
        for state, value in zip(kept, done.state, strict=True):
            _store_if_finite(call.found_inf, state, rows, value if state.dim() == 2 else value.squeeze(1))


def row_apply(call: ApplyCall) -> None:
    """Implement the operator behind `meseta.ops.row_update.staged` in plain PyTorch."""
    rows, gradient = call.rows, call.gradient
    picked = [state[rows] if state.dim() == 2 else state[rows][:, None] for state in call.states]
    program = RowCode(instructions=call.code, num_element_registers=0, num_row_registers=0)
    stats = [stat[:, None] for stat in call.stats]
    done = interpret(program, call.uniforms.tolist(), call.table[rows].to(gradient.dtype), gradient, picked, stats)
    if call.sums is not None:
        call.sums.copy_(torch.stack([sum_in_blocks(summand) for summand in done.summands]))
        return
    first_row, first_column, key = call.origin
    stepped = round_rows(done.weight, call.table.dtype, call.shard_rows + first_row, first_column, key, call.step)
    if call.marks is not None:
        _mark_if_finite(call.found_inf, call.marks, call.shard_rows)
    _store_if_finite(call.found_inf, call.table, rows, stepped)
    for state, value in zip(call.states, done.state, strict=True):
        _store_if_finite(call.found_inf, state, rows, value if state.dim() == 2 else value.squeeze(1))


def _store_if_finite(found_inf: Tensor | None, target: Tensor, rows: Tensor, values: Tensor) -> None:
    """Set target[rows] to values unless `found_inf` is nonzero, without a host sync."""
    target[rows] = values if found_inf is None else torch.where(found_inf == 0, values, target[rows])


def _mark_if_finite(found_inf: Tensor | None, marks: Tensor, rows: Tensor) -> None:
    marked = marks | mark_words(rows, marks.numel())
    marks.copy_(marked if found_inf is None else torch.where(found_inf == 0, marked, marks))


def _sum_gradients(call: UpdateCall, table: Tensor, features: Sequence[FeatureGradient]) -> tuple[Tensor, Tensor]:
    ids, num_bags, dim, dtype = call.ids, call.num_bags, table.shape[1], compute_dtype(table.dtype)
    parts, blocks = [ids.new_empty(0).long()], [ids.new_empty(0).long()]
    terms = [table.new_empty(0, dim, dtype=dtype)]
    for index, f in enumerate(features):
        offsets = call.offsets[f.position * num_bags : (f.position + 1) * num_bags + 1]
        start, stop = int(offsets[0]), int(offsets[-1])
        sample = torch.repeat_interleave(torch.arange(num_bags, device=ids.device), offsets.diff())
        term = call.gradients[f.gradient][:, f.column : f.column + dim].to(dtype)
        term = term if f.per_id else term[sample]
        if f.weighted and call.weights is not None:
            term = term * call.weights[start:stop, None].to(dtype)
        parts.append(ids[start:stop].long())
        # Blocks of different features must not be equal, even if their samples are.
        blocks.append(index * (num_bags // BLOCK_SAMPLES + 1) + sample // BLOCK_SAMPLES)
        terms.append(term)
    gradient = torch.cat(terms)
    source = torch.arange(gradient.shape[0], device=ids.device)
    return coalesce(torch.cat(parts), source, torch.cat(blocks), gradient)


def round_rows(values: Tensor, dtype: torch.dtype, rows: Tensor, first_column: int, key: int, step: int) -> Tensor:
    """Round rows [U, D] to their stored dtype, 16 bits stochastically with bits of (key, step, row, column)."""
    if dtype not in (torch.float16, torch.bfloat16):
        return values.to(dtype)
    random = random_16_bits(rows, first_column, values.shape[1], key, step)
    bits = values.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    if dtype == torch.bfloat16:
        cut = ((bits + random) >> 16 << 16) & 0xFFFFFFFF
        rounded = _as_float(cut)
    else:
        random = random >> 3  # Rounding to float16 drops 13 bits.
        normal = _as_float(((bits & 0x7FFFFFFF) + random) >> 13 << 13)
        small = torch.floor(values.abs() * 2.0**24 + random.float() * 2.0**-13) * 2.0**-24
        rounded = torch.where(values.abs() < 2.0**-14, small, normal).copysign(values)
    return torch.where(values.isfinite(), rounded, values).to(dtype)


def random_16_bits(rows: Tensor, first_column: int, num_columns: int, key: int, step: int) -> Tensor:
    """Return sixteen random bits for each cell, int64 [U, columns]."""
    # Eight columns share a Philox4x32-10 counter (low and high word of the row, column // 8, step). Each word has its
    # low half for the even column and its high half for the odd column.
    columns = torch.arange(first_column, first_column + num_columns, device=rows.device)
    low, high = rows[:, None] & 0xFFFFFFFF, rows[:, None] >> 32 & 0xFFFFFFFF
    group = (columns // 8)[None, :]
    words = philox((low, high, group, torch.full_like(group, step & 0xFFFFFFFF)), key % (1 << 64))
    chosen = torch.stack([word.expand(rows.numel(), num_columns) for word in words])
    word = chosen.gather(0, (columns % 8 // 2).expand(1, rows.numel(), num_columns)).squeeze(0)
    return torch.where(columns % 2 == 0, word & 0xFFFF, word >> 16)


def _as_float(bits: Tensor) -> Tensor:
    """Reinterpret uint32 bits, stored as int64, as float32."""
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
