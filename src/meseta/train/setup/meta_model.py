"""Models on the meta device, which need no memory, and the bytes and operations of a step predicted from them."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from meseta.comm import BatchSlice, World
from meseta.config import RunConfig
from meseta.config.precision import dense_dtype
from meseta.data.dataset.dataset import Dataset
from meseta.embedding import EmbeddingBagCollection
from meseta.embedding.batch_context import BatchContext
from meseta.models import make_model
from meseta.models.custom import load_custom_model_class
from meseta.models.layers import DenseActivations, ScoringModel, check_reads_pooled, fill_by_pattern, find_dense_forward
from meseta.ops.common import FLOPS
from meseta.spec import InitSpec, MesetaError
from meseta.train.setup.heap import heap_peak

# The backward pass has two products of the same size, for the gradients of inputs and of weights.
TRAINING_FLOPS_FACTOR = 3
"""Ratio of the operations of a training step to those of its forward pass."""


def make_unsharded_model(config: RunConfig, dataset: Dataset, collection: EmbeddingBagCollection) -> nn.Module:
    """Build the model of a config, with dense parameters initialized as in `dense.init`. No memory is allocated for
    tables.

    Raises MesetaError if the model or `dense.init` is invalid.
    """
    model = make_model(config.model, collection, len(dataset.dense), config.seed, dense_dtype(config), dataset.labels)
    fill_by_pattern(
        model, {name: InitSpec(**init.model_dump()) for name, init in config.dense.init.items()}, config.seed
    )
    return model


def make_meta_model(config: RunConfig, dataset: Dataset, collection: EmbeddingBagCollection) -> nn.Module:
    """Build the model on the meta device in its training dtype. Custom models that need values are built on the CPU."""
    if ":" in config.model.name:
        load_custom_model_class(config.model.name)  # Tensors of its module must not become meta tensors.
    try:
        with torch.device("meta"):
            outline = make_unsharded_model(config, dataset, collection)
    except MesetaError:
        outline = make_unsharded_model(config, dataset, collection)
    return outline.to(dtype=collection.dtype)


class _AllocationTracker(TorchDispatchMode):
    def __init__(self, held: Iterable[Tensor]) -> None:
        """Create a tracker. Storage of `held` is already allocated, so its views are not recorded."""
        super().__init__()
        self.allocations: list[tuple[int, int]] = []
        """Allocations and frees in order, as (block number, bytes). Bytes are negative for a free."""
        self._block_ids = {tensor.untyped_storage()._cdata: -1 for tensor in held}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._record_allocation(tensor.untyped_storage())
        return result

    def _record_allocation(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._block_ids:
            number = self._block_ids[key] = len(self.allocations)
            self.allocations.append((number, storage.nbytes()))
            weakref.finalize(storage, self._record_free, key, storage.nbytes())

    def _record_free(self, key: int, num_bytes: int) -> None:
        self.allocations.append((self._block_ids.pop(key), -num_bytes))

    def block_ids(self, tensors: Iterable[Tensor | None]) -> set[int]:
        """Return the block numbers of the storage of `tensors`."""
        return {self._block_ids[t.untyped_storage()._cdata] for t in tensors if t is not None}

    def allocations_without(self, blocks: Collection[int]) -> Sequence[tuple[int, int]]:
        """Return the allocations and frees of all blocks except `blocks`."""
        return [(number, num_bytes) for number, num_bytes in self.allocations if number not in blocks]


def _peak_bytes(allocations: Sequence[tuple[int, int]], on_heap: bool) -> int:
    """Return the peak of allocated bytes. `on_heap` predicts the size of the C heap instead."""
    return heap_peak(allocations) if on_heap else max(accumulate(n for _, n in allocations), default=0)


def pooled_embedding_bytes(outline: nn.Module, batch_size: int) -> int:
    """Return the bytes of the pooled embeddings of `batch_size` samples."""
    return batch_size * _embedding_width(outline) * _embeddings(outline).dtype.itemsize


def step_peak_bytes(outline: nn.Module, batch_size: int, num_dense: int, *, on_heap: bool = False) -> int:
    """Return the peak memory of the forward and backward pass over `batch_size` samples.

    It includes pooled embeddings, activations, their gradients and temporary buffers, but no parameters and parameter
    gradients. `on_heap` predicts the size of the C heap of a CPU process.
    """
    try:
        return _peak_bytes(_trace_step(outline, batch_size, num_dense), on_heap)
    except Exception:  # Code of a custom model may raise anything if tensors have no values.
        if isinstance(outline, ScoringModel):
            raise
        return _estimate_from_linear_layers(outline, batch_size)


def step_flops(outline: nn.Module, batch_size: int, num_dense: int) -> int:
    """Return the operations of all matrix products in the forward and backward pass over `batch_size` samples.

    A multiplication and an addition count as two, as in torch.utils.flop_counter. Elementwise operations are not
    counted. If a custom model cannot be traced without values, only its linear layers are counted.
    """
    try:
        with _flop_counter() as counter:
            dense, pooled = _inputs(outline, batch_size, num_dense)
            _backward(outline, [_score(outline, dense, pooled, batch_size)], pooled)
    except Exception:  # Code of a custom model may raise anything if tensors have no values.
        if isinstance(outline, ScoringModel):
            raise
        layers = (layer for layer in outline.modules() if isinstance(layer, nn.Linear))
        return TRAINING_FLOPS_FACTOR * batch_size * sum(2 * layer.in_features * layer.out_features for layer in layers)
    return int(counter.get_total_flops())


def dense_only_flops(outline: nn.Module, batch_size: int, num_dense: int) -> int:
    """Return the operations of `forward_dense`, which needs dense inputs only, and of its backward pass.

    The result is 0 if the model has no `forward_dense`, or is a custom model that cannot be traced without values.
    """
    before = find_dense_forward(outline)
    if before is None or not all(parameter.is_meta for parameter in outline.parameters()):
        return 0
    try:
        with _flop_counter() as counter:
            with _single_rank_batch(outline, batch_size):
                outputs = before(torch.empty(batch_size, num_dense, device="meta"))
            _backward(outline, tree_leaves(outputs.value if isinstance(outputs, DenseActivations) else outputs))
    except Exception:
        if isinstance(outline, ScoringModel):
            raise
        return 0
    return int(counter.get_total_flops())


def _flop_counter() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping=FLOPS)


def _backward(outline: nn.Module, outputs: Iterable[Any], *inputs: Tensor) -> Sequence[Tensor | None]:
    """Return the gradients of `inputs` and all parameters with respect to the tensors in `outputs` that require
    gradients."""
    parameters = [parameter for parameter in outline.parameters() if parameter.requires_grad]
    tensors = [tensor for tensor in outputs if isinstance(tensor, Tensor) and tensor.requires_grad]
    ones = [torch.ones_like(tensor) for tensor in tensors]
    learned = [*inputs, *parameters]
    return torch.autograd.grad(tensors, learned, ones, allow_unused=True) if tensors and learned else ()


_step_traces: weakref.WeakKeyDictionary[nn.Module, dict[tuple[int, int, bool], Sequence[tuple[int, int]]]] = (
    weakref.WeakKeyDictionary()
)


def _trace_step(outline: nn.Module, batch_size: int, num_dense: int) -> Sequence[tuple[int, int]]:
    """Return the allocations and frees of a step, except parameter gradients. A model is traced once per batch size."""
    traces, key = _step_traces.setdefault(outline, {}), (batch_size, num_dense, outline.training)
    if key in traces:
        return traces[key]
    with _AllocationTracker(_tensors(outline)) as tracker:
        dense, pooled = _inputs(outline, batch_size, num_dense)
        logits = _score(outline, dense, pooled, batch_size)
        gradients = _backward(outline, [logits], pooled)
        del logits
    traces[key] = tracker.allocations_without(tracker.block_ids(gradients[1:]))
    return traces[key]


def evaluation_peak_bytes(outline: nn.Module, batch_size: int, num_dense: int, *, on_heap: bool = False) -> int:
    """Return the peak memory of the forward pass in evaluation. See `step_peak_bytes`."""
    try:
        with torch.no_grad(), _AllocationTracker(_tensors(outline)) as tracker:
            _score(outline, *_inputs(outline, batch_size, num_dense), batch_size)
    except Exception:
        if isinstance(outline, ScoringModel):
            raise
        return _estimate_from_linear_layers(outline, batch_size) // 2
    return _peak_bytes(tracker.allocations, on_heap)


def _estimate_from_linear_layers(outline: nn.Module, batch_size: int) -> int:
    outputs = sum(layer.out_features for layer in outline.modules() if isinstance(layer, nn.Linear))
    # Pooled embeddings and outputs of linear layers in float32, and their gradients.
    return 8 * batch_size * (_embedding_width(outline) + outputs)


def _tensors(outline: nn.Module) -> list[Tensor]:
    return [*outline.parameters(), *outline.buffers()]


def _inputs(outline: nn.Module, batch_size: int, num_dense: int) -> tuple[Tensor, Tensor]:
    """Return meta tensors (dense inputs [B, num_dense], pooled embeddings [B, sum of D], which require gradients)."""
    check_reads_pooled("outline", outline)  # Without pooling, the number of rows would depend on the ids.
    dense = torch.empty(batch_size, num_dense, device="meta")
    dtype = _embeddings(outline).dtype
    return dense, torch.empty(batch_size, _embedding_width(outline), dtype=dtype, device="meta").requires_grad_()


def _embeddings(outline: nn.Module) -> EmbeddingBagCollection:
    return cast(EmbeddingBagCollection, outline.get_submodule("embeddings"))


def _embedding_width(outline: nn.Module) -> int:
    embeddings = _embeddings(outline)
    width = {table.name: table.embedding_dim for table in embeddings.tables}
    return sum(width[feature.table] for feature in embeddings.features if feature.pooling != "none")


def _single_rank_batch(outline: nn.Module, batch_size: int) -> AbstractContextManager[None]:
    """Context manager that makes a batch of `batch_size` samples on a single rank the active batch."""
    batch_slice = BatchSlice(world=World.single("meta"), step=0, batch_size_per_rank=(batch_size,))
    return _embeddings(outline).active_batch(BatchContext(batch_slice=batch_slice))


def _score(outline: nn.Module, dense: Tensor, pooled: Tensor, batch_size: int) -> Tensor:
    with _single_rank_batch(outline, batch_size):
        logits: Tensor = cast(Any, outline).score(dense, pooled)
    return logits
