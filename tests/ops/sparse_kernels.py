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
from meseta.ops.row_update import triton_kernels as kernels
from meseta.ops.row_update.triton_source import update_kernel
from meseta.ops.step_scalars import triton as step_scalars
from meseta.ops.step_verdict import triton as step_verdict
from meseta.ops.weight_gradient import triton as weight_gradient
from meseta.optim import make_row_optimizer
from meseta.spec import OptimizerSpec

Kernels = dict[str, tuple[Any, dict[str, Any]]]
WORDS, INTS, FLOATS = "*i64", "*i32", "*fp32"


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
    many = {"plan": WORDS, "items": WORDS, "limit": "i32"}
    report = {"report": WORDS, "found_inf": FLOATS, "sums": "*fp64", "at": "i32", "NUM_SUMS": 2}
    return {
        "lengths": (id_policy._sum_lengths, {"work": WORDS, "lengths": INTS, "words": WORDS}),
        "ids": (
            id_policy._check,
            dict.fromkeys(("fixed", "work", "lengths", "words"), WORDS) | {"ids": INTS, "num_ids": "i32"},
        ),
        "addresses": (triton_shared._write_addresses, {"out": WORDS, **dict.fromkeys("abcdefg", FLOATS)}),
        "scalars": (step_scalars._write_words, {"out": WORDS, **dict.fromkeys("abcdefg", "i64")}),
        "verdict": (step_verdict._record, report | {"first_error": None, "IS_FIRST": True}),
        "verdict of ids": (step_verdict._record, report | {"first_error": WORDS, "IS_FIRST": False}),
        "items": (
            kernels.list_items,
            many | {"keys": INTS, "ids": INTS, "offsets": WORDS, "weights": FLOATS, "gradients": FLOATS},
        ),
        "items, several gradients": (
            kernels.list_items,
            many | {"keys": INTS, "ids": INTS, "offsets": WORDS, "weights": None, "gradients": WORDS},
        ),
        "order": (
            kernels.order_items,
            many | {"ordered": WORDS, "scales": None, "num_keys": INTS, "keys": WORDS, "order": WORDS},
        ),
        "segments": (
            kernels.mark_segments,
            {"segments": WORDS, "ranges": WORDS, "keys": INTS, "num_keys": INTS, "plan": WORDS, "limit": "i32"},
        ),
        "long runs": (
            kernels.sum_long_runs,
            many | {"sums": FLOATS, "scales": FLOATS, "keys": INTS, "COLUMNS": 128, "VECTOR": 4},
        ),
    }


def updates() -> Kernels:
    common = {"plan": WORDS, "uniforms": "*fp64", "keys": INTS, "items": WORDS, "segments": WORDS, "ranges": WORDS}
    programs: Kernels = {}
    for name, row, vector, blocks in (
        ("rowwise_adagrad", tl.float32, 4, 4),
        ("adam", tl.bfloat16, 8, 4),
        ("rowwise_adagrad", tl.float16, 1, 32),
    ):
        program = trace(make_row_optimizer(OptimizerSpec(name=name, lr=0.1)))  # type: ignore[arg-type]
        instructions = tuple(map(tuple, program.fused_update.instructions.tolist()))
        kernel = update_kernel(instructions, tuple(kind == "row" for kind in program.state_kinds))
        types: dict[str, Any] = common | {"scales": FLOATS, "group": "i32", "NUM_UNIFORMS": len(program.uniforms) + 1}
        types |= {"ROW": row, "ROWS": max(1, 32 // blocks), "BLOCKS": blocks}
        types |= {"VECTOR": vector, "LINE_VECTOR": min(vector, 4)}
        for found_inf, suffix in ((None, ""), (FLOATS, " found_inf")):
            programs[f"{name} {row}{suffix}"] = (kernel, types | {"found_inf": found_inf})
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
