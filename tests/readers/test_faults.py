"""Readers and dispatchers that are killed, stopped, cut off and begun again: every row exactly once, in order."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from data.test_reader import make_dataset
from meseta.data import Dataset, Reader, ReaderOptions
from meseta.data.read.served.reader import ServedReader, Service
from readers.tier import digest
from sampling import sample

NUM_SCHEDULES = 200
Process = subprocess.Popen[bytes]


@pytest.fixture(scope="module")
def jagged(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("faults") / "data", multi_valued=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Processes:
    """A dispatcher and readers as users start them, and what happens to them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.url = f"grpc://127.0.0.1:{free_port()}"
        self.readers: list[Process] = []
        self.stopped: set[Process] = set()
        self.left: list[Process] = []
        self.dispatcher = self._dispatch()
        self.join()

    def _dispatch(self) -> Process:
        address = self.url.removeprefix("grpc://")
        process = self._start("dispatch", "--data", f"click={self._folder}", "--listen", address, out=subprocess.PIPE)
        assert process.stdout is not None
        with process.stdout as said:
            assert said.readline().startswith(b"dispatcher at")
        return process

    def _start(self, *arguments: str, out: int = subprocess.DEVNULL) -> Process:
        command = [sys.executable, "-m", "meseta.cli.main", "readers", *arguments]
        return subprocess.Popen(command, stdout=out)

    def join(self) -> None:
        """One more reader."""
        self.readers.append(self._start("work", "--dispatcher", self.url))

    def kill(self, draw: random.Random) -> None:
        """A reader dies; another comes where it was the last that ran."""
        victim = draw.choice(self.readers)
        self.readers.remove(victim)
        self.stopped.discard(victim)
        self._keep_one()
        victim.kill()
        victim.wait()

    def stop(self, draw: random.Random) -> None:
        """A reader stands still; another comes where it was the last that ran."""
        self.stopped.add(draw.choice(self.readers))
        self._keep_one()
        for reader in self.stopped:
            os.kill(reader.pid, signal.SIGSTOP)

    def go_on(self, draw: random.Random) -> None:
        """All go on."""
        for reader in self.readers:
            os.kill(reader.pid, signal.SIGCONT)
        self.stopped.clear()

    def _keep_one(self) -> None:
        if self.stopped.issuperset(self.readers):
            self.join()

    def leave(self, draw: random.Random) -> None:
        """A reader is told to go, as one that is not wanted any more; another comes where it was the last that ran."""
        leaving = draw.choice(self.readers)
        if leaving in self.stopped:
            return
        self.readers.remove(leaving)
        self.left.append(leaving)
        self._keep_one()
        leaving.terminate()

    def restart(self, draw: random.Random) -> None:
        """The dispatcher dies, and another is begun in its place."""
        self.dispatcher.kill()
        self.dispatcher.wait()
        self.dispatcher = self._dispatch()

    def end(self) -> None:
        for process in [self.dispatcher, *self.readers, *self.left]:
            process.kill()
            process.wait()


@pytest.mark.parametrize("seed", sample(range(NUM_SCHEDULES), 2, seed=0))
def test_every_row_once_whatever_happens(seed: int, jagged: Dataset, capfd: pytest.CaptureFixture[str]) -> None:
    """Numbers of rows as they came are held against a plain read of the files, not against a reader of ours."""
    draw = random.Random(seed)
    num_ranks = draw.choice([1, 2, 3])
    options = ReaderOptions(
        batch_size=draw.choice([10, 37]), shuffle=True, seed=seed, window_rows=90, prefetch_batches=draw.choice([0, 2])
    )
    processes = Processes(jagged.dir)
    what_happens = [processes.kill, processes.stop, processes.go_on, processes.restart, processes.leave]
    what_happens.append(lambda _: processes.join())
    try:
        service = Service(url=processes.url, give_up_s=60.0)
        ranks = [ServedReader(service, "train", options, rank=r, num_ranks=num_ranks) for r in range(num_ranks)]
        local = [Reader(jagged, "train", options, rank=r, num_ranks=num_ranks) for r in range(num_ranks)]
        came = zip(*(reader.epochs(3) for reader in ranks), strict=True)
        expected = zip(*(reader.epochs(3) for reader in local), strict=True)
        numbers: Counter[tuple[int, int]] = Counter()
        for slices, same in zip(came, expected, strict=True):
            assert list(map(digest, slices)) == list(map(digest, same))
            position = slices[0].position
            assert position is not None
            epoch = position.epoch - (position.row == 0)
            numbers.update((epoch, int(row)) for batch in slices for row in batch.dense[:, 0])
            if draw.random() < 0.12:
                draw.choice(what_happens)(draw)
        assert numbers == Counter((epoch, row) for epoch in range(3) for row in plain_rows(jagged))
        for process in [processes.dispatcher, *processes.readers]:
            assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
    finally:
        processes.end()


def plain_rows(dataset: Dataset) -> list[int]:
    """The number of each row, as pyarrow alone reads it."""
    files = sorted((dataset.dir / "train").glob("*.parquet"))
    return [int(number) for file in files for number in pq.read_table(file, columns=["d0"])["d0"].to_pylist()]
