"""What readers, the dispatcher and trainers hold in memory: beside windows, and while somebody stands still or is slow.

    python benchmarks/bench_reader_memory.py [num_rows] [seconds]

Default 2,000,000 rows, synthetic, and 60 seconds of standing still. A reader may hold decoded windows of BUFFER_MB, one
window more, and 200 MB; a trainer that stands still must not grow. Appends to benchmarks/results.csv.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from bench_readers import MESETA, prepared
from record import record

BUFFER_MB = 128
NUM_STARTS = 5
WINDOW_ROWS = 262_144
READERS = [*MESETA, "readers"]
TRAINER = """
import sys, time
from meseta.data import ReaderOptions
from meseta.data.service.client.reader import ReaderServiceAddress, ServedReader
options = ReaderOptions(batch_size=int(sys.argv[2]), shuffle=True)
reader = ServedReader(ReaderServiceAddress(url=sys.argv[1]), "train", options)
for number, batch in enumerate(reader.epochs(int(sys.argv[3]))):
    time.sleep(float(sys.argv[4]))
    if number == 3:
        print("reads", flush=True)
"""


class Started(NamedTuple):
    """A process, and its first line."""

    process: subprocess.Popen[str]
    said: str

    @property
    def resident_mb(self) -> float:
        """What it has in memory now."""
        [line] = [line for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines() if "VmRSS" in line]
        return int(line.split()[1]) / 1000

    def signal(self, sign: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.process.pid, sign)


class Peaks(threading.Thread):
    """The most that each process has in memory, from when this is made until `end`."""

    def __init__(self, *processes: Started) -> None:
        super().__init__(daemon=True)
        self._processes, self._is_over = processes, threading.Event()
        self.mb = [0.0] * len(processes)
        self.start()

    def run(self) -> None:
        while not self._is_over.wait(0.02):
            self.mb = [max(peak, process.resident_mb) for peak, process in zip(self.mb, self._processes, strict=True)]

    def end(self) -> list[float]:
        """MB."""
        self._is_over.set()
        self.join()
        return self.mb


@contextmanager
def started(*command: str) -> Iterator[Started]:
    """A process, once it has said its first line."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said
        yield Started(process, said)
    finally:
        process.kill()
        process.wait()


def work(url: str) -> tuple[str, ...]:
    """The command of a reader."""
    return (*READERS, "work", "--dispatcher", url, "--buffer-mb", str(BUFFER_MB))


def trainer(url: str, batch_size: int, num_epochs: int, pause_s: float) -> tuple[str, ...]:
    """The command of a trainer."""
    return (sys.executable, "-c", TRAINER, url, str(batch_size), str(num_epochs), str(pause_s))


def main() -> None:
    num_rows = int(sys.argv[1].replace("_", "")) if len(sys.argv) > 1 else 2_000_000
    still_s = float(sys.argv[2]) if len(sys.argv) > 2 else 60.0
    with tempfile.TemporaryDirectory(prefix="meseta-bench-") as folder:
        data = prepared(folder, num_rows)
        dataset = json.loads(Path(data, "dataset.json").read_text())
        row_bytes = 4 * (1 + len(dataset["dense"]) + len(dataset["sparse"])) + 16
        bound = 200 + BUFFER_MB + WINDOW_ROWS * row_bytes / 1e6
        with started(*READERS, "dispatch", "--data", data, "--listen", "127.0.0.1:0", "--json") as dispatcher:
            measure(f"{num_rows} rows", json.loads(dispatcher.said)["url"], bound, still_s)


def measure(case: str, url: str, bound: float, still_s: float) -> None:
    """All cases."""

    def note(what: str, value: float, unit: str, name: str, most: float) -> None:
        record("reader memory", case, what, value, unit, peer=name, peer_value=most)

    starts = []
    for _ in range(NUM_STARTS):
        begin_s = time.perf_counter()
        with started(*work(url)) as reader:
            starts.append(time.perf_counter() - begin_s)
            held_mb = reader.resident_mb
    note("start", statistics.median(starts), "s", "asked", 1.5)
    note("idle", held_mb, "MB", "asked", 200)
    time.sleep(6)  # those are taken to be gone
    with started(*work(url)) as reader:
        peaks = Peaks(reader)
        subprocess.run(trainer(url, 8192, 4, 0), check=True, stdout=subprocess.DEVNULL)
        note("while serving", peaks.end()[0], "MB", "bound", bound)
        time.sleep(2)
        note("after serving", reader.resident_mb, "MB", "asked", 200)
    time.sleep(6)
    for what, batch_size, pause_s in (("trainer stopped", 8192, 0.01), ("a row a second", 1, 1.0)):
        with started(*work(url)) as reader, started(*trainer(url, batch_size, 100, pause_s)) as process:
            before_mb = process.resident_mb
            if batch_size > 1:
                process.signal(signal.SIGSTOP)
            peaks = Peaks(reader, process)
            time.sleep(still_s)
            reader_mb, trainer_mb = peaks.end()
            note(f"{what}: reader", reader_mb, "MB", "bound", bound + 32)
            note(f"{what}: trainer", trainer_mb - before_mb, "MB more", "asked", 32)
        time.sleep(6)
    reader = work(url)
    with (
        started(*reader) as slow,
        started(*reader) as fast,
        started(*reader) as another,
        started(*trainer(url, 8192, 100, 0)) as process,
    ):
        peaks = Peaks(slow, fast, another)
        until_s = time.monotonic() + still_s / 2
        while time.monotonic() < until_s:
            for sign, pause_s in ((signal.SIGSTOP, 0.95), (signal.SIGCONT, 0.05)):
                slow.signal(sign)
                time.sleep(pause_s)
        assert process.process.poll() is None
        note("a slow reader among fast ones: the largest", max(peaks.end()), "MB", "bound", bound + 32)


if __name__ == "__main__":
    main()
