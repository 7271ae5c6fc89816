"""A model of one's own, of which one rank does something else than the others at one step; copied to where it runs."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from meseta.comm import World


class Faulty(nn.Module):
    """Linear, with transfers of its own at one step, in which rank `fault_rank` differs as `fault` says."""

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
            self.meet()
        return self.linear(torch.cat([dense.to(pooled.dtype), pooled], dim=1)).squeeze(1)

    def meet(self) -> None:
        """All ranks but one: a gather, a sum, an exchange of objects and a broadcast."""
        world, numbers = World.current(), torch.ones(40)
        faults = {
            "shorter": (numbers[:30], numbers),
            "longer": (numbers, torch.ones(50)),
            "other dtype": (numbers, numbers.double()),
            "other broadcast": (numbers, numbers),
        }
        gathered, summed = faults[self.fault] if self.is_faulty and self.fault in faults else (numbers, numbers)
        meetings = {
            "gather": lambda: world.all_gather(gathered, "agree"),
            "sum": lambda: world.all_reduce(summed.clone(), "norms"),
            "objects": lambda: world.all_gather_object(world.rank),
        }
        if self.is_faulty:
            if self.fault.startswith("without "):
                del meetings[self.fault.removeprefix("without ")]
            if self.fault == "swapped":
                meetings = {name: meetings[name] for name in ("sum", "gather", "objects")}
            if self.fault == "twice":
                world.all_gather_object(world.rank)
        for meet in meetings.values():
            meet()
        if self.fault == "other broadcast":
            world.broadcast(numbers.double() if self.is_faulty else numbers)


def read_late(step: int, seconds: float) -> None:
    """Let the reader of this process take so long for the batch of a step."""
    from meseta.pipeline.pipeline import Pipeline

    read, num_read = Pipeline._read, 0

    def late(self: Pipeline, batches: Any) -> Any:
        nonlocal num_read
        num_read += 1
        if num_read == step:
            with self.stage_times.stage("data"):
                time.sleep(seconds)
        return read(self, batches)

    Pipeline._read = late  # type: ignore[method-assign]
