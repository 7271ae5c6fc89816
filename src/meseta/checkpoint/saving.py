"""Options of a save."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
from torch import Tensor

from meseta.checkpoint.exchange import BlockJob, LocalShards, SelectedCounts, exchange, group_into_rounds, pack, unpack
from meseta.checkpoint.failures import run_on_all_ranks, run_on_rank_0
from meseta.checkpoint.files.block import (
    DENSE_PATH,
    PREFETCHED_PATH,
    FileEntry,
    sync_block,
    write_block,
    write_rows,
    write_tensors,
)
from meseta.checkpoint.files.direct_io import WriteRateLimiter
from meseta.checkpoint.files.layout import ID, TableLayout
from meseta.checkpoint.files.paths import block_path, rows_path, table_folder
from meseta.checkpoint.files.quantization import encode_rows
from meseta.checkpoint.manifest import build_manifest, check_state
from meseta.checkpoint.policy import DeltaBase, check_base
from meseta.checkpoint.store.names import checkpoint_path
from meseta.checkpoint.store.store import CheckpointStore, make_store
from meseta.comm import World
from meseta.config.row_bits import RowBits
from meseta.spec import MesetaError, Plan, Shard
from meseta.spec.shards import BLOCK_BYTES, NUM_PENDING_WRITES
from meseta.storage import SelectedRows, TableStorage
from meseta.system.kernel import trim_heap
from meseta.system.remote import Location
from meseta.system.waits import track_activity


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """Options of one save, equal on all ranks except for the rate limiter."""

    prefetched_embeddings: Mapping[str, Tensor] | None = None
    """Embeddings of the next batch, which only rank 0 writes. `None` if there are none."""
    base: DeltaBase | None = None
    """Base checkpoint of a delta. `None` saves a full checkpoint."""
    bits: Mapping[str, RowBits] = field(default_factory=dict)
    """Bits per value of quantized rows, by table. Tables that are not listed are saved exactly."""
    rate_limiter: WriteRateLimiter | None = None
    """Limiter shared by all saves of this rank. `None` writes without a limit."""


DEFAULT_OPTIONS = SaveOptions()


def save(
    parent: Location | str | CheckpointStore,
    *,
    world: World,
    step: int,
    plan: Plan,
    shards: Sequence[TableStorage | SelectedRows],
    dense: Mapping[str, Tensor],
    state: Mapping[str, Any],
    options: SaveOptions = DEFAULT_OPTIONS,
) -> Location:
    """Write the checkpoint `parent/step-...` and return its location. Collective.

    A process that is killed at any time leaves the previous checkpoints, and the new one completely or not at all. With
    `options.base`, the checkpoint is a delta, and `parent` must contain its base.

    Args:
        parent: A folder that all ranks share, an fsspec URL, or a store. Only one run may use it. In a folder, a
            checkpoint of the same step is replaced. At a URL it raises an error, because another run wrote it.
        world: Ranks that save.
        step: Number of steps trained.
        plan: Placement of all shards.
        shards: Shards of this rank. For a delta, the selected rows of each shard: those that changed since the base,
            and those that the base requires.
        dense: Tensors of the dense part, equal on all ranks. Rank 0 writes them.
        state: State of the trainer that JSON can represent, equal on all ranks. Key 'reader' is the position in the
            data.
        options: Options of the save.

    Raises MesetaError on all ranks if shards and plan do not match, JSON cannot represent the state, or a file cannot
    be written. The unfinished checkpoint is then deleted.
    """
    store = make_store(parent)
    local: dict[Shard, TableStorage | SelectedRows] = {piece.shard: piece for piece in shards}
    whole = [piece for piece in shards if isinstance(piece, TableStorage)]
    try:
        run_on_all_ranks(world, lambda: local.update({piece.shard: piece.sequential_view() for piece in whole}))
        document = {"step": step, "plan": plan, "state": state}
        with track_activity(f"saving step {step}"):
            return _save(store, world, document, local, dense, options)
    finally:
        for piece in whole:
            if local[piece.shard] is not piece:
                local[piece.shard].close()


def _save(
    store: CheckpointStore,
    world: World,
    document: Mapping[str, Any],
    local: LocalShards,
    dense: Mapping[str, Tensor],
    options: SaveOptions,
) -> Location:
    step, plan = document["step"], document["plan"]
    base = options.base
    local_layouts = run_on_all_ranks(world, lambda: _local_layouts(world, plan, local, document["state"]))
    layouts = _merge_layouts(plan, world.all_gather_object(local_layouts))
    selected = None if base is None else _count_selected(world, layouts, local)
    if base is not None:
        run_on_rank_0(world, lambda: check_base(base, step, layouts))
    jobs = run_on_all_ranks(world, lambda: _assign_jobs(world, plan, layouts, selected, store.writes_locally))
    with ExitStack() as held:
        run_on_rank_0(world, lambda: held.enter_context(store.lock()))
        _write(store, world, document, layouts, jobs, local, dense, options)
    path: Location = checkpoint_path(store.parent, step)
    return path


def _write(
    store: CheckpointStore,
    world: World,
    document: Mapping[str, Any],
    layouts: Mapping[str, TableLayout],
    jobs: Sequence[BlockJob],
    local: LocalShards,
    dense: Mapping[str, Tensor],
    options: SaveOptions,
) -> None:
    step, base = document["step"], options.base
    folders = sorted({table_folder(job.layout.spec.name) for job in jobs})
    growing = store.staging_path(step)
    try:
        run_on_rank_0(world, lambda: store.begin(step, folders))
        run_on_all_ranks(world, lambda: store.check_shared(growing))
        blocks: Mapping[str, Sequence[FileEntry]] = _write_blocks(world, growing, jobs, local, options)
        if base is not None and world.rank == 0:
            document = {**document, "deltas": base.manifest_entry(blocks)}
            blocks = base.chain_files(blocks)
        tables = {name: {**layouts[name].to_dict(), "blocks": entries} for name, entries in blocks.items()}
        run_on_rank_0(world, partial(_commit, store, growing, {**document, "tables": tables}, dense, options))
    except Exception as error:
        # Other errors mean that a rank is lost, so a barrier would block.
        if world.size > 1 and not isinstance(error, MesetaError):
            raise
        world.barrier()  # A MesetaError is raised on all ranks. Wait until no rank writes anymore.
        if world.rank == 0:
            store.abort(growing)
        raise


def _local_layouts(world: World, plan: Plan, local: LocalShards, state: Mapping[str, Any]) -> dict[str, TableLayout]:
    """Return the layouts of this rank's tables. Raises MesetaError unless the shards match the plan."""
    check_state(state)
    if plan.num_ranks != world.size:
        raise MesetaError(f"checkpoint: the plan is for {plan.num_ranks} ranks, but {world.size} are saving")
    planned = {shard for entry in plan.tables for shard in entry.shards if world.rank in shard.ranks}
    for shard in planned ^ set(local):
        side = "is not in the plan" if shard in local else "was not given"
        raise MesetaError(
            f"checkpoint: table {shard.table!r}: the shard of rows {shard.rows[0]}..{shard.rows[1] - 1} and columns "
            f"{shard.columns[0]}..{shard.columns[1] - 1} on rank {world.rank} {side}; "
            "save with the plan that made the shards"
        )
    layouts: dict[str, TableLayout] = {}
    for shard, piece in local.items():
        layout = TableLayout.from_values(piece.spec, piece.values)
        if layouts.setdefault(piece.spec.name, layout) != layout:
            raise MesetaError(f"checkpoint: the shards of table {piece.spec.name!r} must have the same spec and state")
        for name, tensor in piece.values.items():
            if tuple(tensor.shape) not in ((shard.num_rows, shard.num_columns), (shard.num_rows,)):
                raise MesetaError(
                    f"checkpoint: table {piece.spec.name!r}: {name} must be [{shard.num_rows}, {shard.num_columns}] or "
                    f"[{shard.num_rows}], got {list(tensor.shape)}"
                )
    return layouts


def _merge_layouts(plan: Plan, gathered: Sequence[Mapping[str, TableLayout]]) -> dict[str, TableLayout]:
    # The input is equal on all ranks, so either all ranks raise or none.
    layouts: dict[str, TableLayout] = {}
    for local_layouts in gathered:
        for name, layout in local_layouts.items():
            if layouts.setdefault(name, layout) != layout:
                raise MesetaError(f"checkpoint: ranks must have the same spec and state of table {name!r}")
    plan.check([layout.spec for layout in layouts.values()])
    return dict(sorted(layouts.items()))


def _count_selected(world: World, layouts: Mapping[str, TableLayout], local: LocalShards) -> SelectedCounts:
    counts: dict[Shard, dict[int, int]] = {}
    for shard, piece in local.items():
        if not isinstance(piece, SelectedRows) or shard.ranks[0] != world.rank:
            continue
        start, num_rows = shard.rows[0], shard.num_rows
        here = {
            first: piece.rows.count(max(first - start, 0), min(stop - start, num_rows))
            for first, stop in layouts[piece.spec.name].block_ranges()
            if first < shard.rows[1] and start < stop
        }
        counts[shard] = {first: count for first, count in here.items() if count}
    return {shard: held for part in world.all_gather_object(counts) for shard, held in part.items()}


def _assign_jobs(
    world: World, plan: Plan, layouts: Mapping[str, TableLayout], selected: SelectedCounts | None, writes_near: bool
) -> list[BlockJob]:
    # With `writes_near`, a block's writer is the rank that holds most of its bytes. Otherwise blocks are assigned
    # round-robin.
    blocks = [(layout, span) for layout in layouts.values() for span in layout.block_ranges()]
    jobs = [BlockJob.from_plan(layout, span, 0, plan[layout.spec.name], selected) for layout, span in blocks]
    jobs = [job for job in jobs if job.num_rows]
    if not writes_near:
        return [replace(job, writer=i % world.size) for i, job in enumerate(jobs)]
    by_writer: list[list[BlockJob]] = [[] for _ in range(world.size)]
    for job in jobs:
        held = Counter[int]()
        for piece in job.slices:
            held[piece.sender] += piece.num_bytes
        writer = min(held, key=lambda rank: (-held[rank], rank))
        by_writer[writer].append(replace(job, writer=writer))
    return [job for turn in zip_longest(*by_writer) for job in turn if job is not None]


def _write_blocks(
    world: World, growing: Location, jobs: Sequence[BlockJob], local: LocalShards, options: SaveOptions
) -> dict[str, list[dict[str, Any]]]:
    """Write all blocks. Return the manifest entries of all written files by table, on all ranks."""
    # A round has one large block or several small ones per rank.
    if options.rate_limiter is not None:
        options.rate_limiter.set_num_writers(min(world.size, len(jobs)) or 1)
    with ThreadPoolExecutor(NUM_PENDING_WRITES) as pool:
        writer = _BlockWriter(growing, pool, local, options)
        for round_jobs in group_into_rounds(jobs, BLOCK_BYTES):
            # Without a variable, the packed bytes are freed before the next round is packed.
            writer.submit(
                exchange(world, round_jobs, run_on_all_ranks(world, partial(writer.pack_next, world, round_jobs)))
            )
        run_on_all_ranks(world, writer.finish)
    trim_heap()
    entries: dict[str, list[dict[str, Any]]] = {}
    for local_entries in world.all_gather_object(writer.written):
        for name, entry in local_entries:
            entries.setdefault(name, []).append(entry)
    return {
        name: sorted(unsorted_entries, key=lambda entry: entry["first_row"])
        for name, unsorted_entries in entries.items()
    }


class _BlockWriter:
    """Writes the blocks of one rank in threads, while the next blocks are exchanged."""

    def __init__(self, growing: Location, pool: Executor, local: LocalShards, options: SaveOptions) -> None:
        self.written: list[tuple[str, dict[str, Any]]] = []
        self._growing = growing
        self._pool = pool
        self._local = local
        self._options = options
        self._in_flight: deque[Future[list[tuple[str, dict[str, Any]]]]] = deque()

    def pack_next(self, world: World, jobs: Sequence[BlockJob]) -> Tensor:
        """Wait until another round may be submitted, then pack this rank's slices of it."""
        self.wait_for_writes(NUM_PENDING_WRITES - 1)
        return pack(world, jobs, self._local)

    def submit(self, received: Sequence[tuple[BlockJob, Sequence[Tensor]]]) -> None:
        """Start writing the blocks of a round. Each block comes with the slices received from other ranks."""
        if not received:
            return
        self._in_flight.append(self._pool.submit(lambda: [self._write(job, parts) for job, parts in received]))

    def wait_for_writes(self, limit: int) -> None:
        """Wait until the blocks of at most `limit` rounds are being written. Raises the first error of a write."""
        while len(self._in_flight) > limit:
            self.written += self._in_flight.popleft().result()

    def finish(self) -> None:
        self.wait_for_writes(0)
        for synced in [self._pool.submit(sync_block, self._growing, entry["path"]) for _, entry in self.written]:
            synced.result()

    def _write(self, job: BlockJob, received: Sequence[Tensor]) -> tuple[str, dict[str, Any]]:
        """Return (table, entry in the manifest)."""
        name, schema = job.layout.spec.name, job.layout.schema
        number = job.rows[0] // schema.block_rows
        values = unpack(job, received, self._local)
        ids = np.arange(job.num_rows, dtype=np.uint32) if job.is_full else values.pop(ID)
        rows, rate = encode_rows(schema, values, self._options.bits.get(name)), self._options.rate_limiter
        if job.is_full and not rows.formats:
            path = block_path(name, number)
            return name, write_block(self._growing, path, schema, job.rows[0], values, rate)
        return name, write_rows(self._growing, rows_path(name, number), schema, job.rows[0], ids, rows, rate)


def _commit(
    store: CheckpointStore,
    growing: Location,
    document: Mapping[str, Any],
    dense: Mapping[str, Tensor],
    options: SaveOptions,
) -> None:
    # All other ranks have finished writing.
    prefetched, rate = options.prefetched_embeddings, options.rate_limiter
    if rate is not None:
        rate.set_num_writers(1)
    dense_entry = write_tensors(growing, DENSE_PATH, dense, rate)
    prefetched_entry = None if prefetched is None else write_tensors(growing, PREFETCHED_PATH, prefetched, rate)
    store.commit(growing, build_manifest(dense=dense_entry, prefetched=prefetched_entry, **document), rate)
