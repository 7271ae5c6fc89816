"""Tests of user-defined model classes by import path, and of one-line errors about them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meseta.config import ModelConfig
from meseta.config.models import MODEL_NAMES
from meseta.models import make_model
from meseta.models.layers import find_dense_forward
from meseta.spec import MesetaError
from model_parts import OneRowEach
from own_models import Plain, WithBefore
from small_run import of_its_model


def make(name: str, labels: tuple[str, ...] = ("label",), seed: int = 0, **options: object) -> torch.nn.Module:
    config = ModelConfig(name=name, options=options)
    return make_model(config, OneRowEach([4, 4]), 3, seed, labels=labels)


def test_a_custom_model_gets_the_documented_arguments_and_the_seed() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = make("own_models:Plain", seed=5, scale=2.0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, other = make("own_models:Plain", seed=5), make("own_models:Plain", seed=6)
    assert (first.scale, first.seed, first.linear.weight.shape) == (2.0, 5, (1, 11))
    assert torch.equal(first.linear.weight, again.linear.weight)
    assert not torch.equal(first.linear.weight, other.linear.weight)
    assert all(module.training for module in first.modules())
    assert make("own_models:Plain", ("a", "b")).score(torch.zeros(5, 3), torch.zeros(5, 8)).shape == (5, 2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_model_s:Plain", "module 'own_model_s' does not exist; write"),
        ("own_models.deeper:Plain", "module 'own_models.deeper' does not exist|'own_models' is not a package"),
        ("own_models:Plane", "module 'own_models' has no 'Plane'; did you mean 'Plain'"),
        ("own_models:number", "'number' is not a subclass of torch.nn.Module"),
        ("own_models:NoModule", "'NoModule' is not a subclass of torch.nn.Module"),
        ("own_models:NoScore", r"has no method score\(dense, pooled\); see docs/own_model.md"),
        ("own_models:Forgets", "must store its argument embeddings as self.embeddings"),
        ("own_models:NotSqueezed", r"logits \[2\] for 2 samples and 1 labels, but returned float32 \[2, 1\]"),
        ("own_models:FlatForTwo", r"logits \[1\] for 1 samples and 1 labels, but returned float32 \[\]"),
        ("own_models:Listed", "but returned list"),
        (
            "own_models:BeforeAlone",
            "score of what forward_dense has returned, on 2 samples of zeros, failed with Attribute",
        ),
        (
            "own_models:FormerName",
            "FormerName has before, which is now called forward_dense; rename",
        ),
        ("own_models:Breaks", r"score, on 2 samples of zeros, failed with RuntimeError: .*shapes.*functional|linear"),
    ],
)
def test_errors_of_custom_models_are_one_line(name: str, message: str) -> None:
    with pytest.raises(MesetaError, match=message) as caught:
        make(name)
    assert str(caught.value).startswith(f"model.name {name!r}: ")


def test_layers_before_the_embeddings_are_found_from_score() -> None:
    class OwnScore(WithBefore):
        def score(self, dense: Any, pooled: torch.Tensor) -> torch.Tensor:
            return super().score(dense + 1.0, pooled)

    class FormerOverride(WithBefore):
        def before(self, dense: torch.Tensor) -> torch.Tensor:
            return dense

    class FormerAttribute(WithBefore):
        reads_dense_alone = False

    embeddings: Any = OneRowEach([4, 4])
    options: Any = {"num_dense": 3, "labels": ("label",), "seed": 0}
    assert find_dense_forward(Plain(embeddings, **options)) is None
    model = WithBefore(embeddings, **options)
    assert find_dense_forward(model) == model.forward_dense
    assert find_dense_forward(OwnScore(embeddings, **options)) is None  # its score expects the inputs
    assert find_dense_forward(make("own_models:WithBefore")) is not None
    with pytest.raises(MesetaError, match="FormerOverride has before, which"):
        find_dense_forward(FormerOverride(embeddings, **options))
    with pytest.raises(
        MesetaError, match="FormerAttribute has reads_dense_alone, which is now called has_dense_layers"
    ):
        find_dense_forward(FormerAttribute(embeddings, **options))


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_models_of_the_package_score_what_they_have_made_of_dense_inputs(name: str) -> None:
    sizes = {"embedding_dim": 4, "bottom_mlp": [8, 4], "deep_mlp": [8], "cin_layers": [4]}
    config, torch_dense = ModelConfig(**of_its_model({"name": name, **sizes})), torch.rand(70, 3)
    width = config.table_width()
    model: Any = make_model(config, OneRowEach([width] * 3), 3, 0)
    pooled = torch.rand(70, 3 * width)
    assert torch.equal(model.score(model.forward_dense(torch_dense), pooled), model.score(torch_dense, pooled))
    reads_both = {"mmoe", "dcnv2", "gdcn", "finalmlp"}  # all their layers read embeddings, too
    assert (find_dense_forward(model) is None) == (name in reads_both)


def test_unknown_options_and_modules_that_do_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MesetaError, match=r"the constructor failed with TypeError: .*'scal'"):
        make("own_models:Plain", scal=1.0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "found_here.py").write_text("from own_models import Plain\n")
    (tmp_path / "broken_here.py").write_text("import json\n\njson.loads('{')\n")
    (tmp_path / "lacks_here.py").write_text("import no_such_module_anywhere\n")
    assert make("found_here:Plain").scale == 1.0
    with pytest.raises(MesetaError, match="importing 'broken_here' failed with JSONDecodeError"):
        make("broken_here:Plain")
    with pytest.raises(MesetaError, match=r"No module named 'no_such_module_anywhere' \(.*lacks_here.py:1\)"):
        make("lacks_here:Plain")


def test_a_custom_model_chooses_the_dtype_of_its_dense_part() -> None:
    with pytest.raises(MesetaError, match=r"dense.dtype 'bfloat16' applies only to models of this package"):
        make_model(ModelConfig(name="own_models:Plain"), OneRowEach([4]), 3, 0, "bfloat16")
