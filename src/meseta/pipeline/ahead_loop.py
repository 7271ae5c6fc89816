"""Loops of users over batches whose ids are exchanged ahead of their steps."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from torch import Tensor, nn

from meseta.comm import World, retain_until_exit
from meseta.data.read.batch import Batch
from meseta.embedding.base import BaseEmbeddingCollection
from meseta.embedding.batch_context import UNEVEN_POLICIES, BatchContext, ExhaustedInput
from meseta.errors import check_choice
from meseta.sparse import JaggedTensor, KeyedJaggedTensor
from meseta.spec import MesetaError
from meseta.system.ranks import print_note

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


COUNT_TIMEOUT_S = 5.0
"""Seconds for which remaining batches are read to count them."""
_MAX_LISTED_RANKS = 4


def find_uneven_error(ran_out: Mapping[int, ExhaustedInput], uneven: str, num_ranks: int) -> MesetaError | None:
    """Return the error, equal on all ranks, if policy `uneven` does not allow the exhausted ranks, or `None`."""
    first = min(ran_out)
    other = next((r for r, reported in sorted(ran_out.items()) if reported.policy != uneven), None)
    if other is not None:
        return MesetaError(
            f"meseta.ahead: uneven must be equal on all ranks, got {ran_out[other].policy!r} on rank {other} and "
            f"{uneven!r} on another rank"
        )
    if len(ran_out) == num_ranks or uneven == "drop":
        return None
    if uneven == "error":
        return MesetaError(
            f"meseta.ahead: rank {first} is exhausted after {_format_batches(ran_out[first].num_batches)}, but others "
            "have more; give all ranks the same number of batches, or set uneven='join' to train the others too, or "
            "uneven='drop' to skip them"
        )
    idle = next((rank for rank, reported in sorted(ran_out.items()) if not reported.num_batches), None)
    if idle is None:
        return None
    return MesetaError(
        f"meseta.ahead: rank {idle} has no batches, but uneven='join' needs one as a template for empty batches; give "
        "the rank at least one batch, which may be empty, or set uneven='drop'"
    )


def warn_remaining_batches(
    ran_out: Mapping[int, ExhaustedInput], num_begun: int, batches: Iterator[Any], world: World
) -> None:
    """Print on rank 0 how many batches are skipped because the loop ends with the first exhausted rank. Collective.

    `num_begun` is the number of remaining batches that this rank has started. Others are read to count them, for
    `COUNT_TIMEOUT_S` at most.
    """
    count, is_all = _count_remaining(batches)
    left = [*enumerate(world.all_gather_object((count + num_begun, is_all)))]
    some = [(rank, count, is_all) for rank, (count, is_all) in left if count]
    first, total = min(ran_out), sum(count for _, count, _ in some)
    by_rank = [f"rank {rank}: {_format_bound(is_all)}{count:,}" for rank, count, is_all in some[:_MAX_LISTED_RANKS]]
    more = [f"and {len(some) - _MAX_LISTED_RANKS:,} ranks more"] if len(some) > _MAX_LISTED_RANKS else []
    if world.rank == 0:
        print_note(
            f"meseta.ahead: rank {first} is exhausted after {_format_batches(ran_out[first].num_batches)}, so the loop "
            f"ends; {_format_bound(all(is_all for *_, is_all in some))}{_format_batches(total)} of other ranks are not "
            f"trained ({', '.join(by_rank + more)})"
        )


def make_empty_batch(batch: Any, sizes: Collection[int]) -> Any:
    """Copy a batch without its samples. `sizes` are the batch sizes of its features.

    Tensors whose first dimension is in `sizes` become empty, also in dicts, lists and tuples. The copy shares all else.
    """
    empty = copy.copy(batch)
    names = [name for kind in type(batch).__mro__ for name in getattr(kind, "__slots__", ())]
    for name in [*getattr(batch, "__dict__", ()), *names]:
        if hasattr(batch, name):
            object.__setattr__(empty, name, _empty_like(getattr(batch, name), sizes))
    if isinstance(batch, Batch):
        object.__setattr__(empty, "num_padding", 0)
    return empty


def _empty_like(value: Any, sizes: Collection[int]) -> Any:
    if isinstance(value, Tensor):
        return value.new_empty((0, *value.shape[1:])) if value.dim() and value.shape[0] in sizes else value
    if isinstance(value, KeyedJaggedTensor):
        weights = None if value.weights is None else value.weights[:0].clone()
        return KeyedJaggedTensor(value.keys, value.values[:0].clone(), value.lengths[:0].clone(), weights)
    if isinstance(value, JaggedTensor):
        return JaggedTensor(value.values[:0].clone(), value.lengths[:0].clone())
    if isinstance(value, dict):
        return {key: _empty_like(item, sizes) for key, item in value.items()}
    if isinstance(value, list):
        return [_empty_like(item, sizes) for item in value]
    if isinstance(value, tuple):
        each = [_empty_like(item, sizes) for item in value]
        return type(value)(*each) if hasattr(value, "_fields") else tuple(each)
    return value


def _count_remaining(batches: Iterator[Any]) -> tuple[int, bool]:
    """Return (number of batches read, whether these are all)."""
    count, deadline = 0, time.monotonic() + COUNT_TIMEOUT_S
    try:
        for _ in batches:
            count += 1
            if time.monotonic() > deadline:
                return count, False
    except Exception:  # Batches that are not trained may be unreadable.
        return count, False
    return count, True


def _format_batches(count: int) -> str:
    return f"{count:,} batch{'es' * (count != 1)}"


def _format_bound(is_all: bool) -> str:
    return "" if is_all else "at least "
