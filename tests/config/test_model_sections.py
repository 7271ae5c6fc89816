"""Tests of the keys of each model, and of configs that were written when all models shared one section."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from meseta.config import ModelConfig, RunConfig, validate_document
from meseta.config.models import MODEL_NAMES, CustomModelConfig, model_sections
from meseta.models.registry import MODELS
from meseta.spec import MesetaError

FORMER_NAMES = ["dlrm", "dlrm_dcnv2", "logistic_regression", "fm", "wide_deep", "deepfm", "xdeepfm", "autoint", "mmoe"]
FORMER = {
    "options": {}, "embedding_dim": 8, "bottom_mlp": [7], "top_mlp": [6, 5], "interaction": "none", "cross_layers": 2,
    "cross_low_rank": 3, "deep_mlp": [9], "cin_layers": [4, 3], "attention_layers": 1, "attention_heads": 3,
    "attention_dim": 5, "num_experts": 2, "expert_mlp": [8, 4], "tower_mlp": [3], "dropout": 0.0, "batch_norm": False,
}  # fmt: skip
"""The section `model` of a run_dir that was written when all models had one."""


def run_config(model: Any) -> RunConfig:
    return validate_document({"run_dir": "runs/a", "data": {"dir": "clicks"}, "model": model})


def test_every_section_is_registered() -> None:
    assert list(MODEL_NAMES) == list(model_sections()) and set(FORMER_NAMES) <= set(MODEL_NAMES)
    assert set(MODELS) == set(model_sections().values())


@pytest.mark.parametrize("name", [*FORMER_NAMES, "package.module:Class"])
def test_a_config_from_before_loads_and_keeps_what_its_model_reads(name: str) -> None:
    model = run_config({"name": name, **FORMER}).model
    keys = set(type(model).model_fields) - {"name"}
    assert model.model_dump(mode="json") == {"name": name, **{key: FORMER[key] for key in FORMER if key in keys}}
    assert keys <= set(FORMER) and model.name == name


@pytest.mark.parametrize("name", [*MODEL_NAMES, "package.module:Class"])
def test_what_a_run_writes_down_is_read_again(name: str) -> None:
    config = run_config({"name": name})
    document = config.model_dump(mode="json")
    assert validate_document(document) == config and set(document["model"]) == set(type(config.model).model_fields)
    assert config.model == ModelConfig(name=name) and type(config.model) is type(ModelConfig(name=name))
    assert isinstance(config.model, CustomModelConfig) == (name not in MODEL_NAMES)


def test_without_a_name_it_is_the_default() -> None:
    assert run_config(None).model == run_config({}).model == ModelConfig() == ModelConfig(name="dlrm")
    assert ModelConfig(cross_layers=2) == ModelConfig()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"name": "dlmr"}, "key 'model.name': no model 'dlmr'; did you mean 'dlrm'"),
        ({"name": 3}, "key 'model.name': input should be a valid string, got 3"),
        ({"name": ["fm"]}, "key 'model.name': input should be a valid string"),
        ({"name": "xdeepfm", "cin_layer": [3]}, "unknown key 'model.cin_layer'; did you mean 'cin_layers'?"),
        ({"name": "fm", "cin_layer": [3]}, "unknown key 'model.cin_layer'; available: embedding_dim, name"),
        ({"botom_mlp": [3]}, "unknown key 'model.botom_mlp'; did you mean 'bottom_mlp'?"),
        ({"name": "a.b:C", "option": {}}, "unknown key 'model.option'; did you mean 'options'?"),
        ({"name": "xdeepfm", "cin_layers": []}, "key 'model.cin_layers': .* at least 1 item"),
        ({"name": "fm", "options": {"a": 1}}, "'options' are for custom models, .*set the keys of 'fm' directly"),
        ({"name": "finalmlp", "first_dropout": 1}, "key 'model.first_dropout': .* less than 1, got 1"),
        ({"name": "finalmlp", "second_dropout": -0.1}, "key 'model.second_dropout': .* or equal to 0, got -0.1"),
        ({"name": "masknet", "embedding_layer_norm": 2}, "key 'model.embedding_layer_norm': .* boolean, .*got 2"),
        ({"name": "masknet", "embedding_norm": False}, "did you mean 'embedding_layer_norm'?"),
        ("dlrm", "key 'model': it is a section and must hold keys, got 'dlrm'"),
    ],
)
def test_what_a_model_lacks_is_refused_with_its_nearest_key(model: Any, message: str) -> None:
    with pytest.raises(MesetaError, match=message) as caught:
        run_config(model)
    assert "\n" not in str(caught.value)


def test_a_key_is_listed_by_the_models_that_have_it() -> None:
    from meseta.config.keys import find_keys

    of = {key.path: key.full_text.partition(":")[0] for key in find_keys("model")}
    assert of["model.cin_layers"] == "xdeepfm" and of["model.bottom_mlp"] == "dlrm, dlrm_dcnv2"
    assert of["model.embedding_dim"] == "All but logistic_regression" and of["model.options"] == "your own"
    [named] = find_keys("model.name")
    assert all(f"{name!r}: " in named.description for name in MODEL_NAMES)


@pytest.mark.parametrize("key", [None, 3, 1.5, True])
def test_a_key_that_is_no_string_is_named(key: object) -> None:
    """YAML parses `model: {null: 3}` like this."""
    with pytest.raises(ValidationError, match=f"keys should be strings, got {key!r}"):
        ModelConfig.model_validate({key: 3})
