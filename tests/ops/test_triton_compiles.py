"""Tests that the Triton kernels compile for GPUs, with the expected instructions and resources. No GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sampling import product, sample

pytest.importorskip("triton")


FORMS = ("fp16", "bf16", "fp8", "int8")
BAGS = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Number of bags per lane in large lookups."""
LOOKUPS = tuple(
    f"lookup {row}{weights}{widths}, {count} bags per lane"
    for row, bags in BAGS.items()
    for weights in ("", " weighted")
    for widths in ("", " odd widths")
    for count in (1, bags)
)
WIDE_LOADS = {
    "lookups": LOOKUPS,
    "rows": tuple(f"rows {row}{suffix}" for row in BAGS for suffix in ("", ", odd widths")),
    "lists": (),
    "updates": ("sgd fp32 128", "rowwise_adagrad fp32 16", "rowwise_adagrad fp32 128", "adam bf16 64"),
    "codecs": tuple(f"encode {name} 0" for name in FORMS),
    "dense": (
        "cross *fp32 inner",
        "cross *bf16 inner",
        "concat *bf16",
        *(
            f"{name} {dtype} {shape}"
            for name in ("_multiply_pairs", "_sum_scaled_vectors")
            for dtype in ("*fp32", "*bf16")
            for shape in ("7 x 16", "26 x 16", "26 x 64", "100 x 128")
        ),
    ),
    "products": tuple(
        f"{kind} {dtype} {size}"
        for kind in ("relu", "cross", "mask", "residual", "weight")
        for dtype in ("fp32", "bf16")
        for size in ("small", "medium")
    ),
}
"""Kernels of each group that read rows or columns in words of 16 bytes."""
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""Maximum shared memory of a program, per architecture."""


@pytest.mark.parametrize("case", sample(product(architecture=[80, 90], group=list(WIDE_LOADS)), 1, seed=17))
def test_kernels_compile_for_a_gpu(case: dict[str, Any], tmp_path: Path) -> None:
    # Triton's interpreter replaces the compiler for the whole process, so another process compiles.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    group = case["group"]
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("triton_compile.py")), str(case["architecture"]), group],
        capture_output=True,
        text=True,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    kernels: dict[str, dict[str, Any]] = json.loads(run.stdout)
    assert kernels
    for name, resources in kernels.items():
        # The assembler spills one or two words of some kernels for sm_80.
        limit = 0 if case["architecture"] >= 90 else 16
        assert resources["spilled_bytes"] <= limit, f"{name}: values must stay in registers, got {resources}"
        assert resources["shared_bytes"] <= SHARED_BYTES[case["architecture"]], f"{name}: got {resources}"
        fused = [
            i for i in resources["arithmetic"] if i.startswith("fma") or ".full" in i or ".approx" in i or "ftz" in i
        ]
        assert group in ("dense", "products") or not fused, (
            f"{name}: products are rounded before they are added, roots and quotients correctly, got {resources}"
        )
    for name in WIDE_LOADS[group]:
        assert kernels[name]["loads"].get("16"), f"{name}: rows must be read in 16-byte words, got {kernels[name]}"
    for name in LOOKUPS if group == "lookups" else ():
        assert kernels[name]["wide_loads_in_flight"] >= 4, f"{name}: four rows must be in flight, got {kernels[name]}"
        # Outputs of any width are stored in words of 4 bytes too.
        assert {"4", "16"} <= kernels[name]["stores"].keys(), f"{name}: got {kernels[name]}"
    for name in FORMS if group == "codecs" else ():
        assert kernels[f"decode {name}"]["stores"].get("16"), (
            f"{name}: numbers must be written in words of 16 bytes, got {kernels[f'decode {name}']}"
        )
