"""Choice of the rows that the next save writes. A save clears their change marks, and restores them if it fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from meseta.checkpoint.failures import check_files
from meseta.checkpoint.manifest import file_entries
from meseta.checkpoint.policy import DeltaBase, DeltaPolicy, choose_base, is_cumulative
from meseta.checkpoint.store.names import checkpoint_path
from meseta.comm import World
from meseta.config.row_bits import RowBits
from meseta.ops.row_marks import Consumer
from meseta.ops.row_marks.row_set import RowSet
from meseta.spec import MesetaError
from meseta.storage import TableStorage
from meseta.system.remote import Location


class DeltaTracker:
    """Selects the rows of each save of one run. Each rank has one, and all ranks make the same calls."""

    def __init__(self, folder: Location, world: World, policy: Literal["none"] | DeltaPolicy, max_chain: int) -> None:
        self._folder, self._world, self._max_chain = folder, world, max_chain
        self._policy = None if policy == "none" else policy
        # Changed rows whose marks the current save has cleared, for each shard. `None` if it has cleared none.
        self._cleared_marks: Sequence[RowSet] | None = None

    def begin_save(
        self,
        step: int,
        shards: Sequence[TableStorage],
        bits: Mapping[str, RowBits] | None = None,
        *,
        full: bool = False,
    ) -> tuple[DeltaBase | None, Sequence[RowSet] | None]:
        """Return (base, rows) for the next save. Collective.

        `rows` has the rows to save of each shard: changed rows, and the blocks that the base requires in full. Both are
        `None` for a full checkpoint. Change marks that this save makes obsolete are cleared.

        Args:
            step: Step of the previous checkpoint, or 0 if there is none.
            shards: Shards of this rank.
            bits: Number of bits per value of quantized rows, by table.
            full: Whether the checkpoint must be full.
        """
        self._cleared_marks = None
        if self._policy is None:
            return None, None
        base = None if full else self._choose_base(self._policy, step, shards, bits or {})
        changed = [piece.marks.marked_set(Consumer.CHECKPOINTS) for piece in shards]
        # Cumulative deltas write all rows changed since the last full checkpoint, so their marks are kept.
        if base is None or not is_cumulative(self._policy):
            self._cleared_marks = changed
            for piece in shards:
                piece.marks.clear(Consumer.CHECKPOINTS)
        if base is None:
            return None, None
        return base, [self._select_rows(base, piece, rows) for piece, rows in zip(shards, changed, strict=True)]

    def restore_marks(self, shards: Sequence[TableStorage]) -> None:
        """Mark the rows of a failed save as changed again, so that the next save includes them."""
        for piece, rows in zip(shards, self._cleared_marks or (), strict=False):
            piece.marks.add_set(rows, Consumer.CHECKPOINTS)
        self._cleared_marks = None

    def full_tables_note(self, shards: Sequence[TableStorage]) -> str | None:
        """Return a note about tables of which every save writes all rows, or `None` if there are none. Collective."""
        if self._policy is None:
            return None
        here = sorted({piece.spec.name for piece in shards if steps_all_rows(piece)})
        names = sorted({name for part in self._world.all_gather_object(here) for name in part})
        if not names:
            return None
        more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
        return (
            f"checkpoint.deltas {self._policy!r}: each step changes all rows of table {names[0]!r}{more} "
            "(stepped_rows 'all'), so each delta has all of them"
        )

    def _choose_base(
        self, policy: DeltaPolicy, step: int, shards: Sequence[TableStorage], bits: Mapping[str, RowBits]
    ) -> DeltaBase | None:
        base = None
        # Ranks without shards also take part, because the gather is collective.
        if all(self._world.all_gather_object(all(map(steps_all_rows, shards)))):
            return None
        if self._world.rank == 0 and step > 0:
            path = checkpoint_path(self._folder, step)
            try:
                base = choose_base(path, policy, self._max_chain, bits)
                if base is not None:
                    check_files(path, file_entries(base.manifest))
            except MesetaError:
                base = None  # The checkpoint was deleted or damaged, so a full one has to follow.
        # Other ranks receive only the parts of the base that they need.
        received: DeltaBase | None = self._world.all_gather_object(base and base.for_other_ranks())[0]
        return base or received

    def _select_rows(self, base: DeltaBase, piece: TableStorage, changed: RowSet) -> RowSet:
        # Of replicas, only the first rank writes rows.
        if piece.shard.ranks[0] != self._world.rank:
            return RowSet(piece.shard.num_rows)
        if steps_all_rows(piece):
            changed = RowSet.all(piece.shard.num_rows)
        return base.select_rows(piece.shard, changed)


def steps_all_rows(piece: TableStorage) -> bool:
    """Whether each training step changes all rows of a shard, including rows that no batch looked up."""
    return piece.spec.optimizer.stepped_rows == "all"
