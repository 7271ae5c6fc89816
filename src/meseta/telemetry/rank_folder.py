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
from meseta.machine.files import has_controls, open_regular
from meseta.machine.process_state import catches, state_of
from meseta.machine.waits.blocked_calls import held_text
from meseta.telemetry.rank_record import FOLDER, SIZE, RankState, read_state

_NAME = re.compile(r"rank-(\d{5,9})\.record")
STACKS_S = 3.0
"""Seconds that ranks have to write their stacks."""
QUIET_S = 0.2
"""A rank that has written nothing for so long has written them all."""
STACKS_BYTES = 1 << 18
"""The most that is read of the stacks of a rank."""


@dataclass(frozen=True)
class FoundRank:
    """A rank of a run."""

    path: Path
    state: RankState
    is_here: bool
    """Whether it is, or was, a process of this host."""
    is_alive: bool
    """Whether that process is still there."""
    held: str
    """Why it does not run, where the system says so, ready to stand in a sentence."""
    is_stopped: bool
    """Whether that is a signal, so that the process continues at SIGCONT."""


def find_ranks(run_dir: Path) -> dict[int, FoundRank]:
    """Those that have left a record in the folder of a run, by rank.

    Raises MesetaError where there is none, and for what is no record, or not of these ranks.
    """
    folder = run_dir / FOLDER
    try:
        paths = {int(match[1]): folder / match[0] for name in os.listdir(folder) if (match := _NAME.fullmatch(name))}
    except OSError:
        paths = {}
    if not paths:
        raise MesetaError(
            f"{str(run_dir)!r} has no records of ranks in {FOLDER!r}; give the run_dir of a training on several ranks, "
            "on a file system of its hosts"
        )
    found = {rank: _find_rank(path) for rank, path in sorted(paths.items())}
    sizes = {rank.state.num_ranks for rank in found.values()}
    for number, rank in found.items():
        if rank.state.rank != number or len(sizes) > 1:
            raise MesetaError(
                f"record of a rank {str(rank.path)!r}: it is of rank {rank.state.rank} of {rank.state.num_ranks}, and "
                "does not belong to its name or to the others; move it away"
            )
    return found


def _find_rank(path: Path) -> FoundRank:
    try:
        descriptor = open_regular(path, os.O_NOFOLLOW)
        try:
            state = read_state(os.pread(descriptor, SIZE, 0), str(path))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise MesetaError(f"record of a rank {str(path)!r}: {error.strerror}; move it away") from None
    is_here = state.host == socket.gethostname()
    process = state_of(state.pid) if is_here else None
    if process is None or process.start != state.start or process.has_ended:
        return FoundRank(path, state, is_here, is_alive=False, held="", is_stopped=False)
    held = held_text(state.pid, process)
    return FoundRank(path, state, is_here, is_alive=True, held=held, is_stopped=process.is_stopped)


def ask_for_stacks(ranks: Mapping[int, FoundRank]) -> dict[int, str]:
    """Python stacks of the threads of ranks that are alive on this host; '' of one that does not answer.

    A signal goes to a process alone that began when the record says so, and that does something of its own at it.
    """
    asked: dict[int, tuple[int, int]] = {}
    texts = {rank: "" for rank, found in ranks.items() if found.is_alive}
    try:
        for number in texts:
            found, state = ranks[number], ranks[number].state
            if found.held or not catches(state.pid, state.signal):
                continue
            descriptor = open_regular(found.path, os.O_NOFOLLOW)
            asked[number] = descriptor, os.fstat(descriptor).st_size
            try:
                os.kill(state.pid, state.signal)
            except OSError:  # it has ended, or is another user's
                continue
        quiet_s = time.monotonic()
        sizes, deadline = dict[int, int](), quiet_s + STACKS_S
        while time.monotonic() < min(deadline, quiet_s + QUIET_S) or not _all_grew(asked, sizes, deadline):
            now = {number: os.fstat(descriptor).st_size for number, (descriptor, _) in asked.items()}
            if now != sizes:
                sizes, quiet_s = now, time.monotonic()
            time.sleep(0.02)
        for number, (descriptor, before) in asked.items():
            texts[number] = _inside(os.pread(descriptor, STACKS_BYTES, max(before, SIZE)).decode(errors="replace"))
    finally:
        for descriptor, _ in asked.values():
            os.close(descriptor)
    return texts


def _inside(text: str) -> str:
    """Stacks without the frames outside of the command that is run, alike in all of them."""
    lines, is_outside = list[str](), False
    for line in "".join(c for c in text if c == "\n" or not has_controls(c)).splitlines():
        is_outside = is_outside and line.startswith("  ")
        if not is_outside:
            lines.append(line)
        is_outside = is_outside or f"{os.sep}meseta{os.sep}cli{os.sep}" in line
    return "\n".join(lines)


def _all_grew(asked: Mapping[int, tuple[int, int]], sizes: Mapping[int, int], deadline: float) -> bool:
    """Whether every rank has begun to answer, or has had its time."""
    return time.monotonic() > deadline or all(sizes.get(number, 0) > size for number, (_, size) in asked.items())
