"""Ranks that no launcher watches, as those of torchrun, watch each other: records travel over the store where they met.

    thread "exchange"    puts this rank's record into the store and takes those of the others, about once a second
    thread "judge"       looks at what came last, and at whether the first one still gets through

The first may stand still where a link is cut; the second one then says so. A rank that finds something wrong says it in
one line and ends its process: its main thread may wait where no error reaches it. All do so within seconds.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from meseta.comm.timeouts import ProcessTimeouts
from meseta.comm.world import World
from meseta.errors import ERROR_PREFIX, MesetaError, error_summary
from meseta.machine.environment_variables import environ
from meseta.machine.processes import exit_immediately
from meseta.machine.rendezvous import RENDEZVOUS_VARIABLE as RENDEZVOUS
from meseta.machine.time_limits import HANG_EXIT_CODE, TimeLimits
from meseta.telemetry.diagnosis import (
    Diagnosis,
    DivergenceGracePeriod,
    describe_rank,
    diagnose,
    find_unreachable_hosts,
    find_unresponsive,
)
from meseta.telemetry.heartbeats import HeartbeatMonitor
from meseta.telemetry.rank_record import RECORD_BYTES, CurrentRankRecord, RankRecord, RankState, parse_record

POLL_INTERVAL_S = 1.0
"""Between two looks."""
MAX_RECORDS_PER_S = 16
"""Records that a rank takes from the store in a second; where there are more ranks, it looks less often."""
STORE_RANK = -1
"""In the place of a rank: the store."""
STORE_SILENCE_SHARE = 0.75
"""Of the longest silence: where nothing has come from the store for nearly as long, it is the store's."""
STORE_TIMEOUT_S = 10.0
"""How long the store may take for one answer."""
EXIT_DELAY_S = 2.0
"""Between the line and the end: the other ranks say theirs, before a launcher ends them for this one's sake."""
AGENT_STORE_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
"""'True' where torchrun itself holds the store."""
_EXITED = b"-"
"""In the place of a record: a rank has ended in good order."""


class PeerWatchdog:
    """Of this process, beside the thread that trains."""

    def __init__(self, record: RankRecord, num_ranks: int, limits: TimeLimits) -> None:
        """Shows the record of this rank; the others' have to be shown before `start`. Raises RuntimeError where the
        store does not answer."""
        self._record, self._limits = record, limits
        address = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        self._address = f"{address[0]}:{address[1]}"
        self._store = dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT)
        self._keys = [f"meseta-record-{rank}" for rank in range(num_ranks)]
        self._states: Mapping[int, RankState] = {}
        self._num_exchanges = 0
        self._period_s = min(max(POLL_INTERVAL_S, num_ranks / MAX_RECORDS_PER_S), limits.heartbeat_timeout_s / 3)
        self._heartbeats = HeartbeatMonitor([*range(num_ranks), STORE_RANK], time.monotonic())
        self._grace_period = DivergenceGracePeriod()
        self._stopped = threading.Event()
        self._publish_record()

    def start(self) -> None:
        """Begin to watch."""
        for name, loop in (("exchange", self._run_exchange), ("judge", self._run_diagnosis)):
            threading.Thread(target=loop, name=f"meseta-{name}", daemon=True).start()

    def stop(self) -> None:
        """This rank ends in good order; nobody waits for its heart any more."""
        self._stopped.set()
        try:
            self._store.set(self._keys[self._record.rank], _EXITED)
        except RuntimeError:  # whoever had it has ended before
            return

    def _publish_record(self) -> None:
        content = os.pread(self._record.descriptor, RECORD_BYTES, 0)
        self._store.set(self._keys[self._record.rank], zlib.compress(content, 1))

    def _run_exchange(self) -> None:
        while not self._stopped.wait(self._period_s):
            with suppress(RuntimeError):  # what does not get through for long is told by the judge
                self._exchange_records()

    def _exchange_records(self) -> None:
        """Show this rank's record, and take those of all. Raises RuntimeError where the store does not answer."""
        self._publish_record()
        shown = self._store.multi_get(self._keys)
        self._states = {rank: state for rank, content in enumerate(shown) if (state := _parse_record(content, rank))}
        self._num_exchanges += 1

    def _run_diagnosis(self) -> None:
        while not self._stopped.wait(POLL_INTERVAL_S):
            trouble = self._diagnose(time.monotonic())
            if trouble is not None and not self._stopped.is_set():
                text = f"{trouble.text}; end all ranks: the same command goes on from the last checkpoint"
                os.write(2, f"{ERROR_PREFIX}{error_summary(MesetaError(text))}\n".encode())
                time.sleep(EXIT_DELAY_S)
                exit_immediately(HANG_EXIT_CODE)

    def _diagnose(self, now_s: float) -> Diagnosis | None:
        """What is wrong, as far as this rank can tell."""
        states = self._states
        if not states:
            return None
        beats = {rank: state.heartbeat_ns for rank, state in states.items()}
        silent = self._heartbeats.update({**beats, STORE_RANK: self._num_exchanges}, now_s)
        own, store_s = self._record.rank, silent.pop(STORE_RANK)
        silent = {rank: seconds for rank, seconds in silent.items() if rank in states and rank != own}
        # Where nothing comes from the store, nothing comes from anybody.
        longest_s = max([store_s, *silent.values()])
        if longest_s > self._limits.heartbeat_timeout_s and store_s > STORE_SILENCE_SHARE * longest_s:
            return self._diagnose_unreachable_store(states, store_s)
        trouble = find_unreachable_hosts(states, silent, own, self._limits.heartbeat_timeout_s)
        trouble = trouble or find_unresponsive(states, silent, self._limits.heartbeat_timeout_s)
        return trouble or self._grace_period.filter_diagnosis(diagnose(states, {}, None, self._limits), now_s)

    def _diagnose_unreachable_store(self, states: Mapping[int, RankState], seconds: float) -> Diagnosis:
        own = self._record.rank
        host = states[own].host
        others = [rank for rank, state in states.items() if state.host != host]
        unheard = f", and hears nothing of ranks {', '.join(map(str, others))}" if others else ""
        link = f"the link from {host} to {self._address} is cut"
        if environ.get(AGENT_STORE_VARIABLE) == "True" or 0 not in states:
            text = (
                f"{describe_rank(states, own)} has not reached the store at {self._address} for {seconds:.0f} "
                f"s{unheard}; "
                f"{link}, or the store has ended"
            )
            return Diagnosis("silent", tuple(others), text)
        # The store is in the process of rank 0, and stops with it.
        why = "it does not run" if states[0].host == host else f"{link}, or it does not run"
        text = (
            f"{describe_rank(states, 0)} holds the store at {self._address}, and has not answered rank {own} on "
            f"{host} for "
            f"{seconds:.0f} s{unheard}; {why}"
        )
        return Diagnosis("silent", (0, *(rank for rank in others if rank)), text)


_STORE_TIMEOUT = timedelta(seconds=STORE_TIMEOUT_S)


def start_peer_watchdog(world: World) -> PeerWatchdog | None:
    """Let the ranks watch each other from now on, where no launcher does it and they have met in a store of theirs.
    Collective."""
    record = CurrentRankRecord.record
    if world.size == 1 or record is None or RENDEZVOUS in environ or "MASTER_ADDR" not in environ:
        return None
    watch = PeerWatchdog(record, world.size, ProcessTimeouts.limits)
    world.barrier()
    watch.start()
    return watch


def _parse_record(content: bytes, rank: int) -> RankState | None:
    """What a rank has shown; None where it has ended, or where it is no record of this rank."""
    try:
        unpacker = zlib.decompressobj()
        state = parse_record(unpacker.decompress(content, RECORD_BYTES), f"of rank {rank}")
    except (zlib.error, MesetaError):
        return None
    return state if state.rank == rank else None
