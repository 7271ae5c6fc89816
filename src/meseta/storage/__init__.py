"""Where rows live: in the memory of the rank's device, or near and far."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meseta.ops.row_file import DiskEngine, RowFile
from meseta.optim import make_row_optimizer
from meseta.spec import MesetaError, Shard, TableSpec
from meseta.spec.tiers import CACHE_SLOT_OVERHEAD_BYTES, DISK, HOST, OFFLOADED_TIERS, StorageOptions, row_index_bytes
from meseta.storage.backing_store import BackingStore, HostBackingStore
from meseta.storage.lease import Lease
from meseta.storage.records import RecordLayout
from meseta.storage.resident import TableShard
from meseta.storage.selection import SelectedRows
from meseta.storage.table import ROW, TableStorage, as_stored
from meseta.storage.tiered import CacheCapacityError, TieredShard, meta_values

__all__ = [
    "ROW",
    "CacheCapacityError",
    "Lease",
    "SelectedRows",
    "TableShard",
    "TableStorage",
    "TieredShard",
    "as_stored",
    "make_storages",
]


def make_storages(
    pieces: Sequence[tuple[TableSpec, Shard]],
    *,
    seed: int,
    device: torch.device | str,
    options: StorageOptions | None = None,
) -> tuple[TableStorage, ...]:
    """Place new pieces of tables, with the initial values of (seed, table, row, column), in their tiers.

    Tier 'host' is the memory of the rank where that computes on a CPU. Raises MesetaError for an optimizer whose states
    cannot lie far, and where `options` has no room, or no disk.
    """
    options, is_cpu = options or StorageOptions(), torch.device(device).type == "cpu"
    far = [number for number, (_, shard) in enumerate(pieces) if shard.tier in OFFLOADED_TIERS]
    optimizers = [make_row_optimizer(spec.optimizer) for spec, _ in pieces]
    bytes_of = {n: RecordLayout(meta_values(*pieces[n], optimizers[n])).num_bytes for n in far}
    shared = [number for number in far if pieces[number][1].cache_rows is None]
    counts = options.allocate_cache_rows(
        [bytes_of[number] + CACHE_SLOT_OVERHEAD_BYTES for number in shared],
        [pieces[number][1].num_rows for number in shared],
        index_bytes=sum(row_index_bytes(pieces[number][1].tier, pieces[number][1].num_rows) for number in shared),
    )
    cache_rows = {number: pieces[number][1].cache_rows for number in far} | dict(zip(shared, counts, strict=True))
    engine: DiskEngine | None = None
    storages: list[TableStorage] = []
    for number, ((spec, shard), optimizer) in enumerate(zip(pieces, optimizers, strict=True)):
        if not is_cpu and shard.tier in (HOST, DISK):
            raise MesetaError(
                f"plan: table {spec.name!r} has rows in tier {shard.tier!r}, which is for ranks that compute on a CPU; "
                "place them in 'cached' or 'hbm'"
            )
        num_slots = cache_rows.get(number)
        if num_slots is None:
            storages.append(TableShard.create(spec, shard, optimizer, seed=seed, device=device))
            continue
        rows: BackingStore = HostBackingStore(shard.num_rows, bytes_of[number])
        if shard.tier == DISK:
            assert options.dir is not None
            engine = engine or DiskEngine(options.dir, options.engine, max_reads_per_s=options.max_reads_per_s)
            sizes = {"num_rows": shard.num_rows, "record_bytes": bytes_of[number]}
            rows = RowFile(engine, spec.name, **sizes, owner=shard.label)
        storages.append(TieredShard(spec, shard, optimizer, rows, num_slots=num_slots, seed=seed, device=device))
    return tuple(storages)
