"""Process of one rank, which calls the functions that it is asked for.

    python -m links.serve SOCKET [SOURCES]

With SOURCES, the folder of this package, only its modules are found in the interpreter of another system.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import traceback
import types
from multiprocessing.connection import Connection
from pathlib import Path

BIND = "LINKS_BIND"
"""Variable that pins each rank to one processor."""


def main() -> None:
    if len(sys.argv) > 2:
        _pretend("meseta", sys.argv[2])
        _pretend("meseta.measure", f"{sys.argv[2]}/measure")
        _pretend("hosts", str(Path(__file__).parents[1] / "hosts"))
    rank = int(os.environ["RANK"])
    if BIND in os.environ:
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[rank % len(processors)]})
    meeting = socket.socket(socket.AF_UNIX)
    meeting.connect(sys.argv[1])
    with Connection(meeting.detach()) as pipe:
        pipe.send(rank)
        while True:
            try:
                module, name, arguments = pipe.recv()
            except (EOFError, ConnectionError):
                break
            try:
                reply = True, getattr(importlib.import_module(module), name)(**arguments)
            except BaseException:
                reply = False, traceback.format_exc()
            pipe.send(reply)
    os._exit(0)  # neither process groups nor tables need an orderly end


def _pretend(name: str, folder: str) -> None:
    """Register a package without running its __init__.py, whose imports may be missing."""
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]


if __name__ == "__main__":
    main()
