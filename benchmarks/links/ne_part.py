"""Part 'ne': loss of quality by codecs, over paired seeds on two ranks.

Runs of the main job cannot resolve it: a single rounding changes their NE by 0.2 % (one standard deviation), because a
pair of features is learned sooner or later. With fewer ids and wider initial rows, every pair is learned in time.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import statistics
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common.paired import STEADY, STEADY_SCALE, difference, move_by_an_ulp, num_test_rows, prepared_log
from common.result_store import ResultStore
from common.tables import table
from record import ROOT

from links.rank_pool import RankPool, on_this_machine, start_ranks
from links.timing import Options
from meseta.comm import World
from meseta.config import read_config_document, validate_document
from meseta.train.trainer import Trainer


def train(config: str, overrides: list[str], moved: bool) -> dict[str, Any]:
    """Return the metrics of the test split. With `moved`, one dense weight is moved by one ulp."""
    torch.set_num_threads(1)
    start_s = time.perf_counter()
    with contextlib.redirect_stderr(io.StringIO()):
        trainer = Trainer(validate_document(read_config_document(Path(config), overrides)), World.current())
        if moved:
            move_by_an_ulp(next(iter(trainer.model.parameters())).detach().view(-1)[:1])
        summary = trainer.run()
    return {"ne": summary["test"]["ne"], "auc": summary["test"]["auc"], "steps": summary["num_steps"],
            "seconds": time.perf_counter() - start_s}  # fmt: skip


LIMITS = {"fp16": 0.0005, "bf16": 0.0005, "int8": 0.0015}
"""Maximum relative difference of NE to fp32. The interval of the mean difference must be below it."""
ULP = "fp32, one weight moved by one ulp"


def compare_ne(options: Options) -> bool:
    folder = options.folder / ("ne-quick" if options.quick else "ne")
    folder.mkdir(parents=True, exist_ok=True)
    store = ResultStore(folder / "cells.json" if options.quick else ResultStore.FOLDER / "links_ne.json")
    data = prepared_log(folder, STEADY_SCALE, options.quick)
    names = ("fp32", ULP, *LIMITS)
    seeds = range(2 if options.quick else options.seeds)
    entropies: dict[str, list[float]] = {name: [] for name in names}
    with start_ranks(2, on_this_machine(2)) as ranks:
        for seed, name in product(seeds, names):
            cell = store.get(f"{seed}/{name}", partial(_train, ranks, data, folder, name, seed))
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
    table(f"Normalised entropy over {len(seeds)} paired seeds, {num_test_rows(options.quick):,} test rows", head, rows)
    return good


def _train(ranks: RankPool, data: Path, folder: Path, name: str, seed: int) -> dict[str, Any]:
    run_dir = folder / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    overrides = [f"run_dir={run_dir}", f"data.dir={data}", f"seed={seed}", *STEADY]
    if name not in ("fp32", ULP):
        overrides.append(f"comm.precision={name}")
    figures: dict[str, Any] = ranks.ask(
        train, config=str(ROOT / "examples" / "configs" / "main.yaml"), overrides=overrides,
        moved=name == ULP,
    )[0]  # fmt: skip
    shutil.rmtree(run_dir)
    return figures
