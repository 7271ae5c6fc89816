"""Storage tiers of table rows, their memory requirements, and the options of offloaded tiers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple, get_args

from meseta.errors import MesetaError, check_choice, is_int

# tier      device memory    host DRAM      local disk
# hbm       all rows         -              -
# host      -                all rows       -
# cached    cached rows      all rows       -
# disk      -                cached rows    all rows
#
# The device memory of a CPU rank is its share of the host DRAM, so the first two columns are the same memory.
Tier = Literal["hbm", "host", "cached", "disk"]
Memory = Literal["hbm", "host", "disk"]
HBM: Final = "hbm"
"""Tier in device memory, which is DRAM on a CPU rank."""
HOST: Final = "host"
"""Tier in host DRAM."""
CACHED: Final = "cached"
"""Tier in host DRAM with a row cache in device memory."""
DISK: Final = "disk"
"""Tier on a local disk with a row cache in host DRAM."""
OFFLOADED_TIERS: tuple[Tier, ...] = (CACHED, DISK)
TIERS: tuple[Tier, ...] = (HBM, HOST, CACHED, DISK)
DEFAULT_DISK_LOOKAHEAD = 2
"""Default number of batches for which rows are prefetched from disk."""
MAX_LOOKAHEAD = 64
DEFAULT_CACHE_SHARE = 0.2
"""Default share of the rows of an offloaded shard that fit in its cache."""
CACHE_SLOT_OVERHEAD_BYTES = 59
"""Maximum memory per cached row in addition to its record: marks, eviction score and slot map entry."""
ROW_INDEX_BYTES = 4
"""Memory per row of a shard on disk, cached or not, for its position in the row file."""
MAX_FILE_SIZE_RATIO = 1.5
"""Maximum size of a row file relative to its rows and optimizer states."""
ROW_FILE_PART_BYTES = 64 << 20
"""Size of a part of a row file: consecutive rows in separate segments. A sequential reader keeps several parts in
memory."""
# The disk reads the next part while the current one is being processed.
NUM_PREFETCHED_PARTS = 1
"""Number of parts that a sequential reader of a row file prefetches."""
MEMORIES: tuple[Memory, ...] = (HBM, HOST, DISK)
"""Memory of a device, memory of a host, and local disks of a host."""


def row_index_bytes(tier: str, num_rows: int) -> int:
    """Return the memory for the row file index of a shard. It is 0 unless the shard is in tier `disk`."""
    return ROW_INDEX_BYTES * num_rows if tier == DISK else 0


def rows_per_part(record_bytes: int, part_bytes: int = ROW_FILE_PART_BYTES) -> int:
    """Return the rows per part of a row file, a power of two. The last has fewer. `record_bytes` includes states."""
    return 1 << (max(part_bytes // record_bytes, 1).bit_length() - 1)


class MemoryShares(NamedTuple):
    """Factors for the memory that a shard uses in one of `MEMORIES`, by tier in the order of `TIERS`."""

    all_rows: tuple[float, ...]
    """Factors for the size of all rows and their optimizer states, by tier."""
    cached_rows: tuple[float, ...]
    """Factors for the size of the cached rows and their optimizer states, by tier."""


def memory_shares(*, is_cpu: bool) -> dict[Memory, MemoryShares]:
    """Return the use of each memory by a shard, for ranks on CPUs or on GPUs."""
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
"""I/O engine for row files. `auto` selects io_uring if the system allows it."""


@dataclass(frozen=True, kw_only=True)
class StorageOptions:
    """Options of the offloaded tiers `cached` and `disk`."""

    dir: Path | None = None
    """Folder on a local disk for the row files of tier `disk`. `None` disables the tier."""
    cache_bytes: int | None = None
    """Memory per rank for cached rows, including optimizer states and metadata. It is divided among the shards whose
    plan has no `allocate_cache_rows`. `None` means a fifth of their total size."""
    engine: EngineName = "auto"
    lookahead: int | None = None
    """Number of batches whose rows are prefetched. 0 fetches rows only when they are looked up. `None` means
    `DEFAULT_DISK_LOOKAHEAD` if any table is in tier `disk`, and 1 otherwise."""
    max_reads_per_s: float | None = None
    """Maximum number of disk reads per second of one rank. `None` means no limit."""

    def __post_init__(self) -> None:
        check_choice("storage", "engine", self.engine, get_args(EngineName))
        if self.lookahead is not None and not (is_int(self.lookahead) and 0 <= self.lookahead <= MAX_LOOKAHEAD):
            raise MesetaError(
                f"storage: lookahead must be an integer in 0..{MAX_LOOKAHEAD}, or None, got {self.lookahead!r}"
            )
        if self.cache_bytes is not None and (not is_int(self.cache_bytes) or self.cache_bytes < 1):
            raise MesetaError(f"storage: cache_bytes must be a positive integer, or None, got {self.cache_bytes!r}")

    def resolve_lookahead(self, tiers: Collection[str]) -> int:
        """Return the number of batches to prefetch if `tiers` are in use. It is 0 without an offloaded tier."""
        if not set(OFFLOADED_TIERS) & set(tiers):
            return 0
        if self.lookahead is not None:
            return self.lookahead
        return DEFAULT_DISK_LOOKAHEAD if DISK in tiers else 1

    def num_cached_batches(self, tiers: Collection[str]) -> int:
        """Return the number of batches whose rows are cached together: the current one and the prefetched ones."""
        return 1 + self.resolve_lookahead(tiers)

    def allocate_cache_rows(
        self,
        row_bytes: Sequence[int],
        num_rows: Sequence[int],
        default_share: float = DEFAULT_CACHE_SHARE,
        *,
        index_bytes: int = 0,
    ) -> list[int]:
        """Divide the cache of one rank among its shards.

        Args:
            row_bytes: Bytes per cached row of each shard.
            num_rows: Number of rows of each shard.
            default_share: Share of all bytes that are cached if `cache_bytes` is `None`.
            index_bytes: Part of `cache_bytes` that the indexes of row files occupy.

        Returns:
            Number of cached rows of each shard, at least 1.
        """
        # One half of the cache gives all shards the same number of rows, so that small tables are cached completely.
        # The other half is divided in proportion to their remaining rows.
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
    """Return the largest number of rows per shard that fits in `room` bytes. Smaller shards use less than that."""
    pieces = sorted(zip(num_rows, row_bytes, strict=True))
    for index, (count, _) in enumerate(pieces):
        of_all = sum(of_row for _, of_row in pieces[index:])
        if count * of_all > room:
            return int(room / of_all)
        room -= count * pieces[index][1]
    return max(num_rows, default=0)
