"""Memory of readers and trainers, also if one of them is stopped or slow.

A reader may hold windows of BUFFER_MB, one more window, and 200 MB. A stopped trainer must not grow.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from common.processes import Started, started
from record import record

from readers.rates_part import READERS, dispatcher, prepared

BUFFER_MB = 128
NUM_STARTS = 5
WINDOW_ROWS = 262_144
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


def resident_mb(started_process: Started) -> float:
    status = Path(f"/proc/{started_process.process.pid}/status").read_text()
    [line] = [line for line in status.splitlines() if "VmRSS" in line]
    return int(line.split()[1]) / 1000


class Peaks(threading.Thread):
    """Thread that samples the resident memory of processes until `end`."""

    def __init__(self, *processes: Started) -> None:
        super().__init__(daemon=True)
        self._processes, self._is_over = processes, threading.Event()
        self.mb = [0.0] * len(processes)
        self.start()

    def run(self) -> None:
        while not self._is_over.wait(0.02):
            self.mb = [max(peak, resident_mb(process)) for peak, process in zip(self.mb, self._processes, strict=True)]

    def end(self) -> list[float]:
        self._is_over.set()
        self.join()
        return self.mb


def work(url: str) -> tuple[str, ...]:
    return (*READERS, "work", "--dispatcher", url, "--buffer-mb", str(BUFFER_MB))


def trainer(url: str, batch_size: int, num_epochs: int, pause_s: float) -> tuple[str, ...]:
    return (sys.executable, "-c", TRAINER, url, str(batch_size), str(num_epochs), str(pause_s))


def measure_memory(options: argparse.Namespace) -> bool:
    with prepared(options.rows) as data, dispatcher(data) as url:
        dataset = json.loads(Path(data, "dataset.json").read_text())
        row_bytes = 4 * (1 + len(dataset["dense"]) + len(dataset["sparse"])) + 16
        bound = 200 + BUFFER_MB + WINDOW_ROWS * row_bytes / 1e6
        measure(f"{options.rows} rows", url, bound, options.seconds)
    return True


def measure(case: str, url: str, bound: float, still_s: float) -> None:
    def note(what: str, value: float, unit: str, name: str, most: float) -> None:
        record("reader memory", case, what, value, unit, peer=name, peer_value=most)

    starts = []
    for _ in range(NUM_STARTS):
        begin_s = time.perf_counter()
        with started(work(url)) as reader:
            starts.append(time.perf_counter() - begin_s)
            held_mb = resident_mb(reader)
    note("start", statistics.median(starts), "s", "asked", 1.5)
    note("idle", held_mb, "MB", "asked", 200)
    time.sleep(6)  # those are taken to be gone
    with started(work(url)) as reader:
        peaks = Peaks(reader)
        subprocess.run(trainer(url, 8192, 4, 0), check=True, stdout=subprocess.DEVNULL)
        note("while serving", peaks.end()[0], "MB", "bound", bound)
        time.sleep(2)
        note("after serving", resident_mb(reader), "MB", "asked", 200)
    time.sleep(6)
    for what, batch_size, pause_s in (("trainer stopped", 8192, 0.01), ("a row a second", 1, 1.0)):
        with started(work(url)) as reader, started(trainer(url, batch_size, 100, pause_s)) as process:
            before_mb = resident_mb(process)
            if batch_size > 1:
                process.process.send_signal(signal.SIGSTOP)
            peaks = Peaks(reader, process)
            time.sleep(still_s)
            reader_mb, trainer_mb = peaks.end()
            note(f"{what}: reader", reader_mb, "MB", "bound", bound + 32)
            note(f"{what}: trainer", trainer_mb - before_mb, "MB more", "asked", 32)
        time.sleep(6)
    reader = work(url)
    with (
        started(reader) as slow,
        started(reader) as fast,
        started(reader) as another,
        started(trainer(url, 8192, 100, 0)) as process,
    ):
        peaks = Peaks(slow, fast, another)
        until_s = time.monotonic() + still_s / 2
        while time.monotonic() < until_s:
            for sign, pause_s in ((signal.SIGSTOP, 0.95), (signal.SIGCONT, 0.05)):
                slow.process.send_signal(sign)
                time.sleep(pause_s)
        assert process.process.poll() is None
        note("a slow reader among fast ones: the largest", max(peaks.end()), "MB", "bound", bound + 32)
