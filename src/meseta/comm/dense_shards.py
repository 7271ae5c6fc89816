"""Dense parameters cut over the ranks of a host and replicated across hosts, by torch's `fully_shard`."""

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
"""Modules that are not called themselves, or do nothing but call their children."""


def shard_dense(
    model: nn.Module,
    tables: nn.Module,
    world: World,
    passes: BackwardContext,
    make_coding: Callable[[int], SumCodec] | None = None,
) -> list[nn.Parameter]:
    """Cut the dense parameters of `model`, which holds `tables`, over the ranks of each host, in place; returns those
    that stay whole on every rank.

    What is cut is each largest module without tables that is called as one: it is gathered while its `forward` or its
    way back runs, and a rank keeps 1 / ranks_per_host of its parameters, gradients and moments (FSDP2; Zhao et al.,
    arXiv 2304.11277; across hosts the hybrid of section 3.2.2). Its gradients are added over ranks, each times its
    rank's `passes.local_share`, as in `meseta.comm.sums`, after each pass: a rank has no room to keep what is whole.
    Parameters of modules that hold tables, and those without a dimension, stay whole. `make_coding` says how so many
    numbers of such a sum cross hosts.

    Collective. Raises MesetaError, alike on all ranks, for hosts of one device, for a model without such a module, or
    one in which a parameter belongs to several of them, or that mixes dtypes.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    devices_per_host = world.ranks_per_host
    if devices_per_host < 2 or world.size % devices_per_host:
        raise MesetaError(
            f"dense 'fsdp': {world.size} ranks on hosts of {devices_per_host} leave nothing to cut a parameter over; "
            "it needs hosts of two devices or more, as the plan (devices_per_host) or the launcher tells them; or use "
            "dense 'replicated'"
        )
    units = dict(sharded_modules(model, tables))
    _check_modules(model, units)
    # A mesh of this host alone: what torch would add across hosts has an order of its own.
    mesh = DeviceMesh.from_group(world.new_host_group(), world.device.type, mesh_dim_names=("shard",))
    cut: set[nn.Parameter] = set()
    for unit in units.values():
        scalars = {parameter for parameter in unit.parameters() if parameter.dim() == 0}
        cut |= set(unit.parameters()) - scalars
        sharded = fully_shard(unit, mesh=mesh, reshard_after_forward=True, ignored_params=scalars)
        # By default gradients are averaged, as if the ranks had equal slices of the batch.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        parts = [parameter for parameter in unit.parameters() if is_sharded(parameter)]
        sharded.set_custom_reduce_scatter(WeightedReduceScatter(parts, world, passes, make_coding))
    whole = [parameter for parameter in model.parameters() if not is_sharded(parameter)]
    for tensor in (*whole, *model.buffers()):
        tensor.data = tensor.data.to(world.device)
    return whole


class WeightedReduceScatter:
    """How `fully_shard` adds gradients of a module over all ranks: each times what its rank's samples weigh.

    What is added in the host crosses to others while the backward pass goes on to the modules before it, where nobody
    reads it until then: the pass waits for it at its end.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        world: World,
        passes: BackwardContext,
        make_coding: Callable[[int], SumCodec] | None = None,
    ) -> None:
        """`parameters` of the module, cut."""
        self._parameters, self._world, self._backward_context, self._make_codec = parameters, world, passes, make_coding
        self._pending_inter_host: PendingCollective | None = None
        """The sum of the last pass, until it is waited for."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is sent or received."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """`input_tensor` holds the gradients of all parts and is the caller's to overwrite."""
        self._finish()
        share, world = self._backward_context.local_share, self._world
        if share:
            input_tensor.mul_(share)
        else:  # The mean over a rank without samples is NaN; it weighs nothing.
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
        """Whether it is added to other gradients, a hook of a parameter has it, or a stream waits for it and the host
        does not."""
        return total.device.type != "cpu" or any(
            parameter.grad is not None or getattr(parameter, "_post_accumulate_grad_hooks", None)
            for parameter in self._parameters
        )

    def _finish(self) -> None:
        """Wait for what crosses."""
        crossing, self._pending_inter_host = self._pending_inter_host, None
        if crossing is not None:
            crossing.wait()


def sharded_modules(module: nn.Module, tables: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Largest modules below `module` that hold parameters and no tables, and are called as one; with their names."""
    for own, child in module.named_children():
        path = f"{name}.{own}" if name else own
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
            f"dense 'fsdp': {type(model).__name__} has no module with parameters beside its tables that could be cut; "
            "put its parameters into modules that it calls, or use dense 'replicated'"
        )
    owner: dict[nn.Parameter, str] = {}
    for name, unit in units.items():
        dtypes = {parameter.dtype for parameter in unit.parameters()}
        if len(dtypes) > 1:
            raise MesetaError(
                f"dense 'fsdp': module {name!r} has parameters of several dtypes ({sorted(map(str, dtypes))}), which "
                "cannot be gathered together; give them one, or use dense 'replicated'"
            )
        for parameter in unit.parameters():
            if owner.setdefault(parameter, name) != name:
                raise MesetaError(
                    f"dense 'fsdp': modules {owner[parameter]!r} and {name!r} share a parameter, so that neither can "
                    "be cut by itself; put both into one module that calls them, or use dense 'replicated'"
                )


def is_sharded(tensor: Tensor) -> bool:
    """Whether this rank holds a part of the tensor alone."""
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank; collective where it is cut."""
    return cast(Any, tensor).full_tensor() if is_sharded(tensor) else tensor


def distribute_like(value: Tensor, model_tensor: Tensor) -> Tensor:
    """`value`, which is the same on all ranks, placed as `model_tensor` is, if it has its shape. Nothing is sent."""
    if not is_sharded(model_tensor) or value.shape != model_tensor.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    like = cast(Any, model_tensor)
    placed = distribute_tensor(value.to(model_tensor.device), like.device_mesh, like.placements, src_data_rank=None)
    return cast(Tensor, placed)


def make_shard_sum(parameters: Iterable[Tensor], world: World) -> Callable[[float], float] | None:
    """A sum over the ranks that hold the parts of a cut parameter, in one order on all; None where none is cut.
    `world` has them all."""
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
    """Say in one line what a model did to a cut parameter, where torch says it of its own types."""
    try:
        yield
    except RuntimeError as error:
        if "DTensor" not in str(error) and "sharding strategy" not in str(error):
            raise
        raise MesetaError(
            "dense 'fsdp': the model uses parameters of a module without calling it, so that they were not gathered; "
            f"call the module, or use dense 'replicated' ({str(error).splitlines()[0]})"
        ) from None
