"""A chain of runs, each started from the one before, equals one loop that never stopped, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from checkpoint.arrow_rows import read_columns
from meseta import checkpoint
from meseta.comm import World
from meseta.config import RunConfig
from meseta.data.dataset.dataset import Dataset
from meseta.data.prepare import PrepareOptions, prepare
from meseta.data.read.following_reader import FollowingReader
from meseta.data.read.options import ReaderOptions
from meseta.train.setup.build import make_pipeline, make_sharded_model
from meseta.train.state import dense_tensors
from sampling import product, sample
from small_run import manifest, settings, train

from .pool import RankPool

Ranks = Callable[[int], RankPool]
NUM_DAYS, NUM_ROWS = 4, 500
CASES = product(optimizer=["rowwise_adagrad", "adam", "adagrad", "sgd"], dtype=["float32", "bfloat16"], size=[1, 2])


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four days of hashed features, whose last batch is incomplete."""
    folder = tmp_path_factory.mktemp("days")
    draw = np.random.default_rng(3)
    for day in range(NUM_DAYS):
        users, items = draw.integers(0, 400, NUM_ROWS) + 40 * day, draw.integers(0, 30, NUM_ROWS)
        bags = [draw.integers(0, 50, size).tolist() for size in draw.integers(0, 4, NUM_ROWS)]
        columns = {
            "label": (users * items + draw.integers(0, 60, NUM_ROWS)) % 7 < 2,
            "user": pa.array([f"u{i}" for i in users]),
            "item": pa.array([f"i{i}" for i in items]),
            "tags": pa.array(bags, pa.list_(pa.int64())),
        }
        pq.write_table(pa.table(columns), folder / f"{day}.parquet")
        prepare(
            PrepareOptions(
                sources=[str(folder / f"{day}.parquet")], out=folder / "days" / f"day-{day}", test_fraction=0.0,
                hash_rows=150, sparse=["user", "item", "tags"],
            )
        )  # fmt: skip
    return folder / "days"


def document_of(data: Path, run_dir: Path, optimizer: str, dtype: str, **changes: Any) -> dict[str, Any]:
    changes = {"plan": {"tables": {"*": "row_wise"}}, **changes}
    return settings(
        data, run_dir, embedding__optimizer__name=optimizer, embedding__dtype=dtype, data__shuffle=False,
        train__eval_batch_size=90, **changes,
    )  # fmt: skip


def train_without_end(document: dict[str, Any], days: Path, out: Path) -> list[Path]:
    """Train on all days in one loop on the ranks of this process, and save a checkpoint after each day."""
    config, world = RunConfig.model_validate(document), World.current()
    torch.manual_seed(config.seed)
    dataset = Dataset.load(days / "day-0")
    model = make_sharded_model(config, dataset, world)
    pipeline = make_pipeline(config, dataset, model, (), world)
    options = ReaderOptions(batch_size=config.train.batch_size)
    follower = FollowingReader(
        days, options, rank=world.rank, num_ranks=world.size, broadcast=lambda value: world.all_gather_object(value)[0]
    )
    saved = []
    batches_per_day = -(-NUM_ROWS // config.train.batch_size)
    for step, _ in enumerate(pipeline.steps(follower.batches(0.0)), start=1):
        if step % batches_per_day == 0:
            pipeline.synchronize()
            dense = dense_tensors(model, pipeline.optimizer, world)
            state = {"embedding_step": model.embeddings.step}
            shards, plan = model.embeddings.shards, model.embeddings.plan
            path = checkpoint.save(out, world=world, step=step, plan=plan, shards=shards, dense=dense, state=state)
            saved.append(path)
    return saved


def train_daily(documents: list[dict[str, Any]]) -> None:
    for document in documents:
        train(document)


@pytest.mark.parametrize("case", sample(CASES, 1, seed=6), ids=str)
def test_a_chain_equals_one_loop(ranks: Ranks, days: Path, tmp_path: Path, case: dict[str, Any]) -> None:
    size, kind = case["size"], (case["optimizer"], case["dtype"])
    documents = [document_of(days / "day-0", tmp_path / "run-0", *kind)]
    for day in range(1, NUM_DAYS):
        parent = str(tmp_path / f"run-{day - 1}")
        documents.append(document_of(days / f"day-{day}", tmp_path / f"run-{day}", *kind, start_from=parent))
    pool = ranks(size)
    pool.run(train_daily, documents)
    saved = pool.run(train_without_end, documents[0], days, tmp_path / "loop")[0]
    assert len(saved) == NUM_DAYS
    for day, path in enumerate(saved):
        chained, whole = manifest(tmp_path / f"run-{day}"), checkpoint.manifest.read_manifest(path)
        assert {name: entry["checksum"] for name, entry in chained["tables"].items()} == {
            name: entry["checksum"] for name, entry in whole["tables"].items()
        }
        assert chained["state"]["embedding_step"] == whole["state"]["embedding_step"]
        last = checkpoint.latest_complete(tmp_path / f"run-{day}" / "checkpoints")
        one, other = load_file(Path(str(last)) / "dense.safetensors"), load_file(path / "dense.safetensors")
        parts = [name for name in one if name.startswith(("model.", "optimizer."))]
        assert sorted(parts) == sorted(other)
        assert all(torch.equal(one[name], other[name]) for name in parts)


@pytest.mark.soak
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam"])
def test_ranks_and_plans_change_daily(ranks: Ranks, days: Path, tmp_path: Path, optimizer: str) -> None:
    plans = [(1, "table_wise"), (2, "row_wise"), (4, "column_wise"), (2, "data_parallel")]
    for day, (size, sharding) in enumerate(plans):
        parent = {} if day == 0 else {"start_from": str(tmp_path / f"run-{day - 1}")}
        document = document_of(
            days / f"day-{day}", tmp_path / f"run-{day}", optimizer, "float64",
            plan={"tables": {"*": sharding}}, **parent,
        )  # fmt: skip
        ranks(size).run(train, document)
    whole = document_of(days / "day-0", tmp_path / "whole", optimizer, "float64")
    saved = ranks(1).run(train_without_end, whole, days, tmp_path / "loop")[0]
    for day, path in enumerate(saved):
        last = checkpoint.latest_complete(tmp_path / f"run-{day}" / "checkpoints")
        expected = read_columns(path)
        for table, columns in read_columns(Path(str(last))).items():
            for name, values in columns.items():
                np.testing.assert_allclose(values, expected[table][name], rtol=1e-10, atol=1e-10)
