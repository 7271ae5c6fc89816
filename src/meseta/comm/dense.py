"""Hybrid sharding of dense parameters with `fully_shard`: sharded inside each host and replicated across hosts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol, cast, runtime_checkable
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from meseta.comm.sums import SumCodec, round_up_to_blocks
from meseta.comm.world import PendingCollective, World
from meseta.ops.common import copy_to_device
from meseta.ops.memory import empty
from meseta.spec import COLUMN_BLOCK, MesetaError

CONTAINER_MODULES = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Module types that are never called themselves, or only call their children."""


def shard_dense(
    model: nn.Module,
    tables: nn.Module,
    world: World,
    passes: BackwardContext,
    make_coding: Callable[[int], SumCodec] | None = None,
) -> list[nn.Parameter]:
    """Shard the dense parameters of `model` inside each host with FSDP2, and return the parameters that stay whole.

    The model is changed in place. A unit is a largest module that contains no tables and is called. Its parameters are
    gathered for its forward and backward pass; otherwise a rank holds 1 / ranks_per_host of them, of their gradients
    and of their moments. Modules that contain `tables` and parameters without a dimension stay whole. The scheme is
    that of section 3.2.2 of Zhao et al. (arXiv 2304.11277).

    `model` is on the CPU or the device of `world`, and contains `tables`, the module with the embedding tables.
    Gradients are reduced after each backward pass, weighted by `local_share` of `passes`. `make_coding` returns the
    codec of inter-host sums for a number of elements. `None` sends float32.

    Collective. All ranks raise the same MesetaError if hosts have one device, or no unit exists, or a parameter belongs
    to several units, or a unit has several dtypes.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    devices_per_host = world.ranks_per_host
    if devices_per_host < 2 or world.size % devices_per_host:
        raise MesetaError(
            f"dense 'fsdp': requires hosts of at least two devices, got {world.size} ranks on hosts of "
            f"{devices_per_host}; set devices_per_host in the plan or use a launcher that sets it, or use dense "
            "'replicated'"
        )
    units = dict(sharded_modules(model, tables))
    _check_modules(model, units)
    # The mesh has only the ranks of this host. torch would add across hosts in another order.
    mesh = DeviceMesh.from_group(world.new_host_group(), world.device.type, mesh_dim_names=("shard",))
    cut: set[nn.Parameter] = set()
    for unit in units.values():
        scalars = {parameter for parameter in unit.parameters() if parameter.dim() == 0}
        cut |= set(unit.parameters()) - scalars
        sharded = fully_shard(unit, mesh=mesh, reshard_after_forward=True, ignored_params=scalars)
        # By default, gradients are averaged as if all ranks had slices of equal size.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        parts = [parameter for parameter in unit.parameters() if is_sharded(parameter)]
        sharded.set_custom_reduce_scatter(WeightedReduceScatter(parts, world, passes, make_coding))
    whole = [parameter for parameter in model.parameters() if not is_sharded(parameter)]
    for tensor in (*whole, *model.buffers()):
        tensor.data = tensor.data.to(world.device)
    return whole


class WeightedReduceScatter:
    """Reduce-scatter for `fully_shard` that weights gradients by each rank's share of the samples.

    The sum inside a host is added to those of other hosts while the backward pass continues. The end of the pass waits
    for the result.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        world: World,
        passes: BackwardContext,
        make_coding: Callable[[int], SumCodec] | None = None,
    ) -> None:
        self._parameters, self._world, self._backward_context, self._make_codec = parameters, world, passes, make_coding
        self._pending_inter_host: PendingCollective | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """Reduce the gradients in `input_tensor` to this rank's shard in `output_tensor`. Overwrites `input_tensor`."""
        self._finish()
        share, world = self._backward_context.local_share, self._world
        if share:
            input_tensor.mul_(share)
        else:  # The mean over a rank without samples is NaN and has weight 0.
            input_tensor.zero_()
        pieces, total = input_tensor.view(world.ranks_per_host, -1), output_tensor.view(-1)
        world.reduce_scatter_intra_host(total, pieces, "gradients of parameters")
        coding = None if self._make_codec is None else self._make_codec(round_up_to_blocks(total.numel()))
        self._pending_inter_host = world.start_all_reduce_inter_host(total, "gradients of hosts", coding)
        if self._is_read_immediately(total):
            self._finish()
        else:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _is_read_immediately(self, total: Tensor) -> bool:
        # FSDP adds the result to existing gradients, a hook receives it, or a stream reads it without the host.
        return total.device.type != "cpu" or any(
            parameter.grad is not None or getattr(parameter, "_post_accumulate_grad_hooks", None)
            for parameter in self._parameters
        )

    def _finish(self) -> None:
        pending, self._pending_inter_host = self._pending_inter_host, None
        if pending is not None:
            pending.wait()


def sharded_modules(module: nn.Module, tables: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of each largest module below `module` that has parameters, contains no tables and is
    called."""
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if child is tables or isinstance(child, (nn.ParameterList, nn.ParameterDict)):
            continue
        holds_tables = any(inner is tables for inner in child.modules())
        if holds_tables or type(child) in CONTAINER_MODULES:
            yield from sharded_modules(child, tables, path)
        elif any(parameter.dim() for parameter in child.parameters()):
            yield path, child


def _check_modules(model: nn.Module, units: dict[str, nn.Module]) -> None:
    if not units:
        raise MesetaError(
            f"dense 'fsdp': {type(model).__name__} has no module with parameters that can be sharded; move its "
            "parameters into modules that it calls, or use dense 'replicated'"
        )
    owner: dict[nn.Parameter, str] = {}
    for name, unit in units.items():
        dtypes = {parameter.dtype for parameter in unit.parameters()}
        if len(dtypes) > 1:
            raise MesetaError(
                f"dense 'fsdp': module {name!r} must have parameters of one dtype, got {sorted(map(str, dtypes))}; "
                "convert the module to one dtype, or use dense 'replicated'"
            )
        for parameter in unit.parameters():
            if owner.setdefault(parameter, name) != name:
                raise MesetaError(
                    f"dense 'fsdp': modules {owner[parameter]!r} and {name!r} share a parameter and cannot be sharded "
                    "separately; put both into one module that calls them, or use dense 'replicated'"
                )


def is_sharded(tensor: Tensor) -> bool:
    """Whether the tensor is a DTensor, of which this rank holds one shard."""
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the complete tensor on every rank. Collective if the tensor is sharded."""
    return cast(Any, tensor).full_tensor() if is_sharded(tensor) else tensor


def distribute_like(value: Tensor, model_tensor: Tensor) -> Tensor:
    """Shard `value`, which is equal on all ranks, like `model_tensor` if their shapes agree. No communication."""
    if not is_sharded(model_tensor) or value.shape != model_tensor.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    like = cast(Any, model_tensor)
    placed = distribute_tensor(value.to(model_tensor.device), like.device_mesh, like.placements, src_data_rank=None)
    return cast(Tensor, placed)


def make_shard_sum(parameters: Iterable[Tensor], world: World) -> Callable[[float], float] | None:
    """Return a function that sums a number over the ranks with shards of a parameter, in the same order on all ranks.

    Returns `None` if no parameter is sharded. `world` has all ranks.
    """
    first = next((cast(Any, parameter) for parameter in parameters if is_sharded(parameter)), None)
    if first is None:
        return None
    group, device = first.device_mesh.get_group(), first.to_local().device

    def add(number: float) -> float:
        ranks = World(rank=group.rank(), size=group.size(), device=device, group=group, transfers=world.transfers)
        squares = ranks.all_gather(torch.tensor([number], dtype=torch.float64, device=device), "norms")
        parts: Sequence[float] = squares.tolist()
        return math.fsum(cast(Any, part)[0] for part in parts)

    return add


@contextmanager
def fsdp_parameter_error_context() -> Iterator[None]:
    """Context manager that replaces torch's errors about sharded parameters by one line without DTensor internals."""
    try:
        yield
    except RuntimeError as error:
        if "DTensor" not in str(error) and "sharding strategy" not in str(error):
            raise
        raise MesetaError(
            "dense 'fsdp': the model uses parameters of a module without calling it, so they are still sharded; "
            f"call the module, or use dense 'replicated' ({str(error).splitlines()[0]})"
        ) from None


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
