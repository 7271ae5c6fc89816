"""Measure the microseconds that the rank record adds to a transfer and to a stage. See docs/hangs.md.

python benchmarks/bench_rank_record.py
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable

from meseta.telemetry.rank_record import RECORD_BYTES, RankRecord, TransferInfo

NUM_TIMES, NUM_REPETITIONS = 2000, 20
TABLES = tuple(f"table_{number}" for number in range(26))


def best_us(call: Callable[[], object]) -> float:
    times = []
    for _ in range(NUM_REPETITIONS):
        begin_s = time.perf_counter()
        for _ in range(NUM_TIMES):
            call()
        times.append(time.perf_counter() - begin_s)
    return min(times) / NUM_TIMES * 1e6


def main() -> None:
    with tempfile.TemporaryFile() as file:
        os.ftruncate(file.fileno(), RECORD_BYTES)
        record = RankRecord(file.fileno(), 0, 2)

        def transfer() -> None:
            with record.start_transfer((0, "rows"), 3, TransferInfo("gradients", "float32", None, 7, 1e6, 1, TABLES)):
                pass

        def stage() -> None:
            record.enter_stage("lookup", 3)
            record.leave_stage()

        print(f"a transfer {best_us(transfer):.2f} us, a stage {best_us(stage):.2f} us")


if __name__ == "__main__":
    main()
