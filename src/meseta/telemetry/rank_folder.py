"""The records of a run's ranks, as its folder has them, and the Python stacks that its ranks are asked for."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meseta.errors import MesetaError
from meseta.machine.files import has_control_characters, open_regular
from meseta.machine.process_state import has_signal_handler, read_process_state
from meseta.machine.waits.blocked_calls import blocked_text
from meseta.telemetry.rank_record import RANKS_FOLDER, RECORD_BYTES, RankState, parse_record

_RECORD_NAME_PATTERN = re.compile(r"rank-(\d{5,9})\.record")
STACKS_TIMEOUT_S = 3.0
"""Seconds that ranks have to write their stacks."""
STACKS_IDLE_TIMEOUT_S = 0.2
"""A rank that has written nothing for so long has written them all."""
MAX_STACKS_BYTES = 1 << 18
"""The most that is read of the stacks of a rank."""


@dataclass(frozen=True)
class RankProcess:
    """A rank of a run."""

    path: Path
    state: RankState
    is_local: bool
    """Whether it is, or was, a process of this host."""
    is_alive: bool
    """Whether that process is still there."""
    blocked_reason: str
    """Why it does not run, where the system says so, ready to stand in a sentence."""
    is_stopped: bool
    """Whether that is a signal, so that the process continues at SIGCONT."""


def read_rank_records(run_dir: Path) -> dict[int, RankProcess]:
    """Those that have left a record in the folder of a run, by rank.

    Raises MesetaError where there is none, and for what is no record, or not of these ranks.
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
    found = {rank: _read_rank_record(path) for rank, path in sorted(paths.items())}
    sizes = {rank.state.num_ranks for rank in found.values()}
    for number, rank in found.items():
        if rank.state.rank != number or len(sizes) > 1:
            raise MesetaError(
                f"record of a rank {str(rank.path)!r}: it is of rank {rank.state.rank} of {rank.state.num_ranks}, and "
                "does not belong to its name or to the others; move it away"
            )
    return found


def _read_rank_record(path: Path) -> RankProcess:
    try:
        descriptor = open_regular(path, os.O_NOFOLLOW)
        try:
            state = parse_record(os.pread(descriptor, RECORD_BYTES, 0), str(path))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise MesetaError(f"record of a rank {str(path)!r}: {error.strerror}; move it away") from None
    is_here = state.host == socket.gethostname()
    process = read_process_state(state.pid) if is_here else None
    if process is None or process.start_ticks != state.start_ticks or process.has_ended:
        return RankProcess(path, state, is_here, is_alive=False, blocked_reason="", is_stopped=False)
    held = blocked_text(state.pid, process)
    return RankProcess(path, state, is_here, is_alive=True, blocked_reason=held, is_stopped=process.is_stopped)


def collect_stacks(ranks: Mapping[int, RankProcess]) -> dict[int, str]:
    """Python stacks of the threads of ranks that are alive on this host; '' of one that does not answer.

    A signal goes to a process alone that began when the record says so, and that does something of its own at it.
    """
    asked: dict[int, tuple[int, int]] = {}
    texts = {rank: "" for rank, found in ranks.items() if found.is_alive}
    try:
        for number in texts:
            found, state = ranks[number], ranks[number].state
            if found.blocked_reason or not has_signal_handler(state.pid, state.signal):
                continue
            descriptor = open_regular(found.path, os.O_NOFOLLOW)
            asked[number] = descriptor, os.fstat(descriptor).st_size
            try:
                os.kill(state.pid, state.signal)
            except OSError:  # it has ended, or is another user's
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
    """Stacks without the frames outside of the command that is run, alike in all of them."""
    lines, is_outside = list[str](), False
    for line in "".join(c for c in text if c == "\n" or not has_control_characters(c)).splitlines():
        is_outside = is_outside and line.startswith("  ")
        if not is_outside:
            lines.append(line)
        is_outside = is_outside or f"{os.sep}meseta{os.sep}cli{os.sep}" in line
    return "\n".join(lines)


def _all_responded(asked: Mapping[int, tuple[int, int]], sizes: Mapping[int, int], deadline: float) -> bool:
    """Whether every rank has begun to answer, or has had its time."""
    return time.monotonic() > deadline or all(sizes.get(number, 0) > size for number, (_, size) in asked.items())
