"""Start of the record of this rank. See `meseta.telemetry.rank_record`."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

from meseta.ops.heartbeat import start_heartbeat
from meseta.system.environment_variables import environ
from meseta.system.files import link_tmpfile
from meseta.system.ranks import global_rank, is_distributed, num_ranks
from meseta.telemetry.rank_record import (
    HEARTBEAT_OFFSET,
    RANK_RECORD_VARIABLE,
    CurrentRankRecord,
    RankRecord,
    create_record_file,
    record_path,
)

STACKS_SIGNAL = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Signal that makes a rank write its Python stacks to its record. It leaves signals that users know unused."""


def start_record(folder: Path | None = None) -> None:
    """Start the record of this process and its heartbeat, and write Python stacks to it on `STACKS_SIGNAL`.

    Uses the record file that the launcher created, or else creates one in the file system of `folder`. Does nothing in
    a process that is not a rank of several or already has a record. Raises OSError if the system refuses.
    """
    # Child processes must not use the record of this process.
    path = environ.pop(RANK_RECORD_VARIABLE, None)
    if CurrentRankRecord.record is not None or not is_distributed() or (path is None and folder is None):
        return
    descriptor = None
    if path is None:
        assert folder is not None
        descriptor = create_record_file(folder)
        path = f"/proc/self/fd/{descriptor}"
    opened = os.open(path, os.O_RDWR | os.O_APPEND)
    if descriptor is not None:
        os.close(descriptor)
    CurrentRankRecord.record = RankRecord(opened, global_rank(), num_ranks(), int(STACKS_SIGNAL))
    start_heartbeat(opened, HEARTBEAT_OFFSET)
    faulthandler.register(STACKS_SIGNAL, file=opened, all_threads=True)


def publish_record(run_dir: Path, first_step: int) -> None:
    """Link the record of this rank into `run_dir`, where `meseta status` reads it. `first_step` is the number of steps
    before this process."""
    if CurrentRankRecord.record is not None:
        CurrentRankRecord.record.num_previous_steps = first_step
        path = record_path(run_dir, CurrentRankRecord.record.rank)
        path.parent.mkdir(parents=True, exist_ok=True)  # Rank 0 may have created it on another host.
        link_tmpfile(CurrentRankRecord.record.descriptor, path)
