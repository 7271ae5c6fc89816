"""Storage of table shards: in device memory, or in a backing store with a cache in front."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meseta.ops.row_file import DiskEngine, RowFile
from meseta.optim import make_row_optimizer
from meseta.spec import MesetaError, Shard, TableSpec
from meseta.spec.tiers import CACHE_SLOT_OVERHEAD_BYTES, DISK, HOST, OFFLOADED_TIERS, StorageOptions, row_index_bytes
from meseta.storage.backing_store import BackingStore, HostBackingStore, RecordLayout
from meseta.storage.selection import SelectedRows
from meseta.storage.table import ROW, Lease, TableShard, TableStorage, as_stored
from meseta.storage.tiered import CacheCapacityError, TieredShard, fetch_rows, meta_values

__all__ = [
    "ROW",
    "CacheCapacityError",
    "Lease",
    "SelectedRows",
    "TableShard",
    "TableStorage",
    "TieredShard",
    "as_stored",
    "fetch_rows",
    "make_storages",
]


def make_storages(
    pieces: Sequence[tuple[TableSpec, Shard]],
    *,
    seed: int,
    device: torch.device | str,
    options: StorageOptions | None = None,
) -> tuple[TableStorage, ...]:
    """Create the storage of each new shard in its tier.

    The initial value of an element depends on (seed, table, row, column) only, and not on the sharding or the tier.

    Raises MesetaError if the device does not support a tier, a disk cannot be used, the cache does not fit into
    `options`, or the optimizer of an offloaded shard cannot initialize rows one at a time.
    """
    options, is_cpu = options or StorageOptions(), torch.device(device).type == "cpu"
    offloaded_indices = [index for index, (_, shard) in enumerate(pieces) if shard.tier in OFFLOADED_TIERS]
    optimizers = [make_row_optimizer(spec.optimizer, spec.average) for spec, _ in pieces]
    record_bytes = {n: RecordLayout(meta_values(*pieces[n], optimizers[n])).num_bytes for n in offloaded_indices}
    # Shards without a cache size in the plan share the memory of `options`.
    auto_sized = [index for index in offloaded_indices if pieces[index][1].cache_rows is None]
    counts = options.allocate_cache_rows(
        [record_bytes[index] + CACHE_SLOT_OVERHEAD_BYTES for index in auto_sized],
        [pieces[index][1].num_rows for index in auto_sized],
        index_bytes=sum(row_index_bytes(pieces[index][1].tier, pieces[index][1].num_rows) for index in auto_sized),
    )
    num_slots_by_index = {index: pieces[index][1].cache_rows for index in offloaded_indices} | dict(
        zip(auto_sized, counts, strict=True)
    )
    engine: DiskEngine | None = None
    storages: list[TableStorage] = []
    for index, ((spec, shard), optimizer) in enumerate(zip(pieces, optimizers, strict=True)):
        if not is_cpu and shard.tier in (HOST, DISK):
            raise MesetaError(
                f"plan: table {spec.name!r}: tier {shard.tier!r} requires ranks on CPUs; use tier 'cached' or "
                "'hbm' on GPUs"
            )
        num_slots = num_slots_by_index.get(index)
        # Tiers 'hbm' and 'host' have no cache. A rank on a CPU has both in host memory.
        if num_slots is None:
            storages.append(TableShard.create(spec, shard, optimizer, seed=seed, device=device))
            continue
        store: BackingStore = HostBackingStore(shard.num_rows, record_bytes[index])
        if shard.tier == DISK:
            assert options.dir is not None
            # The shards of a rank share one engine, because `max_reads_per_s` limits the rank.
            engine = engine or DiskEngine(options.dir, options.engine, max_reads_per_s=options.max_reads_per_s)
            sizes = {"num_rows": shard.num_rows, "record_bytes": record_bytes[index]}
            store = RowFile(engine, spec.name, **sizes, owner=shard.label)
        storages.append(TieredShard(spec, shard, optimizer, store, num_slots=num_slots, seed=seed, device=device))
    return tuple(storages)
