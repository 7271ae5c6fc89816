"""Whole runs on data with two labels: MMoE on one and two ranks, and one selected label for other models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from meseta.comm import World
from meseta.spec import MesetaError
from meseta.train.predictions import write_predictions
from meseta.train.trained_model import load_trained
from small_run import final_checksum, metrics, settings, train

from .pool import RankPool
from .test_training import ROW_WISE

Ranks = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def clicks_and_buys(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tiny data with labels 'click' and 'buy'. Every buyer has clicked, and 'buy' depends on 'age'."""
    folder = tmp_path_factory.mktemp("labels") / "data"
    shutil.copytree(tiny, folder)
    document = json.loads((folder / "dataset.json").read_text())
    for split in document["splits"].values():
        for file in split["files"]:
            table = pq.read_table(folder / file["path"])
            click = table["label"].combine_chunks()
            buy = pc.if_else(pc.greater(table["age"], 0.0), click, pa.scalar(0.0, pa.float32()))
            table = table.rename_columns(["click" if name == "label" else name for name in table.column_names])
            pq.write_table(table.append_column("buy", buy), folder / file["path"], row_group_size=200)
    document |= {"labels": ["click", "buy"], "label_source": None, "source_form": None}
    (folder / "dataset.json").write_text(json.dumps(document))
    return folder


MMOE: dict[str, Any] = {
    "model__name": "mmoe",
    "model__num_experts": 2,
    "model__expert_mlp": [16],
    "model__tower_mlp": [8],
    "embedding__init__scale": 0.03,
    "embedding__optimizer__lr": 0.02,
    "dense__optimizer__lr": 0.02,
    "train__batch_size": 180,
    "train__epochs": 2,
}


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in metrics(run_dir) if line["kind"] == "train"]


def test_mmoe_learns_every_label_and_is_the_same_on_two_ranks(
    ranks: Ranks, clicks_and_buys: Path, tmp_path: Path
) -> None:
    common = {**MMOE, "embedding__dtype": "float64", "model__dropout": 0.1, "model__batch_norm": True}
    one = train(settings(clicks_and_buys, tmp_path / "one", **common))
    tasks = one["test"]["tasks"]
    assert list(tasks) == ["click", "buy"] and min(task["auc"] for task in tasks.values()) > 0.65
    two = ranks(2).run(train, settings(clicks_and_buys, tmp_path / "two", **common, plan=ROW_WISE))[0]
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=0, atol=1e-10)
    for task in tasks:
        assert two["test"]["tasks"][task]["auc"] == pytest.approx(tasks[task]["auc"], abs=1e-6)
    assert (tmp_path / "one" / "report.html").stat().st_size > 1000


def test_a_cut_off_run_of_mmoe_ends_with_the_same_bits_and_predicts_all_labels(
    clicks_and_buys: Path, tmp_path: Path
) -> None:
    train(settings(clicks_and_buys, tmp_path / "whole", **MMOE))
    train(settings(clicks_and_buys, tmp_path / "cut", **MMOE, train__max_steps=5))
    train(settings(clicks_and_buys, tmp_path / "cut", **MMOE))
    assert final_checksum(tmp_path / "cut") == final_checksum(tmp_path / "whole")
    trained = load_trained(tmp_path / "cut", "test", World.single())
    write_predictions(trained.model, trained.reader, trained.world, tmp_path / "out.parquet")
    names = pq.read_schema(tmp_path / "out.parquet").names
    assert sum("click" in name for name in names) >= 1 and sum("buy" in name for name in names) >= 1


def test_one_label_of_two(clicks_and_buys: Path, tmp_path: Path) -> None:
    with pytest.raises(MesetaError, match=r"'dlrm' predicts one label, but the data have 2 \(click, buy\); choose one"):
        train(settings(clicks_and_buys, tmp_path / "both"))
    assert not (tmp_path / "both" / "checkpoints").exists()
    short = {"train__max_steps": 4, "train__log_every_steps": 1, "model__name": "wide_deep"}
    runs = {
        label: train(settings(clicks_and_buys, tmp_path / label, **short, data__labels=[label]))
        for label in ("click", "buy")
    }
    assert runs["click"]["test"]["num_positives"] > runs["buy"]["test"]["num_positives"] > 0
    with pytest.raises(MesetaError, match="labels, which were 'click' and are 'buy' now"):
        train(settings(clicks_and_buys, tmp_path / "click", **short, data__labels=["buy"]))
    assert load_trained(tmp_path / "buy", "test", World.single()).reader.dataset.labels == ("buy",)
    with pytest.raises(MesetaError, match=r"data.labels: 'clic' .*did you mean 'click'"):
        train(settings(clicks_and_buys, tmp_path / "typo", data__labels=["clic"]))
