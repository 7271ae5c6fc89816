"""When a run saves: after so many steps or minutes, after its best evaluation, and when a signal asks it to stop."""

from __future__ import annotations

import math
import secrets
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meseta import checkpoint
from meseta.checkpoint.background import BackgroundSaver, select_in_place
from meseta.checkpoint.delta_tracker import DeltaTracker
from meseta.checkpoint.failures import run_on_all_ranks
from meseta.checkpoint.files.rate_limit import MIN_BYTES_PER_S
from meseta.checkpoint.manifest import RUN_ID
from meseta.checkpoint.policy import is_cumulative
from meseta.checkpoint.store.names import checkpoint_name
from meseta.checkpoint.store.store import make_store
from meseta.comm import World
from meseta.comm.timeouts import ProcessTimeouts
from meseta.config import CheckpointConfig
from meseta.config.row_bits import RowBits
from meseta.embedding import EmbeddingBagCollection, ShardedEmbeddingBagCollection
from meseta.errors import StorageError
from meseta.machine.interruption import SignalListener, TrainingInterrupt
from meseta.machine.ranks import num_local_ranks
from meseta.machine.remote import Location
from meseta.ops.row_marks.row_set import RowSet
from meseta.planner.cost.memory import copy_bytes
from meseta.spec import MesetaError, Plan
from meseta.spec.checkpoint_blocks import BLOCK_BYTES, NUM_PENDING_WRITES
from meseta.spec.tiers import DISK
from meseta.storage import SelectedRows, TableStorage
from meseta.train.setup.memory import available_bytes

READBACK_STATE_FILE = "mirror_checks.json"
"""File of run_dir with the order in which files at the mirror are read back."""
NUM_FLAGS = 3
"""Numbers that a saver has ranks agree on in every step, see `Saver.flags`."""


class CheckpointManager:
    """The checkpoints of one run; every rank has one and calls it alike.

    A clock, a signal and an error are known to one rank alone. Each rank therefore gives `flags()` to a step, which
    sums them over all ranks, and `apply_flag_sums` takes the sums: all ranks then decide alike.
    """

    def __init__(self, config: CheckpointConfig, folder: Location, world: World) -> None:
        self.saved_step = 0
        """Steps of the newest checkpoint; 0 where there is none."""
        self.is_stopping = False
        """Whether a signal asked some rank to stop."""
        self.signal_listener = SignalListener()
        self.marks_since_full = is_cumulative(config.deltas)
        """Whether a run that is resumed marks what has changed since the last whole checkpoint."""
        self._config = config
        self._folder = folder
        self._store = make_store(folder)
        self._world = world
        self._last_save_s = time.monotonic()
        self._is_interval_due = False
        self._has_reported_interval = False
        """Whether rank 0 has told since the last checkpoint that it is time for one: what is known a step later is told
        once."""
        self._background_saver = BackgroundSaver(world)
        self._delta_tracker = DeltaTracker(folder, world, config.deltas, config.max_chain)
        self._saved_shards: Sequence[TableStorage] = ()
        """Of the newest save."""
        self._has_noted_full_tables = False
        """Of tables that deltas hold whole; alike on ranks that have none."""
        self._previous_saved_step = 0
        """`saved_step` where the save in the background fails."""
        self._num_restores = 0
        """Times that rows have come back from codes."""
        self._run_id: str | None = None
        """Id in the checkpoints of this run; `None` until the first save, or until it is resumed."""
        self._rate_limiter = self._make_rate_limiter()
        self._saves_full_in_background: bool | None = None
        """Whether whole saves go on beside training."""
        self._mirror: checkpoint.Mirror | None = None
        """Of rank 0 alone."""
        if config.mirror is not None:
            world.run_on_rank_0(lambda: self._open_mirror(str(config.mirror)))
        if config.dir is not None:  # in run_dir, no other run can write
            world.run_on_rank_0(self._store.open)
        self._warnings: deque[str] = deque()

    def _open_mirror(self, url: str) -> None:
        assert isinstance(self._folder, Path)  # the config allows no mirror for checkpoints at a URL
        self._mirror = checkpoint.Mirror(url, self._folder.parent / READBACK_STATE_FILE)

    def _make_rate_limiter(self) -> checkpoint.WriteRateLimiter | None:
        """For all saves; raises MesetaError where ranks would wait so long for each other's blocks that they counted as
        stuck."""
        most = self._config.max_bytes_per_s
        if most is None:
            return None
        stall_timeout_s, num_ranks = ProcessTimeouts.limits.stall_timeout_s, self._world.size
        least = max(MIN_BYTES_PER_S, NUM_PENDING_WRITES * BLOCK_BYTES / (stall_timeout_s / 2))
        if most < least * num_ranks:
            raise MesetaError(
                f"checkpoint.max_bytes_per_s is {most:,.0f}, and must be at least {least:,.0f} for each rank, "
                f"{least * num_ranks:,.0f} in all: one that writes more slowly counts as stuck (comm.stall_timeout_s "
                f"is {stall_timeout_s:g}); raise it, or leave it out"
            )
        return checkpoint.WriteRateLimiter(
            most, is_disabled=lambda: self.is_stopping or self.signal_listener.signal_number is not None
        )

    def flags(self) -> tuple[float, float, float]:
        """Whether a signal came, whether it is time for a checkpoint by the clock of rank 0, and whether the save in
        the background met an error."""
        every = self._config.every_minutes
        passed = self._world.rank == 0 and every is not None and time.monotonic() - self._last_save_s >= 60 * every
        passed, self._has_reported_interval = passed and not self._has_reported_interval, passed
        return (
            float(self.signal_listener.signal_number is not None),
            float(passed),
            float(self._background_saver.has_failed),
        )

    def apply_flag_sums(self, flags: Sequence[float]) -> None:
        """Take the sums of all ranks' flags, if there are any; raises, on all of them, what a save in the background
        met, unless the run goes on all the same."""
        if not flags:
            return
        self.is_stopping, self._is_interval_due, failed = (flag > 0 for flag in flags)
        if failed:
            self._finish_background_save()

    def is_due(self, step: int, is_best: bool) -> bool:
        """Whether to save after `step` steps, of which the evaluation was the best so far."""
        every = self._config.every_steps
        by_step = every is not None and step % every == 0
        return by_step or self._is_interval_due or self.is_stopping or (is_best and self._config.keep_best)

    def save(
        self,
        step: int,
        embeddings: EmbeddingBagCollection | ShardedEmbeddingBagCollection,
        dense: Mapping[str, Tensor],
        state: Mapping[str, Any],
        best_step: int | None,
        *,
        is_last: bool,
        prefetched: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Write a checkpoint, then remove older ones, but not that of `best_step`; `prefetched` are new tensors of this
        save alone. Collective.

        Training goes on while it is written, unless it is the last one or memory for a copy is short. Raises, on all
        ranks, what this save or the one before it met, where `checkpoint.on_failure` or the end of the run asks for it.
        """
        prune = partial(self._prune_on_rank_0, best_step if self._config.keep_best else None)
        self._finish_background_save()
        ends = is_last or self.is_stopping
        self._last_save_s, self._has_reported_interval = time.monotonic(), False
        shards = embeddings.shards
        self._note_full_tables(shards)
        is_best = step == best_step and self._config.keep_best
        exact = is_last or is_best or (self.is_stopping and self._config.on_signal == "exact")
        bits = self._inexact_bits(embeddings.plan)
        base, rows = self._delta_tracker.begin_save(self.saved_step, shards, bits, full=bool(bits) and exact)
        bits = {} if exact else bits
        options = checkpoint.SaveOptions(
            prefetched_embeddings=prefetched, base=base, bits=bits, rate_limiter=self._rate_limiter
        )
        if self._run_id is None:
            self._run_id = self._world.broadcast_from_rank_0(lambda: secrets.token_hex(16))
        state = {**state, RUN_ID: self._run_id, **({"restores": self._num_restores} if self._num_restores else {})}
        known: dict[str, Any] = {"step": step, "plan": embeddings.plan, "state": state, "options": options}
        try:
            if not ends and self._should_save_in_background(shards, rows):
                self._background_saver.start(
                    self._store, shards=shards, rows=rows, dense=dense, on_saved=prune, **known
                )
            else:
                self._save_now(shards, rows, dense, known)
                prune(self._world)
        except MesetaError as error:
            self._delta_tracker.restore_marks(shards)
            self._handle_save_error(error, ends)
            return
        self._previous_saved_step, self.saved_step = self.saved_step, step
        self._saved_shards = shards

    def resume_from(self, state: Mapping[str, Any]) -> int:
        """Resume from a checkpoint, given what `restore` returned; returns its step. Collective.

        Raises MesetaError, on all ranks, if the mirror holds checkpoints of another run.
        """
        self.saved_step, self._num_restores = state["step"], state["restores"]
        self._run_id = state.get(RUN_ID) or self._world.broadcast_from_rank_0(lambda: secrets.token_hex(16))
        self._world.run_on_rank_0(self._check_mirror)
        return self.saved_step

    def _check_mirror(self) -> None:
        if self._mirror is not None:
            self._mirror.check_owner(self._run_id, self._folder)

    def _inexact_bits(self, plan: Plan) -> dict[str, RowBits]:
        """Of checkpoints that need not be exact, by table."""
        bits = {entry.table: self._config.table_bits(entry.table, self._num_restores) for entry in plan.tables}
        return {table: of_table for table, of_table in bits.items() if of_table is not None}

    def _save_now(
        self,
        shards: Sequence[TableStorage],
        rows: Sequence[RowSet] | None,
        dense: Mapping[str, Tensor],
        known: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint while training waits. Collective."""
        with ExitStack() as held:
            pieces: Sequence[TableStorage | SelectedRows] = shards
            if rows is not None:
                pieces = run_on_all_ranks(self._world, lambda: select_in_place(shards, rows, held))
            checkpoint.save(self._store, world=self._world, shards=pieces, dense=dense, **known)

    def _note_full_tables(self, shards: Sequence[TableStorage]) -> None:
        """Say once which tables deltas hold whole. Collective."""
        if self._has_noted_full_tables:
            return
        self._has_noted_full_tables = True
        if (note := self._delta_tracker.full_tables_note(shards)) and self._world.rank == 0:
            self._warnings.append(note)

    def _finish_background_save(self) -> None:
        """Until no save is on its way; raises, on all ranks, what the last one met, unless the run goes on anyway.
        Collective."""
        try:
            self._background_saver.wait()
        except MesetaError as error:
            self._delta_tracker.restore_marks(self._saved_shards)
            self._handle_save_error(error)
            self.saved_step = self._previous_saved_step

    def _handle_save_error(self, error: MesetaError, ends: bool = False) -> None:
        """Say that a save has failed, where the run goes on all the same; else raise what it met."""
        if ends or self._config.on_failure == "stop":
            raise error
        if self._world.rank == 0:
            self._warnings.append(
                f"{error}; training goes on (checkpoint.on_failure), and the next checkpoint tries again"
            )

    def _should_save_in_background(self, shards: Sequence[TableStorage], rows: Sequence[RowSet] | None = None) -> bool:
        """What the config says; 'auto': where every rank has twice the memory of its copy free. Of whole saves decided
        once, since their copy is kept."""
        if self._config.background != "auto":
            return self._config.background == "always"
        if rows is None and self._saves_full_in_background is not None:
            return self._saves_full_in_background
        if rows is None:
            num_bytes = copy_bytes((piece.spec, piece.shard) for piece in shards)
        else:
            each = zip(shards, rows, strict=True)
            num_bytes = sum(p.num_bytes() // p.shard.num_rows * len(some) for p, some in each if p.shard.tier != DISK)
        fits = all(self._world.all_gather_object(2 * num_bytes * num_local_ranks() <= _available_host_bytes()))
        if rows is None:
            self._saves_full_in_background = fits
        return fits

    def fetch_from_mirror(self) -> None:
        """Where this run has no checkpoint yet, take the newest of its mirror, and the best where that is kept; for
        rank 0 alone. Raises MesetaError where there is one, and the config says that nothing is to be gone on with."""
        if self._mirror is None or checkpoint.newest(self._folder) is not None or not any(self._mirror.checkpoints()):
            return
        if self._config.resume == "never":
            raise MesetaError(
                f"checkpoint.mirror {self._mirror.url!r} holds checkpoints and checkpoint.resume is 'never'; choose "
                "another mirror, or set checkpoint.resume=auto"
            )
        best = _best_checkpoint_name(next(self._mirror.checkpoints(newest_first=True)).manifest)
        if self._config.keep_best and best in self._mirror.names():
            self._mirror.get(self._folder, best)  # first: a run that is killed in between goes on from there
        self._mirror.get(self._folder)

    def _prune_on_rank_0(self, kept: int | None, world: World) -> None:
        """Remove older checkpoints, and make the mirror hold what is left."""
        world.run_on_rank_0(lambda: self._prune_and_mirror(kept))

    def _prune_and_mirror(self, kept: int | None) -> None:
        try:
            checkpoint.prune(self._store, self._config.keep_last, kept)
        except StorageError as error:  # a file may be needed by what cannot be read now
            self._warnings.append(f"{error}; no checkpoint is deleted for now, and the next save tries again")
        try:
            self._update_mirror()
        except MesetaError as error:  # a network comes back; `sync_mirror` insists
            self._warnings.append(f"{error}; training goes on, and the next checkpoint tries again")

    def _update_mirror(self) -> None:
        if self._mirror is not None:
            names = [path.name for path in self._store.list_candidates()]
            self._warnings.extend(self._mirror.update(self._folder, names, self._run_id))

    def pop_warnings(self) -> list[str]:
        """What could not be saved, or copied to the mirror, since the last call; known to rank 0 alone."""
        return [self._warnings.popleft() for _ in range(len(self._warnings))]

    def sync_mirror(self) -> None:
        """Until the mirror has what it lacks; raises, on all ranks, why it cannot. Collective.

        Prints the notes that nobody has taken yet.
        """
        self._world.run_on_rank_0(self._update_mirror)
        for note in self.pop_warnings():
            print(f"warning: {note}", file=sys.stderr)

    def wait(self) -> None:
        """Until the checkpoint is written; raises, on all ranks, what writing it met. Collective."""
        self._background_saver.wait()

    def close(self) -> None:
        """Wait for what is still written here; raises nothing, for the end of a run that met an error."""
        self._background_saver.join()

    def make_interrupt(self) -> TrainingInterrupt:
        """What ends a run that a signal has stopped. Collective."""
        numbers = self._world.all_gather_object(self.signal_listener.signal_number)
        return TrainingInterrupt(next(number for number in numbers if number is not None))


def _best_checkpoint_name(manifest: Mapping[str, Any] | None) -> str | None:
    """Name of the checkpoint that was the best when that of `manifest` was written; None where it does not say."""
    best = None if manifest is None else manifest["state"].get("best")
    step = best.get("step") if isinstance(best, dict) else None
    return checkpoint_name(step) if isinstance(step, int) else None


def _available_host_bytes() -> float:
    """Memory that this machine, or its control group, has free; without end where the system does not tell."""
    free = available_bytes(torch.device("cpu"))
    return math.inf if free is None else float(free)
