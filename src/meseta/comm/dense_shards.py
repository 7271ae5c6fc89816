"""Hybrid sharding of dense parameters with `fully_shard`: sharded inside each host and replicated across hosts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from meseta.comm.dense import BackwardContext
from meseta.comm.sum_codec import SumCodec, round_up_to_blocks
from meseta.comm.world import PendingCollective, World
from meseta.spec import MesetaError

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

    Collective. All ranks raise the same MesetaError if hosts have one device, or no unit exists, or a parameter belongs
    to several units, or a unit has several dtypes.

    Args:
        model: Model on the CPU or the device of `world`.
        tables: Module with the embedding tables, contained in `model`.
        world: All ranks. `ranks_per_host` is the number of shards.
        passes: State of the backward pass. Gradients are reduced after each pass, weighted by `local_share`.
        make_coding: Returns the codec of inter-host sums for a number of elements. `None` sends float32.

    Returns:
        Parameters that are not sharded.
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
        """Create the reduction for one unit with the sharded `parameters`."""
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
