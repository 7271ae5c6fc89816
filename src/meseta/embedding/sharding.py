"""`meseta.shard`: the one call between a user's model and several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from meseta.comm import DenseGradients, World
from meseta.comm.dense_shards import shard_dense
from meseta.comm.sum_codec import DENSE_FP16_EXPONENT
from meseta.embedding.base import BaseEmbeddingCollection
from meseta.embedding.collection import EmbeddingBagCollection
from meseta.embedding.sharded import ShardedEmbeddingBagCollection
from meseta.planner import choose_exchange_algorithms, make_plan
from meseta.spec import Communication, MesetaError, Plan, Topology, Workload, suggest
from meseta.spec.tiers import StorageOptions

ModelT = TypeVar("ModelT", bound=nn.Module)
DENSE_SHARDINGS = ("replicated", "fsdp")
"""How dense parameters may lie on the ranks."""


def shard(
    model: ModelT,
    plan: Plan | Mapping[str, Any] | str | Path | None = None,
    *,
    world: World | None = None,
    dense: str = "replicated",
    comm: Communication | None = None,
    storage: StorageOptions | None = None,
) -> ModelT:
    """Place the model's EmbeddingBagCollection on the ranks of this run; the same code runs on one process.

    Started plainly, the model is returned as it is, its rows in the tiers of `plan` where there is one. Under torchrun
    the collection is replaced by a sharded one (by `plan`: a Plan, a plan document, a plan file, or None for the
    planner's), dense parameters are taken from rank 0, and from then on `loss.backward()` leaves every rank with the
    gradient of the global mean of the loss, when each rank's loss is the mean over its slice of the batch.

    With `dense` 'fsdp' the dense parameters are cut over the ranks of each host (`devices_per_host` of the plan; as
    the ranks were launched where it has none) and replicated across hosts, see docs/several_ranks.md: optimizers are
    then made of `model.parameters()` after this call, and the model may be on the CPU until it is cut.

    `comm` says in how many bits ranks write what they send, and which way it takes between hosts, see
    docs/communication.md; evaluations travel as they are. `storage` has room for rows that lie far, see docs/tiers.md.

    Raises MesetaError when the model has no EmbeddingBagCollection, or several, the plan does not fit, or the dense
    parameters cannot be cut.
    """
    if dense not in DENSE_SHARDINGS:
        raise MesetaError(f"meseta.shard: dense {dense!r} is unknown; {suggest(dense, DENSE_SHARDINGS)}")
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, EmbeddingBagCollection)]
    if len(found) != 1:
        raise MesetaError(
            f"meseta.shard: the model must have one EmbeddingBagCollection, found {len(found)}; "
            "put all tables into one collection"
        )
    name, collection = found[0]
    if name == "":
        raise MesetaError(
            "meseta.shard: give the model that holds the EmbeddingBagCollection, not the collection itself; "
            "the gradients of its dense parameters are summed over ranks too"
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
    """A checked Plan from whatever the user gave.

    For None it is searched for batches of 2,048 samples with one id per feature, and for these a way between hosts is
    chosen where neither plan nor `comm` says one; who knows more of the ids gives a Workload to `make_plan`.
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
        raise MesetaError(f"plan: it is for {plan.num_ranks} ranks, but this run has {num_ranks}; make a new plan")
    plan.check(collection.tables)
    hosts = Topology(num_hosts=num_ranks // plan.ranks_per_host, devices_per_host=plan.ranks_per_host)
    return choose_exchange_algorithms(plan, workload, hosts)
