"""Compile a group of the Triton kernels for a GPU architecture and print the relevant instructions of each as JSON.

No GPU is needed."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from meseta.ops import triton_shared
from meseta.ops.codec import triton_kernels as codec
from meseta.ops.cross_entropy import triton as cross_entropy
from meseta.ops.dot_interaction import triton as dot_interaction
from meseta.ops.id_policy import triton as id_policy
from meseta.ops.mlp import triton as mlp
from meseta.ops.pooled_lookup import triton as lookup
from meseta.ops.row_lookup import triton as row_lookup
from meseta.ops.row_program.program import trace
from meseta.ops.row_update import triton_kernels as update_kernels
from meseta.ops.row_update.call import SortedRowIds
from meseta.ops.row_update.triton_parts import NUM_WORDS, Lines
from meseta.ops.row_update.triton_source import update_kernel
from meseta.ops.step_scalars import triton as step_scalars
from meseta.ops.step_verdict import triton as step_verdict
from meseta.ops.weight_gradient import triton as weight_gradient
from meseta.optim import make_row_optimizer
from meseta.spec import OptimizerSpec

WORDS, INTS, FLOATS = "*i64", "*i32", "*fp32"
SORTED: Any = SortedRowIds(INTS, INTS, "*i16", WORDS, WORDS, FLOATS)  # type: ignore[arg-type]
LINES: Any = Lines(WORDS, FLOATS, FLOATS, INTS)  # type: ignore[arg-type]
INSTRUCTIONS = r"(?:ld|st)\.global(?:\.v\d)?\.\w+|fma\.\w+\.f32|(?:div|sqrt)\.\w+(?:\.ftz)?\.f32"


def compiled(kernel: Any, types: dict[str, Any], architecture: int, **options: int) -> dict[str, int]:
    """Compile a kernel and count its instructions. `types` has the type of each argument, or the value of a
    constant, or a named tuple of types and `None`."""
    signature, constants, pointers = {}, dict[Any, Any](), list[tuple[int, ...]]()
    for i, name in enumerate(kernel.arg_names):
        is_tuple = hasattr(types[name], "_fields")
        members = {(i, k): kind for k, kind in enumerate(types[name])} if is_tuple else {(i,): types[name]}
        constants |= {path: kind for path, kind in members.items() if not isinstance(kind, str)}
        pointers += [path for path, kind in members.items() if str(kind).startswith("*")]
        kinds = [kind if isinstance(kind, str) else "constexpr" for kind in members.values()]
        signature[name] = type(types[name])(*kinds) if is_tuple else kinds[0]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs=constants,
        attrs={path: [["tt.divisibility", 16]] for path in pointers},
    )
    options = {"enable_fp_fusion": False, **options}
    built = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    assert built.asm["cubin"]
    return dict(Counter(re.findall(INSTRUCTIONS, built.asm["ptx"])))


def lookups(architecture: int) -> dict[str, Any]:
    common = {"out": FLOATS, "features": WORDS, "offsets": WORDS, "num_bags": "i32"}
    cases = {
        "lookup fp32": {"ids": WORDS, "weights": FLOATS, "VECTOR": 4, "ROW": tl.float32},
        "lookup fp16": {"ids": INTS, "weights": None, "VECTOR": 8, "ROW": tl.float16},
        "lookup bf16, odd": {"ids": INTS, "weights": FLOATS, "VECTOR": 1, "ROW": tl.bfloat16},
    }
    return {name: compiled(lookup._pool, common | case, architecture) for name, case in cases.items()}


def rows(architecture: int) -> dict[str, Any]:
    kernels = {}
    for row, vector in ((tl.float32, 4), (tl.float16, 8), (tl.bfloat16, 1)):
        types = {"addresses": WORDS, "features": WORDS, "ids": INTS, "VECTOR": vector, "ROW": row}
        kernels[f"rows {row}"] = compiled(row_lookup._copy_rows, types, architecture)
        types = {"out": FLOATS, "words": WORDS, "ids": INTS, "offsets": WORDS, "gradient": FLOATS, "ROW": row}
        kernels[f"weights {row}"] = compiled(weight_gradient._dots, types, architecture)
    return kernels


def lists(architecture: int) -> dict[str, Any]:
    listed = SortedRowIds(keys=INTS, bags=INTS, begins=WORDS, scales=FLOATS)  # type: ignore[arg-type]
    numbers = {"num_bags": "i32", "num_rows": "i32", "limit": "i32", "SHIFT": 0, "INDEX": tl.int32}
    report = {"report": WORDS, "found_inf": FLOATS, "sums": "*fp64", "at": "i32", "NUM_SUMS": 2}
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "lengths": (id_policy._sum_lengths, {"work": WORDS, "lengths": INTS, "words": WORDS}),
        "ids": (
            id_policy._check,
            dict.fromkeys(("fixed", "work", "lengths", "words"), WORDS) | {"ids": INTS, "num_ids": "i32"},
        ),
        "addresses": (triton_shared._write_addresses, {"out": WORDS, **dict.fromkeys("abcdefg", FLOATS)}),
        "scalars": (step_scalars._write_words, {"out": WORDS, **dict.fromkeys("abcdefg", "i64")}),
        "verdict": (step_verdict._record, report | {"first_error": None, "IS_FIRST": True}),
        "verdict of ids": (step_verdict._record, report | {"first_error": WORDS, "IS_FIRST": False}),
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
            numbers | {"sorted_ids": SORTED, "lines": LINES, "FORM": (14, 128, 4, 8, True)},
        ),
    }
    return {name: compiled(kernel, types, architecture) for name, (kernel, types) in cases.items()}


def updates(architecture: int) -> dict[str, Any]:
    common = {
        "lines": LINES,
        "uniforms": "*fp64",
        "CHUNK": update_kernels.CHUNK.value,
        "SHIFT": 0,
        "HAS_MARKS": True,
        "INDEX": tl.int32,
    }
    common |= {"num_bags": "i32", "limit": "i32", "first_key": "i64", "end_key": "i64"}
    programs = {}
    for name, row, vector, blocks in (
        ("rowwise_adagrad", tl.float32, 4, 4),
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
            types["found_inf"] = found_inf
            programs[f"{name} {row}{suffix}"] = compiled(kernel, types, architecture, num_warps=1, maxnreg=168)
    return programs


def codecs(architecture: int) -> dict[str, Any]:
    kernels = {}
    common = {"addresses": WORDS, "plan": WORDS, "num_rows": "i32"}
    for index, name in enumerate(("fp16", "bf16", "fp8", "int8"), start=1):
        for drawn in (0, 1, 2) if index > 2 else (0,):
            types = common | {"out": "*u8", "overflows": WORDS if name == "fp16" else None}
            types |= {"keys": WORDS if drawn else None, "rows": WORDS if drawn == 2 else None}
            types["FORM"] = codec.kernel_variant(index, drawn, 4, 4)
            kernels[f"encode {name} {drawn}"] = compiled(codec.encode_blocks, types, architecture)
        types = common | {"out": FLOATS, "stride": "i32", "FORM": codec.kernel_variant(index, 0, 4, 4)}
        kernels[f"decode {name}"] = compiled(codec.decode_blocks, types, architecture)
    return kernels


def dense(architecture: int) -> dict[str, Any]:
    sizes = dict.fromkeys(("num_samples", "num_logits", "stride", "gradient_stride"), "i32")
    names = ("x", "out", "x_gradient", "gradient", "output", "masked", "logits", "label", "factor", "weight", "bias")
    kernels = {}
    for dtype in ("*fp32", "*bf16", "*fp64"):
        common = sizes | dict.fromkeys(names, dtype) | {"sums": "*fp64" if dtype == "*fp64" else FLOATS}
        cases: list[tuple[Any, dict[str, Any]]] = [
            (mlp._mask_and_sum, {"WIDTH": 512}),
            (mlp._scalar_linear, {"WIDTH": 250, "RELU": True}),
            (mlp._scalar_linear_backward, {"FORM": 2 * 250 + 1}),
            (cross_entropy._sum_losses, {"sums": "*fp64"}),
            (cross_entropy._scale_gradients, {"gradient": "*fp64", "factor": None}),
        ]
        if dtype == FLOATS:
            cases.append((mlp._linear_relu, {"INPUTS": 13, "OUTPUTS": 512}))
        if dtype != "*fp64":  # Other products are those of plain PyTorch.
            pooled = {"pooled": FLOATS, "pooled_gradient": FLOATS}
            for shape in ({"FEATURES": 7, "DIM": 16}, {"FEATURES": 100, "DIM": 128}):
                cases += [(dot_interaction._multiply_pairs, pooled | shape)]
                cases += [(dot_interaction._sum_scaled_vectors, pooled | shape)]
        for kernel, types in cases:
            used = {name: kind for name, kind in (common | types).items() if name in kernel.arg_names}
            kernels[f"{kernel.__name__} {dtype} {types.get('DIM')}"] = compiled(kernel, used, architecture)
    return kernels


GROUPS = {"lookups": lookups, "rows": rows, "lists": lists, "updates": updates, "codecs": codecs, "dense": dense}

if __name__ == "__main__":
    print(json.dumps(GROUPS[sys.argv[2]](int(sys.argv[1]))))
