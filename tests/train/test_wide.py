"""Runs of many features: the work grows in proportion to the number of features."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meseta import checkpoint
from meseta.checkpoint import saving
from meseta.comm import World
from meseta.config import RunConfig
from meseta.data.dataset.dataset import Dataset
from meseta.data.prepare import PrepareOptions, prepare
from meseta.embedding import EmbeddingBagCollection
from meseta.errors import duplicates
from meseta.report import data_statistics
from meseta.spec import FeatureSpec, TableSpec
from meseta.train.trainer import Trainer
from small_run import settings


def wide_data(folder: Path, num_features: int) -> Path:
    """Prepare 40 rows of one dense and `num_features` sparse features."""
    names = [f"c{f}" for f in range(num_features)]
    lines = [",".join(["label", "price", *names])]
    for row in range(40):
        lines.append(
            ",".join([str(row % 2), f"{row / 7:.3f}", *(f"v{(row * 7 + f) % 11}" for f in range(num_features))])
        )
    source = folder / f"wide{num_features}.csv"
    source.write_text("\n".join(lines) + "\n")
    out = folder / f"wide{num_features}"
    prepare(PrepareOptions(sources=[str(source)], out=out, hash_rows=10, sparse=names, dense=["price"]))
    return out


def calls_of_run(data: Path, run_dir: Path) -> int:
    """Return the number of Python functions that a whole run calls in this thread."""
    config = RunConfig.model_validate(settings(data, run_dir, model__name="logistic_regression", train__batch_size=16))
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        Trainer(config, World.current()).run()
    finally:
        sys.setprofile(None)
    return calls


def test_a_run_takes_calls_in_proportion_to_its_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    widths, num_drawn = (20, 40, 80), 15
    monkeypatch.setattr(data_statistics, "MAX_DRAWN_FEATURES", num_drawn)
    datasets = [wide_data(tmp_path, width) for width in widths]
    calls_of_run(datasets[0], tmp_path / "first")  # calls that happen once per process
    calls = [calls_of_run(data, tmp_path / f"run{data.name}") for data in datasets]
    per_feature = [(b - a) / (d - c) for a, b, c, d in zip(calls, calls[1:], widths, widths[1:], strict=False)]
    assert per_feature[1] <= 1.1 * per_feature[0], calls
    page = (tmp_path / f"run{datasets[-1].name}" / "report.html").read_text()
    assert 0 < page.count('class="chart bars"') <= 2 * num_drawn
    assert f"The {num_drawn} features with the most rows have bars" in page
    assert Dataset.load(datasets[-1]).sparse[-1].name in page


def test_small_tables_of_a_checkpoint_are_exchanged_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [TableSpec(name=f"t{t}", num_embeddings=10, embedding_dim=4) for t in range(60)]
    features = [FeatureSpec(name=table.name, table=table.name) for table in tables]
    embeddings = EmbeddingBagCollection(tables, features)
    exchanged: list[int] = []

    def counted(world: World, jobs: Any, packed: torch.Tensor) -> Any:
        exchanged.append(len(jobs))
        return exchange(world, jobs, packed)

    exchange = saving.exchange
    monkeypatch.setattr(saving, "exchange", counted)
    shards = {"plan": embeddings.plan, "shards": embeddings.shards}
    checkpoint.save(tmp_path / "small", world=World.single(), step=1, dense={}, state={}, **shards)
    assert exchanged == [60]
    monkeypatch.setattr(saving, "BLOCK_BYTES", 2 * 10 * (4 + 1) * 4)  # rows and sums of two tables
    exchanged.clear()
    checkpoint.save(tmp_path / "large", world=World.single(), step=1, dense={}, state={}, **shards)
    assert exchanged == [2] * 30
    names = [sorted(path.relative_to(root) for path in root.rglob("*.arrow")) for root in tmp_path.iterdir()]
    assert names[0] == names[1] and len(names[0]) == 60


class CountingName(str):
    """String that counts comparisons with other names."""

    __slots__ = ()
    compared = 0

    def __eq__(self, other: object) -> bool:
        CountingName.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_duplicate_names_are_found_without_comparing_all_pairs() -> None:
    names = [CountingName(f"name{i}") for i in range(1000)]
    assert duplicates(names) == [] and CountingName.compared < 4000
    assert duplicates(["b", "a", "b", "c", "a", "b"]) == ["b", "a"]
