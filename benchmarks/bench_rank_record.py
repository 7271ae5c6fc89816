"""Measure the microseconds that the rank record adds to a transfer and to a stage. See docs/hangs.md.

python benchmarks/bench_rank_record.py
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

from common.command import make_parser
from common.timing import alternate_seconds

from meseta.telemetry.rank_record import RECORD_BYTES, RankRecord, TransferInfo

NUM_TIMES, NUM_REPETITIONS = 2000, 20
TABLES = tuple(f"table_{number}" for number in range(26))


def repeated(call: Callable[[], object]) -> Callable[[], None]:
    def repeat() -> None:
        for _ in range(NUM_TIMES):
            call()

    return repeat


def main() -> None:
    make_parser(__doc__).parse_args()
    with tempfile.TemporaryFile() as file:
        os.ftruncate(file.fileno(), RECORD_BYTES)
        record = RankRecord(file.fileno(), 0, 2)

        def transfer() -> None:
            with record.start_transfer((0, "rows"), 3, TransferInfo("gradients", "float32", None, 7, 1e6, 1, TABLES)):
                pass

        def stage() -> None:
            record.enter_stage("lookup", 3)
            record.leave_stage()

        times = alternate_seconds({"transfer": repeated(transfer), "stage": repeated(stage)}, NUM_REPETITIONS)
        print(", ".join(f"a {name} {1e6 * min(seconds) / NUM_TIMES:.2f} us" for name, seconds in times.items()))


if __name__ == "__main__":
    main()
