"""Record of this rank, which lists its transfers. See `meseta.telemetry.rank_record`."""

from __future__ import annotations

import faulthandler
import os
import signal
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from meseta.ops.heartbeat import start_heartbeat
from meseta.system.environment_variables import environ
from meseta.system.files import link_tmpfile
from meseta.system.ranks import global_rank, is_distributed, num_ranks
from meseta.telemetry.rank_record import (
    HEARTBEAT_OFFSET,
    RANK_RECORD_VARIABLE,
    CurrentRankRecord,
    RankRecord,
    TransferInfo,
    create_record_file,
    record_path,
)

STACKS_SIGNAL = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Signal that makes a rank write its Python stacks to its record. It leaves signals that users know unused."""
NULL_RECORDING: AbstractContextManager[None] = nullcontext()


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
    """Link the record of this rank into `run_dir`, where `meseta hang` reads it. `first_step` is the number of steps
    before this process."""
    if CurrentRankRecord.record is not None:
        CurrentRankRecord.record.num_previous_steps = first_step
        link_tmpfile(CurrentRankRecord.record.descriptor, record_path(run_dir, CurrentRankRecord.record.rank))


def record_transfer(
    group: Any, sending: TransferInfo, step: int | None = None, lane: str = "rows"
) -> AbstractContextManager[None]:
    """Record the start of a transfer, described by `sending`. Returns a context manager to enter while this rank waits
    for it.

    `group` is a process group of torch.distributed, by default the default group. `step` is the number of earlier steps
    of this process, or `None` if the transfer belongs to no step.
    `lane` is 'rows' or 'sums', see `meseta.comm.messages`.
    """
    return (
        NULL_RECORDING
        if CurrentRankRecord.record is None
        else CurrentRankRecord.record.start_transfer(_get_lane(group, lane), step, sending)
    )


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the module, such as 'float32'."""
    return str(dtype).removeprefix("torch.")


_lanes: WeakKeyDictionary[Any, dict[str, tuple[int, str]]] = WeakKeyDictionary()
_lane_numbers = count(1)


def _get_lane(group: Any, name: str) -> tuple[int, str]:
    # The default group's lane of rows is number 0.
    if group is None or group is dist.group.WORLD:
        if name == "rows":
            return 0, name
        group = dist.group.WORLD
    names = _lanes.setdefault(group, {})
    # Lanes are numbered at their first use. All ranks use new lanes in the same order, so the numbers agree.
    if name not in names:
        names[name] = next(_lane_numbers), name
    return names[name]


def register_lane(group: Any, name: str) -> None:
    """Assign a number to the lane of a new group. All ranks must create groups in the same order."""
    _lanes.setdefault(group, {})["rows"] = next(_lane_numbers), name
