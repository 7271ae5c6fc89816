"""CUDA graphs of an emulated GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from threading import get_ident
from typing import Any, Literal

import torch
from torch import Tensor

from gpu_path.arguments import leaves, map_leaves, name_arguments
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

    As on a GPU, nothing runs during a capture. Python receives results of the right shapes with undefined values.
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

    def launch(self, function: Callable[..., object], args: Sequence[Any], arguments: Mapping[str, Any]) -> None:
        """Capture the call of a function with the addresses of its tensors."""
        self._launches.append(partial(function, *map_leaves(_alias, args), **map_leaves(_alias, arguments)))

    def run(self, func: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> Any:
        """Return the results of an operator without running it, except if it only allocates or returns views."""
        schema = func._schema
        written = [result.alias_info is not None and result.alias_info.is_write for result in schema.returns]
        is_view = not schema.is_mutable and any(r.alias_info for r in schema.returns)
        has_tensors = any(has_storage(leaf) for leaf in leaves((args, arguments)))
        if is_view or not has_tensors or torch.Tag.inplace_view in func.tags:
            return func(*args, **arguments)
        if all(written):
            named = name_arguments(func, args, arguments)
            targets = tuple(named[one.name] for one in map(partial(_find_alias, schema.arguments), schema.returns))
            return targets[0] if len(targets) == 1 else targets or None
        return self._allocate(func, args, arguments)

    def add(
        self, kind: Kind, func: Any, args: Sequence[Any], arguments: Mapping[str, Any], outputs: Sequence[Tensor]
    ) -> None:
        """Capture an operator with its results. A scalar of the host is captured by value, unless it is copied."""
        storages = {leaf.untyped_storage()._cdata for leaf in leaves((args, arguments)) if has_storage(leaf)}
        targets = [None if out.untyped_storage()._cdata in storages else _alias(out) for out in outputs]
        allocated = [target for target in targets if target is not None]
        _clobber(allocated)
        self._allocated += allocated
        if kind in ("view", "allocation") or torch.Tag.inplace_view in func.tags:
            return
        if kind == "kernel":
            args, arguments = map_leaves(self._freeze, args), map_leaves(self._freeze, arguments)
        self.launch(partial(_run, func, targets), args, arguments)

    def check_result(self) -> None:
        """Raise RuntimeError if the capture failed, or if the origin has not waited for all streams of the capture."""
        if self.is_invalid:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        if self._unjoined:
            raise RuntimeError("CUDA error: capturing stream has unjoined work")

    def clobber(self) -> None:
        """Make the memory undefined that the graph allocates."""
        _clobber(self._allocated)

    def replay(self) -> None:
        """Run the captured work."""
        for launch in self._launches:
            launch()

    def _freeze(self, value: Any) -> Any:
        is_host_scalar = has_storage(value) and value.dim() == 0 and value not in self._device_memory
        return value.clone() if is_host_scalar else value

    def _allocate(self, func: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> Any:
        originals: list[tuple[Tensor, Tensor]] = []

        def to_meta(value: Any) -> Any:
            if not has_storage(value) or (value.dim() == 0 and value not in self._device_memory):
                return value
            meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            originals.append((meta, value))
            return meta

        def from_meta(value: Any) -> Any:
            if not has_storage(value):
                return value
            for meta, original in originals:
                if value is meta:
                    return original
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)

        device = {"device": "meta"} if "device" in arguments else {}
        results = func(*map_leaves(to_meta, args), **{**map_leaves(to_meta, arguments), **device})
        storages = {meta.untyped_storage()._cdata for meta, _ in originals}
        made = [leaf for leaf in leaves(results) if has_storage(leaf)]
        if not func._schema.is_mutable and any(leaf.untyped_storage()._cdata in storages for leaf in made):
            return func(*args, **arguments)  # a view without an annotation, such as that of `_unsafe_view`
        return map_leaves(from_meta, results)


def _find_alias(arguments: Sequence[Any], result: Any) -> Any:
    """Return the argument of a schema that an operator returns as `result`."""
    names = result.alias_info.before_set
    return next(one for one in arguments if one.alias_info is not None and one.alias_info.before_set == names)


def _clobber(tensors: Sequence[Tensor]) -> None:
    """Overwrite tensors with NaN or large integers."""
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype == torch.bool:
            tensor.fill_(True)
        else:
            tensor.fill_(int.from_bytes(GARBAGE_BYTE * tensor.itemsize))


def _alias(value: Any) -> Any:
    return value.detach() if has_storage(value) else value


def _run(func: Any, targets: Sequence[Tensor | None], *args: Any, **arguments: Any) -> None:
    results = [leaf for leaf in leaves(func(*args, **arguments)) if has_storage(leaf)]
    for result, target in zip(results, targets, strict=True):
        if target is None:
            continue
        layouts = [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in (target, result)]
        if layouts[0] != layouts[1]:
            raise RuntimeError(f"{func}: captured {layouts[0]}, but the replay has {layouts[1]}")
        target.copy_(result)
