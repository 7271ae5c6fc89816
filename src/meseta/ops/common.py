"""Registration of operators with PyTorch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from meseta.sparse.shapes import Float
from meseta.spec import MesetaError

# `define` and `impl` cost a few microseconds per call.


LIBRARY = torch.library.Library("meseta", "FRAGMENT")
"""Library of all operators. They are available as torch.ops.meseta.NAME."""
FLOPS: dict[Any, Callable[..., int]] = {}
"""Functions that count the floating-point operations of an operator, for the `custom_mapping` of
`torch.utils.flop_counter.FlopCounterMode`."""


def can_bypass_dispatcher(tensor: Tensor) -> bool:
    """Whether a call may go directly to the compiled core: eager execution on a CPU with a plain tensor."""
    # With a hundred tables as arguments, the dispatcher costs as much as the work of a small batch.
    return type(tensor) is Tensor and tensor.is_cpu and not torch.compiler.is_compiling()


def register(
    schema: str,
    *,
    cpu: Callable[..., Any],
    fake: Callable[..., Any],
    cuda: Callable[..., Any] | None = None,
    flops: Callable[..., int] | None = None,
) -> Any:
    """Define an operator with its kernels and return it.

    Args:
        schema: PyTorch schema of the operator.
        cpu: Kernel for the CPU. Without `cuda` it is used on all devices, and must then be plain PyTorch.
        fake: Function that returns outputs with shapes and dtypes only, for torch.compile and torch.export.
        cuda: Kernel for CUDA devices.
        flops: Counts the operations of matrix products from the arguments of a call. A multiply-add counts as two.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    if cuda is None:
        LIBRARY.impl(name, cpu, "CompositeExplicitAutograd")
    else:
        LIBRARY.impl(name, cpu, "CPU")
        LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"meseta::{name}", fake, lib=LIBRARY)
    if flops is not None:
        FLOPS[getattr(torch.ops.meseta, name)] = _with_tensor_arguments(flops)
    return getattr(torch.ops.meseta, name).default


def _with_tensor_arguments(flops: Callable[..., int]) -> Callable[..., int]:
    # `_get_raw` makes torch's counter pass the result and the tensors themselves instead of their shapes.

    def counted(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return flops(*args, **kwargs)

    counted._get_raw = True  # type: ignore[attr-defined]
    return counted


DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Codes by which the core identifies the dtype of rows."""


def check_tables(operator: str, tables: Sequence[Tensor]) -> None:
    """Raise MesetaError if there are no tables, or if one is not contiguous, 2-d and of the dtype of the first."""
    if not tables:
        raise MesetaError(f"{operator}: no table was given; pass one table per feature")
    for index, table in enumerate(tables):
        if table.dim() != 2 or not table.is_contiguous() or table.dtype != tables[0].dtype:
            raise MesetaError(
                f"{operator}: table {index} is {table.dtype} {list(table.shape)}, but all tables must be contiguous, "
                f"[rows, D] and {tables[0].dtype} as the first; convert it"
            )


def contiguous_ids(operator: str, ids: Tensor, name: str = "ids") -> Tensor:
    """Return 1-d int32 or int64 `ids`, contiguous. Raises MesetaError, with `name`, for another shape or dtype."""
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise MesetaError(f"{operator}: {name} are {ids.dtype} {list(ids.shape)}; give a 1-d tensor of int32 or int64")
    return ids.contiguous()


def check_bounds(operator: str, bounds: Sequence[int], limit: int) -> None:
    """Raise MesetaError if bounds are empty, decreasing or outside 0..limit."""
    if not bounds:
        raise MesetaError(f"{operator}: bounds are empty; pass at least one number")
    for index, (before, bound) in enumerate(pairwise((0, *bounds))):
        if not before <= bound <= limit:
            raise MesetaError(
                f"{operator}: bounds[{index}] is {bound}; bounds must not decrease and must be in 0..{limit}"
            )


def check_bags(operator: str, tables: Sequence[Tensor], ids: Tensor, offsets: Tensor) -> None:
    """Check bags on a CPU as the compiled core does, for the references.

    Raises MesetaError if a table is not [rows, D], the number of offsets is wrong, offsets decrease or exceed the
    number of ids, or an id is outside its table.
    """
    # Without this check the references would read id -1 as the last row.
    if any(table.dim() != 2 for table in tables) or offsets.dim() != 1 or (offsets.numel() - 1) % len(tables):
        raise MesetaError(f"{operator}: {offsets.numel()} offsets for {len(tables)} tables [rows, D]; give F * B + 1")
    contiguous_ids(operator, ids)
    check_bounds(operator, offsets.tolist(), ids.numel())
    num_bags = (offsets.numel() - 1) // len(tables)
    for f, table in enumerate(tables):
        feature_ids = ids[int(offsets[f * num_bags]) : int(offsets[(f + 1) * num_bags])]
        if bool(((feature_ids < 0) | (feature_ids >= table.shape[0])).any()):
            raise MesetaError(f"{operator}: an id of feature {f} is outside 0..{table.shape[0] - 1}")


MAX_SERIAL_TERMS = 16384
"""Maximum number of elements that torch sums to a scalar in one thread. It splits 32,768 elements between threads."""


def total(x: Float[Tensor, " *shape"]) -> Float[Tensor, ""]:
    """Return the sum of all elements. On a CPU large tensors are summed in chunks, so that torch uses one thread per
    chunk."""
    flat = x.reshape(-1)
    while x.device.type != "cuda" and len(flat) > MAX_SERIAL_TERMS:
        flat = torch.stack([piece.sum() for piece in flat.split(MAX_SERIAL_TERMS)])
    return flat.sum()


def column_sums(x: Float[Tensor, "B N"]) -> Float[Tensor, " N"]:
    """Return the sum of each column."""
    # Torch sums each column in one thread, unless there is only one column.
    return total(x)[None] if x.shape[1] == 1 else x.sum(dim=0)


def repeat(x: Float[Tensor, " *shape"], count: int | torch.SymInt) -> Float[Tensor, "_count ..."]:
    """Repeat `x` along a new first dimension. The gradient is summed by `column_sums`. Differentiable once."""
    if torch.compiler.is_exporting():
        return x.expand(count, *x.shape)
    result: Tensor = _Repeat.apply(x, count)
    return result


def softmax(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the softmax over the last dimension. On a CPU it is differentiable once."""
    # The bits of torch's own CPU backward depend on the number of threads.
    if x.device.type != "cpu" or torch.compiler.is_exporting():
        return functional.softmax(x, dim=-1)
    result: Tensor = _Softmax.apply(x)
    return result


def add_product(x: Float[Tensor, "*shape"], a: Float[Tensor, "*shape"], b: Float[Tensor, "*shape"]) -> Tensor:
    """Return x + a * b, bitwise identical to `torch.addcmul`. All shapes must be equal. Differentiable once."""
    # The backward of addcmul also multiplies both gradients by its factor 1, which takes four passes instead of two.
    if torch.compiler.is_exporting():
        return torch.addcmul(x, a, b)
    result: Tensor = _AddProduct.apply(x, a, b)
    return result


class _AddProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return torch.addcmul(x, a, b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b = ctx.saved_tensors
        if gradient.is_cuda:  # Both products are one kernel.
            a_gradient, b_gradient = torch._foreach_mul([gradient, gradient], [b, a])
            return gradient, a_gradient, b_gradient
        return gradient, gradient * b, gradient * a


class _Repeat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Any) -> Tensor:
        ctx.shape = x.shape
        return x.expand(count, *x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return column_sums(gradient.flatten(1)).view(ctx.shape), None


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = functional.softmax(x, dim=-1)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        weighted: Tensor = out * gradient
        return weighted.addcmul_(out, weighted.sum(dim=-1, keepdim=True), value=-1)


def cast_all(tensors: Sequence[Tensor | None], dtype: torch.dtype) -> list[Any]:
    """Cast tensors to `dtype`. `None` stays `None`. On a GPU, one kernel casts all tensors of one dtype."""
    results = [
        tensor if tensor is None or tensor.dtype == dtype else tensor.new_empty(tensor.shape, dtype=dtype)
        for tensor in tensors
    ]
    pairs = [(to, tensor) for to, tensor in zip(results, tensors, strict=True) if to is not None and to is not tensor]
    if pairs:
        torch._foreach_copy_([to for to, _ in pairs], [cast(Tensor, tensor) for _, tensor in pairs])
    return results


def device_constant(words: tuple[int, ...], device: torch.device) -> Tensor:
    """Return an int64 tensor of `words` on `device`. It is copied at the first call and then cached.

    The host does not wait, because the copy comes from pinned memory. Raises MesetaError if the first call is within
    the capture of a CUDA graph, which cannot contain this copy.
    """
    constant = _make_constant(words, device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _GRAPH_CONSTANTS[words, device] = constant
    return constant


_GRAPH_CONSTANTS: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
"""Constants whose addresses a CUDA graph holds. They are never freed."""


@lru_cache(maxsize=1024)
def _make_constant(words: tuple[int, ...], device: torch.device) -> Tensor:
    if device.type != "cuda":
        return torch.tensor(words, dtype=torch.int64, device=device)
    if torch.cuda.is_current_stream_capturing():
        raise MesetaError(
            "an operator was called with new tables while a CUDA graph is captured; run the same call, with the same "
            "tables, once before the capture"
        )
    return torch.tensor(words, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


def copy_to_device(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers to a 1-d tensor on `device` without blocking the host. For numbers that change in every step."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


MAX_PENDING_COPIES = 4
"""Number of copies in progress at which a new batch waits for the oldest one."""
MAX_SHAPES = 64
"""Number of shapes of tensors for which buffers are kept."""
BUFFER_GROWTH_FACTOR = 1.25
"""Size of new buffers relative to the batch that did not fit."""


class BufferPool:
    """Thread-safe pool of host buffers. A buffer is reused after its copy has completed."""

    def __init__(self, new_buffer: Callable[[int], Tensor]) -> None:
        self._new_buffer = new_buffer
        self._num_bytes = 0
        # In the order of the copies, which is that of their completion.
        self._copied = deque[tuple[Tensor, Any]]()
        self._lock = threading.Lock()

    def acquire(self, num_bytes: int) -> Tensor:
        """Return a buffer of at least `num_bytes`. May wait for a copy."""
        with self._lock:
            is_done = bool(self._copied) and self._copied[0][1].query()
            reused = self._copied.popleft() if is_done or len(self._copied) >= MAX_PENDING_COPIES else None
            if num_bytes > self._num_bytes:
                self._num_bytes = int(num_bytes * BUFFER_GROWTH_FACTOR)
            num_new_bytes = self._num_bytes
        if reused is not None:
            buffer, copied = reused
            if not is_done:
                copied.synchronize()
            if buffer.numel() >= num_bytes:
                return buffer
        return self._new_buffer(num_new_bytes)

    def release(self, buffer: Tensor, copied: Any) -> None:
        """Return a buffer to the pool. `copied` is the event after its copy."""
        with self._lock:
            self._copied.append((buffer, copied))


class AsyncHostCopy:
    """Asynchronous copy of a tensor to host memory, ordered after the previous work of the current stream.

    Reading does not block if the caller has already waited for later work of the same stream.
    """

    def __init__(self, tensor: Tensor) -> None:
        """Start the copy. A CPU tensor is not copied, and `read` then returns the tensor itself."""
        self._host: Tensor | None = tensor
        self._pinned: Tensor | None = None
        if tensor.device.type == "cuda":
            self._host = None
            self._pool = _pool_of_shape(tensor.dtype, tensor.shape)
            self._pinned = self._pool.acquire(tensor.numel())
            self._pinned.copy_(tensor, non_blocking=True)
            self._copied_event = torch.cuda.current_stream(tensor.device).record_event()

    def read(self) -> Tensor:
        """Return the tensor in host memory. Waits until the copy is complete."""
        if self._host is None:
            assert self._pinned is not None
            self._copied_event.synchronize()
            self._host = self._pinned.clone()
            self._release()
        return self._host

    def _release(self) -> None:
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            self._pool.release(pinned, self._copied_event)

    def __del__(self) -> None:
        if getattr(self, "_pinned", None) is not None:
            self._release()


@lru_cache(maxsize=MAX_SHAPES)
def _pool_of_shape(dtype: torch.dtype, shape: torch.Size) -> BufferPool:
    return BufferPool(lambda _: torch.empty(shape, dtype=dtype, pin_memory=True))
