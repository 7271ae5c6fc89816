"""Plans of TorchRec's planner, which runs in its own interpreter."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meseta.spec import Plan, Shard, ShardingType, TablePlan, Topology, Workload

PEER = """
import json, resource, sys, time
import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

def plan(task):
    tables = [
        EmbeddingBagConfig(
            name=t["name"], embedding_dim=t["dim"], num_embeddings=t["rows"], feature_names=["f_" + t["name"]]
        )
        for t in task["tables"]
    ]
    module = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    constraints = {
        t["name"]: ParameterConstraints(pooling_factors=[t["pooling"]], compute_kernels=task["kernels"])
        for t in task["tables"]
    }
    topology = Topology(
        world_size=task["ranks"], local_world_size=task["per_host"], compute_device="cuda", hbm_cap=task["hbm_bytes"],
        **task["bandwidths"],
    )
    start = time.perf_counter()
    planner = EmbeddingShardingPlanner(
        topology=topology, batch_size=task["batch_size"] // task["ranks"], constraints=constraints
    )
    answer = planner.plan(module, [EmbeddingBagCollectionSharder()])
    seconds = time.perf_counter() - start
    places = {}
    for parameters in answer.plan.values():
        for name, one in parameters.items():
            shards = [] if one.sharding_spec is None else one.sharding_spec.shards
            places[name] = {
                "sharding": one.sharding_type,
                "shards": [[list(s.shard_offsets), list(s.shard_sizes), s.placement.rank()] for s in shards],
            }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "peak_bytes": peak, "tables": places}

for task in json.load(sys.stdin):
    try:
        answer = plan(task)
    except Exception as error:
        words = str(error).strip().splitlines()
        answer = {"failed": type(error).__name__ + ": " + (words[0] if words else "")}
    print("PLAN " + json.dumps(answer), flush=True)
"""


@dataclass(frozen=True, kw_only=True)
class Asked:
    workload: Workload
    topology: Topology
    bandwidths: Mapping[str, float] = field(default_factory=dict)
    """Arguments of TorchRec's Topology in bytes per millisecond. Missing ones keep their defaults."""
    kernels: tuple[str, ...] | None = None
    """Compute kernels that may be used. `None` means all."""

    def to_dict(self) -> dict[str, Any]:
        pooling = {f.table: self.workload.load(f).pooling_factor for f in self.workload.features}
        tables = [
            {"name": t.name, "dim": t.embedding_dim, "rows": t.num_embeddings, "pooling": pooling[t.name]}
            for t in self.workload.tables
        ]
        return {
            "tables": tables,
            "ranks": self.topology.num_ranks,
            "per_host": self.topology.devices_per_host,
            "hbm_bytes": self.topology.hbm_bytes,
            "batch_size": self.workload.batch_size,
            "bandwidths": dict(self.bandwidths),
            "kernels": None if self.kernels is None else list(self.kernels),
        }


@dataclass(frozen=True)
class Answer:
    plan: Plan
    seconds: float
    peak_bytes: float


def ask(tasks: Sequence[Asked], python: str, timeout_s: float) -> list[Answer | str]:
    """Plan all tasks in one process on one core. Returns an answer or an error message for each."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", PEER],
            input=json.dumps([task.to_dict() for task in tasks]),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired:
        return [f"no plan in {timeout_s:.0f} s"] * len(tasks)
    lines = [line.removeprefix("PLAN ") for line in done.stdout.splitlines() if line.startswith("PLAN ")]
    if len(lines) != len(tasks):
        words = done.stderr.strip().splitlines()
        return [words[-1] if words else f"exit code {done.returncode}"] * len(tasks)
    return [_answer(task, json.loads(line)) for task, line in zip(tasks, lines, strict=True)]


def _answer(task: Asked, reply: dict[str, Any]) -> Answer | str:
    if "failed" in reply:
        return str(reply["failed"])
    plan = translate(reply["tables"], task.workload, task.topology)
    return Answer(plan, reply["seconds"], reply["peak_bytes"])


def translate(tables: dict[str, dict[str, Any]], workload: Workload, topology: Topology) -> Plan:
    """Convert TorchRec's plan. Columns are rounded to multiples of 16, which our shards require."""
    entries = []
    for table in workload.tables:
        entry = tables[table.name]
        rows, columns = (0, table.num_embeddings), (0, table.embedding_dim)
        sharding = ShardingType("grid" if entry["sharding"] == "grid_shard" else str(entry["sharding"]))
        if sharding is ShardingType.DATA_PARALLEL:
            everywhere = tuple(range(topology.num_ranks))
            shards = [Shard(table=table.name, rows=rows, columns=columns, ranks=everywhere)]
        else:
            shards = []
            for (row, column), (num_rows, num_columns), rank in entry["shards"]:
                span = tuple(
                    min(round(at / 16) * 16, columns[1]) if at < columns[1] else at
                    for at in (column, column + num_columns)
                )
                if num_rows and span[0] < span[1]:
                    shards.append(Shard(table=table.name, rows=(row, row + num_rows), columns=span, ranks=(rank,)))
        entries.append(TablePlan(table=table.name, sharding=sharding, shards=tuple(shards)))
    return Plan(num_ranks=topology.num_ranks, tables=tuple(entries), devices_per_host=topology.devices_per_host)
