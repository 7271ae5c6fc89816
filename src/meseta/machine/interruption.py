"""SIGTERM and Ctrl-C while training: the first asks for an end in good order, a second one ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from meseta.machine.processes import exit_immediately

DEBOUNCE_WINDOW_S = 1.0
"""Signals this soon after the first are the same call: a terminal or a service tells all processes of a group, and the
launcher passes it on to its ranks as well."""

_STOP_BYTE = b"\0"
"""No signal has this number."""


class TrainingInterrupt(Exception):
    """Training was ended by a signal, on all ranks after the same step, and everything up to there is saved."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


class SignalListener:
    """While entered, `number` is the signal that came, if one did.

    The main thread notes the first, so that the step at hand is the last one however late other threads get the
    processor; a thread waits for signals too, so that the second one is heard even while a collective waits for another
    rank. Entered in another thread than the main one, which alone may set handlers, it hears nothing.
    """

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
                    # Whoever started this process may have told it to ignore Ctrl-C, as the launcher does.
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
            os.write(self._wakeup_fd, _STOP_BYTE)  # a process forked meanwhile may hold it open
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
