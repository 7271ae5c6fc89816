"""Seconds that lookup and update spend on pieces of tables."""

from __future__ import annotations

import numpy as np

from meseta.planner.cost.loads import CACHE_LINE_BYTES, OFFLOADED_TIER_INDICES, ShardLoads, spanned_bytes
from meseta.planner.cost.reuse import Floats
from meseta.spec import CostModel
from meseta.spec.tiers import DISK, HOST, TIERS

LANES = 16
"""Numbers of a vector."""
LINE_PAIR_BYTES = 128
"""Longer rows are more than a pair of lines, which memory gives together."""
DISK_BLOCK_BYTES = 512
"""What a disk gives at a time."""
MAX_READ_GAP_BYTES = 4096
"""Rows of one request whose blocks lie no further apart are read together."""
RECORD_OVERHEAD_BYTES = 8
"""Of a record in its file, beside itself: the row's number and a checksum."""
WRITE_AMPLIFICATION_FACTOR = 2.0
"""How often a row that is pushed out is written in all, since segments with holes are cleaned, and read for that."""
FILE_FILL_SHARE = 0.7
"""Share of a file that is rows."""


def round_up_to_lines(num_bytes: Floats) -> Floats:
    """Bytes of the lines that so many bytes touch."""
    return CACHE_LINE_BYTES * np.ceil(num_bytes / CACHE_LINE_BYTES)


def round_up_to_lanes(columns: Floats) -> Floats:
    """Numbers that a row is computed in: vectors have 16."""
    return LANES * np.ceil(columns / LANES)


def lookup_terms(loads: ShardLoads) -> dict[str, Floats]:
    """What multiplies each constant of a LookupCost, per piece [n]; `call_s` is paid once a call and left out."""
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
    """What multiplies each constant of an UpdateCost, per piece [n], zero for frozen tables; those of `number_s` are
    named after their optimizers. `call_s` is paid once a call and left out."""
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
    """Seconds of lookup and of update per piece, [n] and [n]; the sum over a rank's pieces, and `call_s` of each once,
    is what the rank spends.

    Rows outside the device's memory cost their way on top, but for what a disk takes: see `disk_seconds`.
    """
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
    """Rows on their way between tiers, as far as the rank itself is busy with them or waits for its host. A table in
    the host's DRAM is read in the lookup, and read and written with its state in the update; on a CPU rank that is the
    memory it computes in. Of rows that lie near and far, those of a batch are looked for, and those that are missing
    are brought with their state and push others out, which are written back; rows that lie near in another memory than
    the device's go there and back."""
    tiers, rows = cost_model.tiers, loads.tier_misses
    in_host = (loads.tier_index == TIERS.index(HOST)) & (cost_model.device != "cpu")
    is_far = np.isin(loads.tier_index, OFFLOADED_TIER_INDICES)
    way = rows / tiers.host_bytes_per_s
    search_s = (
        tiers.cache_shard_s * loads.num_features
        + tiers.cache_id_s * loads.num_ids
        + tiers.cache_row_s * loads.num_distinct_rows
    )
    if cost_model.device != "cpu":
        search_s = search_s + (loads.tier_index == TIERS.index(DISK)) * loads.num_distinct_rows * _swap_seconds(
            cost_model, loads
        )
    brought_s = rows * fetch_seconds(cost_model, loads)
    fetch_s = np.select([in_host, is_far], [rows * tiers.host_row_s + way * loads.row_bytes, search_s + brought_s], 0.0)
    whole = loads.row_bytes + loads.state_bytes
    step_s = np.where(in_host & ~loads.is_frozen, rows * tiers.host_row_s + 2 * way * whole, 0.0)
    return fetch_s, step_s


def fetch_seconds(cost_model: CostModel, loads: ShardLoads) -> Floats:
    """Of a row of each piece that is brought near [n]: how long its rank is busy with it, or waits for its host."""
    on_disk = loads.tier_index == TIERS.index(DISK)
    return np.where(on_disk, cost_model.tiers.disk_processor_s, _swap_seconds(cost_model, loads))


def _swap_seconds(cost_model: CostModel, loads: ShardLoads) -> Floats:
    """Of a row of each piece [n]: it comes from the host's DRAM, and one goes there."""
    tiers = cost_model.tiers
    return tiers.host_row_s + 2 * (loads.row_bytes + loads.state_bytes) / tiers.host_bytes_per_s


def disk_seconds(
    cost_model: CostModel, loads: ShardLoads, devices_per_host: int = 1, max_reads_per_s: float | None = None
) -> Floats:
    """Of a row of each piece that is brought near [n]: how long the disks of its host are busy with it, beside which
    its rank computes. It is one read of the blocks that the row lies in, unless another one lies beside: of m rows
    anywhere in F bytes, m e^(-m d / F) have none, d being MAX_READ_GAP_BYTES and the blocks of a row. The row that it
    pushes out is written about twice until the end, and what is cleaned for it is read (docs/tiers.md). 0 where rows
    lie on no disk.

    The disks of a host are shared by its devices; `max_reads_per_s` is the limit of a rank.
    """
    tiers = cost_model.tiers
    entry = loads.row_bytes + loads.state_bytes + RECORD_OVERHEAD_BYTES
    apart = MAX_READ_GAP_BYTES + entry + DISK_BLOCK_BYTES
    reads = np.exp(-apart * loads.tier_misses * FILE_FILL_SHARE / (loads.num_rows * entry))
    read_s = np.maximum(reads * tiers.disk_row_s, (entry + DISK_BLOCK_BYTES) / tiers.disk_bytes_per_s)
    byte_s = 1.0 / tiers.disk_write_bytes_per_s + 1.0 / tiers.disk_bytes_per_s
    write_s = np.where(loads.is_frozen, 0.0, WRITE_AMPLIFICATION_FACTOR * entry * byte_s)
    busy_s = devices_per_host * (read_s + write_s)
    if max_reads_per_s is not None:
        busy_s = np.maximum(busy_s, reads / max_reads_per_s)
    return np.where(loads.tier_index == TIERS.index(DISK), busy_s, 0.0)
