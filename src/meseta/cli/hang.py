"""`meseta hang RUN`: where the ranks of a run are, which one the others wait for, and their Python stacks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from meseta.machine.time_limits import HUNG
from meseta.telemetry.diagnosis import MISSED_S, Trouble, find_astray, find_end, find_silent, find_stuck, told
from meseta.telemetry.rank_folder import FoundRank, ask_for_stacks, find_ranks

LOOK_S = 1.5
"""Between two looks at the records, in which every heart beats."""
STUCK_S = 5.0
"""A rank that has waited so long for one transfer is told as stuck; most take milliseconds."""


def hang(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a training run on several ranks.")],
    stacks: Annotated[bool, typer.Option(help="Ask ranks of this host for their Python stacks.")] = True,
) -> None:
    """Say where each rank of a run is and which one the others wait for, of a run at work, stuck or ended. Exit code 76
    where it is stuck."""
    find_ranks(run_dir)
    time.sleep(LOOK_S)
    ranks = find_ranks(run_dir)
    now_ns = time.monotonic_ns()
    trouble, how = _trouble(ranks, now_ns)
    state = next(iter(ranks.values())).state
    absent = f", of which {len(ranks)} have a record" if len(ranks) != state.num_ranks else ""
    print(f"{run_dir}: {state.num_ranks} ranks of `{state.command}`{absent}, {how}")
    for number, rank in ranks.items():
        print(f"rank {number} on {rank.state.host}, process {rank.state.pid}: {_line(rank, now_ns)}")
    if trouble is not None:
        print(f"{trouble.kind}: {trouble.text}")
    for number, text in (ask_for_stacks(ranks) if stacks else {}).items():
        print(f"\nstacks of rank {number}:" if text else f"\nno stacks of rank {number}: {_why(ranks[number])}")
        if text:
            print(text.rstrip())
    raise typer.Exit(HUNG if how == "stuck" else 0)


def _trouble(ranks: Mapping[int, FoundRank], now_ns: int) -> tuple[Trouble | None, str]:
    """(what is wrong, how the run is)."""
    alive = {number: rank.state for number, rank in ranks.items() if rank.is_alive}
    if not any(rank.is_here for rank in ranks.values()):
        return None, "on other hosts: ask there"
    if not alive:
        return find_end({number: rank.state for number, rank in ranks.items() if rank.is_here}), "ended"
    silent = {number: (now_ns - state.beat_ns) / 1e9 for number, state in alive.items()}
    trouble = find_silent(alive, silent, MISSED_S) or find_astray(alive) or find_stuck(alive, now_ns, STUCK_S)
    return trouble, "at work" if trouble is None else "stuck"


def _line(rank: FoundRank, now_ns: int) -> str:
    """Where a rank is."""
    if not rank.is_here:
        return told(rank.state, None)
    if not rank.is_alive:
        return f"ended, last at {told(rank.state, None)}"
    beat = f"heartbeat {max((now_ns - rank.state.beat_ns) / 1e9, 0.0):.1f} s ago"
    return f"{told(rank.state, now_ns)}; {rank.held or beat}"


def _why(rank: FoundRank) -> str:
    """A rank that is alive has not written its stacks."""
    if rank.held:
        way = f"; `kill -CONT {rank.state.pid}` lets it go on" if rank.is_stopped else ""
        return f"it is {rank.held}, and cannot answer{way}"
    return "it does not answer; it may be another user's, or have no turn of the processor"
