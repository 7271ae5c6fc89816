"""benchmarks/bench_daily.py: tables of given results, categories of LightGBM, and a quick run of all parts."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from common.result_store import ResultStore
from daily.lightgbm_days import NAMES, NUM_NUMBERS, add_categories, inputs_of
from daily.logs import DailyLog
from daily.many_days_part import KEPT, QUANTITIES, RETIRED, ManyDays
from daily.quality_part import ALONE, CHAIN, METHODS, NO_GROW, SCRATCH, STALE, QualityTables
from daily.rates_part import print_rates
from daily.runs import DailyRuns
from daily.sizes import FULL, QUICK
from scipy import stats

from source_tree import ROOT

DAYS, SEEDS = (2, 3), (0, 1, 2)


def make_log(folder: Path, seed: int = 0, num_days: int = 30) -> DailyLog:
    """Return a log that no test writes."""
    return DailyLog(folder=folder / "log", seed=seed, num_days=num_days, rows_per_day=1, scale=1.0)


def make_store(path: Path, results: Mapping[str, Mapping[str, Any]]) -> ResultStore:
    path.write_text(json.dumps(results))
    return ResultStore(path)


def quality_results(differences: Mapping[str, Sequence[float]], scratch_s: float) -> dict[str, dict[str, float]]:
    """Return results whose difference to the chain is given by method and seed."""
    results = {}
    for seed in SEEDS:
        for day in DAYS:
            base = 0.8 + 0.01 * day + 0.02 * seed
            for name in (CHAIN, STALE, ALONE, NO_GROW, SCRATCH):
                of_seed = differences.get(name, (0.0, 0.0, 0.0))[seed]
                # The sign of the second part differs between the days, so that it is not in the means.
                ne = base + of_seed + (0 if name == CHAIN else 0.001 * (-1) ** day)
                time_s = scratch_s if name == SCRATCH else 2.0
                results[f"quality/{seed}/{name}/{day}"] = {"ne": ne, "processor_s": time_s, "peak_bytes": 5e8}
    return results


GOOD = {STALE: (0.05, 0.06, 0.055), ALONE: (0.1, 0.11, 0.13), NO_GROW: (0.01, 0.012, 0.011), SCRATCH: (-0.001,) * 3}


@pytest.mark.parametrize(
    ("differences", "scratch_s", "is_met"),
    [
        (GOOD, 9.0, True),
        (GOOD, 7.0, False),  # the chain takes 2 / 7 of the time
        (GOOD | {SCRATCH: (-0.004,) * 3}, 9.0, False),
        (GOOD | {NO_GROW: (0.01, -0.005, 0.002)}, 9.0, False),
    ],
)
def test_the_chain_is_compared_over_paired_seeds(
    differences: Mapping[str, Sequence[float]],
    scratch_s: float,
    is_met: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = make_store(tmp_path / "results.json", quality_results(differences, scratch_s))
    sizes = replace(FULL, num_days=3, seeds=SEEDS, scratch_days=DAYS, scratch_seeds=SEEDS)
    runs = [DailyRuns(make_log(tmp_path, seed), store, tmp_path, f"quality/{seed}", ()) for seed in SEEDS]
    assert QualityTables(runs, sizes).print() is is_met
    lines = capsys.readouterr().out.splitlines()
    for name in (STALE, NO_GROW):
        values = differences[name]
        ends = stats.t.interval(0.95, len(values) - 1, loc=statistics.mean(values), scale=stats.sem(values))
        expected = f"{statistics.mean(values):+.4f} ({ends[0]:+.4f} to {ends[1]:+.4f})"
        [line] = [line for line in lines if METHODS[name] in line and "95 %" not in line and "(" in line]
        assert expected in line and "| 2    | 3     |" in line


def test_the_best_rate_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entropies = {"base": (0.85, 0.87), "base-warmup": (0.851, 0.871), "low": (0.83, 0.88), "unknown": (0.84, 0.87)}
    results = {
        f"rates/{seed}/{name}/2": {"ne": of_seed[place]}
        for place, seed in enumerate(FULL.rate_seeds)
        for name, of_seed in entropies.items()
    }
    # A rate without results of all seeds is not the best one.
    results["rates/100/last/2"] = {"ne": 0.5}
    store = make_store(tmp_path / "results.json", results)
    runs = [DailyRuns(make_log(tmp_path, seed), store, tmp_path, f"rates/{seed}", ()) for seed in FULL.rate_seeds]
    assert not print_rates(runs, replace(FULL, num_days=2))
    text = capsys.readouterr().out
    assert "lowest: 0.3 of base rate, default: base rate" in text and "lowest: unknown, default: initial" in text
    assert "| 0.3 of base rate   | 0.8300   | 0.8800   | 0.8550 |" in text


@pytest.mark.parametrize(("last", "is_met"), [(1.19, True), (1.21, False)])
def test_many_days_are_compared_by_medians(last: float, is_met: bool, tmp_path: Path) -> None:
    results = {}
    for day in range(2, 31):
        # One slow day among the three does not change their median.
        factor = 5.0 if day in {19, 29} else last if day > 20 else 1.0
        for mode, growth in ((RETIRED, 1.0), (KEPT, float(day))):
            numbers = dict.fromkeys(QUANTITIES, 100 * factor * growth)
            results[f"thirty_days/{mode}/{day}"] = numbers | {"rows": int(1000 * (last if day > 20 else 1) * growth)}
    days = ManyDays(make_log(tmp_path), make_store(tmp_path / "results.json", results), tmp_path, ())
    assert days.print(tmp_path / "page.html") is is_met
    page = (tmp_path / "page.html").read_text()
    assert page.count("retired-line") == page.count("kept-line") == len(QUANTITIES) + 1  # and once in the style


def test_missing_days_do_not_meet_the_limit(tmp_path: Path) -> None:
    assert not ManyDays(make_log(tmp_path), make_store(tmp_path / "none.json", {}), tmp_path, ()).print(tmp_path / "p")


def test_categories_of_earlier_days_stay() -> None:
    def rows(texts: Sequence[str | None]) -> pa.Table:
        numbers = {name: pa.array([1.5] * len(texts), pa.float64()) for name in NAMES[:NUM_NUMBERS]}
        return pa.table(numbers | {name: pa.array(texts, pa.string()) for name in NAMES[NUM_NUMBERS:]})

    first = add_categories({}, rows(["b", None, "a", "b"]))
    second = add_categories(first, rows(["c", "a", "d"]))
    assert second["cat_3"].to_pylist() == ["b", "a", "c", "d"]
    codes = inputs_of(rows(["d", None, "z", "b"]), second)[:, NUM_NUMBERS]
    assert codes[[0, 3]].tolist() == [3, 0] and codes[1] != codes[1] and codes[2] != codes[2]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_quick_run_prints_all_tables(tmp_path: Path) -> None:
    pytest.importorskip("lightgbm")
    stored = ResultStore.FOLDER / "daily.json"
    before = stored.read_bytes() if stored.exists() else None
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "bench_daily.py", "--quick", "--folder", tmp_path],
        capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode in {0, 1} and "Traceback" not in done.stderr, done.stderr
    results = json.loads((tmp_path / "quick" / "daily.json").read_text())
    last = QUICK.num_days
    assert {f"quality/0/{name}/{last}" for name in METHODS} | {f"rates/100/low-warmup/{last}"} <= results.keys()
    assert all(0 < result["ne"] < 5 for name, result in results.items() if not name.startswith("thirty"))
    assert all(title in done.stdout for title in METHODS.values())
    assert (stored.read_bytes() if stored.exists() else None) == before
