"""NE: what codecs cost in quality, over paired seeds on two ranks.

The main job does not show it: on its ids runs of one seed lie 0.2 % of NE apart (one standard deviation) where tables
were rounded to bfloat16 once, before the first step, since a pair of features is learned sooner or later. So ids
are fewer here, and rows begin wider: every pair is learned in time.
"""

from __future__ import annotations

import math
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from bench_first_hour import Kept
from record import ROOT

from links import ne_training, training
from links.crew import Crew, crew, here
from links.timing import Options, table

LIMITS = {"fp16": 0.0005, "bf16": 0.0005, "int8": 0.0015}
"""Of fp32's NE, within which the interval of the mean difference must lie."""
BESIDE = ("paper", "fp8")
"""Of these nothing is asked; they are trained last."""
TEST_ROWS = (2_000_000, 4000)
"""In earnest, and with --quick."""
ULP = "fp32, one weight moved by one ulp"
SCALE, OVERRIDES = 0.001, ("embedding.init.scale=0.2",)
"""Of the log, and of the main job."""
FILE_ROWS, TRAIN_FILES, TEST_FILES = 200_000, 8, 10
"""Those of the main job, and two million rows for testing where it has one file."""
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Of Student's t, by degrees of freedom from 1 on; of more of them the last is taken, which is a little wide."""


def compare_ne(options: Options) -> bool:
    """All seeds; whether each interval lies within its limits."""
    folder = options.folder / ("ne-quick" if options.quick else "ne")
    folder.mkdir(parents=True, exist_ok=True)
    asked, beside = (tuple(LIMITS), BESIDE) if training.takes_codecs() else ((), ())
    if not asked:
        print("ne: meseta.shard takes no codecs here, so that fp32 alone is trained")
    kept = Kept(folder / "cells.json" if options.quick else ROOT / "benchmarks" / "links_ne.json")
    data = _data(folder, options.quick)
    names = ("fp32", ULP, *asked, *beside)
    seeds = range(2 if options.quick else options.seeds)
    entropies: dict[str, list[float]] = {name: [] for name in names}
    with crew(2, here(2, bind=False)) as ranks:
        for seed, name in [*product(seeds, ("fp32", ULP, *asked)), *product(seeds, beside)]:
            cell = kept.get(f"{seed}/{name}", partial(_train, ranks, data, folder, name, seed))
            entropies[name].append(float(cell["ne"]))
            print(f"seed {seed}, {name}: test NE {cell['ne']:.6f} in {cell['seconds']:.0f} s", flush=True)
    base, good = entropies["fp32"], True
    rows = [["fp32", f"{statistics.mean(base):.6f}", *[""] * 5]]
    for name in names[1:]:
        mean, half = (one / statistics.mean(base) for one in difference(entropies[name], base))
        limit = LIMITS.get(name)
        is_within = limit is None or max(half - mean, half + mean) <= limit
        good &= is_within or options.quick
        rows.append([name, f"{statistics.mean(entropies[name]):.6f}", f"{mean:+.4%}", f"{mean - half:+.4%}",
                     f"{mean + half:+.4%}", "" if limit is None else f"{limit:.2%}",
                     "" if limit is None else "yes" if is_within else "NO"])  # fmt: skip
        options.record(f"2 ranks {name}", "test NE", statistics.mean(entropies[name]), "of theirs", peer="fp32",
                       peer_value=statistics.mean(base))  # fmt: skip
    head = ("", "mean test NE", "mean difference to fp32", "95 %, from", "to", "within", "met")
    table(f"Normalised entropy over {len(seeds)} paired seeds, {TEST_ROWS[options.quick]:,} test rows", head, rows)
    return good


def difference(some: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """Mean of paired differences, and half of its 95 % interval."""
    each = [a - b for a, b in zip(some, base, strict=True)]
    if len(each) < 2:
        return statistics.mean(each), math.inf
    factor = T_975[min(len(each) - 2, len(T_975) - 1)]
    return statistics.mean(each), factor * statistics.stdev(each) / math.sqrt(len(each))


def _train(ranks: Crew, data: Path, folder: Path, name: str, seed: int) -> dict[str, Any]:
    run_dir = folder / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    overrides = [f"run_dir={run_dir}", f"data.dir={data}", f"seed={seed}", *OVERRIDES]
    if name not in ("fp32", ULP):
        overrides.append(f"comm.precision={name}")
    figures: dict[str, Any] = ranks.ask(
        ne_training.train, config=str(ROOT / "examples" / "configs" / "main.yaml"), overrides=overrides,
        moved=name == ULP,
    )[0]  # fmt: skip
    shutil.rmtree(run_dir)
    return figures


def _data(folder: Path, quick: bool) -> Path:
    """The log of the main job with more files for testing, prepared; made once."""
    raw, out = folder / "raw", folder / "data"
    if (folder / "done").exists():
        return out
    rows, files = (2000, 4) if quick else (FILE_ROWS, TRAIN_FILES + TEST_FILES)
    for place in (raw, out):
        shutil.rmtree(place, ignore_errors=True)
    _meseta("data", "synth", "--out", raw, "--rows", rows * files, "--files", files, "--scale", SCALE)
    first_test = files // 2 if quick else TRAIN_FILES
    tests = [word for number in range(first_test, files) for word in ("--test-files", raw / f"day_{number}.tsv")]
    _meseta("prepare", raw / "*.tsv", "--out", out, *tests)
    shutil.rmtree(raw)
    (folder / "done").touch()
    return out


def _meseta(*arguments: object) -> None:
    command = [sys.executable, "-m", "meseta.cli.main", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr[-500:]}")
