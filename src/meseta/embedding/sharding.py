"""`meseta.shard`, which distributes a model over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from meseta.comm import DenseGradients, World
from meseta.comm.dense import shard_dense
from meseta.comm.sums import DENSE_FP16_EXPONENT
from meseta.embedding.base import BaseEmbeddingCollection
from meseta.embedding.collection import EmbeddingBagCollection
from meseta.embedding.sharded import ShardedEmbeddingBagCollection
from meseta.planner import choose_exchange_algorithms, make_plan
from meseta.spec import Communication, MesetaError, Plan, Topology, Workload, suggest
from meseta.spec.tiers import StorageOptions

ModelT = TypeVar("ModelT", bound=nn.Module)
DENSE_SHARDINGS = ("replicated", "fsdp")
"""Placement of dense parameters: a copy on each rank, or sharded by FSDP."""


def shard(
    model: ModelT,
    plan: Plan | Mapping[str, Any] | str | Path | None = None,
    *,
    world: World | None = None,
    dense: str = "replicated",
    comm: Communication | None = None,
    storage: StorageOptions | None = None,
) -> ModelT:
    """Distribute a model with an EmbeddingBagCollection over the ranks of this run.

    With several ranks, the collection is replaced by a sharded one, and dense parameters are copied from rank 0. Then
    `loss.backward()` computes the gradient of the global mean loss, if the loss of each rank is the mean over its slice
    of the batch. With one rank, the model is returned with its rows in the tiers of `plan`.

    Args:
        model: Model with one EmbeddingBagCollection. It is changed in place and returned.
        plan: Plan, plan document or plan file. `None` lets the planner choose.
        world: Ranks of the run. By default, `World.current`.
        dense: 'replicated', or 'fsdp' for hybrid sharding, see docs/several_ranks.md. With 'fsdp', create optimizers
            after this call. The model may be on the CPU before it.
        comm: Codecs and exchange algorithms between ranks, see docs/communication.md. Evaluation uses no codecs.
        storage: Memory limits for offloaded rows, see docs/tiers.md.

    Raises MesetaError if the model has no or several collections, or the plan or the dense parameters do not fit.
    """
    if dense not in DENSE_SHARDINGS:
        raise MesetaError(f"meseta.shard: dense {dense!r} is unknown; {suggest(dense, DENSE_SHARDINGS)}")
    collections = [(name, m) for name, m in model.named_modules() if isinstance(m, EmbeddingBagCollection)]
    if len(collections) != 1:
        raise MesetaError(
            f"meseta.shard: the model must have exactly one EmbeddingBagCollection, got {len(collections)}; "
            "put all tables into one collection"
        )
    name, collection = collections[0]
    if name == "":
        raise MesetaError(
            "meseta.shard: the argument must be the model that contains the EmbeddingBagCollection, not the collection "
            "itself; the gradients of its dense parameters are summed over ranks too"
        )
    world = world or World.current(collection.device)
    if world.size == 1:
        if plan is not None:
            collection.apply_plan(resolve_plan(plan, collection, world), storage)
        return model
    comm = comm or Communication()
    plan = resolve_plan(plan, collection, world, comm)
    world = world.with_plan(replace(plan, devices_per_host=plan.devices_per_host or world.ranks_per_host))
    sharded = ShardedEmbeddingBagCollection(collection, plan, world, comm, storage)
    owner = model.get_submodule(name.rpartition(".")[0])
    setattr(owner, name.rpartition(".")[2], sharded)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            world.broadcast(tensor)
    make_coding, parameters = sharded.make_sum_codec("dense", "dense", DENSE_FP16_EXPONENT), list(model.parameters())
    if dense == "fsdp":
        parameters = shard_dense(model, sharded, world, sharded, make_coding)
    if parameters:
        model.dense_gradients = DenseGradients(parameters, world, sharded, make_coding)  # type: ignore[assignment]
    return model


def resolve_plan(
    plan: Plan | Mapping[str, Any] | str | Path | None,
    collection: BaseEmbeddingCollection,
    world: World,
    comm: Communication | None = None,
) -> Plan:
    """Return a checked plan, given an argument of `shard`.

    `None` searches a plan for batches of 2048 samples with one id per feature. The same workload selects an exchange
    algorithm if neither the plan nor `comm` has one. For other workloads, pass one to `make_plan`.
    """
    num_ranks, comm = world.size, comm or Communication()
    workload = Workload(tables=collection.tables, features=collection.features, batch_size=2048, comm=comm)
    if plan is None:
        per_host = world.ranks_per_host
        plan = make_plan(workload, Topology(num_hosts=num_ranks // per_host, devices_per_host=per_host))
    elif isinstance(plan, (str, Path)):
        plan = Plan.load(plan, collection.tables, num_ranks)
    elif isinstance(plan, Mapping):
        plan = Plan.from_dict(plan, collection.tables, num_ranks)
    if plan.num_ranks != num_ranks:
        raise MesetaError(f"plan: requires {plan.num_ranks} ranks, but this run has {num_ranks}; make a new plan")
    plan.check(collection.tables)
    hosts = Topology(num_hosts=num_ranks // plan.ranks_per_host, devices_per_host=plan.ranks_per_host)
    return choose_exchange_algorithms(plan, workload, hosts)
