"""A run that saves repeatedly through `meseta.train.saving.CheckpointManager`, with threads as ranks, and a disk that
fails at a chosen moment."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from checkpoint.simulated import Tables, ThreadWorld, assert_holds, blank, pieces, placed, random_tables, returned
from meseta.checkpoint import load
from meseta.comm import World
from meseta.config import CheckpointConfig
from meseta.spec import OptimizerSpec, Plan, TableSpec
from meseta.storage import TableShard
from meseta.train.saving import CheckpointManager

T = TypeVar("T")
NAMES = (("user", 203, 40, "adam"), ("item/..", 97, 16, "rowwise_adagrad"), ("..", 1, 1, "sgd"))
SPECS = [
    TableSpec(name=name, num_embeddings=rows, embedding_dim=dim, optimizer=OptimizerSpec(name=optimizer))
    for name, rows, dim, optimizer in NAMES
]
"""Two tables of several blocks, whose names are no file names, and one of a single number."""


class Run:
    """Simulated run. `history` holds its rows, states and marks after each step."""

    def __init__(self, folder: Path, plan: Plan, seed: int = 0, **settings: Any) -> None:
        self.folder, self.plan, self.settings = folder, plan, settings
        self.tables = random_tables(SPECS, seed)
        self.history: dict[int, Tables] = {}
        self._begin(self.tables)

    def _begin(self, tables: Tables) -> None:
        size = self.plan.num_ranks
        slots: list[Any] = [None] * size
        gate = threading.Barrier(size, timeout=20)
        device = torch.device("cpu")
        shared: dict[str, Any] = {"size": size, "device": device, "slots": slots, "gate": gate}
        self.worlds: list[World] = [ThreadWorld(rank=rank, **shared) for rank in range(size)]
        config = CheckpointConfig(background="never", **self.settings)
        self.savers = [CheckpointManager(config, self.folder, world) for world in self.worlds]
        self.pieces = [pieces(SPECS, self.plan, rank, tables) for rank in range(size)]

    def on_ranks(self, action: Callable[[int], T]) -> list[T | Exception]:
        """Return the result of each rank, or its exception."""

        def guarded(rank: int) -> T | Exception:
            try:
                return action(rank)
            except Exception as error:
                return error

        if len(self.worlds) == 1:
            return [guarded(0)]  # a simulated kill may leave the test there
        with ThreadPoolExecutor(len(self.worlds)) as pool:
            return list(pool.map(guarded, range(len(self.worlds))))

    def train(self, seed: int) -> None:
        """Change the bits of rows, of some tables all and of others none, and mark them in the pieces."""
        draw, other = random.Random(seed), random_tables(SPECS, seed)
        for spec in SPECS:
            share = draw.choice([0.0, 0.02, 0.3, 1.0])
            rows = torch.tensor([row for row in range(spec.num_embeddings) if draw.random() < share], dtype=torch.int64)
            values = self.tables[spec.name]
            self.tables[spec.name] = {
                name: value.index_copy(0, rows, other[spec.name][name][rows]) for name, value in values.items()
            }
            for piece in (piece for held in self.pieces for piece in held if piece.spec.name == spec.name):
                self._write(piece, rows)

    def _write(self, piece: TableShard, rows: torch.Tensor) -> None:
        first, stop = piece.shard.rows
        here = rows[(rows >= first) & (rows < stop)]
        for name, target in piece.values.items():
            value = self.tables[piece.spec.name][name][here]
            target[here - first] = value[:, slice(*piece.shard.columns)] if value.dim() == 2 else value
        piece.marks.add(here - first)

    def save(self, step: int, best_step: int | None = None) -> list[Exception | None]:
        """Save on all ranks, and return the exception of each rank or `None`."""
        self.history[step] = self.tables.copy()

        def save(rank: int) -> None:
            embeddings = placed(self.plan, self.pieces[rank])
            state = {"reader": {"row": step}}
            self.savers[rank].save(step, embeddings, dense_of(step), state, best_step, is_last=False)

        return self.on_ranks(save)

    def resume(self, path: Path, plan: Plan | None = None) -> None:
        """Resume from a checkpoint in another process, which must hold the bits of its step."""
        self.plan = plan or self.plan
        self._begin(random_tables(SPECS, seed=987_654_321))
        since_whole = self.savers[0].marks_since_full

        def resume(rank: int) -> int:
            loaded = load(path, world=self.worlds[rank], shards=self.pieces[rank], mark_changes_since_full=since_whole)
            self.savers[rank].resume_from({"restores": 0, **loaded.state, "step": loaded.step})
            assert torch.equal(loaded.dense["bias"], dense_of(loaded.step)["bias"])
            return loaded.step

        [step] = set(returned(self.on_ranks(resume)))
        self.tables = self.history[step].copy()
        for held in self.pieces:
            assert_holds(held, self.tables)


def dense_of(step: int) -> dict[str, torch.Tensor]:
    return {"bias": torch.arange(4.0) + step}


def loads(path: Path, plan: Plan) -> list[tuple[int, list[TableShard]] | Exception]:
    """Return the step and the shards that each rank of a plan loads, or its error."""
    run = Run(path.parent, plan)

    def loaded(rank: int) -> tuple[int, list[TableShard]]:
        shards = blank(SPECS, plan, rank)
        return load(path, world=run.worlds[rank], shards=shards).step, shards

    return run.on_ranks(loaded)


def holds(results: Sequence[tuple[int, list[TableShard]] | Exception], history: dict[int, Tables]) -> int:
    """Return the step of the loaded shards after comparing their bits on all ranks. Raise the first error, if any."""
    loaded = returned(results)
    for step, shards in loaded:
        assert_holds(shards, history[step])
    [step] = {step for step, _ in loaded}
    return step


class Killed(BaseException):
    """Raised in place of SIGKILL: later writes of the process do not reach the disk."""


class Fuse:
    """Allows `left` changes of the file system and refuses later ones: all of them, or a given number."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.burnt = False
        self._raises: Callable[[], BaseException] = Killed
        self._num_refused = 0
        self._lock = threading.Lock()

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Audit hook of the interpreter."""
        if self.left is None or event not in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"):
            return
        is_kill = self._raises is Killed
        if event == "open" and not is_kill and not int(arguments[2] or 0) & 0o3:  # O_WRONLY or O_RDWR
            return
        with self._lock:
            self.burnt = self.burnt or self.left == 0
            if not self.burnt:
                self.left -= 1
                return
            if self._num_refused == 0:
                return
            self._num_refused -= 1
        raise self._raises()

    @contextmanager
    def lit(
        self, left: int, raises: Callable[[], BaseException] = Killed, num_refused: int = 1 << 62
    ) -> Iterator[None]:
        self.burnt, self._raises, self._num_refused = False, raises, num_refused
        self.left = left
        try:
            yield
        finally:
            self.left = None


FUSE = Fuse()
sys.addaudithook(FUSE.hook)
