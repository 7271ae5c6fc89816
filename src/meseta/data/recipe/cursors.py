"""Open raw files, taken by who reads rows of them and given back, so that reading on costs no opening."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from meseta.data.formats.format import Block, RowCursor, Source
from meseta.data.recipe.index import RowRange
from meseta.data.recipe.recipe import REMAKE_REMEDY
from meseta.errors import MesetaError, reading_error
from meseta.machine.remote import file_status

MAX_IDLE_CURSORS = 32
"""Files that are held open while nobody reads them."""
MAX_IDLE_CURSORS_PER_FILE = 4
"""Of one file: where it cannot be entered, readers that come a little out of order each go on from where one stands."""


class CursorPool:
    """The raw files of a recipe. Threads may share them."""

    def __init__(self, sources: Sequence[Source], columns: Sequence[str]) -> None:
        """`columns`: those that are read of a file that can be read by columns."""
        self._sources, self._columns = sources, columns
        self._idle: list[tuple[int, RowCursor]] = []
        """The number of its source with each, those that were used last at the end."""
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._idle)

    def read(self, stretch: RowRange) -> Block:
        """The rows of a stretch. Raises MesetaError for a file that is damaged, or another than it was."""
        source = self._sources[stretch.source]
        try:
            with self._acquired(stretch) as cursor:
                block = cursor.read(stretch.start, stretch.stop)
        except MesetaError:
            check_unchanged(source)
            raise
        check_unchanged(source)  # what changed before has not been read unseen
        return block

    @contextmanager
    def _acquired(self, stretch: RowRange) -> Iterator[RowCursor]:
        cursor = self._acquire(stretch)
        try:
            yield cursor
        except BaseException:
            cursor.close()
            raise
        with self._lock:
            self._idle.append((stretch.source, cursor))
            spare = self._idle.pop(0)[1] if len(self._idle) > MAX_IDLE_CURSORS else None
        if spare is not None:
            spare.close()

    def _acquire(self, stretch: RowRange) -> RowCursor:
        """The one nearest before the stretch, else a new one, unless there are enough of this file."""
        with self._lock:
            idle = [entry for entry in self._idle if entry[0] == stretch.source]
            before = [entry for entry in idle if entry[1].row <= stretch.start.row]
            if before or len(idle) >= MAX_IDLE_CURSORS_PER_FILE:
                entry = max(before or idle, key=lambda entry: entry[1].row)
                self._idle.remove(entry)
                return entry[1]
        source = self._sources[stretch.source]
        return source.format.cursor(source, self._columns)


def _close_all(idle: list[tuple[int, RowCursor]]) -> None:
    for _, cursor in idle:
        cursor.close()


def check_unchanged(source: Source) -> None:
    """Raise MesetaError where a raw file is not the one that it was, StorageError where it cannot be seen."""
    where, way_out = f"source {source.path!r}", f"bring it back, or {REMAKE_REMEDY}"
    try:
        now = file_status(source.path)
    except OSError as error:
        text = f"{where} cannot be read any more ({error.strerror}): {way_out}"
        raise reading_error(error, text) from None
    if (now.size_bytes or 1, now.change_stamp) != (source.size_bytes, source.changed):
        raise MesetaError(f"{where} has changed since the recipe was made: {way_out}")
