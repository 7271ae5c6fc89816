"""Repeated reads for a run that selects the checkpoint to resume from by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from meseta.checkpoint.store.names import QUARANTINE_MARKER
from meseta.errors import StorageError
from meseta.system.remote import Location

READ_RETRY_WINDOW_S = 10.0
"""Seconds for which failed reads are repeated inside `retry_reads`."""
_BACKOFF_S = 0.05, 1.0
"""Shortest and longest delay between two attempts."""
T = TypeVar("T")


class _RetryState:
    """State of this process, shared by the threads that read blocks."""

    window_s = 0.0
    has_timed_out = False


@contextmanager
def retry_reads() -> Iterator[None]:
    """Context manager in which this process repeats failed reads of checkpoints for `READ_RETRY_WINDOW_S`.

    A read that fails for this long raises StorageError, which explains how to set the checkpoint aside.
    """
    _RetryState.window_s, _RetryState.has_timed_out = READ_RETRY_WINDOW_S, False
    try:
        yield
    finally:
        _RetryState.window_s = 0.0


def retry(root: Location | None, attempt: Callable[[], T]) -> T:
    """Return the result of `attempt`, which reads a part of the checkpoint `root` and raises StorageError if that
    fails.

    Repeats it inside `retry_reads` only.
    """
    end_s, (wait_s, longest_s) = time.monotonic() + _RetryState.window_s, _BACKOFF_S
    while True:
        try:
            return attempt()
        except StorageError as error:
            left_s = end_s - time.monotonic()
            if _RetryState.window_s == 0:
                raise
            # Other threads then fail immediately, so that the command ends.
            if left_s <= 0 or _RetryState.has_timed_out:
                _RetryState.has_timed_out = True
                raise StorageError(f"{error} (tried for {_RetryState.window_s:g} s){_set_aside_hint(root)}") from None
        time.sleep(min(wait_s, left_s))
        wait_s = min(2 * wait_s, longest_s)


def _set_aside_hint(root: Location | None) -> str:
    if root is None:
        return ""
    how = f"`mv {root} {root}.unread`" if isinstance(root, Path) else f"an empty file '{root}/{QUARANTINE_MARKER}'"
    return f", or set the checkpoint aside with {how}, to resume from an older one"
