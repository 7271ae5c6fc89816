"""The Triton kernels compile for GPUs, with the instructions that they are written for; no GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize("architecture", [pytest.param(80, marks=pytest.mark.soak), 90])
def test_kernels_compile_for_a_gpu(architecture: int, tmp_path: Path) -> None:
    # The interpreter replaces the compiler for a whole process, hence another one.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("triton_compile.py")), str(architecture)],
        capture_output=True,
        text=True,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    kernels: dict[str, dict[str, int]] = json.loads(run.stdout)
    for name, found in kernels.items():
        fused = {i: n for i, n in found.items() if i.startswith("fma") or ".full" in i or ".approx" in i or "ftz" in i}
        assert not fused, f"{name}: products are rounded before they are added, roots and quotients correctly"
    wide = "ld.global.v4.b32"  # 16 bytes
    for name in ("lookup fp32", "lookup fp16", "rows fp32", "rows fp16", "rowwise_adagrad fp32", "adam bf16"):
        assert kernels[name].get(wide), f"{name}: rows are read by 16 bytes, found {kernels[name]}"
    assert wide not in kernels["lookup bf16, odd"]
    for name in ("fp16", "bf16", "fp8", "int8"):
        assert kernels[f"encode {name} 0"].get(wide), (
            f"{name}: columns are read by 16 bytes, {kernels[f'encode {name} 0']}"
        )
        assert kernels[f"decode {name}"].get("st.global.v4.b32"), f"{name}: and written so, {kernels[f'decode {name}']}"
