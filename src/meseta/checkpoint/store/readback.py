"""Read-back of mirrored files: comparison with their originals, a limited number of bytes per save."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

from meseta.checkpoint.files.direct_io import read_chunks
from meseta.spec import MesetaError
from meseta.system.files import format_json, is_read_failure, parse_json, read_bounded, resolve_inside, write_atomic
from meseta.system.remote import Location


class ReadbackQueue:
    """Order in which the files of one mirror are compared, least recently sent or checked first.

    The order is stored in a file to outlive the process. If the file is lost, the oldest checkpoints come first.
    """

    def __init__(self, state_file: Path | None = None) -> None:
        self._state_file = state_file
        # Paths of files, least recently sent or checked first.
        self._queue: deque[str] = deque()
        # Number of bytes of the first file that were already compared.
        self._offset = 0
        if state_file is not None:
            with suppress(OSError, ValueError, TypeError, KeyError):
                self._restore(parse_json(read_bounded(state_file)))

    def find_differences(
        self, originals: Location, copies: Location, sizes: Mapping[str, int], num_bytes: int
    ) -> Iterator[str]:
        """Compare the next `num_bytes` of the files, and yield the path of each file that differs.

        `sizes` has the bytes of all files, by path below `originals` and `copies`. Raises MesetaError or OSError if a
        file cannot be read. The next call then starts with that file.
        """
        first, known = next(iter(self._queue), None), set(self._queue)
        self._queue = deque(path for path in self._queue if path in sizes)
        self._queue.extend(path for path in sizes if path not in known)
        if next(iter(self._queue), None) != first:
            self._offset = 0
        left = min(num_bytes, sum(sizes.values()))
        while left > 0:
            path, start = self._queue[0], self._offset
            stop = min(start + left, sizes[path])
            is_equal = _is_equal(originals / path, copies, path, start, stop)
            left -= stop - start
            self._offset = stop
            if stop == sizes[path] or not is_equal:
                self._offset = 0
                self._queue.append(self._queue.popleft())
            if not is_equal:
                yield path
        self._save()

    def _restore(self, document: dict[str, object]) -> None:
        queue, offset = document["files"], document["offset"]
        if isinstance(queue, list) and all(isinstance(path, str) for path in queue) and isinstance(offset, int):
            self._queue, self._offset = deque(dict.fromkeys(queue)), max(offset, 0)

    def _save(self) -> None:
        if self._state_file is not None:
            with suppress(MesetaError):  # A lost order, as on a full disk, only costs time.
                write_atomic(self._state_file, format_json({"offset": self._offset, "files": [*self._queue]}))


def _is_equal(original: Location, copies: Location, path: str, start: int, stop: int) -> bool:
    folder, _, inner = path.partition("/")
    try:
        copy = resolve_inside(copies / folder, inner) if isinstance(copies, Path) else copies / path
        pairs = zip_longest(read_chunks(original, start, stop), read_chunks(copy, start, stop))
        return all(one == other for one, other in pairs)
    except OSError as error:
        if not is_read_failure(error) and error.filename != str(original):
            return False
        raise
