"""A benchmark target that only sleeps, for tests of the harness."""

import os
import time
from typing import Any

from meseta.measure.harness.target import BenchmarkTarget


class Sleeper(BenchmarkTarget):
    def __init__(self, milliseconds: float, fails: str = "") -> None:
        super().__init__()
        print("noise on standard output")
        if fails == "start":
            raise ValueError("cannot be built")
        self.fails, self.rank = fails, os.environ["RANK"]
        self.actions = {"nap": lambda call: self.nap(milliseconds)}

    def facts(self) -> dict[str, Any]:
        return {"actions": list(self.actions), "rank": self.rank, "isolated": "pydantic" not in os.environ}

    def set_threads(self, num_threads: int) -> None:
        pass

    def nap(self, milliseconds: float) -> None:
        if self.fails == "exit":
            os._exit(3)
        if self.fails == "action":
            raise RuntimeError("nap was cut short")
        time.sleep(milliseconds / 1e3)
