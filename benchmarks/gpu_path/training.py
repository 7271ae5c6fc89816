"""Training steps of a registered model, as `meseta train` runs them on one rank, with batches of a given seed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from typing import Any

import numpy as np
import torch

from gpu_path.dispatch import EmulatedGpu
from gpu_path.patches import track_stages
from gpu_path.records import StepRecording
from meseta.comm import World
from meseta.config import DenseOptimizerConfig, ModelConfig
from meseta.config.models import VectorModelConfig
from meseta.data import Batch
from meseta.embedding import EmbeddingBagCollection
from meseta.measure.synthetic_batches import zipf_ids
from meseta.models import make_model
from meseta.models.registry import MODELS
from meseta.optim import make_dense_optimizer
from meseta.pipeline import Pipeline, StepResult
from meseta.pipeline.device_copy import BatchPacker, PackedBatch
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import FeatureSpec, OptimizerSpec, TableSpec
from meseta.train.running_metrics import StepPredictions

NUM_DENSE, DIM, NUM_BATCHES, NUM_WARM_UP_STEPS = 13, 16, 8, 3
NUM_PACKED_BATCHES = 2
"""The first step reads two batches, and each later one a single batch."""


@dataclass(frozen=True, kw_only=True)
class TrainingCase:
    """Model, optimizers and shape of the batches of a training."""

    model: str
    row_optimizer: str = "rowwise_adagrad"
    dense_optimizer: str = "adam"
    dtype: Any = "float32"
    """Data type of the MLPs' activations."""
    batch_size: int = 64
    num_tables: int = 26
    num_rows: int = 1000
    """Number of rows of each table."""
    is_ragged: bool = False
    """Whether bags have 0 to 3 weighted ids, and samples have weights. Otherwise bags have one id."""

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels, several if the model predicts several."""
        return ("click", "buy") if MODELS[type(ModelConfig(name=self.model))].predicts_all_labels else ("click",)

    def make_model(self, device: str) -> Any:
        """Create the model on a device."""
        config = ModelConfig(name=self.model)
        width = config.table_width(DIM if isinstance(config, VectorModelConfig) else 0)
        optimizer: Any = OptimizerSpec(name=self.row_optimizer, lr=0.02)  # type: ignore[arg-type]
        tables = [
            TableSpec(
                name=f"t{f}",
                num_embeddings=self.num_rows,
                embedding_dim=width,
                optimizer=optimizer,
            )
            for f in range(self.num_tables)
        ]
        features = [FeatureSpec(name=f"f{f}", table=f"t{f}", weighted=self.is_ragged) for f in range(self.num_tables)]
        collection = EmbeddingBagCollection(tables, features, seed=1, device=device)
        return make_model(config, collection, NUM_DENSE, 2, self.dtype, self.labels).to(device)

    def make_batch(self, number: int) -> Batch:
        """Create the batch of a step on the host."""
        random = np.random.default_rng(number)
        size, keys = self.batch_size, tuple(f"f{f}" for f in range(self.num_tables))
        dense = torch.from_numpy(random.standard_normal((size, NUM_DENSE), dtype=np.float32))
        shape = (size, len(self.labels)) if len(self.labels) > 1 else (size,)
        label = torch.from_numpy((random.random(shape) < 0.25).astype(np.float32))
        if not self.is_ragged:
            ids = torch.from_numpy(zipf_ids(random, len(keys) * size, self.num_rows))
            return Batch(dense=dense, sparse=KeyedJaggedTensor.from_single_ids(keys, ids), label=label)
        lengths = random.integers(0, 4, len(keys) * size)
        ids = torch.from_numpy(zipf_ids(random, int(lengths.sum()), self.num_rows))
        weights = torch.from_numpy(random.random(len(ids), dtype=np.float32))
        sparse = KeyedJaggedTensor(keys, ids, torch.from_numpy(lengths), weights)
        return Batch(
            dense=dense, sparse=sparse, label=label, weight=torch.from_numpy(random.random(size, dtype=np.float32))
        )


class Training:
    """Training of a case on a device. Batches, learning rates and votes differ between steps."""

    def __init__(self, case: Any, device: str, *, uses_graphs: bool = False) -> None:
        """Create the training of a TrainingCase, or of an object with its methods and `dense_optimizer`."""
        self.model = case.make_model(device)
        world = World.single(device)
        config = DenseOptimizerConfig(name=case.dense_optimizer, lr=0.01)  # type: ignore[arg-type]
        self.optimizer = make_dense_optimizer(config, self.model.parameters())
        self.pipeline = Pipeline(self.model, self.optimizer, world)
        if not uses_graphs:
            self.pipeline.graphs = None
        self._predictions: StepPredictions | None = None
        self._num_steps = 0
        # In `meseta train`, another thread creates and packs them.
        self._batches = cycle([case.make_batch(number) for number in range(NUM_BATCHES)])
        self._packer = BatchPacker.for_device(world.device, num_parts=1)
        self._packed: deque[Batch | PackedBatch] = deque()
        self._steps: Iterator[StepResult] = self.pipeline.steps(
            iter(self._packed.popleft, None), schedule=self._set_rates, votes=lambda: (float(self._num_steps), 0.0)
        )

    def pack_batches(self) -> None:
        """Pack the batches that the next step reads."""
        while len(self._packed) < NUM_PACKED_BATCHES:
            batch = next(self._batches)
            self._packed.append(batch if self._packer is None else self._packer.pack(batch))

    def step(self) -> StepResult:
        """Train on the next batch, and copy its predictions for the metrics, which another thread computes."""
        self.pack_batches()
        result = next(self._steps)
        self._predictions = StepPredictions.start_copy(result.logits, result.batch, result.agreement)
        self._num_steps += 1
        return result

    def _set_rates(self) -> float:
        factor = 1.0 / (1 + self._num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 * factor
        return factor


def record_steps(
    gpu: EmulatedGpu, training: Training, num_steps: int = 1, num_warm_up_steps: int = NUM_WARM_UP_STEPS
) -> list[StepRecording]:
    """Record steps of a training on an emulated GPU, after steps in which it allocates constants and moments."""
    track_stages(gpu, training.pipeline.stage_times)
    for _ in range(num_warm_up_steps):
        training.step()
    recordings = []
    for _ in range(num_steps):
        training.pack_batches()
        gpu.begin()
        training.step()
        recordings.append(StepRecording(tuple(gpu.end()), gpu.python_calls.num_calls))
    return recordings
