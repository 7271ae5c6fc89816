"""Dispatch of torch's operators on an emulated GPU: each runs on host memory, and becomes a record."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import meseta
from gpu_path.arguments import describe, is_tensors, leaves, name_arguments
from gpu_path.capture import FORBIDDEN, Capture, CaptureMode
from gpu_path.memory import StorageSet, has_storage
from gpu_path.python_calls import PythonCallCounter
from gpu_path.records import Kind, Record, TensorRecord

PACKAGE = f"{Path(meseta.__file__).parent}/"
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
WAITING = frozenset(
    f"aten::{name}"
    for name in (
        "_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount", "_unique", "_unique2", "unique_dim",
        "unique_consecutive",
    )
)  # fmt: skip
"""Operators whose results the host needs, so that it waits for the device."""
MIXING = frozenset(f"aten::{name}" for name in ("copy_", "_to_copy", "index", "index_put_", "_index_put_impl_"))
"""Operators whose tensor arguments may be on both devices."""
EMPTY = frozenset(
    f"aten::{name}" for name in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
)
"""Operators that allocate memory and launch no kernel."""
UNPINNED_COPY = "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned"

# The package caches constants on the device, which a later emulation uses too.
MEMORY, PINNED = StorageSet(), StorageSet()


class EmulatedGpu(TorchDispatchMode):
    """Emulated GPU. Within this mode, operators with a tensor or a keyword `device` on it are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Record] = []
        """Records since `begin`."""
        self.is_recording = False
        self.memory = MEMORY
        """Storages on the device."""
        self.pinned = PINNED
        """Storages in pinned host memory."""
        self.python_calls = PythonCallCounter()
        self.stages: list[str] = []
        """Stages that are open, the innermost one last."""
        self.warns_of_waits = False
        """Whether an operator that waits for the device causes a warning."""
        self.is_transferring = False
        """Whether the next `_to_copy` moves a tensor to another device."""
        self.capture: Capture | None = None
        """CUDA graph that is captured."""
        self.current_stream: Any = None
        self._region = ""
        self._graphs = WeakSet[Capture]()
        self._born = StorageSet()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Otherwise torch wraps `__torch_dispatch__` in four Python functions.

    def begin(self) -> None:
        """Start to record a step, and to count its Python calls."""
        self.records, self.is_recording = [], True
        self._born.clear()
        self.python_calls.start()

    def end(self) -> list[Record]:
        """Stop recording and return the records."""
        self.python_calls.stop()
        self.is_recording = False
        return self.records

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Context manager that names a region of a step. New memory is numbered from its start."""
        self._region = name
        self._born.clear()
        try:
            yield
        finally:
            self._region = ""

    @contextmanager
    def host_view(self) -> Iterator[None]:
        """Context manager in which tensors are on the host, and nothing is recorded or counted."""
        memory, self.memory = self.memory, StorageSet()
        self.python_calls.suspend()
        try:
            with _disable_current_modes(), torch._C._AutoDispatchBelowAutograd():
                yield
        finally:
            self.python_calls.resume()
            self.memory = memory

    def begin_capture(self, pool: tuple[int, int], mode: CaptureMode) -> None:
        """Start to capture the current stream."""
        if self.capture is not None:
            raise RuntimeError("CUDA error: a stream is already capturing")
        self.capture = Capture(self.memory, self.current_stream, mode, pool)

    def end_capture(self) -> Capture:
        """Stop capturing, and return the graph."""
        assert self.capture is not None
        capture, self.capture = self.capture, None
        self._graphs.add(capture)
        return capture

    def replay(self, graph: Capture) -> None:
        """Run a captured graph. Memory of graphs that were captured later in the same pool becomes undefined."""
        self.record("graph replay", "CUDAGraph.replay", {}, (), operators=tuple(graph.records))
        with self.host_view():
            for other in self._graphs:
                if other.pool == graph.pool and other.number > graph.number:
                    other.clobber()
            graph.replay()

    def capture_here(self) -> Capture | None:
        """Return the capture of the calling thread, or `None`."""
        return self.capture if self.capture is not None and self.capture.is_in_this_thread else None

    def capture_of(self, stream: Any) -> Capture | None:
        """Return the capture of a stream by the calling thread, or `None`."""
        capture = self.capture_here()
        return capture if capture is not None and capture.includes(stream) else None

    def wait(self, waiting: Any, stream: Any, *, is_captured: bool) -> None:
        """Let the stream `waiting` wait for work of another one."""
        if (capture := self.capture_here()) is not None:
            capture.wait(waiting, stream, is_captured=is_captured)

    def check(self, name: str) -> None:
        """Raise RuntimeError if a capture forbids a wait or an allocation."""
        if self.capture is not None:
            self.capture.check(name)

    def check_outside(self, *captures: Capture | None) -> None:
        """Raise RuntimeError if an event belongs to a capture, which only its own streams can wait for."""
        if any(capture is not None for capture in captures):
            raise RuntimeError("CUDA error: operation not permitted on an event last recorded in a capturing stream")

    def note(self, kind: Kind, name: str) -> None:
        """Record a call that is not an operator."""
        self.record(kind, name, {}, ())

    def record(
        self,
        kind: Kind,
        name: str,
        arguments: Mapping[str, Any],
        tensors: Sequence[Tensor],
        *,
        is_dispatched: bool = False,
        operators: tuple[Record, ...] = (),
    ) -> None:
        """Record an operator with named arguments. `tensors` are its tensor arguments and results.

        Raises RuntimeError if a capture forbids it.
        """
        if kind in FORBIDDEN:
            self.check(name)
        if kind == "synchronization" and self.warns_of_waits and name != "cuda.synchronize":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        capture = self.capture_here()
        if capture is None and not self.is_recording:
            return
        scalars = tuple((key, describe(value)) for key, value in arguments.items() if not is_tensors(value))
        described = tuple(self._describe_tensor(tensor) for tensor in tensors)
        stage = self.stages[-1] if self.stages else ""
        record = Record(kind, name, scalars, described, package_line(), stage, is_dispatched, self._region, operators)
        (self.records if capture is None else capture.records).append(record)

    def place(self, tensor: Tensor) -> None:
        """Move the storage of a new tensor to the device."""
        if tensor not in self.memory:
            self.memory.add(tensor)
            if self.is_recording or self.capture is not None:
                self._new_memory().add(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        arguments = dict(kwargs or {})
        if func._can_decompose():
            with self:
                return func.decompose(*args, **arguments)
        inputs = [leaf for leaf in leaves((args, arguments)) if has_storage(leaf)]
        on_device = [tensor in self.memory for tensor in inputs]
        if arguments.pop("pin_memory", None):
            return self._pin(func, args, arguments)
        device = arguments.get("device")
        is_placed = device is not None and torch.device(device).type == "cuda"
        if device is not None:
            arguments["device"] = CPU
        transferring, self.is_transferring = self.is_transferring, False
        name = func._schema.name
        if name == "aten::_to_copy" and transferring:
            return self._transfer(func, args, arguments, to_device=is_placed)
        if name == "aten::copy_" and on_device[0] != on_device[1]:
            return self._copy(func, args, arguments, to_device=on_device[0])
        if not (is_placed or any(on_device)):
            self.record("host", name, {}, (), is_dispatched=True)
            return func(*args, **arguments)
        if func.namespace == "meseta":
            return self._run_own(func, args, arguments)
        check_devices(name, inputs, on_device)
        capture = self.capture_here()
        is_waiting = waits(name, args, arguments)
        if capture is None:
            result = func(*args, **arguments)
        else:
            check_captured(capture, func, inputs, on_device)
            if is_waiting:
                capture.check(name)
            result = capture.run(func, args, arguments)
        outputs = [leaf for leaf in leaves(result) if has_storage(leaf)]
        for output in outputs:
            self.place(output)
        kind = kind_of(func, inputs, outputs)
        named = name_arguments(func, args, arguments) if self.is_recording or capture is not None else {}
        named.pop("device", None)
        self.record(kind, name, named, (*inputs, *outputs), is_dispatched=True)
        if is_waiting:
            self.note("synchronization", name)
        if capture is not None:
            if kind == "kernel":
                capture.use(self.current_stream)
            capture.add(kind, func, args, arguments, outputs)
        return result

    def _run_own(self, func: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> Any:
        """Run the implementation for GPUs of an operator of this package."""
        self.record("wrapper", func._schema.name, {}, (), is_dispatched=True)
        has_own = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CUDA")
        key = torch._C.DispatchKey.CUDA if has_own else torch._C.DispatchKey.CPU
        with self:
            depth = self.python_calls.enter_package()
            try:
                return func._op_dk(key, *args, **arguments)
            finally:
                self.python_calls.leave_package(depth)

    def _pin(self, func: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> Tensor:
        result: Tensor = func(*args, **arguments)
        self.pinned.add(result)
        self.record("pinned allocation", func._schema.name, {"shape": tuple(result.shape)}, (), is_dispatched=True)
        return result

    def _transfer(self, func: Any, args: tuple[Any, ...], arguments: dict[str, Any], *, to_device: bool) -> Tensor:
        is_async = arguments.pop("non_blocking", False)
        capture = self.capture_here()
        result: Tensor = func(*args, **arguments) if capture is None else capture.run(func, args, arguments)
        if to_device:
            self.place(result)
        self._note_copy(args[0], result, to_device=to_device, is_async=is_async)
        if capture is not None:
            capture.use(self.current_stream)
            capture.add("copy to device", func, args, arguments, (result,))
        return result

    def _copy(self, func: Any, args: tuple[Any, ...], arguments: dict[str, Any], *, to_device: bool) -> Any:
        target, source, is_async = (*args, arguments.pop("non_blocking", False))[:3]
        if (capture := self.capture_here()) is None:
            result = func(target, source)
        else:
            result = target
            capture.use(self.current_stream)
            capture.launch(func, (target, source), {})
        self._note_copy(source, target, to_device=to_device, is_async=is_async)
        return result

    def _note_copy(self, source: Tensor, target: Tensor, *, to_device: bool, is_async: bool) -> None:
        if not source.numel():
            return
        capture = self.capture_here()
        if capture is not None and (source if to_device else target) not in self.pinned:
            capture.fail(UNPINNED_COPY)
        self.record("copy to device" if to_device else "copy to host", "copy", {}, (source, target), is_dispatched=True)
        if not (is_async and (source if to_device else target) in self.pinned):
            self.note("synchronization", "copy that blocks the host")

    def _new_memory(self) -> StorageSet:
        capture = self.capture_here()
        return self._born if capture is None else capture.memory

    def _describe_tensor(self, tensor: Tensor) -> TensorRecord:
        if tensor in self.pinned:
            memory = f"pinned {tensor.data_ptr():#x}"
        elif tensor not in self.memory:
            # A kernel receives a scalar of the host by value.
            memory = "host" if tensor.dim() else f"host {tensor.tolist()}"
        elif (number := self._new_memory().number(tensor)) is not None:
            memory = f"new {number}"
        else:
            memory = hex(tensor.untyped_storage().data_ptr())
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        return TensorRecord(str(tensor.dtype).removeprefix("torch."), shape, strides, tensor.storage_offset(), memory)


def kind_of(func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Kind:
    """Return the kind of an operator on the device."""
    if func._schema.name in EMPTY:
        return "allocation"
    if func._schema.name == "aten::_local_scalar_dense":
        return "copy to host"
    storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    if not func._schema.is_mutable and outputs and all(o.untyped_storage()._cdata in storages for o in outputs):
        return "view"
    # A kernel without elements is not launched.
    changed = outputs if outputs else inputs
    return "kernel" if any(tensor.numel() for tensor in changed) else "allocation"


def waits(name: str, args: Sequence[Any], arguments: Mapping[str, Any]) -> bool:
    """Whether the host waits for the device in an operator."""
    if name == "aten::repeat_interleave":
        return arguments.get("output_size") is None
    if name in ("aten::index", "aten::index_put_", "aten::_index_put_impl_"):
        # The number of selected elements determines the shape of the result.
        masks = (torch.bool, torch.uint8)
        return any(isinstance(index, Tensor) and index.dtype in masks for index in args[1])
    return name in WAITING


def check_devices(name: str, inputs: Sequence[Tensor], on_device: Sequence[bool]) -> None:
    """Raise RuntimeError if an operator receives tensors on both devices, except scalars of the host."""
    hosted = [tensor for tensor, is_there in zip(inputs, on_device, strict=True) if not is_there and tensor.dim()]
    if hosted and any(on_device) and name not in MIXING:
        raise RuntimeError(f"{name}: expected all tensors on the emulated GPU, but {list(hosted[0].shape)} is not")


def check_captured(capture: Capture, func: Any, inputs: Sequence[Tensor], on_device: Sequence[bool]) -> None:
    """Raise RuntimeError if an operator cannot be captured."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        capture.fail(f"{func}: the emulated GPU has no registered generator for a captured random operator")
    # Torch copies indices of the host to the device.
    if any(on_device) and any(
        tensor.dim() and not is_there for tensor, is_there in zip(inputs, on_device, strict=True)
    ):
        capture.fail(UNPINNED_COPY)


def package_line() -> str:
    """Return the innermost line of the package on the stack, as file:line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE):
            return f"{path.removeprefix(PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
