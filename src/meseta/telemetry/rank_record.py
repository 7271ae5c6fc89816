"""What a rank does, in a file that outlives it: its stage, what it waits for, and its last transfers.

    byte         what                                               written
    ---------    -----------------------------------------------    ------------------------------------------
    0 ...        head: which rank of how many, process, host        as it begins
    512          heartbeat: the time, processor time                each second, by a thread of the core
    576          place: stage, step                                 with each stage
    1024 ...     waits: for each lane, what is waited for           with each wait
    1536 ...     activities: phases and requests to storage         with each, see meseta.machine.waits.activity
    4096 ...     ring: the last transfers                           with each transfer
    SIZE ...     Python stacks, one after the other                 when `meseta hang` asks for them

The file is mapped, so that what was written is there however the process ends; nothing is flushed, and no system call
made. What the rank itself writes ends in a CRC-32: who reads in the middle of a write sees that, and what is damaged is
not believed. Times are of CLOCK_MONOTONIC in nanoseconds, which all processes of a host share.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from meseta.errors import MesetaError
from meseta.machine.files import open_tmpfile
from meseta.machine.process_state import process_start_ticks
from meseta.machine.waits.activity import ACTIVITY_TABLE_BYTES, Activity, current_activities, read_activities
from meseta.machine.waits.checked_memory import (
    CHECKSUM_BYTES,
    append_checksum,
    decode_text,
    encode_text,
    unpack_checked,
)

RANK_RECORD_VARIABLE = "MESETA_RANK_RECORD"
"""Names the file to a rank whose launcher has made it."""
RANKS_FOLDER = "ranks"
"""In the folder of a run."""
RECORD_MAGIC = b"MESETARR"
RECORD_VERSION = 1
HEARTBEAT_OFFSET = 512
"""Where the core writes two int64: the time and the processor time."""
_POSITION_OFFSET, _WAITS_OFFSET, _ACTIVITIES_OFFSET, _RING_OFFSET = 576, 1024, 1536, 4096
NUM_LANES = 8
"""Lanes whose waits are kept; later ones take the places of earlier ones."""
_WAIT_BYTES = 64
NUM_RECORDED_TRANSFERS = 128
"""Transfers that are kept."""
_TRANSFER_BYTES = 256
RECORD_BYTES = _RING_OFFSET + NUM_RECORDED_TRANSFERS * _TRANSFER_BYTES

_HEADER = struct.Struct("<8sIIiiqqqqd64s64s")
_HEARTBEAT = struct.Struct("<qq")
_POSITION = struct.Struct("<16sqq")
_WAIT = struct.Struct("<qqq")
_SIGNATURE = struct.Struct("<qqqq44s")
_KIND = struct.Struct("<32s12s")
_DETAILS = struct.Struct("<hh12s80s32s")
_TRANSFER = struct.Struct(f"<q{_SIGNATURE.size}sIqq{_DETAILS.size}s")
_DONE_OFFSET = _TRANSFER_BYTES - 8
_NONE = -1


class TransferInfo(NamedTuple):
    """What a rank sends, as a transfer begins."""

    name: str
    dtype: str = ""
    num_elements: int | None = None
    """Numbers, where all ranks have as many."""
    batch_tag: int = 0
    """Tells the batch that it belongs to from others, alike on all ranks; 0: it belongs to none."""
    num_bytes: float = 0.0
    """That this rank sends."""
    num_peers: int = 0
    """Other ranks that take part."""
    tables: Sequence[str] = ()
    """Whose rows travel."""
    ranks: Sequence[int] | None = None
    """Between whom; None: all."""


@dataclass(frozen=True)
class RecordedTransfer:
    """A transfer that a rank has begun."""

    index: int
    """Of all that it has begun."""
    lane: int
    """Group of ranks that it is of."""
    sequence_number: int
    """Which one of its lane, counted from 1; alike on all ranks."""
    name: str
    step: int | None
    """The one under way, counted from 1; None between steps."""
    batch_tag: int
    """Tells the batch from others, alike on all ranks; 0 where there is none."""
    dtype: str
    num_elements: int | None
    """Numbers, where all ranks have as many."""
    num_bytes: int
    """That this rank sends."""
    num_peers: int
    """Other ranks that take part."""
    tables: str
    """Whose rows travel."""
    ranks: str
    """Between whom, where not all; "..." at the end if they are too many for the record."""
    lane_name: str
    history_hash: int
    """Of it and all before it in its lane, by what all ranks have alike: ranks that ever differed have others."""
    start_ns: int
    done_ns: int
    """0 where it is not done."""

    @property
    def signature(self) -> tuple[object, ...]:
        """What all ranks have alike."""
        return (self.name, self.step, self.batch_tag, self.dtype, self.num_elements)

    def includes_rank(self, rank: int) -> bool:
        """Whether a rank takes part. If the record does not name all ranks, any may."""
        return not self.ranks or self.ranks.endswith("...") or str(rank) in self.ranks.split(", ")

    def describe(self) -> str:
        """'ids' of tables user, item."""
        return f"{self.name!r}" + (f" of tables {self.tables}" if self.tables else "")

    def describe_signature(self) -> str:
        """With what ranks must have alike."""
        numbers = (
            ""
            if not self.dtype
            else f"{self.dtype}"
            if self.num_elements is None
            else f"{self.num_elements} {self.dtype}"
        )
        step = "" if self.step is None else f" at step {self.step}"
        return f"{self.describe()}{f' ({numbers})' if numbers else ''}{step}"


@dataclass(frozen=True)
class Wait:
    """What a rank stands still for."""

    lane: int
    sequence_number: int
    since_ns: int


@dataclass(frozen=True)
class RankState:
    """A record, as it was read."""

    rank: int
    num_ranks: int
    pid: int
    start_ticks: int
    """When the process began, as the kernel counts it: another one of this number has another."""
    host: str
    command: str
    signal: int
    """To ask it for its stacks."""
    heartbeat_ns: int
    """0 where its heart has not begun."""
    stage: str
    """'' outside of stages."""
    step: int | None
    """Of its place."""
    position_since_ns: int
    """When it came to its place."""
    waits: Mapping[int, Wait]
    """By lane."""
    transfers: Sequence[RecordedTransfer]
    """The last ones, in the order in which they began."""
    activities: Sequence[Activity] = ()
    """Current phases and requests to storage, oldest first."""

    def num_started(self, lane: int) -> int:
        """Transfers of a lane that it has begun, as far as they are kept."""
        return max((kept.sequence_number for kept in self.transfers if kept.lane == lane), default=0)

    def find_transfer(self, lane: int, place: int) -> RecordedTransfer | None:
        """One of its transfers, where it is still kept."""
        return next((kept for kept in self.transfers if (kept.lane, kept.sequence_number) == (lane, place)), None)

    @property
    def last_progress_ns(self) -> int:
        """When it came to where it is, or began or ended a transfer, last."""
        times = (max(kept.start_ns, kept.done_ns) for kept in self.transfers)
        return max([self.position_since_ns, *(wait.since_ns for wait in self.waits.values()), *times])


class RankRecord:
    """What this process writes; every call costs a microsecond or two."""

    def __init__(self, descriptor: int, rank: int, num_ranks: int, signal: int = 0) -> None:
        """In an open file of SIZE bytes, whose descriptor is kept. Raises OSError where it cannot be mapped."""
        self.descriptor, self.rank = descriptor, rank
        self.num_previous_steps = 0
        """Steps that the run had done when this process began."""
        self._memory = mmap.mmap(descriptor, RECORD_BYTES)
        self._next_index = count(1)
        self._sequence_numbers, self._history_hashes = [0] * NUM_LANES, [0] * NUM_LANES
        self._stages: list[tuple[bytes, int]] = []
        pid, now_ns = os.getpid(), time.monotonic_ns()
        command = " ".join(["meseta", *sys.argv[1:2]])
        head = _HEADER.pack(RECORD_MAGIC, RECORD_VERSION, RECORD_BYTES, rank, num_ranks, pid,
                            process_start_ticks(pid) or 0, signal, now_ns,
                          time.time(), encode_text(socket.gethostname(), 64), encode_text(command, 64))  # fmt: skip
        self._write(_POSITION_OFFSET, _POSITION.pack(b"", _NONE, now_ns))
        current_activities.move_to(
            memoryview(self._memory)[_ACTIVITIES_OFFSET : _ACTIVITIES_OFFSET + ACTIVITY_TABLE_BYTES]
        )
        self._write(0, head)

    def start_transfer(self, lane: tuple[int, str], step: int | None, sending: TransferInfo) -> ActiveTransfer:
        """Keep a transfer that begins, in a lane by number and name; `step` counts those that this process has done
        before the one that it belongs to."""
        index, number = next(self._next_index), lane[0] % NUM_LANES
        self._sequence_numbers[number] = place = self._sequence_numbers[number] + 1
        kind, about = _pack_description(
            lane, sending.name, sending.dtype, sending.num_peers, sending.tables, sending.ranks
        )
        numbers = _NONE if sending.num_elements is None else sending.num_elements
        of_step = _NONE if step is None else self.num_previous_steps + step + 1
        agreed = _SIGNATURE.pack(place, of_step, sending.batch_tag, numbers, kind)
        self._history_hashes[number] = past = crc32(agreed, self._history_hashes[number])
        at = _RING_OFFSET + index % NUM_RECORDED_TRANSFERS * _TRANSFER_BYTES
        begun_ns = time.monotonic_ns()
        self._write(at, _TRANSFER.pack(index, agreed, past, int(sending.num_bytes), begun_ns, about), _NOT_DONE)
        return ActiveTransfer(self, lane[0], place, index)

    def record_wait(self, lane: int, place: int) -> None:
        """This rank stands still for a transfer; 0: for none of this lane."""
        at = _WAITS_OFFSET + lane % NUM_LANES * _WAIT_BYTES
        self._write(at, _WAIT.pack(lane, place, time.monotonic_ns()))

    def end_transfer(self, index: int) -> None:
        """A transfer is done; where its place was taken meanwhile, nobody asks for it any more."""
        at = _RING_OFFSET + index % NUM_RECORDED_TRANSFERS * _TRANSFER_BYTES
        if self._memory[at : at + 8] == index.to_bytes(8, "little"):
            _DONE.pack_into(self._memory, at + _DONE_OFFSET, time.monotonic_ns())

    def enter_stage(self, stage: str, step: int) -> None:
        """A stage of a step begins, of this process's steps, from 0."""
        self._stages.append((stage.encode(), self.num_previous_steps + step + 1))
        self._write(_POSITION_OFFSET, _POSITION.pack(*self._stages[-1], time.monotonic_ns()))

    def leave_stage(self) -> None:
        """It ends; the one around it goes on."""
        self._stages.pop()
        stage, step = self._stages[-1] if self._stages else (b"", _NONE)
        self._write(_POSITION_OFFSET, _POSITION.pack(stage, step, time.monotonic_ns()))

    def _write(self, at: int, content: bytes, more: bytes = b"") -> None:
        """With its checksum, and what comes behind that."""
        whole = append_checksum(content) + more
        self._memory[at : at + len(whole)] = whole


_DONE = struct.Struct("<q")
_NOT_DONE = bytes(_TRANSFER_BYTES - _TRANSFER.size - CHECKSUM_BYTES)


class ActiveTransfer:
    """A transfer under way: a context manager around the wait for it."""

    __slots__ = ("_index", "_lane", "_record", "_sequence_number")

    def __init__(self, record: RankRecord, lane: int, place: int, index: int) -> None:
        self._record, self._lane, self._sequence_number, self._index = record, lane, place, index

    def __enter__(self) -> None:
        self._record.record_wait(self._lane, self._sequence_number)

    def __exit__(self, *_: object) -> None:
        self._record.record_wait(self._lane, 0)
        self._record.end_transfer(self._index)


def create_record_file(folder: Path) -> int:
    """An `open_tmpfile` with room for a record, which `record_path` may name. Raises OSError where there is none."""
    descriptor = open_tmpfile(folder)
    os.ftruncate(descriptor, RECORD_BYTES)
    return descriptor


def record_path(run_dir: Path, rank: int) -> Path:
    """Of a rank of a run; its folder is not made."""
    return run_dir / RANKS_FOLDER / f"rank-{rank:05d}.record"


class CurrentRankRecord:
    """The record of this process; None where it keeps none."""

    record: RankRecord | None = None


def _pack_description(
    lane: tuple[int, str], name: str, dtype: str, num_peers: int, tables: Sequence[str], ranks: Sequence[int] | None
) -> tuple[bytes, bytes]:
    """(what all ranks agree on, the rest) of what a transfer has alike in all steps."""
    try:
        return _pack_cached(lane, name, dtype, num_peers, tables, ranks)
    except TypeError:  # lists have no hash
        return _pack_cached(lane, name, dtype, num_peers, tuple(tables), None if ranks is None else tuple(ranks))


@lru_cache(maxsize=4096)
def _pack_cached(
    lane: tuple[int, str], name: str, dtype: str, num_peers: int, tables: tuple[str, ...], ranks: tuple[int, ...] | None
) -> tuple[bytes, bytes]:
    between = b"" if ranks is None else _encode_list(ranks, 32)
    about = lane[0], min(num_peers, 32767), encode_text(lane[1], 12), _encode_list(tables, 80), between
    return _KIND.pack(encode_text(name, 32), encode_text(dtype, 12)), _DETAILS.pack(*about)


@lru_cache(maxsize=4096)
def _unpack_description(kind: bytes, about: bytes) -> tuple[str, str, int, int, str, str, str]:
    """The way back, of each kind of transfer once: name, dtype, lane, other ranks, name of the lane, tables, ranks."""
    name, dtype = map(decode_text, _KIND.unpack(kind))
    lane, num_peers, *texts = _DETAILS.unpack(about)
    lane_name, tables, ranks = map(decode_text, texts)
    return name, dtype, lane, num_peers, lane_name, tables, ranks


def _encode_list(names: Sequence[object], length: int) -> bytes:
    return encode_text(", ".join(map(str, names)), length)


def is_initialized(content: bytes) -> bool:
    """Whether a rank has written anything into its record."""
    return any(content[: len(RECORD_MAGIC)])


def parse_record(content: bytes, source: str) -> RankState:
    """Of the first SIZE bytes of a record. Raises MesetaError, naming `source`, where they are none."""

    def refuse(reason: str) -> MesetaError:
        return MesetaError(f"record of a rank {source!r}: {reason}; it is no such record, or damaged: move it away")

    if len(content) < RECORD_BYTES:
        raise refuse(f"it has {len(content):,} bytes, and must have {RECORD_BYTES:,} at least")
    if content[: len(RECORD_MAGIC)] != RECORD_MAGIC:
        raise refuse("it does not begin as one")
    version, size = struct.unpack_from("<II", content, len(RECORD_MAGIC))
    if (version, size) != (RECORD_VERSION, RECORD_BYTES):
        raise refuse(
            f"it is of version {version} with {size:,} bytes, and this program reads {RECORD_VERSION} with "
            f"{RECORD_BYTES:,}"
        )
    head = unpack_checked(content, 0, _HEADER)
    if head is None:
        raise refuse("its head does not match its checksum")
    _, _, _, rank, num_ranks, pid, start, signal, _, _, host, command = head
    if not (0 <= rank < num_ranks and pid > 0):
        raise refuse(f"it is of rank {rank} of {num_ranks}, process {pid}")
    beat_ns, _ = _HEARTBEAT.unpack_from(content, HEARTBEAT_OFFSET)
    stage, step, since_ns = unpack_checked(content, _POSITION_OFFSET, _POSITION) or (b"", _NONE, 0)
    waits = (unpack_checked(content, _WAITS_OFFSET + n * _WAIT_BYTES, _WAIT) for n in range(NUM_LANES))
    return RankState(
        rank=rank,
        num_ranks=num_ranks,
        pid=pid,
        start_ticks=start,
        host=decode_text(host),
        command=decode_text(command),
        signal=signal,
        heartbeat_ns=beat_ns,
        stage=decode_text(stage),
        step=None if step == _NONE else step,
        position_since_ns=since_ns,
        waits={wait[0]: Wait(*wait) for wait in waits if wait is not None and wait[1] > 0},
        transfers=_parse_transfers(content),
        activities=read_activities(content[_ACTIVITIES_OFFSET : _ACTIVITIES_OFFSET + ACTIVITY_TABLE_BYTES]),
    )


def _parse_transfers(content: bytes) -> tuple[RecordedTransfer, ...]:
    """Those of the ring that are whole, in the order of their beginnings."""
    found = []
    for number in range(NUM_RECORDED_TRANSFERS):
        at = _RING_OFFSET + number * _TRANSFER_BYTES
        entry = unpack_checked(content, at, _TRANSFER)
        if entry is None:
            continue
        index, agreed, past, num_bytes, begun_ns, about = entry
        place, step, batch, numbers, kind = _SIGNATURE.unpack(agreed)
        name, dtype, lane, num_peers, lane_name, tables, ranks = _unpack_description(kind, about)
        kept = RecordedTransfer(
            index=index,
            lane=lane,
            sequence_number=place,
            name=name,
            step=None if step == _NONE else step,
            batch_tag=batch,
            dtype=dtype,
            num_elements=None if numbers == _NONE else numbers,
            num_bytes=num_bytes,
            num_peers=num_peers,
            tables=tables,
            ranks=ranks,
            lane_name=lane_name,
            history_hash=past,
            start_ns=begun_ns,
            done_ns=_DONE.unpack_from(content, at + _DONE_OFFSET)[0],
        )
        found.append(kept)
    return tuple(sorted(found, key=lambda kept: kept.index))
