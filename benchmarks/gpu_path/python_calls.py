"""Count of calls of Python functions in a thread, without those of the emulation."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

from torch._library import simple_registry

EMULATION = frozenset(
    (*(str(Path(__file__).with_name(name)) for name in ("capture.py", "dispatch.py", "patches.py", "python_calls.py")),
     simple_registry.__file__)
)  # fmt: skip
"""Files whose functions, with all that they call, do not count. The last one selects the handler of each operator."""


class PythonCallCounter:
    """Counts calls of Python functions in the thread that starts it."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._depth = 0
        """Number of open calls from the outermost one of the emulation on, or 0 outside the emulation."""
        self._is_running = False

    def start(self) -> None:
        """Start to count."""
        self.num_calls, self._depth, self._is_running = 0, 0, True
        sys.setprofile(self._on_event)

    def stop(self) -> None:
        """Stop to count."""
        sys.setprofile(None)
        self._is_running = False

    def enter_package(self) -> int:
        """Count calls of the package that the emulation makes. Returns the argument of `leave_package`."""
        depth, self._depth = self._depth, 0
        return depth

    def leave_package(self, depth: int) -> None:
        """Return to the emulation."""
        self._depth = depth

    def suspend(self) -> None:
        """Count no calls until `resume`, and do not slow them down."""
        sys.setprofile(None)

    def resume(self) -> None:
        """Count again after `suspend`."""
        if self._is_running:
            sys.setprofile(self._on_event)

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            if self._depth:
                self._depth += 1
            elif frame.f_code.co_filename in EMULATION:
                self._depth = 1
            else:
                self.num_calls += 1
        elif event == "return" and self._depth:
            self._depth -= 1
