"""Data-parallel gradients of the dense parameters, in a buffer whose layout the model fixes once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Protocol, runtime_checkable
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from meseta.comm.sum_codec import SumCodec, round_up_to_blocks
from meseta.comm.world import PendingCollective, World
from meseta.ops.device_constants import copy_to_device
from meseta.ops.memory import empty
from meseta.spec import COLUMN_BLOCK, MesetaError

BUCKET_BYTES = 2**20
"""What is worth an exchange of its own: 1 MiB takes 0.1 ms at 10 GB/s, some times as long as its messages wait."""


@runtime_checkable  # beartype asks for it where the tests check every call
class BackwardContext(Protocol):
    """What is known of the backward pass that runs."""

    accumulated_dense: list[Tensor]
    """What earlier passes of its step have left to be added over ranks, by bucket; dropped with the step."""

    @property
    def local_share(self) -> float:
        """B_local / B_global of its batch: what local means weigh in the global mean."""

    @property
    def accumulates_gradients(self) -> bool:
        """Whether its gradients wait for those of the next."""


class DenseGradients:
    """Adds dense gradients over ranks at the end of a backward pass: of each, or of the last of a step.

    Where sums go on behind the pass they begin inside it, in buckets: autograd comes to the last parameters first, and
    a bucket is on its way when it has all of its gradients and those before it are. With two buckets

        parameters     | bottom MLP       | top MLP          |
        buffers        | bucket 1 | counts |   | bucket 0     |     begun when the pass ends; in its middle

    no number of the sum is another: each is added by itself, in blocks of its own where it is encoded.

    DistributedDataParallel rebuilds its buckets after the first step, so a resumed run sums in another order and
    differs in its last bits. Here the buffer holds the parameters in the order given, for ever, followed by one
    count per parameter: a parameter without gradient on every rank keeps `grad is None`, as in one process. It is added
    in the order of `meseta.comm.sums`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        world: World,
        passes: BackwardContext,
        make_coding: Callable[[int], SumCodec] | None = None,
    ) -> None:
        """`make_coding` says how so many numbers cross hosts in this step; then each parameter begins a block."""
        self.world = world
        self._make_codec = make_coding
        self.backward_context = passes
        self.parameters = [p for p in parameters if p.requires_grad]
        dtypes = {p.dtype for p in self.parameters}
        if len(dtypes) > 1:
            raise MesetaError(
                f"dense parameters must have one dtype, got {sorted(map(str, dtypes))}; they share one buffer"
            )
        sizes = [p.numel() for p in self.parameters]
        self._padded_sizes = sizes if make_coding is None else [round_up_to_blocks(size) for size in sizes]
        if make_coding is not None and torch.float64 in dtypes:
            raise MesetaError("comm: dense parameters of float64 travel as they are; leave comm.dense at 'fp32'")
        self._parameter_indices: dict[Tensor, int] = {
            parameter: place for place, parameter in enumerate(self.parameters)
        }
        self._graph_task_id = -1
        self.overlaps_update = False
        """Whether sums go on behind the backward pass, until `finish`; to be set before the first."""
        self._missing_gradients: list[set[int]] = []
        """Places of gradients that each bucket still waits for, in the pass that runs."""
        self._pending_sums: list[PendingCollective] = []
        """Of each bucket that is on its way."""
        self._has_gradient: list[bool] = []
        """Of each parameter whose bucket has been filled."""
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
        if backward != self._graph_task_id:
            self._graph_task_id, self._pending_sums = backward, []
            self._missing_gradients = [set(bucket) for bucket in self._buckets]
            self._has_gradient = [False] * len(self.parameters)
            torch.autograd.Variable._execution_engine.queue_callback(self._reduce)
        place = self._parameter_indices[parameter]
        index = next(i for i, bucket in enumerate(self._buckets) if place in bucket)
        if index < len(self._pending_sums):
            raise MesetaError(
                f"a backward pass came twice to dense parameter {place} {list(parameter.shape)}, whose gradient is on "
                "its way to other ranks; run the passes through it one by one, or set pipeline.overlap without dense"
            )
        self._missing_gradients[index].discard(place)
        if not self.backward_context.accumulates_gradients:
            while (
                len(self._pending_sums) < len(self._buckets) - 1
                and not self._missing_gradients[len(self._pending_sums)]
            ):
                self._start_bucket(len(self._pending_sums))

    @cached_property
    def _buckets(self) -> list[range]:
        """Places of parameters, those that come first in a backward pass before others; the last one has what is
        left."""
        bounds, num_bytes = [len(self.parameters)], 0
        for place in reversed(range(1, len(self.parameters) if self.overlaps_update else 0)):
            num_bytes += self._padded_sizes[place] * self.parameters[0].element_size()
            if num_bytes >= BUCKET_BYTES:
                bounds.append(place)
                num_bytes = 0
        return [range(a, b) for b, a in pairwise([*bounds, 0])]

    def _reduce(self) -> None:
        """[gradients | in the last bucket, one count per parameter], each bucket: kept, or summed over ranks."""
        if self.backward_context.accumulates_gradients:
            buffers = [self._pack_bucket(index) for index in range(len(self._buckets))]
            self.backward_context.accumulated_dense[:] = buffers
            return
        for index in range(len(self._pending_sums), len(self._buckets)):
            self._start_bucket(index)
        self.backward_context.accumulated_dense.clear()
        if not self.overlaps_update:
            self.finish()

    def _start_bucket(self, index: int) -> None:
        """Begin the sum of a bucket."""
        buffer, bucket, coding = self._pack_bucket(index), self._buckets[index], None
        if self._make_codec is not None:
            num_coded = sum(self._padded_sizes[place] for place in bucket)
            coding = self._make_codec(num_coded)
            first = sum(self._padded_sizes[: bucket.start]) // COLUMN_BLOCK
            blocks = torch.arange(first, first + num_coded // COLUMN_BLOCK, device=buffer.device)
            coding = replace(coding, block_ids=blocks) if len(self._buckets) > 1 else coding
        self._pending_sums.append(
            self.world.start_all_reduce(buffer, "dense", coding, in_background=self.overlaps_update)
        )

    def finish(self) -> None:
        """Wait for the sums that were begun last, and give each parameter its gradient; nothing where none is open."""
        pending, self._pending_sums = self._pending_sums, []
        if not pending:
            return
        sums = [of_bucket.wait() for of_bucket in pending]
        counts: Sequence[float] = [1.0] * len(self.parameters)
        if not all(self._has_gradient):  # what has a gradient here is known to have one: no GPU is waited for
            counts = sums[-1][-len(self.parameters) :].tolist()
        for bucket, total in zip(self._buckets, sums, strict=True):
            slots = total[: sum(self._padded_sizes[place] for place in bucket)].split(
                [self._padded_sizes[place] for place in bucket]
            )
            for place, slot in zip(bucket, slots, strict=True):
                parameter = self.parameters[place]
                if counts[place]:
                    parameter.grad = slot[: parameter.numel()].view_as(parameter)

    def _pack_bucket(self, index: int) -> Tensor:
        """What this rank gives to a bucket, which its parameters no longer hold: gradients times what its samples
        weigh, and at the end of the last bucket a 1 for each that there is; with what earlier passes of the step left.
        """
        first, share, kept = (
            self.parameters[0],
            self.backward_context.local_share,
            self.backward_context.accumulated_dense,
        )
        bucket, is_last = self._buckets[index], index == len(self._buckets) - 1
        sizes = [self._padded_sizes[place] for place in bucket]
        num_counts = len(self.parameters) if is_last else 0
        buffer = empty((sum(sizes) + num_counts,), first.dtype, first.device)
        for place, slot in zip(bucket, buffer[: sum(sizes)].split(sizes), strict=True):
            parameter = self.parameters[place]
            if parameter.grad is None or share == 0:  # The mean over a rank without samples is NaN; it weighs nothing.
                slot.zero_()
            else:
                torch.mul(parameter.grad.reshape(-1), share, out=slot[: parameter.numel()])
                slot[parameter.numel() :].zero_()
            self._has_gradient[place] = parameter.grad is not None
            parameter.grad = None
        if is_last:
            there = [float(has_gradient) for has_gradient in self._has_gradient]
            buffer[sum(sizes) :].copy_(copy_to_device(there, torch.float32, first.device))
        if kept:
            buffer += kept[index]
        return buffer
