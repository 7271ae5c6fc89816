"""First steps of a run, with the rows that each may change, written to a folder by every rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meseta.checkpoint import newest
from meseta.comm import World
from meseta.comm.dense import make_shard_sum
from meseta.config import RunConfig
from meseta.data.read.batch import Batch
from meseta.embedding import EmbeddingBagCollection
from meseta.ops.random_rows import initial_rows
from meseta.optim.dense import make_dense_optimizer, set_learning_rates
from meseta.pipeline import Pipeline
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import MesetaError, Plan
from meseta.storage import ROW, TableStorage
from meseta.train.dataset_checks import check_same_encoding, open_dataset
from meseta.train.run_dir import RunDir
from meseta.train.setup.build import (
    make_clip,
    make_reader,
    make_sharded_model,
    task_weights,
)
from meseta.train.setup.specs import make_specs

PHASES = ("embedding", "training")
"""Phase "embedding" updates the tables alone, with synthetic gradients. Phase "training" trains the whole model."""
BLOCK_ROWS = 1 << 16
"""Number of rows per block when rows are compared with their initial values."""


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """Results of one step on this rank."""

    number: int
    """Step number, starting at 1."""
    plan: Plan
    shards: tuple[TableStorage, ...]
    """Shards of this rank after the step."""
    batch: KeyedJaggedTensor
    """Looked-up ids of the global batch, after the id policies."""
    touched_rows: dict[str, Tensor]
    """Rows of each table that the step may change, ascending."""
    loss: float | None
    """Loss of the global batch. `None` in phase "embedding"."""
    pooled: Tensor | None
    """Pooled embeddings [B_local, sum of D]. `None` in phase "training"."""


def slice_sizes(batch_size: int, num_ranks: int) -> list[int]:
    """Return the number of samples in each rank's slice of a global batch."""
    share, more = divmod(batch_size, num_ranks)
    return [share + (rank < more) for rank in range(num_ranks)]


def run_steps(
    config: RunConfig, world: World, phase: str, num_steps: int, num_ranks: int, at_home: Collection[str] = ()
) -> Iterator[RecordedStep]:
    """Train from the initial state for `num_steps`, for as many epochs as needed.

    Raises MesetaError with the number of the step if training fails.

    Args:
        config: Config of the run.
        world: Ranks that train. It may be one process that repeats a sharded run.
        phase: One of `PHASES`.
        num_steps: Number of steps.
        num_ranks: Number of ranks of the sharded run.
        at_home: Tables that all ranks of the sharded run replicate, so that lookups in them are not rounded by codecs.
    """
    torch.manual_seed(config.seed)
    dataset = open_dataset(config, world)
    readers = [make_reader(config, dataset, "train", ranks) for ranks in (world, World.single(world.device))]
    if readers[0].num_batches == 0:
        raise MesetaError(f"dataset {str(dataset.dir)!r} has no rows to train on; prepare it again")
    tables, features = make_specs(config, dataset)
    ids = EmbeddingBagCollection(
        tables, features, seed=config.seed
    )  # Allocates no rows, because it is never looked up.
    model = make_sharded_model(config, dataset, world)
    if world.size == 1 and num_ranks > 1:
        model.embeddings.emulate_rounding(config.comm.communication, at_home)
    step: Callable[[int, Batch, Batch], tuple[float | None, Tensor | None]]
    if phase == "training":
        weights = task_weights(config, dataset)
        length = config.train.epochs * readers[0].num_batches
        masked = dataset.num_masked_tasks
        step = _make_training_step(config, model, world, weights, masked, min(length, config.train.max_steps or length))
    else:
        step = _make_embedding_step(config, model, world, num_ranks)
    with closing(readers[0].epochs(num_steps)) as local_batches, closing(readers[1].epochs(num_steps)) as whole:
        for number, (local, batch) in enumerate(zip(local_batches, whole, strict=False), start=1):
            try:
                loss, pooled = step(number, local, batch)
            except MesetaError as error:
                raise MesetaError(f"step {number}: {error}") from None
            # Prepared data has one batch size, so there is one feature group.
            [checked] = (group.kjt for group in ids.check_ids(batch.sparse))
            touched = _touched_rows(ids, checked)
            yield RecordedStep(
                number=number,
                plan=model.embeddings.plan,
                shards=model.embeddings.shards,
                batch=checked,
                touched_rows=touched,
                loss=loss,
                pooled=pooled,
            )
            if number == num_steps:
                return


def _make_training_step(
    config: RunConfig, model: Any, world: World, weights: list[float] | None, num_masked_tasks: int, num_steps: int
) -> Callable[[int, Batch, Batch], tuple[float | None, Tensor | None]]:
    over_parts = make_shard_sum(model.parameters(), world)
    optimizer = make_dense_optimizer(config.dense.optimizer, model.parameters(), over_parts)
    clip = make_clip(config, over_parts)
    parts = config.train.accumulate_steps
    train_step = Pipeline(model, optimizer, world, task_weights=weights, clip=clip, accumulate_steps=parts)
    train_step.num_masked_tasks = num_masked_tasks

    def step(number: int, local: Batch, whole: Batch) -> tuple[float, None]:
        lr_factor = set_learning_rates(config, optimizer, number - 1, num_steps)
        return train_step(local, lr_factor=lr_factor).loss, None

    return step


def _make_embedding_step(
    config: RunConfig, model: Any, world: World, num_ranks: int
) -> Callable[[int, Batch, Batch], tuple[None, Tensor]]:
    """Return a function that looks up a batch and updates the tables with random gradients. They depend on the seed,
    step, sample and column only."""
    embeddings = model.embeddings
    for feature in embeddings.features:
        if feature.pooling == "none":
            raise MesetaError(
                f"verify: feature {feature.name!r} must be pooled, but its pooling is 'none'; "
                f"set embedding.tables.{feature.name}.pooling=sum for the comparison"
            )

    def step(number: int, local: Batch, whole: Batch) -> tuple[None, Tensor]:
        pooled = embeddings(local.to(world.device).sparse).pooled.values
        sizes = slice_sizes(whole.batch_size, num_ranks)
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + number)
        gradient = torch.randn(whole.batch_size, pooled.shape[1], generator=generator).to(pooled.dtype)
        if world.size > 1:
            slice_gradient = gradient.split(sizes)[world.rank]
        else:  # Scale each slice as its rank does, so that the products are rounded identically.
            shares = [size / whole.batch_size for size in sizes] if num_ranks > 1 else [1.0]
            slice_gradient = torch.cat(
                [part * share for part, share in zip(gradient.split(sizes), shares, strict=True)]
            )
        pooled.backward(slice_gradient.to(world.device))
        return None, pooled.detach()

    return step


def _touched_rows(collection: EmbeddingBagCollection, ids: KeyedJaggedTensor) -> dict[str, Tensor]:
    table_ids: dict[str, list[Tensor]] = {table.name: [] for table in collection.tables}
    for feature in collection.features:  # Several features may share a table.
        table_ids[feature.table].append(ids[feature.name].values.cpu())
    return {
        table.name: torch.arange(table.num_embeddings)
        if table.optimizer.stepped_rows == "all"
        else torch.unique(torch.cat(table_ids[table.name]))
        for table in collection.tables
    }


PLAN_FILE = "plan.json"
"""File with the plan of the ranks, in the folder of `record`."""


def record(config: RunConfig, world: World, folder: Path, num_steps: int) -> None:
    """Run every phase on the ranks of `world` and write the results of each step to `folder`. Collective.

    After each step, each rank writes the touched rows of its shards with their optimizer states. At the end it writes
    the changed rows that no batch read. Rank 0 also saves the description of the dataset.
    Raises MesetaError if training fails, or `run_dir` has a run that was trained on different data.
    """
    dataset = open_dataset(config, world)
    run = RunDir(config.run_dir, config.checkpoint_location)
    check_same_encoding(run, newest(run.checkpoints), dataset, world)
    if world.rank == 0:
        dataset.save(folder)
    for phase in PHASES:
        _record_phase(config, world, folder, phase, num_steps)


def _record_phase(config: RunConfig, world: World, folder: Path, phase: str, num_steps: int) -> None:
    # This is a separate function, so that the model of one phase is freed before the next one is created.
    at_rest: dict[int, Tensor] = {}
    for result in run_steps(config, world, phase, num_steps, world.size):
        if world.rank == 0:
            result.plan.save(folder / PLAN_FILE)
        pieces = []
        for index, shard in enumerate(result.shards):
            first, stop = shard.shard.rows
            rows = result.touched_rows[shard.spec.name]
            rows = rows[(rows >= first) & (rows < stop)]
            at_rest.setdefault(index, torch.ones(stop - first, dtype=torch.bool))[rows - first] = False
            pieces.append(
                {
                    "table": shard.spec.name,
                    "columns": shard.shard.columns,
                    "rows": rows,
                    "values": shard.gather(rows - first),
                }
            )
        pooled = None if result.pooled is None else result.pooled.cpu()
        document = {"loss": result.loss, "pooled": pooled, "pieces": pieces}
        torch.save(document, record_path(folder, phase, result.number, world.rank))
    strays = [
        stray for index, shard in enumerate(result.shards) for stray in _changed_untouched_rows(shard, at_rest[index])
    ]
    torch.save(strays, record_path(folder, phase, 0, world.rank))


def record_path(folder: Path, phase: str, step: int, rank: int) -> Path:
    """Return the record file of a step and rank. Step 0 is the file with changed rows that no batch read."""
    return folder / f"{phase}-{step:07d}-{rank:04d}.pt"


def _changed_untouched_rows(shard: TableStorage, at_rest: Tensor) -> Iterator[tuple[str, str, int, int, float, float]]:
    """Yield (table, value, row, column, current, initial) of the first changed cell in `at_rest` rows, if there is
    one."""
    first, num_rows = shard.shard.rows[0], shard.shard.num_rows
    for start in range(0, num_rows, BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, num_rows)
        resting = at_rest[start:stop]
        span = replace(shard.shard, rows=(first + start, first + stop))
        new = initial_rows(shard.spec, rows=span.rows, columns=span.columns, seed=shard.seed, device=shard.device)
        began = {ROW: new, **shard.optimizer.init(new)}
        for name, now in shard.read(start, stop).items():
            a, b = (value.reshape(stop - start, -1).cpu() for value in (now, began[name]))
            changed = (as_bits(a) != as_bits(b)) & resting[:, None]
            if changed.any():
                row, column = changed.nonzero()[0].tolist()
                cell = float(a[row, column]), float(b[row, column])
                yield shard.spec.name, name, span.rows[0] + row, span.columns[0] + column, *cell
                return


def as_bits(values: Tensor) -> Tensor:
    """Return a view of the memory as integers of the same size."""
    return values.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
