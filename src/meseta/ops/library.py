"""Registration of operators with PyTorch."""
# `define` and `impl` cost a few microseconds per call.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
