"""Generation of a Triton kernel from the program of a row optimizer."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Sequence
from functools import cache
from typing import Any

import triton
import triton.language as tl

from meseta.ops.row_program.lowering import FIRST_ROW, FIRST_UNIFORM
from meseta.ops.row_program.symbols import Op
from meseta.ops.row_update import triton_parts as parts

Instructions = tuple[tuple[int, int, int, int, int], ...]
"""Rows of `RowCode.instructions`."""

# Selects the rows of a program and sums their gradients. A tile is [BLOCKS, ROWS, 16]. Programs of one chunk of
# contributions share its first contributions of rows, so that they have no idle lanes. Programs have one warp: their
# sums need no barriers.
KERNEL_PROLOGUE = """@triton.jit(do_not_specialize=["num_bags", "limit", "first_key", "end_key"])
def update(sorted_ids, lines, uniforms, found_inf, num_bags, limit, first_key, end_key, NUM_UNIFORMS: tl.constexpr,
           STRIDE: tl.constexpr, ROW: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr,
           SHIFT: tl.constexpr, VECTOR: tl.constexpr, HAS_MARKS: tl.constexpr, FORM: tl.constexpr,
           INDEX: tl.constexpr):
    chunk = (tl.program_id(0) // (CHUNK // ROWS)).to(INDEX)
    first_slot = chunk * CHUNK + tl.program_id(0) % (CHUNK // ROWS) * ROWS
    start = tl.load(sorted_ids.starts + first_slot + tl.arange(0, ROWS))
    first_start = tl.load(sorted_ids.starts + first_slot)
    is_stored = first_start >= 0
    if found_inf is not None:
        is_stored = is_stored & (tl.load(found_inf) == 0.0)
    if not is_stored:
        return
    # Idle lanes load the first row again, so that loads need no mask.
    live = start >= 0
    n = chunk * CHUNK + tl.where(live, start, first_start)
    bag = tl.load(sorted_ids.bags + n)
    key = tl.load(sorted_ids.keys + n).to(tl.int64) + SHIFT
    live = live & (key >= first_key) & (key < end_key)
    words = lines.plan + tl.where(bag < 0, ~bag, bag) // num_bags * FORM[0]
    numbers = uniforms + tl.load(words + parts.TABLE) * STRIDE
    dim = tl.multiple_of(tl.load(words + parts.WIDTH), VECTOR)
    row = key - tl.load(words + parts.FIRST_KEY)
    column = tl.arange(0, BLOCKS)[:, None, None] * 16 + tl.arange(0, 16)[None, None, :]
    stored = tl.broadcast_to(live[None, :, None], [BLOCKS, ROWS, 16])
    if not FORM[4]:
        stored = column < tl.multiple_of(tl.where(live, dim, 0), VECTOR)[None, :, None]
    inside = None if FORM[4] else stored
    e0 = parts.sum_lines(sorted_ids, lines, bag, n, live, inside, (num_bags, limit), FORM)
"""
"""First part of each kernel, up to the summed gradient in register e0."""

BINARY_TEMPLATES = {Op.ADD: "{} + {}", Op.SUB: "{} - {}", Op.MUL: "{} * {}", Op.DIV: "tl.div_rn({}, {})"}
BINARY_TEMPLATES |= {
    Op.MAX: "tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    Op.MIN: "tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    Op.GREATER: "tl.where({} > {}, 1.0, 0.0)",
}
COMPUTE_TEMPLATES = BINARY_TEMPLATES | {
    Op.SQRT: "tl.sqrt_rn({})",
    Op.ABS: "tl.abs({})",
    Op.SIGN: "parts.sign({})",
    Op.NEG: "{} * -1.0",  # Triton's unary minus is 0 - x, which loses the sign of zero.
    Op.WHERE: "tl.where({} > 0, {}, {})",
}


LOAD_OPS = (Op.LOAD_WEIGHT, Op.LOAD_STATE)
"""Operations that load a row or a state, each at most once."""


@cache
def update_kernel(instructions: Instructions, state_is_row: tuple[bool, ...]) -> Any:
    """Return the kernel for a program. Kernels are cached, so that equal programs share one."""
    text = kernel_source(instructions, state_is_row)
    name = f"<meseta row update {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)  # triton.jit reads the source here.
    namespace: dict[str, Any] = {"__name__": __name__, "triton": triton, "tl": tl, "parts": parts}
    exec(compile(text, name, "exec"), namespace)
    return namespace["update"]


def kernel_source(instructions: Instructions, state_is_row: Sequence[bool]) -> str:
    """Return the Python source of the kernel `update`."""
    lines = [KERNEL_PROLOGUE, _pointer_statements(state_is_row)]
    lines += [
        f"    u{register} = tl.load(numbers + {register - FIRST_UNIFORM}).to(tl.float32)\n"
        for register in sorted({r for code in instructions for r in _operands(code) if r >= FIRST_UNIFORM})
    ]
    # Rows and states are loaded before the gradient is used. Stores would keep the compiler from doing that.
    lines += [f"    {_load_statement(code, state_is_row)}\n" for code in instructions if code[0] in LOAD_OPS]
    lines += [f"    {_statement(code, state_is_row)}\n" for code in instructions]
    lines.append("    if HAS_MARKS:\n        parts.mark_rows(words, live, row)\n")
    return "".join(lines)


def _pointer_statements(state_is_row: Sequence[bool]) -> str:
    """Return statements that compute pointers to the rows of the weight and of each state."""
    text = "    weight = parts.row_pointers(words + parts.WEIGHT, row * dim, ROW, VECTOR)[None, :, None] + column\n"
    for state, is_row in enumerate(state_is_row):
        at = f"words + (parts.NUM_WORDS + {state})"
        if is_row:
            text += f"    state{state} = parts.row_pointers({at}, row, tl.float32, 1)\n"
        else:
            text += f"    state{state} = parts.row_pointers({at}, row * dim, tl.float32, VECTOR)"
            text += "[None, :, None] + column\n"
    return text


def _operands(code: Sequence[int]) -> list[int]:
    op, _, a, b, c = code
    if op in (Op.LOAD_WEIGHT, Op.LOAD_STATE, Op.LOAD_STAT):
        return []
    return [a] if op in (Op.STORE_WEIGHT, Op.STORE_STATE, Op.STORE_STAT) else [r for r in (a, b, c) if r >= 0]


def _register_name(register: int, is_tile: bool) -> str:
    """Return the name of a register or uniform. `is_tile` broadcasts it to [1, ROWS, 1]."""
    if register < FIRST_ROW:
        return f"e{register}"
    name = f"r{register}" if register < FIRST_UNIFORM else f"u{register}"
    return f"{name}[None, :, None]" if is_tile else name


def _load_statement(code: Sequence[int], state_is_row: Sequence[bool]) -> str:
    op, _, state, _, _ = code
    if op == Op.LOAD_WEIGHT:
        return "loaded_weight = parts.load_tile(weight, inside).to(tl.float32)"
    load = "tl.load(state{0})" if state_is_row[state] else "parts.load_tile(state{0}, inside)"
    return f"loaded_state{state} = {load.format(state)}"


def _statement(code: Sequence[int], state_is_row: Sequence[bool]) -> str:
    op, dst, a, b, _ = code
    if op in LOAD_OPS:
        return f"{_register_name(dst, False)} = loaded_{'weight' if op == Op.LOAD_WEIGHT else f'state{a}'}"
    if op == Op.SUM:
        return f"r{dst} = parts.sum_columns(tl.where(stored, {_register_name(a, True)}, 0.0))"
    if op == Op.STORE_STATE:
        is_row = state_is_row[b]
        return f"tl.store(state{b}, {_register_name(a, not is_row)}, mask={'live' if is_row else 'stored'})"
    if op == Op.STORE_WEIGHT:
        value = f"tl.broadcast_to({_register_name(a, True)}, [BLOCKS, ROWS, 16])"
        return f"parts.store_rows(weight, {value}, stored, words, live, row, numbers + NUM_UNIFORMS - 1)"
    is_tile = dst < FIRST_ROW
    return (
        f"{_register_name(dst, False)} = "
        f"{COMPUTE_TEMPLATES[Op(op)].format(*(_register_name(r, is_tile) for r in _operands(code)))}"
    )
