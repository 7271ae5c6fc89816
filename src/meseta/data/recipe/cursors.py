"""Pool of open raw files, so that consecutive reads do not open a file again."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from meseta.data.formats.format import Block, RowCursor, Source
from meseta.data.recipe.index import RowRange
from meseta.data.recipe.recipe import REMAKE_REMEDY
from meseta.errors import MesetaError, reading_error
from meseta.system.remote import file_status

MAX_IDLE_CURSORS = 32
# A compressed file is read sequentially. With several cursors, readers that are slightly out of order each continue at
# a position close to theirs.
MAX_IDLE_CURSORS_PER_FILE = 4
"""Maximum number of unused cursors of one file."""


class CursorPool:
    """Thread-safe pool of cursors on the raw files of a recipe."""

    def __init__(self, sources: Sequence[Source], columns: Sequence[str]) -> None:
        """Create an empty pool. Formats that store columns separately read only `columns`."""
        self._sources, self._columns = sources, columns
        self._idle: list[tuple[int, RowCursor]] = []
        """Source index and cursor of each unused file, most recently used last."""
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._idle)

    def read(self, stretch: RowRange) -> Block:
        """Read the rows of a range. Raises MesetaError if the file is damaged or was changed since the recipe was
        made."""
        source = self._sources[stretch.source]
        try:
            with self._acquired(stretch) as cursor:
                block = cursor.read(stretch.start, stretch.stop)
        except MesetaError:
            # A damaged file may be one that was changed, which is the more helpful error.
            check_unchanged(source)
            raise
        check_unchanged(source)  # After reading, so that an earlier change cannot be missed.
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
        # Going backwards is expensive. A cursor behind the range is used only if the file has the maximum of idle ones.
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
    """Raise MesetaError if a raw file was changed, or StorageError if it cannot be accessed."""
    where, way_out = f"source {source.path!r}", f"restore it, or {REMAKE_REMEDY}"
    try:
        now = file_status(source.path)
    except OSError as error:
        text = f"{where} can no longer be read ({error.strerror}): {way_out}"
        raise reading_error(error, text) from None
    if (now.size_bytes or 1, now.change_stamp) != (source.size_bytes, source.changed):
        raise MesetaError(f"{where} has changed since the recipe was made: {way_out}")
