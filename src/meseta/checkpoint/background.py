"""Saving while training goes on: it waits only until its tables and dense tensors are copied."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from meseta.checkpoint.failures import run_on_all_ranks
from meseta.checkpoint.saving import save
from meseta.checkpoint.store.store import CheckpointStore
from meseta.comm import World
from meseta.machine.kernel import lower_priority
from meseta.machine.remote import Location
from meseta.ops.row_marks.row_set import RowSet
from meseta.storage import SelectedRows, TableStorage


class BackgroundSaver:
    """Saves of one run, one at a time, each from a copy; every rank has one and calls it alike.

    The copies take as much memory as what is saved of this rank's tables and states, and are kept for the next save.
    Blocks travel between ranks over connections of their own.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._save_world: World | None = None
        self._copies: Sequence[TableStorage | SelectedRows] = ()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the last save met an error here, which `wait` raises."""
        return self._error is not None

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
        """Copy `shards`, or of each these `rows`, and `dense`, then call `save` with them and what else it takes (step,
        plan, state), and `on_saved` with the ranks that saved, in a thread. Collective; waits for the save before, and
        raises what that one met.
        """
        self.wait()
        if self._save_world is None:
            self._save_world = self._world.new_background_world()
        self._copies = run_on_all_ranks(self._world, lambda: copy_shards(shards, rows, self._copies))
        frozen = {name: tensor.detach().to("cpu", copy=True) for name, tensor in dense.items()}
        apart = self._save_world

        def run() -> None:
            lower_priority()
            try:
                save(parent, world=apart, shards=self._copies, dense=frozen, **known)
                on_saved(apart)
            except Exception as error:
                self._error = error
            finally:
                for copy in self._copies:
                    copy.close()

        self._thread = threading.Thread(target=run, name="meseta-save", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until no save is on its way; raises, on all ranks, what the last one met. Collective."""
        self.join()
        error, self._error = self._error, None
        self._world.raise_on_all_ranks(error)

    def join(self) -> None:
        """Until this rank's part of the save is over; raises nothing, and is not collective."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def copy_shards(
    shards: Sequence[TableStorage],
    rows: Sequence[RowSet] | None,
    former: Sequence[TableStorage | SelectedRows] = (),
) -> list[TableStorage | SelectedRows]:
    """Pieces, or some rows of each, which training does not change, in the memory of `former` ones where it fits."""
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
    """Some rows of each piece, to be read while nothing changes them; `held` ends the reading."""
    pieces: list[TableStorage | SelectedRows] = []
    for piece, of_piece in zip(shards, rows, strict=True):
        pieces.append(piece.select_in_place(of_piece))
        held.callback(pieces[-1].close)
    return pieces
