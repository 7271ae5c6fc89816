"""Data-parallel gradients of the dense parameters, in a buffer whose layout the model fixes once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from meseta.comm.coding import SumCoding, whole_blocks
from meseta.comm.world import Pending, World
from meseta.ops.memory import empty
from meseta.spec import MesetaError


@runtime_checkable  # beartype asks for it where the tests check every call
class BackwardPasses(Protocol):
    """What is known of the backward pass that runs."""

    kept_dense: list[Tensor]
    """What earlier passes of its step have left to be added over ranks; dropped with the step."""

    @property
    def local_share(self) -> float:
        """B_local / B_global of its batch: what local means weigh in the global mean."""

    @property
    def is_part(self) -> bool:
        """Whether its gradients wait for those of the next."""


class DenseGradients:
    """Adds dense gradients over ranks at the end of a backward pass: of each, or of the last of a step.

    DistributedDataParallel rebuilds its buckets after the first step, so a resumed run sums in another order and
    differs in its last bits. Here the buffer holds the parameters in the order given, for ever, followed by one
    count per parameter: a parameter without gradient on every rank keeps `grad is None`, as in one process. It is added
    in the order of `meseta.comm.sums`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        world: World,
        passes: BackwardPasses,
        make_coding: Callable[[int], SumCoding] | None = None,
    ) -> None:
        """`make_coding` says how so many numbers cross hosts in this step; then each parameter begins a block."""
        self.world = world
        self._make_coding = make_coding
        self.passes = passes
        self.parameters = [p for p in parameters if p.requires_grad]
        dtypes = {p.dtype for p in self.parameters}
        if len(dtypes) > 1:
            raise MesetaError(
                f"dense parameters must have one dtype, got {sorted(map(str, dtypes))}; they share one buffer"
            )
        sizes = [p.numel() for p in self.parameters]
        self._sizes = sizes if make_coding is None else [whole_blocks(size) for size in sizes]
        if make_coding is not None and torch.float64 in dtypes:
            raise MesetaError("comm: dense parameters of float64 travel as they are; leave comm.dense at 'fp32'")
        self._backward = -1
        self.lasts = False
        """Whether sums go on behind the backward pass, until `finish`."""
        self._pending: Pending | None = None
        if world.size > 1:
            on_gradient = WeakMethod(self._on_gradient)

            def hook(parameter: Tensor) -> None:  # autograd's nodes hold it where no collector looks
                if (method := on_gradient()) is not None:
                    method(parameter)

            for parameter in self.parameters:
                parameter.register_post_accumulate_grad_hook(hook)

    def _on_gradient(self, parameter: Tensor) -> None:
        # Told apart by the number of the pass, since one that raised never came to `_reduce`.
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._reduce)

    def _reduce(self) -> None:
        """[every gradient | one count per parameter]: kept, or summed over ranks."""
        buffer, kept = self._weighted(), self.passes.kept_dense
        if kept:
            buffer += kept.pop()
        for parameter in self.parameters:
            parameter.grad = None
        if self.passes.is_part:
            kept.append(buffer)
            return
        coding = None if self._make_coding is None else self._make_coding(sum(self._sizes))
        self._pending = self.world.start_all_reduce(buffer, "dense", coding, by_itself=self.lasts)
        if not self.lasts:
            self.finish()

    def finish(self) -> None:
        """Wait for the sum that was begun last, and give each parameter its gradient; nothing where none is open."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        *slots, counts = pending.wait().split([*self._sizes, len(self._sizes)])
        for parameter, slot, count in zip(self.parameters, slots, counts.tolist(), strict=True):
            if count:
                parameter.grad = slot[: parameter.numel()].view_as(parameter)

    def _weighted(self) -> Tensor:
        """What this rank gives: gradients times what its samples weigh, and a 1 for each that there is."""
        first, share = self.parameters[0], self.passes.local_share
        buffer = empty((sum(self._sizes) + len(self._sizes),), first.dtype, first.device)
        *slots, counts = buffer.split([*self._sizes, len(self._sizes)])
        for parameter, slot in zip(self.parameters, slots, strict=True):
            if parameter.grad is None or share == 0:  # The mean over a rank without samples is NaN; it weighs nothing.
                slot.zero_()
            else:
                torch.mul(parameter.grad.reshape(-1), share, out=slot[: parameter.numel()])
                slot[parameter.numel() :].zero_()
        counts.copy_(torch.tensor([float(p.grad is not None) for p in self.parameters]))
        return buffer
