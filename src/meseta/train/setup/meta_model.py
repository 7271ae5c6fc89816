"""A model before it takes any memory: its shapes alone, and the bytes that a batch will take on its way through it."""

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
from meseta.models.base import DenseActivations, ScoringModel, check_reads_pooled, find_dense_forward
from meseta.models.custom import load_custom_model_class
from meseta.models.initialization import fill_by_pattern
from meseta.ops.library import FLOPS
from meseta.spec import InitSpec, MesetaError
from meseta.train.setup.heap import heap_peak

TRAINING_FLOPS_FACTOR = 3
"""A product forwards, and two as large backwards: for the gradients of inputs and of weights."""


def make_unsharded_model(config: RunConfig, dataset: Dataset, collection: EmbeddingBagCollection) -> nn.Module:
    """The model of a config on tables that take no memory yet, its parameters as `dense.init` has them. Raises
    MesetaError as `make_model` and `fill_by_pattern` do."""
    model = make_model(config.model, collection, len(dataset.dense), config.seed, dense_dtype(config), dataset.labels)
    fill_by_pattern(
        model, {name: InitSpec(**init.model_dump()) for name, init in config.dense.init.items()}, config.seed
    )
    return model


def make_meta_model(config: RunConfig, dataset: Dataset, collection: EmbeddingBagCollection) -> nn.Module:
    """The same in the type that it trains in, on torch's meta device: with shapes and without numbers, so that even one
    that cannot fit is there at once. A model of the user's own that asks for numbers is made as it is."""
    if ":" in config.model.name:
        load_custom_model_class(config.model.name)  # imported here: what its module keeps has numbers
    try:
        with torch.device("meta"):
            outline = make_unsharded_model(config, dataset, collection)
    except MesetaError:
        outline = make_unsharded_model(config, dataset, collection)
    return outline.to(dtype=collection.dtype)


class _AllocationTracker(TorchDispatchMode):
    """Every block of memory that torch takes and gives back while this is entered, in order."""

    def __init__(self, held: Iterable[Tensor]) -> None:
        """`held` is there already, so that a view of it takes nothing."""
        super().__init__()
        self.allocations: list[tuple[int, int]] = []
        """(number of the block, bytes taken; given back where they are negative)."""
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
        """Of the blocks that these lie in."""
        return {self._block_ids[t.untyped_storage()._cdata] for t in tensors if t is not None}

    def peak_bytes(self, on_heap: bool, exclude: Collection[int] = ()) -> int:
        """The most bytes that were taken at once, apart from some blocks, or what the C library's heap grows to."""
        entries = [(number, num_bytes) for number, num_bytes in self.allocations if number not in exclude]
        return heap_peak(entries) if on_heap else max(accumulate(n for _, n in entries), default=0)


def pooled_embedding_bytes(outline: nn.Module, batch_size: int) -> int:
    """Of the bags of `batch_size` samples."""
    return batch_size * _embedding_width(outline) * _embeddings(outline).dtype.itemsize


def step_peak_bytes(outline: nn.Module, batch_size: int, num_dense: int, *, on_heap: bool = False) -> int:
    """The most bytes that scoring `batch_size` samples and the way back take at once: bags, activations, gradients of
    both, and what products need beside. Parameters and their gradients are counted elsewhere. `on_heap`: what the heap
    of a process that trains on a CPU grows to for them.

    A layer that asks where its samples lie is told of one rank. A model of the user's own that cannot be followed
    without numbers counts by its linear layers: their outputs and the gradients of these.
    """
    try:
        return _trace_step(outline, batch_size, num_dense, on_heap)
    except Exception:  # whatever the code of a model of the user's own raises where there are no numbers
        if isinstance(outline, ScoringModel):
            raise
        return _estimate_from_linear_layers(outline, batch_size)


def step_flops(outline: nn.Module, batch_size: int, num_dense: int) -> int:
    """Operations of the products of matrices that score `batch_size` samples and that the way back takes, as
    torch.utils.flop_counter counts them: two for each number that is multiplied and added. What goes number by number,
    such as a ReLU or the sums of a factorization machine, counts for nothing.

    A model of the user's own that cannot be followed without numbers counts by its linear layers.
    """
    try:
        with _flop_counter() as counter:
            dense, pooled = _inputs(outline, batch_size, num_dense)
            _backward(outline, [_score(outline, dense, pooled, batch_size)], pooled)
    except Exception:  # whatever the code of a model of the user's own raises where there are no numbers
        if isinstance(outline, ScoringModel):
            raise
        layers = (layer for layer in outline.modules() if isinstance(layer, nn.Linear))
        return TRAINING_FLOPS_FACTOR * batch_size * sum(2 * layer.in_features * layer.out_features for layer in layers)
    return int(counter.get_total_flops())


def dense_only_flops(outline: nn.Module, batch_size: int, num_dense: int) -> int:
    """The same of what `forward_dense` of the model makes of dense inputs alone, and its way back; 0 without it, and
    for a model of the user's own that cannot be followed without numbers."""
    before = find_dense_forward(outline)
    if before is None or not all(parameter.is_meta for parameter in outline.parameters()):
        return 0
    try:
        with _flop_counter() as counter:
            with _single_rank_batch(outline, batch_size):
                found = before(torch.empty(batch_size, num_dense, device="meta"))
            _backward(outline, tree_leaves(found.value if isinstance(found, DenseActivations) else found))
    except Exception:
        if isinstance(outline, ScoringModel):
            raise
        return 0
    return int(counter.get_total_flops())


def _flop_counter() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping=FLOPS)


def _backward(outline: nn.Module, outputs: Iterable[Any], *inputs: Tensor) -> Sequence[Tensor | None]:
    """Gradients of `inputs` and of all parameters, of those outputs that are tensors and depend on them."""
    parameters = [parameter for parameter in outline.parameters() if parameter.requires_grad]
    tensors = [tensor for tensor in outputs if isinstance(tensor, Tensor) and tensor.requires_grad]
    ones = [torch.ones_like(tensor) for tensor in tensors]
    learned = [*inputs, *parameters]
    return torch.autograd.grad(tensors, learned, ones, allow_unused=True) if tensors and learned else ()


def _trace_step(outline: nn.Module, batch_size: int, num_dense: int, on_heap: bool) -> int:
    with _AllocationTracker(_tensors(outline)) as ledger:
        dense, pooled = _inputs(outline, batch_size, num_dense)
        logits = _score(outline, dense, pooled, batch_size)
        found = _backward(outline, [logits], pooled)
        del logits
    return ledger.peak_bytes(on_heap, exclude=ledger.block_ids(found[1:]))


def evaluation_peak_bytes(outline: nn.Module, batch_size: int, num_dense: int, *, on_heap: bool = False) -> int:
    """As `step_bytes`, of an evaluation: there is no way back."""
    try:
        with torch.no_grad(), _AllocationTracker(_tensors(outline)) as ledger:
            _score(outline, *_inputs(outline, batch_size, num_dense), batch_size)
    except Exception:
        if isinstance(outline, ScoringModel):
            raise
        return _estimate_from_linear_layers(outline, batch_size) // 2
    return ledger.peak_bytes(on_heap)


def _estimate_from_linear_layers(outline: nn.Module, batch_size: int) -> int:
    """Bags and outputs of layers in four bytes, and their gradients."""
    outputs = sum(layer.out_features for layer in outline.modules() if isinstance(layer, nn.Linear))
    return 8 * batch_size * (_embedding_width(outline) + outputs)


def _tensors(outline: nn.Module) -> list[Tensor]:
    return [*outline.parameters(), *outline.buffers()]


def _inputs(outline: nn.Module, batch_size: int, num_dense: int) -> tuple[Tensor, Tensor]:
    """Dense inputs [B, num_dense] and bags [B, sum of D], which learn."""
    check_reads_pooled("outline", outline)  # how many rows there are is a matter of the ids
    dense = torch.empty(batch_size, num_dense, device="meta")
    dtype = _embeddings(outline).dtype
    return dense, torch.empty(batch_size, _embedding_width(outline), dtype=dtype, device="meta").requires_grad_()


def _embeddings(outline: nn.Module) -> EmbeddingBagCollection:
    return cast(EmbeddingBagCollection, outline.get_submodule("embeddings"))


def _embedding_width(outline: nn.Module) -> int:
    """Of the bags of a sample, side by side."""
    embeddings = _embeddings(outline)
    width = {table.name: table.embedding_dim for table in embeddings.tables}
    return sum(width[feature.table] for feature in embeddings.features if feature.pooling != "none")


def _single_rank_batch(outline: nn.Module, batch_size: int) -> AbstractContextManager[None]:
    """While this is entered, layers are told of samples that all lie on one rank."""
    batch_slice = BatchSlice(world=World.single("meta"), step=0, batch_size_per_rank=(batch_size,))
    return _embeddings(outline).active_batch(BatchContext(batch_slice=batch_slice))


def _score(outline: nn.Module, dense: Tensor, pooled: Tensor, batch_size: int) -> Tensor:
    with _single_rank_batch(outline, batch_size):
        logits: Tensor = cast(Any, outline).score(dense, pooled)
    return logits
