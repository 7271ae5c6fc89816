"""Background thread of a dispatcher that measures the load and adjusts the number of readers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from meseta.readers.autoscaler import ReaderAutoscaler, ReaderLoad
from meseta.readers.lease_table import LeaseTable
from meseta.readers.local_readers import LocalReaders

POLL_INTERVAL_S = 1.0


@contextmanager
def run_autoscaler(scale: ReaderAutoscaler, leases: LeaseTable, readers: LocalReaders | None) -> Iterator[None]:
    """Context manager that updates `scale` every `POLL_INTERVAL_S` seconds.

    Scales `readers` to the target, and stops them on exit. `None` means that another system starts and stops readers.
    """
    should_stop = threading.Event()

    def update() -> None:
        while not should_stop.is_set():
            target = scale.update(measure_load(leases))
            if readers is not None:
                readers.scale_to(target)
            should_stop.wait(POLL_INTERVAL_S)

    thread = threading.Thread(target=update, name="meseta-scale", daemon=True)
    thread.start()
    try:
        yield
    finally:
        should_stop.set()
        thread.join()
        if readers is not None:
            readers.stop()


def measure_load(leases: LeaseTable) -> ReaderLoad:
    """Return the recent load of readers and training runs."""
    readers = [reader for reader in leases.readers() if not reader.is_draining]
    num_windows = sum(reader.num_windows for reader in readers)
    return ReaderLoad(
        num_readers=len(readers),
        waiting_shares=leases.training_waiting_shares(),
        busy_readers=sum(reader.busy_share for reader in readers),
        window_s=sum(reader.busy_s for reader in readers) / num_windows if num_windows else 0.0,
    )
