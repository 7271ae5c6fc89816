"""LightGBM as a baseline of a run, against LightGBM called directly on the Parquet files of the dataset."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from bad_input.commands import run_here
from meseta.config import validate_document
from meseta.data.dataset.dataset import Dataset
from meseta.embedding import EmbeddingBagCollection
from meseta.spec import MesetaError
from meseta.train.setup import baseline_sample, memory
from meseta.train.setup.meta_model import make_meta_model
from meseta.train.setup.specs import make_specs
from small_run import predicted_memory, settings, table_checksums, tiny_with_valid, train, write_config

SINGLE, MULTIPLE = ("user", "item", "city"), "tags"


@pytest.fixture(scope="module")
def data(tiny: Path) -> Path:
    return tiny_with_valid(tiny)


def read_split(data: Path, split: str, single: tuple[str, ...] = SINGLE) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs and labels of a split."""
    features = pq.read_table(data / split)
    dense = [features[name].to_numpy() for name in ("price", "age")]
    ids = [features[name].to_numpy() for name in single]
    lengths = [len(bag) for bag in features[MULTIPLE].to_pylist()]
    return np.column_stack([*dense, *ids, lengths]).astype(np.float64), features["label"].to_numpy()


def direct_metrics(
    data: Path, num_rows: int | None = None, single: tuple[str, ...] = SINGLE
) -> dict[str, tuple[float, float]]:
    """Return (AUC, log loss) by split of LightGBM with default parameters on the first `num_rows` training rows."""
    inputs, labels = read_split(data, "train", single)
    categories = list(range(2, 2 + len(single)))
    rows = lightgbm.Dataset(
        inputs[:num_rows], labels[:num_rows], categorical_feature=categories, params={"verbosity": -1}
    )
    booster = lightgbm.train({"objective": "binary", "verbosity": -1, "num_threads": 1}, rows)
    result = {}
    for split in ("valid", "test"):
        inputs, labels = read_split(data, split, single)
        predictions = booster.predict(inputs)
        result[split] = float(roc_auc_score(labels, predictions)), float(log_loss(labels, predictions))
    return result


def measured_metrics(summary: dict[str, Any]) -> dict[str, tuple[float, float]]:
    return {split: (values["auc"], values["logloss"]) for split, values in summary["baseline"]["splits"].items()}


def test_metrics_are_those_of_lightgbm_alone(data: Path, tmp_path: Path) -> None:
    summary = train(settings(data, tmp_path / "run", train__max_steps=2, report__baseline="lightgbm"))
    expected = direct_metrics(data)
    measured = measured_metrics(summary)
    assert measured.keys() == expected.keys()
    for split, values in expected.items():
        assert measured[split] == pytest.approx(values, abs=1e-6)
    assert summary["baseline"]["num_rows"] == read_split(data, "train")[1].size
    stored = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert stored["baseline"] == summary["baseline"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"{expected['test'][0]:.4f}" in page and "LightGBM, test" in page


def test_it_has_the_features_of_the_model(data: Path, tmp_path: Path) -> None:
    document = settings(data, tmp_path / "run", train__max_steps=2, report__baseline="lightgbm", data__without=["item"])
    measured = measured_metrics(train(document))
    for split, values in direct_metrics(data, single=("user", "city")).items():
        assert measured[split] == pytest.approx(values, abs=1e-6)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "It lacks the features that the model lacks: item." in page


def test_its_memory_is_checked(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = peak_bytes(settings(data, tmp_path / "run"))
    document = settings(data, tmp_path / "run", report__baseline="lightgbm")
    monkeypatch.setattr(baseline_sample, "_MATRIX_BYTES_PER_INPUT", 10**6)
    assert peak_bytes(document) > plain + 10**9
    monkeypatch.setattr(memory, "available_bytes", lambda device: plain + 10**8)
    with pytest.raises(MesetaError, match=r"report.baseline=null needs"):
        train(document)


def peak_bytes(document: dict[str, Any]) -> int:
    """Return the predicted peak memory of a run on one rank, without saves."""
    config, dataset = validate_document(document), Dataset.load(document["data"]["dir"])
    collection = EmbeddingBagCollection(*make_specs(config, dataset))
    outline = make_meta_model(config, dataset, collection)
    return int(predicted_memory(config, dataset, outline, collection.plan, 0).total)


def test_it_changes_no_bit_of_the_run(data: Path, tmp_path: Path) -> None:
    checksums = []
    for baseline in (None, "lightgbm"):
        run_dir = tmp_path / str(baseline)
        summary = train(settings(data, run_dir, train__max_steps=4, report__baseline=baseline))
        assert ("baseline" in summary) == (baseline is not None)
        checksums.append((table_checksums(run_dir), summary["test"]["auc"]))
    assert checksums[0] == checksums[1]


def test_the_number_of_rows_is_limited(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four batches of 130 rows are evenly spaced parts, so a limit of one batch takes the first rows."""
    monkeypatch.setattr(baseline_sample, "MAX_ROWS", 120)
    summary = train(settings(data, tmp_path / "run", train__max_steps=2, report__baseline="lightgbm"))
    assert summary["baseline"]["num_rows"] == 120
    for split, values in direct_metrics(data, 120).items():
        assert measured_metrics(summary)[split] == pytest.approx(values, abs=1e-6)


def test_the_option_prints_its_metrics(data: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.yaml", settings(data, tmp_path / "run", train__max_steps=2))
    ended = run_here("train", str(config), "--baseline", "lightgbm")
    auc, _ = direct_metrics(data)["test"]
    assert ended.code == 0
    assert f"test AUC {auc:.4f}" in next(
        line for line in ended.out.splitlines() if "LightGBM" in line and "test" in line
    )


def test_a_missing_package_is_one_error_line_before_data_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    ended = run_here("train", "--data", "missing.csv", f"run_dir={tmp_path}", "--baseline", "lightgbm")
    assert ended.code == 1 and len(ended.errors) == 1
    assert "pip install 'meseta[lightgbm]'" in ended.errors[0]
