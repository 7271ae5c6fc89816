"""Initial dense weights: one random stream per parameter name, so that neither order, rank nor global state matters."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from meseta.jagged.shapes import Float


def _stream(seed: int, name: str) -> torch.Generator:
    """The generator that belongs to (seed, name); always on the CPU, so that a GPU run starts from the same bits."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


@torch.no_grad()
def fill_normal(parameter: Float[Tensor, " *shape"], std: float, seed: int, name: str) -> None:
    """Overwrite with draws from N(0, std squared), made in float64 and then rounded to the parameter's type.

    Here as in `fill_uniform`, a parameter on torch's meta device, which has no numbers, stays as it is.
    """
    if not parameter.is_meta:
        draws = torch.randn(parameter.shape, dtype=torch.float64, generator=_stream(seed, name))
        parameter.copy_(draws.mul_(std))


@torch.no_grad()
def fill_uniform(parameter: Float[Tensor, " *shape"], bound: float, seed: int, name: str) -> None:
    """Overwrite with draws from [-bound, bound), made in float64 and then rounded to the parameter's type."""
    if not parameter.is_meta:
        draws = torch.rand(parameter.shape, dtype=torch.float64, generator=_stream(seed, name))
        parameter.copy_(draws.mul_(2.0).sub_(1.0).mul_(bound))
