"""Functions of torch and Triton that an emulated GPU replaces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gpu_path.arguments import leaves
from gpu_path.dispatch import CPU, GPU, EmulatedGpu
from gpu_path.fakes import FakeCuda
from gpu_path.interpreter import fast_interpreter
from gpu_path.memory import has_storage
from gpu_path.products import TILE_CHOICES, UPDATE_TILE_ELEMENTS, choose_large_tile, multiply


@contextmanager
def emulated_gpu() -> Iterator[EmulatedGpu]:
    """Context manager in which torch has the device `cuda`, whose memory is host memory. For one thread.

    Triton must have been imported with TRITON_INTERPRET=1.
    """
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

    from meseta.ops.linear import triton as linear
    from meseta.ops.row_update import triton as row_update

    gpu = EmulatedGpu()
    cuda = FakeCuda(gpu)
    with fast_interpreter(), ExitStack() as stack:

        def replace(owner: Any, **members: Any) -> None:
            for name, member in members.items():
                stack.enter_context(mock.patch.object(owner, name, member))

        replace(torch.cuda, _lazy_init=lambda: None)
        for name in (
            "Event",
            "Stream",
            "current_stream",
            "stream",
            "device",
            "synchronize",
            "get_sync_debug_mode",
            "set_sync_debug_mode",
            "is_current_stream_capturing",
            "graph_pool_handle",
            "CUDAGraph",
            "graph",
        ):
            replace(torch.cuda, **{name: getattr(cuda, name)})
        replace(Tensor, **tensor_members(gpu))
        replace(torch, **constructors(gpu))
        replace(torch._C, _group_tensors_by_device_and_dtype=grouping(gpu))
        replace(InterpretedFunction, run=launcher(gpu, InterpretedFunction.run))
        replace(InterpreterBuilder, create_dot=multiply)
        replace(linear, **dict.fromkeys(TILE_CHOICES, choose_large_tile))
        replace(row_update, TILE_ELEMENTS=UPDATE_TILE_ELEMENTS)
        stack.enter_context(gpu)
        yield gpu


def tensor_members(gpu: EmulatedGpu) -> dict[str, Any]:
    """Return properties and methods of tensors that depend on the device."""
    to, tolist, numpy, new_tensor = Tensor.to, Tensor.tolist, Tensor.numpy, Tensor.new_tensor
    device_of: Any = Tensor.device

    def is_there(tensor: Tensor) -> bool:
        return has_storage(tensor) and tensor in gpu.memory

    def move(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        device, dtype, rest = parse_to(args, kwargs)
        if device is None:
            return to(tensor, *args, **kwargs)
        if is_there(tensor) == (device.type == "cuda"):
            return to(tensor, tensor_dtype(dtype, tensor), copy=rest.get("copy", False))
        gpu.is_transferring = True
        return torch.ops.aten._to_copy.default(
            tensor, dtype=dtype, device=device, non_blocking=rest.get("non_blocking", False)
        )

    def pin(tensor: Tensor, device: Any = None) -> Tensor:
        if tensor in gpu.pinned:
            return tensor
        pinned = tensor.clone()
        gpu.pinned.add(pinned)
        gpu.record("pinned allocation", "pin_memory", {"shape": tuple(tensor.shape)}, ())
        return pinned

    def to_numpy(tensor: Tensor, *, force: bool = False) -> Any:
        if is_there(tensor):
            raise TypeError("can't convert a tensor on the emulated GPU to numpy; use Tensor.cpu() first")
        return numpy(tensor, force=force)

    def on_device_of(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        made = new_tensor(tensor, *args, **kwargs)
        return move(made, GPU) if is_there(tensor) else made

    return {
        "device": property(lambda tensor: GPU if is_there(tensor) else device_of.__get__(tensor)),
        "is_cuda": property(is_there),
        "is_cpu": property(lambda tensor: not is_there(tensor)),
        "to": move,
        "cuda": lambda tensor, device=None, non_blocking=False: move(tensor, GPU, non_blocking=non_blocking),
        "cpu": lambda tensor: move(tensor, CPU),
        "tolist": lambda tensor: tolist(move(tensor, CPU)),
        "numpy": to_numpy,
        "new_tensor": on_device_of,
        "pin_memory": pin,
        "is_pinned": lambda tensor, device=None: tensor in gpu.pinned,
        "record_stream": lambda tensor, stream: None,
    }


def parse_to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.device | None, Any, dict[str, Any]]:
    """Return (device, dtype, other arguments) of a call of `Tensor.to`. The device is `None` if it does not change."""
    names = ("non_blocking", "copy")
    if args and isinstance(args[0], Tensor):
        rest = dict(zip(names, args[1:], strict=False))
        return args[0].device, args[0].dtype, {**rest, **kwargs}
    if args and isinstance(args[0], torch.dtype):
        return None, args[0], kwargs
    device, *more = args or (None,)
    device = kwargs.get("device", device)
    if more and not isinstance(more[0], (torch.dtype, type(None))):
        more = [None, *more]
    dtype = kwargs.get("dtype", more[0] if more else None)
    rest = {**dict(zip(names, more[1:], strict=False)), **kwargs}
    return None if device is None else torch.device(device), dtype, rest


def tensor_dtype(dtype: torch.dtype | None, tensor: Tensor) -> torch.dtype:
    """Return `dtype`, or that of a tensor if it is `None`."""
    return tensor.dtype if dtype is None else dtype


def constructors(gpu: EmulatedGpu) -> dict[str, Any]:
    """Return functions that create tensors from data, or in pinned memory."""
    allocate = torch.empty

    def pin(tensor: Tensor, name: str) -> None:
        gpu.pinned.add(tensor)
        gpu.record("pinned allocation", name, {"shape": tuple(tensor.shape)}, ())

    def wrap(make: Any) -> Any:
        def made(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            if pin_memory:
                pin(tensor, make.__name__)
            return tensor if device is None else tensor.to(device)

        return made

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        tensor = allocate(*args, **kwargs)
        if pin_memory:
            pin(tensor, "empty")
        return tensor

    return {"tensor": wrap(torch.tensor), "as_tensor": wrap(torch.as_tensor), "empty": empty}


def grouping(gpu: EmulatedGpu) -> Any:
    """Return the function by which optimizers group tensors, with keys that have the emulated device."""
    group = torch._C._group_tensors_by_device_and_dtype

    def groups(lists: list[list[Tensor | None]], with_indices: bool = False) -> dict[Any, Any]:
        placed = any(tensor is not None and tensor in gpu.memory for tensor in lists[0])
        grouped = group(lists, with_indices).items()
        return {(GPU if placed else device, dtype): members for (device, dtype), members in grouped}

    return groups


def launcher(gpu: EmulatedGpu, run: Any) -> Any:
    """Return the function that launches a kernel in Triton's interpreter."""

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        named = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
        tensors = [leaf for leaf in leaves(list(named.values())) if isinstance(leaf, Tensor)]
        gpu.record("kernel", kernel.fn.__name__, {"grid": grid, **named}, tensors)
        capture = gpu.capture_here()
        with gpu.host_view():
            if capture is None:
                return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)
            capture.use(gpu.current_stream)
            return capture.launch(run, (kernel, *args), {"grid": grid, "warmup": warmup, **kwargs})

    return launch


class TrackedStage:
    """Context manager of a stage, which the emulated GPU knows while it is open."""

    def __init__(self, gpu: EmulatedGpu, stage: Any, name: str) -> None:
        self._gpu, self._stage, self._name = gpu, stage, name

    def __enter__(self) -> None:
        self._gpu.stages.append(self._name)
        depth = self._gpu.python_calls.enter_package()
        self._stage = self._stage(self._name)
        self._stage.__enter__()
        self._gpu.python_calls.leave_package(depth)

    def __exit__(self, *error: Any) -> Any:
        depth = self._gpu.python_calls.enter_package()
        try:
            return self._stage.__exit__(*error)
        finally:
            self._gpu.python_calls.leave_package(depth)
            self._gpu.stages.pop()


def track_stages(gpu: EmulatedGpu, times: Any) -> None:
    """Let records of an emulated GPU name the stage of a StageTimes."""
    times.stage = partial(TrackedStage, gpu, times.stage)
