"""`meseta ARGUMENTS` in processes forked from this one once it has imported torch: that import is paid once."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from functools import cache, partial
from multiprocessing.process import BaseProcess

from meseta.machine.processes import fork


def start_command(
    arguments: Sequence[str], name: str, *, variables: Mapping[str, str] | None = None, out: int = 1, err: int = 2
) -> BaseProcess:
    """Start `meseta ARGUMENTS` in a process of its own, with these variables beside the present ones: see
    meseta.machine.processes.fork."""
    _share_imports()
    return fork(partial(_run_command, arguments), name, added=variables, out=out, err=err)


@cache
def _share_imports() -> None:
    import meseta.cli.preloaded  # noqa: F401

    gc.collect()
    gc.freeze()  # the collector of a fork does not write into pages that it shares with the others


def _run_command(arguments: Sequence[str]) -> None:
    from meseta.cli.main import main

    sys.argv = ["meseta", *arguments]
    main()
