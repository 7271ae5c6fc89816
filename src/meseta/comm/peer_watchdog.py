"""Watchdog for ranks without a launcher, such as those of torchrun. Ranks exchange their records through a TCP
store."""

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
from meseta.system.environment_variables import environ
from meseta.system.processes import exit_immediately
from meseta.system.ranks import RENDEZVOUS_VARIABLE
from meseta.system.time_limits import HANG_EXIT_CODE, TimeLimits
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

# thread "exchange"    publishes this rank's record and reads those of all ranks, about once per second
# thread "judge"       examines the records, and whether exchanges still succeed
#
# The exchange thread may block if a link fails. The judge then reports it. A rank that detects a failure writes one
# line and ends its process, because its main thread may be in a collective that no error reaches.

POLL_INTERVAL_S = 1.0
"""Seconds between two diagnoses, and minimum seconds between two exchanges of records."""
MAX_RECORDS_PER_S = 16
"""Maximum number of records that a rank reads from the store per second. With more ranks, it reads less often."""
STORE_RANK = -1
"""Key of the store among the monitored ranks."""
STORE_SILENCE_SHARE = 0.75
"""If the store has not answered for this share of the longest silence, the store is reported instead of a rank."""
STORE_TIMEOUT_S = 10.0
EXIT_DELAY_S = 2.0
"""Seconds between the error line and the exit, so that the other ranks report before a launcher ends them."""
AGENT_STORE_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
"""Environment variable that is 'True' if the agent of torchrun hosts the store."""
_EXITED = b"-"
"""Value that replaces the record of a rank that has ended normally."""


class PeerWatchdog:
    """Threads that exchange rank records through the store, and end this process if a rank or link fails."""

    def __init__(self, record: RankRecord, num_ranks: int, limits: TimeLimits) -> None:
        """Publish the record of this rank. Call `start` after all ranks have done so.

        Raises RuntimeError if the store does not answer.
        """
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
        for name, loop in (("exchange", self._run_exchange), ("judge", self._run_diagnosis)):
            threading.Thread(target=loop, name=f"meseta-{name}", daemon=True).start()

    def stop(self) -> None:
        """Stop the threads, and publish that this rank has ended normally."""
        self._stopped.set()
        try:
            self._store.set(self._keys[self._record.rank], _EXITED)
        except RuntimeError:  # The process that hosts the store may have ended.
            return

    def _publish_record(self) -> None:
        content = os.pread(self._record.descriptor, RECORD_BYTES, 0)
        self._store.set(self._keys[self._record.rank], zlib.compress(content, 1))

    def _run_exchange(self) -> None:
        while not self._stopped.wait(self._period_s):
            with suppress(RuntimeError):  # The judge reports exchanges that fail for too long.
                self._exchange_records()

    def _exchange_records(self) -> None:
        """Publish the record of this rank, and read those of all. Raises RuntimeError if the store does not answer."""
        self._publish_record()
        contents = self._store.multi_get(self._keys)
        self._states = {rank: state for rank, content in enumerate(contents) if (state := _parse_record(content, rank))}
        self._num_exchanges += 1

    def _run_diagnosis(self) -> None:
        while not self._stopped.wait(POLL_INTERVAL_S):
            trouble = self._diagnose(time.monotonic())
            if trouble is not None and not self._stopped.is_set():
                text = f"{trouble.text}; end all ranks; the same command resumes from the last checkpoint"
                os.write(2, f"{ERROR_PREFIX}{error_summary(MesetaError(text))}\n".encode())
                time.sleep(EXIT_DELAY_S)
                exit_immediately(HANG_EXIT_CODE)

    def _diagnose(self, now_s: float) -> Diagnosis | None:
        states = self._states
        if not states:
            return None
        beats = {rank: state.heartbeat_ns for rank, state in states.items()}
        silent = self._heartbeats.update({**beats, STORE_RANK: self._num_exchanges}, now_s)
        own_rank, store_s = self._record.rank, silent.pop(STORE_RANK)
        silent = {rank: seconds for rank, seconds in silent.items() if rank in states and rank != own_rank}
        # If the store does not answer, no heartbeat arrives, so the store is the likely cause.
        longest_s = max([store_s, *silent.values()])
        if longest_s > self._limits.heartbeat_timeout_s and store_s > STORE_SILENCE_SHARE * longest_s:
            return self._diagnose_unreachable_store(states, store_s)
        trouble = find_unreachable_hosts(states, silent, own_rank, self._limits.heartbeat_timeout_s)
        trouble = trouble or find_unresponsive(states, silent, self._limits.heartbeat_timeout_s)
        return trouble or self._grace_period.filter_diagnosis(diagnose(states, {}, None, self._limits), now_s)

    def _diagnose_unreachable_store(self, states: Mapping[int, RankState], seconds: float) -> Diagnosis:
        own_rank = self._record.rank
        host = states[own_rank].host
        unreachable_ranks = [rank for rank, state in states.items() if state.host != host]
        unreachable_text = (
            f", and hears nothing of ranks {', '.join(map(str, unreachable_ranks))}" if unreachable_ranks else ""
        )
        link = f"the link from {host} to {self._address} is cut"
        if environ.get(AGENT_STORE_VARIABLE) == "True" or 0 not in states:
            text = (
                f"{describe_rank(states, own_rank)} has not reached the store at {self._address} for {seconds:.0f} s"
                f"{unreachable_text}; {link}, or the store has ended"
            )
            return Diagnosis("silent", tuple(unreachable_ranks), text)
        # Rank 0 hosts the store, which ends with its process.
        cause = "it does not run" if states[0].host == host else f"{link}, or it does not run"
        text = (
            f"{describe_rank(states, 0)} holds the store at {self._address}, and has not answered rank {own_rank} on "
            f"{host} for {seconds:.0f} s{unreachable_text}; {cause}"
        )
        return Diagnosis("silent", (0, *(rank for rank in unreachable_ranks if rank)), text)


_STORE_TIMEOUT = timedelta(seconds=STORE_TIMEOUT_S)


def start_peer_watchdog(world: World) -> PeerWatchdog | None:
    """Start to watch all ranks. Collective.

    Returns `None` if there is one rank, or a launcher watches the ranks, or they have no TCP store.
    """
    record = CurrentRankRecord.record
    if world.size == 1 or record is None or RENDEZVOUS_VARIABLE in environ or "MASTER_ADDR" not in environ:
        return None
    watch = PeerWatchdog(record, world.size, ProcessTimeouts.limits)
    world.barrier()
    watch.start()
    return watch


def _parse_record(content: bytes, rank: int) -> RankState | None:
    try:
        unpacker = zlib.decompressobj()
        state = parse_record(unpacker.decompress(content, RECORD_BYTES), f"of rank {rank}")
    except (zlib.error, MesetaError):
        return None
    return state if state.rank == rank else None
