"""Seconds that lookup and update spend on pieces of tables."""

from __future__ import annotations

import numpy as np

from meseta.planner.cost.loads import LINE_BYTES, Loads, spanned
from meseta.planner.cost.reuse import Floats
from meseta.spec import CostModel
from meseta.spec.tiers import CACHED, DISK, HOST, TIERS

LANES = 16
"""Numbers of a vector."""
LONG_BYTES = 128
"""Longer rows are more than a pair of lines, which memory gives together."""
PAGE_BYTES = 4096
"""What a disk gives at a time."""


def lines(num_bytes: Floats) -> Floats:
    """Bytes of the lines that so many bytes touch."""
    return LINE_BYTES * np.ceil(num_bytes / LINE_BYTES)


def lanes(columns: Floats) -> Floats:
    """Numbers that a row is computed in: vectors have 16."""
    return LANES * np.ceil(columns / LANES)


def lookup_terms(loads: Loads) -> dict[str, Floats]:
    """What multiplies each constant of a LookupCost, per piece [n]; `call_s` is paid once a call and left out."""
    row_bytes = spanned(loads.row_bytes)
    return {
        "shard_s": loads.shards,
        "bag_s": loads.bags,
        "id_s": loads.ids,
        "hit_byte_s": (loads.ids - loads.lookup_misses) * row_bytes,
        "miss_s": loads.lookup_misses,
        "miss_byte_s": loads.lookup_misses * row_bytes,
        "long_miss_s": loads.lookup_misses * (row_bytes > LONG_BYTES),
        "walk_s": loads.walks,
        "out_byte_s": loads.rows_out * lines(loads.columns * loads.number_bytes),
        "unaligned_byte_s": loads.rows_out * lines(loads.columns * loads.number_bytes) * loads.is_unaligned,
        "half_number_s": loads.is_half * loads.ids * lanes(loads.columns),
    }


def update_terms(loads: Loads) -> dict[str, Floats]:
    """What multiplies each constant of an UpdateCost, per piece [n], zero for frozen tables; those of `number_s` are
    named after their optimizers. `call_s` is paid once a call and left out."""
    numbers = loads.distinct * lanes(loads.columns)
    terms = {
        "shard_s": loads.shards,
        "bag_s": loads.bags,
        "id_s": loads.ids,
        "gradient_byte_s": loads.ids * lines(loads.columns * loads.number_bytes),
        "row_s": loads.distinct,
        "hit_byte_s": loads.update_bytes * (1.0 - loads.update_miss_share),
        "miss_s": loads.update_misses,
        "miss_byte_s": loads.update_bytes * loads.update_miss_share,
        "long_miss_s": loads.update_misses * (loads.row_bytes > LONG_BYTES),
        "walk_s": loads.walks,
        "half_number_s": loads.is_half * numbers,
        "staged_shard_s": loads.is_staged * loads.shards,
        "staged_id_s": loads.is_staged * loads.ids,
        "staged_row_s": loads.is_staged * loads.distinct,
    }
    terms |= {name: numbers * (loads.optimizer == number) for number, name in enumerate(loads.optimizers)}
    return {name: np.where(loads.is_frozen, 0.0, term) for name, term in terms.items()}


def operator_seconds(cost_model: CostModel, loads: Loads, devices_per_host: int = 1) -> tuple[Floats, Floats]:
    """Seconds of lookup and of update per piece, [n] and [n]; the sum over a rank's pieces, and `call_s` of each once,
    is what the rank spends.

    Rows outside the device's memory cost their way on top. A host's disks are shared by its devices.
    """
    lookup, update = cost_model.lookup, cost_model.update
    lookup_s = np.zeros_like(loads.ids)
    for name, term in lookup_terms(loads).items():
        lookup_s = lookup_s + getattr(lookup, name) * term
    update_s = np.zeros_like(loads.ids)
    for name, term in update_terms(loads).items():
        each = update.number_seconds(name) if name in loads.optimizers else getattr(update, name)
        update_s = update_s + each * term
    fetch_s, step_s = _tier_seconds(cost_model, loads, devices_per_host)
    return lookup_s + fetch_s, update_s + step_s


def _tier_seconds(cost_model: CostModel, loads: Loads, devices_per_host: int) -> tuple[Floats, Floats]:
    """Rows on their way between tiers. A table in the host's DRAM is read in the lookup, and read and written with its
    state in the update. A cache fetches rows with their state before the lookup and writes back those that they push
    out."""
    tiers, rows = cost_model.tiers, loads.tier_misses
    whole = loads.row_bytes + loads.state_bytes
    way = rows / tiers.host_bytes_per_s
    pages = PAGE_BYTES * np.ceil(whole / PAGE_BYTES)
    disk_s = devices_per_host * np.maximum(2 * rows * pages / tiers.disk_bytes_per_s, 2 * rows * tiers.disk_row_s)
    in_host, cached, on_disk = (loads.tier == TIERS.index(name) for name in (HOST, CACHED, DISK))
    fetch_s = np.select(
        [in_host, cached, on_disk],
        [
            rows * tiers.host_row_s + way * loads.row_bytes,
            rows * tiers.host_row_s + 2 * way * whole,
            rows * tiers.host_row_s + 2 * way * whole + disk_s,
        ],
        0.0,
    )
    step_s = np.where(in_host & ~loads.is_frozen, rows * tiers.host_row_s + 2 * way * whole, 0.0)
    return fetch_s, step_s
