"""Build the model, readers and learning rates of a run from a config and a dataset."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import astuple
from typing import Any

import torch

from meseta.comm import World
from meseta.comm.dense import make_shard_sum
from meseta.config import RunConfig
from meseta.data.dataset.dataset import Dataset
from meseta.data.read.batch_reader import BatchIterator, BatchReader
from meseta.data.read.options import ReaderOptions
from meseta.data.service.client.reader import RunAttempt
from meseta.embedding import EmbeddingBagCollection, shard
from meseta.optim.dense import GradientClipper, SumOverRanks, make_dense_optimizer
from meseta.pipeline import Pipeline
from meseta.pipeline.device_copy import BatchPacker
from meseta.spec import MesetaError, Plan, suggest
from meseta.spec.stages import Overlap
from meseta.system.ranks import local_rank, num_local_ranks, print_note
from meseta.train.averages.weights import WeightAverage
from meseta.train.setup.meta_model import make_meta_model, make_unsharded_model
from meseta.train.setup.planning import RunPlanner
from meseta.train.setup.source import make_row_source
from meseta.train.setup.specs import make_specs


def choose_device(config: RunConfig) -> torch.device:
    """Return the device of this rank.

    With 'auto' it is a GPU if this host has one for each of its ranks, else the CPU. Rank 0 prints a note if the CPU is
    used although there are GPUs.
    Raises MesetaError if the config requires GPUs and there are too few.
    """
    num_ranks = num_local_ranks()
    num_gpus = torch.cuda.device_count() if config.device != "cpu" and torch.cuda.is_available() else 0
    if num_gpus >= num_ranks:
        torch.cuda.set_device(local_rank())
        return torch.device("cuda", local_rank())
    if config.device == "cuda" and num_gpus == 0:
        raise MesetaError("device is 'cuda', but torch sees no GPU; set device=cpu, or install torch with CUDA")
    if config.device == "cuda":
        raise MesetaError(
            f"device is 'cuda', but torch sees {num_gpus} GPU(s) for the {num_ranks} ranks of this host; "
            f"set --nproc {num_gpus}, or device=cpu"
        )
    if num_gpus:
        print_note(
            f"this host has {num_ranks} ranks and only {num_gpus} GPU(s), so all ranks use the CPU; --nproc {num_gpus} "
            "uses the GPUs"
        )
    return torch.device("cpu")


def make_sharded_model(config: RunConfig, dataset: Dataset, world: World) -> Any:
    """Plan and build the model of a run on this rank's device. The plan is `model.embeddings.plan`."""
    return place_model(*plan_model(config, dataset, world), world)


def plan_model(config: RunConfig, dataset: Dataset, world: World) -> tuple[RunPlanner, Plan]:
    """Plan the tables of a run before their memory is allocated. Collective. Raises MesetaError, on all ranks, if
    planning fails or memory is insufficient."""
    tables, features = make_specs(config, dataset)
    collection = EmbeddingBagCollection(tables, features, seed=config.seed, device=world.device)
    outline = make_meta_model(config, dataset, collection)
    planner = RunPlanner(config, dataset, collection, outline, world)
    # Check the run without tables first, because the search for a plan may take long.
    if config.check_memory and world.size > 1:
        planner.check_memory(Plan(num_ranks=world.size, tables=()))
    plan = planner.plan()
    if config.check_memory:
        planner.check_memory(plan)
    return planner, plan


def make_clip(config: RunConfig, over_parts: SumOverRanks | None) -> GradientClipper:
    """Return the gradient clipper of a run. `over_parts` sums over the ranks that hold parts of a sharded dense
    parameter."""
    dense, norm = config.dense, config.train.clip_norm
    if norm is None:
        return GradientClipper(value=dense.clip_value, norm=dense.clip_norm, sum_over_ranks=over_parts)
    return GradientClipper(value=dense.clip_value, norm=norm, includes_rows=True)


def place_model(planner: RunPlanner, plan: Plan, world: World) -> Any:
    """Build the model of a run on this rank's device, with its tables sharded according to `plan`. Collective."""
    config, collection = planner.config, planner.collection
    model = make_unsharded_model(config, planner.dataset, collection)
    # A sharded dense part is moved to the device module by module, because the whole may not fit there.
    is_whole = config.dense.sharding == "replicated" or world.size == 1
    model.to(device=world.device if is_whole else "cpu", dtype=collection.dtype)
    comm, storage = config.comm.communication, config.storage.options
    return shard(model, plan, world=world, dense=config.dense.sharding, comm=comm, storage=storage)


def make_pipeline(
    config: RunConfig, dataset: Dataset, model: Any, overlap: Collection[Overlap], world: World
) -> Pipeline:
    """Create the pipeline that trains a sharded model, with the optimizer of the dense part.

    `overlap` are the exchanges to hide. Raises MesetaError as `task_weights` does.
    """
    over_parts = make_shard_sum(model.parameters(), world)
    pipeline = Pipeline(
        model,
        make_dense_optimizer(config.dense.optimizer, model.parameters(), over_parts),
        world,
        task_weights=task_weights(config, dataset),
        clip=make_clip(config, over_parts),
        accumulate_steps=config.train.accumulate_steps,
        overlap=overlap,
    )
    if config.pipeline.graph == "off":
        pipeline.graphs = None
    pipeline.num_masked_tasks = dataset.num_masked_tasks
    pipeline.uses_stale_embeddings = bool(config.pipeline.staleness)
    return pipeline


def make_average(config: RunConfig, dataset: Dataset, pipeline: Pipeline, world: World) -> WeightAverage:
    """Return the average of the weights that `pipeline` trains."""
    # Without the attempt of the run, a service treats the reader as that of another run.
    return WeightAverage(config.train, pipeline, world, lambda: make_reader(config, dataset, "train", world))


def make_reader(
    config: RunConfig,
    dataset: Dataset,
    split: str,
    world: World,
    run: RunAttempt | None = None,
    *,
    in_order: bool = False,
) -> BatchReader:
    """Return a reader of this rank's slices of the batches of a split.

    Training rows are shuffled, unless they are to be read `in_order`, in batches of evaluations. Other splits are read
    in the order of their files. `run` and the errors are those of `RowSource.reader`, and so is whether the call is
    collective.
    """
    train, data = config.train, config.data
    is_train = split == "train" and not in_order
    options = ReaderOptions(
        batch_size=train.batch_size if is_train else train.eval_batch_size,
        shuffle=data.shuffle and is_train,
        seed=config.seed,
        window_rows=data.shuffle_window_rows,
        prefetch_batches=data.prefetch_batches,
        last_batch=data.last_batch if is_train else "keep",
        filter=data.filter,
        negative_keep=data.negative_keep if split == "train" else 1.0,
    )
    return make_row_source(data).reader(dataset, split, options, world, run)


def start_attempt(config: RunConfig, world: World) -> RunAttempt | None:
    """Return the new attempt of a run at the reader service, or `None` if it reads its dataset itself. Collective."""
    return make_row_source(config.data).new_attempt(config.run_dir, world)


def read_packed(reader: BatchReader, num_epochs: int, device: torch.device, num_parts: int) -> BatchIterator[Any]:
    """Return the batches of epochs. For a GPU, the reading thread packs them into `num_parts` micro-batches."""
    packer = BatchPacker.for_device(device, num_parts)
    return reader.epochs(num_epochs) if packer is None else reader.prepared_epochs(num_epochs, packer.pack)


def count_steps(config: RunConfig, reader: BatchReader, num_done_steps: int) -> int:
    """Return the number of steps of the whole run.

    `num_done_steps` steps are done, and `reader` has the remaining batches.
    Raises MesetaError if there are no rows to read, or more steps are done than the config requests.
    """
    if reader.num_batches == 0:
        left_out, num_rows = reader.excluded_rows, reader.num_rows
        why = (
            f"data.last_batch 'drop' excludes all of its {num_rows} rows" if num_rows
            else "data.filter and data.negative_keep exclude all rows; relax them" if any(astuple(left_out))
            else "prepare it again"
        )  # fmt: skip
        raise MesetaError(f"dataset {str(reader.dataset.dir)!r} has no rows to train on: {why}")
    left = (config.train.epochs - reader.epoch_index - 1) * reader.num_batches
    # Do not derive the total from the epochs, because the batch size may have changed since the run started.
    whole = num_done_steps + left + reader.num_remaining_batches
    num_steps = min(whole, config.train.max_steps or whole)
    if num_done_steps > num_steps:
        raise MesetaError(
            f"run_dir {str(config.run_dir)!r} is at step {num_done_steps}, beyond the {max(num_steps, 0)} steps of the "
            f"config; "
            "raise train.epochs or train.max_steps, or choose another run_dir"
        )
    return num_steps


def estimate_remaining_samples(reader: BatchReader, num_epochs: int, num_steps: int) -> int:
    """Return the number of samples of the next `num_steps` steps of a run with `num_epochs` epochs. Filters may leave
    out some of them."""
    epoch, row = reader.position
    rows_left = (num_epochs - epoch) * reader.num_rows - row
    return max(min(num_steps * reader.options.batch_size, rows_left), 0)


def task_weights(config: RunConfig, dataset: Dataset) -> list[float] | None:
    """Return one weight per label, or `None` if all are 1. Raises MesetaError for an unknown label or only zeros."""
    weight_by_label = config.train.task_weights
    for name in weight_by_label:
        if name not in dataset.labels:
            raise MesetaError(
                f"config: train.task_weights has {name!r}, which is not a label of the data "
                f"({', '.join(map(repr, dataset.labels))}); {suggest(name, dataset.labels)}"
            )
    weights = [weight_by_label.get(name, 1.0) for name in dataset.labels]
    if not any(weights):
        raise MesetaError("config: train.task_weights must not be 0 for all labels; raise at least one")
    return None if all(weight == 1.0 for weight in weights) else weights
