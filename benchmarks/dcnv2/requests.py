"""Bytes that Triton kernels request, counted in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any
from unittest import mock

import numpy as np

MAX_PROGRAMS = 128
"""Number of programs of a sampled launch that run, about."""


@dataclass
class LaunchRequests:
    """Requests of one launch: the bytes of all elements that its programs load or store and do not mask.

    An element that several programs load counts several times. The caches of a GPU serve some of these loads.
    """

    kernel: str
    load_bytes: float = 0.0
    store_bytes: float = 0.0

    @property
    def num_bytes(self) -> float:
        """Total of loads and stores."""
        return self.load_bytes + self.store_bytes


@contextmanager
def count_requests(*sampled: str) -> Iterator[list[LaunchRequests]]:
    """Context manager that returns a list, to which each later launch adds its requests.

    Of the kernels `sampled`, only some programs run, at equal distances in the first dimension of the grid. Their
    counts are scaled to all programs, and their results are incomplete.
    """
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

    launches: list[LaunchRequests] = []
    run: Any = InterpretedFunction.run

    def counted_run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        launch, name = LaunchRequests(kernel.fn.__name__), kernel.fn.__name__
        launches.append(launch)
        step = max(1, prod(grid) // MAX_PROGRAMS) if name in sampled else 1
        step = min(step, grid[0])
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
        yield launches


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
