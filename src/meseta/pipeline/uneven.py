"""Policies for ranks that run out of batches at different times, and batches without samples."""

from __future__ import annotations

import copy
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor

from meseta.comm import World
from meseta.data.read.batch import Batch
from meseta.embedding.batch_context import ExhaustedInput
from meseta.sparse import JaggedTensor, KeyedJaggedTensor
from meseta.spec import MesetaError
from meseta.system.ranks import print_note

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
