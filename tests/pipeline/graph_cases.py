"""Trainings on an emulated GPU, whose steps run eagerly or are replayed as CUDA graphs."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meseta.comm import World
from meseta.config import DenseOptimizerConfig, ModelConfig
from meseta.config.models import section_class
from meseta.data.read.batch import Batch
from meseta.embedding import EmbeddingBagCollection
from meseta.models import make_model
from meseta.models.registry import MODELS
from meseta.optim import make_dense_optimizer
from meseta.pipeline import Pipeline, StepResult
from meseta.pipeline.step_graph import StepGraphs
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import FeatureSpec, OptimizerSpec, TableSpec
from meseta.spec.optimizer import USED_FIELDS
from model_parts import lasting_tensors

NUM_DENSE, NUM_ROWS, WIDTH, BASE_LR = 3, 40, 4, 0.02
ROW_OPTIONS = {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.01}
"""Options of row optimizers. Each optimizer receives those that it uses."""


@dataclass(frozen=True, kw_only=True)
class GraphCase:
    """Model, optimizers and batches of a training. Table i and feature i use option i of each tuple, in turn."""

    model: Any = "dlrm"
    """Name of a built-in model, or a class of `own_models`."""
    layers: dict[str, Any] = field(default_factory=dict)
    """Keys of the model's config section."""
    dense: str = "adam"
    dtype: Any = "float32"
    """Data type of the MLPs' activations."""
    rows: tuple[str, ...] = ("rowwise_adagrad",)
    row_options: dict[str, Any] = field(default_factory=dict)
    row_dtype: Any = "float32"
    policies: tuple[Any, ...] = ("error", "clamp", "hash")
    pooling: tuple[Any, ...] = ("sum", "mean")
    groups: tuple[str, ...] = ("",)
    """Groups of features with the same batch size."""
    num_tables: int = 2
    is_weighted: bool = True
    """Whether ids and samples have weights."""
    lengths: tuple[tuple[int, int], ...] = ((0, 3),)
    """Minimum and maximum number of ids per bag, for successive parts of the training."""
    batch_size: int = 6
    num_batches: int = 5
    padded_interval: int | None = None
    """Interval of batches with two padding samples."""
    last_batch_size: int | None = None
    pipeline_options: dict[str, Any] = field(default_factory=dict)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels, several if the model predicts several."""
        is_multi_task = isinstance(self.model, str) and MODELS[section_class(self.model)].predicts_all_labels
        return ("click", "buy") if is_multi_task else ("click",)

    def make_pipeline(self, device: str = "cuda") -> Pipeline:
        """Create the model, its optimizers and its pipeline."""
        if isinstance(self.model, str):
            config = ModelConfig(name=self.model, **{**section_class(self.model).small_sizes, **self.layers})
            embeddings = self.make_embeddings(config.table_width(), device)
            model: Any = make_model(config, embeddings, NUM_DENSE, 2, self.dtype, self.labels)
        else:
            torch.manual_seed(3)
            embeddings = self.make_embeddings(WIDTH, device)
            model = self.model(embeddings, num_dense=NUM_DENSE, labels=self.labels, seed=2)
        model = model.to(device=device, dtype=torch.float64 if self.row_dtype == "float64" else torch.float32)
        momentum = {"momentum": 0.5} if self.dense == "sgd" else {}
        dense = DenseOptimizerConfig(name=self.dense, lr=BASE_LR, **momentum)  # type: ignore[arg-type]
        optimizer = make_dense_optimizer(dense, model.parameters())
        return Pipeline(model, optimizer, World.single(device), **self.pipeline_options)

    def make_embeddings(self, width: int, device: str) -> EmbeddingBagCollection:
        """Create the tables."""
        tables, features = list[TableSpec](), list[FeatureSpec]()
        for i in range(self.num_tables):
            name, pooling = self.rows[i % len(self.rows)], self.pooling[i % len(self.pooling)]
            used = {key: value for key, value in ROW_OPTIONS.items() if key in USED_FIELDS[name]}
            optimizer: Any = OptimizerSpec(name=name, **{**used, **self.row_options})
            tables.append(
                TableSpec(
                    name=f"t{i}",
                    num_embeddings=NUM_ROWS,
                    embedding_dim=width,
                    dtype=self.row_dtype,
                    optimizer=optimizer,
                )
            )
            features.append(
                FeatureSpec(
                    name=f"f{i}",
                    table=f"t{i}",
                    pooling=pooling,
                    weighted=self.is_weighted and pooling != "none",
                    id_policy=self.policies[i % len(self.policies)],
                    batch=self.groups[i % len(self.groups)],
                )
            )
        return EmbeddingBagCollection(tables, features, seed=1, device=device)

    def make_batch(self, number: int) -> Batch:
        """Create a batch on the host. Its values, and the numbers of its ids, differ from those of other batches."""
        random = torch.Generator().manual_seed(number + 7)
        is_last = number == self.num_batches - 1
        size = self.last_batch_size if is_last and self.last_batch_size else self.batch_size
        is_padded = self.padded_interval is not None and (number + 1) % self.padded_interval == 0
        num_padding = 2 if is_padded else 0
        part = min(number * len(self.lengths) // self.num_batches, len(self.lengths) - 1)
        shortest, longest = self.lengths[part]
        lengths = torch.randint(shortest, longest + 1, (self.num_tables, size), generator=random)
        lengths[:, size - num_padding :] = 0
        ids = []
        for i, num_ids in enumerate(lengths.sum(1).tolist()):
            num_outside = 0 if self.policies[i % len(self.policies)] == "error" else 5
            ids.append(torch.randint(-num_outside, NUM_ROWS + num_outside, (num_ids,), generator=random))
        values = torch.cat(ids)
        weight = torch.rand(size, generator=random) if self.is_weighted else torch.ones(size)
        weight[size - num_padding :] = 0.0
        shape = (size, len(self.labels)) if len(self.labels) > 1 else (size,)
        return Batch(
            dense=torch.randn(size, NUM_DENSE, generator=random),
            sparse=KeyedJaggedTensor(
                tuple(f"f{i}" for i in range(self.num_tables)),
                values,
                lengths.flatten(),
                torch.rand(len(values), generator=random) if self.is_weighted else None,
            ),
            label=(torch.rand(shape, generator=random) < 0.3).float(),
            weight=weight if self.is_weighted or self.padded_interval else None,
            num_padding=num_padding,
        )

    def make_batches(self) -> list[Batch]:
        """Create all batches."""
        return [self.make_batch(number) for number in range(self.num_batches)]


class GraphTraining:
    """Training of a case on an emulated GPU. Batches, learning rates and votes differ between steps."""

    def __init__(self, case: GraphCase, *, is_captured: bool = True) -> None:
        self.pipeline = case.make_pipeline()
        if not is_captured:
            self.pipeline.graphs = None
        self.results: list[StepResult] = []

    @property
    def graphs(self) -> StepGraphs:
        assert self.pipeline.graphs is not None
        return self.pipeline.graphs

    def steps(self, batches: Iterable[Batch]) -> Generator[StepResult, None, None]:
        """Train on batches and yield the result of each step."""
        for result in self.pipeline.steps(iter(batches), schedule=self._set_rates, votes=self._votes):
            self.results.append(result)
            yield result

    def train(self, batches: Iterable[Batch]) -> None:
        """Train on batches."""
        for _ in self.steps(batches):
            pass

    def state(self) -> dict[str, Tensor]:
        """Return copies of everything that a step changes, on the host."""
        model: Any = self.pipeline.model
        tensors = {
            **lasting_tensors(self.pipeline),
            **{f"buffer.{name}": value for name, value in model.named_buffers()},
        }
        if model.embeddings.num_out_of_range is not None:
            tensors["num_out_of_range"] = model.embeddings.num_out_of_range
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}

    def outputs(self) -> dict[str, Tensor]:
        """Return the predictions, losses, loss terms and votes of all steps.

        They are read after the last step, so that a later replay must not have overwritten them.
        """
        tensors = {}
        for number, result in enumerate(self.results):
            sums = [result.loss, *result.agreement.terms.values()]
            tensors[f"logits {number}"] = result.logits.cpu()
            tensors[f"losses {number}"] = torch.tensor(sums, dtype=torch.float64)
            tensors[f"votes {number}"] = torch.tensor(result.votes, dtype=torch.float64)
        return tensors

    def _set_rates(self) -> float:
        step = self.pipeline.model.embeddings.step
        for group in self.pipeline.optimizer.param_groups:
            group["lr"] = BASE_LR / (1 + step)
        return 1.0 / (2 + step)

    def _votes(self) -> tuple[float, float]:
        return float(self.pipeline.model.embeddings.step), 0.5


def different_tensors(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors that do not have the same shape, dtype and bits in both."""
    assert first.keys() == second.keys()
    return [name for name in first if not has_same_bits(first[name], second[name])]


def has_same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (first, second)))
