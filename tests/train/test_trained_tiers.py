"""A trained model is opened in the tiers of its run, since its tables may fit nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meseta.comm import World
from meseta.storage import TieredShard
from meseta.train.evaluate import evaluate
from meseta.train.trained_model import load_trained
from small_run import settings, train


@pytest.mark.parametrize("is_file", [False, True])
def test_offloaded_tables_stay_offloaded(tiny: Path, tmp_path: Path, is_file: bool) -> None:
    """The plan is in the config, or in a file."""
    plan: Any = {"tables": {"user": {"sharding": "row_wise", "tier": "disk", "cache_rows": 100}, "*": "table_wise"}}
    if is_file:
        (tmp_path / "plan.yaml").write_text(str(plan))
        plan = str(tmp_path / "plan.yaml")
    document = settings(tiny, tmp_path / "run", train__max_steps=6, plan=plan, storage={"dir": str(tmp_path / "rows")})
    expected = train(document)["test"]
    trained = load_trained(tmp_path / "run", "test", World.single())
    metrics = evaluate(trained.model, trained.reader, trained.world, trained.config.metrics, trained.logit_shift)
    assert metrics.to_dict(include_reliability=False)["logloss"] == expected["logloss"]
    shards = trained.model.embeddings.shards
    assert [shard.spec.name for shard in shards if isinstance(shard, TieredShard)] == ["user"]
    moved = load_trained(tmp_path / "run", "test", World.single(), storage_dir=tmp_path / "other")
    assert all(isinstance(shard, TieredShard) for shard in moved.model.embeddings.shards)
    again = evaluate(moved.model, moved.reader, moved.world, moved.config.metrics, moved.logit_shift)
    assert again.to_dict(include_reliability=False)["logloss"] == expected["logloss"]
    assert [shard.shard.cache_rows for shard in shards if isinstance(shard, TieredShard)] == [100]
