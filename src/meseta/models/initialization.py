"""Initial weights of the dense part. Each parameter name has its own random stream."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from meseta.sparse.shapes import Float
from meseta.spec import InitSpec, MesetaError, suggest


def _make_generator(seed: int, name: str) -> torch.Generator:
    # Draws on the CPU, so that runs on a GPU start from the same bits.
    # With a stream per name, weights do not depend on the order of parameters, the rank or global random state.
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


@torch.no_grad()
def fill_normal(parameter: Float[Tensor, " *shape"], std: float, seed: int, name: str) -> None:
    """Fill with draws from N(0, std squared), made in float64 and rounded. Skips a parameter on the meta device."""
    if not parameter.is_meta:
        draws = torch.randn(parameter.shape, dtype=torch.float64, generator=_make_generator(seed, name))
        parameter.copy_(draws.mul_(std))


@torch.no_grad()
def fill_uniform(parameter: Float[Tensor, " *shape"], bound: float, seed: int, name: str) -> None:
    """Fill with draws from [-bound, bound), made in float64 and rounded. Skips a parameter on the meta device."""
    if not parameter.is_meta:
        draws = torch.rand(parameter.shape, dtype=torch.float64, generator=_make_generator(seed, name))
        parameter.copy_(draws.mul_(2.0).sub_(1.0).mul_(bound))


@torch.no_grad()
def fill_by_pattern(model: nn.Module, inits: Mapping[str, InitSpec], seed: int) -> None:
    """Fill the parameters whose names match a pattern of `inits`, with case-sensitive fnmatch. The last match wins.

    Each `InitSpec` must have a `scale`. The numbers depend only on seed, name, shape, kind and scale. Raises
    MesetaError if a pattern matches no parameter.
    """
    parameters = dict(model.named_parameters())
    chosen: dict[str, InitSpec] = {}
    for pattern, init in inits.items():
        targets = [name for name in parameters if fnmatchcase(name, pattern)]
        if not targets:
            raise MesetaError(f"config: dense.init {pattern!r} matches no parameter; {suggest(pattern, parameters)}")
        chosen |= dict.fromkeys(targets, init)
    for name, init in chosen.items():
        assert init.scale is not None
        if init.kind == "normal":
            fill_normal(parameters[name], init.scale, seed, name)
        elif init.kind == "uniform":
            fill_uniform(parameters[name], init.scale, seed, name)
        else:
            parameters[name].fill_(init.scale)
