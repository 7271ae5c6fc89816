"""A shard most of whose rows lie far: those that batches under way need, and as many more as there is room for, lie
near, where operators read and step them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from meseta.jagged.shapes import Int
from meseta.ops.memory import empty
from meseta.ops.random_rows import initial_rows, initial_rows_of, table_key
from meseta.ops.row_program.optimizer import RowOptimizer
from meseta.ops.row_update import TableRows
from meseta.spec import MesetaError, Shard, TableSpec
from meseta.storage.far import FarRows, FarSnapshot, ReadAhead
from meseta.storage.near_slots import EMPTY, NearSlots, Pinned
from meseta.storage.records import RecordLayout
from meseta.storage.table import ROW, TableStorage, from_stored

MAX_TO_READ = 1 << 22
"""Rows that an evaluation may read beside those that lie near; their memory is taken when they are read. On a GPU it is
taken at once, for as many as lie near."""
MOVED_ROWS = 1 << 16
"""Rows that go to the far side at once."""


class _FarShard(TableStorage):
    """What a tiered shard and a frozen one share: rows that are read from a far side, or made where it has none."""

    def __init__(self, spec: TableSpec, shard: Shard, optimizer: RowOptimizer, seed: int, like: dict[str, Tensor]):
        self.spec, self.shard, self.optimizer, self.seed = spec, shard, optimizer, seed
        self._like = like
        self._layout = RecordLayout(like)

    @property
    def values(self) -> Mapping[str, Tensor]:
        return self._like

    def _read_range(self, read: Callable[[Tensor], ReadAhead], first: int, stop: int) -> dict[str, Tensor]:
        """Rows first..stop-1, whose records `read` begins to read."""
        records = torch.empty(stop - first, self._layout.num_bytes, dtype=torch.uint8)
        is_present = read(records).wait()
        values = self._layout.unpack(records)
        if not bool(is_present.all()):
            start = self.shard.rows[0]
            weight = initial_rows(
                self.spec, rows=(start + first, start + stop), columns=self.shard.columns, seed=self.seed, device="cpu"
            )
            absent = torch.nonzero(~is_present).squeeze(1)
            self._begin_rows(values, absent, weight[absent])
        return values

    def _begin_rows(self, values: dict[str, Tensor], places: Tensor, weight: Tensor) -> None:
        """Put new rows, with their states, at some places."""
        for name, value in {ROW: weight, **self.optimizer.init(weight)}.items():
            values[name][places] = value


class TieredShard(_FarShard):
    """One placed piece of a table whose rows lie far, and near in slots while they are needed.

                 slot 0   slot 1   slot 2  ...      near: rows and states, on the device of the rank
        rows       7        2      (none)
                   ^        ^
                   |        |       pushed out when the slot is needed; a row that was changed is written
        far      row 0    row 1    row 2    ...     far: a record each, where it was ever written

    No number depends on where a row lies: one that was never written is what a resident table begins with.
    """

    lies_far = True

    def __init__(
        self,
        spec: TableSpec,
        shard: Shard,
        optimizer: RowOptimizer,
        far: FarRows,
        *,
        num_slots: int,
        seed: int,
        device: torch.device | str,
    ) -> None:
        """`far` holds no row of it yet; `num_slots` rows lie near at most. Raises MesetaError for an optimizer whose
        state is not made row by row, or that steps all rows."""
        check_init(spec, optimizer)
        like = values_like(spec, shard, optimizer)
        super().__init__(spec, shard, optimizer, seed, like)
        self.far = far
        is_cpu = torch.device(device).type == "cpu"  # where memory is taken as it is written to
        self._slots = NearSlots(num_slots, min(MAX_TO_READ if is_cpu else num_slots, shard.num_rows), shard.num_rows)
        self._under_way: list[Pinned] = []
        """Who brings rows."""
        count = len(self._slots.rows)

        def near(value: Tensor) -> Tensor:
            return empty((count, *value.shape[1:]), value.dtype, device, keep=False)

        with torch.inference_mode(False):  # Tensors made in inference mode could never be trained.
            self._near = {name: near(value) for name, value in like.items()}
        state = dict(self._near)
        self._rows = TableRows(
            weight=state.pop(ROW),
            state=state,
            key=table_key(seed, f"{spec.name}/rounding"),
            first_row=shard.rows[0],
            first_column=shard.columns[0],
            row_ids=self._slots.rows.to(device),  # the same tensor on a CPU
        )

    @property
    def device(self) -> torch.device:
        return self._rows.weight.device

    def near_rows(self) -> Int[Tensor, " n"]:
        """Those that lie near, ascending."""
        rows = self._slots.rows[: self._slots.num_slots]
        return rows[rows != EMPTY].sort().values

    def begin(self) -> TableRows:
        return self._rows

    def end(self) -> None:
        """Rows are the table's where they lie."""

    def pin(self, rows: Int[Tensor, " n"], *, to_read: bool) -> Pinned:
        pinned, places = self._slots.pin(rows.to("cpu", torch.int64))
        self._under_way = [other for other in self._under_way if other.finish is not None]
        pinned.after = tuple(self._under_way)
        try:
            if places.numel():
                self._bring(pinned, places, to_read=to_read)
        except BaseException:
            self._slots.unpin(pinned)
            raise
        if not to_read:
            self._slots.use(pinned)
        return pinned

    def unpin(self, pinned: Pinned) -> None:
        try:
            pinned.wait()  # who comes next takes what lies there
        finally:
            self._slots.unpin(pinned)

    def _settle(self) -> None:
        """Wait for all rows that are on their way."""
        for pinned in self._under_way:
            pinned.wait()

    def _bring(self, pinned: Pinned, places: Tensor, *, to_read: bool) -> None:
        """Begin to make rows near that lie far."""
        count, rows = places.numel(), pinned.rows[places]
        slots = self._slots.take_to_read(count) if to_read else self._slots.take(count)
        if slots is None:
            raise self._no_room(pinned, count)
        if not to_read:
            self._push_out(slots)
        records = empty((count, self._layout.num_bytes), torch.uint8)
        reading = self.far.read(rows, records)
        self._slots.give(pinned, places, slots)
        if self.device.type != "cpu":
            assert self._rows.row_ids is not None
            self._rows.row_ids[slots.to(self.device)] = rows.to(self.device)
        pinned.finish = partial(self._take_in, rows, slots, records, reading)
        self._under_way.append(pinned)

    def _take_in(self, rows: Tensor, slots: Tensor, records: Tensor, reading: ReadAhead) -> None:
        """Put rows that have come into their slots; those that were never written are made."""
        is_present, values = reading.wait(), self._layout.unpack(records)
        absent = torch.nonzero(~is_present).squeeze(1)
        if absent.numel():
            weight = initial_rows_of(
                self.spec, rows[absent] + self.shard.rows[0], columns=self.shard.columns, seed=self.seed
            )
            self._begin_rows(values, absent, weight)
        self._put(slots, values)

    def _no_room(self, pinned: Pinned, count: int) -> MesetaError:
        needed, under_way = len(pinned.rows), self._slots.num_slots - self._slots.num_free - (len(pinned.rows) - count)
        num_slots, row_bytes = self._slots.num_slots, self._layout.num_bytes
        others = f", and batches under way need {under_way:,} others" if under_way > 0 else ""
        least = needed + max(under_way, 0)
        return MesetaError(
            f"{self.shard.label}: a batch looks up {needed:,} distinct rows{others}, but {num_slots:,} rows lie "
            f"near; give the table {least * row_bytes:,} bytes of storage.near_bytes or near_rows {least:,} in the "
            "plan, or make batches smaller"
        )

    def _push_out(self, slots: Tensor) -> None:
        """Empty some slots; what was changed goes to the far side."""
        dirty = slots[self._slots.is_dirty[slots]]
        self._write_back(dirty)
        self._slots.leave(slots)

    def _write_back(self, slots: Tensor) -> None:
        for some in slots.split(MOVED_ROWS):
            where = some.to(self.device)
            values = {name: value.detach()[where] for name, value in self._near.items()}
            self.far.write(self._slots.rows[some], self._layout.pack(values))
        self._slots.clean(slots)

    def _put(self, slots: Tensor, values: Mapping[str, Tensor]) -> None:
        """Values into some slots."""
        where = slots.to(self.device)
        with torch.no_grad():
            for name, value in values.items():
                self._near[name].index_copy_(0, where, value.to(self.device))

    def read(self, first: int, stop: int) -> dict[str, Tensor]:
        """Copies."""
        self._settle()
        rows = torch.arange(first, stop)
        values = self._read_range(partial(self.far.read, rows), first, stop)
        slots = self._slots.find(rows)
        here = torch.nonzero(slots >= 0).squeeze(1)
        where = slots[here].to(self.device)
        for name, value in values.items():
            value[here] = self._near[name].detach()[where].cpu()
        return values

    def write(self, first: int, values: Mapping[str, NDArray[Any]]) -> None:
        self._settle()
        num_rows = len(next(iter(values.values())))
        for start in range(0, num_rows, MOVED_ROWS):
            stop = min(start + MOVED_ROWS, num_rows)
            part = {name: from_stored(source[start:stop], self._like[name].dtype) for name, source in values.items()}
            if set(part) != set(self._like):
                part = self.read(first + start, first + stop) | part
            rows = torch.arange(first + start, first + stop)
            self.far.write(rows, self._layout.pack(part))
            slots = self._slots.find(rows)
            here = torch.nonzero(slots >= 0).squeeze(1)
            self._put(slots[here], {name: value[here] for name, value in part.items()})

    def freeze(self, reuse: TableStorage | None = None) -> TableStorage:
        """What lies near is written to the far side first; no copy of the table is made where that is a disk."""
        self._settle()
        self._write_back(self._slots.dirty())
        return FrozenShard(self.spec, self.shard, self.optimizer, self.far.freeze(), seed=self.seed, like=self._like)


class FrozenShard(_FarShard):
    """A tiered shard as it was; to be read alone."""

    def __init__(
        self,
        spec: TableSpec,
        shard: Shard,
        optimizer: RowOptimizer,
        far: FarSnapshot,
        *,
        seed: int,
        like: dict[str, Tensor],
    ) -> None:
        super().__init__(spec, shard, optimizer, seed, like)
        self._far = far

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def read(self, first: int, stop: int) -> dict[str, Tensor]:
        """Copies."""
        return self._read_range(partial(self._far.read, first), first, stop)

    def end_reading(self) -> None:
        self._far.close()

    def begin(self) -> TableRows:
        raise MesetaError(f"table {self.spec.name!r}: a copy for a save lends no rows")

    def end(self) -> None:
        """None were lent."""

    def write(self, first: int, values: Mapping[str, NDArray[Any]]) -> None:
        raise MesetaError(f"table {self.spec.name!r}: a copy for a save is not written to")

    def freeze(self, reuse: TableStorage | None = None) -> TableStorage:
        """It is frozen."""
        return self


def check_init(spec: TableSpec, optimizer: RowOptimizer) -> None:
    """Raise MesetaError where the state of a row that is made alone is not what it is among others."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, spec.embedding_dim, generator=generator).to(getattr(torch, spec.dtype))
    whole, some = optimizer.init(weight), torch.tensor([3, 1])
    parts = optimizer.init(weight[some])
    if not (
        whole.keys() == parts.keys()
        and all(len(state) == 5 and torch.equal(state[some], parts[name]) for name, state in whole.items())
    ):
        raise MesetaError(
            f"table {spec.name!r}: rows that lie far are made when they are first looked up, and `init` of optimizer "
            f"{optimizer.name!r} gives a row another state alone than among others; make its state of each row by "
            "itself, or place the table in 'hbm'"
        )


def values_like(spec: TableSpec, shard: Shard, optimizer: RowOptimizer) -> dict[str, Tensor]:
    """By name a tensor of the type and shape that the values of all rows have, without memory."""
    weight = torch.empty(1, shard.num_columns, dtype=getattr(torch, spec.dtype))
    one = {ROW: weight, **optimizer.init(weight)}
    return {
        name: torch.empty((shard.num_rows, *value.shape[1:]), dtype=value.dtype, device="meta")
        for name, value in one.items()
    }
