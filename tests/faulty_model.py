"""Custom model of which one rank deviates from the others at one step. Tests copy it to the folder of a run."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from meseta.comm import World


class Faulty(nn.Module):
    """Linear model with collectives at one step, in which rank `fault_rank` deviates as `fault` says."""

    def __init__(
        self,
        embeddings: Any,
        *,
        num_dense: int,
        labels: tuple[str, ...],
        seed: int,
        fault: str = "",
        fault_rank: int = 1,
        fault_step: int = 12,
        seconds: float = 0.0,
    ):
        super().__init__()
        self.embeddings = embeddings
        self.linear = nn.Linear(num_dense + sum(t.embedding_dim for t in embeddings.tables), len(labels))
        self.fault, self.step, self.num_scored = fault, fault_step, 0
        self.is_faulty = World.current().rank == fault_rank
        if fault == "late reader" and self.is_faulty:
            read_late(fault_step, seconds)

    def score(self, dense: Tensor, pooled: Tensor) -> Tensor:
        self.num_scored += self.training
        if self.num_scored == self.step and self.training:
            self.run_collectives()
        return self.linear(torch.cat([dense.to(pooled.dtype), pooled], dim=1)).squeeze(1)

    def run_collectives(self) -> None:
        """Run a gather, a sum, an exchange of objects and a broadcast on all ranks. The faulty rank deviates."""
        world, numbers = World.current(), torch.ones(40)
        faults = {
            "shorter": (numbers[:30], numbers),
            "longer": (numbers, torch.ones(50)),
            "other dtype": (numbers, numbers.double()),
            "other broadcast": (numbers, numbers),
        }
        gathered, summed = faults[self.fault] if self.is_faulty and self.fault in faults else (numbers, numbers)
        collectives = {
            "gather": lambda: world.all_gather(gathered, "agree"),
            "sum": lambda: world.all_reduce(summed.clone(), "norms"),
            "objects": lambda: world.all_gather_object(world.rank),
        }
        if self.is_faulty:
            if self.fault.startswith("without "):
                del collectives[self.fault.removeprefix("without ")]
            if self.fault == "swapped":
                collectives = {name: collectives[name] for name in ("sum", "gather", "objects")}
            if self.fault == "twice":
                world.all_gather_object(world.rank)
        for collective in collectives.values():
            collective()
        if self.fault == "other broadcast":
            world.broadcast(numbers.double() if self.is_faulty else numbers)


def read_late(step: int, seconds: float) -> None:
    """Delay the batch of one step by `seconds` in the reader of this process."""
    from meseta.pipeline.lookahead import LookaheadQueue

    read, num_read = LookaheadQueue._read, 0

    def late(self: LookaheadQueue) -> Any:
        nonlocal num_read
        num_read += 1
        if num_read == step:
            with self.stage_times.stage("data"):
                time.sleep(seconds)
        return read(self)

    LookaheadQueue._read = late  # type: ignore[method-assign]
