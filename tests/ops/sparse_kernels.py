"""Triton kernels of embedding tables, of exchanges and of a step's numbers, for `triton_compile.py`."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from meseta.ops import triton_shared
from meseta.ops.codec import triton_kernels as codec
from meseta.ops.id_policy import triton as id_policy
from meseta.ops.pooled_lookup import triton as lookup
from meseta.ops.row_lookup import triton as row_lookup
from meseta.ops.row_program.program import trace
from meseta.ops.row_update import triton_kernels as update_kernels
from meseta.ops.row_update.call import SortedRowIds
from meseta.ops.row_update.triton import MAX_REGISTERS
from meseta.ops.row_update.triton_parts import NUM_WORDS, Lines
from meseta.ops.row_update.triton_source import update_kernel
from meseta.ops.step_scalars import triton as step_scalars
from meseta.ops.step_verdict import triton as step_verdict
from meseta.ops.weight_gradient import triton as weight_gradient
from meseta.optim import make_row_optimizer
from meseta.spec import OptimizerSpec

Kernels = dict[str, tuple[Any, dict[str, Any]]]
WORDS, INTS, FLOATS = "*i64", "*i32", "*fp32"
SORTED: Any = SortedRowIds(INTS, INTS, "*i16", WORDS, WORDS, FLOATS)  # type: ignore[arg-type]
LINES: Any = Lines(WORDS, FLOATS, FLOATS, INTS)  # type: ignore[arg-type]


def lookups() -> Kernels:
    common = {"out": FLOATS, "words": WORDS, "offsets": WORDS, "num_bags": "i32", "num_units": "i32"}
    kernels: Kernels = {}
    for row, bags, ids in ((tl.float32, 4, WORDS), (tl.float16, 2, WORDS), (tl.bfloat16, 2, INTS)):
        for weights, first_suffix in ((None, ""), (FLOATS, " weighted")):
            for aligned, suffix in ((True, ""), (False, " odd widths")):
                for warps, count in ((4, 1), (1, bags)):
                    types = {"ids": ids, "weights": weights, "FORM": (row, 32 * warps, count, aligned)}
                    types |= {"num_warps": warps, "maxnreg": lookup.MAX_REGISTERS}
                    name = f"lookup {row}{first_suffix}{suffix}, {count} bags per lane"
                    kernels[name] = (lookup._pool, common | types)
    return kernels


def rows() -> Kernels:
    kernels: Kernels = {}
    for row in (tl.float32, tl.float16, tl.bfloat16):
        types: dict[str, Any] = {"addresses": WORDS, "features": WORDS, "ids": INTS, "ROW": row}
        kernels[f"rows {row}"] = (row_lookup._copy_rows, types | {"ALL_ALIGNED": True})
        kernels[f"rows {row}, odd widths"] = (row_lookup._copy_rows, types | {"ALL_ALIGNED": False})
        types = {"out": FLOATS, "words": WORDS, "ids": INTS, "offsets": WORDS, "gradient": FLOATS, "ROW": row}
        kernels[f"weights {row}"] = (weight_gradient._dots, types)
    return kernels


def lists() -> Kernels:
    listed = SortedRowIds(keys=INTS, bags=INTS, begins=WORDS, scales=FLOATS)  # type: ignore[arg-type]
    numbers = {"num_bags": "i32", "num_rows": "i32", "limit": "i32", "SHIFT": 0, "INDEX": tl.int32}
    report = {"report": WORDS, "memory": WORDS, "sums": "*fp64", "at": "i32", "size": "i32", "NUM_SUMS": 2}
    return {
        "lengths": (id_policy._sum_lengths, dict.fromkeys(("report", "work", "words"), WORDS) | {"lengths": INTS}),
        "ids": (
            id_policy._check,
            dict.fromkeys(("fixed", "report", "work", "lengths", "words"), WORDS) | {"ids": INTS, "num_ids": "i32"},
        ),
        "placed ids": (
            id_policy._check_placed,
            dict.fromkeys(("fixed", "report", "zeros", "offsets", "words"), WORDS) | {"ids": INTS, "num_ids": "i32"},
        ),
        "addresses": (triton_shared._write_addresses, {"out": WORDS, **dict.fromkeys("abcdefg", FLOATS)}),
        "scalars": (step_scalars._write_words, {"out": WORDS, **dict.fromkeys("abcdefg", "i64")}),
        "verdict": (step_verdict._record, report | {"id_report": None, "IS_FIRST": True}),
        "verdict of ids": (step_verdict._record, report | {"id_report": WORDS, "IS_FIRST": False}),
        "keys": (
            update_kernels.list_keys,
            numbers | {"out": listed, "plan": WORDS, "ids": INTS, "offsets": WORDS, "weights": FLOATS},
        ),
        "keys, no weights": (
            update_kernels.list_keys,
            numbers
            | {"out": listed._replace(keys="*i16", scales=None), "plan": WORDS, "ids": WORDS, "offsets": INTS}
            | {"weights": None, "SHIFT": 2**15},
        ),
        "order": (
            update_kernels.order_bags,
            numbers | {"out": SORTED, "bags": INTS, "scales": FLOATS},
        ),
        "long runs": (
            update_kernels.sum_long_runs,
            numbers | {"sorted_ids": SORTED, "lines": LINES, "FORM": (14, 128, 4, 8, True), "num_warps": 1},
        ),
    }


def updates() -> Kernels:
    common = {"lines": LINES, "uniforms": "*fp64", "CHUNK": update_kernels.CHUNK.value, "SHIFT": 0, "INDEX": tl.int32}
    common |= {"num_bags": "i32", "limit": "i32", "first_key": "i64", "end_key": "i64", "HAS_MARKS": True}
    common |= {"num_warps": 1, "maxnreg": MAX_REGISTERS}
    programs: Kernels = {}
    for name, row, vector, blocks in (
        ("sgd", tl.float32, 4, 8),
        ("rowwise_adagrad", tl.float32, 4, 1),
        ("rowwise_adagrad", tl.float32, 4, 8),
        ("adam", tl.bfloat16, 8, 4),
        ("rowwise_adagrad", tl.float16, 1, 32),
    ):
        program = trace(make_row_optimizer(OptimizerSpec(name=name, lr=0.1)))  # type: ignore[arg-type]
        instructions = tuple(map(tuple, program.fused_update.instructions.tolist()))
        kernel = update_kernel(instructions, tuple(kind == "row" for kind in program.state_kinds))
        form = (NUM_WORDS.value + len(program.state_kinds), blocks * 16, min(vector, 4), blocks, vector > 1)
        types: dict[str, Any] = common | {"ROW": row, "ROWS": max(1, 32 // blocks), "BLOCKS": blocks, "FORM": form}
        types |= {"sorted_ids": SORTED, "VECTOR": vector, "NUM_UNIFORMS": len(program.uniforms) + 1, "STRIDE": 0}
        for found_inf, suffix in ((None, ""), (FLOATS, " found_inf")):
            programs[f"{name} {row} {16 * blocks}{suffix}"] = (kernel, types | {"found_inf": found_inf})
    return programs


def codecs() -> Kernels:
    kernels: Kernels = {}
    common: dict[str, Any] = {"addresses": WORDS, "plan": WORDS, "num_rows": "i32"}
    for index, name in enumerate(("fp16", "bf16", "fp8", "int8"), start=1):
        for drawn in (0, 1, 2) if index > 2 else (0,):
            types = common | {"out": "*u8", "overflows": WORDS if name == "fp16" else None}
            types |= {"keys": WORDS if drawn else None, "rows": WORDS if drawn == 2 else None}
            types["FORM"] = codec.kernel_variant(index, drawn, 4, 4)
            kernels[f"encode {name} {drawn}"] = (codec.encode_blocks, types)
        types = common | {"out": FLOATS, "stride": "i32", "FORM": codec.kernel_variant(index, 0, 4, 4)}
        kernels[f"decode {name}"] = (codec.decode_blocks, types)
    return kernels


GROUPS = {"lookups": lookups, "rows": rows, "lists": lists, "updates": updates, "codecs": codecs}
