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

from meseta.machine.files import give_name
from meseta.machine.ranks import is_launched, num_ranks, rank_number
from meseta.machine.variables import variables
from meseta.ops.heartbeat import begin_heartbeat
from meseta.telemetry.rank_record import BEAT_AT, VARIABLE, RankRecord, Sending, ThisProcess, record_file, record_path

STACKS = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Asks a rank for its Python stacks; signals that users know are left to them."""
NOT_KEPT: AbstractContextManager[None] = nullcontext()
"""A transfer of a process that has no record."""


def begin_record(folder: Path | None = None) -> None:
    """Keep a record of this process from now on, with a heartbeat, and write its Python stacks there at a signal.

    Where its launcher has made one, that; else, with `folder`, one in the file system of that. Does nothing in a
    process that is no rank, or has one. Raises OSError where the system refuses.
    """
    path = variables.pop(VARIABLE, None)  # not that of processes which this one starts
    if ThisProcess.record is not None or not is_launched() or (path is None and folder is None):
        return
    descriptor = None
    if path is None:
        assert folder is not None
        descriptor = record_file(folder)
        path = f"/proc/self/fd/{descriptor}"
    opened = os.open(path, os.O_RDWR | os.O_APPEND)
    if descriptor is not None:
        os.close(descriptor)
    ThisProcess.record = RankRecord(opened, rank_number(), num_ranks(), int(STACKS))
    begin_heartbeat(opened, BEAT_AT)
    faulthandler.register(STACKS, file=opened, all_threads=True)


def show_record(run_dir: Path, first_step: int) -> None:
    """Let `meseta hang` find the record of this rank in the folder of its run, which goes on after `first_step`."""
    if ThisProcess.record is not None:
        ThisProcess.record.first_step = first_step
        give_name(ThisProcess.record.descriptor, record_path(run_dir, ThisProcess.record.rank))


def keep(group: Any, sending: Sending, step: int | None = None, lane: str = "rows") -> AbstractContextManager[None]:
    """Record that a transfer begins; what is returned is entered while this rank waits for it.

    Args:
        group: of torch.distributed; None: the run's.
        sending: what travels.
        step: those of this process that were done before the one it belongs to; None: it belongs to none.
        lane: 'rows' or 'sums', see meseta.comm.lanes.
    """
    return NOT_KEPT if ThisProcess.record is None else ThisProcess.record.begin(_lane_of(group, lane), step, sending)


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """'float32'."""
    return str(dtype).removeprefix("torch.")


_lanes: WeakKeyDictionary[Any, dict[str, tuple[int, str]]] = WeakKeyDictionary()
_numbers = count(1)


def _lane_of(group: Any, name: str) -> tuple[int, str]:
    """(number, name): numbers are those of the first use, which has one order on all ranks; 0: the run's own."""
    if group is None or group is dist.group.WORLD:
        if name == "rows":
            return 0, name
        group = dist.group.WORLD
    names = _lanes.setdefault(group, {})
    if name not in names:
        names[name] = next(_numbers), name
    return names[name]


def name_lane(group: Any, name: str) -> None:
    """Number the lane of a group that is used by another thread, in the order in which groups are made."""
    _lanes.setdefault(group, {})["rows"] = next(_numbers), name
