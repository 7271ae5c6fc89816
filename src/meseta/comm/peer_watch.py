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

from meseta.comm.time_out import Patience
from meseta.comm.world import World
from meseta.errors import ERROR_PREFIX, MesetaError, one_line
from meseta.machine.processes import leave_at_once
from meseta.machine.rendezvous import VARIABLE as RENDEZVOUS
from meseta.machine.time_limits import HUNG, TimeLimits
from meseta.machine.variables import variables
from meseta.telemetry.diagnosis import Settling, Trouble, find_silent, find_trouble, find_unheard, named
from meseta.telemetry.hearts import Hearts
from meseta.telemetry.rank_record import SIZE, RankRecord, RankState, ThisProcess, read_state

LOOK_S = 1.0
"""Between two looks."""
RANKS_A_SECOND = 16
"""Records that a rank takes from the store in a second; where there are more ranks, it looks less often."""
STORE = -1
"""In the place of a rank: the store."""
STORE_SHARE = 0.75
"""Of the longest silence: where nothing has come from the store for nearly as long, it is the store's."""
STORE_S = 10.0
"""How long the store may take for one answer."""
TELL_S = 2.0
"""Between the line and the end: the other ranks say theirs, before a launcher ends them for this one's sake."""
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""'True' where torchrun itself holds the store."""
_GONE = b"-"
"""In the place of a record: a rank has ended in good order."""


class PeerWatch:
    """Of this process, beside the thread that trains."""

    def __init__(self, record: RankRecord, num_ranks: int, limits: TimeLimits) -> None:
        """Shows the record of this rank; the others' have to be shown before `start`. Raises RuntimeError where the
        store does not answer."""
        self._record, self._limits = record, limits
        address = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
        self._address = f"{address[0]}:{address[1]}"
        self._store = dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=_STORE_LIMIT)
        self._keys = [f"meseta-record-{rank}" for rank in range(num_ranks)]
        self._states: Mapping[int, RankState] = {}
        self._num_exchanges = 0
        self._period_s = min(max(LOOK_S, num_ranks / RANKS_A_SECOND), limits.silent_s / 3)
        self._hearts = Hearts([*range(num_ranks), STORE], time.monotonic())
        self._settling = Settling()
        self._ended = threading.Event()
        self._show()

    def start(self) -> None:
        """Begin to watch."""
        for name, loop in (("exchange", self._exchange), ("judge", self._judge)):
            threading.Thread(target=loop, name=f"meseta-{name}", daemon=True).start()

    def end(self) -> None:
        """This rank ends in good order; nobody waits for its heart any more."""
        self._ended.set()
        try:
            self._store.set(self._keys[self._record.rank], _GONE)
        except RuntimeError:  # whoever had it has ended before
            return

    def _show(self) -> None:
        content = os.pread(self._record.descriptor, SIZE, 0)
        self._store.set(self._keys[self._record.rank], zlib.compress(content, 1))

    def _exchange(self) -> None:
        while not self._ended.wait(self._period_s):
            with suppress(RuntimeError):  # what does not get through for long is told by the judge
                self._trade()

    def _trade(self) -> None:
        """Show this rank's record, and take those of all. Raises RuntimeError where the store does not answer."""
        self._show()
        shown = self._store.multi_get(self._keys)
        self._states = {rank: state for rank, content in enumerate(shown) if (state := _read(content, rank))}
        self._num_exchanges += 1

    def _judge(self) -> None:
        while not self._ended.wait(LOOK_S):
            trouble = self._find(time.monotonic())
            if trouble is not None and not self._ended.is_set():
                text = f"{trouble.text}; end all ranks: the same command goes on from the last checkpoint"
                os.write(2, f"{ERROR_PREFIX}{one_line(MesetaError(text))}\n".encode())
                time.sleep(TELL_S)
                leave_at_once(HUNG)

    def _find(self, now_s: float) -> Trouble | None:
        """What is wrong, as far as this rank can tell."""
        states = self._states
        if not states:
            return None
        beats = {rank: state.beat_ns for rank, state in states.items()}
        silent = self._hearts.listen({**beats, STORE: self._num_exchanges}, now_s)
        own, store_s = self._record.rank, silent.pop(STORE)
        silent = {rank: seconds for rank, seconds in silent.items() if rank in states and rank != own}
        # Where nothing comes from the store, nothing comes from anybody.
        longest_s = max([store_s, *silent.values()])
        if longest_s > self._limits.silent_s and store_s > STORE_SHARE * longest_s:
            return self._unreached(states, store_s)
        trouble = find_unheard(states, silent, own, self._limits.silent_s)
        trouble = trouble or find_silent(states, silent, self._limits.silent_s)
        return trouble or self._settling.lasting(find_trouble(states, {}, None, self._limits), now_s)

    def _unreached(self, states: Mapping[int, RankState], seconds: float) -> Trouble:
        own = self._record.rank
        host = states[own].host
        others = [rank for rank, state in states.items() if state.host != host]
        unheard = f", and hears nothing of ranks {', '.join(map(str, others))}" if others else ""
        link = f"the link from {host} to {self._address} is cut"
        if variables.get(AGENT_STORE) == "True" or 0 not in states:
            text = (
                f"{named(states, own)} has not reached the store at {self._address} for {seconds:.0f} s{unheard}; "
                f"{link}, or the store has ended"
            )
            return Trouble("silent", tuple(others), text)
        # The store is in the process of rank 0, and stops with it.
        why = "it does not run" if states[0].host == host else f"{link}, or it does not run"
        text = (
            f"{named(states, 0)} holds the store at {self._address}, and has not answered rank {own} on {host} for "
            f"{seconds:.0f} s{unheard}; {why}"
        )
        return Trouble("silent", (0, *(rank for rank in others if rank)), text)


_STORE_LIMIT = timedelta(seconds=STORE_S)


def watch_peers(world: World) -> PeerWatch | None:
    """Let the ranks watch each other from now on, where no launcher does it and they have met in a store of theirs.
    Collective."""
    record = ThisProcess.record
    if world.size == 1 or record is None or RENDEZVOUS in variables or "MASTER_ADDR" not in variables:
        return None
    watch = PeerWatch(record, world.size, Patience.limits)
    world.barrier()
    watch.start()
    return watch


def _read(content: bytes, rank: int) -> RankState | None:
    """What a rank has shown; None where it has ended, or where it is no record of this rank."""
    try:
        unpacker = zlib.decompressobj()
        state = read_state(unpacker.decompress(content, SIZE), f"of rank {rank}")
    except (zlib.error, MesetaError):
        return None
    return state if state.rank == rank else None
