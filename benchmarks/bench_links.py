"""What communication between ranks takes on slow links: bits, bytes, steps, and what is predicted of them.

    python benchmarks/bench_links.py [--parts bits,bytes,step,predicted,peer,overlap,lanes] [--layouts 4x2,2x4]
        [--quick] [--rounds 5] [--window 3] [--peer-python PYTHON] [--before CHECKOUT] [--no-record]
    python benchmarks/bench_links.py --parts ne [--seeds 10] [--folder build/links]
    python benchmarks/bench_links.py --parts hybrid --layouts 2x2

Parts:
- bits: checksums of all tables and dense weights after 20 steps: equal over flat and two-level exchanges, twins and
  chains, orders in which ranks come, lengths of pieces, and tables cut by columns or whole; for each codec, on 2, 4 and
  8 ranks. Over loopback.
- bytes: what the kernel counts on the links of hosts within 1 % of what is predicted, per scheme, codec and way.
- step: seconds of a step over flat fp32, for DLRM `d64` of `meseta bench e2e` with a global batch of 4096, hosts x
  ranks as --layouts says. The rate of the links is set once for each layout, before any variant runs, such that a flat
  fp32 step waits 75 to 80 % of its time; variants take turns.
- predicted: predicted over measured step, relative to flat fp32, for more schemes and codecs over the same links.
- peer: precision 'paper' beside TorchRec with its fp16 codec, over the same links; TorchRec is in the interpreter that
  --peer-python or PEER_PYTHON names.
- overlap: steps that hide what travels behind what they compute, over links for which half of a flat fp32 step waits:
  what of the waiting is gone that can be hidden, and the step with micro-batches.
- lanes: 1 MB exchanged while 64 MB are added up, beside its time alone; two ranks without slow links beside those of
  another checkout, where --before names one.
- ne: normalised entropy of ten seeds on two ranks by codec, beside fp32, two million test rows; what is done is kept in
  benchmarks/links_ne.json, and the same command goes on from there. It takes half an hour, and has to be asked for.
- hybrid: DHEN of 20 million dense parameters (dense.sharding fsdp), cut inside hosts and alike on all, cut over all
  ranks, and whole on every rank, over links of 1 / 24 of what goes inside a host: steps, bytes beside what is computed,
  and what a step waits for. Has to be asked for.

Bytes and steps need network namespaces, see docs/testbed.md; without them these parts say so. Prints tables, and
appends figures to benchmarks/results.csv (not with --quick). Exits with 1 where a part misses what it must reach.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from links import bits_part, bytes_part, hybrid_part, lanes_part, ne_part, overlap_part, steps_part
from links.timing import Options
from links.variants import Layout
from record import ROOT

from hosts import why_impossible

TIMED = ("step", "predicted", "peer")
ASKED = ("ne", "hybrid")
"""Left out unless they are named."""
PARTS = ("bits", "bytes", *TIMED, "overlap", "lanes", *ASKED)


def layout(text: str) -> Layout:
    """'4x2': four hosts of two ranks."""
    hosts, _, per_host = text.partition("x")
    return Layout(int(hosts), int(per_host))


def run(parts: list[str], layouts: list[Layout], options: Options) -> bool:
    """All parts; whether each has reached what it must."""
    good, why = True, why_impossible()
    if "bits" in parts:
        good &= bits_part.compare_bits(options)
    if "lanes" in parts:
        good &= lanes_part.measure_lanes(options, why)
    if why is not None and {"bytes", "overlap", "hybrid", *TIMED} & set(parts):
        print(f"bytes and steps are left out, since this machine makes no slow links: {why}")
        layouts = []
    for one in layouts:
        if "bytes" in parts:
            good &= bytes_part.measure_bytes(one, options)
        if "overlap" in parts:
            good &= overlap_part.measure_overlap(one, options)
        if "hybrid" in parts:
            good &= hybrid_part.measure_hybrid(one, options)
        if set(TIMED) & set(parts):
            good &= steps_part.measure_steps(one, parts, options)
    if "ne" in parts:
        good &= ne_part.compare_ne(options)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(name for name in PARTS if name not in ASKED))
    parser.add_argument("--layouts", default="4x2,2x4", help="hosts x ranks of each")
    parser.add_argument("--rounds", type=int, help="windows of each variant")
    parser.add_argument("--window", type=float, help="seconds of a window")
    parser.add_argument("--quick", action="store_true", help="try it: few and small")
    parser.add_argument("--no-record", action="store_true", help="leave benchmarks/results.csv as it is")
    parser.add_argument("--peer-python", help="the interpreter that has TorchRec; PEER_PYTHON unless said")
    parser.add_argument("--before", type=Path, help="a checkout with a .venv, whose steps stand beside these")
    parser.add_argument("--seeds", type=int, default=10, help="of part ne")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "links", help="data and runs of part ne")
    told = parser.parse_args()
    parts = told.parts.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"parts {', '.join(unknown)} are unknown; there are {', '.join(PARTS)}")
    layouts = [layout(text) for text in told.layouts.split(",")]
    if "hybrid" in parts and any(min(one.hosts, one.per_host) < 2 for one in layouts):
        parser.error("part hybrid cuts inside hosts and over them: take --layouts of two hosts of two ranks, or more")
    options = Options(
        quick=told.quick,
        rounds=told.rounds or (2 if told.quick else 5),
        window_s=told.window or (0.5 if told.quick else 3.0),
        keep=not (told.quick or told.no_record),
        peer_python=told.peer_python,
        before=told.before,
        seeds=told.seeds,
        folder=told.folder,
    )
    sys.exit(not run(parts, layouts, options))


if __name__ == "__main__":
    main()
