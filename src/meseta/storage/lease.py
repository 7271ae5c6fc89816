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
from meseta.ops.row_cache import FarFailure, NoRoom, pin_rows
from meseta.spec import MesetaError
from meseta.storage.table import TableStorage
from meseta.storage.tiered import Arrival, NearRowsTaken, TieredShard


class RowsUnderWay(Arrival):
    """Rows of tiered shards that a batch needs; they stay near until it is over."""

    def __init__(
        self, shards: Sequence[TieredShard], looked_up: Sequence[tuple[int, Tensor]], *, to_read: bool
    ) -> None:
        """`looked_up` are rows, each with the index of its shard. Raises MesetaError where there is no room for them,
        or others cannot be pushed out."""
        self._shards = shards
        self._error: MesetaError | None = None
        self._is_here = False
        try:
            self._pinned = pin_rows([shard.cache for shard in shards], looked_up, to_read=to_read)
        except NoRoom as error:
            raise NearRowsTaken(_Refusal(shards, looked_up, error)) from None
        except FarFailure as error:
            raise shards[error.index].failure(error) from None
        self.places = self._pinned.places
        """Where each of the rows lies in what is lent, int64 on the CPU."""
        self._after = tuple(dict.fromkeys(other for shard in shards for other in shard.under_way))
        for index, shard in enumerate(shards):
            shard.move_out(self._pinned, index, self)

    def wait(self) -> None:
        if not self._is_here:
            self._is_here = True
            after, self._after = self._after, ()
            for other in after:  # may bring rows that this batch needs too
                try:
                    other.wait()
                except MesetaError as error:
                    self._error = error
            self._take_in()  # in any case: others may need these rows, and they are near when the batch is over
        if self._error is not None:
            raise self._error

    def _take_in(self) -> None:
        begun = perf_counter()
        try:
            for absent in self._pinned.wait():
                self._shards[absent.cache].make(absent.rows, absent.slots)
            for index, shard in enumerate(self._shards):
                shard.move_in(self._pinned, index)
        except FarFailure as error:
            self._error = self._shards[error.index].failure(error)
        finally:
            for shard in self._shards:
                shard.under_way.remove(self)
                shard.wait_s += (perf_counter() - begun) / len(self._shards)

    def end(self) -> None:
        """The batch is over, once. That rows could not be had is told to who waits for them."""
        with suppress(MesetaError):
            self.wait()  # who comes next takes what lies there
        self._pinned.end()


@dataclass(frozen=True)
class _Refusal:
    """What to say of a batch that looks up too many rows; worked out when somebody is told, since batches ahead ask for
    room again and again."""

    shards: Sequence[TieredShard]
    looked_up: Sequence[tuple[int, Tensor]]
    refused: NoRoom

    def __str__(self) -> str:
        return self.shards[self.refused.index].no_room(self.refused, self._least_bytes())

    def _least_bytes(self) -> int:
        """Of memory with which rows of this batch, and of another as large, may lie near."""
        num_bytes = 0
        for index, shard in enumerate(self.shards):
            ids = [rows.to("cpu") for number, rows in self.looked_up if number == index]
            num_bytes += shard.near_bytes(2 * len(torch.cat(ids).unique()) if ids else 0)
        return num_bytes


class Lease:
    """Pieces whose rows are lent together, until `end` or until nobody has the lease any more."""

    def __init__(
        self, shards: Sequence[TableStorage], looked_up: Sequence[tuple[int, Tensor]] = (), *, to_read: bool = False
    ) -> None:
        """`looked_up` are rows of pieces that lie far, each with the index of its piece. Those that are looked up
        `to_read` are not stepped, and push none out. Raises MesetaError as RowsUnderWay does."""
        self._lent: Sequence[TableStorage] = ()
        self._under_way: RowsUnderWay | None = None
        self.places: Sequence[Int[Tensor, " _"]] = ()
        """Where each of them lies in what is lent."""
        if looked_up:
            far = {index: number for number, index in enumerate(dict.fromkeys(index for index, _ in looked_up))}
            tiered = [shard for shard in map(shards.__getitem__, far) if isinstance(shard, TieredShard)]
            self._under_way = RowsUnderWay(tiered, [(far[index], rows) for index, rows in looked_up], to_read=to_read)
            self.places = self._under_way.places
        self.rows = tuple(shard.begin() for shard in shards)
        """Of each piece."""
        self._lent = shards

    def wait(self) -> None:
        """Until the rows that are looked up lie where they are lent. Raises MesetaError where they cannot be had."""
        if self._under_way is not None:
            self._under_way.wait()

    def end(self) -> None:
        """Give all back, once."""
        lent, self._lent = self._lent, ()
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.end()
        for shard in lent:
            shard.end()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # at the very end modules are gone, and this one with them
            self.end()
