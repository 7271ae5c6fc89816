"""Data-parallel gradients of the dense parameters, in a buffer whose layout the model fixes once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from meseta.comm.world import World
from meseta.ops.memory import empty
from meseta.spec import MesetaError


class DenseGradients:
    """Adds dense gradients over ranks at the end of every backward pass, in one all-reduce.

    DistributedDataParallel rebuilds its buckets after the first step, so a resumed run sums in another order and
    differs in its last bits. Here the buffer holds the parameters in the order given, for ever, followed by one
    count per parameter: a parameter without gradient on every rank keeps `grad is None`, as in one process.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], world: World, local_share: Callable[[], float]) -> None:
        """`local_share()` is B_local / B_global of the batch in hand: what local means weigh in the global mean."""
        self.world = world
        self.local_share = local_share
        self.parameters = [p for p in parameters if p.requires_grad]
        dtypes = {p.dtype for p in self.parameters}
        if len(dtypes) > 1:
            raise MesetaError(
                f"dense parameters must have one dtype, got {sorted(map(str, dtypes))}; they share one buffer"
            )
        self._backward = -1
        if world.size > 1:
            for parameter in self.parameters:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def _on_gradient(self, parameter: Tensor) -> None:
        # Told apart by the number of the pass, since one that raised never came to `_reduce`.
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._reduce)

    def _reduce(self) -> None:
        """[every gradient | one count per parameter], summed over ranks, written back."""
        sizes = [p.numel() for p in self.parameters]
        first = self.parameters[0]
        buffer = empty((sum(sizes) + len(sizes),), first.dtype, first.device)
        *slots, counts = buffer.split([*sizes, len(sizes)])
        share = self.local_share()
        for parameter, slot in zip(self.parameters, slots, strict=True):
            if parameter.grad is None or share == 0:  # The mean over a rank without samples is NaN; it weighs nothing.
                slot.zero_()
            else:
                torch.mul(parameter.grad.reshape(-1), share, out=slot)
        counts.copy_(torch.tensor([float(p.grad is not None) for p in self.parameters]))
        self.world.all_reduce(buffer, "dense")
        for parameter, slot, count in zip(self.parameters, slots, counts.tolist(), strict=True):
            if count:
                parameter.grad = slot.view_as(parameter)
