"""Streams, events and graphs of an emulated GPU, on which all work is complete when the call that starts it returns.

Calls of these functions count as Python calls, because torch.cuda's own are Python functions too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

from gpu_path.capture import Capture, CaptureMode
from gpu_path.dispatch import EmulatedGpu


class FakeEvent:
    """Event that the device passes immediately."""

    def __init__(self, gpu: EmulatedGpu, enable_timing: bool = False, external: bool = False) -> None:
        self._gpu, self._is_timed, self._is_external = gpu, enable_timing, external
        self._is_recorded = False
        self._stream: Any = None
        self._capture: Capture | None = None
        """Graph of which the event is a part, unless it is external."""

    def record(self, stream: Any = None) -> None:
        """Record the event in a stream."""
        gpu = self._gpu
        if self._is_timed:
            gpu.note("timed event", "Event.record")
        self._stream = gpu.current_stream if stream is None else stream
        capture = gpu.capture_of(self._stream)
        self._capture = None if self._is_external else capture
        if capture is not None and self._is_external:
            capture.launch(self._mark, (), {})
        else:
            self._is_recorded = True

    def query(self) -> bool:
        """Whether the device has passed the event."""
        self._gpu.check("Event.query")
        self._gpu.check_outside(self._capture)
        return True

    def synchronize(self) -> None:
        """Wait for the event."""
        self._gpu.note("event wait", "Event.synchronize")
        self._gpu.check_outside(self._capture)

    def elapsed_time(self, other: FakeEvent) -> float:
        """Return the milliseconds between two events."""
        self._gpu.check("Event.elapsed_time")
        self._gpu.check_outside(self._capture, other._capture)
        for event in (self, other):
            if not (event._is_timed and event._is_recorded):
                raise RuntimeError("CUDA error: invalid resource handle: the event is not timed or not recorded")
        return 0.0

    def wait(self, stream: Any = None) -> None:
        """Let later work of a stream wait for the event."""
        stream = self._gpu.current_stream if stream is None else stream
        if self._capture is not None and self._capture is not self._gpu.capture:
            self._gpu.check_outside(self._capture)
        if self._is_recorded and not self._is_external:
            self._gpu.wait(stream, self._stream, is_captured=self._capture is not None)

    def _mark(self) -> None:
        self._is_recorded = True


class FakeStream:
    """Stream of an emulated GPU."""

    def __init__(self, gpu: EmulatedGpu, device: Any = None) -> None:
        self._gpu = gpu

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        """Record an event, by default a new one, and return it."""
        event = event or FakeEvent(self._gpu)
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        """Let later work of this stream wait for an event."""
        event.wait(self)

    def wait_stream(self, stream: FakeStream) -> None:
        """Let later work of this stream wait for that of another one."""
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        """Wait for all work of the stream."""
        self._gpu.note("synchronization", "Stream.synchronize")


class FakeGraph:
    """CUDA graph of an emulated GPU."""

    def __init__(self, gpu: EmulatedGpu) -> None:
        self._gpu = gpu
        self.capture: Capture | None = None
        """Captured work. `capture.records` lists its operators."""

    def replay(self) -> None:
        """Run the captured work."""
        if self.capture is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self._gpu.replay(self.capture)

    def pool(self) -> tuple[int, int]:
        """Return the memory pool of the graph."""
        if self.capture is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self.capture.pool

    def reset(self) -> None:
        """Free the captured work."""
        self.capture = None


class FakeCuda:
    """Functions of torch.cuda."""

    def __init__(self, gpu: EmulatedGpu) -> None:
        self.Event, self.Stream, self.CUDAGraph = (partial(cls, gpu) for cls in (FakeEvent, FakeStream, FakeGraph))
        self._gpu, self._num_pools = gpu, count()
        self._default_stream, self._capture_stream = self.Stream(), self.Stream()
        gpu.current_stream = self._default_stream

    def current_stream(self, device: Any = None) -> FakeStream:
        """Return the current stream."""
        stream: FakeStream = self._gpu.current_stream
        return stream

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """Context manager that selects a stream."""
        before, self._gpu.current_stream = self._gpu.current_stream, stream
        try:
            yield
        finally:
            self._gpu.current_stream = before

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """Context manager that selects a device."""
        yield

    def synchronize(self, device: Any = None) -> None:
        """Wait for all work of the device."""
        self._gpu.note("synchronization", "cuda.synchronize")

    def get_sync_debug_mode(self) -> int:
        """Return 1 if operators that wait for the device cause a warning, else 0."""
        return int(self._gpu.warns_of_waits)

    def set_sync_debug_mode(self, debug_mode: int | str) -> None:
        """Set whether operators that wait for the device cause a warning."""
        self._gpu.warns_of_waits = debug_mode in (1, "warn")

    def is_current_stream_capturing(self) -> bool:
        """Whether a CUDA graph is captured."""
        return self._gpu.capture_of(self._gpu.current_stream) is not None

    def graph_pool_handle(self) -> tuple[int, int]:
        """Return the handle of a new memory pool."""
        return 0, next(self._num_pools)

    @contextmanager
    def graph(
        self,
        cuda_graph: FakeGraph,
        pool: tuple[int, int] | None = None,
        stream: FakeStream | None = None,
        capture_error_mode: CaptureMode = "global",
    ) -> Iterator[None]:
        """Context manager that captures a graph. Raises RuntimeError if the capture has failed."""
        self.synchronize()
        stream = self._capture_stream if stream is None else stream
        if stream is self._default_stream:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        with self.stream(stream):
            self._gpu.begin_capture(self.graph_pool_handle() if pool is None else pool, capture_error_mode)
            try:
                yield
            finally:
                capture = self._gpu.end_capture()
        capture.check_result()
        cuda_graph.capture = capture
