"""A shard most of whose rows lie far: those that batches under way need, and as many more as there is room for, lie
near, where operators read and step them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from meseta.jagged.shapes import Int
from meseta.ops.memory import empty
from meseta.ops.random_rows import initial_rows, initial_rows_at, table_key
from meseta.ops.row_cache import BackingStoreError, CacheFullError, PinnedRows, RowCache
from meseta.ops.row_file import RowFileSnapshot
from meseta.ops.row_marks import RowMarks
from meseta.ops.row_marks.row_set import RowSet
from meseta.ops.row_program.optimizer import RowOptimizer
from meseta.ops.row_update import TableRows
from meseta.spec import MesetaError, Shard, TableSpec
from meseta.spec.tiers import CACHE_SLOT_OVERHEAD_BYTES, DISK, row_index_bytes
from meseta.storage.backing_store import BackingStore, BackingStoreSnapshot
from meseta.storage.records import RecordLayout
from meseta.storage.selection import CopiedRows, LazyRows, SelectedRows, allocate_buffers
from meseta.storage.snapshot_reader import SnapshotReader
from meseta.storage.table import ROW, TableStorage, as_stored, from_stored
from meseta.telemetry.row_traffic import RowTraffic

MAX_READ_ONLY_ROWS = 1 << 22
"""Rows that an evaluation may read beside those that lie near; their memory is taken when they are read. On a GPU it is
taken at once, for as many as lie near."""
TRANSFER_CHUNK_ROWS = 1 << 14
"""Rows that go to the far side at once."""


class CacheCapacityError(MesetaError):
    """A batch looks up more rows than may lie near beside those that others need."""


class PendingFetch(ABC):
    """Rows on their way to tiered shards."""

    @abstractmethod
    def wait(self) -> None:
        """Until all rows are in their slots. Raises MesetaError, each time, where they cannot be had."""


class _OffloadedShard(TableStorage):
    """What a tiered shard and a frozen one share: rows that are read from a far side, or made where it has none."""

    def __init__(self, spec: TableSpec, shard: Shard, optimizer: RowOptimizer, seed: int, like: dict[str, Tensor]):
        self.spec, self.shard, self.optimizer, self.seed = spec, shard, optimizer, seed
        self._like = like
        self._layout = RecordLayout(like)

    @property
    def values(self) -> Mapping[str, Tensor]:
        return self._like

    def _decode_range(self, records: Sequence[Tensor], is_present: Tensor, first: int, stop: int) -> dict[str, Tensor]:
        """Rows first..stop-1 of such records; those that are not there are made, in their place."""
        start, columns = self.shard.rows[0], self.shard.columns
        if not is_present.any():
            weight = initial_rows(
                self.spec, rows=(start + first, start + stop), columns=columns, seed=self.seed, device="cpu"
            )
            return {ROW: weight, **self.optimizer.init(weight)}
        return self._decode(records, is_present, torch.arange(first, stop))

    def _decode(self, records: Sequence[Tensor], is_present: Tensor, rows: Tensor) -> dict[str, Tensor]:
        """The same of any rows."""
        absent = torch.nonzero(~is_present).squeeze(1)
        values = self._layout.from_bytes(records)
        for places in (
            absent.split(TRANSFER_CHUNK_ROWS) if absent.numel() else ()
        ):  # few at a time, to need little memory
            for name, value in self._initial_values(rows[places]).items():
                values[name][places] = value
        return values

    def _initial_values(self, rows: Tensor) -> dict[str, Tensor]:
        """Some rows with their states, as they begin."""
        weight = initial_rows_at(self.spec, rows + self.shard.rows[0], columns=self.shard.columns, seed=self.seed)
        return {ROW: weight, **self.optimizer.init(weight)}


class TieredShard(_OffloadedShard):
    """One placed piece of a table whose rows lie far, and near in slots while they are needed.

                 slot 0   slot 1   slot 2  ...      near: rows and states, on the device of the rank
        rows       7        2      (none)
                   ^        ^
                   |        |       pushed out when the slot is needed; a row that was changed is written
        far      row 0    row 1    row 2    ...     far: a record each, where it was ever written

    No number depends on where a row lies: one that was never written is what a resident table begins with.
    """

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
        """`far` holds no row of it yet; `num_slots` rows lie near at most. Raises MesetaError for an optimizer whose
        state is not made row by row, or that steps all rows."""
        check_row_init(spec, optimizer)
        like = meta_values(spec, shard, optimizer)
        super().__init__(spec, shard, optimizer, seed, like)
        self.backing_store = far
        is_cpu = torch.device(device).type == "cpu"  # where memory is taken as it is written to
        num_to_read = min(MAX_READ_ONLY_ROWS if is_cpu else num_slots, shard.num_rows)

        def near(value: Tensor) -> Tensor:
            return empty((num_slots + num_to_read, *value.shape[1:]), value.dtype, device, keep=False)

        with torch.inference_mode(False):  # Tensors made in inference mode could never be trained.
            self._cached_values = {name: near(value) for name, value in like.items()}
        values = list(self._cached_values.values()) if is_cpu else []
        self.cache = RowCache(num_slots, num_to_read, shard.num_rows, far.handle, values)
        self.pending_fetches: list[PendingFetch] = []
        """Who brings rows."""
        self.wait_s = 0.0
        """Seconds that batches have waited for rows."""
        with torch.inference_mode(False):
            self.marks = RowMarks(shard.num_rows, device)
        state = dict(self._cached_values)
        self._table_rows = TableRows(
            weight=state.pop(ROW),
            state=state,
            key=table_key(seed, f"{spec.name}/rounding"),
            first_row=shard.rows[0],
            first_column=shard.columns[0],
            row_ids=self.cache.rows.to(device),  # the same tensor on a CPU
            marks=self.marks.words,
        )

    @property
    def device(self) -> torch.device:
        return self._table_rows.weight.device

    def acquire(self) -> TableRows:
        return self._table_rows

    def release(self) -> None:
        """Rows are the table's where they lie."""

    @property
    def traffic(self) -> RowTraffic:
        """Of this piece, so far."""
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
        """Wait for all rows that are on their way."""
        for arrival in tuple(self.pending_fetches):
            arrival.wait()

    def start_fetch(self, pinned: PinnedRows, index: int, arrival: PendingFetch) -> None:
        """Rows of `arrival`, in whose pin this shard has that index, are on their way; on a GPU, those that make room
        go."""
        self.pending_fetches.append(arrival)
        if self.device.type != "cpu":
            moved = pinned.moves(index)
            self._write_back_slots(moved.evicted_rows, moved.evicted_slots)
            assert self._table_rows.row_ids is not None
            self._table_rows.row_ids[moved.fetched_slots.to(self.device)] = moved.fetched_rows.to(self.device)

    def finish_fetch(self, pinned: PinnedRows, index: int) -> None:
        """They have come; on a GPU, put them into their slots."""
        if self.device.type != "cpu":
            moved = pinned.moves(index)
            self._fill_slots(
                moved.fetched_slots[moved.is_written], self._layout.from_bytes([moved.records[moved.is_written]])
            )
            self.initialize_rows(moved.fetched_rows[~moved.is_written], moved.fetched_slots[~moved.is_written])

    def initialize_rows(self, rows: Int[Tensor, " n"], slots: Int[Tensor, " n"]) -> None:
        """Begin rows that were never written, in their slots."""
        if rows.numel():
            self._fill_slots(slots, self._initial_values(rows))

    def cache_bytes(self, num_rows: int) -> int:
        """Of memory that so many near rows take, with what is known of all rows."""
        row_bytes = self._layout.num_bytes + CACHE_SLOT_OVERHEAD_BYTES
        return min(num_rows, self.shard.num_rows) * row_bytes + row_index_bytes(self.shard.tier, self.shard.num_rows)

    def capacity_message(self, refused: CacheFullError, least_bytes: int) -> str:
        """What to say of a batch that looks up too many rows, where `least_bytes` would do for all shards."""
        num_slots = self.cache.num_slots
        others = (
            f", and batches under way need {refused.num_pinned_by_others:,} others"
            if refused.num_pinned_by_others > 0
            else ""
        )
        least = refused.num_rows + max(refused.num_pinned_by_others, 0)
        return (
            f"{self.shard.label}: a batch looks up {refused.num_rows:,} distinct rows{others}, but {num_slots:,} rows "
            f"lie near; give the table cache_rows {least:,} in the plan, or all tables of this rank "
            f"storage.cache_bytes {least_bytes:,}, or make batches smaller"
        )

    def backing_store_error(self, failed: BackingStoreError) -> MesetaError:
        """What to say of a far side that has failed."""
        return self.backing_store.explain(failed.failure)

    def _write_back_slots(self, rows: Tensor, slots: Tensor) -> None:
        """Rows in some slots go to the far side."""
        for some, of_slots in zip(rows.split(TRANSFER_CHUNK_ROWS), slots.split(TRANSFER_CHUNK_ROWS), strict=True):
            where = of_slots.to(self.device)
            values = {
                name: as_stored(value.detach()[where]).cpu().numpy() for name, value in self._cached_values.items()
            }
            self.backing_store.write(some, *self._layout.to_bytes(values))

    def _write_back_dirty(self) -> None:
        """All rows that the far side has older go there."""
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
        """Values into some slots."""
        where = slots.to(self.device)
        with torch.no_grad():
            for name, value in values.items():
                self._cached_values[name].index_copy_(0, where, value.to(self.device))

    def read(self, first: int, stop: int) -> dict[str, Tensor]:
        """Copies."""
        values = {name: empty((stop - first, *like.shape[1:]), like.dtype) for name, like in self._like.items()}
        self._read_into(values, [torch.arange(first, stop)])
        return values

    def _read_into(self, buffers: Mapping[str, Tensor], parts: Iterable[Tensor]) -> None:
        """Copy rows to the beginning of buffers, few at a time, to need little memory."""
        end = 0
        for part in (few for many in parts for few in many.split(TRANSFER_CHUNK_ROWS)):
            begin, end = end, end + len(part)
            for name, value in self._gather(part).items():
                buffers[name][begin:end] = value

    def _gather(self, rows: Tensor) -> dict[str, Tensor]:
        """Copies of any rows."""
        self._wait_for_fetches()
        records = torch.empty(len(rows), self._layout.num_bytes, dtype=torch.uint8)
        values = self._decode([records], self.backing_store.read(rows, records).wait(), rows)
        slots = self.cache.find(rows)
        here = torch.nonzero(slots >= 0).squeeze(1)
        where = slots[here].to(self.device)
        for name, value in values.items():
            value[here] = self._cached_values[name].detach()[where].cpu()
        return values

    def write(self, first: int, values: Mapping[str, NDArray[Any]]) -> None:
        self._wait_for_fetches()
        num_rows = len(next(iter(values.values())))
        self.marks.add_range(first, first + num_rows)
        for start in range(0, num_rows, TRANSFER_CHUNK_ROWS):
            stop = min(start + TRANSFER_CHUNK_ROWS, num_rows)
            part = {name: source[start:stop] for name, source in values.items()}
            if set(part) != set(self._like):
                there = self.read(first + start, first + stop)
                part = {name: as_stored(value).numpy() for name, value in there.items()} | part
            rows = torch.arange(first + start, first + stop)
            self.backing_store.write(rows, *self._layout.to_bytes(part))
            slots = self.cache.find(rows)
            here = torch.nonzero(slots >= 0).squeeze(1)
            near = {name: from_stored(value[here.numpy()], self._like[name].dtype) for name, value in part.items()}
            self._fill_slots(slots[here], near)

    def snapshot(self, reuse: TableStorage | None = None) -> TableStorage:
        """What lies near is written to the far side first; no copy of the table is made where that is a disk."""
        return self._snapshot_rows(None)

    def _snapshot_rows(self, selected: RowSet | None) -> ShardSnapshot:
        """Freeze all rows, or, of a disk, the selected ones."""
        self._wait_for_fetches()
        self._write_back_dirty()
        rows = self.backing_store.snapshot()
        far = SnapshotReader(rows, self._layout.widths, selected) if isinstance(rows, RowFileSnapshot) else rows
        known: dict[str, Any] = {"seed": self.seed, "like": self._like, "selected": selected}
        return ShardSnapshot(self.spec, self.shard, self.optimizer, far, **known)

    def gather(self, rows: Int[Tensor, " n"]) -> dict[str, Tensor]:
        return self._gather(rows)

    def select(self, rows: RowSet, reuse: SelectedRows | None = None) -> SelectedRows:
        """Rows of a disk are read block by block when the selection is, after what lies near was written there; others
        are copied."""
        if self.shard.tier == DISK:
            return self.select_in_place(rows)
        buffers = allocate_buffers(self._like, len(rows), reuse)
        self._read_into(buffers, rows.parts())
        return CopiedRows(self.spec, self.shard, self._like, rows, buffers=buffers)

    def select_in_place(self, rows: RowSet) -> SelectedRows:
        if self.shard.tier != DISK:
            return super().select_in_place(rows)
        frozen = self._snapshot_rows(rows)
        of = self.spec, self.shard, self._like, rows
        return LazyRows(*of, read=frozen.read, close=frozen.close)

    def sequential_view(self) -> TableStorage:
        return self.snapshot() if self.shard.tier == DISK else self


class ShardSnapshot(_OffloadedShard):
    """A tiered shard as it was; to be read alone."""

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
        """Not to be written to; of a shard that was frozen for some rows, these of first..stop-1."""
        records, is_present = self._snapshot.read(first, stop)
        if self._selected is not None:
            return self._decode(records, is_present, self._selected.rows(first, stop))
        return self._decode_range(records, is_present, first, stop)

    def gather(self, rows: Int[Tensor, " n"]) -> dict[str, Tensor]:
        raise MesetaError(f"table {self.spec.name!r}: a copy for a save is read from the first row to the last")

    def close(self) -> None:
        self._snapshot.close()

    def acquire(self) -> TableRows:
        raise MesetaError(f"table {self.spec.name!r}: a copy for a save lends no rows")

    def release(self) -> None:
        """None were lent."""

    def write(self, first: int, values: Mapping[str, NDArray[Any]]) -> None:
        raise MesetaError(f"table {self.spec.name!r}: a copy for a save is not written to")

    def snapshot(self, reuse: TableStorage | None = None) -> TableStorage:
        """It is frozen."""
        return self


def check_row_init(spec: TableSpec, optimizer: RowOptimizer) -> None:
    """Raise MesetaError where the state of a row that is made alone is not what it is among others."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, spec.embedding_dim, generator=generator).to(getattr(torch, spec.dtype))
    whole = optimizer.init(weight)
    for some in (torch.tensor([3, 1]), torch.tensor([2])):
        parts = optimizer.init(weight[some])
        if whole.keys() != parts.keys() or not all(_is_equal_to_rows(parts[name], whole[name], some) for name in whole):
            raise MesetaError(
                f"table {spec.name!r}: rows that lie far are made when they are first looked up, and `init` of "
                f"optimizer {optimizer.name!r} gives a row another state alone than among others; make its state of "
                "each row by itself, or place the table in 'hbm'"
            )


def _is_equal_to_rows(part: Tensor, whole: Tensor, rows: Tensor) -> bool:
    """Whether `part` has the type, the shape and the bits of these of the five rows of `whole`."""
    if whole.shape[:1] != (5,) or part.dtype != whole.dtype or part.shape != whole[rows].shape:
        return False
    return torch.equal(part.contiguous().view(torch.uint8), whole[rows].view(torch.uint8))


def meta_values(spec: TableSpec, shard: Shard, optimizer: RowOptimizer) -> dict[str, Tensor]:
    """By name a tensor of the type and shape that the values of all rows have, without memory."""
    weight = torch.empty(1, shard.num_columns, dtype=getattr(torch, spec.dtype))
    one = {ROW: weight, **optimizer.init(weight)}
    return {
        name: torch.empty((shard.num_rows, *value.shape[1:]), dtype=value.dtype, device="meta")
        for name, value in one.items()
    }
