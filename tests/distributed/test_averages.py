"""Averaged weights on several ranks, against numpy averages of the weights after each step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from average_oracle import KINDS, METRICS, average_of, differences, stored_weights
from covering import covering
from meseta.checkpoint import newest
from meseta.comm import World
from meseta.train.trained_model import load_trained
from small_run import settings, train

from .pool import RankPool

Ranks = Callable[[int], RankPool]
PLANS: dict[str, Any] = {
    "mixed": {"tables": {"city": "data_parallel", "item": "column_wise", "tags": "row_wise", "user": "table_wise"}},
    "hot rows": {"tables": {"tags": {"sharding": "hot_replicated", "hot_rows": 3}, "*": "row_wise"}},
    "offloaded": {"tables": {"*": {"sharding": "row_wise", "tier": "cached", "cache_rows": 150}}},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd", "lr": 0.5},
    "adagrad": {"name": "rowwise_adagrad", "lr": 0.5},
    "adam": {"name": "adam", "lr": 0.05},
}
STEPS = 6


def metrics_of(run_dir: Path) -> list[float]:
    evaluation = load_trained(run_dir, "test", World.current()).evaluate().to_dict()
    return [evaluation[key] for key in METRICS]


AXES: dict[str, Any] = {
    "plan": list(PLANS),
    "optimizer": list(OPTIMIZERS),
    "kind": list(KINDS),
    "dense": ["replicated", "fsdp"],
    "batch_norm": [False, True],
    "staleness": [0, 1],
    "accumulate_steps": [1, 2],
}


@pytest.mark.soak
@pytest.mark.parametrize("case", covering(AXES, lambda one, other: True, times=1, seed=0))
def test_run(ranks: Ranks, tiny: Path, tmp_path: Path, case: dict[str, Any]) -> None:
    def document(name: str, **changes: Any) -> dict[str, Any]:
        always = {
            "train__max_steps": STEPS,
            "train__accumulate_steps": case["accumulate_steps"],
            "plan": {"devices_per_host": 2, **PLANS[case["plan"]]},
            "embedding__optimizer": OPTIMIZERS[case["optimizer"]],
            "dense__sharding": case["dense"],
            "pipeline__staleness": case["staleness"],
            "model__name": "dcnv2",
            "model__batch_norm": case["batch_norm"],
            "model__embedding_dim": 32,
        }
        return settings(tiny, tmp_path / name, **always | changes)

    ranks(2).run(train, document("history", checkpoint__every_steps=1, checkpoint__keep_last=STEPS))
    paths = sorted((tmp_path / "history" / "checkpoints").glob("step-*"))
    history = [stored_weights(path, tmp_path / "out") for path in paths]
    ranks(2).run(train, document("run", **KINDS[case["kind"]], train__max_steps=3))
    [summary, _] = ranks(2).run(train, document("run", **KINDS[case["kind"]], train__eval_every_steps=1))
    path = newest(tmp_path / "run" / "checkpoints")
    assert differences(stored_weights(path, tmp_path / "out", states=True), history[-1]) == 0
    averages = stored_weights(path, tmp_path / "out")
    expected = average_of(case["kind"], history)
    averaged = [name for name in expected if ".running_" not in name]  # Batch norm has other statistics.
    assert differences({n: averages[n] for n in averaged}, {n: expected[n] for n in averaged}) < 2e-6
    assert differences(averages, history[-1]) > 1e-3
    for evaluated in ranks(2).run(metrics_of, tmp_path / "run"):
        np.testing.assert_allclose(evaluated, [summary["test"][key] for key in METRICS], rtol=1e-6)
