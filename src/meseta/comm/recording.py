"""The record of this rank: begun with the process, and told of every transfer, see meseta.telemetry.rank_record."""

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

from meseta.machine.environment_variables import environ
from meseta.machine.files import link_tmpfile
from meseta.machine.ranks import global_rank, is_distributed, num_ranks
from meseta.ops.heartbeat import start_heartbeat
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
"""Asks a rank for its Python stacks; signals that users know are left to them."""
NULL_RECORDING: AbstractContextManager[None] = nullcontext()
"""A transfer of a process that has no record."""


def start_record(folder: Path | None = None) -> None:
    """Keep a record of this process from now on, with a heartbeat, and write its Python stacks there at a signal.

    Where its launcher has made one, that; else, with `folder`, one in the file system of that. Does nothing in a
    process that is no rank, or has one. Raises OSError where the system refuses.
    """
    path = environ.pop(RANK_RECORD_VARIABLE, None)  # not that of processes which this one starts
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
    """Let `meseta hang` find the record of this rank in the folder of its run, which goes on after `first_step`."""
    if CurrentRankRecord.record is not None:
        CurrentRankRecord.record.num_previous_steps = first_step
        link_tmpfile(CurrentRankRecord.record.descriptor, record_path(run_dir, CurrentRankRecord.record.rank))


def record_transfer(
    group: Any, sending: TransferInfo, step: int | None = None, lane: str = "rows"
) -> AbstractContextManager[None]:
    """Record that a transfer begins; what is returned is entered while this rank waits for it.

    Args:
        group: of torch.distributed; None: the run's.
        sending: what travels.
        step: those of this process that were done before the one it belongs to; None: it belongs to none.
        lane: 'rows' or 'sums', see meseta.comm.lanes.
    """
    return (
        NULL_RECORDING
        if CurrentRankRecord.record is None
        else CurrentRankRecord.record.start_transfer(_get_lane(group, lane), step, sending)
    )


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """'float32'."""
    return str(dtype).removeprefix("torch.")


_lanes: WeakKeyDictionary[Any, dict[str, tuple[int, str]]] = WeakKeyDictionary()
_lane_numbers = count(1)


def _get_lane(group: Any, name: str) -> tuple[int, str]:
    """(number, name): numbers are those of the first use, which has one order on all ranks; 0: the run's own."""
    if group is None or group is dist.group.WORLD:
        if name == "rows":
            return 0, name
        group = dist.group.WORLD
    names = _lanes.setdefault(group, {})
    if name not in names:
        names[name] = next(_lane_numbers), name
    return names[name]


def register_lane(group: Any, name: str) -> None:
    """Number the lane of a group that is used by another thread, in the order in which groups are made."""
    _lanes.setdefault(group, {})["rows"] = next(_lane_numbers), name
