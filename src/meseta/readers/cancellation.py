"""Work for a call ends when its caller has cancelled it, or its deadline has passed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pyarrow import flight

from meseta.data.read.options import CancellationCheck

CHECK_INTERVAL_S = 0.5
"""Seconds between two checks while a thread waits."""


class CancelledCall(Exception):
    """The caller has cancelled the call."""


def cancellation_check(context: flight.ServerCallContext) -> CancellationCheck:
    """Return the check of a call, which is valid until the call ends."""

    def check() -> None:
        if context.is_cancelled():
            raise CancelledCall

    return check


@contextmanager
def acquire(lock: threading.Lock, check: CancellationCheck) -> Iterator[None]:
    """Context manager that holds `lock`. Raises `CancelledCall` while it waits."""
    while not lock.acquire(timeout=CHECK_INTERVAL_S):
        check()
    try:
        yield
    finally:
        lock.release()
