"""Streams and events of an emulated GPU, on which all work is complete when the call that starts it returns.

Calls of these functions count as Python calls, because torch.cuda's own are Python functions too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

Note = Callable[[str, str], None]
"""Function that records (kind, name)."""


class FakeEvent:
    """Event that the device passes immediately."""

    def __init__(self, note: Note, enable_timing: bool = False) -> None:
        self._note, self._is_timed = note, enable_timing

    def record(self, stream: Any = None) -> None:
        """Record the event in a stream."""
        if self._is_timed:
            self._note("timed event", "Event.record")

    def query(self) -> bool:
        """Whether the device has passed the event."""
        return True

    def synchronize(self) -> None:
        """Wait for the event."""
        self._note("event wait", "Event.synchronize")

    def elapsed_time(self, other: FakeEvent) -> float:
        """Return the milliseconds between two events."""
        return 0.0


class FakeStream:
    """Stream of an emulated GPU."""

    def __init__(self, note: Note, device: Any = None) -> None:
        self._note = note

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        """Record an event, by default a new one, and return it."""
        event = event or FakeEvent(self._note)
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        """Let later work of this stream wait for an event."""

    def wait_stream(self, stream: FakeStream) -> None:
        """Let later work of this stream wait for that of another one."""

    def synchronize(self) -> None:
        """Wait for all work of the stream."""
        self._note("synchronization", "Stream.synchronize")


class FakeCuda:
    """Functions of torch.cuda."""

    def __init__(self, note: Note) -> None:
        self.Event, self.Stream = partial(FakeEvent, note), partial(FakeStream, note)
        self._note, self._current = note, self.Stream()

    def current_stream(self, device: Any = None) -> FakeStream:
        """Return the current stream."""
        return self._current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """Context manager that selects a stream."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """Context manager that selects a device."""
        yield

    def synchronize(self, device: Any = None) -> None:
        """Wait for all work of the device."""
        self._note("synchronization", "cuda.synchronize")

    def is_current_stream_capturing(self) -> bool:
        """Whether a CUDA graph is captured."""
        return False
