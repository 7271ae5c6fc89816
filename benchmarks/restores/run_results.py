"""Results of runs that are killed and restored from checkpoints of one kind."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.paired import prepared_log
from common.result_store import ResultStore
from record import ROOT

from meseta.data import Dataset
from restores.run_processes import Forecast, RunProcess, RunProcesses, forecast, run_train


@dataclass(frozen=True)
class Kind:
    restores: int = 0
    bits: int | None = None
    """Bits of rows in checkpoints. `None`: exact, and a weight is moved by one ulp at each restore."""
    adaptive: bool = True


UNDISTURBED, FORECAST = "undisturbed", "forecast"
KINDS: Mapping[str, Kind] = {
    UNDISTURBED: Kind(),
    "exact x3": Kind(3),
    "4 bits x3": Kind(3, 4),
    "2 bits, no adaptive range, x3": Kind(3, 2, adaptive=False),
    "exact x20": Kind(20),
    "8 bits x20": Kind(20, 8),
}
DATA, SCALE = "main", 0.01
QUICK_BATCH, QUICK_RESTORES = 64, 5
"""Batch size and maximum number of restores with --quick."""
LOG_CHARACTERS = 800


class RunResults:
    """Results by seed and kind. Missing ones are trained."""

    def __init__(self, folder: Path, *, quick: bool, num_workers: int) -> None:
        self._quick, self._num_workers = quick, num_workers
        self._folder = folder / (f"{DATA}-quick" if quick else DATA)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._store = ResultStore(self._folder / "cells.json" if quick else ResultStore.FOLDER / "quality_ne.json")
        self._data = prepared_log(self._folder, SCALE, quick)
        self._batch_size = QUICK_BATCH if quick else 2048
        self._num_steps = -(-Dataset.load(self._data).splits["train"].num_rows // self._batch_size)

    def find(self, seed: int, name: str) -> Mapping[str, Any] | None:
        key = self._key(seed, name)
        return self._store.get(key, dict) if key in self._store else None

    def make(self, seeds: Sequence[int], names: Sequence[str]) -> None:
        """Train missing results, several at a time, then compute the forecast."""
        results = [(seed, name) for seed in seeds for name in names if name != FORECAST or seed == seeds[0]]
        missing = [cell for cell in results if self.find(*cell) is None]
        with RunProcesses() as processes, ThreadPoolExecutor(self._num_workers) as pool:
            futures = {pool.submit(self._train, processes, *cell): cell for cell in missing if cell[1] != FORECAST}
            try:
                for future in as_completed(futures):
                    seed, name = futures[future]
                    self._keep(seed, name, future.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                processes.__exit__(None, None, None)  # before the pool waits for those that run
                raise
            for seed, name in missing:
                if name == FORECAST:
                    self._keep(seed, name, self._forecast(processes, seed))

    def _keep(self, seed: int, name: str, figures: Mapping[str, Any]) -> None:
        cell = self._store.get(self._key(seed, name), lambda: figures)
        text = f"test NE {cell['ne']:.6f}, {cell['restores']} restores" if "ne" in cell else "done"
        print(f"{DATA}, seed {seed}, {name}: {text}, in {cell['seconds']:.0f} s", flush=True)

    def _key(self, seed: int, name: str) -> str:
        return f"{DATA}/{seed}/{name}"

    def _train(self, processes: RunProcesses, seed: int, name: str) -> dict[str, Any]:
        kind, run_dir, start_s = KINDS[name], self._run_dir(seed, name), time.perf_counter()
        log = run_dir.with_suffix(".txt")
        log.unlink(missing_ok=True)
        shutil.rmtree(run_dir, ignore_errors=True)
        errors = [self._train_until(processes, seed, name, step) for step in self._kills(kind)]
        self._train_until(processes, seed, name, None)
        restores = tuple(map(int, re.findall(r"resuming from step (\d+)", log.read_text())))
        if restores != self._kills(kind):
            raise RuntimeError(
                f"seed {seed}, {name}: restored at {restores}, and {self._kills(kind)} was asked; see {log}"
            )
        summary = json.loads((run_dir / "summary.json").read_text())
        if summary["num_steps"] != self._num_steps:
            raise RuntimeError(f"seed {seed}, {name}: {summary['num_steps']} steps where {self._num_steps} were meant")
        if not self._is_advised(seed, name):
            shutil.rmtree(run_dir)
        log.unlink()
        return {"ne": summary["test"]["ne"], "restores": len(restores), "error": max(errors, default=0.0),
                "seconds": time.perf_counter() - start_s}  # fmt: skip

    def _kills(self, kind: Kind) -> tuple[int, ...]:
        return tuple(self._every(kind) * number for number in range(1, self._restores(kind) + 1))

    def _every(self, kind: Kind) -> int:
        return max(self._num_steps // (self._restores(kind) + 1), 1)

    def _restores(self, kind: Kind) -> int:
        return min(kind.restores, QUICK_RESTORES) if self._quick else kind.restores

    def _train_until(self, processes: RunProcesses, seed: int, name: str, killed_after: int | None) -> float:
        """Train from the newest checkpoint to the next kill. Returns the largest error of saved rows."""
        kind, run_dir = KINDS[name], self._run_dir(seed, name)
        log = run_dir.with_suffix(".txt")
        settings = [
            f"run_dir={run_dir}", f"data.dir={self._data}", f"seed={seed}", f"train.batch_size={self._batch_size}",
            "num_threads=1",
        ]  # fmt: skip
        if kind.restores:
            settings += [f"checkpoint.every_steps={self._every(kind)}", "checkpoint.background=never",
                         "checkpoint.keep_last=1", f"checkpoint.bits={kind.bits or 'exact'}"]  # fmt: skip
        code = processes.run(
            run_train,
            RunProcess(
                arguments=(str(ROOT / "examples" / "configs" / "main.yaml"), *settings),
                log=log,
                killed_after=killed_after,
                moves_weight=kind.bits is None,
                adaptive=kind.adaptive,
            ),
        )
        if code != (0 if killed_after is None else -signal.SIGKILL):
            text = log.read_text()[-LOG_CHARACTERS:] if log.exists() else ""
            raise RuntimeError(f"seed {seed}, {name}, to step {killed_after}: ended with {code}: {text}")
        return 0.0 if killed_after is None else _largest_error(run_dir, killed_after)

    def _is_advised(self, seed: int, name: str) -> bool:
        """Whether the run is needed by the forecast."""
        return name == UNDISTURBED and seed == 0 and self.find(seed, FORECAST) is None

    def _forecast(self, processes: RunProcesses, seed: int) -> dict[str, Any]:
        """Return the forecast of `meseta checkpoint advise` for the undisturbed run."""
        start_s, run_dir, out = time.perf_counter(), self._run_dir(seed, UNDISTURBED), self._folder / "forecast.json"
        self._train_until(processes, seed, UNDISTURBED, None)  # a finished run is shown again, a missing one is trained
        asked = {name: Forecast(k.bits, k.restores, k.adaptive) for name, k in KINDS.items() if k.bits is not None}
        log = run_dir.with_suffix(".txt")
        if code := processes.run(forecast, run_dir, log, out, asked):
            raise RuntimeError(f"the forecast ended with {code}: {log.read_text()[-LOG_CHARACTERS:]}")
        forecasts: dict[str, Any] = json.loads(out.read_text())
        for path in (out, log):
            path.unlink()
        shutil.rmtree(run_dir)
        return {**forecasts, "seconds": time.perf_counter() - start_s}

    def _run_dir(self, seed: int, name: str) -> Path:
        return self._folder / f"{name.replace(',', '').replace(' ', '-')}-{seed}"


def _largest_error(run_dir: Path, step: int) -> float:
    manifest = json.loads((run_dir / "checkpoints" / f"step-{step:09}" / "manifest.json").read_text())
    return max((float(of["row"]) for of in manifest.get("quantised", {}).values() if "row" in of), default=0.0)
