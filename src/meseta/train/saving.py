"""Checkpoints of a run: when they are saved, how they are written, and which are kept."""

from __future__ import annotations

import math
import secrets
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
from meseta.checkpoint.files.direct_io import MIN_BYTES_PER_S
from meseta.checkpoint.files.paths import checkpoint_name, checkpoint_path
from meseta.checkpoint.manifest import RUN_ID
from meseta.checkpoint.policy import is_cumulative
from meseta.checkpoint.store.store import make_store
from meseta.comm import World
from meseta.config import CheckpointConfig
from meseta.embedding import EmbeddingBagCollection, ShardedEmbeddingBagCollection
from meseta.errors import StorageError
from meseta.ops.row_marks.row_set import RowSet
from meseta.planner.cost.memory import copy_bytes
from meseta.spec import MesetaError
from meseta.spec.shards import BLOCK_BYTES, NUM_PENDING_WRITES
from meseta.spec.tiers import DISK
from meseta.storage import SelectedRows, TableStorage
from meseta.system.interruption import SignalListener, TrainingInterrupt
from meseta.system.ranks import num_local_ranks
from meseta.system.remote import Location
from meseta.system.time_limits import ProcessTimeouts
from meseta.train.setup.memory import available_bytes

READBACK_STATE_FILE = "mirror_checks.json"
"""File of run_dir with the order in which files of the mirror are read back."""
NUM_FLAGS = 3
"""Number of flags per rank and step, see `CheckpointManager.flags`."""


# Only one rank may notice that an interval has passed, a signal has arrived or a save has failed. So each rank adds its
# flags to a step, the step sums them over all ranks, and all ranks make the same decision from the sums.
class CheckpointManager:
    """Checkpoints of one run. Every rank has a manager, and all ranks make the same calls."""

    def __init__(
        self,
        config: CheckpointConfig,
        folder: Location,
        world: World,
        on_saved: Callable[[int, Location], object] | None = None,
    ) -> None:
        """Create a manager that calls `on_saved` on rank 0, in any thread, with step and path of a new checkpoint."""
        self.saved_step = 0
        """Step of the newest checkpoint. 0 if there is none."""
        self.is_stopping = False
        """Whether a signal, or an error of a callback, asked any rank to stop."""
        self.signal_listener = SignalListener()
        self.marks_since_full = is_cumulative(config.deltas)
        """Whether a resumed run marks the rows changed since the last full checkpoint."""
        self._config = config
        self._folder = folder
        self._store = make_store(folder)
        self._world = world
        self._on_saved = on_saved
        self._last_save_s = time.monotonic()
        self._is_interval_due = False
        # Whether rank 0 has reported the end of the current interval. The sums may arrive one step later, and it must
        # be reported once.
        self._has_reported_interval = False
        self._background_saver = BackgroundSaver(world)
        self._delta_tracker = DeltaTracker(folder, world, config.deltas, config.max_chain)
        # Shards of the newest save.
        self._saved_shards: Sequence[TableStorage] = ()
        # Whether the note about tables that deltas store completely was issued. Equal on all ranks.
        self._has_noted_full_tables = False
        # Value of `saved_step` to restore if the background save fails.
        self._previous_saved_step = 0
        # Number of times that the run was resumed from quantized rows.
        self._num_restores = 0
        # Id in the checkpoints of this run. `None` until the first save or resume.
        self._run_id: str | None = None
        self._rate_limiter = self._make_rate_limiter()
        # Whether full saves run in the background. `None` until it is decided.
        self._saves_full_in_background: bool | None = None
        # Set on rank 0 only.
        self._mirror: checkpoint.Mirror | None = None
        if config.mirror is not None:
            world.run_on_rank_0(lambda: self._open_mirror(str(config.mirror)))
        if config.dir is not None:  # Another run could write there. In run_dir the lock prevents this.
            world.run_on_rank_0(self._store.open)
        self._warnings: deque[str] = deque()

    def _open_mirror(self, url: str) -> None:
        assert isinstance(self._folder, Path)  # The config allows no mirror for checkpoints at a URL.
        self._mirror = checkpoint.Mirror(url, self._folder.parent / READBACK_STATE_FILE)

    def _make_rate_limiter(self) -> checkpoint.WriteRateLimiter | None:
        """Return the rate limiter, if any. Raises MesetaError if waits for a slow writer would be reported as stuck."""
        most = self._config.max_bytes_per_s
        if most is None:
            return None
        stall_timeout_s, num_ranks = ProcessTimeouts.limits.stall_timeout_s, self._world.size
        least = max(MIN_BYTES_PER_S, NUM_PENDING_WRITES * BLOCK_BYTES / (stall_timeout_s / 2))
        if most < least * num_ranks:
            raise MesetaError(
                f"checkpoint.max_bytes_per_s is {most:,.0f}, but must be at least {least:,.0f} per rank, "
                f"{least * num_ranks:,.0f} in total, because a slower rank is reported as stuck (comm.stall_timeout_s "
                f"is {stall_timeout_s:g}); raise it, or remove it"
            )
        return checkpoint.WriteRateLimiter(
            most, is_disabled=lambda: self.is_stopping or self.signal_listener.signal_number is not None
        )

    def flags(self) -> tuple[float, float, float]:
        """Return (signal received, time for a checkpoint by the clock of rank 0, background save failed) as 0 or 1."""
        every = self._config.every_minutes
        passed = self._world.rank == 0 and every is not None and time.monotonic() - self._last_save_s >= 60 * every
        passed, self._has_reported_interval = passed and not self._has_reported_interval, passed
        return (
            float(self.signal_listener.signal_number is not None),
            float(passed),
            float(self._background_saver.has_failed),
        )

    def apply_flag_sums(self, flags: Sequence[float]) -> None:
        """Take the sums of the flags of all ranks. An empty sequence has no effect.

        Raises the error of a failed background save, on all ranks, if `checkpoint.on_failure` is 'stop'.
        """
        if not flags:
            return
        self.is_stopping, self._is_interval_due, failed = (flag > 0 for flag in flags)
        if failed:
            self._finish_background_save()

    def is_due(self, step: int, is_best: bool) -> bool:
        """Whether to save after `step` steps. `is_best` says that the evaluation of this step is the best so far."""
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
        """Write a checkpoint, then delete old ones except for that of `best_step`. Collective.

        Training continues during the write, unless the checkpoint is the last one or there is too little memory for a
        copy.
        Raises, on all ranks, the error of this or the previous save, if `checkpoint.on_failure` is 'stop' or the run
        ends.

        Args:
            step: Number of steps done.
            embeddings: Collection with the tables.
            dense: Dense tensors by name.
            state: State of the run for the manifest.
            best_step: Step of the best evaluation, if there is one.
            is_last: Whether the run ends with this checkpoint.
            prefetched: Prefetched embeddings, in tensors that are not modified later.
        """
        finish = partial(self._finish_on_rank_0, step, best_step if self._config.keep_best else None)
        self._finish_background_save()
        ends = is_last or self.is_stopping
        self._last_save_s, self._has_reported_interval = time.monotonic(), False
        shards = embeddings.shards
        self._note_full_tables(shards)
        is_best = step == best_step and self._config.keep_best
        exact = is_last or is_best or (self.is_stopping and self._config.on_signal == "exact")
        tables = [entry.table for entry in embeddings.plan.tables]
        rules = {table: self._config.table_bits(table, self._num_restores) for table in tables}
        bits = {table: of_table for table, of_table in rules.items() if of_table is not None}
        base, rows = self._delta_tracker.begin_save(self.saved_step, shards, bits, full=bool(bits) and exact)
        bits = {} if exact else bits
        options = checkpoint.SaveOptions(
            prefetched_embeddings=prefetched, base=base, bits=bits, rate_limiter=self._rate_limiter
        )
        if self._run_id is None:
            self._run_id = self._world.broadcast_from_rank_0(lambda: secrets.token_hex(16))
        state = {**state, RUN_ID: self._run_id, **({"restores": self._num_restores} if self._num_restores else {})}
        arguments: dict[str, Any] = {"step": step, "plan": embeddings.plan, "state": state, "options": options}
        try:
            if not ends and self._should_save_in_background(shards, rows):
                self._background_saver.start(
                    self._store, shards=shards, rows=rows, dense=dense, on_saved=finish, **arguments
                )
            else:
                self._save_now(shards, rows, dense, arguments)
                finish(self._world)
        except MesetaError as error:
            self._delta_tracker.restore_marks(shards)
            self._handle_save_error(error, ends)
            return
        self._previous_saved_step, self.saved_step = self.saved_step, step
        self._saved_shards = shards

    def resume_from(self, state: Mapping[str, Any]) -> int:
        """Take over the state of a checkpoint, as returned by `restore`. Return its step. Collective.

        Raises MesetaError, on all ranks, if the mirror has checkpoints of another run.
        """
        self.saved_step, self._num_restores = state["step"], state["restores"]
        self._run_id = state.get(RUN_ID) or self._world.broadcast_from_rank_0(lambda: secrets.token_hex(16))
        self._world.run_on_rank_0(self._check_mirror)
        return self.saved_step

    def count_restores(self, number: int) -> None:
        """Set the number of times that the rows of a new run were restored from quantized rows."""
        self._num_restores = number

    def _check_mirror(self) -> None:
        if self._mirror is not None:
            self._mirror.check_owner(self._run_id, self._folder)

    def _save_now(
        self,
        shards: Sequence[TableStorage],
        rows: Sequence[RowSet] | None,
        dense: Mapping[str, Tensor],
        arguments: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint while training waits. Collective."""
        with ExitStack() as held:
            pieces: Sequence[TableStorage | SelectedRows] = shards
            if rows is not None:
                pieces = run_on_all_ranks(self._world, lambda: select_in_place(shards, rows, held))
            checkpoint.save(self._store, world=self._world, shards=pieces, dense=dense, **arguments)

    def _note_full_tables(self, shards: Sequence[TableStorage]) -> None:
        """Issue a note, once, about tables that deltas store completely. Collective."""
        if self._has_noted_full_tables:
            return
        self._has_noted_full_tables = True
        if (note := self._delta_tracker.full_tables_note(shards)) and self._world.rank == 0:
            self._warnings.append(note)

    def _finish_background_save(self) -> None:
        """Finish the background save. Collective. Raises its error on all ranks if `checkpoint.on_failure='stop'`."""
        try:
            self._background_saver.wait()
        except MesetaError as error:
            self._delta_tracker.restore_marks(self._saved_shards)
            self._handle_save_error(error)
            self.saved_step = self._previous_saved_step

    def _handle_save_error(self, error: MesetaError, ends: bool = False) -> None:
        # At the end of a run there is no next checkpoint that could succeed.
        if ends or self._config.on_failure == "stop":
            raise error
        if self._world.rank == 0:
            self._warnings.append(
                f"{error}; training continues (checkpoint.on_failure), and the next checkpoint tries again"
            )

    def _should_save_in_background(self, shards: Sequence[TableStorage], rows: Sequence[RowSet] | None = None) -> bool:
        """Whether to save in the background. 'auto' requires free memory of twice the copy on every rank."""
        if self._config.background != "auto":
            return self._config.background == "always"
        # Decide once for full saves, because the memory of their copy is kept.
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
        """Fetch the newest checkpoint of the mirror if there is none in the run folder. Only for rank 0.

        The best checkpoint is fetched too, if `keep_best` is set. Raises MesetaError if `checkpoint.resume` is 'never'.
        """
        if self._mirror is None or checkpoint.newest(self._folder) is not None or not any(self._mirror.checkpoints()):
            return
        if self._config.resume == "never":
            raise MesetaError(
                f"checkpoint.mirror {self._mirror.url!r} has checkpoints, but checkpoint.resume is 'never'; choose "
                "another mirror, or set checkpoint.resume=auto"
            )
        best = _best_checkpoint_name(next(self._mirror.checkpoints(newest_first=True)).manifest)
        if self._config.keep_best and best in self._mirror.names():
            self._mirror.get(self._folder, best)  # Fetched first, so that a run killed in between can resume from it.
        self._mirror.get(self._folder)

    def _finish_on_rank_0(self, step: int, kept: int | None, world: World) -> None:
        world.run_on_rank_0(lambda: self._finish_save(step, kept))

    def _finish_save(self, step: int, kept: int | None) -> None:
        if self._on_saved is not None:
            self._on_saved(step, checkpoint_path(self._folder, step))
        self._prune_and_mirror(kept)

    def _prune_and_mirror(self, kept: int | None) -> None:
        try:
            checkpoint.prune(self._store, self._config.keep_last, kept)
        except StorageError as error:  # An unreadable checkpoint may need files of an old one.
            self._warnings.append(f"{error}; no checkpoint is deleted for now, and the next save tries again")
        try:
            self._update_mirror()
        except MesetaError as error:  # A network failure may be temporary. `sync_mirror` raises if it is not.
            self._warnings.append(f"{error}; training continues, and the next checkpoint tries again")

    def _update_mirror(self) -> None:
        if self._mirror is not None:
            names = [path.name for path in self._store.list_candidates()]
            self._warnings.extend(self._mirror.update(self._folder, names, self._run_id))

    def pop_warnings(self) -> list[str]:
        """Return and remove the warnings about failed saves, mirrors and pruning. Only rank 0 has any."""
        return [self._warnings.popleft() for _ in range(len(self._warnings))]

    def sync_mirror(self) -> None:
        """Update the mirror and print its warnings. Collective. Raises MesetaError, on all ranks, if that fails."""
        self._world.run_on_rank_0(self._update_mirror)
        for note in self.pop_warnings():
            print(f"warning: {note}", file=sys.stderr)

    def wait(self) -> None:
        """Wait until the checkpoint is written. Raises its error on all ranks. Collective."""
        self._background_saver.wait()

    def close(self) -> None:
        """Wait for this rank's background writes. Raises nothing, so that it can be called after an error."""
        self._background_saver.join()

    def make_interrupt(self) -> TrainingInterrupt:
        """Return the exception that ends a stopped run. Its signal is SIGTERM if none has arrived. Collective."""
        numbers = self._world.all_gather_object(self.signal_listener.signal_number)
        return TrainingInterrupt(next((number for number in numbers if number is not None), signal.SIGTERM))


def _best_checkpoint_name(manifest: Mapping[str, Any] | None) -> str | None:
    """Return the name of the best checkpoint as of `manifest`, or `None` if it is not recorded."""
    best = None if manifest is None else manifest["state"].get("best")
    step = best.get("step") if isinstance(best, dict) else None
    return checkpoint_name(step) if isinstance(step, int) else None


def _available_host_bytes() -> float:
    """Return the free memory of this machine or control group, or inf if the system does not report it."""
    free = available_bytes(torch.device("cpu"))
    return math.inf if free is None else float(free)
