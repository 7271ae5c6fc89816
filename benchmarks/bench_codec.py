"""Codecs of the wire on a CPU: numbers a second, and their time over that of a memcpy of the float32 bytes.

    python benchmarks/bench_codec.py [--rows 4096] [--columns 1664] [--threads 1]

A memcpy reads as many bytes as a codec and writes more, so that a codec near memory bandwidth takes less time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from turns import best_s

from meseta.ops.codec import HalfRange, StochasticRounding, decode_columns, encode_columns
from meseta.ops.core import instruction_set
from meseta.spec.codecs import CODECS, Codec
from meseta.system.processors import read_processor

NUM_TURNS = 15


def calls_of(num_rows: int, num_columns: int) -> dict[str, Callable[[], object]]:
    """A copy; each codec from one matrix, from 26 that are put side by side, and back."""
    values, copy = torch.randn(num_rows, num_columns), torch.empty(num_rows, num_columns)
    width = num_columns // 26
    pieces, whole = (width,) * 26, (0, 0, 0, 26 * width, 0)
    matrices = [torch.randn(num_rows, width) for _ in pieces]
    places = tuple(number for m in range(26) for number in (m, 0, m * width, width, 0))
    drawn = StochasticRounding(tuple(range(26)), (0,) * 26, 0)
    calls: dict[str, Callable[[], object]] = {"memcpy": lambda: copy.copy_(values)}
    for name, codec in CODECS.items():
        if codec.is_lossless:
            continue
        out = torch.zeros(num_rows, codec.row_bytes(pieces), dtype=torch.uint8)
        half = HalfRange(3, torch.zeros(1, dtype=torch.int64))

        def encode(
            sources: list[torch.Tensor], moves: tuple[int, ...], rounding: StochasticRounding | None = None,
            out: torch.Tensor = out, codec: Codec = codec, half: HalfRange = half,
        ) -> None:  # fmt: skip
            encode_columns(out, sources, moves, codec, pieces, rounding=rounding, half_range=half)

        def decode(out: torch.Tensor = out, codec: Codec = codec) -> None:
            decode_columns(copy, [out], whole, codec, [pieces], exponent=3)

        calls[f"{name}"] = lambda encode=encode: encode([values], whole)
        calls[f"{name} of 26 matrices"] = lambda encode=encode: encode(matrices, places)
        if codec.scale_bytes:
            calls[f"{name} stochastic"] = lambda encode=encode: encode([values], whole, drawn)
        calls[f"{name} back"] = decode
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 4096), ("columns", 1664), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    seconds = best_s(calls_of(options.rows, options.columns), NUM_TURNS)
    print(f"{read_processor().name}, core {instruction_set()}, torch {torch.__version__}, {options.threads} threads")
    print(f"{options.rows} x {options.columns} float32")
    for name, taken in seconds.items():
        rate = options.rows * options.columns / taken
        share = taken / seconds["memcpy"]
        print(f"{name:24} {taken * 1e3:8.2f} ms {rate / 1e6:8.0f} M numbers/s {share:6.2f} of a memcpy")


if __name__ == "__main__":
    main()
