"""Compare the computed bytes of each kernel of a DLRM-DCNv2 step with those that compiled kernels request.

    python benchmarks/step_bytes.py [--tiny]

No GPU is needed: steps run on the emulated GPU of count_step.py, and Triton's interpreter counts the bytes of loads and
stores that are not masked. An element that several programs load counts several times, though caches serve some of
these loads. Kernels of torch have computed bytes only. Triton compiles its kernels for an H100, and the table has the
bytes that a lane loads and stores with the widest instruction. Kernels of less than 120 MB share a row. Sizes are
MLPerf's, 55,296 samples. It takes a few minutes.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Sequence

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported.

import torch
from common.command import make_parser
from common.tables import table
from dcnv2.compiled import widest_accesses
from dcnv2.shape import MLPERF, TINY
from dcnv2.step_kernels import StepKernel, step_kernels, total

NUM_ROW_SAMPLES, NUM_DENSE_SAMPLES = 20, 768
"""Numbers of recorded samples."""
MIN_MB = 120.0
"""Megabytes below which kernels share a row, except for the small model."""
HEAD = ("kernel", "launches", "MB", "requested MB (ratio)", "GFLOP", "widest load; store")


def find_widths(kernels: Sequence[StepKernel], optimizer: str) -> list[str]:
    """Return the widest loads and stores of each kernel in the compiled code."""
    signatures = [one for kernel in kernels for one in kernel.signatures]
    widths = iter(widest_accesses(signatures, optimizer))
    by_kernel = [[next(widths) for _ in kernel.signatures] for kernel in kernels]
    return ["; ".join(map(format_range, zip(*pairs, strict=True))) for pairs in by_kernel]


def format_range(widths: Sequence[int]) -> str:
    """Format the widths of several launches."""
    low, high = min(widths), max(widths)
    return str(low) if low == high else f"{low} to {high}"


def cells(kernel: StepKernel, widths: str, *, is_named_once: bool) -> tuple[str, ...]:
    """Return the cells of a kernel's row. The name has the stage unless no other row has this name."""
    name = kernel.name.removeprefix("aten::") + ("" if is_named_once else f", {kernel.stage}")
    requested = ""
    if kernel.num_requested is not None:
        requested = f"{kernel.num_requested / 1e6:,.0f} ({kernel.num_requested / kernel.num_bytes:.2f})"
    flops = f"{kernel.num_flops / 1e9:,.0f}" if kernel.num_flops else ""
    return name, str(kernel.count), f"{kernel.num_bytes / 1e6:,.0f}", requested, flops, widths


def make_rows(kernels: Sequence[StepKernel], optimizer: str, min_mb: float) -> list[tuple[str, ...]]:
    """Return the rows of kernels with at least `min_mb` megabytes, then one of all others, and one of the totals."""
    large = [kernel for kernel in kernels if max(kernel.num_bytes, kernel.num_requested or 0.0) >= 1e6 * min_mb]
    small = [kernel for kernel in kernels if kernel not in large]
    names = Counter(kernel.name for kernel in large)
    rows = [
        cells(kernel, widths, is_named_once=names[kernel.name] == 1)
        for kernel, widths in zip(large, find_widths(large, optimizer), strict=True)
    ]
    for name, part in (("others", small), ("total", kernels)):
        count, num_bytes, flops = total(part)
        rows.append((name, f"{count:.0f}", f"{num_bytes / 1e6:,.0f}", "", f"{flops / 1e9:,.0f}" if flops else "", ""))
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the command")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # NaN and infinity in masked lanes and sampled results.
    torch.set_num_threads(1)
    shape, sizes, min_mb = MLPERF, (NUM_ROW_SAMPLES, NUM_DENSE_SAMPLES), MIN_MB
    if chosen.tiny:
        shape, sizes, min_mb = TINY, (11, 11), 0.0
    kernels = step_kernels(shape, *sizes)
    table(f"One step of {shape.batch_size:,} samples", HEAD, make_rows(kernels, shape.optimizer, min_mb))


if __name__ == "__main__":
    main()
