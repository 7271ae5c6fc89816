"""Fake of a slow device: its copies complete as late as the program allows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from meseta.pipeline.device_copy import BatchPacker, DeviceCopier
from meseta.train.trainer import Trainer
from small_run import train

CPU = torch.device("cpu")
NUM_QUERIES = 3
"""Number of queries that find a copy in progress."""


@dataclass(eq=False)
class Copy:
    """Copy from a host buffer. It is also the event that is recorded after it."""

    device: LateDevice
    number: int
    source: Tensor
    destination: Tensor
    num_queries: int = 0
    is_copied: bool = False

    def __post_init__(self) -> None:
        self.expected = self.source.clone()

    def run(self) -> None:
        # The host does not wait for its completion.
        with self.device.lock:
            if not self.is_copied:
                self.destination.copy_(self.source)
            self.is_copied = True

    def query(self) -> bool:
        self.num_queries += 1
        if self.num_queries > NUM_QUERIES:
            self.device.complete(self)
        return self not in self.device.in_progress

    def synchronize(self) -> None:
        if self in self.device.in_progress:
            self.device.log(f"the host waits for copy {self.number}")
        self.device.complete(self)


class Stream:
    def __init__(self, device: LateDevice, name: str) -> None:
        self.device, self.name = device, name

    def record_event(self) -> Copy:
        self.device.log(f"event on {self.name}")
        return self.device.copies[-1]

    def wait_event(self, copy: Copy) -> None:
        self.device.log(f"{self.name} waits for copy {copy.number}")
        copy.run()


class LateDevice:
    """Fake of the stream functions of torch.cuda that records events. Its device is the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.copies: list[Copy] = []
        self.in_progress: list[Copy] = []
        self.overwritten: list[int] = []
        """Numbers of the copies whose buffer was overwritten while they were in progress."""
        self.num_buffers = self.num_streams = 0
        self.current = Stream(self, "main")
        self.lock = threading.RLock()
        device = self

        class HostBuffer(Tensor):
            """Pinned memory. Copies from it are late."""

            @classmethod
            def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func is not Tensor.copy_:
                    return super().__torch_function__(func, types, args, kwargs or {})
                with torch._C.DisableTorchFunctionSubclass():
                    device.start_copy(args[1].as_subclass(Tensor), args[0])
                return args[0]

        self._buffer_type = HostBuffer
        monkeypatch.setattr(Tensor, "record_stream", lambda _, stream: self.log(f"used on {stream.name}"))

    def log(self, event: str) -> None:
        self.events.append(event)

    def new_buffer(self, num_bytes: int) -> Tensor:
        with self.lock:
            self.num_buffers += 1
        return torch.empty(num_bytes, dtype=torch.uint8).as_subclass(self._buffer_type)

    def Stream(self, device: torch.device) -> Stream:
        self.num_streams += 1
        return Stream(self, "side")

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def start_copy(self, source: Tensor, destination: Tensor) -> None:
        with self.lock:
            self.copies.append(Copy(self, len(self.copies) + 1, source, destination))
            self.in_progress.append(self.copies[-1])
            self.log(f"copy {len(self.copies)} on {self.current.name}")

    def complete(self, last: Copy) -> None:
        """Complete the copies up to `last` in their order."""
        with self.lock:
            while self.in_progress and self.in_progress[0].number <= last.number:
                copy = self.in_progress.pop(0)
                copy.run()
                if not torch.equal(copy.source, copy.expected):
                    self.overwritten.append(copy.number)

    def check_copies(self) -> None:
        """Check that no buffer was overwritten while its copy was in progress."""
        self.complete(self.copies[-1])
        assert self.overwritten == []


class KilledRun(Exception):
    """Exception that simulates a killed process."""


@contextmanager
def late_device(packing_threads: set[str], killed_at: int | None = None) -> Iterator[LateDevice]:
    """Context manager in which runs copy their batches to a slow device. `packing_threads` receives the names of the
    threads that allocate buffers. The run raises KilledRun after step `killed_at`."""
    with pytest.MonkeyPatch.context() as patch:
        device, build, record = LateDevice(patch), Trainer._build, Trainer._record

        def new_buffer(num_bytes: int) -> Tensor:
            packing_threads.add(threading.current_thread().name)
            return device.new_buffer(num_bytes)

        def build_with_copier(self: Trainer, with_test: bool) -> None:
            build(self, with_test)
            pipeline = self.pipeline
            pipeline.device_copier = DeviceCopier(
                CPU, pipeline.stage_times, pipeline.accumulate_steps, cuda=device, new_buffer=new_buffer
            )

        def record_or_die(self: Trainer, result: Any) -> None:
            record(self, result)
            if self.step == killed_at:
                raise KilledRun

        make = staticmethod(lambda _, num_parts: BatchPacker(CPU, num_parts, new_buffer=new_buffer))
        patch.setattr(BatchPacker, "for_device", make)
        patch.setattr(Trainer, "_build", build_with_copier)
        patch.setattr(Trainer, "_record", record_or_die)
        yield device


def train_packed(document: dict[str, Any]) -> None:
    """Run on the ranks of this process with a slow device. Every rank of a pool can import it."""
    with late_device(set()) as device:
        train(document)
    device.check_copies()
