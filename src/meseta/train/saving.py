"""When a run saves: after so many steps or minutes, after its best evaluation, and when a signal asks it to stop."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from meseta import checkpoint
from meseta.comm import World
from meseta.config import CheckpointConfig
from meseta.embedding import EmbeddingBagCollection, ShardedEmbeddingBagCollection
from meseta.spec import MesetaError
from meseta.train.interruption import Interruption, Stopped


class Saver:
    """The checkpoints of one run; every rank has one and calls it alike.

    A clock and a signal are known to one rank alone. Each rank therefore gives `votes()` to a step, which sums them
    over all ranks, and `hear` takes the sums: all ranks then decide alike.
    """

    def __init__(self, config: CheckpointConfig, folder: Path, world: World) -> None:
        self.saved_step = 0
        """Steps of the newest checkpoint; 0 where there is none."""
        self.stopping = False
        """Whether a signal asked some rank to stop."""
        self.interruption = Interruption()
        self._config = config
        self._folder = folder
        self._world = world
        self._saved_s = time.monotonic()
        self._minutes_passed = False

    def votes(self) -> tuple[float, float]:
        """Whether a signal came, and, by the clock of rank 0, whether it is time for a checkpoint."""
        every = self._config.every_minutes
        passed = self._world.rank == 0 and every is not None and time.monotonic() - self._saved_s >= 60 * every
        return float(self.interruption.number is not None), float(passed)

    def hear(self, votes: Sequence[float]) -> None:
        """Take the sums of all ranks' votes."""
        self.stopping, self._minutes_passed = (vote > 0 for vote in votes)

    def is_due(self, step: int, is_best: bool) -> bool:
        """Whether to save after `step` steps, of which the evaluation was the best so far."""
        every = self._config.every_steps
        by_step = every is not None and step % every == 0
        return by_step or self._minutes_passed or self.stopping or (is_best and self._config.keep_best)

    def save(
        self,
        step: int,
        embeddings: EmbeddingBagCollection | ShardedEmbeddingBagCollection,
        dense: Mapping[str, Tensor],
        state: Mapping[str, Any],
        best_step: int | None,
    ) -> None:
        """Write a checkpoint, then remove older ones, but not that of `best_step`. Collective."""
        checkpoint.save(
            self._folder,
            world=self._world,
            step=step,
            plan=embeddings.plan,
            shards=embeddings.shards,
            dense=dense,
            state=state,
        )
        kept = best_step if self._config.keep_best else None
        problem = None
        if self._world.rank == 0:
            try:
                checkpoint.prune(self._folder, self._config.keep_last, kept)
            except MesetaError as error:
                problem = error
        self._world.raise_together(problem)
        self.saved_step, self._saved_s = step, time.monotonic()

    def stop(self) -> Stopped:
        """What ends a run that a signal has stopped. Collective."""
        numbers = self._world.gather_objects(self.interruption.number)
        return Stopped(next(number for number in numbers if number is not None))
