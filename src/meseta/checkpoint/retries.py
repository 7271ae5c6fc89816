"""Reads that are repeated for a while if they fail, for a run that chooses the checkpoint to resume by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from meseta.checkpoint.store.names import QUARANTINE_MARKER
from meseta.errors import StorageError
from meseta.machine.remote import Location

READ_RETRY_WINDOW_S = 10.0
"""Seconds for which a failed read is repeated inside `retry_reads`."""
_BACKOFF_S = 0.05, 1.0
"""First and longest wait between two attempts."""
T = TypeVar("T")


class _RetryState:
    """State of this process: blocks are read by several threads."""

    window_s = 0.0
    has_timed_out = False
    """Whether some read has failed for the whole window. Other reads then fail at once, so that the command ends."""


@contextmanager
def retry_reads() -> Iterator[None]:
    """Context manager in which this process repeats each failed read of a checkpoint for READ_RETRY_WINDOW_S.

    A read that still fails raises StorageError, which then says how to set the checkpoint aside.
    """
    _RetryState.window_s, _RetryState.has_timed_out = READ_RETRY_WINDOW_S, False
    try:
        yield
    finally:
        _RetryState.window_s = 0.0


def retry(root: Location | None, attempt: Callable[[], T]) -> T:
    """Return what `attempt` returns; it reads a part of the checkpoint `root` and raises StorageError if that fails."""
    end_s, (wait_s, longest_s) = time.monotonic() + _RetryState.window_s, _BACKOFF_S
    while True:
        try:
            return attempt()
        except StorageError as error:
            left_s = end_s - time.monotonic()
            if _RetryState.window_s == 0:
                raise
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
