"""Where the rows of a table may lie, and what they take there of each memory.

tier      device's memory     host's DRAM     local disk
------    ----------------    -----------     ----------
hbm       all                 -               -
host      -                   all             -
cached    near rows           all             -
disk      -                   near rows       all

The memory of a CPU rank is its part of the host's DRAM, so what is said to lie in the one or the other lies there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple, get_args

from meseta.errors import MesetaError, check_choice, is_int

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
OFFLOADED_TIERS: tuple[Tier, ...] = (CACHED, DISK)
"""Whose rows lie far, and near while batches need them."""
TIERS: tuple[Tier, ...] = (HBM, HOST, CACHED, DISK)
DEFAULT_DISK_LOOKAHEAD = 2
"""Batches whose rows are on their way from a disk while another is trained, where nobody says more."""
MAX_LOOKAHEAD = 64
DEFAULT_CACHE_SHARE = 0.2
"""Of a piece's rows that lie near, where nobody says more."""
CACHE_SLOT_OVERHEAD_BYTES = 59
"""Beside its row, a near row takes so many at most: its marks, what tells when it leaves, an entry of the directory."""
ROW_INDEX_BYTES = 4
"""Of each row of a piece on a disk, near or far: where it lies in its file."""
MAX_FILE_SIZE_RATIO = 1.5
"""What a file of rows takes, at most, over its rows with their states."""
ROW_FILE_PART_BYTES = 64 << 20
"""Of consecutive rows that fill segments of their own; who reads all rows in order holds as much, some times."""
NUM_PREFETCHED_PARTS = 1
"""Parts that are read while one is taken: the disk is busy while another is looked up."""
MEMORIES: tuple[Memory, ...] = (HBM, HOST, DISK)
"""Those of the device, of its host, and disks."""


def row_index_bytes(tier: str, num_rows: int) -> int:
    """Of memory for where the rows of a piece lie."""
    return ROW_INDEX_BYTES * num_rows if tier == DISK else 0


def rows_per_part(record_bytes: int, part_bytes: int = ROW_FILE_PART_BYTES) -> int:
    """Rows of each part but the last, where a row has `record_bytes` with its states."""
    return 1 << (max(part_bytes // record_bytes, 1).bit_length() - 1)


class MemoryShares(NamedTuple):
    """What one of MEMORIES has of a piece in each of TIERS."""

    all_rows: tuple[float, ...]
    """How often all of its rows with their states."""
    cached_rows: tuple[float, ...]
    """How often those that lie near."""


def memory_shares(*, is_cpu: bool) -> dict[Memory, MemoryShares]:
    """Of each of MEMORIES, of ranks that compute on a CPU or not."""
    nothing, disk = (0.0, 0.0, 0.0, 0.0), MemoryShares((0.0, 0.0, 0.0, MAX_FILE_SIZE_RATIO), (0.0, 0.0, 0.0, 0.0))
    if is_cpu:
        return {
            HBM: MemoryShares((1.0, 1.0, 1.0, 0.0), (0.0, 0.0, 1.0, 1.0)),
            HOST: MemoryShares(nothing, nothing),
            DISK: disk,
        }
    return {
        HBM: MemoryShares((1.0, 0.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0)),
        HOST: MemoryShares((0.0, 1.0, 1.0, 0.0), (0.0, 0.0, 0.0, 1.0)),
        DISK: disk,
    }


EngineName = Literal["auto", "io_uring", "threads"]
"""What reads a disk: 'auto' takes io_uring where the system allows it."""


@dataclass(frozen=True, kw_only=True)
class StorageOptions:
    """Room for rows of tiers 'cached' and 'disk'."""

    dir: Path | None = None
    """Folder on a local disk for the scratch files of tier 'disk'; None: no row may lie on a disk."""
    cache_bytes: int | None = None
    """Memory of each rank for rows that lie near, with their states and what is known of them; it is shared out to the
    pieces whose plan has no `near_rows`, by their bytes. None: a fifth of these."""
    engine: EngineName = "auto"
    """What reads and writes the disk."""
    lookahead: int | None = None
    """Batches whose rows are brought before their turn; 0: rows come when they are looked up. None:
    DEFAULT_DISK_LOOKAHEAD where rows lie on a disk, else 1."""
    max_reads_per_s: float | None = None
    """Reads of the disk a second that a rank makes at most; None: no limit."""

    def __post_init__(self) -> None:
        check_choice("storage", "engine", self.engine, get_args(EngineName))
        if self.lookahead is not None and not (is_int(self.lookahead) and 0 <= self.lookahead <= MAX_LOOKAHEAD):
            raise MesetaError(f"storage: lookahead must be 0 to {MAX_LOOKAHEAD}, or None, got {self.lookahead!r}")
        if self.cache_bytes is not None and (not is_int(self.cache_bytes) or self.cache_bytes < 1):
            raise MesetaError(f"storage: near_bytes must be at least 1, or None for a share, got {self.cache_bytes!r}")

    def resolve_lookahead(self, tiers: Collection[str]) -> int:
        """Batches whose rows are brought before their turn, where rows lie in these tiers."""
        if not set(OFFLOADED_TIERS) & set(tiers):
            return 0
        if self.lookahead is not None:
            return self.lookahead
        return DEFAULT_DISK_LOOKAHEAD if DISK in tiers else 1

    def num_cached_batches(self, tiers: Collection[str]) -> int:
        """Batches whose rows lie near at once: the one in hand, and those ahead."""
        return 1 + self.resolve_lookahead(tiers)

    def allocate_cache_rows(
        self,
        row_bytes: Sequence[int],
        num_rows: Sequence[int],
        default_share: float = DEFAULT_CACHE_SHARE,
        *,
        index_bytes: int = 0,
    ) -> list[int]:
        """Of pieces of one rank, with so many bytes for a row that lies near, and so many rows: how many may.

        What there is, near_bytes less the `index_bytes` of rows on a disk, or `default_share` of all, goes by halves:
        from the first each piece gets as many rows as any other, or all that it has, so that small tables lie near
        whole; from the second each gets a share of what it has beyond.
        """
        whole = sum(of_row * count for of_row, count in zip(row_bytes, num_rows, strict=True))
        room = default_share * whole
        if self.cache_bytes is not None:
            room = float(min(max(self.cache_bytes - index_bytes, 0), whole))
        level = _max_uniform_rows(row_bytes, num_rows, room / 2)
        first = [min(count, level) for count in num_rows]
        rest = room - sum(of_row * count for of_row, count in zip(row_bytes, first, strict=True))
        share = min(rest / max(whole - room + rest, 1.0), 1.0)
        return [max(least + int((count - least) * share), 1) for least, count in zip(first, num_rows, strict=True)]


def _max_uniform_rows(row_bytes: Sequence[int], num_rows: Sequence[int], room: float) -> int:
    """Rows that every piece may have, or all of its own where these are fewer, in so many bytes."""
    pieces = sorted(zip(num_rows, row_bytes, strict=True))
    for index, (count, _) in enumerate(pieces):
        of_all = sum(of_row for _, of_row in pieces[index:])
        if count * of_all > room:
            return int(room / of_all)
        room -= count * pieces[index][1]
    return max(num_rows, default=0)
