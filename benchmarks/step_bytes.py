"""Compare the computed bytes of each kernel of a DLRM-DCNv2 step with those that compiled kernels request.

    python benchmarks/step_bytes.py [--tiny]

No GPU is needed: steps run on the emulated GPU of count_step.py, and Triton's interpreter counts the bytes of loads and
stores that are not masked. An element that several programs load counts several times, though caches serve some of
these loads. Kernels of torch have computed bytes only. Sizes are MLPerf's, 55,296 samples. It takes some minutes.
"""

from __future__ import annotations

import os
import warnings

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported.

import torch
from common.command import make_parser
from common.tables import table
from dcnv2.shape import MLPERF, TINY
from dcnv2.step_kernels import StepKernel, step_kernels, total

NUM_ROW_SAMPLES, NUM_DENSE_SAMPLES = 320, 8448
"""Numbers of recorded samples. The latter has the tiles of large products."""
HEAD = ("kernel", "stage", "launches", "MB", "GFLOP", "MB requested", "requested / computed")


def cells(kernel: StepKernel) -> tuple[str, ...]:
    """Return the cells of a kernel's row."""
    requested = ("", "")
    if kernel.num_requested is not None:
        ratio = kernel.num_requested / kernel.num_bytes if kernel.num_bytes else 0.0
        requested = f"{kernel.num_requested / 1e6:,.1f}", f"{ratio:.2f}"
    flops = f"{kernel.num_flops / 1e9:,.0f}" if kernel.num_flops else ""
    name = kernel.name.removeprefix("aten::")
    return (name, kernel.stage, str(kernel.count), f"{kernel.num_bytes / 1e6:,.1f}", flops, *requested)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the command")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")  # NaN and infinity in masked lanes.
    torch.set_num_threads(1)
    shape, sizes = (TINY, (9, 9)) if chosen.tiny else (MLPERF, (NUM_ROW_SAMPLES, NUM_DENSE_SAMPLES))
    kernels = step_kernels(shape, *sizes)
    count, num_bytes, flops = total(kernels)
    last = ("total", "", f"{count:.0f}", f"{num_bytes / 1e6:,.1f}", f"{flops / 1e9:,.0f}", "", "")
    table(f"One step of {shape.batch_size:,} samples", HEAD, [*map(cells, kernels), last])


if __name__ == "__main__":
    main()
