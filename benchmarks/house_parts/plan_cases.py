"""Plans of workload documents and of the published models, as JSON: run by the interpreter of each checkout, in its
benchmarks. It knows public names alone, since modules have moved.

    python plan_cases.py documents FOLDER | published
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from meseta.planner import DoesNotFitError, find_plan
from meseta.spec import FeatureLoad, FeatureSpec, OptimizerSpec, Reuse, TableSpec, Topology, Workload
from meseta.spec.workload import DenseLoad


def read_workload(document: dict[str, Any]) -> Workload:
    """As `meseta plan` reads it."""
    tables = tuple(
        TableSpec(
            name=name,
            num_embeddings=entry["num_embeddings"],
            embedding_dim=entry["embedding_dim"],
            dtype=entry["dtype"],
            optimizer=OptimizerSpec(name=entry["optimizer"]),
        )
        for name, entry in document["tables"].items()
    )
    features, loads = [], {}
    for name, entry in document["features"].items():
        reuse = Reuse(**{k: v if k == "window_samples" else tuple(v) for k, v in entry["reuse"].items()}) if (
            "reuse" in entry) else None  # fmt: skip
        features.append(
            FeatureSpec(name=name, table=entry["table"], pooling=entry["pooling"], weighted=entry["weighted"])
        )
        loads[name] = FeatureLoad(pooling_factor=entry["pooling_factor"], reuse=reuse, is_sorted=entry["is_sorted"])
    return Workload(
        tables=tables,
        features=tuple(features),
        batch_size=document["batch_size"],
        loads=loads,
        dense=DenseLoad(**document["dense"]),
    )


def planned(workload: Workload, topology: Topology) -> dict[str, Any]:
    """Where the rows are, and what it costs."""
    try:
        found = find_plan(workload, topology)
    except DoesNotFitError as error:
        return {"does not fit": error.certificate, "fixes": [fix.description for fix in error.fixes]}
    prediction, cost_model = found.prediction, found.problem.cost_model
    seconds: dict[str, float] = {}
    for own in prediction.collectives:
        num_bytes = own.sent_intra_host + own.sent_inter_host + own.received_intra_host + own.received_inter_host
        spent = own.seconds(cost_model, topology) + cost_model.exchange.copy_byte_s * num_bytes
        seconds[own.name] = seconds.get(own.name, 0.0) + float(spent.max())
    return {
        "shards": [
            [entry.table, str(entry.sharding), [[s.rows, s.columns, s.ranks, s.tier] for s in entry.shards]]
            for entry in found.plan.tables
        ],
        "step_s": prediction.step_s,
        "bound_s": found.bound.step_s,
        "compute_s": prediction.compute_s.tolist(),
        "collectives": seconds,
        "peak": {tier: prediction.peak_bytes(tier).tolist() for tier in ("hbm", "host", "disk")},
        "phases": {
            phase: {tier: np.asarray(held).tolist() for tier, held in tiers.items()}
            for phase, tiers in prediction.memory_bytes.items()
        },
        "origin": found.origin,
    }


def main() -> None:
    found: dict[str, Any] = {}
    if sys.argv[1] == "published":
        sys.path.insert(0, str(Path.cwd()))
        import published_models

        for case in published_models.cases():
            found[case.name] = planned(case.workload, case.topology)
    else:
        for path in sorted(Path(sys.argv[2]).glob("workload-*.yaml")):
            topology = Topology.load(path.with_name(path.name.replace("workload", "machines")))
            found[path.stem] = planned(read_workload(yaml.safe_load(path.read_text())), topology)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
