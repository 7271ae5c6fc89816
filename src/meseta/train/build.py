"""From a config and a dataset to tables, features and a model on the ranks of this run."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch

from meseta.comm import World
from meseta.config import RunConfig
from meseta.config.run import RegularizationConfig, RowOptimizerConfig
from meseta.data.dataset import Dataset
from meseta.data.reader import Reader, ReaderOptions
from meseta.embedding import EmbeddingBagCollection, shard
from meseta.embedding.base import Collection
from meseta.models import make_model, wanted_embedding_dim
from meseta.optim.schedule import learning_rate_factor
from meseta.spec import FeatureSpec, InitSpec, MesetaError, OptimizerSpec, TableSpec, nearest
from meseta.spec.optimizer import USED_FIELDS
from meseta.train.memory import check_memory
from meseta.train.planning import plan_run

COUPLED = tuple(name for name, used in USED_FIELDS.items() if "weight_decay_mode" in used)
"""Row optimizers to whose gradient a penalty is added."""


def choose_device(config: RunConfig) -> torch.device:
    """The device of this rank; raises MesetaError where a GPU is asked for and torch sees none."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if config.device == "cuda" and not torch.cuda.is_available():
        raise MesetaError("device 'cuda' was asked for, but torch sees no GPU; set device=cpu, or install a CUDA torch")
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise MesetaError(f"rank {local_rank} of this host finds only {torch.cuda.device_count()} GPUs; lower --nproc")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def make_specs(config: RunConfig, dataset: Dataset) -> tuple[list[TableSpec], list[FeatureSpec]]:
    """One table and one feature per sparse column, with the settings of `embedding` and `embedding.tables`."""
    known = [column.name for column in dataset.sparse]
    for name in config.embedding.tables:
        if name not in known:
            raise MesetaError(f"config: embedding.tables names {name!r}, which the data lack; {nearest(name, known)}")
    dim = wanted_embedding_dim(config.model)
    tables, features = [], []
    for column in dataset.sparse:
        own = config.embedding.tables.get(column.name)
        init = own.init if own and own.init else config.embedding.init
        optimizer = own.optimizer if own and own.optimizer else config.embedding.optimizer
        tables.append(
            TableSpec(
                name=column.name,
                num_embeddings=column.num_embeddings,
                embedding_dim=dim,
                dtype=config.embedding.dtype,
                init=InitSpec(kind=init.kind, scale=init.scale),
                optimizer=_optimizer_spec(column.name, optimizer, config.embedding.regularization),
            )
        )
        features.append(
            FeatureSpec(
                name=column.name,
                table=column.name,
                pooling=config.embedding.pooling,
                weighted=column.weighted,
                id_policy=config.embedding.id_policy,
            )
        )
    return tables, features


def make_sharded_model(config: RunConfig, dataset: Dataset, world: World) -> Any:
    """The model on this rank's device, its tables placed; `model.embeddings.plan` says where."""
    tables, features = make_specs(config, dataset)
    collection = EmbeddingBagCollection(tables, features, seed=config.seed, device=world.device)
    model = make_model(config.model, collection, len(dataset.dense), config.seed, config.dense.dtype, dataset.labels)
    plan = plan_run(config, dataset, collection, model, world)
    # What is cut goes to its device module by module, since all of it may not fit there.
    is_whole = config.dense.sharding == "replicated" or world.size == 1
    model.to(device=world.device if is_whole else "cpu", dtype=collection.dtype)
    if config.check_memory:
        check_memory(config, dataset, model, plan, {table.name: table for table in tables}, world)
    return shard(model, plan, world=world, dense=config.dense.sharding)


def make_reader(config: RunConfig, dataset: Dataset, split: str, world: World) -> Reader:
    """This rank's slices of the batches of a split: training rows are shuffled, others come in the order of the
    files."""
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
    return Reader(dataset, split, options, rank=world.rank, num_ranks=world.size)


def set_learning_rates(
    config: RunConfig, embeddings: Collection, optimizer: torch.optim.Optimizer, step: int, num_steps: int
) -> None:
    """The rates of `step`, counted from 0, of a run of `num_steps`."""
    embeddings.lr_factor = learning_rate_factor(config.embedding.schedule, step, num_steps)
    factor = learning_rate_factor(config.dense.schedule, step, num_steps)
    for group in optimizer.param_groups:
        group["lr"] = config.dense.optimizer.lr * factor


def task_weights(config: RunConfig, dataset: Dataset) -> list[float] | None:
    """One number per label of the dataset, None where all are 1; raises MesetaError for a label that it lacks."""
    given = config.train.task_weights
    for name in given:
        if name not in dataset.labels:
            raise MesetaError(
                f"config: train.task_weights names {name!r}, but the labels of the data are "
                f"{', '.join(map(repr, dataset.labels))}; {nearest(name, dataset.labels)}"
            )
    weights = [given.get(name, 1.0) for name in dataset.labels]
    if not any(weights):
        raise MesetaError("config: train.task_weights are 0 for all labels, so that nothing is learned; raise one")
    return None if all(weight == 1.0 for weight in weights) else weights


def _optimizer_spec(table: str, config: RowOptimizerConfig, penalty: RegularizationConfig) -> OptimizerSpec:
    """The optimizer of a table with the penalties of `embedding.regularization`; raises MesetaError where it cannot
    have them."""
    spec = OptimizerSpec(**config.model_dump())
    if spec.name == "frozen" or not (penalty.l2 or penalty.l1):
        return spec
    where = f"config: embedding.regularization on table {table!r}, whose row optimizer is {spec.name!r}"
    if spec.is_own or spec.name not in COUPLED:
        raise MesetaError(
            f"{where}: the penalties are added to the gradient, and this optimizer has decay of its own; set its own "
            f"constants (weight_decay; ftrl: l1, l2), or take one of {', '.join(COUPLED)}"
        )
    if spec.weight_decay or spec.l1 or spec.stepped_rows != "touched":
        raise MesetaError(
            f"{where}: the optimizer sets weight_decay, l1 or stepped_rows itself, which mean the same; set one"
        )
    return replace(spec, weight_decay=penalty.l2, l1=penalty.l1, stepped_rows=penalty.rows)
