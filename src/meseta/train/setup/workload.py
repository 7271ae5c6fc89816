"""Load of a training step, from a config, the statistics of its dataset, and its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from meseta.config import RunConfig
from meseta.config.precision import dense_dtype
from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.records import SparseFeature
from meseta.spec import COLUMN_BLOCK, DenseLoad, FeatureLoad, FeatureSpec, TableSpec, Workload
from meseta.spec.workload import DenseExchange

if TYPE_CHECKING:  # `meseta plan` makes workloads without torch
    from torch import nn


def make_workload(
    config: RunConfig,
    dataset: Dataset,
    tables: Sequence[TableSpec],
    features: Sequence[FeatureSpec],
    outline: nn.Module | None = None,
) -> Workload:
    """Return the workload of a run. Features are named after the columns of the dataset.

    Without the `outline` of the model, the dense part is empty.
    """
    columns = {column.name: column for column in dataset.sparse}
    num_samples = dataset.num_training_rows
    return Workload(
        tables=tuple(tables),
        features=tuple(features),
        batch_size=config.train.batch_size,
        loads={feature.name: feature_load(columns[feature.name], num_samples) for feature in features},
        dense=DenseLoad() if outline is None else dense_load(config, outline, len(dataset.dense)),
        dense_exchange=DenseExchange() if outline is None else dense_exchange(config, outline, dataset),
        comm=config.comm.communication,
    )


def feature_load(column: SparseFeature, num_samples: int) -> FeatureLoad:
    """Return the statistics that `meseta prepare` measured for a feature."""
    counted = column.statistics
    # A split shorter than a window of the reuse histogram was counted as one window of the length of the split.
    window = max(min(counted.reuse.window_samples, num_samples), 1)
    return FeatureLoad(
        pooling_factor=counted.mean_pooling_factor,
        reuse=replace(counted.reuse, window_samples=window),
        is_sorted=column.encoding == "vocabulary",  # Rows of a vocabulary are ordered by frequency.
    )


def dense_load(config: RunConfig, outline: nn.Module, num_dense: int) -> DenseLoad:
    """Return the operations and bytes of the dense part, from a model on the meta device."""
    from meseta.train.setup.meta_model import pooled_embedding_bytes, step_flops, step_peak_bytes

    parameters = [parameter for parameter in outline.parameters() if parameter.requires_grad]
    batch_size = config.train.batch_size
    moving = step_peak_bytes(outline, batch_size, num_dense) - 2 * pooled_embedding_bytes(outline, batch_size)
    return DenseLoad(
        flops_per_sample=step_flops(outline, batch_size, num_dense) / batch_size,
        parameter_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        activation_bytes_per_sample=max(-(-moving // batch_size), 0),
        dtype=dense_dtype(config),
    )


def dense_exchange(config: RunConfig, model: nn.Module, dataset: Dataset) -> DenseExchange:
    """Return the communication of the dense part besides the bytes of its gradients."""
    from meseta.comm.dense_shards import sharded_modules
    from meseta.models.base import GLOBAL_LOSS_HOOKS, loss_term_names
    from meseta.models.global_layers import SyncBatchNorm
    from meseta.train.saving import NUM_FLAGS

    parameters = [module for module in model.parameters() if module.requires_grad]
    number_bytes, of_all = (
        max((module.element_size() for module in parameters), default=4),
        loss_term_names(model, *GLOBAL_LOSS_HOOKS),
    )
    units = sharded_modules(model, cast("nn.Module", model.embeddings)) if config.dense.sharding == "fsdp" else ()
    shapes = tuple(tuple(tuple(p.shape) for p in unit.parameters() if p.dim()) for _, unit in units)
    cut = {id(p) for _, unit in units for p in unit.parameters() if p.dim()}
    norms_of_lamb = 2 * sum(map(len, shapes)) if config.dense.optimizer.name == "lamb" else 0
    return DenseExchange(
        num_tensors=len(parameters),
        element_bytes=number_bytes,
        num_padding_elements=sum(-module.numel() % COLUMN_BLOCK for module in parameters if id(module) not in cut),
        batch_norm_widths=tuple(
            module.weight.numel() for module in model.modules() if isinstance(module, SyncBatchNorm)
        ),
        sharded_shapes=shapes,
        num_gradient_norms=norms_of_lamb + (config.dense.clip_norm is not None),
        num_flags=NUM_FLAGS + len(loss_term_names(model)) + len(of_all),
        # Logits, labels, a weight, or one for each task, and a mark.
        logit_bytes=(2 * len(dataset.labels) + max(dataset.num_masked_tasks, 1) + 1) * number_bytes if of_all else 0,
        num_masked_tasks=dataset.num_masked_tasks,
        num_micro_batches=config.train.accumulate_steps,
    )
