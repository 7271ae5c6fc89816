"""Run a command of `meseta` in a child process, so that threads and devices of a notebook do not matter to it."""

from __future__ import annotations

import codecs
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from selectors import EVENT_READ, DefaultSelector

from meseta.api.callbacks import Callback, CallbackRunner
from meseta.api.errors import as_hint
from meseta.errors import ERROR_PREFIX, MesetaError
from meseta.system.processes import Program, start_program
from meseta.system.ranks import is_distributed

NUM_LAST_LINES = 5
"""Number of lines in the error of a command that ended without an error line."""


def run_command(arguments: Sequence[str], callbacks: Sequence[Callback] = ()) -> None:
    """Run `meseta ARGUMENTS`, print its output here, line by line, and call `callbacks`. Hints name arguments.

    Ctrl-C reaches all ranks of the command, and is raised again after they have ended. If this process dies, the
    command is killed, and its run can be resumed.
    Raises MesetaError with the error line of the command, or if this process is a rank, and errors of callbacks.
    """
    if is_distributed():
        raise MesetaError(
            f"meseta {arguments[0]}: this process is a rank of torchrun; call it in one process with nproc=N"
        )
    with CallbackRunner(callbacks) as runner:
        try:
            _run_child(arguments, runner)
        except BaseException as error:
            runner.end(error)
            raise
        runner.end(None)


def _run_child(arguments: Sequence[str], runner: CallbackRunner) -> None:
    # -P excludes the working directory from the search for modules, as the installed command does.
    command = [sys.executable, "-P", "-m", "meseta.api.child", *arguments]
    child = start_program(
        command,
        {"PYTHONUNBUFFERED": "1", **runner.variables},
        pass_fds=runner.child_fds,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    runner.close_child_ends()
    with child:
        output = _Output(child)
        try:
            _process_output(output, runner)
            code = child.wait()
        except BaseException as stopped:
            runner.close()
            # Ctrl-C in a terminal reaches a whole process group, so that all ranks save and stop.
            os.killpg(child.pid, signal.SIGINT if isinstance(stopped, KeyboardInterrupt) else signal.SIGTERM)
            _drain(child, output)
            raise
    if code in (130, -signal.SIGINT):
        raise KeyboardInterrupt
    if code != 0:
        raise MesetaError(output.error or f"meseta {arguments[0]} ended with code {code}: {' | '.join(output.lines)}")


class _Output:
    """Output of a child, printed line by line."""

    def __init__(self, child: Program) -> None:
        assert child.stdout is not None
        self.descriptor = child.stdout.fileno()
        self.lines = deque[str](maxlen=NUM_LAST_LINES)
        """Last lines, without error lines."""
        self.error: str | None = None
        """Last error line, without its prefix. It is not printed."""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._received = ""

    def process(self) -> bool:
        """Read output and print its complete lines. Returns whether there may be more."""
        content = os.read(self.descriptor, 1 << 16)
        text = self._received + self._decoder.decode(content, final=not content)
        *lines, self._received = text.split("\n")
        if not content and self._received:
            lines.append(self._received)
        for line in lines:
            if line.startswith(ERROR_PREFIX):
                self.error = line.removeprefix(ERROR_PREFIX)
            else:
                self.lines.append(as_hint(line))
                print(self.lines[-1], flush=True)
        return content != b""


def _process_output(output: _Output, runner: CallbackRunner | None = None) -> None:
    """Print the output of a child, and call callbacks, until it ends."""
    with DefaultSelector() as selector:
        selector.register(output.descriptor, EVENT_READ, output)
        if runner is not None:
            selector.register(runner.events_fd, EVENT_READ, runner)
        while selector.get_map():
            for key, _ in selector.select():
                if not key.data.process():
                    selector.unregister(key.fd)


def _drain(child: Program, output: _Output) -> None:
    """Print what a process says until it ends. A second Ctrl-C kills its process group."""
    try:
        _process_output(output)
        child.wait()
    except KeyboardInterrupt:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
