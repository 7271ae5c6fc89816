"""Data-parallel reduction of the gradients of dense parameters, in buffers with a fixed layout."""

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
"""Minimum size of a bucket. 1 MiB takes 0.1 ms at 10 GB/s, a multiple of the latency of its messages."""


@runtime_checkable  # required by beartype, with which tests check calls
class BackwardContext(Protocol):
    """State of the current backward pass, as needed by the reduction of dense gradients."""

    accumulated_dense: list[Tensor]
    """Weighted gradients of earlier micro-batches of the step, by bucket. Dropped if the step is abandoned."""

    @property
    def local_share(self) -> float:
        """Share of this rank's samples in the global batch, by which its mean gradients are weighted."""

    @property
    def accumulates_gradients(self) -> bool:
        """Whether another micro-batch of the step follows, so that gradients are kept instead of reduced."""


class DenseGradients:
    """All-reduce of the dense gradients at the end of a backward pass, or of the last one of a step.

    With `overlaps_update`, buckets of parameters are reduced while the backward pass continues, and `finish` waits for
    them. A parameter that has no gradient on any rank keeps `grad is None`, as in one process. The sums do not depend
    on the buckets, and have the fixed order of `meseta.comm.sums`.
    """

    # The backward pass reaches the last parameters first. A bucket is reduced as soon as it has all of its gradients
    # and the buckets before it are being reduced. With two buckets:
    #
    #     parameters     | bottom MLP       | top MLP          |
    #     buffers        | bucket 1 | counts |   | bucket 0    |
    #     reduced          at the end of pass      during the pass
    #
    # The layout never changes. DistributedDataParallel rebuilds its buckets after the first step, so that a resumed run
    # adds in another order and differs in the last bits.

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        world: World,
        passes: BackwardContext,
        make_coding: Callable[[int], SumCodec] | None = None,
    ) -> None:
        """Register a hook on each parameter. `make_coding(n)` returns the codec for `n` elements in this step.

        With a codec, each parameter starts a new block. Raises MesetaError if the parameters have several dtypes, or
        are float64 and there is a codec.
        """
        self.world = world
        self._make_codec = make_coding
        self.backward_context = passes
        self.parameters = [p for p in parameters if p.requires_grad]
        dtypes = {p.dtype for p in self.parameters}
        if len(dtypes) > 1:
            raise MesetaError(
                f"dense parameters must have one dtype, got {sorted(map(str, dtypes))}; convert them, because they "
                "share a buffer"
            )
        sizes = [p.numel() for p in self.parameters]
        self._padded_sizes = sizes if make_coding is None else [round_up_to_blocks(size) for size in sizes]
        if make_coding is not None and torch.float64 in dtypes:
            raise MesetaError("comm.dense: float64 parameters cannot be encoded; set comm.dense to 'fp32'")
        self._parameter_indices: dict[Tensor, int] = {
            parameter: place for place, parameter in enumerate(self.parameters)
        }
        self._graph_task_id = -1
        self.overlaps_update = False
        """Whether reductions continue after the backward pass, until `finish`. Set it before the first pass."""
        self._missing_gradients: list[set[int]] = []
        """Indices of the parameters of each bucket that have no gradient yet in the current pass."""
        self._pending_sums: list[PendingCollective] = []
        """Reduction of each bucket that was started, in bucket order."""
        self._has_gradient: list[bool] = []
        """Whether each parameter had a gradient when its bucket was packed."""
        if world.size > 1:
            on_gradient = WeakMethod(self._on_gradient)

            # autograd's nodes keep the hook alive, and the garbage collector does not see this reference.
            def hook(parameter: Tensor) -> None:
                if (method := on_gradient()) is not None:
                    method(parameter)

            for parameter in self.parameters:
                parameter.register_post_accumulate_grad_hook(hook)

    def _on_gradient(self, parameter: Tensor) -> None:
        # A pass that raised an error has not reached `_reduce`, so a new pass is recognized by its task id.
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
                f"dense parameter {place} {list(parameter.shape)} received a second gradient while its first one is "
                "being reduced; run backward passes one after the other, or remove 'dense' from pipeline.overlap"
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
        """Parameter indices of each bucket, last parameters first. The last bucket has the remaining parameters."""
        bounds, num_bytes = [len(self.parameters)], 0
        for place in reversed(range(1, len(self.parameters) if self.overlaps_update else 0)):
            num_bytes += self._padded_sizes[place] * self.parameters[0].element_size()
            if num_bytes >= BUCKET_BYTES:
                bounds.append(place)
                num_bytes = 0
        return [range(a, b) for b, a in pairwise([*bounds, 0])]

    def _reduce(self) -> None:
        # A buffer has the gradients of a bucket. The last buffer also has one count per parameter.
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
        """Wait for the reductions of the last backward pass and set the gradients. Does nothing if there are none."""
        pending, self._pending_sums = self._pending_sums, []
        if not pending:
            return
        sums = [pending_sum.wait() for pending_sum in pending]
        counts: Sequence[float] = [1.0] * len(self.parameters)
        # Reading the counts waits for the GPU. A parameter with a gradient on this rank does not need its count.
        if not all(self._has_gradient):
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
        """Return weighted gradients plus those accumulated in the step, and clear `grad` of the parameters.

        The buffer of the last bucket ends with a 1 for each parameter that has a gradient, and a 0 for each other one.
        """
        first, share, accumulated = (
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
            if parameter.grad is None or share == 0:  # The mean over a rank without samples is NaN and has weight 0.
                slot.zero_()
            else:
                torch.mul(parameter.grad.reshape(-1), share, out=slot[: parameter.numel()])
                slot[parameter.numel() :].zero_()
            self._has_gradient[place] = parameter.grad is not None
            parameter.grad = None
        if is_last:
            has_gradient_values = [float(has_gradient) for has_gradient in self._has_gradient]
            buffer[sum(sizes) :].copy_(copy_to_device(has_gradient_values, torch.float32, first.device))
        if accumulated:
            buffer += accumulated[index]
        return buffer
