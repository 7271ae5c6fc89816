"""A rank in its own process, which prints a JSON line with rows and reader state for each batch.

It prints a line to stderr when it has started.

python rank.py SPEC    JSON: service, options, rank, num_ranks, run, attempt, state, num_epochs, pause_s
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from data.service.tier import digest
from meseta.data import ReaderOptions
from meseta.data.service.client.reader import ReaderServiceAddress, RunAttempt, ServedReader
from meseta.errors import MesetaError


def main() -> None:
    """Read until all epochs are complete."""
    print("begun", file=sys.stderr, flush=True)
    spec = json.loads(sys.argv[1])
    keys = spec["service"].pop("keys")
    reader = ServedReader(
        ReaderServiceAddress(keys=None if keys is None else Path(keys), **spec["service"]),
        "train",
        ReaderOptions(**spec["options"]),
        rank=spec["rank"],
        num_ranks=spec["num_ranks"],
        run=RunAttempt(name=spec["run"], attempt=spec["attempt"]),
    )
    if spec["state"] is not None:
        reader.set_state(spec["state"])
    for batch in reader.epochs(spec["num_epochs"]):
        rows = [int(row) for row in batch.dense[:, 0]]
        print(json.dumps({"rows": rows, "digest": digest(batch)[0], "state": reader.get_state()}), flush=True)
        time.sleep(spec["pause_s"])


if __name__ == "__main__":
    try:
        main()
    except MesetaError as error:
        sys.exit(str(error))
