"""`meseta plan CONFIG` finds the plan of a run with that config, and predicts the same step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from distributed.pool import RankPool
from meseta.config import RunConfig
from meseta.config.models import MODEL_NAMES
from meseta.planner import PlanResult
from meseta.spec import CostModel, MesetaError, Topology
from meseta.spec.constraints import Constraints
from meseta.train.setup.planning import find_run_plan
from sampling import sample
from small_run import settings, train

MORE: dict[str, dict[str, Any]] = {
    "batch norm": {"model__batch_norm": True, "model__dropout": 0.2},
    "parts of a batch": {"train__accumulate_steps": 3},
    "cut dense part": {"dense__sharding": "fsdp", "dense__clip_norm": 0.5},
    "one norm": {"train__clip_norm": 0.5, "train__accumulate_steps": 2},
    "lamb": {"dense__sharding": "fsdp", "dense__optimizer__name": "lamb"},
    "float64 rows": {"embedding__dtype": "float64"},
    "bfloat16 rows": {"embedding__dtype": "bfloat16", "embedding__optimizer__name": "adam"},
    "large batch": {"train__batch_size": 3000},
    "no interaction": {"model__interaction": "none"},
    "own model": {"model": {"name": "own_models:Regularised", "embedding_dim": 4}},
    "loss of the global batch": {"model": {"name": "own_models:GlobalLoss", "embedding_dim": 4}},
    "constraints": {"planner__constraints": "constraints"},
    "room": {"planner__topology": "small"},
    "nothing hidden": {"pipeline__overlap": "off"},
    "some hidden": {"pipeline__overlap": ["ids", "dense"], "train__accumulate_steps": 2},
}
CASES = {**{name: {"model__name": name} for name in MODEL_NAMES}, **MORE}
FILES: dict[str, dict[str, Any]] = {
    "topology": {"devices_per_host": 2, "hbm_bytes": 10**9, "host_bytes": 10**9},
    "small": {"devices_per_host": 2, "hbm_bytes": 3 * 10**5},
    "constraints": {"tables": {"*": {"sharding": ["row_wise", "column_wise"]}}},
}


def planned(config: RunConfig) -> PlanResult:
    """Return the plan for the files that the config names."""
    files = config.planner
    assert files.topology is not None
    rules = Constraints() if files.constraints is None else Constraints.load(files.constraints)
    cost_model = None if files.cost_model is None else CostModel.load(files.cost_model)
    return find_run_plan(config, Topology.load(files.topology), cost_model, rules)


@pytest.mark.parametrize("name", sample(CASES, 2, seed=1007))
def test_a_run_makes_the_displayed_plan(
    ranks: Callable[[int], RankPool], tiny: Path, tmp_path: Path, name: str
) -> None:
    document = settings(tiny, tmp_path / "run", train__max_steps=2, **{"planner__topology": "topology", **CASES[name]})
    for key, file in document["planner"].items():
        document["planner"][key] = str(tmp_path / f"{file}.yaml")
        (tmp_path / f"{file}.yaml").write_text(yaml.safe_dump(FILES[file]))
    before = planned(RunConfig.model_validate(document))
    [summary, _] = ranks(2).run(train, document)
    before.plan.save(tmp_path / "plan.json")
    assert (tmp_path / "run/plan.json").read_bytes() == (tmp_path / "plan.json").read_bytes()
    assert summary["predicted"]["step_s"] == before.prediction.step_s
    assert summary["predicted"]["seconds"] == {key: list(value) for key, value in before.prediction.seconds.items()}
    assert summary["predicted"]["overlap"] == list(before.problem.workload.overlap) == summary["overlap"]["hidden"]


def test_one_process_makes_the_displayed_plan(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "topology.yaml").write_text("hbm_bytes: 1e9\n")
    document = settings(tiny, tmp_path / "run", planner__topology=str(tmp_path / "topology.yaml"), train__max_steps=2)
    before = planned(RunConfig.model_validate(document))
    summary = train(document)
    before.plan.save(tmp_path / "plan.json")
    assert (tmp_path / "run/plan.json").read_bytes() == (tmp_path / "plan.json").read_bytes()
    assert summary["predicted"]["step_s"] == before.prediction.step_s


def test_disk_tables_of_a_run_get_cache_rows(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "topology.yaml").write_text("hbm_bytes: 1e9\ndisk_bytes: 1e9\n")
    (tmp_path / "constraints.yaml").write_text("tables: {'*': {tiers: disk}}\n")
    files = {f"planner__{name}": str(tmp_path / f"{name}.yaml") for name in ("topology", "constraints")}
    document = settings(tiny, tmp_path / "run", **files, train__max_steps=2)
    with pytest.raises(MesetaError, match="the topology has none of its tiers"):
        planned(RunConfig.model_validate(document))  # storage.dir is missing
    document["storage"] = {"dir": str(tmp_path / "rows")}
    before = planned(RunConfig.model_validate(document))
    summary = train(document)
    written = json.loads((tmp_path / "run/plan.json").read_text())["tables"]
    shown = before.plan.to_dict()["tables"]
    assert {name: entry["shards"] for name, entry in written.items()} == {n: e["shards"] for n, e in shown.items()}
    shards = [shard for entry in before.plan.tables for shard in entry.shards]
    assert all(shard.tier == "disk" and shard.cache_rows for shard in shards)
    assert summary["predicted"]["misses"] == dict(before.prediction.cache_misses)
    by_hand = {**document, "run_dir": str(tmp_path / "other"), "planner": {}}
    by_hand["plan"] = {"tables": {"*": {"sharding": "table_wise", "tier": "disk"}}}
    train(by_hand)
    written = json.loads((tmp_path / "other/plan.json").read_text())["tables"]
    assert all(shard["cache_rows"] >= 1 for entry in written.values() for shard in entry["shards"])
