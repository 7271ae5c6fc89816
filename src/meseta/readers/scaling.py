"""A dispatcher's thread that looks how readers and trainings fare, and says how many readers there should be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from meseta.readers.lease_table import LeaseTable
from meseta.readers.local import LocalReaders
from meseta.readers.scale import Load, ReaderScale

LOOK_S = 1.0


@contextmanager
def scaling(scale: ReaderScale, leases: LeaseTable, readers: LocalReaders | None) -> Iterator[None]:
    """Look every LOOK_S while this is entered; `readers`: those that are to follow, None: somebody else sees to that.
    They end with it."""
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            wanted = scale.update(load_of(leases))
            if readers is not None:
                readers.follow(wanted)
            is_over.wait(LOOK_S)

    thread = threading.Thread(target=look, name="meseta-scale", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        if readers is not None:
            readers.end()


def load_of(leases: LeaseTable) -> Load:
    """What is seen now."""
    readers = [reader for reader in leases.readers() if not reader.is_leaving]
    num_windows = sum(reader.num_windows for reader in readers)
    return Load(
        num_readers=len(readers),
        waiting_shares=leases.training_shares(),
        busy_readers=sum(reader.busy_share for reader in readers),
        window_s=sum(reader.busy_s for reader in readers) / num_windows if num_windows else 0.0,
    )
