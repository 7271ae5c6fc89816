"""Tests of models with dropout and norms, killed at random moments on 1 and 2 ranks: they end with the bits of
undisturbed runs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cli.processes import Command
from cli.test_kill import COMMON, check_equal, killed_and_resumed
from small_run import MODELS_WITH_NORMS, dropout_and_norms, settings, write_config

CASES = [(model, size, seed) for model in MODELS_WITH_NORMS for size in (1, 2) for seed in (1, 2)]


@pytest.mark.soak  # tests/distributed/test_global_layers.py resumes such a run in `make test`
@pytest.mark.parametrize(
    ("model", "size", "seed", "num_kills"),
    [("final", 1, 0, 1), *((*case, 3) for case in CASES)],
)
def test_killed_with_dropout_and_norms(
    tiny: Path, tmp_path: Path, model: str, size: int, seed: int, num_kills: int
) -> None:
    """Run 28 cases of 3 kills, and one more.

    On 2 ranks the dense part is sharded, and each layer of DHEN is a separate unit.
    """
    draw = random.Random(f"{model}/{size}/{seed}")
    moments = [draw.choice(["training", "saving", "evaluating"]) for _ in range(num_kills)]
    options = dropout_and_norms(model) | ({"dense__sharding": "fsdp"} if size > 1 else {})
    whole = tmp_path / "whole"
    config = write_config(whole / "c.yaml", settings(tiny, whole / "run", **COMMON, **options))
    Command(whole, "train", config, "--nproc", size).succeed()
    run_dir = killed_and_resumed(tmp_path / "killed", tiny, size, moments, seed=seed, **options)
    assert "resuming from step" in (tmp_path / "killed/last/err.txt").read_text()
    check_equal(run_dir, whole / "run")
