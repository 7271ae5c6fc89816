"""Process that saves until it is killed."""

from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from checkpoint.simulated import Tables, blank, pieces, plain_plan, random_tables, some_specs
from meseta.checkpoint import load, prune, save
from meseta.checkpoint.files import layout
from meseta.comm import World

SPECS = some_specs()[1:]
PLAN = plain_plan(SPECS, 1, "table_wise")


DENSE = {"weight": torch.arange(6.0).view(2, 3)}


def save_version(parent: Path, version: int) -> None:
    """Save tables made from the seed `version`. Versions 2k and 2k + 1 are both step k, so that one replaces the
    other."""
    shards = pieces(SPECS, PLAN, 0, tables_of(version))
    state = {"version": version}
    save(parent, world=World.single(), step=version // 2, plan=PLAN, shards=shards, dense=DENSE, state=state)


def tables_of(version: int) -> Tables:
    return random_tables(SPECS, seed=version)


def load_version(path: Path) -> tuple[int, list]:
    """Return (version, the shards as loaded)."""
    shards = blank(SPECS, PLAN, 0)
    return load(path, world=World.single(), shards=shards).state["version"], shards


def save_for_ever(parent: Path, first: int, report: Connection) -> None:
    """Save the versions from `first` on, and report each saved one."""
    layout.BLOCK_BYTES = 16_384
    for version in count(first):
        save_version(parent, version)
        report.send(version)
        prune(parent, keep_last=2)
