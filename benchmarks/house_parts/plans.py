"""Plans of 20 workloads and of the published models: the same rows in the same places, and how predictions differ."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import yaml
from house_parts.checkouts import Checkout, Ledger, first_difference
from house_parts.listed import agreement_seconds

from meseta.spec import Topology
from meseta.spec.optimizer import USED_FIELDS

NUM_WORKLOADS = 20
SCRIPT = Path(__file__).with_name("plan_cases.py")
EXACT = 1e-9
"""Relative: sums are taken in another order."""
BINDS = 0.9
"""Of the room of a device: from here on, memory decides where rows go."""
MACHINES = ((1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (4, 8), (2, 1))


def draw_workload(number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Workload `number` and its machines, as documents: every third of them with hardly enough memory."""
    draw = random.Random(f"plans {number}")
    hosts, per_host = MACHINES[number % len(MACHINES)]
    tables, features, num_bytes = {}, {}, 0.0
    wide = draw.random() < 0.2
    for index in range(draw.randint(3, 30)):
        rows, dim = int(10 ** draw.uniform(1.5, 7.2)), 2 ** draw.randint(2, 7)
        dtype = "float64" if wide else draw.choice(["float32", "float32", "float16", "bfloat16"])
        optimizer = draw.choice(tuple(USED_FIELDS))
        tables[f"t{index}"] = {"num_embeddings": rows, "embedding_dim": dim, "dtype": dtype, "optimizer": optimizer}
        num_bytes += 4.0 * rows * dim
        for twin in range(draw.choice([1, 1, 1, 2])):
            features[f"f{index}_{twin}"] = entry = {
                "table": f"t{index}",
                "pooling": draw.choice(["sum", "sum", "mean", "none"]),
                "weighted": False,
                "pooling_factor": round(draw.lognormvariate(0.7, 1.0) + 0.1, 3),
                "is_sorted": draw.random() < 0.5,
            }
            if draw.random() < 0.4:
                hot = round(draw.uniform(0.01, 0.2), 3)
                entry["reuse"] = {"window_samples": 4096, "edges": [0, 1, 16], "rows": [1.0 - hot, 0.0, hot],
                                  "lookups": [0.2, 0.0, 0.8]}  # fmt: skip
    machines: dict[str, Any] = {
        "num_hosts": hosts, "devices_per_host": per_host, "device": draw.choice(["cpu", "a100", "h100"]),
    }  # fmt: skip
    if number % 3 == 2:
        machines |= {"hbm_bytes": int(2e8 + 1.2 * num_bytes / (hosts * per_host)), "host_bytes": 400_000_000_000}
    elif number % 3 == 1:
        machines["hbm_bytes"] = 80_000_000_000
    workload = {
        "format": "meseta.workload/1", "batch_size": 2 ** draw.randint(9, 16), "tables": tables, "features": features,
        "dense": {"flops_per_sample": round(10 ** draw.uniform(5, 8)), "parameter_bytes": 4 * draw.randint(1, 10**6),
                  "activation_bytes_per_sample": draw.randint(0, 10**5)},
    }  # fmt: skip
    return workload, machines


def compare_plans(before: Checkout, after: Checkout, folder: Path) -> Ledger:
    """The plans of documents, by the command and by the package; and those of the published models."""
    ledger = Ledger("plans")
    folder.mkdir(parents=True, exist_ok=True)
    machines = {}
    for number in range(NUM_WORKLOADS):
        workload, machine = draw_workload(number)
        name = f"workload-{number:02}"
        machines[name] = machine
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(workload))
        (folder / f"machines-{number:02}.yaml").write_text(yaml.safe_dump(machine))
    for name in machines:
        compare_plan_files(ledger, name, *(_written(checkout, folder, name) for checkout in (before, after)))
    for what in ("documents", "published"):
        old, new = (json.loads(checkout.python(SCRIPT, what, folder)) for checkout in (before, after))
        for name in old:
            compare_planned(ledger, name, old[name], new[name], machines.get(name))
    return ledger


def compare_plan_files(ledger: Ledger, name: str, old: Any, new: Any) -> None:
    """Two plans as documents: all equal, but for the last digits of what tables cost."""
    old, new = copy.deepcopy(old), copy.deepcopy(new)
    costs = [[entry.pop("cost", None) for entry in plan["tables"].values()] if isinstance(plan, dict) else []
             for plan in (old, new)]  # fmt: skip
    ledger.compare(name, "plan file", old, new)
    if old != new or costs[0] == costs[1]:
        return
    is_near = all(abs(was - now) <= EXACT * abs(was) for was, now in zip(*costs, strict=True))
    told = next(f"{was!r} became {now!r}" for was, now in zip(*costs, strict=True) if was != now)
    ledger.differ(name, "last digits of a cost" if is_near else "cost", told)


def _written(checkout: Checkout, folder: Path, name: str) -> Any:
    out = folder / "plan.json"
    out.unlink(missing_ok=True)
    machines = folder / f"{name.replace('workload', 'machines')}.yaml"
    done = checkout.meseta("plan", folder / f"{name}.yaml", "--topology", machines, "--out", out)
    return json.loads(out.read_text()) if done.returncode == 0 else done.stderr


def compare_planned(
    ledger: Ledger, name: str, old: dict[str, Any], new: dict[str, Any], machines: dict[str, Any] | None
) -> None:
    """Two plans of one workload: places, seconds and bytes."""
    if "step_s" not in old or "step_s" not in new:
        ledger.compare(name, "what does not fit", old, new)
        return
    added = sum(spent for key, spent in new["collectives"].items() if key not in old["collectives"])
    ledger.num_compared += 1
    if old["shards"] != new["shards"]:
        told = f"{1e3 * old['step_s']:.9g} ms became {1e3 * new['step_s']:.9g} ms, {1e3 * added:.6g} of them new"
        is_alike = abs(new["step_s"] - old["step_s"] - added) <= EXACT * old["step_s"]
        what = "shards, as dear" if is_alike else "shards" + _binding(old, machines)
        ledger.differ(name, what, f"{told}; {first_difference(old['shards'], new['shards'])}")
        ledger.figures.append(f"{name}: other places: {told}")
        return
    for collective in old["collectives"]:
        pair = old["collectives"][collective], new["collectives"].get(collective, 0.0)
        ledger.num_compared += 1
        if abs(pair[0] - pair[1]) > EXACT * pair[0]:
            ledger.differ(name, f"seconds of {collective}", f"{pair[0]} became {pair[1]}")
    compare_seconds(ledger, name, old, new, machines)
    ledger.num_compared += 1
    peaks = {tier: max(new["peak"][tier], default=0.0) - max(old["peak"][tier], default=0.0) for tier in old["peak"]}
    for phase in old["phases"]:
        if not _are_equal(old["phases"][phase], new["phases"][phase]):
            told = {memory: max(new["phases"][phase][memory], default=0.0) - max(held, default=0.0)
                    for memory, held in old["phases"][phase].items()}  # fmt: skip
            ledger.differ(name, f"bytes of {phase}", str(told))
    ledger.figures.append(
        f"{name}: {len(old['shards'])} tables, {len(old['compute_s'])} ranks: step {1e3 * old['step_s']:.6g} ms "
        f"{1e3 * (new['step_s'] - old['step_s']):+.6g}, bound {1e3 * (new['bound_s'] - old['bound_s']):+.6g}, peak "
        f"{max(old['peak']['hbm']) / 1e6:.6g} MB {peaks['hbm'] / 1e6:+.6g}"
    )


def compare_seconds(
    ledger: Ledger, name: str, old: dict[str, Any], new: dict[str, Any], machines: dict[str, Any] | None
) -> None:
    """The step is longer by the collectives that nobody counted; of a document, by the agreement on the loss."""
    added = {key: spent for key, spent in new["collectives"].items() if key not in old["collectives"]}
    ledger.num_compared += 2
    difference = new["step_s"] - old["step_s"]
    expected = sum(added.values())
    if abs(difference - expected) > EXACT * old["step_s"]:
        ledger.differ(name, "predicted step", f"{difference:+} s, by the list {expected:+} s ({', '.join(added)})")
    elif added:
        ledger.differ(name, f"predicted step, by {' and '.join(added)}", f"{difference:+} s")
    if machines is not None and set(added) <= {"agree"}:
        stated = agreement_seconds(Topology(**machines), num_flags=0)
        if abs(stated - expected) > EXACT * old["step_s"]:
            ledger.differ(name, "agreement", f"{expected} s, by docs/cost_model.md {stated} s")


def _binding(old: dict[str, Any], machines: dict[str, Any] | None) -> str:
    """Whether the room of a device decides."""
    room = (machines or {}).get("hbm_bytes")
    return ", where memory binds" if room and max(old["peak"]["hbm"]) > BINDS * room else ""


def _are_equal(old: Any, new: Any) -> bool:
    if isinstance(old, dict):
        return old.keys() == new.keys() and all(_are_equal(old[key], new[key]) for key in old)
    return all(abs(a - b) <= EXACT * max(abs(a), 1.0) for a, b in zip(old, new, strict=True))
