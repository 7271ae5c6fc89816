"""First rows of a run with a parent, in every combination of optimizer, dtype, plan, ranks, tier and parent checkpoint:
known values have the parent's row and state bit for bit, and others the initial row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from checkpoint.arrow_rows import read_columns
from covering import Setting, covering
from meseta import checkpoint
from meseta.comm import World
from meseta.config import RunConfig
from meseta.data.prepare import PrepareOptions, prepare
from meseta.ops.random_rows import initial_rows
from meseta.optim import make_row_optimizer
from meseta.spec import InitSpec, OptimizerSpec, Plan, TableSpec
from meseta.spec.optimizer import USED_FIELDS
from meseta.storage import TableShard, as_stored
from meseta.train.trainer import Trainer
from sampling import sample
from small_run import settings, train

from .pool import RankPool

Ranks = Callable[[int], RankPool]
Columns = dict[str, NDArray[Any]]
FEATURES = ("user", "item")
SCALE, WIDTH = 0.25, 32
PARENTS: dict[str, dict[str, Any]] = {
    "full": {},
    "delta": {"checkpoint__deltas": "consecutive", "checkpoint__every_steps": 1, "checkpoint__keep_last": 9},
    "quantized": {"checkpoint__bits": 4, "checkpoint__every_steps": 1, "checkpoint__keep_last": 9},
}
AXES: dict[str, list[Any]] = {
    "optimizer": sorted(USED_FIELDS),
    "dtype": ["float32", "float16", "bfloat16", "float64"],
    "sharding": ["table_wise", "row_wise", "column_wise", "data_parallel"],
    "size": [1, 2, 4],
    "tier": ["hbm", "cached", "disk"],
    "parent": sorted(PARENTS),
    "values": ["grown", "retired", "recounted"],
}


def can_meet(one: Setting, other: Setting) -> bool:
    """Whether two settings can be combined: rows of float64 have no codes, and replicas no tier."""
    pairs = {one, other}
    if pairs >= {("dtype", "float64"), ("parent", "quantized")}:
        return False
    return not (("sharding", "data_parallel") in pairs and pairs & {("tier", "cached"), ("tier", "disk")})


CASES = covering(AXES, can_meet, times=1, seed=7)


def write_day(path: Path, day: int) -> Path:
    """Write rows of two features. Each day brings new users, and old ones no longer occur."""
    draw = np.random.default_rng(day)
    users, items = draw.integers(0, 150, 600) + 60 * day, draw.integers(0, 40, 600)
    columns = {
        "label": (users + items) % 3 == 0, "user": [f"u{user}" for user in users], "item": [f"i{i}" for i in items]
    }  # fmt: skip
    pq.write_table(pa.table(columns), path)
    return path


def prepared(folder: Path, day: int, **options: Any) -> Path:
    out = folder / f"data-{day}"
    prepare(
        PrepareOptions(sources=[str(write_day(folder / f"{day}.parquet", day))], out=out, test_fraction=0.0, **options)
    )
    return out


def document_of(case: dict[str, Any], data: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    return settings(
        data, run_dir, model__name="fm", model__embedding_dim=WIDTH - 1, embedding__dtype=case["dtype"],
        embedding__optimizer={"name": case["optimizer"]}, embedding__init={"scale": SCALE}, train__max_steps=3,
        **changes,
    )  # fmt: skip


def save_first(document: dict[str, Any]) -> None:
    """Save the rows before the first step. Runs on every rank."""
    config = RunConfig.model_validate(document)
    Trainer(config, World.current()).save_initial_checkpoint(lambda model: None)


def restored_rows(path: Path, specs: list[TableSpec]) -> dict[str, Columns]:
    """Return the columns that a resumed run has after it has loaded a delta or quantized rows."""
    plan = Plan.from_dict({"tables": {"*": "table_wise"}}, specs, 1)
    shards = [
        TableShard.create(spec, plan[spec.name].shards[0], make_row_optimizer(spec.optimizer), seed=1, device="cpu")
        for spec in specs
    ]
    checkpoint.load(path, world=World.single(), shards=shards)
    return {
        shard.spec.name: {
            name: as_stored(value).numpy().reshape(len(value), -1) for name, value in shard.values.items()
        }
        for shard in shards
    }


def values_of(data: Path, feature: str) -> list[str | None]:
    values: list[str | None] = pq.read_table(data / "vocabulary" / f"{feature}.parquet")["value"].to_pylist()
    return values


def specs_of(case: dict[str, Any], data: Path) -> list[TableSpec]:
    return [
        TableSpec(
            name=name, num_embeddings=len(values_of(data, name)), embedding_dim=WIDTH, dtype=case["dtype"],
            init=InitSpec(scale=SCALE), optimizer=OptimizerSpec(name=case["optimizer"]),
        )
        for name in FEATURES
    ]  # fmt: skip


@pytest.mark.parametrize("case", sample(CASES, 1, seed=2), ids=str)
def test_first_rows(ranks: Ranks, tmp_path: Path, case: dict[str, Any]) -> None:
    first = prepared(tmp_path, 0, vocabulary=True, min_count=2)
    ranks(1).run(train, document_of(case, first, tmp_path / "parent", **PARENTS[case["parent"]]))
    parent = sorted((tmp_path / "parent" / "checkpoints").glob("step-*"))[1 if case["parent"] != "full" else -1]
    growth = {
        "grown": {"grow": True}, "retired": {"grow": True, "retire_after": 1}, "recounted": {"recount": True}
    }[case["values"]]  # fmt: skip
    second = prepared(tmp_path, 1, like=first, **growth)
    placement = {} if case["tier"] == "hbm" else {"tier": case["tier"], "cache_rows": 300}
    document = document_of(
        case, second, tmp_path / "child", start_from=str(parent), seed=5, storage__dir=str(tmp_path / "rows"),
        plan={"tables": {"*": {"sharding": case["sharding"], **placement}}},
    )  # fmt: skip
    ranks(case["size"]).run(save_first, document)
    before = read_columns(parent) if case["parent"] == "full" else restored_rows(parent, specs_of(case, first))
    [saved] = (tmp_path / "child" / "checkpoints").glob("step-*")
    fresh = {spec.name: spec for spec in specs_of(case, second)}
    num_new = num_freed = 0
    for feature, columns in read_columns(saved).items():
        rows = {value: row for row, value in enumerate(values_of(first, feature)) if value is not None}
        values = values_of(second, feature)
        known = np.array([0, *(rows.get(value, -1) if value is not None else -1 for value in values[1:])])
        initial = initial_rows(fresh[feature], rows=(0, len(values)), columns=(0, WIDTH), seed=5, device="cpu")
        start = {
            name: as_stored(value).numpy().reshape(len(values), -1)
            for name, value in {"row": initial, **make_row_optimizer(fresh[feature].optimizer).init(initial)}.items()
        }
        for name, column in columns.items():
            expected = np.where((known >= 0)[:, None], before[feature][name][known], start[name])
            assert column.dtype == expected.dtype and np.array_equal(bits(column), bits(expected)), (feature, name)
        num_new += int((known < 0).sum())
        num_freed += values[1:].count(None)
    assert num_new > 20 and (num_freed > 0) <= (case["values"] == "retired")


def bits(values: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(values).view(np.uint8)
