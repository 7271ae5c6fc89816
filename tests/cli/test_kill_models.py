"""Tests of models with dropout and norms, killed at random moments on 1 and 2 ranks: they end with the bits of
undisturbed runs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from average_oracle import KINDS
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
    options = dropout_and_norms(model) | ({"dense__sharding": "fsdp"} if size > 1 else {})
    check_killed(tiny, tmp_path, f"{model}/{size}/{seed}", size, seed, num_kills, options)


@pytest.mark.soak
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_with_averaged_weights(tiny: Path, tmp_path: Path, kind: str, size: int) -> None:
    options = dropout_and_norms("final") | KINDS[kind] | ({"dense__sharding": "fsdp"} if size > 1 else {})
    check_killed(tiny, tmp_path, f"{kind}/{size}", size, 0, 2, options)


def check_killed(
    tiny: Path, folder: Path, name: str, size: int, seed: int, num_kills: int, options: dict[str, Any]
) -> None:
    """Compare a run with one that is killed at random moments, which `name` determines."""
    draw = random.Random(name)
    moments = [draw.choice(["training", "saving", "evaluating"]) for _ in range(num_kills)]
    whole = folder / "whole"
    config = write_config(whole / "c.yaml", settings(tiny, whole / "run", **COMMON, **options))
    Command(whole, "train", config, "--nproc", size).succeed()
    run_dir = killed_and_resumed(folder / "killed", tiny, size, moments, seed=seed, **options)
    assert "resuming from step" in (folder / "killed/last/err.txt").read_text()
    check_equal(run_dir, whole / "run")
