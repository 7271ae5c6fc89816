"""What training loses that is killed, and goes on from checkpoints whose rows have fewer bits.

    python benchmarks/bench_quality.py [--data main] [--seeds 10] [--folder build/quality] [--workers 2] [--no-record]
    python benchmarks/bench_quality.py --data steady
    python benchmarks/bench_quality.py --quick

The main job with two million test rows. A run of each seed is trained
- undisturbed;
- as the floor: `kill -9` after 3, and after 20, saves at evenly spread steps, which are exact; at each restore one
  weight of one row is moved by one unit in the last place;
- with the same kills, with 4 bits and 3 restores, with 8 bits and 20;
- with 2 bits without the adaptive range and 3 restores, which must come out visibly worse, else the measure is blind.
A process of its own, which is `meseta train`, leads from each restore to the next kill.

Each kind may lose 0.01 % of NE more than its floor in the mean (the budget of Check-N-Run, arXiv 2010.08679), and its
95 % interval ends below 0.03 %; where the floor's own interval is wider than that, it is said. What
`meseta checkpoint advise` measures of the same bits in all tables, on the undisturbed run of the first seed, stands
beside it.

`--data steady` takes a log of fewer ids, and wider initial rows: on the main job's own ids runs of one seed lie 0.2 %
of NE apart for one rounding, since a pair of features is learned sooner or later; here all are learned in time.

What is done is kept in benchmarks/quality_ne.json, and the same command goes on from there: half an
hour on two cores, 37 s a run that nobody kills, 75 with 20 kills, two at a time, and the forecast. --quick kills 5
times instead of 20.
Appends to benchmarks/results.csv (not with --quick or --only). Exits with 1 where a limit is missed, or 2 bits are not
visibly worse, and the floor would have let it be seen.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}  # read where processes import torch

from paired import num_test_rows
from quality.cells import FORECAST, KINDS, SCALE, Cells
from quality.outcome import keep, show
from record import ROOT


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> None:
    names = (*KINDS, FORECAST)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=tuple(SCALE), default="main")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "quality", help="data and runs")
    parser.add_argument("--workers", type=int, default=2, help="cells at a time, of one thread each")
    parser.add_argument("--only", action="append", choices=names, help="train cells of this name; may be repeated")
    parser.add_argument("--quick", action="store_true", help="try it: two seeds, on data that mean nothing")
    parser.add_argument("--no-record", action="store_true", help="leave benchmarks/results.csv as it is")
    told = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    seeds = range(2 if told.quick else told.seeds)
    try:
        cells = Cells(told.data, told.folder, quick=told.quick, num_workers=told.workers)
        cells.make([*seeds], [*(told.only or names)])
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on with the cells that are missing")
    losses, good = show(cells, seeds, num_test_rows(told.quick))
    if not (told.quick or told.only or told.no_record):
        keep(cells, losses)
    sys.exit(not (good or told.quick))


if __name__ == "__main__":
    main()
