"""Shards with all rows in a backing store, and a cache of rows that operators read and update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from meseta.ops.memory import empty
from meseta.ops.random_rows import initial_rows, initial_rows_at, table_key
from meseta.ops.row_cache import BackingStoreError, CacheFullError, PinnedRows, RowCache, pin_rows
from meseta.ops.row_file import RowFileSnapshot
from meseta.ops.row_marks import RowMarks
from meseta.ops.row_marks.row_set import RowSet
from meseta.ops.row_program.optimizer import RowOptimizer
from meseta.ops.row_update import TableRows
from meseta.sparse.shapes import Int
from meseta.spec import MesetaError, Shard, TableSpec
from meseta.spec.tiers import CACHE_SLOT_OVERHEAD_BYTES, DISK, row_index_bytes
from meseta.storage.backing_store import BackingStore, BackingStoreSnapshot, RecordLayout
from meseta.storage.selection import CopiedRows, LazyRows, SelectedRows, SnapshotReader, allocate_buffers
from meseta.storage.table import ROW, PendingFetch, TableStorage, as_stored, from_stored
from meseta.telemetry.row_traffic import RowTraffic

MAX_READ_ONLY_ROWS = 1 << 22
"""Maximum number of read-only slots on a CPU rank. Evaluation reads uncached rows into them and evicts none."""
TRANSFER_CHUNK_ROWS = 1 << 14
"""Number of rows that are copied at a time, to limit memory."""


class CacheCapacityError(MesetaError):
    """Error for a batch that looks up more rows than the unpinned part of the cache can hold."""


class _OffloadedShard(TableStorage):
    """Base class of `TieredShard` and `ShardSnapshot`. It decodes records, and computes rows that were never
    written."""

    def __init__(self, spec: TableSpec, shard: Shard, optimizer: RowOptimizer, seed: int, like: dict[str, Tensor]):
        self.spec, self.shard, self.optimizer, self.seed = spec, shard, optimizer, seed
        self._like = like
        self._layout = RecordLayout(like)

    @property
    def values(self) -> Mapping[str, Tensor]:
        return self._like

    def _decode_range(self, records: Sequence[Tensor], is_present: Tensor, first: int, stop: int) -> dict[str, Tensor]:
        """Return rows first..stop-1 from their records. Overwrites the records of unwritten rows."""
        start, columns = self.shard.rows[0], self.shard.columns
        if not is_present.any():
            weight = initial_rows(
                self.spec, rows=(start + first, start + stop), columns=columns, seed=self.seed, device="cpu"
            )
            return {ROW: weight, **self.optimizer.init(weight)}
        return self._decode(records, is_present, torch.arange(first, stop))

    def _decode(self, records: Sequence[Tensor], is_present: Tensor, rows: Tensor) -> dict[str, Tensor]:
        """Return `rows` from their records. Overwrites the records of unwritten rows with initial values."""
        unwritten = torch.nonzero(~is_present).squeeze(1)
        values = self._layout.from_bytes(records)
        # Initial values are computed for a few rows at a time to limit memory.
        for unwritten_places in unwritten.split(TRANSFER_CHUNK_ROWS) if unwritten.numel() else ():
            for name, value in self._initial_values(rows[unwritten_places]).items():
                values[name][unwritten_places] = value
        return values

    def _initial_values(self, rows: Tensor) -> dict[str, Tensor]:
        weight = initial_rows_at(self.spec, rows + self.shard.rows[0], columns=self.shard.columns, seed=self.seed)
        return {ROW: weight, **self.optimizer.init(weight)}


class TieredShard(_OffloadedShard):
    """Shard with all rows in a backing store, and a cache of rows on the device of the rank.

    Training is bitwise identical to a resident shard. An unwritten row has the initial values of a resident table.
    """

    #               slot 0   slot 1   slot 2   ...     cache: rows and optimizer states
    #     row         7        2      (empty)
    #                 ^        ^
    #                 |        |       evicted when the slot is needed, and written back if changed
    #               row 0    row 1    row 2    ...     backing store: a record for each row that was ever written

    is_offloaded = True

    def __init__(
        self,
        spec: TableSpec,
        shard: Shard,
        optimizer: RowOptimizer,
        far: BackingStore,
        *,
        num_slots: int,
        seed: int,
        device: torch.device | str,
    ) -> None:
        """Create a shard with an empty backing store `far` and a cache of `num_slots` rows.

        Raises MesetaError if the optimizer cannot initialize rows one at a time.
        """
        check_row_init(spec, optimizer)
        like = meta_values(spec, shard, optimizer)
        super().__init__(spec, shard, optimizer, seed, like)
        self.backing_store = far
        is_cpu = torch.device(device).type == "cpu"
        # Read-only slots take no memory on a CPU until they are written. On a GPU they are allocated here.
        num_to_read = min(MAX_READ_ONLY_ROWS if is_cpu else num_slots, shard.num_rows)

        def empty_slots(value: Tensor) -> Tensor:
            return empty((num_slots + num_to_read, *value.shape[1:]), value.dtype, device, keep=False)

        with torch.inference_mode(False):  # Inference tensors could not be updated in place later.
            self._cached_values = {name: empty_slots(value) for name, value in like.items()}
        # On a CPU, the native cache copies the rows. On a GPU it only assigns slots.
        values = list(self._cached_values.values()) if is_cpu else []
        self.cache = RowCache(num_slots, num_to_read, shard.num_rows, far.handle, values)
        self.pending_fetches: list[PendingFetch] = []
        """Fetches that are not complete, in the order of their start."""
        self.wait_s = 0.0
        """Total seconds for which batches have waited for rows of this shard."""
        with torch.inference_mode(False):
            self.marks = RowMarks(shard.num_rows, device)
        state = dict(self._cached_values)
        self._table_rows = TableRows(
            weight=state.pop(ROW),
            state=state,
            key=table_key(seed, f"{spec.name}/rounding"),
            first_row=shard.rows[0],
            first_column=shard.columns[0],
            row_ids=self.cache.rows.to(device),  # On a CPU this is no copy, so the cache keeps it up to date.
            marks=self.marks.words,
        )

    @property
    def device(self) -> torch.device:
        return self._table_rows.weight.device

    def acquire(self) -> TableRows:
        return self._table_rows

    def release(self) -> None:
        pass  # Updated rows stay in the cache until they are evicted.

    @property
    def traffic(self) -> RowTraffic:
        counters, (read, written) = self.cache.counters, self.backing_store.disk_bytes
        return RowTraffic(
            num_rows=counters.num_rows,
            num_misses=counters.num_misses,
            wait_s=self.wait_s,
            read_bytes=read,
            num_evicted=counters.num_written_back,
            evicted_bytes=counters.num_written_back * self._layout.num_bytes,
            written_bytes=written,
        )

    def _wait_for_fetches(self) -> None:
        for fetch in tuple(self.pending_fetches):
            fetch.wait()

    def start_fetch(self, pinned: PinnedRows, index: int, fetch: PendingFetch) -> None:
        """Register a fetch. On a GPU, also write evicted rows back and assign their slots to the new rows.

        `index` is the index of this shard in `pinned`.
        """
        self.pending_fetches.append(fetch)
        if self.device.type != "cpu":
            moved = pinned.moves(index)
            self._write_back_slots(moved.evicted_rows, moved.evicted_slots)
            assert self._table_rows.row_ids is not None
            self._table_rows.row_ids[moved.fetched_slots.to(self.device)] = moved.fetched_rows.to(self.device)

    def finish_fetch(self, pinned: PinnedRows, index: int) -> None:
        """Copy fetched rows into their slots on a GPU. Call after `pinned.wait`."""
        if self.device.type != "cpu":
            moved = pinned.moves(index)
            self._fill_slots(
                moved.fetched_slots[moved.is_written], self._layout.from_bytes([moved.records[moved.is_written]])
            )
            self.initialize_rows(moved.fetched_rows[~moved.is_written], moved.fetched_slots[~moved.is_written])

    def initialize_rows(self, rows: Int[Tensor, " n"], slots: Int[Tensor, " n"]) -> None:
        """Write the initial values of unwritten rows into their slots."""
        if rows.numel():
            self._fill_slots(slots, self._initial_values(rows))

    def cache_bytes(self, num_rows: int) -> int:
        """Return the memory of a cache of `num_rows` rows in bytes, with the index of all rows."""
        row_bytes = self._layout.num_bytes + CACHE_SLOT_OVERHEAD_BYTES
        return min(num_rows, self.shard.num_rows) * row_bytes + row_index_bytes(self.shard.tier, self.shard.num_rows)

    def capacity_message(self, refused: CacheFullError, least_bytes: int) -> str:
        """Return the error message for a batch that does not fit.

        `least_bytes` is the cache size that suffices for all shards of the rank.
        """
        num_slots = self.cache.num_slots
        pinned_text = (
            f", and other batches in flight pin {refused.num_pinned_by_others:,} rows"
            if refused.num_pinned_by_others > 0
            else ""
        )
        min_rows = refused.num_rows + max(refused.num_pinned_by_others, 0)
        return (
            f"{self.shard.label}: a batch looks up {refused.num_rows:,} distinct rows{pinned_text}, but the cache has "
            f"{num_slots:,} slots; set cache_rows of the table to at least {min_rows:,} in the plan, set "
            f"storage.cache_bytes of the rank to at least {least_bytes:,}, or reduce the batch size"
        )

    def backing_store_error(self, failed: BackingStoreError) -> MesetaError:
        """Return an error that describes a failure of the backing store and names its file."""
        return self.backing_store.explain(failed.failure)

    def _write_back_slots(self, rows: Tensor, slots: Tensor) -> None:
        for chunk_rows, chunk_slots in zip(
            rows.split(TRANSFER_CHUNK_ROWS), slots.split(TRANSFER_CHUNK_ROWS), strict=True
        ):
            chunk_indices = chunk_slots.to(self.device)
            values = {
                name: as_stored(value.detach()[chunk_indices]).cpu().numpy()
                for name, value in self._cached_values.items()
            }
            self.backing_store.write(chunk_rows, *self._layout.to_bytes(values))

    def _write_back_dirty(self) -> None:
        slots = self.cache.dirty_slots()
        if self.device.type != "cpu":
            self._write_back_slots(self.cache.rows[slots], slots)
            self.cache.mark_clean(slots)
            return
        try:
            self.cache.write_back(slots)
        except BackingStoreError as error:
            raise self.backing_store_error(error) from None

    def _fill_slots(self, slots: Tensor, values: Mapping[str, Tensor]) -> None:
        indices = slots.to(self.device)
        with torch.no_grad():
            for name, value in values.items():
                self._cached_values[name].index_copy_(0, indices, value.to(self.device))

    def read(self, first: int, stop: int) -> dict[str, Tensor]:
        values = {name: empty((stop - first, *like.shape[1:]), like.dtype) for name, like in self._like.items()}
        self._read_into(values, [torch.arange(first, stop)])
        return values

    def _read_into(self, buffers: Mapping[str, Tensor], parts: Iterable[Tensor]) -> None:
        end = 0
        for part in (few for many in parts for few in many.split(TRANSFER_CHUNK_ROWS)):
            begin, end = end, end + len(part)
            for name, value in self._gather(part).items():
                buffers[name][begin:end] = value

    def _gather(self, rows: Tensor) -> dict[str, Tensor]:
        self._wait_for_fetches()
        records = torch.empty(len(rows), self._layout.num_bytes, dtype=torch.uint8)
        values = self._decode([records], self.backing_store.read(rows, records).wait(), rows)
        # Rows in the cache may be newer than their records.
        slots = self.cache.find(rows)
        hits = torch.nonzero(slots >= 0).squeeze(1)
        indices = slots[hits].to(self.device)
        for name, value in values.items():
            value[hits] = self._cached_values[name].detach()[indices].cpu()
        return values

    def write(self, first: int, values: Mapping[str, NDArray[Any]]) -> None:
        stop = first + len(next(iter(values.values())))
        self.marks.add_range(first, stop)
        self._write_records(torch.arange(first, stop), values)

    def scatter(self, rows: Int[Tensor, " n"], values: Mapping[str, NDArray[Any]]) -> None:
        self.marks.add(rows)
        self._write_records(rows, values)

    def _write_records(self, rows: Tensor, values: Mapping[str, NDArray[Any]]) -> None:
        self._wait_for_fetches()
        for start in range(0, len(rows), TRANSFER_CHUNK_ROWS):
            stop = min(start + TRANSFER_CHUNK_ROWS, len(rows))
            part = {name: source[start:stop] for name, source in values.items()}
            some = rows[start:stop]
            if set(part) != set(self._like):  # A record is written as a whole, so the other values are read first.
                part = {name: as_stored(value).numpy() for name, value in self._gather(some).items()} | part
            self.backing_store.write(some, *self._layout.to_bytes(part))
            slots = self.cache.find(some)
            hits = torch.nonzero(slots >= 0).squeeze(1)
            cached = {name: from_stored(value[hits.numpy()], self._like[name].dtype) for name, value in part.items()}
            self._fill_slots(slots[hits], cached)

    def snapshot(self, reuse: TableStorage | None = None) -> TableStorage:
        """Write changed rows back, and return a snapshot of the backing store. On disk, no rows are copied."""
        return self._snapshot_rows(None)

    def _snapshot_rows(self, selected: RowSet | None) -> ShardSnapshot:
        self._wait_for_fetches()
        self._write_back_dirty()
        rows = self.backing_store.snapshot()
        reader = SnapshotReader(rows, self._layout.widths, selected) if isinstance(rows, RowFileSnapshot) else rows
        state: dict[str, Any] = {"seed": self.seed, "like": self._like, "selected": selected}
        return ShardSnapshot(self.spec, self.shard, self.optimizer, reader, **state)

    def gather(self, rows: Int[Tensor, " n"]) -> dict[str, Tensor]:
        return self._gather(rows)

    def select(self, rows: RowSet, reuse: SelectedRows | None = None) -> SelectedRows:
        """Return a snapshot of `rows`. On disk, it reads the rows in blocks later. Otherwise, the rows are copied."""
        if self.shard.tier == DISK:
            return self.select_in_place(rows)
        buffers = allocate_buffers(self._like, len(rows), reuse)
        self._read_into(buffers, rows.parts())
        return CopiedRows(self.spec, self.shard, self._like, rows, buffers=buffers)

    def select_in_place(self, rows: RowSet) -> SelectedRows:
        if self.shard.tier != DISK:
            return super().select_in_place(rows)
        frozen = self._snapshot_rows(rows)
        identity = self.spec, self.shard, self._like, rows
        return LazyRows(*identity, read=frozen.read, close=frozen.close)

    def sequential_view(self) -> TableStorage:
        return self.snapshot() if self.shard.tier == DISK else self


class ShardSnapshot(_OffloadedShard):
    """Read-only snapshot of an offloaded shard."""

    def __init__(
        self,
        spec: TableSpec,
        shard: Shard,
        optimizer: RowOptimizer,
        far: BackingStoreSnapshot,
        *,
        seed: int,
        like: dict[str, Tensor],
        selected: RowSet | None = None,
    ) -> None:
        super().__init__(spec, shard, optimizer, seed, like)
        self._snapshot, self._selected = far, selected

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def read(self, first: int, stop: int) -> dict[str, Tensor]:
        """Return rows first..stop-1, or those of them that were selected. Do not modify the tensors."""
        records, is_present = self._snapshot.read(first, stop)
        if self._selected is not None:
            return self._decode(records, is_present, self._selected.rows(first, stop))
        return self._decode_range(records, is_present, first, stop)

    def gather(self, rows: Int[Tensor, " n"]) -> dict[str, Tensor]:
        raise MesetaError(f"table {self.spec.name!r}: a snapshot is only read in row order; use `read`, not `gather`")

    def close(self) -> None:
        self._snapshot.close()

    def acquire(self) -> TableRows:
        raise MesetaError(f"table {self.spec.name!r}: a snapshot is read-only; acquire the original shard instead")

    def release(self) -> None:
        pass  # `acquire` always raises an error.

    def write(self, first: int, values: Mapping[str, NDArray[Any]]) -> None:
        raise MesetaError(f"table {self.spec.name!r}: a snapshot is read-only; write to the original shard instead")

    def scatter(self, rows: Int[Tensor, " n"], values: Mapping[str, NDArray[Any]]) -> None:
        self.write(0, values)

    def snapshot(self, reuse: TableStorage | None = None) -> TableStorage:
        return self


def check_row_init(spec: TableSpec, optimizer: RowOptimizer) -> None:
    """Raise MesetaError if `optimizer.init` gives a row a state that depends on the other rows passed with it."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, spec.embedding_dim, generator=generator).to(getattr(torch, spec.dtype))
    whole = optimizer.init(weight)
    for rows in (torch.tensor([3, 1]), torch.tensor([2])):
        parts = optimizer.init(weight[rows])
        if whole.keys() != parts.keys() or not all(_is_equal_to_rows(parts[name], whole[name], rows) for name in whole):
            raise MesetaError(
                f"table {spec.name!r}: tiers 'cached' and 'disk' initialize a row when it is first looked up, but in "
                f"`init` of optimizer {optimizer.name!r} the state of a row depends on other rows; compute the state "
                "of each row independently, or place the table in 'hbm'"
            )


def _is_equal_to_rows(part: Tensor, whole: Tensor, rows: Tensor) -> bool:
    """Whether `part` equals `whole[rows]` in dtype, shape and bits. `whole` must have five rows."""
    if whole.shape[:1] != (5,) or part.dtype != whole.dtype or part.shape != whole[rows].shape:
        return False
    return torch.equal(part.contiguous().view(torch.uint8), whole[rows].view(torch.uint8))


def meta_values(spec: TableSpec, shard: Shard, optimizer: RowOptimizer) -> dict[str, Tensor]:
    """Return meta tensors with the dtype and shape of each value for all rows of a shard, by name."""
    weight = torch.empty(1, shard.num_columns, dtype=getattr(torch, spec.dtype))
    one_row = {ROW: weight, **optimizer.init(weight)}
    return {
        name: torch.empty((shard.num_rows, *value.shape[1:]), dtype=value.dtype, device="meta")
        for name, value in one_row.items()
    }


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


def fetch_rows(
    shards: Sequence[TableStorage], looked_up: Sequence[tuple[int, Tensor]], *, read_only: bool = False
) -> RowFetch:
    """Start to fetch the rows in `looked_up`, pairs (index into `shards`, rows) of offloaded shards.

    With `read_only`, the rows are not updated and evict no other rows. Raises CacheCapacityError if the rows do not
    fit, and MesetaError if evicted rows cannot be written.
    """
    places = {index: place for place, index in enumerate(dict.fromkeys(index for index, _ in looked_up))}
    tiered = [shard for shard in map(shards.__getitem__, places) if isinstance(shard, TieredShard)]
    return RowFetch(tiered, [(places[index], rows) for index, rows in looked_up], read_only=read_only)
