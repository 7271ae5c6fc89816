"""Rows that a batch has on loan, and how those of tiered shards come."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from meseta.jagged.shapes import Int
from meseta.ops.row_cache import BackingStoreError, CacheFullError, pin_rows
from meseta.spec import MesetaError
from meseta.storage.table import TableStorage
from meseta.storage.tiered import CacheCapacityError, PendingFetch, TieredShard


class RowFetch(PendingFetch):
    """Rows of tiered shards that a batch needs; they stay near until it is over."""

    def __init__(
        self, shards: Sequence[TieredShard], looked_up: Sequence[tuple[int, Tensor]], *, read_only: bool
    ) -> None:
        """`looked_up` are rows, each with the index of its shard. Raises MesetaError where there is no room for them,
        or others cannot be pushed out."""
        self._shards = shards
        self._error: MesetaError | None = None
        self._has_waited = False
        try:
            self._pinned = pin_rows([shard.cache for shard in shards], looked_up, read_only=read_only)
        except CacheFullError as error:
            raise CacheCapacityError(_CapacityMessage(shards, looked_up, error)) from None
        except BackingStoreError as error:
            raise shards[error.cache_index].backing_store_error(error) from None
        self.slots = self._pinned.slots
        """Where each of the rows lies in what is lent, int64 on the CPU."""
        self._earlier_fetches = tuple(dict.fromkeys(other for shard in shards for other in shard.pending_fetches))
        for index, shard in enumerate(shards):
            shard.start_fetch(self._pinned, index, self)

    def wait(self) -> None:
        if not self._has_waited:
            self._has_waited = True
            after, self._earlier_fetches = self._earlier_fetches, ()
            for other in after:  # may bring rows that this batch needs too
                try:
                    other.wait()
                except MesetaError as error:
                    self._error = error
            self._complete()  # in any case: others may need these rows, and they are near when the batch is over
        if self._error is not None:
            raise self._error

    def _complete(self) -> None:
        begun = perf_counter()
        try:
            for absent in self._pinned.wait():
                self._shards[absent.cache_index].initialize_rows(absent.rows, absent.slots)
            for index, shard in enumerate(self._shards):
                shard.finish_fetch(self._pinned, index)
        except BackingStoreError as error:
            self._error = self._shards[error.cache_index].backing_store_error(error)
        finally:
            for shard in self._shards:
                shard.pending_fetches.remove(self)
                shard.wait_s += (perf_counter() - begun) / len(self._shards)

    def release(self) -> None:
        """The batch is over, once. That rows could not be had is told to who waits for them."""
        with suppress(MesetaError):
            self.wait()  # who comes next takes what lies there
        self._pinned.unpin()


@dataclass(frozen=True)
class _CapacityMessage:
    """What to say of a batch that looks up too many rows; worked out when somebody is told, since batches ahead ask for
    room again and again."""

    shards: Sequence[TieredShard]
    looked_up: Sequence[tuple[int, Tensor]]
    error: CacheFullError

    def __str__(self) -> str:
        return self.shards[self.error.cache_index].capacity_message(self.error, self._min_cache_bytes())

    def _min_cache_bytes(self) -> int:
        """Of memory with which rows of this batch, and of another as large, may lie near."""
        num_bytes = 0
        for index, shard in enumerate(self.shards):
            ids = [rows.to("cpu") for number, rows in self.looked_up if number == index]
            num_bytes += shard.cache_bytes(2 * len(torch.cat(ids).unique()) if ids else 0)
        return num_bytes


class Lease:
    """Pieces whose rows are lent together, until `end` or until nobody has the lease any more."""

    def __init__(
        self, shards: Sequence[TableStorage], looked_up: Sequence[tuple[int, Tensor]] = (), *, read_only: bool = False
    ) -> None:
        """`looked_up` are rows of pieces that lie far, each with the index of its piece. Those that are looked up
        `read_only` are not stepped, and push none out. Raises MesetaError as RowFetch does."""
        self._acquired: Sequence[TableStorage] = ()
        self._fetch: RowFetch | None = None
        self.slots: Sequence[Int[Tensor, " _"]] = ()
        """Where each of them lies in what is lent."""
        if looked_up:
            far = {index: number for number, index in enumerate(dict.fromkeys(index for index, _ in looked_up))}
            tiered = [shard for shard in map(shards.__getitem__, far) if isinstance(shard, TieredShard)]
            self._fetch = RowFetch(tiered, [(far[index], rows) for index, rows in looked_up], read_only=read_only)
            self.slots = self._fetch.slots
        self.rows = tuple(shard.acquire() for shard in shards)
        """Of each piece."""
        self._acquired = shards

    def wait(self) -> None:
        """Until the rows that are looked up lie where they are lent. Raises MesetaError where they cannot be had."""
        if self._fetch is not None:
            self._fetch.wait()

    def release(self) -> None:
        """Give all back, once."""
        lent, self._acquired = self._acquired, ()
        under_way, self._fetch = self._fetch, None
        if under_way is not None:
            under_way.release()
        for shard in lent:
            shard.release()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # at the very end modules are gone, and this one with them
            self.release()
