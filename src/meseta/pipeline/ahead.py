"""Ids that travel ahead in a loop of one's own."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from torch import nn

from meseta.comm import World, abandon
from meseta.embedding.base import Collection
from meseta.embedding.flight import UNEVEN, Flight, RanOut
from meseta.errors import check_choice
from meseta.jagged import KeyedJaggedTensor
from meseta.pipeline.uneven import note_left, refuse_uneven, without_samples
from meseta.spec import MesetaError

AnyBatch = TypeVar("AnyBatch")


@dataclass(eq=False)
class _BatchAhead:
    """A batch whose ids are on their way."""

    batch: Any
    """Where a rank has run out, one without samples; None where it never had any."""
    number: int
    """Counted from 0, on this rank."""
    flight: Flight[Any] | None = None
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
    check_choice("meseta.ahead", "uneven", uneven, UNEVEN)
    loop = _Loop(iter(batches), _collection_of(model), uneven)
    try:
        loop.fill()
        while (coming := loop.take()) is not None:
            yield coming.batch
            loop.leave(coming)
            del coming
    except GeneratorExit:
        loop.close(coming)
        raise
    except BaseException:
        abandon(list(loop.ahead))
        raise


def _collection_of(model: nn.Module) -> Collection[Any]:
    found = [module for module in model.modules() if isinstance(module, Collection)]
    if len(found) != 1:
        raise MesetaError(
            f"meseta.ahead: the model must have one EmbeddingBagCollection, found {len(found)}; put all tables into one"
        )
    return found[0]


@dataclass(eq=False)
class _Loop:
    """What is open in a loop."""

    batches: Iterator[Any]
    embeddings: Collection[Any]
    uneven: str
    ahead: deque[_BatchAhead] = field(default_factory=deque)
    """Those that have begun and were not given out: one, and as many more as storage asks for."""
    is_next_begun: bool = False
    """Whether the batch that was given out has begun another."""
    num_read: int = 0
    """Batches that this rank has had."""
    _last: Any = None
    """The last of them, as it was given out."""
    _sizes: tuple[int, ...] = ()
    """Samples of its features."""

    def fill(self) -> None:
        """Begin the first batches, up to one that cannot be trained."""
        for _ in range(max(self.embeddings.lookahead, 1)):
            self.begin()

    def begin(self) -> None:
        """Read one batch more, unless one that ends the loop is the last, and bring rows of all that are ahead, in
        their order, as far as there is room."""
        self.is_next_begun = True
        if not self.ahead or not self._is_last(self.ahead[-1]):
            self._begin_one()
        for coming in self.ahead:
            if coming.flight is None or not self.embeddings.fetch(coming.flight):
                break

    def _begin_one(self) -> None:
        """Read a batch, and begin to send its ids; where there is none, tell the other ranks."""
        number = self.num_read
        batch, ids = self._read()
        coming = _BatchAhead(batch, number)
        self.ahead.append(coming)
        try:
            flight = self.embeddings.start(ids)
            flight.overlaps = self.embeddings.num_ranks > 1
            self.embeddings.exchange(flight)
            if self.embeddings.lookahead:
                self.embeddings.hand_on(flight)
        except Exception as refused:
            coming.error = ids if isinstance(ids, Exception) else refused
            return
        coming.flight = flight
        if batch is not None:
            object.__setattr__(batch, "sparse", flight)
            self._last = batch
        if isinstance(ids, KeyedJaggedTensor):
            self._sizes = ids.batch_sizes

    def _is_last(self, coming: _BatchAhead) -> bool:
        """Whether none follows: it cannot be trained, or all ranks have run out with it."""
        return coming.flight is None or len(coming.flight.ran_out) == self.embeddings.num_ranks

    def _read(self) -> tuple[Any, KeyedJaggedTensor | RanOut | Exception]:
        """A copy of the next batch, and its ids, or why there are none."""
        try:
            batch = next(self.batches)
        except StopIteration:
            return self._empty()
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

    def _empty(self) -> tuple[Any, RanOut | Exception]:
        """One without samples, like the last."""
        self.batches = iter(())
        try:
            empty = None if self._last is None else without_samples(self._last, self._sizes)
        except Exception as error:  # of a class of the user's
            return None, error
        return empty, RanOut(self.num_read, self.uneven)

    def take(self) -> _BatchAhead | None:
        """The batch that was begun; None at the end of the loop, which is that of all ranks."""
        coming, self.is_next_begun = self.ahead.popleft(), False
        if coming.error is not None:
            raise coming.error
        assert coming.flight is not None
        if coming.flight.ran_out and self._ends_at(coming.flight):
            return None
        coming.flight.meanwhile = self.begin
        return coming

    def _ends_at(self, flight: Flight[Any]) -> bool:
        """Whether the loop ends where some ranks have run out; raises MesetaError where it should not come to that."""
        ran_out, num_ranks = flight.ran_out, self.embeddings.num_ranks
        refused = refuse_uneven(ran_out, self.uneven, num_ranks)
        if refused is None and self.uneven == "join" and len(ran_out) < num_ranks:
            return False
        rest = [flight, *(coming.flight for coming in self.ahead if coming.flight is not None)]
        for one in rest:
            self._give_up(one)
        if refused is not None:
            raise refused
        if len(ran_out) < num_ranks:
            world: World = cast(Any, self.embeddings).world
            note_left(ran_out, sum(world.rank not in one.ran_out for one in rest), self.batches, world)
        return True

    def leave(self, taken: _BatchAhead) -> None:
        """Begin the next batch, where this one was passed over."""
        if self.is_next_begun:
            return
        assert taken.flight is not None
        stage = taken.flight.stage
        self._give_up(taken.flight)
        if stage != "exchanged":
            what = "was looked up and then passed over" if stage == "looked up" else "has failed"
            raise MesetaError(
                f"meseta.ahead: batch {taken.number}, counted from 0, {what}, so that the next one has not begun; give "
                "what look_up has returned to model.embeddings(...), pass batches over before it, and let errors end "
                "the loop"
            )
        self.begin()

    def close(self, taken: _BatchAhead | None) -> None:
        """Give up what is open, where the loop is left early."""
        for one in (taken, *self.ahead):
            if one is not None and one.flight is not None:
                self._give_up(one.flight)

    def _give_up(self, flight: Flight[Any]) -> None:
        if flight.stage in ("exchanged", "looked up"):
            self.embeddings.drop(flight)
