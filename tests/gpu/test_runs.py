"""Tests of complete runs on a GPU by the command line. They need the dependencies of Meseta, and are skipped without
them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pydantic", reason="Meseta's own requirements are not installed")

import pyarrow.parquet as pq
from sklearn.metrics import log_loss

from bad_input.commands import Ended, run_here
from small_run import final_checksum, settings, write_config

# MESETA_TEST_DEVICE=cpu runs the tests without a GPU.
DEVICE = os.environ.get("MESETA_TEST_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(),
    reason="no GPU here, or not `pytest tests/gpu`",
)
RUNS: list[dict[str, Any]] = [
    {"model__name": "logistic_regression"},
    {"model__name": "dlrm", "dense__optimizer__name": "lamb", "embedding__optimizer__name": "rowwise_lamb"},
    {"model__name": "dlrm_dcnv2", "embedding__optimizer__name": "adam"},
    {"model__name": "deepfm", "embedding__dtype": "float16"},
    {"model__name": "xdeepfm", "dense__optimizer__name": "adamw"},
    {"model__name": "autoint", "embedding__dtype": "bfloat16", "embedding__optimizer__name": "ftrl"},
    {"model__name": "wide_deep", "dense__dtype": "bfloat16"},
    {"model__name": "dcnv2", "model__cross": "mixture"},
    {"model__name": "gdcn", "model__batch_norm": True},
    {"model__name": "masknet"},
    {"model__name": "finalmlp", "model__dropout": 0.1},
    {"model__name": "final", "model__second_block": [6]},
    {"model__name": "wukong", "dense__clip_norm": 1.0},
    {"model__name": "dhen", "model__ensemble": "weighted", "model__interactions": {"self_attention": 3, "cross": 3}},
]
CACHED = {"user": {"sharding": "table_wise", "tier": "cached", "cache_rows": 150}, "*": "table_wise"}


def command(*arguments: object) -> Ended:
    ended = run_here(*arguments)
    assert ended.code == 0, ended.err
    return ended


def run(tiny: Path, folder: Path, **changes: Any) -> tuple[Path, Path]:
    """Train a run, and return (config, run folder)."""
    changes = {"device": DEVICE, "checkpoint__every_steps": 4, "checkpoint__keep_last": 10, **changes}
    config = write_config(folder / "c.yaml", settings(tiny, folder / "run", **changes))
    command("train", config)
    return config, folder / "run"


def figure_of_test(run_dir: Path, name: str) -> Any:
    """Return a metric of the test split as measured by the run."""
    return json.loads((run_dir / "summary.json").read_text())["test"][name]


def forget_after(run_dir: Path, step: int) -> None:
    """Make the run folder look as if the run had been killed after this step."""
    for path in (run_dir / "checkpoints").iterdir():
        if path.name > f"step-{step:09}":
            shutil.rmtree(path)
    (run_dir / "summary.json").unlink()


@pytest.mark.parametrize("changes", RUNS, ids=lambda changes: "-".join(map(str, changes.values())))
def test_runs_repeat_and_go_on_with_the_same_bits_and_learn_as_on_a_cpu(
    tiny: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    config, first = run(tiny, tmp_path / "first", **changes)
    _, second = run(tiny, tmp_path / "second", **changes)
    whole = final_checksum(first)
    assert final_checksum(second) == whole

    forget_after(first, step=8)
    assert "resuming from step 8" in command("train", config).err
    assert final_checksum(first) == whole

    _, on_cpu = run(tiny, tmp_path / "cpu", **changes, device="cpu")
    tolerance = 1e-2 if "bfloat16" in changes.values() else 1e-3
    for name in ("logloss", "auc"):
        assert figure_of_test(first, name) == pytest.approx(figure_of_test(on_cpu, name), abs=tolerance)


def test_rows_in_dram_are_trained_to_the_same_bits(tiny: Path, tmp_path: Path) -> None:
    _, in_memory = run(tiny, tmp_path / "memory")
    _, cached = run(tiny, tmp_path / "cached", plan={"tables": CACHED})
    lines = [json.loads(line) for line in (cached / "metrics.jsonl").read_text().splitlines()]
    assert [line["row_traffic"]["user"]["num_misses"] for line in lines if line["kind"] == "train"][-1] > 0
    assert final_checksum(cached) == final_checksum(in_memory)


def test_a_run_moves_from_one_device_to_the_other(tiny: Path, tmp_path: Path) -> None:
    _, run_dir = run(tiny, tmp_path)
    logloss = figure_of_test(run_dir, "logloss")
    forget_after(run_dir, step=8)
    run(tiny, tmp_path, device="cpu")
    assert figure_of_test(run_dir, "logloss") == pytest.approx(logloss, abs=1e-4)


def test_one_rank_is_verified_on_its_device(tiny: Path, tmp_path: Path) -> None:
    """Equal bits are guaranteed on the same device, but not between CPU and GPU."""
    config = write_config(tmp_path / "c.yaml", settings(tiny, tmp_path / "run", device=DEVICE))
    command("verify", config, "--nproc", "1", "--steps", "3")


def test_eval_and_predict_equal_the_run(tiny: Path, tmp_path: Path) -> None:
    _, run_dir = run(tiny, tmp_path, model__name="deepfm")
    scores = json.loads(command("eval", run_dir).out)
    for name in ("logloss", "auc", "ne", "num_samples"):
        assert scores[name] == figure_of_test(run_dir, name)
    command("predict", run_dir, "--out", tmp_path / "p.parquet")
    table = pq.read_table(tmp_path / "p.parquet")
    label, prediction = table["label"].to_numpy(), table["prediction"].to_numpy()
    assert log_loss(label, prediction) == pytest.approx(scores["logloss"], abs=1e-6)


@pytest.mark.skipif(DEVICE == "cpu", reason="about GPUs alone")
def test_more_ranks_than_gpus_train_on_the_cpu_and_say_so(tiny: Path, tmp_path: Path) -> None:
    num_gpus = torch.cuda.device_count()
    config = write_config(tmp_path / "c.yaml", settings(tiny, tmp_path / "run"))

    def train(*arguments: str) -> subprocess.CompletedProcess[str]:
        meseta = [sys.executable, "-m", "meseta.cli.main", "train", str(config), "--nproc", str(num_gpus + 1)]
        return subprocess.run([*meseta, *arguments], capture_output=True, text=True, check=False)

    refused = train("device=cuda")
    assert refused.returncode == 1 and f"torch sees {num_gpus} GPU(s) for the {num_gpus + 1} ranks" in refused.stderr
    trained = train()
    assert trained.returncode == 0, trained.stderr
    assert (
        trained.stderr.count(f"this host has {num_gpus + 1} ranks and only {num_gpus} GPU(s), so all ranks use the CPU")
        == 1
    )
