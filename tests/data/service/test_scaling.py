"""Tests of readers that start and drain on demand: requested rows are still sent, and batches do not change."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from data.service.test_lease_table import beat
from data.service.tier import SlowFiles, Tier, digest, running
from data.test_reader import make_dataset
from meseta.data import Dataset, Reader, ReaderOptions
from meseta.data.read.order import epoch_order
from meseta.data.service.client.reader import ServedReader
from meseta.data.service.credentials import CommandToken, new_token
from meseta.data.service.messages import Heartbeat
from meseta.data.service.server import autoscaler, window_reader
from meseta.data.service.server import local_readers as local_module
from meseta.data.service.server.autoscaler import ReaderAutoscaler, ReaderLoad
from meseta.data.service.server.lease_table import LeaseTable
from meseta.data.service.server.local_readers import LocalReaders

PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def jagged(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("scaling") / "data", multi_valued=True)


def until(is_so: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


def test_a_reader_leaves_in_the_middle_and_no_window_is_made_twice(
    jagged: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window_reader, "DRAIN_GRACE_S", 1.0)
    monkeypatch.setattr(window_reader, "HEARTBEAT_INTERVAL_S", 0.2)
    monkeypatch.setattr("meseta.data.dataset.part_files.io", SlowFiles())
    options = ReaderOptions(batch_size=20, shuffle=True, window_rows=80, prefetch_batches=1)
    local = Reader(jagged, "train", options)
    expected = [digest(batch) for batch in local.epochs(3)]
    with running({"click": jagged.dir}, 2) as tier:
        digests = []
        leaving, staying = tier.readers
        left = threading.Thread(target=leaving.drain)
        for number, batch in enumerate(ServedReader(tier.service, "train", options).epochs(3)):
            digests.append(digest(batch))
            time.sleep(0.03)
            if number == 10:
                left.start()
        left.join(PATIENCE_S)
        assert not left.is_alive() and digests == expected
        assert tier.leases.num_reassigned == {}
        stores = [reader._reader.windows for reader in (leaving, staying)]
        assert stores[0].num_buffered == 0 and 0 < stores[0].num_decoded < stores[1].num_decoded
        num_windows = sum(len(epoch_order(local._files.group_rows, options, epoch)) for epoch in range(3))
        assert sum(store.num_decoded for store in stores) == num_windows


def test_idle_readers_drain_immediately_and_busy_ones_after_the_grace_period(
    jagged: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window_reader, "DRAIN_GRACE_S", 0.2)
    monkeypatch.setattr(window_reader, "DRAIN_TIMEOUT_S", 1.0)
    with running({"click": jagged.dir}, 2) as tier:
        for reader, least_s, most_s in ((tier.readers[0], 0.2, 0.8), (tier.readers[1], 1.0, 3.0)):
            if reader is tier.readers[1]:
                monkeypatch.setattr(type(reader._reader.windows), "num_buffered", 1)
            began_s = time.monotonic()
            reader.drain()
            assert least_s <= time.monotonic() - began_s <= most_s


def test_processes_follow_what_is_wanted(jagged: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_module, "RESTART_DELAY_S", 0.3)
    with running({"click": jagged.dir}, 0) as tier:
        readers = LocalReaders(tier.dispatcher.url, tier.dispatcher.credentials)
        try:
            follow(readers, tier, 2)
            killed, stays = (program.pid for program in readers._programs)
            os.kill(killed, signal.SIGKILL)
            until(lambda: followed(readers, 2)[0] == stays and len(readers._programs) == 2, "another in its place")
            follow(readers, tier, 1)
            assert [program.pid for program in readers._programs] == [stays]
            until(lambda: followed(readers, 1) and not readers._draining, "the one that left has ended")
            readers.scale_to(0)
            time.sleep(0.3)
        finally:
            began_s = time.monotonic()
            readers.stop()
        assert time.monotonic() - began_s < 2.0 < window_reader.DRAIN_GRACE_S, "also a draining one"
        assert not Path(f"/proc/{stays}").exists()


def followed(readers: LocalReaders, target: int) -> list[int]:
    readers.scale_to(target)
    return [program.pid for program in readers._programs]


def follow(readers: LocalReaders, tier: Tier, target: int) -> None:
    def staying() -> int:
        readers.scale_to(target)
        return sum(not reader.is_draining for reader in tier.leases.readers())

    until(lambda: staying() == target, f"{target} readers")


def test_what_a_look_sees() -> None:
    clock = [0.0]
    leases = LeaseTable(lambda: clock[0])

    def told(name: str, **changes: object) -> Heartbeat:
        return beat(name).model_copy(update=changes)

    for second in range(5):
        clock[0] = float(second)
        leases.record_heartbeat(told("a", busy_s=0.5 * second, num_windows=2, num_rows=100 * second))
        leases.record_heartbeat(told("b", busy_s=1.0 * second, num_windows=4))
        leases.record_heartbeat(told("c", busy_s=1.0 * second, is_draining=True))
    assert autoscaler.measure_load(leases) == ReaderLoad(
        num_readers=2, waiting_shares=[], busy_readers=1.5, window_s=1.0
    )
    assert [reader.rows_per_s for reader in leases.readers()] == [100.0, 0.0, 0.0]


def test_the_autoscaler_runs_until_its_context_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaler, "POLL_INTERVAL_S", 0.01)

    class RecordedReaders(LocalReaders):
        def __init__(self) -> None:
            super().__init__("grpc://127.0.0.1:9", CommandToken(new_token()))
            self.targets: list[int] = []
            self.is_ended = False

        def scale_to(self, target: int) -> None:
            self.targets.append(target)

        def stop(self) -> None:
            self.is_ended = True

    readers = RecordedReaders()
    with autoscaler.run_autoscaler(ReaderAutoscaler(3, 5), LeaseTable(), readers):
        until(lambda: len(readers.targets) > 3, "looks")
    num_looks = len(readers.targets)
    time.sleep(0.05)
    assert set(readers.targets) == {3} and len(readers.targets) == num_looks and readers.is_ended
