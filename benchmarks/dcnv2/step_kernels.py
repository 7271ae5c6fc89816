"""Kernels of a DLRM-DCNv2 step, with their computed bytes and operations and the bytes that Triton kernels request.

Steps are recorded on an emulated GPU, with few samples. Tensors with a batch dimension, and requests of kernels that
have such tensors, are scaled to the wanted batch size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from gpu_path.patches import emulated_gpu
from gpu_path.products import TILE_CHOICES
from gpu_path.records import Record, TensorRecord
from gpu_path.training import Training, record_steps

from dcnv2.requests import LaunchRequests, Signature, count_requests
from dcnv2.shape import BLOCK_SAMPLES, Dcnv2Shape
from dcnv2.training import UniformBatches, make_dcnv2
from meseta.data import Batch
from meseta.ops import linear
from meseta.ops.linear import triton as linear_triton
from meseta.ops.row_update import triton as row_update
from meseta.spec import MesetaError

ROW_SOURCES = ("ops/row_update/", "ops/pooled_lookup/", "ops/id_policy/", "data/read/")
"""Sources of the kernels whose work depends on the number of ids."""
FIRST_BATCH_SIZE = 4
"""Number of samples of the step before that of the dense part."""
UPDATE_KERNEL = "update"
"""Kernel of the row update. Its programs are many and slow in the interpreter, and equal in distribution."""
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
SCALAR_PRODUCTS = {"_scalar_linear": 1, "_scalar_linear_backward": 2}
"""Number of products of x [B, N] with vectors, by kernel."""
LINEAR_KERNELS = ("_linear", "_linear_backward")


@dataclass(frozen=True)
class StepKernel:
    """All launches of a kernel in one stage of a step."""

    name: str
    stage: str
    count: int
    """Number of launches."""
    num_bytes: float
    """Computed bytes: each argument once, except for rows and for arguments that are not read completely."""
    num_flops: float
    """Computed operations of matrix products."""
    num_requested: float | None
    """Bytes that Triton kernels request. `None` for kernels of torch."""
    signatures: tuple[Signature, ...] = ()
    """Different signatures of Triton kernels."""


class StepCase:
    """Case of a `Training` with a shape's model and batches. The first batch has `first_size` samples."""

    dense_optimizer = "adam"

    def __init__(self, shape: Dcnv2Shape, first_size: int) -> None:
        self._shape, self._first_size = shape, first_size

    def make_model(self, device: str) -> Any:
        """Create the model on a device."""
        return make_dcnv2(self._shape, device)

    def make_batch(self, number: int) -> Batch:
        """Create the batch of a step on the host."""
        size = self._shape.batch_size if number else self._first_size
        return UniformBatches(replace(self._shape, batch_size=size)).make(number)


@dataclass(frozen=True)
class Launch:
    """Kernel of a recorded step."""

    record: Record
    requests: LaunchRequests | None


def kernels_of(batch_size: int, recorded_size: int) -> list[AbstractContextManager[Any]]:
    """Return context managers in which linear layers of `recorded_size` samples have the kernels and tiles of
    `batch_size` samples, and row updates those of a GPU. Enter them on an emulated GPU, which has other tiles."""

    def choose(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda num_samples, *args: function(batch_size if num_samples in sizes else num_samples, *args)

    sizes = recorded_size, FIRST_BATCH_SIZE
    choices = [(linear, "_is_small"), *((linear_triton, name) for name in TILE_CHOICES)]
    return [
        mock.patch.object(row_update, "TILE_ELEMENTS", row_update.TILE_ELEMENTS),
        *(mock.patch.object(owner, name, choose(getattr(owner, name))) for owner, name in choices),
    ]


def record_launches(shape: Dcnv2Shape, batch_size: int, *, selects_rows: bool) -> list[Launch]:
    """Train for two steps on an emulated GPU. Return the kernels for ids and rows of the second one, or all others, as
    for `batch_size` samples."""
    # The first batch of a layout prepares only what the kernels for ids and rows read.
    case = StepCase(shape, shape.batch_size if selects_rows else min(FIRST_BATCH_SIZE, shape.batch_size))
    patches = kernels_of(batch_size, shape.batch_size)
    with count_requests((UPDATE_KERNEL,)) as requests, emulated_gpu() as gpu, ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        training = Training(case, "cuda")
        training.step()
        if not selects_rows:
            requests.sampled = None  # The numbers of the last step do not matter.
        [recording] = record_steps(gpu, training, num_warm_up_steps=0)
        with suppress(MesetaError):  # The loss of sampled kernels may be NaN.
            training.pipeline.synchronize()
    records = recording.select("kernel")
    num_triton = sum(not is_torch(record) for record in records)
    counted = iter(requests.launches[len(requests.launches) - num_triton :])
    launches = [Launch(record, None if is_torch(record) else next(counted)) for record in records]
    assert all(launch.requests is None or launch.requests.kernel == launch.record.name for launch in launches)
    return [launch for launch in launches if is_row_kernel(launch.record) == selects_rows]


def is_torch(record: Record) -> bool:
    """Whether a kernel is one of torch."""
    return "::" in record.name


def step_kernels(shape: Dcnv2Shape, num_row_samples: int, num_dense_samples: int) -> list[StepKernel]:
    """Return the kernels of a step of `shape`.

    Kernels for ids and rows are recorded with `num_row_samples` samples, and with fewer rows, so that ids repeat as
    often. All others are recorded with `num_dense_samples` samples, which have one id per table. No
    width of the model may be a multiple of one of these numbers, or one more.
    """
    row_shape = shape.with_batch_size(num_row_samples)
    dense_shape = replace(
        shape, rows=(4096,) * len(shape.rows), ids=(1,) * len(shape.ids), batch_size=num_dense_samples
    )
    parts = [
        (recorded, record_launches(recorded, shape.batch_size, selects_rows=selects_rows))
        for recorded, selects_rows in ((row_shape, True), (dense_shape, False))
    ]
    kernels: dict[tuple[str, str], StepKernel] = {}
    for recorded, launches in parts:
        for launch in launches:
            one = scale_launch(launch, recorded, shape)
            key = one.name, one.stage
            kernels[key] = merge(kernels[key], one) if key in kernels else one
    return list(kernels.values())


def is_row_kernel(record: Record) -> bool:
    """Whether the work of a kernel depends on the number of ids."""
    return record.source.startswith(ROW_SOURCES)


def merge(some: StepKernel, other: StepKernel) -> StepKernel:
    """Return the sum of two launches of one kernel."""
    requested = None if some.num_requested is None else some.num_requested + (other.num_requested or 0.0)
    return replace(
        some,
        count=some.count + other.count,
        num_bytes=some.num_bytes + other.num_bytes,
        num_flops=some.num_flops + other.num_flops,
        num_requested=requested,
        signatures=(*some.signatures, *(one for one in other.signatures if one not in some.signatures)),
    )


def scale_launch(launch: Launch, recorded: Dcnv2Shape, shape: Dcnv2Shape) -> StepKernel:
    """Return the work of a launch in a step of `shape`, given the recorded shape."""
    record, factor = launch.record, shape.batch_size / recorded.batch_size
    has_batch = [is_batch(tensor, recorded.batch_size) for tensor in record.tensors]
    tensor_bytes = [
        size_of(tensor) * (factor if scales else 1.0) for tensor, scales in zip(record.tensors, has_batch, strict=True)
    ]
    special = row_kernel_bytes(record, shape) if is_row_kernel(record) else dense_kernel_bytes(record, shape)
    requests = launch.requests
    return StepKernel(
        name=record.name,
        stage=record.stage,
        count=1,
        num_bytes=sum(tensor_bytes) if special is None else special,
        num_flops=num_flops(record, recorded.batch_size) * factor,
        num_requested=None if requests is None else requests.num_bytes * (factor if any(has_batch) else 1.0),
        signatures=() if requests is None else (requests.signature,),
    )


def is_batch(tensor: TensorRecord, batch_size: int) -> bool:
    """Whether a dimension of a tensor is proportional to the number of samples or of their blocks."""
    num_blocks = math.ceil(batch_size / BLOCK_SAMPLES)
    return any(dim == num_blocks > 1 or (dim >= batch_size and dim % batch_size <= 1) for dim in tensor.shape)


def size_of(tensor: TensorRecord) -> int:
    """Return the bytes of a tensor."""
    return math.prod(tensor.shape) * torch.empty(0, dtype=getattr(torch, tensor.dtype)).itemsize


def num_flops(record: Record, batch_size: int) -> float:
    """Return the operations of matrix products, 0 for other kernels."""
    shapes = [tensor.shape for tensor in record.tensors]
    if record.name in PRODUCTS:
        a, b, _ = shapes[-3:]
        return 2.0 * math.prod(a) * b[-1]
    if record.name in SCALAR_PRODUCTS:
        return 2.0 * SCALAR_PRODUCTS[record.name] * max(map(math.prod, shapes))
    if record.name not in LINEAR_KERNELS:
        return 0.0
    # The gradient of the weight has one matrix per chunk of samples. That of the input comes first.
    num_products = 1
    if record.name == "_linear_backward":
        num_products = any(len(one) == 3 for one in shapes) + (shapes[0][0] == batch_size and len(shapes[0]) == 2)
    *_, weight = [one for one, tensor in zip(shapes, record.tensors, strict=True)
                  if len(one) == 2 and not is_batch(tensor, batch_size)]  # fmt: skip
    return 2.0 * num_products * batch_size * math.prod(weight)


def row_kernel_bytes(record: Record, shape: Dcnv2Shape) -> float | None:
    """Return the computed bytes of a kernel that accesses rows by address, or only parts of its arguments."""
    work = shape.work()
    if record.source.startswith("ops/pooled_lookup/"):
        return work["lookup"].num_bytes
    if record.name == UPDATE_KERNEL:
        return work["row update"].num_bytes
    if record.name == "aten::sort":
        return work["sort of ids"].num_bytes - shape.num_ids * (8 + 4)
    if record.name == "sum_long_runs":
        return shape.long_run_bytes
    return None


def dense_kernel_bytes(record: Record, shape: Dcnv2Shape) -> float | None:
    """Return the computed bytes of a dense kernel that also writes its arguments."""
    if record.name == "aten::_fused_adam_":
        return shape.work()["dense optimizer"].num_bytes
    if record.name == "_cross_backward":
        num_matrices = 5 if dict(record.scalars)["FORM"] % 2 else 6  # The last layer does not read the gradient of x0.
        return num_matrices * shape.batch_size * shape.num_inputs * shape.activation_bytes
    return None


def total(kernels: Iterable[StepKernel]) -> tuple[int, float, float]:
    """Return the number of launches, and the total computed bytes and operations."""
    listed = list(kernels)
    return (
        sum(kernel.count for kernel in listed),
        sum(kernel.num_bytes for kernel in listed),
        sum(kernel.num_flops for kernel in listed),
    )
