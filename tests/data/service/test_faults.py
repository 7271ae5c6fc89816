"""Tests that ranks receive every row exactly once, in order, if readers, dispatchers, ranks and links fail."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hosts.namespaces import Namespace

from data.service.tier import digest
from data.test_reader import make_dataset
from hosts import why_impossible
from meseta.data import Dataset, Reader, ReaderOptions
from sampling import sample

NUM_SCHEDULES = 200
NUM_EPOCHS = 3 if os.environ.get("MESETA_SOAK") else 2
START_TIMEOUT_S = 120.0
"""Maximum time until the first line of a rank, which imports torch on a busy machine."""
OUTPUT_TIMEOUT_S = 30.0
"""Maximum time between two lines of a rank."""
SCHEDULE_TIMEOUT_S = 240.0
"""Time limit of a schedule."""
RANK = str(Path(__file__).with_name("rank.py"))
FAST = "qdisc replace dev lo root tbf rate 10gbit burst 1mb limit 64mb"
SLOW = "qdisc replace dev lo root tbf rate 1mbit burst 128kb limit 4mb"
MESETA = [sys.executable, "-m", "meseta.cli.main", "readers"]
Process = subprocess.Popen[str]


@pytest.fixture(scope="module")
def jagged(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("faults") / "data", multi_valued=True)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "keys"
    subprocess.run([*MESETA, "keys", str(folder)], check=True, stdout=subprocess.DEVNULL)
    return folder


class Network:
    """Network namespace whose loopback can be slowed and cut. Falls back to the loopback of the machine."""

    def __init__(self, made: ExitStack) -> None:
        self._namespace = None if why_impossible() else made.enter_context(Namespace())
        self.is_own = self._namespace is not None
        self.port = 7077 if self.is_own else free_port()
        self.set("link set lo up", FAST)

    def wrap(self, command: list[str]) -> list[str]:
        """Return the command that runs `command` inside the namespace."""
        return command if self._namespace is None else self._namespace.entered(command)

    def set(self, link: str, rate: str | None = None) -> None:
        """Configure the link, and its rate if given."""
        if self._namespace is not None:
            self._namespace.configure("ip", [link])
            if rate is not None:
                self._namespace.configure("tc", [rate])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Rank:
    """Process of a rank, with its batches and the time of its last output."""

    def __init__(self, network: Network, spec: dict[str, Any]) -> None:
        """`spec` is the argument of rank.py."""
        self.name = f"rank {spec['rank']} of {spec['num_ranks']}"
        command = network.wrap([sys.executable, RANK, json.dumps(spec)])
        variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        self.process: Process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables
        )
        self.batches: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.last_output_s = time.monotonic()
        self._threads = [threading.Thread(target=self._read, args=(stream,)) for stream in ("stdout", "stderr")]
        for thread in self._threads:
            thread.start()

    def _read(self, stream: str) -> None:
        with getattr(self.process, stream) as lines:
            for line in lines:
                self.last_output_s = time.monotonic()
                if stream == "stdout":
                    self.batches.append(json.loads(line))
                else:
                    self.errors.append(line)

    def check_output(self) -> None:
        """Assert that the rank has succeeded or printed a line recently."""
        limit_s = OUTPUT_TIMEOUT_S if self.errors else START_TIMEOUT_S
        is_responsive = self.process.poll() == 0 or time.monotonic() - self.last_output_s < limit_s
        assert is_responsive, f"{self.name} has printed nothing for {limit_s:.0f} s, after {self.errors}"

    def end(self) -> None:
        """Kill the process and collect its output."""
        self.process.kill()
        self.process.wait()
        for thread in self._threads:
            thread.join()


class Schedule:
    """A dispatcher, readers and ranks as users start them, and what happens to them."""

    def __init__(self, folder: Path, keys: Path | None, network: Network, draw: random.Random) -> None:
        self._folder, self._draw, self._network = folder, draw, network
        self.address = f"127.0.0.1:{network.port}"
        self.url = f"grpc{'' if keys is None else '+tls'}://{self.address}"
        self._keys = [] if keys is None else ["--keys", str(keys)]
        self.readers: list[Process] = []
        self.stopped: set[Process] = set()
        self.left: list[Process] = []
        self.num_events = draw.randint(4, 8)
        self.dispatcher = self._dispatch()
        self.join()

    def run_event(self) -> bool:
        """Pause, then run a random event, or repair everything at the end. Return whether the training survives."""
        time.sleep(self._draw.uniform(0.1, 1.0))
        if not self.num_events:
            self.repair()
            self.resume()
            return True
        self.num_events -= 1
        links = [self.cut, self.slow, self.repair] if self._network.is_own else []
        events: list[Callable[[], None]] = [
            self.kill,
            self.stop,
            self.resume,
            self.restart,
            self.join,
            self.leave,
            *links,
        ]
        self._draw.choice(events)()
        return self._draw.random() > 0.15

    def _dispatch(self) -> Process:
        process = self._start("dispatch", "--data", f"click={self._folder}", "--listen", self.address, "--json")
        assert process.stdout is not None
        with process.stdout as lines:
            assert json.loads(lines.readline())["url"] == self.url
        return process

    def _start(self, *arguments: str) -> Process:
        out = subprocess.PIPE if arguments[0] == "dispatch" else subprocess.DEVNULL
        return subprocess.Popen(self._network.wrap([*MESETA, *arguments, *self._keys]), stdout=out, text=True)

    def join(self) -> None:
        """Start one more reader."""
        self.readers.append(self._start("work", "--dispatcher", self.url))

    def kill(self) -> None:
        """Kill a reader, and start another if no running one remains."""
        victim = self._draw.choice(self.readers)
        self.readers.remove(victim)
        self.stopped.discard(victim)
        self._keep_one()
        victim.kill()
        victim.wait()

    def stop(self) -> None:
        """Suspend a reader, and start another if no running one remains."""
        self.stopped.add(self._draw.choice(self.readers))
        self._keep_one()
        for reader in self.stopped:
            os.kill(reader.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue all suspended readers."""
        for reader in self.readers:
            os.kill(reader.pid, signal.SIGCONT)
        self.stopped.clear()

    def _keep_one(self) -> None:
        if self.stopped.issuperset(self.readers):
            self.join()

    def leave(self) -> None:
        """Drain a reader, and start another if no running one remains."""
        leaving = self._draw.choice(self.readers)
        if leaving in self.stopped:
            return
        self.readers.remove(leaving)
        self.left.append(leaving)
        self._keep_one()
        leaving.terminate()

    def restart(self) -> None:
        """Kill the dispatcher and start another at its address."""
        self.dispatcher.kill()
        self.dispatcher.wait()
        self.dispatcher = self._dispatch()

    def cut(self) -> None:
        """Cut the link."""
        self._network.set("link set lo down")

    def slow(self) -> None:
        """Limit the link to one megabit per second."""
        self._network.set("link set lo up", SLOW)

    def repair(self) -> None:
        """Restore the link."""
        self._network.set("link set lo up", FAST)

    def end(self) -> None:
        for process in [self.dispatcher, *self.readers, *self.left]:
            process.kill()
            process.wait()


@pytest.mark.parametrize("seed", sample(range(NUM_SCHEDULES), 1, seed=132))
def test_every_row_once_despite_failures(seed: int, jagged: Dataset, keys: Path) -> None:
    """Compares with a plain read of the files, not with a Reader."""
    draw = random.Random(seed)
    options = ReaderOptions(
        batch_size=draw.choice([10, 37]), shuffle=True, seed=seed, window_rows=90, prefetch_batches=draw.choice([0, 2])
    )
    folder_of_keys = keys if seed >= NUM_SCHEDULES // 2 else None
    numbers: Counter[tuple[int, int]] = Counter()
    state: dict[str, Any] | None = None
    with ExitStack() as made:
        network = Network(made)
        schedule = Schedule(jagged.dir, folder_of_keys, network, draw)
        made.callback(schedule.end)
        spec = {
            "service": {"url": schedule.url, "reader_timeout_s": 120.0, "keys": folder_of_keys and str(folder_of_keys)},
            "options": asdict(options),
            "run": f"schedule {seed}",
            "num_epochs": NUM_EPOCHS,
            "pause_s": 0.02,
        }
        attempts, until_s = count(), time.monotonic() + SCHEDULE_TIMEOUT_S
        while state is None or state["epoch"] < NUM_EPOCHS:
            num_ranks = draw.choice([1, 2, 3])
            attempt_spec = {**spec, "num_ranks": num_ranks, "attempt": next(attempts), "state": state}
            ranks = [Rank(network, {**attempt_spec, "rank": rank}) for rank in range(num_ranks)]
            try:
                live(ranks, schedule, until_s)
            finally:
                for rank in ranks:
                    rank.end()
            steps = list(zip(*(rank.batches for rank in ranks), strict=False))  # on all of them: a checkpoint
            numbers.update(received_rows(steps, jagged, options, state))
            state = steps[-1][0]["state"] if steps else state
        for process in [schedule.dispatcher, *schedule.readers]:
            assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
    assert numbers == Counter((epoch, row) for epoch in range(NUM_EPOCHS) for row in plain_rows(jagged))


def live(ranks: list[Rank], schedule: Schedule, until_s: float) -> None:
    """Run events until all ranks have ended or the training is killed. A rank that cannot start also ends it."""
    while any(rank.process.poll() is None for rank in ranks):
        assert time.monotonic() < until_s, "the schedule does not end"
        for rank in ranks:
            if rank.process.poll():
                rank.end()
                assert not rank.batches and "cannot be reached" in "".join(rank.errors), "".join(rank.errors)
                return schedule.repair()
            rank.check_output()
        if not schedule.run_event():
            return None
    return None


def received_rows(
    steps: list[tuple[dict[str, Any], ...]], dataset: Dataset, options: ReaderOptions, state: dict[str, Any] | None
) -> Iterator[tuple[int, int]]:
    """Yield (epoch, row) of the received batches, which must equal those of local readers from `state` on."""
    locally = []
    for rank in range(len(steps[0]) if steps else 0):
        reader = Reader(dataset, "train", options, rank=rank, num_ranks=len(steps[0]))
        if state is not None:
            reader.set_state(state)
        locally.append(reader.epochs(NUM_EPOCHS))
    for slices in steps:
        assert [part["digest"] for part in slices] == [digest(next(reader))[0] for reader in locally]
        assert all(part["state"] == slices[0]["state"] for part in slices)
        after = slices[0]["state"]
        yield from ((after["epoch"] - (after["row"] == 0), row) for part in slices for row in part["rows"])


def plain_rows(dataset: Dataset) -> list[int]:
    """Return the row numbers as read by pyarrow alone."""
    files = sorted((dataset.dir / "train").glob("*.parquet"))
    return [int(number) for file in files for number in pq.read_table(file, columns=["d0"])["d0"].to_pylist()]
