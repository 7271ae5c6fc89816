"""The process of one rank of a Crew: calls what it is asked, in whichever interpreter it runs.

    python -m links.serve SOCKET [SOURCES]

With SOURCES, the folder of this package in another system's interpreter, what is imported of it is found there, and
nothing beside it.
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
"""Set: each rank keeps to one processor, in turns."""


def main() -> None:
    """Serve until the crew goes."""
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
    """A package without its __init__.py, which imports what is not there."""
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]


if __name__ == "__main__":
    main()
