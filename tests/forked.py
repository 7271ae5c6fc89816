"""Processes that have imported torch and the package when they begin: they are forked by a server that has."""

import multiprocessing
from multiprocessing.context import ForkServerContext

from meseta.cli.processes import SHARED


def forking() -> ForkServerContext:
    """For `forking().Process(...)`. There is one server in a session, which imports these when it starts."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["checkpoint.saver", "meseta.cli.main", "meseta.data.prepare", *SHARED, "torch._dynamo", "pytest"]
    )
    return context
