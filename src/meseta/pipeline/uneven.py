"""Ranks of a loop of one's own that run out of batches unevenly: what comes of it, and batches without samples."""

from __future__ import annotations

import copy
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor

from meseta.comm import World
from meseta.data.batch import Batch
from meseta.embedding.batch_context import ExhaustedInput
from meseta.jagged import JaggedTensor, KeyedJaggedTensor
from meseta.machine.ranks import print_note
from meseta.spec import MesetaError

COUNT_TIMEOUT_S = 5.0
"""Seconds in which batches that are left are read to be counted."""
_MAX_LISTED_RANKS = 4
"""Ranks that a message lists."""


def find_uneven_error(ran_out: Mapping[int, ExhaustedInput], uneven: str, num_ranks: int) -> MesetaError | None:
    """Why a loop of `num_ranks` ranks, of which some have run out, does not go on or end as its `uneven` says; None
    where it does. Alike on all ranks."""
    first = min(ran_out)
    other = next((r for r, told in sorted(ran_out.items()) if told.policy != uneven), None)
    if other is not None:
        return MesetaError(
            f"meseta.ahead: uneven is {ran_out[other].policy!r} on rank {other} and {uneven!r} on another one; give "
            "all ranks the same"
        )
    if len(ran_out) == num_ranks or uneven == "drop":
        return None
    if uneven == "error":
        return MesetaError(
            f"meseta.ahead: rank {first} has run out after {_format_batches(ran_out[first].num_batches)}, and not all "
            f"ranks "
            "have; give each as many, or say uneven='join', to train what the others have too, or uneven='drop'"
        )
    idle = next((rank for rank, told in sorted(ran_out.items()) if not told.num_batches), None)
    if idle is None:
        return None
    return MesetaError(
        f"meseta.ahead: rank {idle} has no batch at all, so that none without samples can be made like its last one; "
        "give it one, which may be empty, or say uneven='drop'"
    )


def warn_remaining_batches(
    ran_out: Mapping[int, ExhaustedInput], num_begun: int, batches: Iterator[Any], world: World
) -> None:
    """Say on rank 0 how many batches are left where the loop ends with the first that ran out; this rank has
    begun `num_begun` of them. The others are read to be counted, for a few seconds at most. Collective."""
    count, is_all = _count_remaining(batches)
    left = [*enumerate(world.all_gather_object((count + num_begun, is_all)))]
    some = [(rank, count, is_all) for rank, (count, is_all) in left if count]
    first, total = min(ran_out), sum(count for _, count, _ in some)
    by_rank = [f"rank {rank}: {_format_bound(is_all)}{count:,}" for rank, count, is_all in some[:_MAX_LISTED_RANKS]]
    more = [f"and {len(some) - _MAX_LISTED_RANKS:,} ranks more"] if len(some) > _MAX_LISTED_RANKS else []
    if world.rank == 0:
        print_note(f"meseta.ahead: rank {first} has run out after {_format_batches(ran_out[first].num_batches)}, and "
                   f"the loop ends "
             f"there; {_format_bound(all(is_all for *_, is_all in some))}{_format_batches(total)} of others are left "
             f"untrained "
             f"({', '.join(by_rank + more)})")  # fmt: skip


def make_empty_batch(batch: Any, sizes: Collection[int]) -> Any:
    """A copy of a batch, with no row of its tensors whose first dimension is one of `sizes`, the samples of its
    features; those in dicts, lists and tuples too. All else stays as it is."""
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
        return {key: _empty_like(own, sizes) for key, own in value.items()}
    if isinstance(value, list):
        return [_empty_like(own, sizes) for own in value]
    if isinstance(value, tuple):
        each = [_empty_like(own, sizes) for own in value]
        return type(value)(*each) if hasattr(value, "_fields") else tuple(each)
    return value


def _count_remaining(batches: Iterator[Any]) -> tuple[int, bool]:
    """Batches that are left, and whether these are all."""
    count, deadline = 0, time.monotonic() + COUNT_TIMEOUT_S
    try:
        for _ in batches:
            count += 1
            if time.monotonic() > deadline:
                return count, False
    except Exception:  # what nobody trains on may be unreadable
        return count, False
    return count, True


def _format_batches(count: int) -> str:
    return f"{count:,} batch{'es' * (count != 1)}"


def _format_bound(is_all: bool) -> str:
    return "" if is_all else "at least "
