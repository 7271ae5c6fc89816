"""Cancellation of work for a call that its caller has cancelled or whose deadline has passed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pyarrow import flight

from meseta.data.read.options import CancellationCheck

CHECK_INTERVAL_S = 0.5
"""Seconds between two checks while a thread waits."""


class CancelledCall(Exception):
    """Error that ends the work for a cancelled call."""


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
