"""Make vectors/fbgemm_rowwise.json: small rows and their bytes as encoded by FBGEMM's CPU operators.

PYTHON_WITH_FBGEMM tests/ops/make_fbgemm_rowwise.py
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import fbgemm_gpu  # noqa: F401
import torch

random = torch.Generator().manual_seed(0)
ROWS = {
    "normal": torch.randn(4, 8, generator=random),
    "small": torch.randn(3, 12, generator=random) * 1e-5,
    "wide": torch.randn(3, 20, generator=random) * 1e3 + 5.0,
    "constant": torch.tensor([[0.0] * 4, [1.5] * 4, [-3.25] * 4]),
    "ties": torch.tensor([[0.0, 0.5, 1.5, 2.5, 15.0, 7.5, 8.5, 14.5], [-1.0, 0.0, 0.25, 0.75, 1.0, 2.0, 3.0, 14.0]]),
}

cases = []
for name, rows in ROWS.items():
    case = {"name": name, "rows": rows.tolist()}
    for row_format, make, back in (
        (
            "int8",
            torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized,
            torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat,
        ),
        (
            "int4",
            lambda x: torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(x, 4),
            lambda x: torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(x, 4),
        ),
    ):
        codes = make(rows)
        case[row_format] = {"codes": codes.tolist(), "rows": back(codes).tolist()}
    cases.append(case)
made = {"fbgemm_gpu": version("fbgemm-gpu-cpu"), "torch": torch.__version__, "cases": cases}
path = Path(__file__).parent / "vectors" / "fbgemm_rowwise.json"
path.parent.mkdir(exist_ok=True)
path.write_text(json.dumps(made, indent=None, separators=(",", ":")).replace('{"name"', '\n{"name"') + "\n")
