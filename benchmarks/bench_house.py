"""Whether a change of the house changed what it makes: this checkout beside another one, which is built.

    python benchmarks/bench_house.py --before CHECKOUT [--parts runs,help,speed] [--configs 40] [--turns 9]

Each checkout runs by its own .venv. Parts:
- runs: sampled configs (models, row optimizers, types, schemes, micro-batches, dropout, batch norm, clipping, fsdp; 1,
  2 and 4 ranks) trained by both, some in two halves too, the first of them by the other checkout: checksums of the last
  checkpoint, lines of metrics without times, predictions, plans, and what a refused config is told, have to be equal.
- help: what `--help` of every command prints.
- speed: `meseta bench e2e` of both in turns; the ratio of each turn, and the 95 % interval of their mean. An interval
  that ends above 0.98 passes.

Prints one table; exits with 1 where anything differs. Appends speeds to benchmarks/results.csv.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from bench_chosen_split import interval
from record import ROOT, record

from meseta.config.run import MODEL_NAMES
from meseta.spec import ShardingType
from meseta.spec.optimizer import USED_FIELDS

SCHEMES = (*ShardingType, "auto")
TIMES = {"time_s", "samples_per_s", "seconds_per_step", "stages_s"}
CASES = ("d16_2k", "d64_2k")
LEAST_SPEED = 0.98


class Checkout:
    """A built source tree, and the commands of its .venv."""

    def __init__(self, name: str, root: Path) -> None:
        self.name, self.root = name, root

    def meseta(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command; its output, whatever its exit code."""
        command = [str(self.root / ".venv/bin/python"), "-m", "meseta.cli.main", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=self.root)


def sampled_config(number: int, data: Path) -> tuple[dict[str, Any], int]:
    """Config `number` without its run_dir, and its ranks."""
    draw = random.Random(f"house {number}")
    ranks = draw.choice([1, 1, 2, 2, 4])
    optimizer = {"name": draw.choice(tuple(USED_FIELDS)), "lr": 0.05}
    model: dict[str, Any] = {"name": draw.choice(MODEL_NAMES), "embedding_dim": draw.choice([16, 32])}
    if model["name"].startswith("dlrm"):
        model |= {"bottom_mlp": [32, model["embedding_dim"]], "top_mlp": [32]}
    if model["name"] != "logistic_regression":
        model |= {"dropout": draw.choice([0.0, 0.3]), "batch_norm": draw.random() < 0.3}
    dtype = draw.choice(["float32", "float32", "bfloat16", "float64"])
    document: dict[str, Any] = {
        "num_threads": 1,
        "seed": number,
        "data": {"dir": str(data)},
        "model": model,
        "embedding": {"optimizer": optimizer, "dtype": dtype},
        "dense": {"optimizer": {"name": draw.choice(["adam", "sgd", "adagrad"]), "lr": 0.005}},
        "train": {"batch_size": draw.choice([90, 256]), "log_every_steps": 10, "max_steps": 40,
                  "accumulate_steps": draw.choice([1, 1, 3])},
        "checkpoint": {"every_steps": 15, "background": draw.choice(["auto", "always", "never"])},
    }  # fmt: skip
    if draw.random() < 0.3:
        document["dense"]["clip_norm"] = 0.5
    if ranks > 1:
        scheme = str(draw.choice(SCHEMES))
        hosts = {"devices_per_host": 2} if ranks == 4 else {}
        document["plan"] = scheme if scheme == "auto" else {**hosts, "tables": {"*": scheme}}
        if draw.random() < 0.2:
            document["dense"]["sharding"] = "fsdp"
    return document, ranks


def trained(checkouts: Sequence[Checkout], document: dict[str, Any], ranks: int, run_dir: Path) -> dict[str, Any]:
    """What a run leaves that is trained by the checkouts one after the other, to equal parts; or why it is refused."""
    num_steps = document["train"]["max_steps"]
    for part, checkout in enumerate(checkouts, start=1):
        steps = num_steps * part // len(checkouts)
        config = {**document, "run_dir": str(run_dir), "train": {**document["train"], "max_steps": steps}}
        path = run_dir.with_suffix(".yaml")
        path.write_text(yaml.safe_dump(config))
        done = checkout.meseta("train", str(path), "--nproc", str(ranks))
        if done.returncode:
            return {"refused": [line for line in done.stderr.splitlines() if line.startswith("error")]}
    scores = run_dir / "scores.csv"
    done = checkouts[-1].meseta("predict", str(run_dir), "--out", str(scores))
    newest = max((run_dir / "checkpoints").glob("step-*"))
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run_dir / "summary.json").read_text())
    left = {
        "checksum": json.loads((newest / "manifest.json").read_text())["checksum"],
        "metrics": [{key: value for key, value in line.items() if key not in TIMES} for line in lines],
        "plan": json.loads((run_dir / "plan.json").read_text()),
        "predicted": summary.get("predicted"),
        "scores": scores.read_bytes() if done.returncode == 0 else done.stderr,
    }
    shutil.rmtree(run_dir)
    return left


def runs(before: Checkout, after: Checkout, folder: Path, num_configs: int) -> Iterator[str]:
    """A line for each config whose results differ."""
    for command in (
        ("data", "synth", "--out", str(folder / "raw"), "--rows", "12000", "--files", "3", "--scale", "0.001"),
        ("prepare", str(folder / "raw" / "*.tsv"), "--out", str(folder / "data"), "--test-fraction", "0.2"),
    ):
        if (done := after.meseta(*command)).returncode:
            raise SystemExit(f"{' '.join(command)}: {done.stderr}")
    num_refused = 0
    for number in range(num_configs):
        document, ranks = sampled_config(number, folder / "data")
        ways = {"after": [after], "after in halves": [after, after], "before, then after": [before, after]}
        expected = trained([before], document, ranks, folder / "run")
        num_refused += "refused" in expected
        for way in ways if number % 4 == 0 else ["after"]:
            found = trained(ways[way], document, ranks, folder / "run")
            if way != "after":  # a run of fewer steps evaluates where it ends
                found, kept = ({key: r[key] for key in ("checksum", "scores") if key in r} for r in (found, expected))
            else:
                kept = expected
            differing = [key for key in kept.keys() | found.keys() if kept.get(key) != found.get(key)]
            if differing:
                yield f"config {number} ({document['model']['name']}, {ranks} ranks), {way}: {', '.join(differing)}"
        names = document["model"]["name"], document["embedding"]["optimizer"]["name"]
        ended = str(expected.get("refused", expected.get("checksum")))[:60]
        print(f"config {number}: {', '.join(names)}, {ranks} ranks: {ended}", file=sys.stderr, flush=True)
    print(f"runs: {num_configs} configs, {num_refused} of them refused", file=sys.stderr)


COMMANDS = ("", "prepare", "train", "sweep", "config", "plan", "verify", "eval", "predict", "report", "calibrate",
            "doctor", "data", "data synth", "data check", "data stats", "bench", "bench ops", "bench e2e", "checkpoint",
            "checkpoint list", "checkpoint inspect", "checkpoint verify", "checkpoint diff", "checkpoint export",
            "checkpoint import", "topology")  # fmt: skip


def helps(before: Checkout, after: Checkout) -> Iterator[str]:
    """A line for each command whose help differs."""
    for command in COMMANDS:
        texts = [checkout.meseta(*command.split(), "--help").stdout for checkout in (before, after)]
        if texts[0] != texts[1]:
            yield f"meseta {command} --help differs"


def speed(before: Checkout, after: Checkout, folder: Path, num_turns: int) -> Iterator[str]:
    """A line for each case that is slower."""
    ratios: dict[str, list[float]] = {}
    for turn in range(num_turns):
        rates: dict[str, dict[str, float]] = {}
        for checkout in (before, after) if turn % 2 == 0 else (after, before):
            out = folder / f"{checkout.name}.csv"
            out.unlink(missing_ok=True)
            done = checkout.meseta(
                "bench", "e2e", *CASES, "--no-peers", "--rounds", "1", "--starts", "1", "--out", str(out)
            )
            if done.returncode:
                raise SystemExit(f"{checkout.name}: {done.stderr[-500:]}")
            with out.open() as file:
                rates[checkout.name] = {
                    row["case"]: float(row["value"]) for row in csv.DictReader(file) if row["unit"] == "samples/s"
                }
        for case in rates["before"]:
            ratios.setdefault(case, []).append(rates["after"][case] / rates["before"][case])
    for case, found in ratios.items():
        mean, low, high = interval(found)
        record("house", case, "after / before", mean, "times", peer="at least", peer_value=LEAST_SPEED)
        print(f"speed {case}: {mean:.3f}, 95 % interval {low:.3f} to {high:.3f}, {len(found)} turns")
        if high < LEAST_SPEED:
            yield f"{case}: {mean:.3f}, {low:.3f} to {high:.3f} of the speed before"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout with a .venv")
    parser.add_argument("--parts", default="runs,help,speed")
    parser.add_argument("--configs", type=int, default=40)
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    before, after = Checkout("before", options.before.resolve()), Checkout("after", ROOT)
    table = []
    with tempfile.TemporaryDirectory(prefix="meseta-house-") as name:
        parts: dict[str, Callable[[], Iterator[str]]] = {
            "runs": lambda: runs(before, after, Path(name), options.configs),
            "help": lambda: helps(before, after),
            "speed": lambda: speed(before, after, Path(name), options.turns),
        }
        for part in options.parts.split(","):
            differences = list(parts[part]())
            table.append((part, differences))
    for part, differences in table:
        print(f"{part}: {'equal' if not differences else f'{len(differences)} differ'}")
        for line in differences:
            print(f"  {line}")
    sys.exit(any(differences for _, differences in table))


if __name__ == "__main__":
    main()
