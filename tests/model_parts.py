"""Replacement of an embedding collection, and inputs for models that read it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meseta.pipeline import Pipeline
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import FeatureSpec, TableSpec


@dataclass
class Pooled:
    values: Tensor


@dataclass
class Looked:
    pooled: Pooled


class OneRowEach(nn.Module):
    """Replacement of an embedding collection with one id per sample and feature, so that pooling is plain indexing."""

    def __init__(self, dims: list[int], pooling: Any = "sum", num_rows: int = 7) -> None:
        super().__init__()
        self.tables = [TableSpec(name=f"t{i}", num_embeddings=num_rows, embedding_dim=d) for i, d in enumerate(dims)]
        self.features = [FeatureSpec(name=f"f{i}", table=f"t{i}", pooling=pooling) for i in range(len(dims))]
        generator = torch.Generator().manual_seed(len(dims))
        self.rows = nn.ParameterList(nn.Parameter(torch.randn(num_rows, d, generator=generator)) for d in dims)

    def forward(self, sparse: KeyedJaggedTensor) -> Looked:
        parts = [rows[sparse[f.name].values] for rows, f in zip(self.rows, self.features, strict=True)]
        return Looked(Pooled(torch.cat(parts, dim=1)))


def some_ids(num_features: int, batch_size: int) -> KeyedJaggedTensor:
    ids = np.random.default_rng(1).integers(0, 7, (num_features, batch_size))
    return KeyedJaggedTensor(
        keys=tuple(f"f{i}" for i in range(num_features)),
        values=torch.from_numpy(ids.reshape(-1)),
        lengths=torch.ones(num_features * batch_size, dtype=torch.int64),
    )


def some_dense(batch_size: int, num_dense: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(2).normal(size=(batch_size, num_dense)))


def lasting_tensors(pipeline: Pipeline) -> dict[str, Tensor]:
    """Return all tensors that a step changes, by name: dense weights, moments, rows and their states."""
    model: Any = pipeline.model
    tensors = {f"dense.{name}": value for name, value in model.named_parameters()}
    for name, parameter in model.named_parameters():
        moments = pipeline.optimizer.state.get(parameter, {})
        tensors |= {
            f"moment.{name}.{key}": torch.as_tensor(value) for key, value in moments.items() if value is not None
        }
    for number, piece in enumerate(model.embeddings.shards):
        tensors |= {f"{number}.{name}": value for name, value in piece.values.items()}
    return {name: tensor.detach() for name, tensor in tensors.items()}
