"""Command of `meseta` that a Python process runs as its child, and that ends with it."""

from __future__ import annotations

import sys

from meseta.cli.main import main
from meseta.system.processes import exit_with_parent

if __name__ == "__main__":
    exit_with_parent(sys.stdin.fileno())
    main()
