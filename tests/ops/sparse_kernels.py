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
    common = {"out": FLOATS, "features": WORDS, "offsets": WORDS, "num_bags": "i32"}
    cases: dict[str, dict[str, Any]] = {
        "lookup fp32": {"ids": WORDS, "weights": FLOATS, "VECTOR": 4, "ROW": tl.float32},
        "lookup fp16": {"ids": INTS, "weights": None, "VECTOR": 8, "ROW": tl.float16},
        "lookup bf16, odd": {"ids": INTS, "weights": FLOATS, "VECTOR": 1, "ROW": tl.bfloat16},
    }
    return {name: (lookup._pool, common | case) for name, case in cases.items()}


def rows() -> Kernels:
    kernels: Kernels = {}
    for row, vector in ((tl.float32, 4), (tl.float16, 8), (tl.bfloat16, 1)):
        types = {"addresses": WORDS, "features": WORDS, "ids": INTS, "VECTOR": vector, "ROW": row}
        kernels[f"rows {row}"] = (row_lookup._copy_rows, types)
        types = {"out": FLOATS, "words": WORDS, "ids": INTS, "offsets": WORDS, "gradient": FLOATS, "ROW": row}
        kernels[f"weights {row}"] = (weight_gradient._dots, types)
    return kernels


def lists() -> Kernels:
    many = {"plan": WORDS, "items": WORDS, "limit": "i32"}
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
