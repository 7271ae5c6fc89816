"""Ranks watch each other over a store: an unresponsive rank, an unreachable host, an unreachable store."""

from __future__ import annotations

import os
import struct
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from meseta.comm.peer_watchdog import PeerWatchdog
from meseta.system.time_limits import TimeLimits
from meseta.telemetry.diagnosis import Diagnosis
from meseta.telemetry.rank_record import HEARTBEAT_OFFSET, RECORD_BYTES, RankRecord, TransferInfo

LIMITS = TimeLimits(heartbeat_timeout_s=10.0, stall_timeout_s=600.0)
HOSTS = ("north", "north", "south", "south")


class Ranks:
    """Four ranks on two hosts, in this process, with simulated clocks and heartbeats."""

    def __init__(self) -> None:
        self.records, self.watches = list[RankRecord](), list[PeerWatchdog]()
        self.now_s, self.heartbeats = time.monotonic(), [0] * len(HOSTS)
        self.diagnoses: list[Diagnosis | None] = []
        for rank, host in enumerate(HOSTS):
            with tempfile.TemporaryFile() as file, mock.patch("socket.gethostname", return_value=host):
                os.ftruncate(file.fileno(), RECORD_BYTES)
                self.records.append(RankRecord(os.dup(file.fileno()), rank, len(HOSTS)))
        with mock.patch("time.monotonic", return_value=self.now_s):
            self.watches = [PeerWatchdog(record, len(HOSTS), LIMITS) for record in self.records]

    def pass_seconds(self, count: int, *, unresponsive: tuple[int, ...] = (), cut: tuple[int, ...] = ()) -> None:
        """Exchange records each second. `unresponsive` ranks send no heartbeat, and `cut` ranks do not exchange."""
        for _ in range(count):
            self.now_s += 1
            for rank, record in enumerate(self.records):
                self.heartbeats[rank] += rank not in unresponsive
                os.pwrite(record.descriptor, struct.pack("<q", self.heartbeats[rank] * 10**9), HEARTBEAT_OFFSET)
            for rank, watch in enumerate(self.watches):
                if rank not in cut:
                    watch._exchange_records()
            self.diagnoses = [watch._diagnose(self.now_s) for watch in self.watches]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    ranks = Ranks()
    yield ranks
    for record in ranks.records:
        os.close(record.descriptor)


def test_ranks_with_heartbeats_are_healthy(ranks: Ranks) -> None:
    ranks.pass_seconds(30)
    assert ranks.diagnoses == [None] * 4
    ranks.watches[3].stop()  # an orderly end
    ranks.pass_seconds(30, unresponsive=(3,), cut=(3,))
    assert ranks.diagnoses[:3] == [None] * 3


def test_an_unresponsive_rank_is_named_by_the_others(ranks: Ranks) -> None:
    ranks.pass_seconds(3)
    for rank in (0, 2, 3):
        record = ranks.records[rank]
        record.enter_stage("backward", 41)
        record.start_transfer((0, "rows"), 41, TransferInfo("gradients", num_peers=3, tables=("user",))).__enter__()
    ranks.records[1].enter_stage("dense_forward", 41)
    ranks.pass_seconds(8, unresponsive=(1,))
    assert ranks.diagnoses == [None] * 4
    ranks.pass_seconds(5, unresponsive=(1,))
    for rank in (0, 2, 3):
        trouble = ranks.diagnoses[rank]
        assert trouble is not None and trouble.ranks == (1,)
        text = trouble.text
        assert text.startswith("rank 1 on north (process ") and ", at step 42, stage dense_forward" in text
        assert text.endswith("; ranks 0, 2, 3 wait for 'gradients' of tables user")


@pytest.mark.parametrize("holder", ["torchrun", "rank 0"])
def test_an_unreachable_host_is_named_with_the_link(ranks: Ranks, holder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(holder == "torchrun"))
    ranks.pass_seconds(3)
    ranks.pass_seconds(14, unresponsive=(2, 3), cut=(2, 3))
    for rank in (0, 1):
        trouble = ranks.diagnoses[rank]
        assert trouble is not None and trouble.ranks == (2, 3)
        assert trouble.text.startswith(f"rank {rank} on north has not heard ranks 2, 3 on south for ")
        assert trouble.text.endswith("the link between north and south is cut, or nothing runs there")
    for rank in (2, 3):  # ranks without access to the store also miss the ranks on the other side
        trouble = ranks.diagnoses[rank]
        assert trouble is not None and trouble.ranks == (0, 1)
        part = " has not reached the store at " if holder == "torchrun" else " holds the store at "
        assert f"{part}127.0.0.1:" in trouble.text
        assert trouble.text.startswith("rank 0 on north (process " if holder == "rank 0" else f"rank {rank} on south")
        assert ", and hears nothing of ranks 0, 1; the link from south to 127.0.0.1:" in trouble.text


def test_invalid_records_are_ignored(ranks: Ranks) -> None:
    ranks.pass_seconds(2)
    ranks.watches[0]._store.set("meseta-record-2", b"\x78\x9c" + b"x" * 100)
    ranks.watches[0]._store.set("meseta-record-3", os.urandom(100))
    ranks.watches[0]._exchange_records()
    assert sorted(ranks.watches[0]._states) == [0, 1]
