"""A dispatcher's thread that looks how readers and trainings fare, and says how many readers there should be."""

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
    """Look every POLL_INTERVAL_S while this is entered; `readers`: those that are to follow, None: somebody else sees
    to that. They end with it."""
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            wanted = scale.update(measure_load(leases))
            if readers is not None:
                readers.scale_to(wanted)
            is_over.wait(POLL_INTERVAL_S)

    thread = threading.Thread(target=look, name="meseta-scale", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        if readers is not None:
            readers.stop()


def measure_load(leases: LeaseTable) -> ReaderLoad:
    """What is seen now."""
    readers = [reader for reader in leases.readers() if not reader.is_leaving]
    num_windows = sum(reader.num_windows for reader in readers)
    return ReaderLoad(
        num_readers=len(readers),
        waiting_shares=leases.training_waiting_shares(),
        busy_readers=sum(reader.busy_share for reader in readers),
        window_s=sum(reader.busy_s for reader in readers) / num_windows if num_windows else 0.0,
    )
