"""Ids that travel ahead in a loop of one's own."""

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
from meseta.jagged import KeyedJaggedTensor
from meseta.pipeline.uneven import find_uneven_error, make_empty_batch, warn_remaining_batches
from meseta.spec import MesetaError

AnyBatch = TypeVar("AnyBatch")


@dataclass(eq=False)
class _PrefetchedBatch:
    """A batch whose ids are on their way."""

    batch: Any
    """Where a rank has run out, one without samples; None where it never had any."""
    index: int
    """Counted from 0, on this rank."""
    context: BatchContext[Any] | None = None
    error: Exception | None = None
    """Raised when its turn comes."""


def ahead(batches: Iterable[AnyBatch], model: nn.Module, *, uneven: str = "error") -> Generator[AnyBatch, None, None]:
    """Each batch with its `sparse` replaced by a flight, whose ids travel while the batch before is computed:

        for batch in meseta.ahead(batches, model):
            logits = model(batch.dense, batch.sparse)

    The model's EmbeddingBagCollection takes the flight as it takes a KeyedJaggedTensor, once, and begins the next batch
    when it has looked this one up. Its gradients travel while the rest of the backward pass is computed. No bit is
    another than without it. What is wrong with a batch, or keeps a rank from reading it, is raised at its turn, on all
    ranks. Leaving the loop early closes what is open; every rank must leave it at the same batch.

    Whether a rank has a batch is told with the counts of its ids, so that all end the loop together:

        uneven      where some ranks run out before others
        "error"     raise, and name the first of them
        "join"      train each sample once: who has none left gets batches without samples, like its last one
        "drop"      end with the first that runs out, and say how many batches are left

    Args:
        batches: of this rank; objects with an attribute `sparse`, of which copies are given out.
        model: with one EmbeddingBagCollection, sharded or not.
        uneven: what comes of it where ranks have more batches than others; alike on all ranks.

    Raises MesetaError for a model without one, for a batch without `sparse`, for one that was looked up by hand and
    passed over, and with "join" where a rank has no batch at all.
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
        retain_until_exit(list(loop.queue))
        raise


def _find_collection(model: nn.Module) -> BaseEmbeddingCollection[Any]:
    found = [module for module in model.modules() if isinstance(module, BaseEmbeddingCollection)]
    if len(found) != 1:
        raise MesetaError(
            f"meseta.ahead: the model must have one EmbeddingBagCollection, found {len(found)}; put all tables into one"
        )
    return found[0]


@dataclass(eq=False)
class _PrefetchLoop:
    """What is open in a loop."""

    batches: Iterator[Any]
    embeddings: BaseEmbeddingCollection[Any]
    uneven: str
    queue: deque[_PrefetchedBatch] = field(default_factory=deque)
    """Those that have begun and were not given out: one, and as many more as storage asks for."""
    is_next_started: bool = False
    """Whether the batch that was given out has begun another."""
    num_read: int = 0
    """Batches that this rank has had."""
    _last_batch: Any = None
    """The last of them, as it was given out."""
    _batch_sizes: tuple[int, ...] = ()
    """Samples of its features."""

    def fill(self) -> None:
        """Begin the first batches, up to one that cannot be trained."""
        for _ in range(max(self.embeddings.lookahead, 1)):
            self.start_next()

    def start_next(self) -> None:
        """Read one batch more, unless one that ends the loop is the last, and bring rows of all that are ahead, in
        their order, as far as there is room."""
        self.is_next_started = True
        if not self.queue or not self._is_last(self.queue[-1]):
            self._start_one()
        for coming in self.queue:
            if coming.context is None or not self.embeddings.prefetch(coming.context):
                break

    def _start_one(self) -> None:
        """Read a batch, and begin to send its ids; where there is none, tell the other ranks."""
        number = self.num_read
        batch, ids = self._read()
        coming = _PrefetchedBatch(batch, number)
        self.queue.append(coming)
        try:
            flight = self.embeddings.start_input_dist(ids)
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
        """Whether none follows: it cannot be trained, or all ranks have run out with it."""
        return coming.context is None or len(coming.context.exhausted_ranks) == self.embeddings.num_ranks

    def _read(self) -> tuple[Any, KeyedJaggedTensor | ExhaustedInput | Exception]:
        """A copy of the next batch, and its ids, or why there are none."""
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
                f"meseta.ahead: a batch must have `sparse`, a KeyedJaggedTensor, but that of a "
                f"{type(batch).__name__} is a {what}; give batches as meseta.data.Reader makes them"
            )
        return copy.copy(batch), batch.sparse

    def _make_empty_batch(self) -> tuple[Any, ExhaustedInput | Exception]:
        """One without samples, like the last."""
        self.batches = iter(())
        try:
            empty = None if self._last_batch is None else make_empty_batch(self._last_batch, self._batch_sizes)
        except Exception as error:  # of a class of the user's
            return None, error
        return empty, ExhaustedInput(self.num_read, self.uneven)

    def pop(self) -> _PrefetchedBatch | None:
        """The batch that was begun; None at the end of the loop, which is that of all ranks."""
        coming, self.is_next_started = self.queue.popleft(), False
        if coming.error is not None:
            raise coming.error
        assert coming.context is not None
        if coming.context.exhausted_ranks and self._is_end(coming.context):
            return None
        coming.context.output_dist_callback = self.start_next
        return coming

    def _is_end(self, flight: BatchContext[Any]) -> bool:
        """Whether the loop ends where some ranks have run out; raises MesetaError where it should not come to that."""
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
        """Begin the next batch, where this one was passed over."""
        if self.is_next_started:
            return
        assert taken.context is not None
        stage = taken.context.stage
        self._drop(taken.context)
        if stage != "exchanged":
            what = "was looked up and then passed over" if stage == "looked up" else "has failed"
            raise MesetaError(
                f"meseta.ahead: batch {taken.index}, counted from 0, {what}, so that the next one has not begun; give "
                "what look_up has returned to model.embeddings(...), pass batches over before it, and let errors end "
                "the loop"
            )
        self.start_next()

    def close(self, taken: _PrefetchedBatch | None) -> None:
        """Give up what is open, where the loop is left early."""
        for one in (taken, *self.queue):
            if one is not None and one.context is not None:
                self._drop(one.context)

    def _drop(self, flight: BatchContext[Any]) -> None:
        if flight.stage in ("exchanged", "looked up"):
            self.embeddings.drop(flight)
