"""Choice of the dtype of the dense part, and whether bfloat16 is fast on the processors of all ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from meseta import checkpoint
from meseta.checkpoint.manifest import read_manifest
from meseta.comm import World
from meseta.config import RunConfig
from meseta.config.embedding import RegularizationConfig
from meseta.config.models import VectorModelConfig
from meseta.config.precision import dense_dtype
from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.records import SparseFeature
from meseta.errors import StorageError
from meseta.spec import (
    COLUMN_BLOCK,
    DenseLoad,
    FeatureLoad,
    FeatureSpec,
    InitSpec,
    MesetaError,
    OptimizerSpec,
    TableSpec,
    Workload,
    suggest,
)
from meseta.spec.optimizer import COUPLED_DECAY_OPTIMIZERS
from meseta.spec.tables import DenseDtype
from meseta.spec.workload import DenseExchange
from meseta.system.processors import read_processor

if TYPE_CHECKING:  # `meseta plan` makes workloads without torch
    from torch import nn


DENSE_DTYPE_KEY = "dense_dtype"
"""Key of the dense dtype in the state of a checkpoint."""
# Minimum compute capability of GPUs with bfloat16 tensor cores.
_MIN_CAPABILITY = (8, 0)
# Rows, inputs and outputs of the timed layer.
_PROBE_SHAPE = (256, 512, 512)
_NUM_PROBES = 3


def resolve_dense_dtype(config: RunConfig, world: World) -> RunConfig:
    """Return the config with a dtype in place of 'auto'. Collective.

    A resumed run keeps the dtype of its checkpoint. A new run uses bfloat16 if every rank has instructions for it.
    Raises MesetaError, on all ranks, if the checkpoints cannot be read. Also raises it for a new run with dtype
    bfloat16 if a rank has no instructions for it, unless `dense.check_speed` is false.
    """
    has_begun, former = world.broadcast_from_rank_0(lambda: _previous_dtype(config))
    dense = config.dense
    if dense.dtype == "bfloat16" and dense.check_speed and not has_begun:
        world.raise_on_all_ranks(_slow_bfloat16_error(world.device))
    slow = world.all_gather_object(bfloat16_slow_reason(world.device))
    dtype = former if former and dense.dtype == "auto" else dense_dtype(config, is_fast=not any(slow))
    return config.model_copy(update={"dense": dense.model_copy(update={"dtype": dtype})})


def bfloat16_slow_reason(device: torch.device) -> str | None:
    """Return why bfloat16 is slower than float32 on this rank's device, or `None` if it is faster."""
    if device.type != "cuda":
        return read_processor().bfloat16_unavailable_reason()
    capability = torch.cuda.get_device_capability(device)
    if capability >= _MIN_CAPABILITY:
        return None
    name, version = torch.cuda.get_device_name(device), ".".join(map(str, capability))
    return f"{name} has compute capability {version}, but bfloat16 needs 8.0"


def bfloat16_note(config: RunConfig, world: World) -> str | None:
    """Return a note if bfloat16 is slow on a rank, or its results depend on the number of threads. Collective.

    The note is the same on all ranks. `None` if there is nothing to report.
    """
    if config.dense.dtype != "bfloat16":
        return None
    why = bfloat16_slow_reason(world.device) if config.dense.check_speed else None
    text = None if why is None else f"the dense part computes in bfloat16, as in training, which is slow here: {why}"
    if text is None and world.device.type == "cpu":
        text = read_processor().thread_dependence_reason()
    texts = world.all_gather_object(text)
    rank, text = next(((rank, text) for rank, text in enumerate(texts) if text), (0, None))
    where = f"rank {rank}: " if world.size > 1 else ""
    return text and f"note: {where}{text}"


def _previous_dtype(config: RunConfig) -> tuple[bool, DenseDtype | None]:
    """Return (whether the run resumes from run_dir or its mirror, the dense dtype of that checkpoint)."""
    path = checkpoint.newest(config.checkpoint_location)
    try:
        if path is not None:
            state = read_manifest(path)["state"]
        elif config.checkpoint.mirror:
            newest = next(checkpoint.Mirror(config.checkpoint.mirror).checkpoints(newest_first=True), None)
            if newest is None:
                return False, None
            if newest.manifest is None:
                return True, None
            state = newest.manifest["state"]
        else:
            return False, None
    except StorageError:
        raise
    except MesetaError:  # Loading the checkpoint raises the same error with a remedy.
        return True, None
    former = state.get(DENSE_DTYPE_KEY)
    return True, former if former in ("float32", "bfloat16") else None


def _slow_bfloat16_error(device: torch.device) -> MesetaError | None:
    why = bfloat16_slow_reason(device)
    if why is None:
        return None
    rows, inputs, outputs = _PROBE_SHAPE
    half_ms, float_ms = (1e3 * _linear_layer_s(device, dtype) for dtype in (torch.bfloat16, torch.float32))
    return MesetaError(
        f"dense.dtype 'bfloat16' is slow: {why}; a product of {rows} x {inputs} x {outputs} took {half_ms:.3g} ms, and "
        f"in float32 {float_ms:.3g} ms; set dense.dtype to float32 or auto, or dense.check_speed=false to use "
        "bfloat16 anyway"
    )


def _linear_layer_s(device: torch.device, dtype: torch.dtype) -> float:
    rows, inputs, outputs = _PROBE_SHAPE
    x = torch.ones(rows, inputs, device=device, dtype=dtype)
    weight = torch.ones(outputs, inputs, device=device, dtype=dtype)
    seconds = []
    for _ in range(_NUM_PROBES):
        start_s = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds)


def make_specs(config: RunConfig, dataset: Dataset) -> tuple[list[TableSpec], list[FeatureSpec]]:
    """Return one table and one feature per sparse column, with the settings of `embedding` and `embedding.tables`.

    Raises MesetaError if a setting names an unknown column or does not fit its column.
    """
    feature_names = [column.name for column in dataset.sparse]
    for section, settings in (("embedding", config.embedding.tables), ("checkpoint", config.checkpoint.tables)):
        for name in settings:
            if name not in feature_names:
                way_out = suggest(name, feature_names)
                raise MesetaError(f"config: {section}.tables has {name!r}, which is no sparse feature; {way_out}")
    tables, features = [], []
    for column in dataset.sparse:
        pooling = config.embedding.table_pooling(column.name)
        if pooling == "none" and column.weighted:
            raise MesetaError(
                f"config: embedding.tables.{column.name}.pooling must not be 'none', because the ids of the feature "
                "have weights; set it to sum or mean"
            )
        optimizer = OptimizerSpec(**config.embedding.table_optimizer(column.name))
        tables.append(
            TableSpec(
                name=column.name,
                num_embeddings=column.num_embeddings,
                embedding_dim=_table_width(config, column.name),
                dtype=config.embedding.dtype,
                init=InitSpec(**config.embedding.table_init(column.name)),
                optimizer=_with_penalties(column.name, optimizer, config.embedding.regularization),
                average=config.train.average_spec,
            )
        )
        features.append(
            FeatureSpec(
                name=column.name,
                table=column.name,
                pooling=pooling,
                weighted=column.weighted,
                id_policy=config.embedding.id_policy,
            )
        )
    return tables, features


def _table_width(config: RunConfig, table: str) -> int:
    """Return the number of columns of a table. Raises MesetaError if it is set but the model has no embeddings."""
    dim, model = config.embedding.table_embedding_dim(table), config.model
    if dim is not None and not isinstance(model, VectorModelConfig):
        raise MesetaError(
            f"config: embedding.tables.{table}.embedding_dim is {dim}, but model {model.name!r} has one weight per id "
            "and no embeddings; remove it, or choose another model.name"
        )
    return model.table_width(dim)


def _with_penalties(table: str, spec: OptimizerSpec, penalty: RegularizationConfig) -> OptimizerSpec:
    """Return the optimizer with the penalties of `embedding.regularization`. Raises MesetaError if it does not support
    them or sets its own."""
    if spec.name == "frozen" or not (penalty.l2 or penalty.l1):
        return spec
    where = f"config: embedding.regularization on table {table!r}, whose row optimizer is {spec.name!r}"
    if spec.is_custom or spec.name not in COUPLED_DECAY_OPTIMIZERS:
        raise MesetaError(
            f"{where}: the optimizer does not support penalties that are added to the gradient; set its "
            f"weight_decay (ftrl: l1, l2), or use one of {', '.join(COUPLED_DECAY_OPTIMIZERS)}"
        )
    if spec.weight_decay or spec.l1 or spec.stepped_rows != "touched":
        raise MesetaError(
            f"{where}: the optimizer also sets weight_decay, l1 or stepped_rows, which mean the same; remove one"
        )
    return replace(spec, weight_decay=penalty.l2, l1=penalty.l1, stepped_rows=penalty.rows)


def make_workload(
    config: RunConfig,
    dataset: Dataset,
    tables: Sequence[TableSpec],
    features: Sequence[FeatureSpec],
    outline: nn.Module | None = None,
) -> Workload:
    """Return a run's workload. Features have the names of columns. Without an `outline`, the dense part is empty."""
    columns = {column.name: column for column in dataset.sparse}
    num_samples = dataset.num_training_rows
    return Workload(
        tables=tuple(tables),
        features=tuple(features),
        batch_size=config.train.batch_size,
        loads={
            feature.name: feature_load(columns[feature.name], num_samples, has_grown=dataset.part > 1)
            for feature in features
        },
        dense=DenseLoad() if outline is None else dense_load(config, outline, len(dataset.dense)),
        dense_exchange=DenseExchange() if outline is None else dense_exchange(config, outline, dataset),
        comm=config.comm.communication,
    )


def feature_load(column: SparseFeature, num_samples: int, *, has_grown: bool = False) -> FeatureLoad:
    """Return the statistics that `meseta prepare` measured for a feature. `has_grown` means that rows were added."""
    counted = column.statistics
    # A split shorter than a window of the reuse histogram was counted as one window of the length of the split.
    window = max(min(counted.reuse.window_samples, num_samples), 1)
    return FeatureLoad(
        pooling_factor=counted.mean_pooling_factor,
        reuse=replace(counted.reuse, window_samples=window),
        # The first rows of a vocabulary are ordered by frequency.
        is_sorted=column.encoding == "vocabulary" and not has_grown,
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
    from meseta.comm.dense import sharded_modules
    from meseta.models.global_layers import SyncBatchNorm
    from meseta.models.layers import GLOBAL_LOSS_HOOKS, loss_term_names
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
        clips_rows=config.train.clip_norm is not None,
        num_flags=NUM_FLAGS + len(loss_term_names(model)) + len(of_all),
        # Logits, labels, a weight, or one for each task, and a mark.
        logit_bytes=(2 * len(dataset.labels) + max(dataset.num_masked_tasks, 1) + 1) * number_bytes if of_all else 0,
        num_masked_tasks=dataset.num_masked_tasks,
        num_micro_batches=config.train.accumulate_steps,
    )
