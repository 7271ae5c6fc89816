"""Rank records in the folder of a run, and collection of Python stacks from its ranks."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meseta.errors import MesetaError
from meseta.system.files import has_control_characters, open_regular
from meseta.system.process_state import has_signal_handler, read_process_state
from meseta.system.waits.blocked_calls import blocked_text
from meseta.telemetry.rank_record import RANKS_FOLDER, RECORD_BYTES, RankState, parse_record

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
    """Read the rank records in the folder of a run, by rank.

    Raises MesetaError if there are none, or if a record is invalid or belongs to another run.
    """
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
    """Return the Python stacks of all ranks that are alive on this host. A stack is empty if its rank did not respond.

    Ranks write their stacks after a signal. Only processes with a handler for this signal receive it.
    """
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
