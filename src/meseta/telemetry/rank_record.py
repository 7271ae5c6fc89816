"""Rank record: a memory-mapped file with the stage, waits and last transfers of a rank.

The record remains readable after the process has ended for any reason. All times are nanoseconds on CLOCK_MONOTONIC,
which all processes of a host share.
"""

from __future__ import annotations

import mmap
import os
import re
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
from meseta.system.files import has_control_characters, open_regular, open_tmpfile
from meseta.system.processes import has_signal_handler, process_start_ticks, read_process_state
from meseta.system.waits import (
    ACTIVITY_TABLE_BYTES,
    CHECKSUM_BYTES,
    Activity,
    append_checksum,
    blocked_text,
    current_activities,
    decode_text,
    encode_text,
    read_activities,
    unpack_checked,
)

# byte          content                                      written
# ------------  -------------------------------------------  --------------------------------------------------
# 0             header: rank, number of ranks, pid, host     at the start
# 512           heartbeat: time, processor time              every second, by a thread of the compiled core
# 576           position: stage, step                        at each change of the stage
# 1024          awaited transfer of each lane                at each wait
# 1536          activities: phases, requests to storage      at each change, see meseta.system.waits
# 4096          ring buffer of the last transfers            at each transfer
# RECORD_BYTES  Python stacks, appended                      at a request of `meseta status`
#
# Writing to the mapped file needs no system call and no flush. Each part except the heartbeat ends in a CRC-32, so that
# readers detect partly written and damaged parts.


RANK_RECORD_VARIABLE = "MESETA_RANK_RECORD"
"""Environment variable with the record file of a rank, set by its launcher."""
RANKS_FOLDER = "ranks"
RECORD_MAGIC = b"MESETARR"
RECORD_VERSION = 1
HEARTBEAT_OFFSET = 512
"""Offset at which the compiled core writes the heartbeat, two int64 with the time and the processor time."""
_POSITION_OFFSET, _WAITS_OFFSET, _ACTIVITIES_OFFSET, _RING_OFFSET = 576, 1024, 1536, 4096
NUM_LANES = 8
"""Number of lanes in a record. Further lanes overwrite the entries of earlier ones."""
_WAIT_BYTES = 64
NUM_RECORDED_TRANSFERS = 128
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
    """Description of a transfer at its start."""

    name: str
    dtype: str = ""
    num_elements: int | None = None
    """Number of elements. `None` if it differs between ranks."""
    batch_tag: int = 0
    """Tag of the batch, equal on all ranks. 0 means no batch."""
    num_bytes: float = 0.0
    num_peers: int = 0
    tables: Sequence[str] = ()
    ranks: Sequence[int] | None = None
    """Participating ranks. `None` means all ranks."""


@dataclass(frozen=True)
class RecordedTransfer:
    """Transfer in a rank record."""

    index: int
    """Number of this transfer among all that the rank has started."""
    lane: int
    sequence_number: int
    """Position in the lane, counted from 1. It is equal on all ranks."""
    name: str
    step: int | None
    """Step in which the transfer started, counted from 1. `None` between steps."""
    batch_tag: int
    """Tag of the batch, equal on all ranks. 0 means no batch."""
    dtype: str
    num_elements: int | None
    """Number of elements. `None` if it differs between ranks."""
    num_bytes: int
    num_peers: int
    tables: str
    ranks: str
    """Participating ranks. Empty means all, and a truncated list ends in "..."."""
    lane_name: str
    history_hash: int
    """Hash of the signatures of this transfer and all earlier ones of its lane. It differs if ranks ever diverged."""
    start_ns: int
    done_ns: int
    """Time at which the transfer ended, or 0 if it has not ended."""

    @property
    def signature(self) -> tuple[object, ...]:
        """Values that must be equal on all ranks."""
        return (self.name, self.step, self.batch_tag, self.dtype, self.num_elements)

    def includes_rank(self, rank: int) -> bool:
        """Whether a rank may take part. If the list of ranks is truncated, every rank may."""
        return not self.ranks or self.ranks.endswith("...") or str(rank) in self.ranks.split(", ")

    def describe(self) -> str:
        """Describe the transfer, such as "'ids' of tables user, item"."""
        return f"{self.name!r}" + (f" of tables {self.tables}" if self.tables else "")

    def describe_signature(self) -> str:
        """Describe the transfer with its dtype, number of elements and step."""
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
    """Wait of a rank for a transfer."""

    lane: int
    sequence_number: int
    """Position of the transfer in its lane."""
    since_ns: int


@dataclass(frozen=True)
class RankState:
    """Content of a rank record."""

    rank: int
    num_ranks: int
    pid: int
    start_ticks: int
    """Start time of the process in clock ticks since boot, as in `ProcessState.start_ticks`."""
    host: str
    command: str
    signal: int
    """Signal that makes the rank write its Python stacks."""
    heartbeat_ns: int
    """Time of the last heartbeat, or 0 if there was none."""
    stage: str
    """Current stage. Empty outside of stages."""
    step: int | None
    """Current step, counted from 1. `None` outside of stages."""
    position_since_ns: int
    """Time at which the rank entered its current stage and step."""
    waits: Mapping[int, Wait]
    transfers: Sequence[RecordedTransfer]
    """Last transfers, ordered by their start."""
    activities: Sequence[Activity] = ()
    """Current phases and requests to storage, oldest first."""

    def num_started(self, lane: int) -> int:
        """Return the number of transfers that the rank has started in a lane, or 0 if none of them is recorded."""
        return max((kept.sequence_number for kept in self.transfers if kept.lane == lane), default=0)

    def find_transfer(self, lane: int, place: int) -> RecordedTransfer | None:
        """Return the transfer at position `place` of a lane, or `None` if it is not recorded."""
        return next((kept for kept in self.transfers if (kept.lane, kept.sequence_number) == (lane, place)), None)

    @property
    def last_progress_ns(self) -> int:
        """Time of the last start or end of a stage, wait or transfer."""
        times = (max(kept.start_ns, kept.done_ns) for kept in self.transfers)
        return max([self.position_since_ns, *(wait.since_ns for wait in self.waits.values()), *times])


class RankRecord:
    """Writer of the record of this process. A call takes one or two microseconds."""

    def __init__(self, descriptor: int, rank: int, num_ranks: int, signal: int = 0) -> None:
        """Map an open file of `RECORD_BYTES` bytes and write the header. Raises OSError if it cannot be mapped.

        The record keeps `descriptor`. `signal` is the signal that makes this process write its stacks.
        """
        self.descriptor, self.rank = descriptor, rank
        self.num_previous_steps = 0
        """Number of steps of the run before this process started."""
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
        self._write(0, head)  # The header is last, because readers check it first.

    def start_transfer(self, lane: tuple[int, str], step: int | None, sending: TransferInfo) -> ActiveTransfer:
        """Record the start of a transfer, described by `sending`.

        `lane` is the number and name of the lane. `step` is the number of steps that this process has completed, or
        `None` between steps.
        """
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
        """Record that this rank waits for the transfer at position `place` of a lane. 0 means that it does not wait."""
        at = _WAITS_OFFSET + lane % NUM_LANES * _WAIT_BYTES
        self._write(at, _WAIT.pack(lane, place, time.monotonic_ns()))

    def end_transfer(self, index: int) -> None:
        """Record the end of a transfer, unless newer transfers have overwritten its entry."""
        at = _RING_OFFSET + index % NUM_RECORDED_TRANSFERS * _TRANSFER_BYTES
        if self._memory[at : at + 8] == index.to_bytes(8, "little"):
            _DONE.pack_into(self._memory, at + _DONE_OFFSET, time.monotonic_ns())

    def enter_stage(self, stage: str, step: int) -> None:
        """Record the start of a stage. `step` counts the steps of this process from 0."""
        self._stages.append((stage.encode(), self.num_previous_steps + step + 1))
        self._write(_POSITION_OFFSET, _POSITION.pack(*self._stages[-1], time.monotonic_ns()))

    def leave_stage(self) -> None:
        """Record the end of the current stage. The enclosing stage becomes current."""
        self._stages.pop()
        stage, step = self._stages[-1] if self._stages else (b"", _NONE)
        self._write(_POSITION_OFFSET, _POSITION.pack(stage, step, time.monotonic_ns()))

    def _write(self, at: int, content: bytes, more: bytes = b"") -> None:
        whole = append_checksum(content) + more
        self._memory[at : at + len(whole)] = whole


_DONE = struct.Struct("<q")
_NOT_DONE = bytes(_TRANSFER_BYTES - _TRANSFER.size - CHECKSUM_BYTES)


class ActiveTransfer:
    """Context manager that records the wait for a started transfer, and its end."""

    __slots__ = ("_index", "_lane", "_record", "_sequence_number")

    def __init__(self, record: RankRecord, lane: int, place: int, index: int) -> None:
        self._record, self._lane, self._sequence_number, self._index = record, lane, place, index

    def __enter__(self) -> None:
        self._record.record_wait(self._lane, self._sequence_number)

    def __exit__(self, *_: object) -> None:
        self._record.record_wait(self._lane, 0)
        self._record.end_transfer(self._index)


def create_record_file(folder: Path) -> int:
    """Create an unnamed file that `link_tmpfile` can link below `folder`. Returns its descriptor. Raises OSError."""
    descriptor = open_tmpfile(folder)
    os.ftruncate(descriptor, RECORD_BYTES)
    return descriptor


def record_path(run_dir: Path, rank: int) -> Path:
    """Return the path of a rank's record in a run folder. The subfolder is not created."""
    return run_dir / RANKS_FOLDER / f"rank-{rank:05d}.record"


class CurrentRankRecord:
    """Holder of the record of this process."""

    record: RankRecord | None = None


def _pack_description(
    lane: tuple[int, str], name: str, dtype: str, num_peers: int, tables: Sequence[str], ranks: Sequence[int] | None
) -> tuple[bytes, bytes]:
    """Return (name and dtype, other fields) of a transfer in packed form. They do not depend on the step."""
    try:
        return _pack_cached(lane, name, dtype, num_peers, tables, ranks)
    except TypeError:  # Lists are not hashable.
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
    """Return (name, dtype, lane, number of peers, lane name, tables, ranks) of a packed transfer."""
    name, dtype = map(decode_text, _KIND.unpack(kind))
    lane, num_peers, *texts = _DETAILS.unpack(about)
    lane_name, tables, ranks = map(decode_text, texts)
    return name, dtype, lane, num_peers, lane_name, tables, ranks


def _encode_list(names: Sequence[object], length: int) -> bytes:
    return encode_text(", ".join(map(str, names)), length)


def is_initialized(content: bytes) -> bool:
    """Whether a rank has started to write its record."""
    return any(content[: len(RECORD_MAGIC)])


def parse_record(content: bytes, source: str) -> RankState:
    """Parse the first `RECORD_BYTES` bytes of a record. Raises MesetaError, with the file `source`, if invalid."""

    def refuse(reason: str) -> MesetaError:
        return MesetaError(f"rank record {source!r}: {reason}; the file is damaged or no rank record, move it away")

    if len(content) < RECORD_BYTES:
        raise refuse(f"its size must be at least {RECORD_BYTES:,} bytes, got {len(content):,}")
    if content[: len(RECORD_MAGIC)] != RECORD_MAGIC:
        raise refuse("its first bytes are not those of a rank record")
    version, size = struct.unpack_from("<II", content, len(RECORD_MAGIC))
    if (version, size) != (RECORD_VERSION, RECORD_BYTES):
        raise refuse(
            f"its version is {version} with {size:,} bytes, but this program reads version {RECORD_VERSION} with "
            f"{RECORD_BYTES:,}"
        )
    head = unpack_checked(content, 0, _HEADER)
    if head is None:
        raise refuse("its header does not match its checksum")
    _, _, _, rank, num_ranks, pid, start, signal, _, _, host, command = head
    if not (0 <= rank < num_ranks and pid > 0):
        raise refuse(f"its header names rank {rank} of {num_ranks}, process {pid}")
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
    # The ring buffer overwrites the oldest entry. Partly written entries are skipped.
    transfers = []
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
        transfers.append(kept)
    return tuple(sorted(transfers, key=lambda kept: kept.index))


_RECORD_NAME_PATTERN = re.compile(r"rank-(\d{5,9})\.record")
STACKS_TIMEOUT_S = 3.0
"""Maximum seconds to wait for the stacks of ranks."""
STACKS_IDLE_TIMEOUT_S = 0.2
"""Seconds without new output after which the stacks of ranks are complete."""
MAX_STACKS_BYTES = 1 << 18
"""Maximum bytes of stacks that are read per rank."""


@dataclass(frozen=True)
class RankProcess:
    """Record of a rank, with the state of its process."""

    path: Path
    state: RankState
    is_local: bool
    """Whether the rank's process runs, or ran, on this host."""
    is_alive: bool
    """Whether the process still exists. False for processes of other hosts."""
    blocked_reason: str
    """Description of why the process cannot run, as in `ProcessState.blocked_reason`."""
    is_stopped: bool
    """Whether a signal has stopped the process. SIGCONT continues it."""


def read_rank_records(run_dir: Path) -> dict[int, RankProcess]:
    """Read a run's rank records. Raises MesetaError if there is none, or one is invalid or of another run."""
    folder = run_dir / RANKS_FOLDER
    try:
        paths = {
            int(match[1]): folder / match[0]
            for name in os.listdir(folder)
            if (match := _RECORD_NAME_PATTERN.fullmatch(name))
        }
    except OSError:
        paths = {}
    if not paths:
        raise MesetaError(
            f"{str(run_dir)!r} has no records of ranks in {RANKS_FOLDER!r}; give the run_dir of a training on several "
            f"ranks, "
            "on a file system of its hosts"
        )
    records = {rank: _read_rank_record(path) for rank, path in sorted(paths.items())}
    sizes = {rank.state.num_ranks for rank in records.values()}
    for number, rank in records.items():
        if rank.state.rank != number or len(sizes) > 1:
            raise MesetaError(
                f"rank record {str(rank.path)!r} is of rank {rank.state.rank} of {rank.state.num_ranks}, which does "
                "not match its name or the other records; move it away"
            )
    return records


def _read_rank_record(path: Path) -> RankProcess:
    try:
        descriptor = open_regular(path, os.O_NOFOLLOW)
        try:
            state = parse_record(os.pread(descriptor, RECORD_BYTES, 0), str(path))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise MesetaError(f"rank record {str(path)!r} cannot be read: {error.strerror}; move it away") from None
    is_here = state.host == socket.gethostname()
    process = read_process_state(state.pid) if is_here else None
    if process is None or process.start_ticks != state.start_ticks or process.has_ended:
        return RankProcess(path, state, is_here, is_alive=False, blocked_reason="", is_stopped=False)
    held = blocked_text(state.pid, process)
    return RankProcess(path, state, is_here, is_alive=True, blocked_reason=held, is_stopped=process.is_stopped)


def collect_stacks(ranks: Mapping[int, RankProcess]) -> dict[int, str]:
    """Return the Python stacks of all ranks alive on this host. A stack is empty if its rank did not respond."""
    asked: dict[int, tuple[int, int]] = {}
    # `is_alive` compares start times, so the signal cannot reach another process with the same pid.
    texts = {rank: "" for rank, process in ranks.items() if process.is_alive}
    try:
        for number in texts:
            process, state = ranks[number], ranks[number].state
            if process.blocked_reason or not has_signal_handler(state.pid, state.signal):
                continue
            descriptor = open_regular(process.path, os.O_NOFOLLOW)
            asked[number] = descriptor, os.fstat(descriptor).st_size
            try:
                os.kill(state.pid, state.signal)
            except OSError:  # The process has ended, or belongs to another user.
                continue
        quiet_s = time.monotonic()
        sizes, deadline = dict[int, int](), quiet_s + STACKS_TIMEOUT_S
        while time.monotonic() < min(deadline, quiet_s + STACKS_IDLE_TIMEOUT_S) or not _all_responded(
            asked, sizes, deadline
        ):
            now = {number: os.fstat(descriptor).st_size for number, (descriptor, _) in asked.items()}
            if now != sizes:
                sizes, quiet_s = now, time.monotonic()
            time.sleep(0.02)
        for number, (descriptor, before) in asked.items():
            texts[number] = _strip_outer_frames(
                os.pread(descriptor, MAX_STACKS_BYTES, max(before, RECORD_BYTES)).decode(errors="replace")
            )
    finally:
        for descriptor, _ in asked.values():
            os.close(descriptor)
    return texts


def _strip_outer_frames(text: str) -> str:
    # Frames outside of the command are the same in all stacks.
    lines, is_outside = list[str](), False
    for line in "".join(c for c in text if c == "\n" or not has_control_characters(c)).splitlines():
        is_outside = is_outside and line.startswith("  ")
        if not is_outside:
            lines.append(line)
        is_outside = is_outside or f"{os.sep}meseta{os.sep}cli{os.sep}" in line
    return "\n".join(lines)


def _all_responded(asked: Mapping[int, tuple[int, int]], sizes: Mapping[int, int], deadline: float) -> bool:
    return time.monotonic() > deadline or all(sizes.get(number, 0) > size for number, (_, size) in asked.items())
