"""CUDA graphs of an emulated GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from threading import get_ident
from typing import Any, Literal

import torch
from torch import Tensor

from gpu_path.arguments import leaves, map_leaves
from gpu_path.memory import StorageSet, has_storage
from gpu_path.records import Kind, Record

CaptureMode = Literal["global", "thread_local"]
"""Whether a capture forbids waits and allocations in all threads, or only in its own."""
FORBIDDEN: frozenset[Kind] = frozenset(("synchronization", "event wait", "pinned allocation", "graph replay"))
"""Kinds of records that CUDA or this emulation does not permit during a capture."""
GARBAGE_BYTE = b"\x7f"
"""Byte of undefined integers. Undefined floats are NaN."""


NUMBERS = count()


class Capture:
    """Captured work of a CUDA graph.

    Operators run once during a capture, because Python needs the shapes of their results. A GPU does not run captured
    work. `finish` therefore restores all memory of the device that existed before, and makes results undefined.
    """

    def __init__(self, device_memory: StorageSet, origin: Any, mode: CaptureMode, pool: tuple[int, int]) -> None:
        """Start a capture of the stream `origin`. `pool` identifies the memory pool of the graph."""
        self.pool = pool
        self.records: list[Record] = []
        """Captured operators."""
        self.memory = StorageSet()
        """Storages that the graph allocates."""
        self.number = next(NUMBERS)
        """Number of captures before this one."""
        self.is_invalid = False
        """Whether a call was not permitted."""
        self._origin, self._mode, self._thread = origin, mode, get_ident()
        self._streams, self._unjoined = {origin}, set[Any]()
        self._device_memory = device_memory
        self._saved = [(storage, storage.clone()) for storage in device_memory.living()]
        self._allocated: list[Tensor] = []
        self._launches: list[Callable[[], object]] = []

    @property
    def is_in_this_thread(self) -> bool:
        """Whether the calling thread captures."""
        return get_ident() == self._thread

    def check(self, name: str) -> None:
        """Raise RuntimeError if the calling thread may not wait or allocate."""
        if self._mode == "global" or self.is_in_this_thread:
            self.fail(f"CUDA error: operation not permitted when stream is capturing: {name}")

    def fail(self, message: str) -> None:
        """Invalidate the capture and raise RuntimeError."""
        self.is_invalid = True
        raise RuntimeError(message)

    def includes(self, stream: Any) -> bool:
        """Whether the work of a stream is captured."""
        return stream in self._streams

    def use(self, stream: Any) -> None:
        """Start work in a stream. Raises RuntimeError if its work is not captured."""
        if stream not in self._streams:
            self.fail("the emulated GPU cannot run work of another stream during a capture; wait for the captured one")
        if stream is not self._origin:
            self._unjoined.add(stream)

    def wait(self, waiting: Any, stream: Any, *, is_captured: bool) -> None:
        """Let `waiting` wait for work of `stream`, which becomes part of the capture if that work is."""
        if not is_captured and waiting in self._streams:
            self.fail("CUDA error: dependency created on uncaptured work in another stream")
        if is_captured and waiting not in self._streams:
            self._streams.add(waiting)
            self._unjoined.add(waiting)
        if is_captured and stream is not waiting:
            self._unjoined.discard(stream)

    def save(self, tensor: Tensor) -> None:
        """Save pinned memory that a captured copy overwrites."""
        storage = tensor.untyped_storage()
        self._saved.append((storage, storage.clone()))

    def launch(self, function: Callable[..., object], args: Sequence[Any], arguments: Mapping[str, Any]) -> None:
        """Capture the call of a function with the addresses of its tensors."""
        self._launches.append(partial(function, *map_leaves(_alias, args), **map_leaves(_alias, arguments)))

    def add(
        self, kind: Kind, func: Any, args: Sequence[Any], arguments: Mapping[str, Any], outputs: Sequence[Tensor]
    ) -> None:
        """Capture an operator that has run. A scalar of the host is captured by value, unless it is copied."""
        storages = {leaf.untyped_storage()._cdata for leaf in leaves((args, arguments)) if has_storage(leaf)}
        targets = [None if out.untyped_storage()._cdata in storages else _alias(out) for out in outputs]
        self._allocated += [target for target in targets if target is not None]
        if kind in ("view", "allocation") or torch.Tag.inplace_view in func.tags:
            return
        if kind == "kernel":
            args, arguments = map_leaves(self._freeze, args), map_leaves(self._freeze, arguments)
        self.launch(partial(_run, func, targets), args, arguments)

    def finish(self) -> None:
        """Restore the memory of the device, and make all results undefined."""
        for storage, saved in reversed(self._saved):
            storage.copy_(saved)
        self._saved.clear()
        self.clobber()

    def check_result(self) -> None:
        """Raise RuntimeError if the capture failed, or if the origin has not waited for all streams of the capture."""
        if self.is_invalid:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        if self._unjoined:
            raise RuntimeError("CUDA error: capturing stream has unjoined work")

    def clobber(self) -> None:
        """Overwrite the memory that the graph allocates with NaN and large integers."""
        for tensor in self._allocated:
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.fill_(float("nan"))
            elif tensor.dtype == torch.bool:
                tensor.fill_(True)
            else:
                tensor.fill_(int.from_bytes(GARBAGE_BYTE * tensor.itemsize))

    def replay(self) -> None:
        """Run the captured work."""
        for launch in self._launches:
            launch()

    def _freeze(self, value: Any) -> Any:
        is_host_scalar = has_storage(value) and value.dim() == 0 and value not in self._device_memory
        return value.clone() if is_host_scalar else value


def _alias(value: Any) -> Any:
    return value.detach() if has_storage(value) else value


def _run(func: Any, targets: Sequence[Tensor | None], *args: Any, **arguments: Any) -> None:
    results = [leaf for leaf in leaves(func(*args, **arguments)) if has_storage(leaf)]
    for result, target in zip(results, targets, strict=True):
        if target is None:
            continue
        if result.shape != target.shape:
            raise RuntimeError(f"{func}: captured {list(target.shape)}, but the replay has {list(result.shape)}")
        target.copy_(result)
