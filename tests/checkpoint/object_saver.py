"""Process that saves to a URL until it is killed."""

import os
from collections.abc import Mapping
from itertools import count
from multiprocessing.connection import Connection

from checkpoint.saver import DENSE, PLAN, SPECS, tables_of
from checkpoint.simulated import pieces
from meseta.checkpoint import newest, prune, save
from meseta.checkpoint.files import layout
from meseta.checkpoint.files.paths import parse_step
from meseta.comm import World
from meseta.system import remote


def save_step(url: str, step: int) -> None:
    """Save tables made from the seed `step`."""
    shards = pieces(SPECS, PLAN, 0, tables_of(step))
    save(url, world=World.single(), step=step, plan=PLAN, shards=shards, dense=DENSE, state={"version": step})


def save_for_ever(url: str, environment: Mapping[str, str], report: Connection) -> None:
    """Resume from the newest checkpoint, then save steps and report each saved one."""
    os.environ |= environment
    layout.BLOCK_BYTES, remote.UPLOAD_PART_BYTES, remote.RETRY_DELAYS_S = 16_384, 4096, (0.05, 0.1, 0.2, 0.4)
    path = newest(url)
    for step in count(1 if path is None else parse_step(path) + 1):
        save_step(url, step)
        report.send(step)
        prune(url, keep_last=2)
