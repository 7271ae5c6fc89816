"""Bytes that Triton kernels request, counted in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from math import prod
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float64: "*fp64",
    torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16", torch.uint8: "*u8", torch.bool: "*i1",
}  # fmt: skip
"""Triton's name of the pointer to a type."""
MAX_PROGRAMS = 128
"""Number of programs of a sampled launch that run, about."""


class Signature(NamedTuple):
    """Kernel with all that determines its compiled code. All values can be encoded as JSON."""

    module: str
    """Module that defines the kernel."""
    name: str
    arguments: dict[str, Any]
    """Type of each argument, or the value of a constant or of an option of the compiler. A constant that is a type is
    {"dtype": name}, and a tuple {"tuple": module:class, "members": values}."""

    @staticmethod
    def from_launch(kernel: Any, arguments: Mapping[str, Any]) -> Signature:
        """Return the signature of a launch with named arguments."""
        types = {n for n, parameter in signature(kernel.fn).parameters.items() if "constexpr" not in str(parameter)}
        described = {name: _describe(value, is_constant=name not in types) for name, value in arguments.items()}
        return Signature(kernel.fn.__module__, kernel.fn.__name__, described)


def _describe(value: Any, *, is_constant: bool) -> Any:
    if isinstance(value, tuple) and not is_constant:
        kind = type(value)
        name = f"{kind.__module__}:{kind.__qualname__}" if kind is not tuple else ""
        return {"tuple": name, "members": [_describe(member, is_constant=False) for member in value]}
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, tuple):
        return [_describe(member, is_constant=True) for member in value]
    if hasattr(value, "primitive_bitwidth"):
        return {"dtype": value.name}
    if is_constant or not isinstance(value, (int, float)) or isinstance(value, bool):
        return value
    return "fp32" if isinstance(value, float) else "i32" if -(2**31) <= value < 2**31 else "i64"


@dataclass
class LaunchRequests:
    """Requests of one launch: the bytes of all elements that its programs load or store and do not mask.

    An element that several programs load counts several times. The caches of a GPU serve some of these loads.
    """

    kernel: str
    signature: Signature
    load_bytes: float = 0.0
    store_bytes: float = 0.0

    @property
    def num_bytes(self) -> float:
        """Total of loads and stores."""
        return self.load_bytes + self.store_bytes


class RequestCounter:
    """Requests of launches. Only some programs of the kernels `sampled` run, at equal distances in the first dimension
    of the grid. Their counts are scaled to all programs, and their results are incomplete."""

    def __init__(self, sampled: Container[str] | None) -> None:
        self.sampled = sampled
        """Names of kernels. `None` means all."""
        self.launches: list[LaunchRequests] = []


@contextmanager
def count_requests(sampled: Container[str] | None = ()) -> Iterator[RequestCounter]:
    """Context manager that returns a counter of the requests of later launches."""
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

    counter = RequestCounter(sampled)
    launches = counter.launches
    run: Any = InterpretedFunction.run

    def counted_run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        name = kernel.fn.__name__
        named = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
        launch = LaunchRequests(name, Signature.from_launch(kernel, named))
        launches.append(launch)
        # Neighboring programs may differ by their number modulo a power of two.
        step = min(prod(grid) // MAX_PROGRAMS | 1, grid[0]) if counter.sampled is None or name in counter.sampled else 1
        num_runs = -(-grid[0] // step)
        with _every(step, grid):
            result = run(kernel, *args, grid=(num_runs, *grid[1:]), warmup=warmup, **kwargs)
        launch.load_bytes *= grid[0] / num_runs
        launch.store_bytes *= grid[0] / num_runs
        return result

    def counting(method: Any, *, loads: bool, stores: bool) -> Any:
        # Masks are arguments after the pointers. Operations without a mask access all elements.
        def access(builder: Any, *args: Any) -> Any:
            pointers = next(arg for arg in args if hasattr(arg, "get_element_ty"))
            masks = [arg for arg in args if getattr(getattr(arg, "data", None), "dtype", None) == np.bool_]
            num_elements = int(masks[-1].data.sum()) if masks else pointers.data.size
            num_bytes = num_elements * max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            launches[-1].load_bytes += num_bytes * loads
            launches[-1].store_bytes += num_bytes * stores
            return method(builder, *args)

        return access

    accesses = {
        "create_masked_load": (True, False),
        "create_masked_store": (False, True),
        "create_atomic_rmw": (True, True),
        "create_atomic_cas": (True, True),
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(InterpretedFunction, "run", counted_run))
        for name, (loads, stores) in accesses.items():
            access = counting(getattr(InterpreterBuilder, name), loads=loads, stores=stores)
            stack.enter_context(mock.patch.object(InterpreterBuilder, name, access))
        yield counter


@contextmanager
def _every(step: int, grid: tuple[int, ...]) -> Iterator[None]:
    """Context manager in which program n of a launch has the number n * step in the first dimension of `grid`."""
    from triton.runtime.interpreter import interpreter_builder

    if step == 1:
        yield
        return
    set_grid_dim, set_grid_idx = interpreter_builder.set_grid_dim, interpreter_builder.set_grid_idx
    with (
        mock.patch.object(interpreter_builder, "set_grid_dim", lambda x, y, z: set_grid_dim(grid[0], y, z)),
        mock.patch.object(interpreter_builder, "set_grid_idx", lambda x, y, z: set_grid_idx(x * step, y, z)),
    ):
        yield
