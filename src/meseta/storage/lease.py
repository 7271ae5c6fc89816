"""Leases of table rows for one batch. Rows of offloaded shards are fetched into the cache and pinned."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from meseta.ops.row_cache import BackingStoreError, CacheFullError, pin_rows
from meseta.sparse.shapes import Int
from meseta.spec import MesetaError
from meseta.storage.table import TableStorage
from meseta.storage.tiered import CacheCapacityError, PendingFetch, TieredShard


class RowFetch(PendingFetch):
    """Fetch of the rows that a batch looks up in offloaded shards. They stay pinned until `release`."""

    def __init__(
        self, shards: Sequence[TieredShard], looked_up: Sequence[tuple[int, Tensor]], *, read_only: bool
    ) -> None:
        """Pin the rows, and start to fetch those that are not in the cache.

        `looked_up` has pairs (index into `shards`, rows). With `read_only`, the rows are not updated and evict no other
        rows. Raises CacheCapacityError if the rows do not fit, and MesetaError if evicted rows cannot be written.
        """
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
        """Cache slot of each row, int64 on the CPU, one tensor per entry of `looked_up`."""
        self._earlier_fetches = tuple(dict.fromkeys(other for shard in shards for other in shard.pending_fetches))
        for index, shard in enumerate(shards):
            shard.start_fetch(self._pinned, index, self)

    def wait(self) -> None:
        if not self._has_waited:
            self._has_waited = True
            earlier_fetches, self._earlier_fetches = self._earlier_fetches, ()
            # An earlier fetch may bring rows that this batch has pinned too.
            for other in earlier_fetches:
                try:
                    other.wait()
                except MesetaError as error:
                    self._error = error
            # Complete this fetch even if an earlier one failed, because later batches find its rows in the cache.
            self._complete()
        if self._error is not None:
            raise self._error

    def _complete(self) -> None:
        start_s = perf_counter()
        try:
            for unwritten in self._pinned.wait():
                self._shards[unwritten.cache_index].initialize_rows(unwritten.rows, unwritten.slots)
            for index, shard in enumerate(self._shards):
                shard.finish_fetch(self._pinned, index)
        except BackingStoreError as error:
            self._error = self._shards[error.cache_index].backing_store_error(error)
        finally:
            for shard in self._shards:
                shard.pending_fetches.remove(self)
                shard.wait_s += (perf_counter() - start_s) / len(self._shards)

    def release(self) -> None:
        """Unpin the rows. Call once, at the end of the batch. Only `wait` raises the error of a failed fetch."""
        # A dropped batch waits too, because later batches read its rows from the cache.
        with suppress(MesetaError):
            self.wait()
        self._pinned.unpin()


@dataclass(frozen=True)
class _CapacityMessage:
    # Prefetching tries again and again and drops these errors, and counting distinct rows takes time.

    shards: Sequence[TieredShard]
    looked_up: Sequence[tuple[int, Tensor]]
    error: CacheFullError

    def __str__(self) -> str:
        return self.shards[self.error.cache_index].capacity_message(self.error, self._min_cache_bytes())

    def _min_cache_bytes(self) -> int:
        """Return the cache size in bytes that holds this batch and another one of the same size."""
        num_bytes = 0
        for index, shard in enumerate(self.shards):
            ids = [rows.to("cpu") for number, rows in self.looked_up if number == index]
            num_bytes += shard.cache_bytes(2 * len(torch.cat(ids).unique()) if ids else 0)
        return num_bytes


class Lease:
    """Access to the rows of some shards for one batch, until `release` or garbage collection."""

    def __init__(
        self, shards: Sequence[TableStorage], looked_up: Sequence[tuple[int, Tensor]] = (), *, read_only: bool = False
    ) -> None:
        """Acquire all `shards`, and start to fetch rows of the offloaded ones.

        `looked_up` has pairs (index into `shards`, rows) of offloaded shards. With `read_only`, the rows are not
        updated and evict no other rows. Raises CacheCapacityError if the rows do not fit, and MesetaError if evicted
        rows cannot be written.
        """
        self._acquired: Sequence[TableStorage] = ()
        self._fetch: RowFetch | None = None
        self.slots: Sequence[Int[Tensor, " _"]] = ()
        """Index of each row of `looked_up` in the tensors of `rows`, one tensor per entry of `looked_up`."""
        if looked_up:
            tiered_indices = {
                index: number for number, index in enumerate(dict.fromkeys(index for index, _ in looked_up))
            }
            tiered = [shard for shard in map(shards.__getitem__, tiered_indices) if isinstance(shard, TieredShard)]
            self._fetch = RowFetch(
                tiered, [(tiered_indices[index], rows) for index, rows in looked_up], read_only=read_only
            )
            self.slots = self._fetch.slots
        self.rows = tuple(shard.acquire() for shard in shards)
        """Rows and optimizer states of each shard, as operators take them."""
        self._acquired = shards

    def wait(self) -> None:
        """Wait until the fetched rows are in their slots. Raises MesetaError if the fetch failed."""
        if self._fetch is not None:
            self._fetch.wait()

    def release(self) -> None:
        """Unpin the rows and release all shards. Further calls do nothing."""
        acquired, self._acquired = self._acquired, ()
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            fetch.release()
        for shard in acquired:
            shard.release()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # Module globals may be gone at the exit of the interpreter.
            self.release()
