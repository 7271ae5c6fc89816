"""From the records of all ranks to the one that keeps the others waiting, and why.

    silent    its heart has not beaten for heartbeat_timeout_s: it does not run
    astray    it is at another transfer than the others are, at the same place of a lane
    stuck     for stall_timeout_s a rank has waited for one transfer, or is in one stage of a step

Only ranks are compared that have a record; a transfer that is not kept any more is not judged.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from meseta.machine.process_state import read_process_state
from meseta.machine.time_limits import TimeLimits
from meseta.machine.waits.blocked_calls import blocked_text
from meseta.telemetry.formatting import format_duration
from meseta.telemetry.rank_record import RankState, RecordedTransfer, Wait

RankStates = Mapping[int, RankState]
"""By rank."""
DIVERGENCE_GRACE_S = 3.0
"""How long ranks are left alone that are at different transfers."""
MISSED_HEARTBEAT_TIMEOUT_S = 3.0
"""A heart that has not beaten for so long has missed beats: the system is slow, or the rank does not run."""
BACKGROUND_LANE = "background"
"""Lane of a thread beside the one that trains."""
_NS = 1e9
_SAME_ORDER_RULE = "every rank must take the same transfers, of the same types and lengths, in the same order"


@dataclass(frozen=True)
class Diagnosis:
    """Why a run does not go on."""

    kind: Literal["silent", "astray", "stuck"]
    ranks: tuple[int, ...]
    """Those to blame."""
    text: str
    """In one line, without what is done about it."""
    sequence_number: int | None = None
    """Number in its lane of the transfer that ranks are at other ones than; `None` unless they are astray."""

    @property
    def identity(self) -> tuple[object, ...]:
        """Value that stays the same while the trouble lasts, unlike the text."""
        return (self.kind, self.ranks, self.sequence_number)


class DivergenceGracePeriod:
    """Ranks that are astray are given the time to say so themselves, which most do within milliseconds."""

    def __init__(self) -> None:
        self._identity: tuple[object, ...] | None = None
        self._since_s = 0.0

    def filter_diagnosis(self, trouble: Diagnosis | None, now_s: float) -> Diagnosis | None:
        """What is to be told of what was found now."""
        if trouble is None or trouble.kind != "astray":
            self._identity = None
            return trouble
        if trouble.identity != self._identity:
            self._identity, self._since_s = trouble.identity, now_s
        return trouble if now_s - self._since_s >= DIVERGENCE_GRACE_S else None


def find_unresponsive(states: RankStates, silent: Mapping[int, float], heartbeat_timeout_s: float) -> Diagnosis | None:
    """The rank whose heart has not beaten for longest, of those for which that is longer than `heartbeat_timeout_s`;
    `silent` holds the seconds of each."""
    rank = max(silent, key=lambda r: silent[r], default=None)
    if rank is None or silent[rank] <= heartbeat_timeout_s:
        return None
    return Diagnosis("silent", (rank,), _unresponsive_text(states, rank, silent[rank]))


def find_diverged(states: RankStates) -> Diagnosis | None:
    """Ranks that are at another transfer than most are, at the first place of a lane where they differ, or have been
    before; else ranks that wait for each other in a circle."""
    kept: dict[tuple[int, int], dict[int, RecordedTransfer]] = {}
    for rank, state in states.items():
        for transfer in state.transfers:
            kept.setdefault((transfer.lane, transfer.sequence_number), {})[rank] = transfer
    parted = [by_rank for _, by_rank in sorted(kept.items()) if len({t.history_hash for t in by_rank.values()}) > 1]
    by_rank = next((b for b in parted if len({t.signature for t in b.values()}) > 1), parted[0] if parted else None)
    if by_rank is None:
        return _find_wait_cycle(states)
    usual = Counter(transfer.history_hash for transfer in by_rank.values()).most_common(1)[0][0]
    others = [rank for rank, transfer in by_rank.items() if transfer.history_hash == usual]
    blamed = tuple(rank for rank in by_rank if rank not in others)
    text = _diverged_text(states, by_rank, blamed[0], others)
    return Diagnosis("astray", blamed, text, sequence_number=by_rank[blamed[0]].sequence_number)


def _find_wait_cycle(states: RankStates) -> Diagnosis | None:
    """Ranks of which each waits for a transfer that the next one has not begun, since it waits, too. Transfers of other
    threads than the main one do not count: the rank that waits for one goes on."""
    waits = {rank: wait for rank, state in states.items() for wait in [_main_wait(state)] if wait is not None}
    behind = {r: [o for o in _ranks_behind(states, r, wait) if o in waits] for r, wait in waits.items()}
    while True:  # those that wait for ranks which are not in a circle, or which nobody in one waits for, are left out
        awaited = {o for others in behind.values() for o in others}
        left = {r: [o for o in others if o in behind] for r, others in behind.items() if r in awaited}
        left = {r: others for r, others in left.items() if others}
        if left == behind:
            break
        behind = left
    if not behind:
        return None
    counts = Counter((waits[rank].lane, waits[rank].sequence_number) for rank in behind)
    usual = max(sorted(counts), key=lambda at: counts[at])
    blamed = tuple(r for r in sorted(behind) if (waits[r].lane, waits[r].sequence_number) != usual) or tuple(
        sorted(behind)
    )
    rank = blamed[-1]
    text = (
        f"{describe_rank(states, rank)} is at {describe_position(states[rank])}{_transfer_clause(states[rank])}, "
        f"number {waits[rank].sequence_number} of its "
        f"lane, which others do not begin before it comes to theirs{_waiting_clause(states, (rank,))}; "
        f"{_SAME_ORDER_RULE}"
    )
    return Diagnosis("astray", blamed, text, sequence_number=waits[rank].sequence_number)


def find_unreachable_hosts(
    states: RankStates, silent: Mapping[int, float], own: int, heartbeat_timeout_s: float
) -> Diagnosis | None:
    """Hosts of which this one, that of rank `own`, hears no rank any more; `silent` holds the seconds of each other
    rank. Where the hosts have one rank each, a rank that is stopped looks the same as a link that is cut."""
    hosts: dict[str, list[int]] = {}
    for rank in silent:
        hosts.setdefault(states[rank].host, []).append(rank)
    here = hosts.pop(states[own].host, None)
    # Beats come once a second, so that of one cut some hosts are heard for a little longer than others.
    nearly_s = max(heartbeat_timeout_s - MISSED_HEARTBEAT_TIMEOUT_S, heartbeat_timeout_s / 2)
    unheard = {host: ranks for host, ranks in hosts.items() if min(silent[rank] for rank in ranks) > nearly_s}
    is_told = any(
        max(silent[rank] for rank in ranks) > heartbeat_timeout_s and (len(ranks) > 1 or here is None)
        for ranks in unheard.values()
    )
    if not is_told:
        return None
    blamed = [rank for ranks in unheard.values() for rank in ranks]
    longest_s, first = max(silent[rank] for rank in blamed), states[blamed[0]]
    listed = " and ".join(f"ranks {', '.join(map(str, ranks))} on {host}" for host, ranks in unheard.items())
    text = (
        f"rank {own} on {states[own].host} has not heard {listed} for {format_duration(longest_s)}; rank {blamed[0]} "
        f"was at "
        f"{describe_position(first)}{_transfer_clause(first)}{_waiting_clause(states, blamed)}; the link between "
        f"{states[own].host} and "
        f"{' and '.join(unheard)} is cut, or nothing runs there"
    )
    return Diagnosis("silent", tuple(blamed), text)


def find_stuck(states: RankStates, now_ns: int | None, after_s: float) -> Diagnosis | None:
    """What keeps ranks waiting for one transfer, or a rank in one stage of a step, for longer than `after_s`. Without
    `now_ns`, of ranks of several hosts, each is asked up to its last heartbeat."""
    until = {rank: state.heartbeat_ns if now_ns is None else now_ns for rank, state in states.items()}
    waits = {rank: wait for rank, state in states.items() for wait in [_longest_wait(state)] if wait is not None}
    waited = {rank: (until[rank] - wait.since_ns) / _NS for rank, wait in waits.items()}
    waiting = [rank for rank, seconds in waited.items() if seconds > after_s]
    if waiting:
        first = max(waiting, key=lambda rank: waited[rank])
        blamed = _late_ranks(states, first, waits[first]) or (first,)
        return Diagnosis("stuck", blamed, _stuck_text(states, blamed, waits, waited[first]))
    idle = {r: (until[r] - s.last_progress_ns) / _NS for r, s in states.items() if s.stage and not s.waits}
    slow = [rank for rank, seconds in idle.items() if seconds > after_s]
    if slow and len(states) > 1:
        rank = max(slow, key=lambda r: idle[r])
        text = (
            f"{describe_rank(states, rank)} has been at {describe_position(states[rank])} for "
            f"{format_duration(idle[rank])}"
        )
        return Diagnosis("stuck", (rank,), text)
    return None


def diagnose_exit(states: RankStates) -> Diagnosis | None:
    """What has ended ranks of which none is there any more, as far as their records tell: the one whose heart stopped
    before those of the others, or that was astray, or that others waited for."""
    last_ns = max(max(state.heartbeat_ns, state.last_progress_ns) for state in states.values())
    silent = {rank: (last_ns - state.heartbeat_ns) / _NS for rank, state in states.items()}
    return (
        find_unresponsive(states, silent, MISSED_HEARTBEAT_TIMEOUT_S)
        or find_diverged(states)
        or find_stuck(states, last_ns, MISSED_HEARTBEAT_TIMEOUT_S)
    )


def describe_state(state: RankState, now_ns: int | None) -> str:
    """Where a rank is, and what it waits for, with how long where its clock is known."""
    since = "" if now_ns is None else f", for {format_duration((now_ns - state.last_progress_ns) / _NS)}"
    return f"{describe_position(state)}{_transfer_clause(state)}{since}"


def diagnose(
    states: RankStates, silent: Mapping[int, float], now_ns: int | None, limits: TimeLimits
) -> Diagnosis | None:
    """The first of these, in the order of this page."""
    return (
        find_unresponsive(states, silent, limits.heartbeat_timeout_s)
        or find_diverged(states)
        or find_stuck(states, now_ns, limits.stall_timeout_s)
    )


def describe_rank(states: RankStates, rank: int) -> str:
    """Rank, host and process."""
    state = states.get(rank)
    return f"rank {rank}" if state is None else f"rank {rank} on {state.host} (process {state.pid})"


def describe_position(state: RankState) -> str:
    """Step and stage."""
    if not state.stage:
        last = next((kept.step for kept in reversed(state.transfers) if kept.step is not None), None)
        return "the beginning of its run" if last is None else f"a place after step {last}, outside of its stages"
    return f"step {state.step}, stage {state.stage}"


def awaited_transfer(state: RankState, wait: Wait) -> RecordedTransfer | None:
    """What it waits for."""
    return state.find_transfer(wait.lane, wait.sequence_number)


def describe_waiting_ranks(states: RankStates, blamed: Iterable[int]) -> str:
    """Which other ranks wait, and for what; '' where none does."""
    by_transfer: dict[str, list[int]] = {}
    left_out = set(blamed)
    for rank, state in sorted(states.items()):
        wait = _longest_wait(state)
        transfer = None if wait is None else awaited_transfer(state, wait)
        if transfer is not None and rank not in left_out:
            by_transfer.setdefault(transfer.describe(), []).append(rank)
    return ", ".join(f"{format_waiting_ranks(ranks)} for {shown}" for shown, ranks in by_transfer.items())


def format_waiting_ranks(ranks: Sequence[int]) -> str:
    """rank 3 waits; ranks 0, 1, 2 wait."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} waits"
    listed = ", ".join(map(str, ranks[:8])) + f" and {len(ranks) - 8} more" * (len(ranks) > 8)
    return f"ranks {listed} wait"


def _longest_wait(state: RankState) -> Wait | None:
    return min(state.waits.values(), key=lambda wait: wait.since_ns, default=None)


def _main_wait(state: RankState) -> Wait | None:
    """Of the thread that trains."""
    waits = [wait for wait in state.waits.values() if _lane_name(state, wait) != BACKGROUND_LANE]
    return min(waits, key=lambda wait: wait.since_ns, default=None)


def _lane_name(state: RankState, wait: Wait) -> str:
    transfer = awaited_transfer(state, wait)
    return BACKGROUND_LANE if transfer is None else transfer.lane_name


def _ranks_behind(states: RankStates, rank: int, wait: Wait) -> list[int]:
    """The other ranks that take part in what a rank waits for, and have not begun it."""
    transfer = awaited_transfer(states[rank], wait)
    others = [r for r in states if r != rank and (transfer is None or transfer.includes_rank(r))]
    return [r for r in others if states[r].num_started(wait.lane) < wait.sequence_number]


def _late_ranks(states: RankStates, rank: int, wait: Wait) -> tuple[int, ...]:
    """The ranks that another one waits for: those that have not begun its transfer; else those that have not come to
    wait for it, and stand still for nothing else."""
    behind = _ranks_behind(states, rank, wait)
    free = [r for r in behind or states if r != rank and not states[r].waits]
    return tuple(free or behind)


def _unresponsive_text(states: RankStates, rank: int, seconds: float) -> str:
    state = states.get(rank)
    if state is None:
        return f"rank {rank} has not begun to run within {format_duration(seconds)}"
    process = read_process_state(state.pid) if state.host == socket.gethostname() else None
    held = blocked_text(state.pid, process) if process is not None and process.start_ticks == state.start_ticks else ""
    text = (
        f"{describe_rank(states, rank)} has been silent for {format_duration(seconds)}{f', {held}' * bool(held)}, "
        f"at {describe_position(state)}"
    )
    return text + _transfer_clause(state) + _waiting_clause(states, (rank,))


def _transfer_clause(state: RankState) -> str:
    """The transfer that it waits for, or has begun last."""
    wait = _longest_wait(state)
    transfer = None if wait is None else awaited_transfer(state, wait)
    if transfer is not None:
        return f", waiting for {transfer.describe()}"
    return f", after it began {state.transfers[-1].describe()}" if state.transfers else ""


def _waiting_clause(states: RankStates, blamed: Sequence[int]) -> str:
    waiting = describe_waiting_ranks(states, blamed)
    return f"; {waiting}" if waiting else ""


def _diverged_text(
    states: RankStates, by_rank: Mapping[int, RecordedTransfer], blamed: int, others: Sequence[int]
) -> str:
    mine, its = by_rank[blamed], by_rank[others[0]]
    rest = f"rank{'s' * (len(others) > 1)} {', '.join(map(str, others[:8]))}{' and others' * (len(others) > 8)}"
    at = f"{describe_rank(states, blamed)} is at {describe_position(states[blamed])}"
    if mine.signature == its.signature:
        where = (
            f"and has taken other transfers of lane {mine.lane_name} than {rest} before its number "
            f"{mine.sequence_number}"
        )
    else:
        where = (
            f"where transfer {mine.sequence_number} of lane {mine.lane_name} is {mine.describe_signature()}, and on "
            f"{rest} "
            f"{its.describe_signature()}"
        )
    return f"{at}, {where}{_waiting_clause(states, (blamed,))}; {_SAME_ORDER_RULE}"


def _stuck_text(states: RankStates, blamed: Sequence[int], waits: Mapping[int, Wait], seconds: float) -> str:
    rank = blamed[0]
    if rank not in waits:
        text = (
            f"{describe_rank(states, rank)} has kept others waiting for {format_duration(seconds)}, at "
            f"{describe_position(states[rank])}"
        )
    else:
        text = (
            f"{describe_rank(states, rank)} has been stuck for {format_duration(seconds)}, at "
            f"{describe_position(states[rank])}"
        )
    more = f", and so {'has rank' if len(blamed) == 2 else 'have ranks'} {', '.join(map(str, blamed[1:9]))}"
    return text + _transfer_clause(states[rank]) + more * (len(blamed) > 1) + _waiting_clause(states, blamed)
