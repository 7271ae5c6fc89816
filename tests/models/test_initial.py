"""Tests of initial dense parameters by pattern: their generator and the order of patterns."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meseta.comm import World
from meseta.config import RunConfig
from meseta.config.load import validate_document
from meseta.data.dataset.dataset import Dataset
from meseta.embedding import EmbeddingBagCollection
from meseta.spec import MesetaError
from meseta.train.setup.build import make_sharded_model
from meseta.train.setup.meta_model import make_meta_model
from meseta.train.setup.specs import make_specs
from small_run import settings


def dense_part(tiny: Path, tmp_path: Path, **changes: Any) -> dict[str, Tensor]:
    config = RunConfig.model_validate(settings(tiny, tmp_path / "run", seed=3, **changes))
    model: nn.Module = make_sharded_model(config, Dataset.load(tiny), World.single())
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def drawn(draw: Any, name: str, shape: torch.Size) -> Tensor:
    """Draw numbers that depend on (seed 3, name, shape) alone, seeded by 63 bits of BLAKE2b of "3/name"."""
    digest = hashlib.blake2b(f"3/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return draw(shape, dtype=torch.float64, generator=generator)


def test_patterns_decide_how_parameters_start(tiny: Path, tmp_path: Path) -> None:
    init = {
        "top_mlp.*": {"kind": "normal", "scale": 0.5},
        "*.bias": {"kind": "constant", "scale": -0.25},
        "bottom_mlp.[0-9].weight": {"scale": 0.01},
        "top_mlp.0.weight": {"kind": "uniform", "scale": 2.0},
    }
    plain, parameters = dense_part(tiny, tmp_path), dense_part(tiny, tmp_path, dense__init=init)
    assert plain.keys() == parameters.keys()
    for name, parameter in parameters.items():
        if name.endswith("bias"):
            expected = torch.full_like(parameter, -0.25)
        elif name == "top_mlp.0.weight":
            expected = (drawn(torch.rand, name, parameter.shape) * 2 - 1) * 2.0
        elif name.startswith("top_mlp"):
            expected = drawn(torch.randn, name, parameter.shape) * 0.5
        else:
            expected = (drawn(torch.rand, name, parameter.shape) * 2 - 1) * 0.01
        torch.testing.assert_close(parameter, expected.float(), rtol=1e-6, atol=0)
    one = {"bottom_mlp.0.weight": {"kind": "normal", "scale": 0.1}}
    parameters = dense_part(tiny, tmp_path, dense__init=one)
    assert [name for name in plain if not torch.equal(plain[name], parameters[name])] == list(one)


def test_patterns_without_a_match_are_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(MesetaError, match=r"^config: dense.init 'top_mlp.0.wight' matches no parameter; did you mean "):
        dense_part(tiny, tmp_path, dense__init={"top_mlp.0.wight": {"scale": 0.1}})
    with pytest.raises(
        MesetaError, match=r"^config: dense.init 'Q' matches no parameter; available: bottom_mlp.0.bias, "
    ):
        dense_part(tiny, tmp_path, dense__init={"Q": {"scale": 0.1}})


def test_an_outline_has_no_numbers_and_the_same_refusals(tiny: Path, tmp_path: Path) -> None:
    dataset = Dataset.load(tiny)

    def outline(init: Any) -> nn.Module:
        config = RunConfig.model_validate(settings(tiny, tmp_path / "run", dense__init=init))
        return make_meta_model(config, dataset, EmbeddingBagCollection(*make_specs(config, dataset)))

    kinds = {"*weight": {"kind": "normal", "scale": 1}, "*bias": {"kind": "constant", "scale": 1}}
    assert all(parameter.is_meta for parameter in outline(kinds).parameters())
    with pytest.raises(MesetaError, match="matches no parameter"):
        outline({"nothing": {"scale": 1}})


@pytest.mark.parametrize(
    ("init", "message"),
    [
        ({"kind": "normal"}, "key 'dense.init.a.scale' is missing"),
        ({"kind": "norml", "scale": 1}, "key 'dense.init.a.kind': input should be 'uniform', 'normal' or 'constant'"),
        ({"scale": -1}, "key 'dense.init.a': init: scale must not be negative for kind 'uniform', got -1.0"),
        ({"scale": math.inf}, "key 'dense.init.a.scale': input should be a finite number, got inf"),
        ({"scales": 1}, "unknown key 'dense.init.a.scales'; did you mean 'scale'?"),
    ],
)
def test_bad_values_are_refused(init: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(MesetaError) as refused:
        validate_document(settings(tmp_path, tmp_path / "run", dense__init={"a": init}))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
