"""Target that trains a DLRM with Meseta, and a check of its losses."""

from __future__ import annotations

import math
from itertools import cycle
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from meseta.comm import World
from meseta.config import DenseOptimizerConfig
from meseta.data import Batch
from meseta.embedding import EmbeddingBagCollection, shard
from meseta.measure.harness.target import BenchmarkTarget
from meseta.measure.synthetic_batches import DlrmWorkload, TrainingBatch, make_training_batches
from meseta.models import DLRM, MLP, MLPOptions
from meseta.ops.core import instruction_set
from meseta.optim import make_dense_optimizer
from meseta.pipeline import Pipeline, choose_overlap
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import FeatureSpec, InitSpec, OptimizerSpec, Plan, StorageOptions, TableSpec
from meseta.storage import ROW
from peers.e2e_peers import INIT_VALUE, LR, PlainDLRM

CHECK_LR = 0.01
NUM_CHECKED_STEPS = 5
TOLERANCE = 1e-5


class MesetaTraining(BenchmarkTarget):
    """Trains a DLRM with a Pipeline like `meseta train`. On several ranks it uses `meseta.shard`."""

    def __init__(self, workload: dict[str, Any], optimizer: str, dense_dtype: str = "float32") -> None:
        super().__init__()
        self.training = DlrmWorkload.from_json(workload)
        self.world = World.current()
        # Constant rows are created quickly, and their values do not affect the speed.
        model = make_model(self.training, optimizer, dense_dtype, LR, InitSpec(kind="constant", scale=INIT_VALUE))
        samples = make_training_batches(self.training, self.world.rank, self.world.size)
        self.steps = make_pipeline(model, LR, self.world).steps(map(make_batch, cycle(samples)))
        self.actions = {"step": self._train}

    def facts(self) -> dict[str, Any]:
        return {
            "actions": list(self.actions),
            "samples_per_call": self.training.lookups.batch_size,
            "versions": {"torch": torch.__version__, "isa": instruction_set()},
        }

    def barrier(self) -> None:
        self.world.barrier()

    def _train(self, call: int) -> None:
        next(self.steps)


class TrainingCheck(BenchmarkTarget):
    """Compares losses with plain PyTorch."""

    def facts(self) -> dict[str, Any]:
        return {"actions": []}

    def check(self, workload: dict[str, Any]) -> list[str]:
        """Train both models with SGD from equal weights. Return a message for each step in which their losses
        differ."""
        shape = DlrmWorkload.from_json(workload)
        # Scale rows such that sums of long bags are not larger. Large logits would amplify rounding errors.
        init = InitSpec(kind="uniform", scale=0.1 / math.sqrt(shape.lookups.bag_size))
        model = make_model(shape, "sgd", "float32", CHECK_LR, init)
        reference = _make_reference_model(model, shape)
        step, optimizer = (
            make_pipeline(model, CHECK_LR, World.single()),
            torch.optim.SGD(reference.parameters(), lr=CHECK_LR),
        )
        wrong = []
        for index, samples in enumerate(make_training_batches(shape)[:NUM_CHECKED_STEPS], start=1):
            loss_of_step = step(make_batch(samples)).loss
            optimizer.zero_grad()
            logits = reference(torch.from_numpy(samples.dense), torch.from_numpy(samples.ids))
            loss = nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(samples.label))
            loss.backward()
            optimizer.step()
            if not abs(loss_of_step - loss.item()) <= TOLERANCE:
                wrong.append(
                    f"{shape.name}, step {index}: our loss is {loss_of_step!r}, plain PyTorch's {loss.item()!r}"
                )
        return wrong


def make_specs(
    training: DlrmWorkload, optimizer: OptimizerSpec, init: InitSpec
) -> tuple[list[TableSpec], list[FeatureSpec]]:
    """Return a table and a feature for each table of the workload."""
    tables = [
        TableSpec(name=f"t{f}", num_embeddings=rows, embedding_dim=training.dim, init=init, optimizer=optimizer)
        for f, rows in enumerate(training.lookups.rows)
    ]
    return tables, [FeatureSpec(name=f"f{f}", table=table.name) for f, table in enumerate(tables)]


def make_model(training: DlrmWorkload, optimizer: str, dense_dtype: str, lr: float, init: InitSpec) -> DLRM:
    """Create a DLRM of this shape. `dense_dtype` is the compute dtype of its layers."""
    tables, features = make_specs(training, OptimizerSpec(name=optimizer, lr=lr), init)
    return DLRM(
        EmbeddingBagCollection(tables, features),
        num_dense=training.num_dense,
        bottom_mlp=(*training.bottom_mlp, training.dim),
        top_mlp=training.top_mlp,
        options=MLPOptions(dtype=cast(Any, dense_dtype)),
    )


def make_pipeline(
    model: DLRM, lr: float, world: World, plan: Plan | None = None, storage: StorageOptions | None = None
) -> Pipeline:
    """Shard the model by `plan`, and create a Pipeline that trains it with SGD."""
    placed = cast(Any, shard(model, plan, world=world, storage=storage))
    optimizer = make_dense_optimizer(DenseOptimizerConfig(name="sgd", lr=lr), model.parameters())
    return Pipeline(placed, optimizer, world, overlap=choose_overlap("auto", placed, world).hidden)


def make_batch(samples: TrainingBatch) -> Batch:
    """Create a new Batch from samples, as the reader does in each step."""
    num_features, batch_size, bag_size = samples.ids.shape
    keys, values = tuple(f"f{f}" for f in range(num_features)), torch.from_numpy(samples.ids.reshape(-1))
    if bag_size == 1:
        sparse = KeyedJaggedTensor.from_single_ids(keys, values)
    else:
        lengths = torch.from_numpy(np.full(num_features * batch_size, bag_size))
        sparse = KeyedJaggedTensor(keys, values, lengths)
    return Batch(dense=torch.from_numpy(samples.dense), sparse=sparse, label=torch.from_numpy(samples.label))


@torch.no_grad()
def _make_reference_model(model: DLRM, training: DlrmWorkload) -> PlainDLRM:
    reference = PlainDLRM(training)
    shards = cast(EmbeddingBagCollection, model.embeddings).shards
    tables = [shard.read(0, shard.shard.num_rows)[ROW] for shard in shards]
    for table, weight in zip(reference.tables.parameters(), tables, strict=True):
        table.copy_(weight)
    for target_mlp, source_mlp in ((reference.bottom, cast(MLP, model.bottom_mlp)), (reference.top, model.top_mlp)):
        for target, source in zip(target_mlp.parameters(), source_mlp.parameters(), strict=True):
            target.copy_(source)
    return reference
