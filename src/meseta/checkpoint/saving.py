"""Writing a checkpoint: block by block, over all ranks, committed by its store."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
from torch import Tensor

from meseta.checkpoint.exchange import BlockJob, LocalShards, SelectedCounts, exchange, group_into_rounds, pack, unpack
from meseta.checkpoint.failures import run_on_all_ranks, run_on_rank_0
from meseta.checkpoint.files.block import sync_block, write_block, write_rows
from meseta.checkpoint.files.chain import FileEntry
from meseta.checkpoint.files.layout import ID, TableLayout
from meseta.checkpoint.files.paths import block_path, rows_path, table_folder
from meseta.checkpoint.files.quantization import encode_rows
from meseta.checkpoint.files.tensors import DENSE_PATH, PREFETCHED_PATH, write_tensors
from meseta.checkpoint.manifest import build_manifest, check_state
from meseta.checkpoint.options import DEFAULT_OPTIONS, SaveOptions
from meseta.checkpoint.policy import check_base
from meseta.checkpoint.store.names import checkpoint_path
from meseta.checkpoint.store.store import CheckpointStore, make_store
from meseta.comm import World
from meseta.machine.kernel import trim_heap
from meseta.machine.remote import Location
from meseta.machine.waits.activity import track_activity
from meseta.spec import MesetaError, Plan, Shard
from meseta.spec.checkpoint_blocks import BLOCK_BYTES, NUM_PENDING_WRITES
from meseta.storage import SelectedRows, TableStorage


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
    """Write `parent/step-000000500` and return its path; collective, to be called on every rank.

    `shards` are the pieces on this rank and `plan` places all of them. `dense` and `state` (anything JSON can hold; its
    key 'reader' is the position in the data) are the same on all ranks, and those of rank 0 are written. A process
    killed at any moment leaves the former checkpoints and either nothing or the whole of the new one; an existing
    checkpoint of the same step is replaced. `parent` must be a directory that all ranks share and one run uses, or a
    URL of fsspec, to which every rank uploads the blocks that it writes, and where a checkpoint of the same step, which
    is another run's, is an error.

    With `options.base` the save is a delta: shards are the selected rows of each piece (`TableStorage.select`, or
    `select_in_place`), those that have changed since the base and those that it asks for. The base must still lie in
    `parent`.

    Raises MesetaError, on all ranks together, when shards and plan do not agree, the state is no JSON, or a file
    cannot be written, for example on a full disk; what was written so far is then deleted.
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
    """`save`, of pieces that are read in order."""
    step, plan = document["step"], document["plan"]
    base = options.base
    own = run_on_all_ranks(world, lambda: _local_layouts(world, plan, local, document["state"]))
    layouts = _merge_layouts(plan, world.all_gather_object(own))
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
    """All files, and the commit; nothing becomes a checkpoint where it fails."""
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
        if world.size > 1 and not isinstance(error, MesetaError):  # the loss of a rank, with which nobody can meet
            raise
        world.barrier()  # raised on every rank: wait until none writes any more
        if world.rank == 0:
            store.abort(growing)
        raise


def _local_layouts(world: World, plan: Plan, local: LocalShards, state: Mapping[str, Any]) -> dict[str, TableLayout]:
    """Layouts of the tables of which this rank holds a piece; raises MesetaError unless it holds what the plan says."""
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
            raise MesetaError(f"checkpoint: the shards of table {piece.spec.name!r} disagree about its spec or state")
        for name, tensor in piece.values.items():
            if tuple(tensor.shape) not in ((shard.num_rows, shard.num_columns), (shard.num_rows,)):
                raise MesetaError(
                    f"checkpoint: table {piece.spec.name!r}: {name} must be [{shard.num_rows}, {shard.num_columns}] or "
                    f"[{shard.num_rows}], got {list(tensor.shape)}"
                )
    return layouts


def _merge_layouts(plan: Plan, gathered: Sequence[Mapping[str, TableLayout]]) -> dict[str, TableLayout]:
    """Layouts of all tables, by name; every rank has the same input here, so every rank raises or none."""
    layouts: dict[str, TableLayout] = {}
    for own in gathered:
        for name, layout in own.items():
            if layouts.setdefault(name, layout) != layout:
                raise MesetaError(f"checkpoint: ranks disagree about the spec or the state of table {name!r}")
    plan.check([layout.spec for layout in layouts.values()])
    return dict(sorted(layouts.items()))


def _count_selected(world: World, layouts: Mapping[str, TableLayout], local: LocalShards) -> SelectedCounts:
    """How many rows are selected of each block, by shard, on all ranks."""
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
    """All blocks of which rows are written: the ranks in turns, and each its next one, or, where `writes_near` says so,
    its next one of those of which it holds the most bytes."""
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
    """Write all blocks, in rounds of a block, or of as many small ones, per rank; returns their entries in the manifest
    by table, on all ranks."""
    if options.rate_limiter is not None:
        options.rate_limiter.set_num_writers(min(world.size, len(jobs)) or 1)
    with ThreadPoolExecutor(NUM_PENDING_WRITES) as pool:
        writer = _BlockWriter(growing, pool, local, options)
        for round_jobs in group_into_rounds(jobs, BLOCK_BYTES):
            # Nothing here keeps what was packed while the next round is.
            writer.submit(
                exchange(world, round_jobs, run_on_all_ranks(world, partial(writer.pack_next, world, round_jobs)))
            )
        run_on_all_ranks(world, writer.finish)
    trim_heap()
    entries: dict[str, list[dict[str, Any]]] = {}
    for own in world.all_gather_object(writer.written):
        for name, entry in own:
            entries.setdefault(name, []).append(entry)
    return {name: sorted(found, key=lambda entry: entry["first_row"]) for name, found in entries.items()}


class _BlockWriter:
    """Writes the blocks of one rank in threads, while the next ones are exchanged."""

    def __init__(self, growing: Location, pool: Executor, local: LocalShards, options: SaveOptions) -> None:
        self.written: list[tuple[str, dict[str, Any]]] = []
        self._growing = growing
        self._pool = pool
        self._local = local
        self._options = options
        self._in_flight: deque[Future[list[tuple[str, dict[str, Any]]]]] = deque()

    def pack_next(self, world: World, jobs: Sequence[BlockJob]) -> Tensor:
        """Make room for one more round, then pack this rank's pieces of it."""
        self.wait_for_writes(NUM_PENDING_WRITES - 1)
        return pack(world, jobs, self._local)

    def submit(self, received: Sequence[tuple[BlockJob, Sequence[Tensor]]]) -> None:
        """Begin to write the blocks of a round, each with the bytes that came for it."""
        if not received:
            return
        self._in_flight.append(self._pool.submit(lambda: [self._write(job, parts) for job, parts in received]))

    def wait_for_writes(self, limit: int) -> None:
        """Wait until the blocks of at most `limit` rounds are being written; raises what writing raised."""
        while len(self._in_flight) > limit:
            self.written += self._in_flight.popleft().result()

    def finish(self) -> None:
        """Wait until all blocks are on the disk; raises what writing raised."""
        self.wait_for_writes(0)
        for synced in [self._pool.submit(sync_block, self._growing, entry["path"]) for _, entry in self.written]:
            synced.result()

    def _write(self, job: BlockJob, received: Sequence[Tensor]) -> tuple[str, dict[str, Any]]:
        """One block; its table, and its entry in the manifest."""
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
    """Write the tensors beside the tables, and commit with the manifest; no other rank writes any more."""
    carried, rate = options.prefetched_embeddings, options.rate_limiter
    if rate is not None:
        rate.set_num_writers(1)
    of_dense = write_tensors(growing, DENSE_PATH, dense, rate)
    of_carried = None if carried is None else write_tensors(growing, PREFETCHED_PATH, carried, rate)
    store.commit(growing, build_manifest(dense=of_dense, prefetched=of_carried, **document), rate)
