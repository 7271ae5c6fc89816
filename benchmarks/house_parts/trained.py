"""The main job at a tenth of its rows, and sampled configs: trained, and killed and resumed, by both checkouts."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from house_parts.checkouts import Checkout, Ledger, files_of
from house_parts.listed import agreement_seconds
from house_parts.plans import compare_plan_files

from meseta.config import RunConfig
from meseta.config.models import MODEL_NAMES, LayeredModelConfig, section_class
from meseta.planner import predict
from meseta.spec import COLUMN_BLOCK, Plan, ShardingType, Topology
from meseta.spec.optimizer import USED_FIELDS
from meseta.spec.workload import DenseExchange
from meseta.train.setup.planning import find_run_plan

SCHEMES = (*ShardingType, "auto")
CUT_BY_COLUMNS = ("column_wise", "table_column_wise", "grid")
TIMES = {"time_s", "samples_per_s", "seconds_per_step", "stages_s", "stages_s_by_rank", "train_s", "predicted",
         "transfers", "transfers_by_rank"}  # fmt: skip
EXACT = 1e-9
"""Relative error of predicted seconds, of which sums are taken in another order."""
NUM_STEPS = 40
MAIN_STEPS = 78
LONG_AGO_S = 1_700_000_000


def sampled_config(number: int, data: Path) -> tuple[dict[str, Any], int]:
    """Config `number` without its run_dir, and its ranks."""
    draw = random.Random(f"house {number}")
    ranks = draw.choice([1, 1, 2, 2, 4])
    name = draw.choice(tuple(USED_FIELDS))
    optimizer = {"name": name, **({"lr": 0.05} if "lr" in USED_FIELDS[name] else {})}
    model: dict[str, Any] = {"name": draw.choice(MODEL_NAMES), "embedding_dim": draw.choice([16, 32])}
    if model["name"].startswith("dlrm"):
        model |= {"bottom_mlp": [32, model["embedding_dim"]], "top_mlp": [32]}
    if issubclass(section_class(model["name"]), LayeredModelConfig):
        model |= {"dropout": draw.choice([0.0, 0.3]), "batch_norm": draw.random() < 0.3}
    dtype = draw.choice(["float32", "float32", "bfloat16", "float64"])
    document: dict[str, Any] = {
        "num_threads": 1,
        "seed": number,
        "data": {"dir": str(data)},
        "model": model,
        "embedding": {"optimizer": optimizer, "dtype": dtype},
        "dense": {"optimizer": {"name": draw.choice(["adam", "sgd", "adagrad"]), "lr": 0.005}},
        "train": {"batch_size": draw.choice([90, 256]), "log_every_steps": 10, "max_steps": NUM_STEPS,
                  "accumulate_steps": draw.choice([1, 1, 3])},
        "checkpoint": {"every_steps": 15, "background": draw.choice(["auto", "always", "never"])},
    }  # fmt: skip
    if draw.random() < 0.3:
        document["dense"]["clip_norm"] = 0.5
    if ranks > 1:
        scheme = str(draw.choice(SCHEMES))
        hosts = {"devices_per_host": 2} if ranks == 4 else {}
        entry = {"sharding": scheme, **({"hot_rows": 3} if scheme == "hot_replicated" else {})}
        document["plan"] = scheme if scheme == "auto" else {**hosts, "tables": {"*": entry}}
        if scheme in CUT_BY_COLUMNS:
            model["embedding_dim"] = COLUMN_BLOCK * ranks
            if model["name"].startswith("dlrm"):
                model["bottom_mlp"][-1] = model["embedding_dim"]
        if draw.random() < 0.2:
            document["dense"]["sharding"] = "fsdp"
    return document, ranks


@dataclass(frozen=True)
class Way:
    """How a run is trained: by these checkouts, of which all but the last are killed at their first checkpoint."""

    name: str
    checkouts: Sequence[Checkout]

    def train(self, document: dict[str, Any], ranks: int, run_dir: Path) -> list[str] | None:
        """None where the run has ended, or the errors that refuse it."""
        path = run_dir.with_suffix(".yaml")
        saved = run_dir / "checkpoints"
        path.write_text(yaml.safe_dump({**document, "run_dir": str(run_dir)}))
        command = ("train", path, "--nproc", ranks)
        for checkout in self.checkouts[:-1]:
            if checkout.meseta(*command, when=lambda: any(saved.glob("step-*"))).returncode != -signal.SIGKILL:
                print(f"{self.name}: the run had ended before it was killed", file=sys.stderr)
        done = self.checkouts[-1].meseta(*command)
        return [line for line in done.stderr.splitlines() if line.startswith("error")] if done.returncode else None


def without_times(document: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics, or a summary, without what the machine's speed is in."""
    return {
        key: without_times(value) if isinstance(value, dict) else value
        for key, value in document.items()
        if key not in TIMES
    }


def results(way: Way, document: dict[str, Any], ranks: int, run_dir: Path) -> dict[str, Any]:
    """What a run leaves; or why it is refused."""
    shutil.rmtree(run_dir, ignore_errors=True)
    refused = way.train(document, ranks, run_dir)
    if refused is not None:
        return {"refused": refused}
    scores = run_dir / "scores.csv"
    done = way.checkouts[-1].meseta("predict", run_dir, "--out", scores)
    newest = max((run_dir / "checkpoints").glob("step-*"))
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run_dir / "summary.json").read_text())
    return {
        "checksum": json.loads((newest / "manifest.json").read_text())["checksum"],
        "metrics": [without_times(line) for line in lines],
        "plan": json.loads((run_dir / "plan.json").read_text()),
        "predicted": summary.get("predicted"),
        "unlisted": summary.get("unknown_collectives", summary.get("unlisted")),
        "summary": {
            key: value
            for key, value in without_times(summary).items()
            if key not in ("unknown_collectives", "unlisted")
        },
        "scores": scores.read_text() if done.returncode == 0 else done.stderr,
    }


def make_data(checkout: Checkout, folder: Path) -> Path:
    """A prepared dataset of 12,000 rows."""
    raw, data = folder / "raw", folder / "data"
    checkout.succeed("data", "synth", "--out", raw, "--rows", 12000, "--files", 3, "--scale", 0.001)
    checkout.succeed("prepare", raw / "*.tsv", "--out", data, "--test-fraction", 0.2, "--hash-rows", 2000)
    return data


def compare_runs(before: Checkout, after: Checkout, folder: Path, numbers: Sequence[int]) -> Ledger:
    """Sampled configs; every fourth of them also killed and resumed, by one checkout and by both."""
    ledger = Ledger("runs")
    data, run_dir = make_data(after, folder), folder / "run"
    num_refused = 0
    for number in numbers:
        document, ranks = sampled_config(number, data)
        names = document["model"]["name"], document["embedding"]["optimizer"]["name"], document["embedding"]["dtype"]
        where = f"config {number} ({', '.join(names)}, {ranks} ranks, plan {document.get('plan', 'none')})"
        expected = results(Way("before", [before]), document, ranks, run_dir)
        num_refused += "refused" in expected
        found = results(Way("after", [after]), document, ranks, run_dir)
        _compare(ledger, where, expected, found)
        if "predicted" in expected and "predicted" in found:
            compare_predicted(ledger, where, document, ranks, (expected, found))
        if number % 4 == 0 and "refused" not in expected:
            for way in (
                Way("killed and resumed", [after, after]),
                Way("killed before, resumed after", [before, after]),
            ):
                found = results(way, document, ranks, run_dir)
                _compare(ledger, f"{where}, {way.name}", expected, found)
        ended = str(expected.get("refused", expected.get("checksum")))[:70]
        print(f"{where}: {ended}; {len(ledger.differences)} differences", file=sys.stderr, flush=True)
    ledger.figures.append(f"{len(numbers)} configs, {num_refused} of them refused by both in the same words")
    return ledger


def _compare(ledger: Ledger, where: str, expected: dict[str, Any], found: dict[str, Any]) -> None:
    for key in expected if "refused" not in found else {"refused": 0}:
        if key == "plan" and "plan" in found:
            compare_plan_files(ledger, where, expected[key], found[key])
        elif key != "predicted":
            ledger.compare(where, key, expected.get(key), found.get(key))


def compare_predicted(
    ledger: Ledger, where: str, document: dict[str, Any], ranks: int, runs: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """Predicted steps of a run may differ by the seconds of the transfers that no list knew, and by nothing else."""
    old, new = (run["predicted"]["step_s"] for run in runs)
    if ranks == 1:
        ledger.compare(where, "predicted step", old, new)
        return
    config = RunConfig.model_validate({**document, "run_dir": "run"})
    per_host = runs[0]["plan"].get("devices_per_host") or ranks
    topology = Topology(num_hosts=ranks // per_host, devices_per_host=per_host)
    workload = find_run_plan(config, topology, None, None).problem.workload
    plan = Plan.from_dict(runs[0]["plan"], workload.tables, ranks)
    plan = replace(plan, devices_per_host=per_host)
    listed_before = replace(workload, dense_exchange=DenseExchange())
    ledger.num_compared += 1
    expected = predict(plan, listed_before, topology).step_s - agreement_seconds(topology, num_flags=0)
    expected_now = predict(plan, workload, topology).step_s
    is_explained = abs(old - expected) < EXACT * old and abs(new - expected_now) < EXACT * new
    told = f"{1e3 * old:.4f} ms became {1e3 * new:.4f}, by the list {1e3 * expected:.4f} and {1e3 * expected_now:.4f}"
    ledger.differ(where, "predicted step, by the list" if is_explained else "predicted step", told)


def compare_main(before: Checkout, after: Checkout, folder: Path) -> Ledger:
    """The main job at a tenth of its rows: raw log, prepared data, trained model, predictions."""
    ledger = Ledger("main")
    found = []
    for checkout in (before, after):
        shutil.rmtree(folder / "job", ignore_errors=True)
        found.append(_main_job(checkout, folder / "job"))
    for key in found[0]:
        ledger.compare("main job", key, found[0][key], found[1][key])
    ledger.figures.append(f"checksum {found[1]['checksum']}, test AUC {found[1]['summary']['test']['auc']:.6f}")
    return ledger


def main_config(checkout: Checkout, data: Path) -> dict[str, Any]:
    """The config of the main job, for a tenth of its steps."""
    document: dict[str, Any] = yaml.safe_load((checkout.root / "examples/configs/main.yaml").read_text())
    document["data"] = {"dir": str(data)}
    document["train"] |= {"log_every_steps": 10, "max_steps": MAIN_STEPS}
    document["checkpoint"] = {"every_steps": 30}
    for part in ("embedding", "dense"):
        document[part]["schedule"]["decay_start_step"] = MAIN_STEPS // 2
    return document


def _main_job(checkout: Checkout, folder: Path) -> dict[str, Any]:
    raw, data = folder / "raw", folder / "data"
    checkout.succeed("data", "synth", "--out", raw, "--rows", 180_000, "--files", 9, "--scale", 0.01)
    for path in raw.iterdir():
        os.utime(path, (LONG_AGO_S, LONG_AGO_S))  # which prepare.json keeps
    checkout.succeed("prepare", raw / "*.tsv", "--out", data, "--test-files", raw / "day_8.tsv")
    left = results(Way(checkout.name, [checkout]), main_config(checkout, data), 1, folder / "run")
    return {"raw files": files_of(raw), "prepared files": files_of(data), **left}
