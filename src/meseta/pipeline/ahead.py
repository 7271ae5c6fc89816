"""Ids that travel ahead in a loop of one's own."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from meseta.comm import abandon
from meseta.embedding.base import Collection
from meseta.embedding.flight import Flight
from meseta.jagged import KeyedJaggedTensor
from meseta.spec import MesetaError

AnyBatch = TypeVar("AnyBatch")


@dataclass(eq=False)
class _BatchAhead:
    """A batch whose ids are on their way."""

    batch: Any
    flight: Flight[Any] | None = None
    error: Exception | None = None
    """Raised when its turn comes."""


def ahead(batches: Iterable[AnyBatch], model: nn.Module) -> Generator[AnyBatch, None, None]:
    """Each batch with its `sparse` replaced by a flight, whose ids travel while the batch before is computed:

        for batch in meseta.ahead(batches, model):
            logits = model(batch.dense, batch.sparse)

    The model's EmbeddingBagCollection takes the flight as it takes a KeyedJaggedTensor, once, and begins the next batch
    when it has looked this one up. Its gradients travel while the rest of the backward pass is computed. No bit is
    another than without it. What is wrong with a batch, or keeps a rank from reading it, is raised at its turn, on all
    ranks. Leaving the loop early closes what is open; every rank must leave it at the same batch.

    Args:
        batches: as many on every rank; objects with an attribute `sparse`, of which copies are given out.
        model: with one EmbeddingBagCollection, sharded or not.

    Raises MesetaError for a model without one, and for a batch without `sparse`.
    """
    loop = _Loop(iter(batches), _collection_of(model))
    try:
        loop.begin()
        while (coming := loop.next) is not None:
            loop.next = None
            if coming.error is not None:
                raise coming.error
            assert coming.flight is not None
            coming.flight.meanwhile = loop.begin
            yield coming.batch
            if coming.flight.stage == "exchanged":  # passed over
                loop.embeddings.drop(coming.flight)
                loop.begin()
            del coming
    except GeneratorExit:
        for open_one in (coming, loop.next):
            if open_one is not None and open_one.flight is not None and open_one.flight.stage == "exchanged":
                loop.embeddings.drop(open_one.flight)
        raise
    except BaseException:
        abandon(loop.next)
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
    next: _BatchAhead | None = None

    def begin(self) -> None:
        """Read the next batch, and begin to send its ids."""
        self.next = self._read()
        if self.next is None:
            return
        try:
            flight = self.embeddings.start(self.next.error or self.next.batch.sparse)
            flight.overlaps = self.embeddings.num_ranks > 1
            self.embeddings.exchange(flight)
        except Exception as refused:
            self.next.error = self.next.error or refused
        else:
            self.next.flight, self.next.batch = flight, copy.copy(self.next.batch)
            object.__setattr__(self.next.batch, "sparse", flight)

    def _read(self) -> _BatchAhead | None:
        """None at the end."""
        try:
            batch = next(self.batches)
        except StopIteration:
            return None
        except Exception as error:
            return _BatchAhead(None, error=error)
        if not isinstance(getattr(batch, "sparse", None), KeyedJaggedTensor):
            what = type(getattr(batch, "sparse", None)).__name__
            return _BatchAhead(None, error=MesetaError(
                f"meseta.ahead: a batch must have `sparse`, a KeyedJaggedTensor, but that of a "
                f"{type(batch).__name__} is a {what}; give batches as meseta.data.Reader makes them"
            ))  # fmt: skip
        return _BatchAhead(batch)
