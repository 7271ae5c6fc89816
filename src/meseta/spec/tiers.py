"""Where the rows of a table may lie, and what they take there of each memory.

tier      device's memory     host's DRAM     local disk
------    ----------------    -----------     ----------
hbm       all                 -               -
host      -                   all             -
cached    the cached share    all             -
disk      -                   the cached      all
                              share
"""

from __future__ import annotations

from typing import Final, Literal

Tier = Literal["hbm", "host", "cached", "disk"]
Memory = Literal["hbm", "host", "disk"]
HBM: Final = "hbm"
"""The memory of the rank's device; on a CPU rank, DRAM."""
HOST: Final = "host"
"""The DRAM of its host."""
CACHED: Final = "cached"
"""That, with the frequent rows in the memory of the device too."""
DISK: Final = "disk"
"""A local disk, with the frequent rows in DRAM too."""
TIERS: tuple[Tier, ...] = (HBM, HOST, CACHED, DISK)
MEMORIES: tuple[Memory, ...] = (HBM, HOST, DISK)
"""Those of the device, of its host, and disks."""


def memory_shares(cached_share: float) -> tuple[tuple[float, ...], ...]:
    """Of each of MEMORIES, for each of TIERS: the part of a piece's rows and states that lies there. A cache holds
    copies of a `cached_share` of them."""
    return (1.0, 0.0, cached_share, 0.0), (0.0, 1.0, 1.0, cached_share), (0.0, 0.0, 0.0, 1.0)
