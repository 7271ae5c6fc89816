"""From a config and a dataset to tables, features and a model on the ranks of this run."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import torch

from meseta.comm import World
from meseta.config import RunConfig
from meseta.data.dataset.dataset import Dataset
from meseta.data.read.batch_reader import BatchReader
from meseta.data.read.options import ReaderOptions
from meseta.data.read.served.reader import RunAttempt
from meseta.embedding import EmbeddingBagCollection, shard
from meseta.machine.ranks import local_rank, num_local_ranks, print_note
from meseta.optim.clip import GradientClipper, SumOverRanks
from meseta.optim.schedule import learning_rate_factor
from meseta.spec import MesetaError, Plan, suggest
from meseta.train.setup.meta_model import make_meta_model, make_unsharded_model
from meseta.train.setup.planning import RunPlanner, check_clip
from meseta.train.setup.source import make_row_source
from meseta.train.setup.specs import make_specs


def choose_device(config: RunConfig) -> torch.device:
    """The device of this rank: with 'auto' a GPU where this host has one for each of its ranks, else the CPU, which
    rank 0 then says where GPUs are left idle.

    Raises MesetaError where GPUs are asked for and there are too few.
    """
    num_ranks = num_local_ranks()
    num_gpus = torch.cuda.device_count() if config.device != "cpu" and torch.cuda.is_available() else 0
    if num_gpus >= num_ranks:
        torch.cuda.set_device(local_rank())
        return torch.device("cuda", local_rank())
    if config.device == "cuda" and num_gpus == 0:
        raise MesetaError("device 'cuda' was asked for, but torch sees no GPU; set device=cpu, or install a CUDA torch")
    if config.device == "cuda":
        raise MesetaError(
            f"device 'cuda' was asked for, but torch sees {num_gpus} GPU(s) for the {num_ranks} ranks of this host; "
            f"set --nproc {num_gpus}, or device=cpu"
        )
    if num_gpus:
        print_note(
            f"{num_ranks} ranks on this host and {num_gpus} GPU(s): all ranks take the CPU; --nproc {num_gpus} takes "
            "the GPUs"
        )
    return torch.device("cpu")


def make_sharded_model(config: RunConfig, dataset: Dataset, world: World) -> Any:
    """The model on this rank's device, its tables placed; `model.embeddings.plan` says where."""
    return place_model(*plan_model(config, dataset, world), world)


def plan_model(config: RunConfig, dataset: Dataset, world: World) -> tuple[RunPlanner, Plan]:
    """Where the tables of a run go, before any is made. Collective. Raises MesetaError, on all ranks, as
    `RunPlanner.plan` does, and where the run needs more memory than there is."""
    tables, features = make_specs(config, dataset)
    collection = EmbeddingBagCollection(tables, features, seed=config.seed, device=world.device)
    outline = make_meta_model(config, dataset, collection)
    planner = RunPlanner(config, dataset, collection, outline, world)
    if config.check_memory and world.size > 1:  # no plan is searched for what cannot fit without any table
        planner.check_memory(Plan(num_ranks=world.size, tables=()))
    plan = planner.plan()
    if config.check_memory:
        planner.check_memory(plan)
    return planner, plan


def make_clip(config: RunConfig, world: World, over_parts: SumOverRanks | None) -> GradientClipper:
    """What limits the gradients of a run; `over_parts` adds over ranks, of dense parameters that are cut. Raises
    MesetaError, on all ranks, as `check_clip` does."""
    check_clip(config, world.size)
    dense, norm = config.dense, config.train.clip_norm
    if norm is None:
        return GradientClipper(value=dense.clip_value, norm=dense.clip_norm, sum_over_ranks=over_parts)
    return GradientClipper(value=dense.clip_value, norm=norm, includes_rows=True)


def place_model(planner: RunPlanner, plan: Plan, world: World) -> Any:
    """The model of a run on this rank's device, its tables as planned. Collective."""
    config, collection = planner.config, planner.collection
    model = make_unsharded_model(config, planner.dataset, collection)
    # What is cut goes to its device module by module, since all of it may not fit there.
    is_whole = config.dense.sharding == "replicated" or world.size == 1
    model.to(device=world.device if is_whole else "cpu", dtype=collection.dtype)
    comm, storage = config.comm.communication, config.storage.options
    return shard(model, plan, world=world, dense=config.dense.sharding, comm=comm, storage=storage)


def make_reader(
    config: RunConfig, dataset: Dataset, split: str, world: World, run: RunAttempt | None = None
) -> BatchReader:
    """This rank's slices of the batches of a split: training rows are shuffled, others come in the order of the
    files. `run` and errors: as `RowSource.reader`, collective as that."""
    train, data = config.train, config.data
    is_train = split == "train"
    options = ReaderOptions(
        batch_size=train.batch_size if is_train else train.eval_batch_size,
        shuffle=data.shuffle and is_train,
        seed=config.seed,
        window_rows=data.shuffle_window_rows,
        prefetch_batches=data.prefetch_batches,
        last_batch=data.last_batch if is_train else "keep",
        filter=data.filter,
        negative_keep=data.negative_keep if is_train else 1.0,
    )
    return make_row_source(data).reader(dataset, split, options, world, run)


def count_steps(config: RunConfig, reader: BatchReader, num_done_steps: int) -> int:
    """Steps of the whole run, of which `num_done_steps` are done and `reader` has the rest; the batch size may have
    changed in between. Raises MesetaError where there is nothing to read, or less to do than is done."""
    if reader.num_batches == 0:
        left_out, num_rows = reader.excluded_rows, reader.num_rows
        why = (
            f"data.last_batch 'drop' leaves out all of its {num_rows} rows" if num_rows
            else "data.filter and data.negative_keep leave none; ask for more" if any(astuple(left_out))
            else "prepare it again"
        )  # fmt: skip
        raise MesetaError(f"dataset {str(reader.dataset.dir)!r} has no rows to train on: {why}")
    left = (config.train.epochs - reader.epoch_index - 1) * reader.num_batches
    whole = num_done_steps + left + reader.num_remaining_batches
    num_steps = min(whole, config.train.max_steps or whole)
    if num_done_steps > num_steps:
        raise MesetaError(
            f"run_dir {str(config.run_dir)!r} is at step {num_done_steps}, beyond the {max(num_steps, 0)} that the "
            f"config "
            "asks for; raise train.epochs or train.max_steps, or choose another run_dir"
        )
    return num_steps


def set_learning_rates(
    config: RunConfig,
    optimizer: torch.optim.Optimizer,
    step: int,
    num_steps: int,
    num_falls: tuple[int, int] = (0, 0),
) -> float:
    """Give the dense part the rate of `step`, counted from 0, of a run of `num_steps`, in which evaluations have let
    the rates of tables and of the dense part fall so often; returns what those of tables are multiplied by."""
    factor = learning_rate_factor(config.dense_schedule, step, num_steps, num_falls[1])
    for group in optimizer.param_groups:
        group["lr"] = config.dense.optimizer.lr * factor
    return learning_rate_factor(config.embedding_schedule, step, num_steps, num_falls[0])


def task_weights(config: RunConfig, dataset: Dataset) -> list[float] | None:
    """One number per label of the dataset, None where all are 1; raises MesetaError for a label that it lacks."""
    given = config.train.task_weights
    for name in given:
        if name not in dataset.labels:
            raise MesetaError(
                f"config: train.task_weights names {name!r}, but the labels of the data are "
                f"{', '.join(map(repr, dataset.labels))}; {suggest(name, dataset.labels)}"
            )
    weights = [given.get(name, 1.0) for name in dataset.labels]
    if not any(weights):
        raise MesetaError("config: train.task_weights are 0 for all labels, so that nothing is learned; raise one")
    return None if all(weight == 1.0 for weight in weights) else weights
