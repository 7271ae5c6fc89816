"""Small datasets and tiny models, so that a whole training run takes about a second."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from meseta import checkpoint
from meseta.comm import World
from meseta.config import RunConfig
from meseta.config.models import section_class
from meseta.config.models.base import LEGACY_KEYS
from meseta.data.prepare import PrepareOptions, prepare
from meseta.data.synth import ClickLog, SynthOptions, write_click_log
from meseta.train.trainer import Trainer

SHAPES = {"user": 300, "item": 40, "city": 7, "tags": 60}
"""Rows per table of `tiny_data`."""
REAL_ROWS = Path(__file__).parents[2] / "shared/data/criteo_1tb_day0_head.tsv"
"""10,000 rows of the Criteo 1TB click logs, which are not part of this repository."""


def tiny_data(folder: Path) -> Path:
    """Return a prepared dataset of 1,500 rows with two dense features, single ids and weighted bags. Its labels can be
    learned.

    It is made once per test session: pass a folder of `tmp_path_factory.getbasetemp()`.
    """
    out = folder / "tiny"
    if not out.exists():
        num_rows = 1500
        draw = np.random.default_rng(7)
        ids = {name: (draw.random(num_rows) ** 2 * rows * 2).astype(int) for name, rows in SHAPES.items()}
        bags = [draw.integers(0, 50, size).tolist() for size in draw.integers(0, 4, num_rows)]
        price = draw.normal(size=num_rows)
        affinity = draw.normal(size=100)
        score = 1.5 * affinity[ids["item"]] * affinity[ids["city"]] + price - 1
        columns = {
            "label": draw.random(num_rows) < 1 / (1 + np.exp(-score)),
            "price": np.exp(price),
            "age": draw.integers(0, 90, num_rows),
            **{name: [f"{name}{i}" for i in ids[name]] for name in ("user", "item", "city")},
            "tags": pa.array(bags, pa.list_(pa.int64())),
            "tags.weight": pa.array([[1.0 + 0.1 * k for k, _ in enumerate(bag)] for bag in bags]),
        }
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), folder / "tiny.parquet")
        _prepare_tiny(folder, out)
    return out


def tiny_with_valid(tiny: Path) -> Path:
    """Return the rows of `tiny_data` with a fifth of them in a split 'valid'. It is made once per session, next to
    `tiny_data`."""
    out = tiny.with_name("tiny-with-valid")
    if not out.exists():
        _prepare_tiny(tiny.parent, out, valid_fraction=0.2)
    return out


def _prepare_tiny(folder: Path, out: Path, **splits: Any) -> None:
    prepare(
        PrepareOptions(
            sources=[str(folder / "tiny.parquet")],
            out=out,
            test_fraction=0.2,
            hash_rows_by_feature=SHAPES,
            sparse=list(SHAPES),
            **splits,
        )
    )


def criteo_shaped_data(folder: Path) -> Path:
    """Return 6,000 prepared rows of `meseta data synth`, with 200 rows per table and the last third as test split."""
    out = folder / "criteo-shaped"
    if not out.exists():
        raw = folder / "criteo-shaped-raw"
        write_click_log(SynthOptions(out=raw, num_rows=6000, num_files=3, log=ClickLog(3, 0.001)))
        prepare(
            PrepareOptions(sources=[str(raw / "*.tsv")], out=out, test_files=[str(raw / "day_2.tsv")], hash_rows=200)
        )
    return out


def spoil(data: Path, split: str, column: str, row: int, value: Any) -> None:
    """Overwrite one value of one row of a split."""
    path = sorted((data / split).glob("*.parquet"))[0]
    table = pq.read_table(path)
    values = table[column].to_pylist()
    values[row] = value
    index = table.schema.get_field_index(column)
    field = table.schema.field(index)
    pq.write_table(table.set_column(index, field, pa.array(values, field.type)), path)


def settings(data: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Return a config document. Keys of `changes` are written as `train__max_steps`."""
    document: dict[str, Any] = {
        "run_dir": str(run_dir),
        "num_threads": 1,
        "data": {"dir": str(data), "shuffle_window_rows": 500, "prefetch_batches": 1},
        "model": {"embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8], "cross_layers": 1, "cross_low_rank": 4},
        "embedding": {
            "init": {"kind": "uniform", "scale": 0.1},
            "optimizer": {"name": "rowwise_adagrad", "lr": 0.1},
        },
        "dense": {"optimizer": {"name": "adam", "lr": 0.01}},
        "train": {"batch_size": 90, "log_every_steps": 4, "eval_batch_size": 130},
        "report": {"importance": False},
    }
    for key, value in changes.items():
        *parents, last = key.split("__")
        section = document
        for name in parents:
            section = section.setdefault(name, {})
        section[last] = value
    return {**document, "model": of_its_model(document["model"])}


TINY: dict[str, Any] = {
    "cross_layers": 2,
    "cross_low_rank": 3,
    "deep_mlp": [8, 6],
    "mask_blocks": [8, 6],
    "first_mlp": [8, 6],
    "second_mlp": [6, 8],
    "gate_mlp": [4],
    "first_block": [8, 6],
    "second_block": [6],
    "bottom_mlp": [8],
    "top_mlp": [8],
    "layers": 2,
    "fm_vectors": 3,
    "linear_vectors": 2,
    "fm_rank": 2,
    "fm_mlp": [6],
    "interactions": {"self_attention": 2, "cross": 1, "dot": 2, "linear": 1, "convolution": 1},
}
"""Sizes of models whose sections reject keys of other models."""


def of_its_model(keys: dict[str, Any]) -> dict[str, Any]:
    """Return `keys` without sizes of other models. A section that rejects keys of other models gets tiny sizes."""
    section = section_class(keys.get("name", "dlrm"))
    sizes = {} if section.accepts_legacy_keys else {key: TINY[key] for key in TINY if key in section.model_fields}
    return sizes | {key: value for key, value in keys.items() if key in section.model_fields or key not in LEGACY_KEYS}


MODELS_WITH_NORMS = ("dcnv2", "gdcn", "masknet", "finalmlp", "final", "wukong", "dhen")


def dropout_and_norms(model: str) -> dict[str, Any]:
    """Return changes of `settings` to one of `MODELS_WITH_NORMS`, with dropout and batch norm."""
    shapes: dict[str, dict[str, Any]] = {
        "dcnv2": {"model__cross": "mixture", "model__structure": "parallel"},
        "final": {"model__second_block": [6]},
        "dhen": {"model__ensemble": "weighted", "model__interactions": {"self_attention": 3, "cross": 3, "dot": 3}},
    }
    return {"model__name": model, "model__dropout": 0.3, "model__batch_norm": True, **shapes.get(model, {})}


def write_config(path: Path, document: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(document))
    return path


def train(document: dict[str, Any]) -> dict[str, Any]:
    """Run on the ranks of this process and return the summary. Every rank of a pool can import it."""
    return Trainer(RunConfig.model_validate(document), World.current()).run()


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


TIMES = (
    "time_s", "samples_per_s", "seconds_per_step", "stages_s", "stages_s_by_rank", "transfers", "transfers_by_rank",
    "row_traffic", "row_waits", "row_waits_by_rank",
)  # fmt: skip


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the part of the lines that two runs of one config must agree on."""
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def final_checksum(run_dir: Path) -> str:
    """Return the checksum of the newest checkpoint after reading and checking every file in it."""
    path = checkpoint.latest_complete(run_dir / "checkpoints")
    assert path is not None, f"{run_dir} has no checkpoint"
    return checkpoint.verify(path)


def manifest(run_dir: Path) -> dict[str, Any]:
    path = checkpoint.latest_complete(run_dir / "checkpoints")
    assert path is not None
    document: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    return document


def table_checksums(run_dir: Path) -> dict[str, str]:
    return {name: entry["checksum"] for name, entry in manifest(run_dir)["tables"].items()}


def environment() -> dict[str, str]:
    """Return variables for commands started by tests: this source tree, one thread."""
    source = Path(__file__).parents[1] / "src"
    return {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def predicted_memory(config: RunConfig, dataset: Any, outline: Any, plan: Any, rank: int) -> Any:
    """Return the largest predicted memory of a rank under a plan, while it trains or evaluates."""
    from meseta.train.setup.memory import RunMemory, run_bytes
    from meseta.train.setup.specs import make_specs, make_workload

    workload = make_workload(config, dataset, *make_specs(config, dataset), outline)
    run = run_bytes(config, dataset, outline, plan.num_ranks, plan.ranks_per_host, on_cpu=True)
    needs = RunMemory(workload=workload, run=run).demand_by_phase(plan)
    of_rank = (of_ranks[rank] for phase, of_ranks in needs.items() if phase != "checkpoint")
    return max(of_rank, key=lambda need: need.total)


def need_and_held(document: dict[str, Any]) -> tuple[int, int, int, int]:
    """Return the bytes of (tables, states) on this rank, first as predicted and then as allocated. Every rank of a pool
    can import it."""
    from meseta.data import Dataset
    from meseta.embedding import EmbeddingBagCollection
    from meseta.train.setup.build import make_sharded_model
    from meseta.train.setup.meta_model import make_meta_model
    from meseta.train.setup.specs import make_specs

    config, world = RunConfig.model_validate(document), World.current()
    dataset = Dataset.load(config.data.dir)
    model = make_sharded_model(config, dataset, world)
    specs, features = make_specs(config, dataset)
    outline = make_meta_model(config, dataset, EmbeddingBagCollection(specs, features))
    need = predicted_memory(config, dataset, outline, model.embeddings.plan, world.rank)
    shards = model.embeddings.shards
    rows = sum(shard.weight.nbytes for shard in shards)
    states = sum(state.nbytes for shard in shards for state in shard.state.values())
    return need.tables, need.optimizer_state, rows, states
