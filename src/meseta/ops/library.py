"""Where operators are registered with torch: define/impl, which costs a few microseconds a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("meseta", "FRAGMENT")
"""All operators of this package, as torch.ops.meseta.NAME."""
FLOPS: dict[Any, Callable[..., int]] = {}
"""Of operators that multiply matrices, what torch.utils.flop_counter counts of a call, as its `custom_mapping`."""


def can_bypass_dispatcher(tensor: Tensor) -> bool:
    """Whether a call may go to the compiled core at once: it is run, on a CPU, and nobody traces it.

    An operator's way through torch costs as much as a small batch when it takes a hundred tables along.
    """
    return type(tensor) is Tensor and tensor.is_cpu and not torch.compiler.is_compiling()


def register(
    schema: str,
    *,
    cpu: Callable[..., Any],
    fake: Callable[..., Any],
    cuda: Callable[..., Any] | None = None,
    flops: Callable[..., int] | None = None,
) -> Any:
    """Define `schema` with its kernels and return the callable operator.

    `fake` gives shapes and types alone, for torch.compile and torch.export. Without `cuda` the CPU's function, which
    then has to be plain torch, serves every device. `flops` gives the operations of its products, of the arguments of a
    call: two for a product that is added to a sum.
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
    """The same as torch's counter calls it: with the result too, and with tensors in place of their shapes."""

    def counted(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return flops(*args, **kwargs)

    counted._get_raw = True  # type: ignore[attr-defined]
    return counted
