"""`meseta train` that also writes the processor time of loading the parent.

python -m daily.timed_training RESULT ARGUMENTS ...
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from meseta.cli.main import main as run_command
from meseta.train import resuming
from meseta.train.trainer import Trainer


def main() -> None:
    result, sys.argv[1:] = Path(sys.argv[1]), sys.argv[2:]
    load = resuming.start_from_parent

    def load_and_write(trainer: Trainer) -> None:
        start_s = time.process_time()
        load(trainer)
        result.write_text(json.dumps({"load_processor_s": time.process_time() - start_s}))

    resuming.start_from_parent = load_and_write
    run_command()


if __name__ == "__main__":
    main()
