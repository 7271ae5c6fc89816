"""Diagnosis of a run that does not progress, from the records of its ranks."""

# kind     condition
# silent   no heartbeat of the rank for heartbeat_timeout_s seconds
# astray   the rank has diverged: its transfer differs from that of its peers at the same position of a lane
# stuck    for stall_timeout_s seconds a rank has waited for one transfer, or has been in one stage of a step
#
# Ranks without a record are not compared, and neither are transfers that have left the record.

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from meseta.system.processes import read_process_state
from meseta.system.time_limits import TimeLimits
from meseta.system.waits import blocked_text
from meseta.telemetry.formatting import format_duration
from meseta.telemetry.rank_record import RankState, RecordedTransfer, Wait

RankStates = Mapping[int, RankState]
# Most diverged ranks raise an error themselves within milliseconds.
DIVERGENCE_GRACE_S = 3.0
"""Seconds before a divergence is reported."""
MISSED_HEARTBEAT_TIMEOUT_S = 3.0
"""Seconds without a heartbeat after which at least one heartbeat is missing."""
BACKGROUND_LANE = "background"
"""Lane of a background thread, which does not block training."""
_NS = 1e9
_SAME_ORDER_RULE = "every rank must take the same transfers, of the same types and lengths, in the same order"


@dataclass(frozen=True)
class Diagnosis:
    """Reason why a run does not progress."""

    kind: Literal["silent", "astray", "stuck"]
    ranks: tuple[int, ...]
    text: str
    """Description in one line, without a remedy."""
    sequence_number: int | None = None
    """Position in the lane at which ranks diverged. `None` for other kinds."""

    @property
    def identity(self) -> tuple[object, ...]:
        """Value that is equal in successive diagnoses of the same problem. The text changes with time."""
        return (self.kind, self.ranks, self.sequence_number)


class DivergenceGracePeriod:
    """Filter that delays the report of a divergence, so that the ranks can raise an error themselves."""

    def __init__(self) -> None:
        self._identity: tuple[object, ...] | None = None
        self._since_s = 0.0

    def filter_diagnosis(self, trouble: Diagnosis | None, now_s: float) -> Diagnosis | None:
        """Return the diagnosis to report at time `now_s`, or `None` for a divergence within the grace period."""
        if trouble is None or trouble.kind != "astray":
            self._identity = None
            return trouble
        if trouble.identity != self._identity:
            self._identity, self._since_s = trouble.identity, now_s
        return trouble if now_s - self._since_s >= DIVERGENCE_GRACE_S else None


def find_unresponsive(states: RankStates, silent: Mapping[int, float], heartbeat_timeout_s: float) -> Diagnosis | None:
    """Return a diagnosis of the rank with the oldest heartbeat.

    Returns `None` if no heartbeat is older than `heartbeat_timeout_s`. `silent` maps each rank to the seconds since
    its last heartbeat.
    """
    rank = max(silent, key=lambda r: silent[r], default=None)
    if rank is None or silent[rank] <= heartbeat_timeout_s:
        return None
    return Diagnosis("silent", (rank,), _unresponsive_text(states, rank, silent[rank]))


def find_diverged(states: RankStates) -> Diagnosis | None:
    """Return a diagnosis of diverged ranks, or of ranks that wait for each other in a cycle, or `None`.

    The diverged ranks are the minority at the first recorded position of a lane where transfers differ.
    """
    # If only earlier transfers differed, their hashes reveal it.
    kept: dict[tuple[int, int], dict[int, RecordedTransfer]] = {}
    for rank, state in states.items():
        for transfer in state.transfers:
            kept.setdefault((transfer.lane, transfer.sequence_number), {})[rank] = transfer
    parted = [by_rank for _, by_rank in sorted(kept.items()) if len({t.history_hash for t in by_rank.values()}) > 1]
    by_rank = next((b for b in parted if len({t.signature for t in b.values()}) > 1), parted[0] if parted else None)
    if by_rank is None:
        return _find_wait_cycle(states)
    usual = Counter(transfer.history_hash for transfer in by_rank.values()).most_common(1)[0][0]
    majority = [rank for rank, transfer in by_rank.items() if transfer.history_hash == usual]
    blamed = tuple(rank for rank in by_rank if rank not in majority)
    text = _diverged_text(states, by_rank, blamed[0], majority)
    return Diagnosis("astray", blamed, text, sequence_number=by_rank[blamed[0]].sequence_number)


def _find_wait_cycle(states: RankStates) -> Diagnosis | None:
    """Find ranks of which each waits for a transfer that the next one, also waiting, has not started."""
    # Background threads are ignored, because their rank continues while they wait.
    waits = {rank: wait for rank, state in states.items() for wait in [_main_wait(state)] if wait is not None}
    behind = {r: [o for o in _ranks_behind(states, r, wait) if o in waits] for r, wait in waits.items()}
    # Repeatedly remove ranks for which no remaining rank waits, or that wait for no remaining rank.
    while True:
        awaited = {o for peers in behind.values() for o in peers}
        left = {r: [o for o in peers if o in behind] for r, peers in behind.items() if r in awaited}
        left = {r: peers for r, peers in left.items() if peers}
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
        f"lane, which its peers start only after it has started theirs{_waiting_clause(states, (rank,))}; "
        f"{_SAME_ORDER_RULE}"
    )
    return Diagnosis("astray", blamed, text, sequence_number=waits[rank].sequence_number)


def find_unreachable_hosts(
    states: RankStates, silent: Mapping[int, float], observer: int, heartbeat_timeout_s: float
) -> Diagnosis | None:
    """Return a diagnosis of hosts from whose ranks the host of rank `observer` receives no heartbeats, or `None`.

    `silent` maps each other rank to the seconds since its last heartbeat.
    """
    # If hosts have a single rank, a stopped rank cannot be distinguished from a failed link.
    hosts: dict[str, list[int]] = {}
    for rank in silent:
        hosts.setdefault(states[rank].host, []).append(rank)
    here = hosts.pop(states[observer].host, None)
    # Heartbeats are sent once per second, so hosts behind the same failed link time out at slightly different moments.
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
        f"rank {observer} on {states[observer].host} has not heard {listed} for "
        f"{format_duration(longest_s)}; rank {blamed[0]} was at "
        f"{describe_position(first)}{_transfer_clause(first)}{_waiting_clause(states, blamed)}; the link between "
        f"{states[observer].host} and {' and '.join(unheard)} is cut, or nothing runs there"
    )
    return Diagnosis("silent", tuple(blamed), text)


def find_stuck(states: RankStates, now_ns: int | None, after_s: float) -> Diagnosis | None:
    """Return a diagnosis of ranks that have been in one transfer or stage for longer than `after_s`, or `None`.

    Without `now_ns`, waits are measured up to the last heartbeat of each rank, because hosts have different clocks.
    """
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
    """Return a diagnosis of why all ranks have ended, from their records.

    The cause is a rank whose heartbeats stopped first, a diverged rank, or one that others waited for. `None` if the
    records do not show a cause.
    """
    last_ns = max(max(state.heartbeat_ns, state.last_progress_ns) for state in states.values())
    silent = {rank: (last_ns - state.heartbeat_ns) / _NS for rank, state in states.items()}
    return (
        find_unresponsive(states, silent, MISSED_HEARTBEAT_TIMEOUT_S)
        or find_diverged(states)
        or find_stuck(states, last_ns, MISSED_HEARTBEAT_TIMEOUT_S)
    )


def describe_state(state: RankState, now_ns: int | None) -> str:
    """Describe the position of a rank and its current wait. The duration is included if `now_ns` is given."""
    since = "" if now_ns is None else f", for {format_duration((now_ns - state.last_progress_ns) / _NS)}"
    return f"{describe_position(state)}{_transfer_clause(state)}{since}"


def diagnose(
    states: RankStates, silent: Mapping[int, float], now_ns: int | None, limits: TimeLimits
) -> Diagnosis | None:
    """Return the first diagnosis of an unresponsive, diverged or stuck rank, or `None`."""
    return (
        find_unresponsive(states, silent, limits.heartbeat_timeout_s)
        or find_diverged(states)
        or find_stuck(states, now_ns, limits.stall_timeout_s)
    )


def describe_rank(states: RankStates, rank: int) -> str:
    """Describe a rank with its host and process, if it has a record."""
    state = states.get(rank)
    return f"rank {rank}" if state is None else f"rank {rank} on {state.host} (process {state.pid})"


def describe_position(state: RankState) -> str:
    """Describe the step and stage of a rank."""
    if not state.stage:
        last = next((kept.step for kept in reversed(state.transfers) if kept.step is not None), None)
        return "the beginning of its run" if last is None else f"a place after step {last}, outside of its stages"
    return f"step {state.step}, stage {state.stage}"


def awaited_transfer(state: RankState, wait: Wait) -> RecordedTransfer | None:
    """Return the transfer of a wait, or `None` if it has left the record."""
    return state.find_transfer(wait.lane, wait.sequence_number)


def describe_waiting_ranks(states: RankStates, blamed: Iterable[int]) -> str:
    """Describe the waits of ranks that are not in `blamed`. The text is empty if none of them waits."""
    by_transfer: dict[str, list[int]] = {}
    left_out = set(blamed)
    for rank, state in sorted(states.items()):
        wait = _longest_wait(state)
        transfer = None if wait is None else awaited_transfer(state, wait)
        if transfer is not None and rank not in left_out:
            by_transfer.setdefault(transfer.describe(), []).append(rank)
    return ", ".join(f"{format_waiting_ranks(ranks)} for {shown}" for shown, ranks in by_transfer.items())


def format_waiting_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as "rank 3 waits" or "ranks 0, 1, 2 wait"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} waits"
    listed = ", ".join(map(str, ranks[:8])) + f" and {len(ranks) - 8} more" * (len(ranks) > 8)
    return f"ranks {listed} wait"


def _longest_wait(state: RankState) -> Wait | None:
    return min(state.waits.values(), key=lambda wait: wait.since_ns, default=None)


def _main_wait(state: RankState) -> Wait | None:
    # Only waits of the training thread.
    waits = [wait for wait in state.waits.values() if _lane_name(state, wait) != BACKGROUND_LANE]
    return min(waits, key=lambda wait: wait.since_ns, default=None)


def _lane_name(state: RankState, wait: Wait) -> str:
    transfer = awaited_transfer(state, wait)
    return BACKGROUND_LANE if transfer is None else transfer.lane_name


def _ranks_behind(states: RankStates, rank: int, wait: Wait) -> list[int]:
    transfer = awaited_transfer(states[rank], wait)
    peers = [r for r in states if r != rank and (transfer is None or transfer.includes_rank(r))]
    return [r for r in peers if states[r].num_started(wait.lane) < wait.sequence_number]


def _late_ranks(states: RankStates, rank: int, wait: Wait) -> tuple[int, ...]:
    """Return the participants that have not started the transfer of `rank`, or all other ranks if all have."""
    # Ranks that do not wait themselves are preferred.
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
    wait = _longest_wait(state)
    transfer = None if wait is None else awaited_transfer(state, wait)
    if transfer is not None:
        return f", waiting for {transfer.describe()}"
    return f", after it began {state.transfers[-1].describe()}" if state.transfers else ""


def _waiting_clause(states: RankStates, blamed: Sequence[int]) -> str:
    waiting = describe_waiting_ranks(states, blamed)
    return f"; {waiting}" if waiting else ""


def _diverged_text(
    states: RankStates, by_rank: Mapping[int, RecordedTransfer], blamed: int, majority: Sequence[int]
) -> str:
    diverged, usual = by_rank[blamed], by_rank[majority[0]]
    rest = f"rank{'s' * (len(majority) > 1)} {', '.join(map(str, majority[:8]))}{' and others' * (len(majority) > 8)}"
    at = f"{describe_rank(states, blamed)} is at {describe_position(states[blamed])}"
    if diverged.signature == usual.signature:
        where = (
            f"and has taken other transfers of lane {diverged.lane_name} than {rest} before its number "
            f"{diverged.sequence_number}"
        )
    else:
        where = (
            f"where transfer {diverged.sequence_number} of lane {diverged.lane_name} is "
            f"{diverged.describe_signature()}, and on "
            f"{rest} "
            f"{usual.describe_signature()}"
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
