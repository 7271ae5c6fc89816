"""Which rows of this rank's tables the next save holds: marks are taken as it begins, and given back where it fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from meseta.checkpoint.failures import check_files
from meseta.checkpoint.manifest import file_entries
from meseta.checkpoint.policy import DeltaBase, DeltaPolicy, choose_base, is_cumulative
from meseta.checkpoint.store.names import checkpoint_path
from meseta.comm import World
from meseta.config.row_bits import RowBits
from meseta.machine.remote import Location
from meseta.ops.row_marks import Consumer
from meseta.ops.row_marks.row_set import RowSet
from meseta.spec import MesetaError
from meseta.storage import TableStorage


class DeltaTracker:
    """Of the saves of one run; every rank has one and calls it alike."""

    def __init__(self, folder: Location, world: World, policy: Literal["none"] | DeltaPolicy, max_chain: int) -> None:
        self._folder, self._world, self._max_chain = folder, world, max_chain
        self._policy = None if policy == "none" else policy
        self._cleared_marks: Sequence[RowSet] | None = None
        """Marks that the save under way has cleared, by shard."""

    def begin_save(
        self,
        step: int,
        shards: Sequence[TableStorage],
        bits: Mapping[str, RowBits] | None = None,
        *,
        full: bool = False,
    ) -> tuple[DeltaBase | None, Sequence[RowSet] | None]:
        """What a save in `bits` after that of `step` (0: there is none) stands on, and the rows of each shard that it
        holds, with those that `DeltaBase` asks for; None and None for a whole one, as one that must be. Collective."""
        self._cleared_marks = None
        if self._policy is None:
            return None, None
        base = None if full else self._choose_base(self._policy, step, shards, bits or {})
        changed = [piece.marks.marked_set(Consumer.CHECKPOINTS) for piece in shards]
        if base is None or not is_cumulative(self._policy):
            self._cleared_marks = changed
            for piece in shards:
                piece.marks.clear(Consumer.CHECKPOINTS)
        if base is None:
            return None, None
        return base, [self._select_rows(base, piece, rows) for piece, rows in zip(shards, changed, strict=True)]

    def restore_marks(self, shards: Sequence[TableStorage]) -> None:
        """The save has failed: the next one holds its rows too."""
        for piece, rows in zip(shards, self._cleared_marks or (), strict=False):
            piece.marks.add_set(rows, Consumer.CHECKPOINTS)
        self._cleared_marks = None

    def full_tables_note(self, shards: Sequence[TableStorage]) -> str | None:
        """What is to be said of tables all rows of which are saved each time, if there are any. Collective."""
        if self._policy is None:
            return None
        here = sorted({piece.spec.name for piece in shards if steps_all_rows(piece)})
        names = sorted({name for part in self._world.all_gather_object(here) for name in part})
        if not names:
            return None
        more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
        return (
            f"checkpoint.deltas {self._policy!r}: table {names[0]!r}{more} steps all rows in each step (stepped_rows "
            "'all'), and is saved whole"
        )

    def _choose_base(
        self, policy: DeltaPolicy, step: int, shards: Sequence[TableStorage], bits: Mapping[str, RowBits]
    ) -> DeltaBase | None:
        """What rank 0 decides; others are told what they need of it."""
        base = None
        if all(self._world.all_gather_object(all(map(steps_all_rows, shards)))):  # also of ranks that have none
            return None
        if self._world.rank == 0 and step > 0:
            path = checkpoint_path(self._folder, step)
            try:
                base = choose_base(path, policy, self._max_chain, bits)
                if base is not None:
                    check_files(path, file_entries(base.manifest))
            except MesetaError:
                base = None  # somebody has deleted or damaged it: nothing can stand on it
        told: DeltaBase | None = self._world.all_gather_object(base and base.for_other_ranks())[0]
        return base or told

    def _select_rows(self, base: DeltaBase, piece: TableStorage, changed: RowSet) -> RowSet:
        """Rows of a piece that a delta holds; those of replicas come from the first rank."""
        if piece.shard.ranks[0] != self._world.rank:
            return RowSet(piece.shard.num_rows)
        if steps_all_rows(piece):
            changed = RowSet.all(piece.shard.num_rows)
        return base.select_rows(piece.shard, changed)


def steps_all_rows(piece: TableStorage) -> bool:
    """Whether a step changes rows that no batch has looked up."""
    return piece.spec.optimizer.stepped_rows == "all"
