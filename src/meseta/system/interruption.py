"""Handling of SIGTERM and Ctrl-C during training. The first signal stops training after the current step, and a second
one ends the process immediately."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from meseta.system.processes import exit_immediately

# A rank may receive one Ctrl-C twice: a terminal sends it to all processes of a group, and the launcher forwards it.
DEBOUNCE_WINDOW_S = 1.0
"""Seconds after the first signal during which further signals are ignored."""

# No signal has number 0.
_STOP_BYTE = b"\0"


class TrainingInterrupt(Exception):
    """Stop of training by a signal, after the same step on all ranks and a checkpoint of that step."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


class SignalListener:
    """Context manager that records the first SIGTERM or SIGINT in `signal_number`.

    A second signal ends the process immediately. In a thread other than the main thread it does nothing, because only
    the main thread may set signal handlers.
    """

    # A Python handler in the main thread records the first signal without waiting for another thread to be scheduled.
    # The second one is received by a thread, because the main thread may be blocked in a collective.

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._previous_handlers: dict[int, Any] = {}
        self._previous_wakeup_fd = -1
        self._wakeup_fd = -1
        self._thread: threading.Thread | None = None

    def __enter__(self) -> SignalListener:
        if threading.current_thread() is threading.main_thread():
            reader, self._wakeup_fd = os.pipe()
            os.set_blocking(self._wakeup_fd, False)
            self._previous_wakeup_fd = signal.set_wakeup_fd(self._wakeup_fd, warn_on_full_buffer=False)
            for number in (signal.SIGTERM, signal.SIGINT):
                if (former := signal.getsignal(number)) is not signal.SIG_IGN:
                    # Keep ignoring a signal that the parent process ignores for this one, as the launcher does.
                    signal.signal(number, self._record_signal)
                    self._previous_handlers[number] = signal.SIG_DFL if former is None else former
            self._thread = threading.Thread(target=self._listen, args=(reader,), name="meseta-signals", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._wakeup_fd >= 0:
            for number, former in self._previous_handlers.items():
                signal.signal(number, former)
            signal.set_wakeup_fd(self._previous_wakeup_fd)
            assert self._thread is not None
            # Closing the pipe would not end the thread if a forked process has inherited it.
            os.write(self._wakeup_fd, _STOP_BYTE)
            self._thread.join()
            os.close(self._wakeup_fd)
            self._wakeup_fd = -1

    def _record_signal(self, number: int, frame: FrameType | None = None) -> None:
        if self.signal_number is None:
            self.signal_number = number

    def _listen(self, reader: int) -> None:
        first_s = None
        while (received := os.read(reader, 1)) not in (b"", _STOP_BYTE):
            number = received[0]
            if number not in self._previous_handlers:
                continue
            if first_s is None:
                first_s = time.monotonic()
                self._record_signal(number)
            elif time.monotonic() - first_s > DEBOUNCE_WINDOW_S:
                os.write(2, b"a second signal: leaving at once, without a checkpoint of the last steps\n")
                exit_immediately(128 + number)
        os.close(reader)
