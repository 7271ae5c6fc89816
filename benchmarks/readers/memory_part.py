"""Memory of readers and trainers, also if a trainer is stopped.

A reader may hold windows of BUFFER_MB, one more window, and 200 MB. A stopped trainer must not grow.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from common.processes import Started, started
from record import record

from readers.rates_part import READERS, dispatcher, prepared

BUFFER_MB = 128
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


def trainer(url: str, num_epochs: int = 4, pause_s: float = 0.0) -> tuple[str, ...]:
    return (sys.executable, "-c", TRAINER, url, "8192", str(num_epochs), str(pause_s))


def measure_memory(options: argparse.Namespace) -> bool:
    with prepared(options.rows) as data, dispatcher(data) as url:
        dataset = json.loads(Path(data, "dataset.json").read_text())
        row_bytes = 4 * (1 + len(dataset["dense"]) + len(dataset["sparse"])) + 16
        bound = 200 + BUFFER_MB + WINDOW_ROWS * row_bytes / 1e6
        measure(f"{options.rows} rows", url, bound, options.seconds)
    return True


def measure(case: str, url: str, bound: float, stopped_s: float) -> None:
    def note(what: str, value: float, unit: str, name: str, most: float) -> None:
        record("reader memory", case, what, value, unit, peer=name, peer_value=most)

    with started(work(url)) as reader:
        note("idle", resident_mb(reader), "MB", "asked", 200)
        peaks = Peaks(reader)
        subprocess.run(trainer(url), check=True, stdout=subprocess.DEVNULL)
        note("while serving", peaks.end()[0], "MB", "bound", bound)
    time.sleep(6)  # the dispatcher drops this reader
    with started(work(url)) as reader, started(trainer(url, num_epochs=100, pause_s=0.01)) as process:
        before_mb = resident_mb(process)
        process.process.send_signal(signal.SIGSTOP)
        peaks = Peaks(reader, process)
        time.sleep(stopped_s)
        reader_mb, trainer_mb = peaks.end()
        note("trainer stopped: reader", reader_mb, "MB", "bound", bound + 32)
        note("trainer stopped: trainer", trainer_mb - before_mb, "MB more", "asked", 32)
