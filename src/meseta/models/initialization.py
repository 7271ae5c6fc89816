"""Initial dense weights: one random stream per parameter name, so that neither order, rank nor global state matters."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from meseta.jagged.shapes import Float
from meseta.spec import InitSpec, MesetaError, suggest


def _make_generator(seed: int, name: str) -> torch.Generator:
    """The generator that belongs to (seed, name); always on the CPU, so that a GPU run starts from the same bits."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


@torch.no_grad()
def fill_normal(parameter: Float[Tensor, " *shape"], std: float, seed: int, name: str) -> None:
    """Overwrite with draws from N(0, std squared), made in float64 and then rounded to the parameter's type.

    Here as in `fill_uniform`, a parameter on torch's meta device, which has no numbers, stays as it is.
    """
    if not parameter.is_meta:
        draws = torch.randn(parameter.shape, dtype=torch.float64, generator=_make_generator(seed, name))
        parameter.copy_(draws.mul_(std))


@torch.no_grad()
def fill_uniform(parameter: Float[Tensor, " *shape"], bound: float, seed: int, name: str) -> None:
    """Overwrite with draws from [-bound, bound), made in float64 and then rounded to the parameter's type."""
    if not parameter.is_meta:
        draws = torch.rand(parameter.shape, dtype=torch.float64, generator=_make_generator(seed, name))
        parameter.copy_(draws.mul_(2.0).sub_(1.0).mul_(bound))


@torch.no_grad()
def fill_by_pattern(model: nn.Module, inits: Mapping[str, InitSpec], seed: int) -> None:
    """Overwrite the parameters whose names a pattern of `inits` meets (fnmatch, case counts), the last such pattern
    deciding. Each has a `scale`. Numbers are a function of (seed, name, shape) and of its kind and scale alone.

    Raises MesetaError for a pattern that meets none.
    """
    parameters = dict(model.named_parameters())
    chosen: dict[str, InitSpec] = {}
    for pattern, init in inits.items():
        met = [name for name in parameters if fnmatchcase(name, pattern)]
        if not met:
            raise MesetaError(f"config: dense.init {pattern!r} meets no parameter; {suggest(pattern, parameters)}")
        chosen |= dict.fromkeys(met, init)
    for name, init in chosen.items():
        assert init.scale is not None
        if init.kind == "normal":
            fill_normal(parameters[name], init.scale, seed, name)
        elif init.kind == "uniform":
            fill_uniform(parameters[name], init.scale, seed, name)
        else:
            parameters[name].fill_(init.scale)
