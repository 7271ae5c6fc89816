"""Measure the loss of quality by kills and restores from checkpoints with fewer bits.

    python benchmarks/bench_quality.py [--seeds 10] [--folder build/quality] [--workers 2] [--no-record]
    python benchmarks/bench_quality.py --quick

The main job with two million test rows. Each seed trains
- undisturbed;
- as the floor: with 3 and with 20 kills, exact checkpoints, and one weight moved by one ulp at each restore;
- with the same kills, in 4 bits with 3 restores, and in 8 bits with 20;
- in 2 bits without the adaptive range and 3 restores, which must be visibly worse.

The mean loss of NE relative to the floor may be 0.01 % (the budget of Check-N-Run, arXiv 2010.08679), and its 95 %
interval must end below 0.03 %. The forecast of `meseta checkpoint advise` is printed too.

Results are stored in benchmarks/stored_results/quality_ne.json, and the same command continues with missing ones. It
takes half an hour on two cores. The exit code is 1 if a limit is missed that the floor can resolve.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}  # read where processes import torch

from common.command import make_parser, parse_arguments
from common.paired import num_test_rows
from record import ROOT
from restores.losses import keep, show
from restores.run_results import FORECAST, KINDS, RunResults


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "quality", help="data and runs")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, of one thread each")
    parser.add_argument("--quick", action="store_true", help="try it: two seeds, on data that mean nothing")
    options = parse_arguments(parser)
    signal.signal(signal.SIGTERM, _end)
    seeds = range(2 if options.quick else options.seeds)
    try:
        results = RunResults(options.folder, quick=options.quick, num_workers=options.workers)
        results.make([*seeds], [*KINDS, FORECAST])
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command continues with missing results")
    losses, good = show(results, seeds, num_test_rows(options.quick))
    if not options.quick:
        keep(losses)
    sys.exit(not (good or options.quick))


if __name__ == "__main__":
    main()
