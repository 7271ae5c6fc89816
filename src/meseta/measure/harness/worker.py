"""Worker process of one benchmark target. Reads requests from standard input and answers each with one line of JSON.

    {"make": ["module", "Class"], "arguments": {...}}              -> facts of the target
    {"time": "action", "calls": 3, "threads": 2}                   -> seconds
    {"ask": "method", "arguments": {...}}                          -> return value of the method

Standard output is reserved for answers. Other output of libraries is redirected to standard error.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import warnings
from collections import defaultdict
from typing import Any

from meseta.measure.harness.target import BenchmarkTarget


class Worker:
    """Holder of a benchmark target that executes requests for it."""

    def __init__(self) -> None:
        self.target: BenchmarkTarget | None = None
        self.num_calls: defaultdict[str, int] = defaultdict(int)
        self.num_threads = 0

    def handle(self, request: dict[str, Any]) -> Any:
        """Execute one request and return its answer, which must be serializable as JSON."""
        if "make" in request:
            module, name = request["make"]
            self.target = getattr(importlib.import_module(module), name)(**request["arguments"])
            # Keep the garbage collector from scanning the target's objects during measurements.
            gc.collect()
            gc.freeze()
            return self.target.facts()
        assert self.target is not None
        if "ask" in request:
            return getattr(self.target, request["ask"])(**request["arguments"])
        if request["threads"] != self.num_threads:
            self.num_threads = request["threads"]
            self.target.set_threads(self.num_threads)
        action, calls = request["time"], request["calls"]
        seconds = self.target.time(action, self.num_calls[action], calls)
        self.num_calls[action] += calls
        return seconds


def main() -> None:
    """Serve until standard input ends."""
    warnings.filterwarnings("ignore")
    # Keep standard output for answers, and redirect file descriptor 1 to standard error.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker()
    for line in sys.stdin:
        try:
            reply = {"answer": worker.handle(json.loads(line))}
        except Exception as error:  # The benchmark decides how to handle it.
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    os._exit(0)  # Skip the teardown of process groups and of gigabytes of tables.
