"""Training of DLRM-DCNv2 with a Pipeline, on batches with new ids in every step."""

from __future__ import annotations

import time
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np
import torch
from common.packed_batches import PackedBatches

from dcnv2.shape import NUM_DENSE, Dcnv2Shape
from meseta.comm import World
from meseta.config import DenseOptimizerConfig, ModelConfig
from meseta.data import Batch
from meseta.embedding import EmbeddingBagCollection
from meseta.models import make_model
from meseta.optim import make_dense_optimizer
from meseta.pipeline import Pipeline
from meseta.sparse import KeyedJaggedTensor


class UniformBatches:
    """Batches of dense inputs from N(0, 1), ids that are uniform over the rows of their table, and random labels."""

    def __init__(self, shape: Dcnv2Shape) -> None:
        self.shape = shape

    def make(self, number: int) -> Batch:
        """Create the batch of a step. Threads may call it concurrently."""
        shape, random = self.shape, np.random.default_rng((1, number))
        size = shape.batch_size
        ids = [
            random.integers(rows, size=size * n, dtype=np.int32) for rows, n in zip(shape.rows, shape.ids, strict=True)
        ]
        return Batch(
            dense=torch.from_numpy(random.standard_normal((size, NUM_DENSE), dtype=np.float32)),
            sparse=KeyedJaggedTensor(self._keys, torch.from_numpy(np.concatenate(ids)), self._lengths),
            label=torch.from_numpy((random.random(size, dtype=np.float32) < 0.25).astype(np.float32)),
        )

    @cached_property
    def _keys(self) -> tuple[str, ...]:
        return tuple(f"f{f}" for f in range(len(self.shape.ids)))

    @cached_property
    def _lengths(self) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.array(self.shape.ids, np.int64), self.shape.batch_size))


def make_dcnv2(shape: Dcnv2Shape, device: str) -> Any:
    """Create the model on a device. Its tables are allocated there, and filled in place with uniform rows."""
    embeddings = EmbeddingBagCollection(*shape.specs, device=device)
    for shard in embeddings.shards:
        # The range is that of MLPerf. Equal rows would need less power on a GPU.
        scale = shard.spec.num_embeddings**-0.5
        shard.acquire().weight.uniform_(-scale, scale)
        shard.release()
    config = ModelConfig(
        name="dlrm_dcnv2",
        embedding_dim=shape.dim,
        bottom_mlp=shape.bottom_mlp,
        top_mlp=shape.top_mlp,
        cross_layers=shape.cross[0],
        cross_low_rank=shape.cross[1],
    )
    return make_model(config, embeddings, NUM_DENSE, 0, shape.dense_dtype).to(device)


class Dcnv2Training:
    """Training of a shape on a device."""

    def __init__(self, shape: Dcnv2Shape, device: str) -> None:
        world = World.single(device)
        model = make_dcnv2(shape, device)
        optimizer = make_dense_optimizer(DenseOptimizerConfig(name="adam", lr=0.001), model.parameters())
        self.pipeline = Pipeline(model, optimizer, world)
        self._is_gpu = world.device.type == "cuda"
        self._batches = PackedBatches(count(), UniformBatches(shape).make, world.device)
        self._steps = self.pipeline.steps(self._batches)

    def time_steps(self, num_steps: int) -> float:
        """Return seconds per step, until the device is idle. Batches are created and packed before.

        Raises NonFiniteLoss if the last loss is not finite.
        """
        self._batches.pack(num_steps)
        self._synchronize()
        start_s = time.perf_counter()
        for _ in range(num_steps):
            result = next(self._steps)
        self._synchronize()
        duration_s = time.perf_counter() - start_s
        assert isinstance(result.loss, float)
        return duration_s / num_steps

    def pop_stages_ms(self) -> dict[str, float]:
        """Return milliseconds per step of each stage since the last call."""
        return {name: 1e3 * seconds for name, seconds in self.pipeline.stage_times.pop_means().items()}

    @property
    def num_replayed(self) -> int:
        """Number of steps that CUDA graphs replayed."""
        return 0 if self.pipeline.graphs is None else self.pipeline.graphs.num_replayed

    def _synchronize(self) -> None:
        if self._is_gpu:
            torch.cuda.synchronize()
