"""Rank of the gloo check. Takes part in one all-reduce and prints the sum as one line of JSON, {"sum": 3.0}."""

from __future__ import annotations

import json
import os
import signal
import sys


def main(limit_s: int) -> None:
    """Exchange the number rank + 1 in an all-reduce and print the sum. The process ends within `limit_s` seconds."""
    # The alarm also ends this process if its parent is gone.
    signal.alarm(limit_s)
    import torch

    from meseta.comm import World

    world = World.current()
    total = world.all_reduce(torch.tensor([world.rank + 1.0]), "a measurement")
    print(json.dumps({"sum": total.item()}), flush=True)
    world.barrier()
    os._exit(0)  # Skip the teardown of the process group, which is not part of the check.


if __name__ == "__main__":
    main(int(sys.argv[1]))
