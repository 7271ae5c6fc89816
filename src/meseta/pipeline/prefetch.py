"""Prefetched embeddings in checkpoints: those of the next batch, looked up before the last update."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from meseta.comm import World, retain_until_exit
from meseta.data.read.batch import Batch
from meseta.embedding.base import BaseEmbeddingCollection
from meseta.embedding.batch_context import UNEVEN_POLICIES, BatchContext, ExhaustedInput
from meseta.errors import check_choice
from meseta.pipeline.losses import find_uneven_error, make_empty_batch, warn_remaining_batches
from meseta.sparse import KeyedJaggedTensor
from meseta.sparse.shapes import Float, Int
from meseta.spec import MesetaError
from meseta.system.remote import Location

_POOLED_KEY, _IDS_KEY = "pooled", "ids"
# Odd 64-bit multipliers of the id hash: 2^64 / golden ratio, and one of xxHash64.
_HASH_MULTIPLIERS = (-7046029254386353131, -4417276706812531889)


@dataclass(frozen=True, eq=False)
class PrefetchedEmbeddings:
    """Embeddings of a batch in the order of the global batch. Any number of ranks under any plan can take slices."""

    pooled: Float[Tensor, "B_global sum_of_D"]
    id_digests: Int[Tensor, " B_global"]
    """int64 hash of each sample's ids."""
    first_sample: int = 0
    """Index of the first sample in the global batch. Ranks other than 0 may hold only their slice."""

    @staticmethod
    def gather(world: World, batch: Batch, pooled: Float[Tensor, "B_local sum_of_D"]) -> PrefetchedEmbeddings:
        """Gather the embeddings of all ranks on rank 0. Other ranks keep only their slice. Collective."""
        local_part = PrefetchedEmbeddings(pooled.detach().clone(), sample_digests(batch.sparse).to(pooled.device))
        if world.size == 1:
            return local_part
        sizes = world.all_gather_object(batch.batch_size)

        def whole(tensor: Tensor) -> Tensor:
            width = tensor.shape[1] if tensor.dim() == 2 else 1
            send = [tensor.numel(), *[0] * (world.size - 1)]
            receive = [size * width if world.rank == 0 else 0 for size in sizes]
            received = world.all_to_all(tensor.reshape(-1), send, receive, "prefetched embeddings").wait()
            return received.view(-1, *tensor.shape[1:])

        pooled_of_all, ids_of_all = whole(local_part.pooled), whole(local_part.id_digests)
        if world.rank == 0:
            return PrefetchedEmbeddings(pooled_of_all, ids_of_all)
        return replace(local_part, first_sample=sum(sizes[: world.rank]))

    def local_slice(self, world: World, batch: Batch) -> Float[Tensor, "B_local sum_of_D"]:
        """Return the embeddings of this rank's samples. Collective.

        Raises MesetaError on all ranks if the ids of the batch differ.
        """
        sizes = world.all_gather_object(batch.batch_size)
        first = sum(sizes[: world.rank]) - self.first_sample
        local_range = slice(first, first + batch.batch_size)
        # The digests recognize the batch. The last rank also checks that the global batch ends with its samples.
        is_last = world.rank == world.size - 1
        is_same = first >= 0 and torch.equal(self.id_digests[local_range].cpu(), sample_digests(batch.sparse).cpu())
        problem = None
        if not is_same or (is_last and local_range.stop != len(self.id_digests)):
            problem = MesetaError(
                "the next batch differs from that of the prefetched embeddings in the checkpoint; use the data and the "
                "train.batch_size of the saved run, or set pipeline.staleness=0 to ignore prefetched embeddings"
            )
        world.raise_on_all_ranks(problem)
        return self.pooled[local_range].to(world.device)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint by name."""
        return {_POOLED_KEY: self.pooled, _IDS_KEY: self.id_digests}

    @staticmethod
    def from_tensors(
        path: Location, tensors: Mapping[str, Tensor], embeddings: BaseEmbeddingCollection[Any]
    ) -> PrefetchedEmbeddings:
        """Create it from tensors of the checkpoint at `path`. Raises MesetaError if they do not match `embeddings`."""
        width, dtype = sum(embeddings.groups[0].pooled_dims), embeddings.dtype
        pooled, ids = tensors.get(_POOLED_KEY), tensors.get(_IDS_KEY)
        if tensors.keys() != {_POOLED_KEY, _IDS_KEY} or pooled is None or ids is None:
            raise MesetaError(
                f"checkpoint {str(path)!r}: tensors of prefetched embeddings must be {_IDS_KEY!r} and {_POOLED_KEY!r}, "
                f"got {sorted(tensors)}; use an older checkpoint"
            )
        shapes = (list(pooled.shape), pooled.dtype, list(ids.shape), ids.dtype)
        if shapes != ([len(ids), width], dtype, [len(ids)], torch.int64):
            raise MesetaError(
                f"checkpoint {str(path)!r}: prefetched embeddings must be [B, {width}] ({dtype}) and their digests [B] "
                f"(torch.int64), got {shapes[0]} ({shapes[1]}) and {shapes[2]} ({shapes[3]}); use an older checkpoint"
            )
        return PrefetchedEmbeddings(pooled, ids)


def sample_digests(ids: KeyedJaggedTensor) -> Int[Tensor, " B"]:
    """Return a 64-bit hash of each sample's ids, including their features and positions."""
    batch_size = ids.batch_size
    bags = torch.arange(len(ids.keys) * batch_size, device=ids.values.device)
    bag = bags.repeat_interleave(ids.lengths)
    place = torch.arange(len(bag), device=bag.device) - ids.offsets[:-1].long()[bag]
    mixed = (ids.values.long() + 1) * _HASH_MULTIPLIERS[0] + (bag // max(batch_size, 1)) * _HASH_MULTIPLIERS[1] + place
    mixed = (mixed ^ (mixed >> 29)) * _HASH_MULTIPLIERS[0]
    mixed = (mixed ^ (mixed >> 32)) * _HASH_MULTIPLIERS[1]
    return mixed.new_zeros(batch_size).index_add_(0, bag % max(batch_size, 1), mixed)


AnyBatch = TypeVar("AnyBatch")


@dataclass(eq=False)
class _PrefetchedBatch:
    batch: Any
    """Batch to yield, without samples on an exhausted rank. `None` if the rank never had a batch."""
    index: int
    context: BatchContext[Any] | None = None
    error: Exception | None = None
    """Error to raise when the loop reaches the batch."""


def ahead(batches: Iterable[AnyBatch], model: nn.Module, *, uneven: str = "error") -> Generator[AnyBatch, None, None]:
    """Yield each batch with `sparse` replaced by a `BatchContext`, whose ids are exchanged during the previous batch.

        for batch in meseta.ahead(batches, model):
            logits = model(batch.dense, batch.sparse)

    The model's EmbeddingBagCollection accepts a `BatchContext` once, in place of a KeyedJaggedTensor. After its lookup,
    it starts the exchange for the next batch. Gradients of embeddings are exchanged during the rest of the backward
    pass. All results are bitwise identical to those without `ahead`.

    An error in a batch, or in reading it, is raised on all ranks when the loop reaches it. All ranks must leave the
    loop at the same batch. They also end it together:

        uneven      if some ranks run out of batches before others
        "error"     raise an error that names the first exhausted rank
        "join"      train each sample once; exhausted ranks yield batches without samples, made from their last batch
        "drop"      end the loop with the first exhausted rank, and print how many batches are skipped

    Args:
        batches: Batches of this rank: objects with an attribute `sparse`. The loop yields copies.
        model: Model with exactly one EmbeddingBagCollection, sharded or not.
        uneven: Policy for ranks with different numbers of batches, equal on all ranks.

    Raises MesetaError if the model does not have one collection, a batch has no `sparse`, a batch was looked up
    explicitly and then skipped, or a rank has no batch with "join".
    """
    check_choice("meseta.ahead", "uneven", uneven, UNEVEN_POLICIES)
    loop = _PrefetchLoop(iter(batches), _find_collection(model), uneven)
    try:
        loop.fill()
        while (coming := loop.pop()) is not None:
            yield coming.batch
            loop.finish_batch(coming)
            del coming
    except GeneratorExit:
        loop.close(coming)
        raise
    except BaseException:
        # The transport may still use the memory of open batches.
        retain_until_exit(list(loop.queue))
        raise


def _find_collection(model: nn.Module) -> BaseEmbeddingCollection[Any]:
    collections = [module for module in model.modules() if isinstance(module, BaseEmbeddingCollection)]
    if len(collections) != 1:
        raise MesetaError(
            f"meseta.ahead: the model must have one EmbeddingBagCollection, got {len(collections)}; put all tables "
            "into one"
        )
    return collections[0]


@dataclass(eq=False)
class _PrefetchLoop:
    batches: Iterator[Any]
    embeddings: BaseEmbeddingCollection[Any]
    uneven: str
    queue: deque[_PrefetchedBatch] = field(default_factory=deque)
    """Batches that were started but not yielded."""
    is_next_started: bool = False
    """Whether the batch after the yielded one was started."""
    num_read: int = 0
    _last_batch: Any = None
    """Last batch that this rank has read, with its `BatchContext`."""
    _batch_sizes: tuple[int, ...] = ()
    """Batch sizes of the features of `_last_batch`."""

    def fill(self) -> None:
        for _ in range(max(self.embeddings.lookahead, 1)):
            self.start_next()

    def start_next(self) -> None:
        """Start one more batch unless the loop ends, and prefetch rows of the queued batches."""
        self.is_next_started = True
        if not self.queue or not self._is_last(self.queue[-1]):
            self._start_one()
        for coming in self.queue:
            # Rows are fetched in the order of the batches until the cache is full.
            if coming.context is None or not self.embeddings.prefetch(coming.context):
                break

    def _start_one(self) -> None:
        number = self.num_read
        batch, ids = self._read()
        coming = _PrefetchedBatch(batch, number)
        self.queue.append(coming)
        try:
            flight = self.embeddings.start_input_dist(ids)
            # Gradients of embeddings are exchanged during the rest of the backward pass.
            flight.overlaps_gradient_dist = self.embeddings.num_ranks > 1
            self.embeddings.input_dist(flight)
            if self.embeddings.lookahead:
                self.embeddings.start_second_hop(flight)
        except Exception as refused:
            coming.error = ids if isinstance(ids, Exception) else refused
            return
        coming.context = flight
        if batch is not None:
            object.__setattr__(batch, "sparse", flight)
            self._last_batch = batch
        if isinstance(ids, KeyedJaggedTensor):
            self._batch_sizes = ids.batch_sizes

    def _is_last(self, coming: _PrefetchedBatch) -> bool:
        # The last batch cannot be trained, or all ranks are exhausted.
        return coming.context is None or len(coming.context.exhausted_ranks) == self.embeddings.num_ranks

    def _read(self) -> tuple[Any, KeyedJaggedTensor | ExhaustedInput | Exception]:
        """Return (copy of the next batch, its ids). On failure or exhaustion, the second item is the reason."""
        try:
            batch = next(self.batches)
        except StopIteration:
            return self._make_empty_batch()
        except Exception as error:
            return None, error
        self.num_read += 1
        if not isinstance(getattr(batch, "sparse", None), KeyedJaggedTensor):
            what = type(getattr(batch, "sparse", None)).__name__
            return None, MesetaError(
                f"meseta.ahead: `sparse` of a batch must be a KeyedJaggedTensor, but that of a "
                f"{type(batch).__name__} is a {what}; use batches like those of meseta.data.Reader"
            )
        return copy.copy(batch), batch.sparse

    def _make_empty_batch(self) -> tuple[Any, ExhaustedInput | Exception]:
        """Return (copy of the last batch without samples, notification for other ranks)."""
        self.batches = iter(())
        try:
            empty = None if self._last_batch is None else make_empty_batch(self._last_batch, self._batch_sizes)
        except Exception as error:  # The class of the batch is the user's, so copying it may raise anything.
            return None, error
        return empty, ExhaustedInput(self.num_read, self.uneven)

    def pop(self) -> _PrefetchedBatch | None:
        """Return the next started batch, or `None` at the end of the loop, which is the same on all ranks."""
        coming, self.is_next_started = self.queue.popleft(), False
        if coming.error is not None:
            raise coming.error
        assert coming.context is not None
        if coming.context.exhausted_ranks and self._is_end(coming.context):
            return None
        coming.context.output_dist_callback = self.start_next
        return coming

    def _is_end(self, flight: BatchContext[Any]) -> bool:
        """Whether the loop ends because ranks are exhausted. Raises MesetaError as the policy requires."""
        ran_out, num_ranks = flight.exhausted_ranks, self.embeddings.num_ranks
        refused = find_uneven_error(ran_out, self.uneven, num_ranks)
        if refused is None and self.uneven == "join" and len(ran_out) < num_ranks:
            return False
        rest = [flight, *(coming.context for coming in self.queue if coming.context is not None)]
        for one in rest:
            self._drop(one)
        if refused is not None:
            raise refused
        if len(ran_out) < num_ranks:
            world: World = cast(Any, self.embeddings).world
            warn_remaining_batches(
                ran_out, sum(world.rank not in one.exhausted_ranks for one in rest), self.batches, world
            )
        return True

    def finish_batch(self, taken: _PrefetchedBatch) -> None:
        """Start the next batch if the yielded one was skipped."""
        if self.is_next_started:
            return
        assert taken.context is not None
        stage = taken.context.stage
        self._drop(taken.context)
        if stage != "exchanged":
            what = "was looked up and then skipped" if stage == "looked up" else "has failed"
            raise MesetaError(
                f"meseta.ahead: batch {taken.index} (counted from 0) {what}, so the next batch was not started; pass "
                "the result of lookup to model.embeddings(...), skip batches only before lookup, and let errors end "
                "the loop"
            )
        self.start_next()

    def close(self, taken: _PrefetchedBatch | None) -> None:
        for one in (taken, *self.queue):
            if one is not None and one.context is not None:
                self._drop(one.context)

    def _drop(self, flight: BatchContext[Any]) -> None:
        if flight.stage in ("exchanged", "looked up"):
            self.embeddings.drop(flight)
