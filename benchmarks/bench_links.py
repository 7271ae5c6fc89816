"""Measure communication between ranks over slow links.

    python benchmarks/bench_links.py [--parts step,predicted,peer,overlap] [--layouts 4x2,2x4]
        [--quick] [--rounds 5] [--window 3] [--peer-python PYTHON] [--no-record]
    python benchmarks/bench_links.py --parts ne [--seeds 10] [--folder build/links]
    python benchmarks/bench_links.py --parts hybrid --layouts 2x2

- step: seconds of a step of DLRM `d64` relative to flat fp32. Links are set so that it waits 75 to 80 % of its time.
- predicted: predicted relative to measured steps over these links.
- peer: precision 'paper' compared with TorchRec and its fp16 codec.
- overlap: hidden waiting, over links with which half of a flat fp32 step is waiting.
- ne: NE of ten paired seeds by codec, in half an hour. Results are stored in
  benchmarks/stored_results/links_ne.json, and the same command continues with missing ones. Only if named.
- hybrid: DHEN with 20 million dense parameters, sharded inside hosts, over all ranks, and replicated. Only if named.

Links need network namespaces, see docs/testbed.md. The exit code is 1 if a requirement is missed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from common.command import make_parser, parse_arguments
from links import hybrid_part, ne_part, overlap_part, steps_part
from links.timing import Options
from links.variants import Layout
from record import ROOT, disable_recording

from hosts import why_impossible

TIMED = ("step", "predicted", "peer")
ASKED = ("ne", "hybrid")
"""Parts that run only if they are named."""
PARTS = (*TIMED, "overlap", *ASKED)


def layout(text: str) -> Layout:
    hosts, _, per_host = text.partition("x")
    return Layout(int(hosts), int(per_host))


def run(parts: list[str], layouts: list[Layout], options: Options) -> bool:
    good, why = True, why_impossible()
    if why is not None and {"overlap", "hybrid", *TIMED} & set(parts):
        print(f"steps are left out, since this machine makes no slow links: {why}")
        layouts = []
    for one in layouts:
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
    parser = make_parser(__doc__)
    parser.add_argument("--parts", default=",".join(name for name in PARTS if name not in ASKED))
    parser.add_argument("--layouts", default="4x2,2x4", help="hosts x ranks of each")
    parser.add_argument("--rounds", type=int, help="windows of each variant")
    parser.add_argument("--window", type=float, help="seconds of a window")
    parser.add_argument("--quick", action="store_true", help="try it: few and small")
    parser.add_argument("--peer-python", help="the interpreter that has TorchRec; PEER_PYTHON unless said")
    parser.add_argument("--seeds", type=int, default=10, help="of part ne")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "links", help="data and runs of part ne")
    arguments = parse_arguments(parser)
    if arguments.quick:
        disable_recording()
    parts = arguments.parts.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"parts {', '.join(unknown)} are unknown; there are {', '.join(PARTS)}")
    layouts = [layout(text) for text in arguments.layouts.split(",")]
    if "hybrid" in parts and any(min(one.hosts, one.per_host) < 2 for one in layouts):
        parser.error("part hybrid cuts inside hosts and over them: take --layouts of two hosts of two ranks, or more")
    options = Options(
        quick=arguments.quick,
        rounds=arguments.rounds or (2 if arguments.quick else 5),
        window_s=arguments.window or (0.5 if arguments.quick else 3.0),
        peer_python=arguments.peer_python,
        seeds=arguments.seeds,
        folder=arguments.folder,
    )
    sys.exit(not run(parts, layouts, options))


if __name__ == "__main__":
    main()
