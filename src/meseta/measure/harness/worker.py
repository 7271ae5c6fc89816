"""The process of one contender: reads requests from standard input, a line of JSON each, and answers with one.

    {"make": ["module", "Class"], "arguments": {...}}              -> facts of the contender
    {"time": "action", "calls": 3, "threads": 2}                   -> seconds
    {"ask": "method", "arguments": {...}}                          -> what it returns

Standard output belongs to the answers, so whatever else a library prints there goes to standard error.
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
    """Answers requests."""

    def __init__(self) -> None:
        self.target: BenchmarkTarget | None = None
        self.num_calls: defaultdict[str, int] = defaultdict(int)
        self.num_threads = 0

    def handle(self, request: dict[str, Any]) -> Any:
        """What the request asks for, as JSON."""
        if "make" in request:
            module, name = request["make"]
            self.target = getattr(importlib.import_module(module), name)(**request["arguments"])
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
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker()
    for line in sys.stdin:
        try:
            reply = {"answer": worker.handle(json.loads(line))}
        except Exception as error:  # everything is told to the benchmark, which decides
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()
    os._exit(0)  # neither process groups nor gigabytes of tables need an orderly end
