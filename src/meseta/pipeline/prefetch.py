"""Prefetching of ids and rows in a user's training loop."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from torch import nn

from meseta.comm import World, retain_until_exit
from meseta.embedding.base import BaseEmbeddingCollection
from meseta.embedding.batch_context import UNEVEN_POLICIES, BatchContext, ExhaustedInput
from meseta.errors import check_choice
from meseta.pipeline.uneven import find_uneven_error, make_empty_batch, warn_remaining_batches
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import MesetaError

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
                "the result of look_up to model.embeddings(...), skip batches only before look_up, and let errors end "
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
