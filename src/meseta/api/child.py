"""Command of `meseta` that a Python process runs as its child, and that stops if this process dies."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import NoReturn

from meseta.cli.main import main as run_command

PR_SET_PDEATHSIG = 1
"""Option of prctl(2): the signal that this process receives when its parent dies."""


def main() -> NoReturn:
    """Run the command in `sys.argv`, whose first argument is the process id of the parent."""
    parent = int(sys.argv.pop(1))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # The parent died before.
        sys.exit(0)
    run_command()
    sys.exit(0)


if __name__ == "__main__":
    main()
