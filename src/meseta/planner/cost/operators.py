"""Predicted seconds of lookups and updates, per shard."""

from __future__ import annotations

import numpy as np

from meseta.planner.cost.loads import CACHE_LINE_BYTES, OFFLOADED_TIER_INDICES, ShardLoads, spanned_bytes
from meseta.planner.cost.reuse import Floats
from meseta.spec import CostModel
from meseta.spec.tiers import DISK, HOST, TIERS

LANES = 16
"""Elements per vector register."""
LINE_PAIR_BYTES = 128
"""Size of a pair of cache lines, which memory delivers together."""
DISK_BLOCK_BYTES = 512
"""Bytes per disk block, the unit of a read."""
MAX_READ_GAP_BYTES = 4096
"""Maximum distance between the blocks of two rows that one request reads together."""
RECORD_OVERHEAD_BYTES = 8
"""Bytes that a row file stores with each record: row number and checksum."""
WRITE_AMPLIFICATION_FACTOR = 2.0
"""Number of times that an evicted row is written in total, because cleaning rewrites segments."""
FILE_FILL_SHARE = 0.7
"""Share of a row file that holds valid rows."""


def round_up_to_lines(num_bytes: Floats) -> Floats:
    """Round a number of bytes up to complete cache lines."""
    return CACHE_LINE_BYTES * np.ceil(num_bytes / CACHE_LINE_BYTES)


def round_up_to_lanes(columns: Floats) -> Floats:
    """Round a number of columns up to complete vectors."""
    return LANES * np.ceil(columns / LANES)


def lookup_terms(loads: ShardLoads) -> dict[str, Floats]:
    """Return the factor of each constant of `LookupCost` per shard [n]. `call_s` applies once per call and is
    omitted."""
    row_bytes = spanned_bytes(loads.row_bytes)
    return {
        "shard_s": loads.num_features,
        "bag_s": loads.num_bags,
        "id_s": loads.num_ids,
        "hit_byte_s": (loads.num_ids - loads.lookup_misses) * row_bytes,
        "miss_s": loads.lookup_misses,
        "miss_byte_s": loads.lookup_misses * row_bytes,
        "long_miss_s": loads.lookup_misses * (row_bytes > LINE_PAIR_BYTES),
        "walk_s": loads.page_walks,
        "out_byte_s": loads.num_output_rows * round_up_to_lines(loads.num_columns * loads.element_bytes),
        "unaligned_byte_s": loads.num_output_rows
        * round_up_to_lines(loads.num_columns * loads.element_bytes)
        * loads.is_unaligned,
        "half_number_s": loads.is_half * loads.num_ids * round_up_to_lanes(loads.num_columns),
    }


def update_terms(loads: ShardLoads) -> dict[str, Floats]:
    """Return the factor of each constant of `UpdateCost` per shard [n]. `call_s` applies once per call and is omitted.

    Factors of `number_s` have the names of their row optimizers. All factors of frozen tables are 0.
    """
    numbers = loads.num_distinct_rows * round_up_to_lanes(loads.num_columns)
    terms = {
        "shard_s": loads.num_features,
        "bag_s": loads.num_bags,
        "id_s": loads.num_ids,
        "gradient_byte_s": loads.num_ids * round_up_to_lines(loads.num_columns * loads.element_bytes),
        "row_s": loads.num_distinct_rows,
        "hit_byte_s": loads.update_bytes * (1.0 - loads.update_miss_share),
        "miss_s": loads.update_misses,
        "miss_byte_s": loads.update_bytes * loads.update_miss_share,
        "long_miss_s": loads.update_misses * (loads.row_bytes > LINE_PAIR_BYTES),
        "walk_s": loads.page_walks,
        "half_number_s": loads.is_half * numbers,
        "staged_shard_s": loads.is_staged * loads.num_features,
        "staged_id_s": loads.is_staged * loads.num_ids,
        "staged_row_s": loads.is_staged * loads.num_distinct_rows,
    }
    terms |= {name: numbers * (loads.optimizer_index == number) for number, name in enumerate(loads.optimizers)}
    return {name: np.where(loads.is_frozen, 0.0, term) for name, term in terms.items()}


def operator_seconds(cost_model: CostModel, loads: ShardLoads) -> tuple[Floats, Floats]:
    """Return the seconds of (lookup, update) per shard [n], without `call_s`, which applies once per rank, and disk
    time, see `disk_seconds`."""
    lookup, update = cost_model.lookup, cost_model.update
    lookup_s = np.zeros_like(loads.num_ids)
    for name, term in lookup_terms(loads).items():
        lookup_s = lookup_s + getattr(lookup, name) * term
    update_s = np.zeros_like(loads.num_ids)
    for name, term in update_terms(loads).items():
        each = update.element_seconds(name) if name in loads.optimizers else getattr(update, name)
        update_s = update_s + each * term
    fetch_s, step_s = _tier_seconds(cost_model, loads)
    return lookup_s + fetch_s, update_s + step_s


def _tier_seconds(cost_model: CostModel, loads: ShardLoads) -> tuple[Floats, Floats]:
    """Return the additional seconds of (lookup, update) per shard in which the rank copies rows between tiers, or waits
    for its host."""
    tiers, rows = cost_model.tiers, loads.tier_misses
    in_host = (loads.tier_index == TIERS.index(HOST)) & (cost_model.device != "cpu")
    # Operators read tables in host DRAM during the lookup, and read and write them with their state during the update.
    # On CPU ranks this is the memory that they compute in. Offloaded shards search their cache for the rows of a batch.
    # Missing rows are fetched with their state, and evicted rows are written back.
    is_far = np.isin(loads.tier_index, OFFLOADED_TIER_INDICES)
    way = rows / tiers.host_bytes_per_s
    search_s = (
        tiers.cache_shard_s * loads.num_features
        + tiers.cache_id_s * loads.num_ids
        + tiers.cache_row_s * loads.num_distinct_rows
    )
    if cost_model.device != "cpu":
        # The cache of tier `disk` is in host DRAM, so each row is copied to the device and back.
        search_s = search_s + (loads.tier_index == TIERS.index(DISK)) * loads.num_distinct_rows * _swap_seconds(
            cost_model, loads
        )
    brought_s = rows * fetch_seconds(cost_model, loads)
    fetch_s = np.select([in_host, is_far], [rows * tiers.host_row_s + way * loads.row_bytes, search_s + brought_s], 0.0)
    whole = loads.row_bytes + loads.state_bytes
    step_s = np.where(in_host & ~loads.is_frozen, rows * tiers.host_row_s + 2 * way * whole, 0.0)
    return fetch_s, step_s


def fetch_seconds(cost_model: CostModel, loads: ShardLoads) -> Floats:
    """Return the seconds per fetched row of each shard [n] in which its rank is busy, or waits for its host."""
    on_disk = loads.tier_index == TIERS.index(DISK)
    return np.where(on_disk, cost_model.tiers.disk_processor_s, _swap_seconds(cost_model, loads))


def _swap_seconds(cost_model: CostModel, loads: ShardLoads) -> Floats:
    """Return the seconds to copy one row of each shard [n] from host DRAM, and one row back."""
    tiers = cost_model.tiers
    return tiers.host_row_s + 2 * (loads.row_bytes + loads.state_bytes) / tiers.host_bytes_per_s


def disk_seconds(
    cost_model: CostModel, loads: ShardLoads, devices_per_host: int = 1, max_reads_per_s: float | None = None
) -> Floats:
    """Return the seconds that the disks of a host are busy per fetched row of each shard [n]. The rank computes
    meanwhile.

    All devices of a host share its disks, while `max_reads_per_s` limits each rank.
    """
    tiers = cost_model.tiers
    entry = loads.row_bytes + loads.state_bytes + RECORD_OVERHEAD_BYTES
    # Rows that are close together share a read. Of m rows at random positions in F bytes, m e^(-m d / F) have no
    # neighbor within d bytes, where d is `MAX_READ_GAP_BYTES` plus the blocks of a row.
    apart = MAX_READ_GAP_BYTES + entry + DISK_BLOCK_BYTES
    reads = np.exp(-apart * loads.tier_misses * FILE_FILL_SHARE / (loads.num_rows * entry))
    read_s = np.maximum(reads * tiers.disk_row_s, (entry + DISK_BLOCK_BYTES) / tiers.disk_bytes_per_s)
    # The evicted row is written about twice in total, and cleaning reads the rows that it rewrites (docs/tiers.md).
    byte_s = 1.0 / tiers.disk_write_bytes_per_s + 1.0 / tiers.disk_bytes_per_s
    write_s = np.where(loads.is_frozen, 0.0, WRITE_AMPLIFICATION_FACTOR * entry * byte_s)
    busy_s = devices_per_host * (read_s + write_s)
    if max_reads_per_s is not None:
        busy_s = np.maximum(busy_s, reads / max_reads_per_s)
    return np.where(loads.tier_index == TIERS.index(DISK), busy_s, 0.0)
