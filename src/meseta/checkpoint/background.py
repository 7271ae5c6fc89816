"""Saves that run in a thread. Training waits only until tables and dense tensors are copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from meseta.checkpoint.failures import run_on_all_ranks
from meseta.checkpoint.saving import save
from meseta.checkpoint.store.store import CheckpointStore
from meseta.comm import World
from meseta.ops.row_marks.row_set import RowSet
from meseta.storage import SelectedRows, TableStorage
from meseta.system.background import BackgroundJobs
from meseta.system.kernel import lower_priority
from meseta.system.remote import Location


class BackgroundSaver:
    """Saves copies of the tables of one run in the background, one save at a time.

    Each rank has one, and all ranks make the same calls. The copies take as much memory as the saved rows and states of
    this rank, and are reused by the next save. Blocks are exchanged in process groups separate from those of training.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._save_world: World | None = None
        self._copies: Sequence[TableStorage | SelectedRows] = ()
        self._jobs = BackgroundJobs("meseta-save")

    @property
    def has_failed(self) -> bool:
        """Whether the last save failed on this rank. `wait` raises its error."""
        return self._jobs.has_failed

    def start(
        self,
        parent: Location | str | CheckpointStore,
        *,
        shards: Sequence[TableStorage],
        dense: Mapping[str, Tensor],
        rows: Sequence[RowSet] | None = None,
        on_saved: Callable[[World], object],
        **known: Any,
    ) -> None:
        """Copy the tables, then save the copies in a thread.

        Collective. Waits for the previous save first, and raises its error.

        Args:
            parent: Folder or store of the checkpoints, as for `save`.
            shards: Shards of this rank.
            dense: Tensors of the dense part.
            rows: Rows to save, for each shard. `None` saves all rows.
            on_saved: Called after the save, with the `World` of the thread.
            known: Further arguments of `save`, such as `step`, `plan` and `state`.
        """
        self.wait()
        if self._save_world is None:
            self._save_world = self._world.new_background_world()
        self._copies = run_on_all_ranks(self._world, lambda: copy_shards(shards, rows, self._copies))
        frozen = {name: tensor.detach().to("cpu", copy=True) for name, tensor in dense.items()}
        # A separate world keeps the collectives of the thread apart from those of training.
        apart = self._save_world

        def run() -> None:
            lower_priority()
            try:
                save(parent, world=apart, shards=self._copies, dense=frozen, **known)
                on_saved(apart)
            finally:
                for copy in self._copies:
                    copy.close()

        self._jobs.submit(run)

    def wait(self) -> None:
        """Wait until no save is in progress. Collective. Raises the error of the last save, on all ranks."""
        self.join()
        self._world.raise_on_all_ranks(self._jobs.pop_error())

    def join(self) -> None:
        """Wait until this rank has finished its part of the save. Raises no error of it. Not collective."""
        self._jobs.join()


def copy_shards(
    shards: Sequence[TableStorage],
    rows: Sequence[RowSet] | None,
    former: Sequence[TableStorage | SelectedRows] = (),
) -> list[TableStorage | SelectedRows]:
    """Copy the shards, or the given rows of each, so that training can change the originals. Reuses the memory of
    `former` copies if it fits."""
    copies: list[TableStorage | SelectedRows] = []
    try:
        for number, piece in enumerate(shards):
            reuse = former[number] if former else None
            if rows is None:
                copies.append(piece.snapshot(reuse=reuse if isinstance(reuse, TableStorage) else None))
            else:
                copies.append(piece.select(rows[number], reuse=reuse if isinstance(reuse, SelectedRows) else None))
    except Exception:
        for copy in copies:
            copy.close()
        raise
    return copies


def select_in_place(
    shards: Sequence[TableStorage], rows: Sequence[RowSet], held: ExitStack
) -> list[TableStorage | SelectedRows]:
    """Select rows of each shard without copying them. The rows must not change until `held` closes the selections."""
    pieces: list[TableStorage | SelectedRows] = []
    for piece, of_piece in zip(shards, rows, strict=True):
        pieces.append(piece.select_in_place(of_piece))
        held.callback(pieces[-1].close)
    return pieces
