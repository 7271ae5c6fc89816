"""Tests of `meseta config`: it lists every key, finds keys by name and prints valid example files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from meseta.config import ModelConfig, RunConfig, validate_document
from meseta.config.embedding import ScheduleConfig
from meseta.config.keys import all_keys, example_config, find_keys
from meseta.config.models import MODEL_NAMES, CustomModelConfig, model_sections
from meseta.config.run import DenseOptimizerName
from meseta.models.layers import loss_term_names
from meseta.models.registry import make_model
from meseta.spec import MesetaError
from meseta.spec.optimizer import USED_FIELDS
from model_parts import OneRowEach
from source_tree import SOURCE


def schema_paths(node: dict[str, Any], whole: dict[str, Any], path: str) -> Iterator[str]:
    """Yield the paths of all values in the JSON schema of pydantic."""
    options = [node, *node.get("anyOf", []), *node.get("allOf", [])]
    for option in options:
        if "$ref" in option:
            option = whole["$defs"][option["$ref"].rpartition("/")[2]]  # noqa: PLW2901
        inner = option.get("additionalProperties")
        if "properties" in option:
            for name, below in option["properties"].items():
                yield from schema_paths(below, whole, f"{path}.{name}".lstrip("."))
            return
        if isinstance(inner, dict) and "$ref" in inner:
            yield from schema_paths(inner, whole, f"{path}.<feature>")
            return
    yield path


def test_every_config_key_is_listed() -> None:
    schema = RunConfig.model_json_schema()
    listed = {key.path: key for key in all_keys()}
    expected = set(schema_paths(schema, schema, ""))
    for section in (*model_sections().values(), CustomModelConfig):
        keys = section.model_json_schema()
        expected |= set(schema_paths(keys, keys, "model"))
    folded = {path for path, key in listed.items() if key.kind == "section"}  # "keys as above"
    covered = {path for path in expected if any(path.startswith(f"{fold}.") for fold in folded)}
    assert expected - covered == set(listed) - folded
    assert len(expected) > 80 and "embedding.tables.<feature>.optimizer.lr" in covered
    assert not [key.path for key in listed.values() if not key.description or not key.kind]
    assert not [key.path for key in listed.values() if not key.default and key.kind != "section"]


def test_a_key_as_it_is_shown() -> None:
    shown = {key.path: (key.kind, key.default) for key in all_keys()}
    assert shown["run_dir"] == ("path", "must be given")
    required = {"run_dir", "dense.init.<feature>.scale", "checkpoint.tables.<feature>.bits"}
    assert {key.path for key in all_keys() if key.is_required} == required
    assert shown["seed"] == ("integer ≥\xa00, <\xa02^63", "`0`")
    assert shown["model.bottom_mlp"] == ("list: integer ≥\xa01, ≤\xa01,048,576", "`[512, 256, 64]`")
    assert shown["dense.dtype"] == ("`float32` or `bfloat16` or `auto`", "`float32`")
    assert shown["train.max_steps"][1] == "none"


@pytest.mark.parametrize(
    ("path", "used_by", "not_used_by", "beginning"),
    [
        ("train.batch_size", (), (), "Samples of a global batch"),
        ("schedule.power", ("polynomial",), ("constant", "cosine", "step", "plateau"), "polynomial: exponent of"),
        (
            "schedule.step_factor",
            ("step", "plateau"),
            ("constant", "polynomial", "cosine"),
            "step, plateau: multiplier of",
        ),
        ("dense.optimizer.beta1", ("adam", "adamw", "lamb"), ("sgd", "adagrad"), "adam, adamw, lamb: decay rate of"),
        ("dense.optimizer.eps", ("adagrad", "adam", "adamw", "lamb"), ("sgd",), "All but sgd: constant added to"),
        ("model.options", ("your own",), MODEL_NAMES, "your own: keyword arguments"),
    ],
)
def test_a_key_names_what_uses_it(
    path: str, used_by: tuple[str, ...], not_used_by: tuple[str, ...], beginning: str
) -> None:
    [key] = find_keys(path)
    assert (key.used_by, key.not_used_by) == (used_by, not_used_by) and key.full_text.startswith(beginning)


def test_keys_are_used_by_values_that_exist() -> None:
    dense = set(get_args(DenseOptimizerName))
    kinds = set(get_args(ScheduleConfig.model_fields["kind"].annotation))
    choices = {"dense.optimizer": dense, "model": {*MODEL_NAMES, "your own"}}
    choices |= dict.fromkeys(("schedule", "embedding.schedule", "dense.schedule"), kinds)
    for key in all_keys():
        if key.used_by:
            values = next(choices[section] for section in choices if key.path.startswith(f"{section}."))
            assert {*key.used_by, *key.not_used_by} == values and not {*key.used_by} & {*key.not_used_by}, key.path


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("train.batch_size", ["train.batch_size"]),
        ("run_dir", ["run_dir"]),
        ("model.cin_layers", ["model.cin_layers"]),
        ("metrics", ["metrics.ndcg_k", "metrics.segments", "metrics.max_segments"]),
        ("embedding.init", ["embedding.init.kind", "embedding.init.scale"]),
        (
            "embedding.tables.user",
            [f"embedding.tables.<feature>.{key}" for key in ("optimizer", "init", "embedding_dim", "pooling")],
        ),
        ("embedding.tables.user.optimizer.lr", ["embedding.tables.<feature>.optimizer"]),
        ("*.optimizer.lr", ["embedding.optimizer.lr", "dense.optimizer.lr"]),
        ("batch_size", ["train.batch_size", "train.eval_batch_size"]),
    ],
)
def test_keys_are_found_by_name_section_pattern_and_part(name: str, paths: list[str]) -> None:
    assert {key.path for key in find_keys(name)} == set(paths)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("train.batchsize", "there is no key 'train.batchsize'; did you mean .*'train.batch_size'"),
        ("epoch_s", "did you mean 'train.epochs'"),
        ("zzz", "there is no key 'zzz'; `meseta config` lists all"),
        ("train.batch_size.x", "no key 'train.batch_size.x'"),
        ("", "there is no key ''"),
        ("[", "no key"),
    ],
)
def test_an_unknown_key_is_an_error_with_the_nearest(name: str, message: str) -> None:
    with pytest.raises(MesetaError, match=message):
        find_keys(name)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_an_example_is_the_default_config(name: str) -> None:
    text = example_config(name)
    document = yaml.safe_load(text)
    assert validate_document(document) == RunConfig.model_validate(
        {"run_dir": f"runs/{name}", "data": {"dir": "data/prepared"}, "model": {"name": name}}
    )
    assert max(map(len, text.splitlines())) <= 120


BESIDE: dict[str, dict[str, Any]] = {
    "cross_low_rank": {"cross": "low_rank"},
    "cross_experts": {"cross": "mixture"},
    "cross_activation": {"cross": "mixture"},
    "attention_heads": {"interactions": {"self_attention": 4}},
    "convolution_channels": {"interactions": {"convolution": 4}},
    "masknet.structure": {"deep_mlp": ()},
}
"""Values of other keys with which a key changes the model."""


def changed(annotation: Any, value: Any) -> Any:
    """Return another valid value of a key."""
    match value:
        case bool():
            return not value
        case str():
            return next(other for other in get_args(annotation) if other != value)
        case tuple():
            return (*value, "f0" if str in get_args(annotation) else 6)
        case dict():
            return {**value, "linear": 5}
        case float():
            return value + 0.5
        case None:
            return 0.5
    return 2 * value


def built(config: ModelConfig) -> object:
    """Return all properties of a model that the test compares."""
    model = make_model(config, OneRowEach([config.table_width()] * 3), 4, 0)
    return [repr(model), loss_term_names(model), [getattr(part, "options", None) for part in model.modules()],
            [(name, parameter.shape) for name, parameter in model.named_parameters()]]  # fmt: skip


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_an_example_has_the_keys_of_its_model_that_change_something(name: str) -> None:
    shown = set(yaml.safe_load(example_config(name))["model"]) - {"name"}
    config = ModelConfig(name=name)
    unchanged: dict[str, object] = {}
    assert shown == set(type(config).model_fields) - {"name"}
    for key in shown:
        beside = BESIDE.get(f"{name}.{key}", BESIDE.get(key, {}) if set(BESIDE.get(key, {})) <= shown else {})
        alone, annotation = config.model_copy(update=beside), type(config).model_fields[key].annotation
        other = alone.model_copy(update={key: changed(annotation, getattr(alone, key))})
        if repr(alone) not in unchanged:
            unchanged[repr(alone)] = built(alone)
        assert built(other) != unchanged[repr(alone)], key


def test_an_example_has_all_other_keys_that_its_optimizers_use() -> None:
    document = yaml.safe_load(example_config("deepfm"))
    assert set(document["embedding"]["optimizer"]) == {"name", *USED_FIELDS["rowwise_adagrad"]}
    assert set(document["dense"]["optimizer"]) == {"name", "lr", "weight_decay", "beta1", "beta2", "eps"}
    left_out = {"power", "step_factor", "step_every", "plateau_patience"}  # of other kinds than 'constant'
    assert not left_out & set(document["schedule"]) and "end_factor" in document["schedule"]
    assert document["dense"]["schedule"] is None
    for section in ("data", "train", "checkpoint", "metrics", "planner"):
        keys = {key.path.split(".")[1] for key in all_keys() if key.path.startswith(f"{section}.")}
        assert set(document[section]) == keys


def test_an_unknown_model_is_an_error() -> None:
    with pytest.raises(MesetaError, match="there is no model 'dlmr'; did you mean 'dlrm'"):
        example_config("dlmr")


def test_the_command_needs_nothing_of_the_source_tree(tmp_path: Path) -> None:
    """The installed package has neither tools/ nor, for this command, torch."""
    shutil.copytree(SOURCE, tmp_path / "meseta", ignore=shutil.ignore_patterns("*.so", "*.cpp", "__pycache__"))
    program = (
        "import sys; sys.argv = ['meseta', 'config', 'optimizer.momentum']\n"
        "from meseta.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "print([name for name in ('torch', 'numpy', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=False, capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("embedding.optimizer.momentum: number; default 0.0\n    Decay of the velocity")
    assert "dense.optimizer.momentum: number ≥ 0, < 1; default 0.0\n" in done.stdout
    assert done.stdout.endswith("[]\n")
