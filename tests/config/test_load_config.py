"""Tests of configs from YAML and overrides, and of their errors."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from meseta.config import RunConfig, load_config
from meseta.spec import InitSpec, MesetaError, OptimizerSpec

SMALL = "run_dir: runs/a\ndata: {dir: data/a}\n"


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_text(text: str) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return path

    return write_text


def refused(path: Path, overrides: list[str], *words: str) -> str:
    with pytest.raises(MesetaError) as caught:
        load_config(path, overrides)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    return str(caught.value)


def test_defaults(write: Any) -> None:
    config = load_config(write(SMALL))
    assert (config.run_dir, config.data.dir, config.seed, config.device) == (Path("runs/a"), Path("data/a"), 0, "auto")
    assert (config.model.name, config.model.bottom_mlp, config.model.top_mlp) == ("dlrm", (512, 256, 64), (512, 256))
    assert (config.embedding.optimizer.name, config.dense.optimizer.name) == ("rowwise_adagrad", "adam")
    assert (config.train.batch_size, config.train.max_steps, config.plan) == (2048, None, "auto")
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 3  # type: ignore[misc]


def test_file_and_overrides(write: Any) -> None:
    path = write(
        SMALL
        + "seed: 3\nmodel: {name: dlrm_dcnv2, bottom_mlp: [32, 16]}\n"
        + "embedding: {tables: {cat_0: {optimizer: {name: adam, lr: 0.1}}}}\n"
    )
    overrides = [
        "train.batch_size=4096",
        "model.top_mlp=[8, 4]",
        "dense.optimizer.lr=1e-3",  # text to YAML 1.1, a number to people
        "dense.schedule.kind=polynomial",
        "embedding.tables.cat_1.init.kind=normal",
        "train.max_steps=",
        "seed=4",
        "device=cpu",
    ]
    config = load_config(path, overrides)
    assert (config.seed, config.device, config.train.batch_size, config.train.max_steps) == (4, "cpu", 4096, None)
    assert (config.model.name, config.model.bottom_mlp, config.model.top_mlp) == ("dlrm_dcnv2", (32, 16), (8, 4))
    assert (config.dense.optimizer.lr, config.dense.schedule.kind) == (0.001, "polynomial")
    tables = config.embedding.tables
    assert tables["cat_0"].optimizer is not None and tables["cat_0"].optimizer.name == "adam"
    assert tables["cat_1"].init is not None and tables["cat_1"].init.kind == "normal"


def test_sections_with_all_keys_commented_out_are_empty(write: Any) -> None:
    path = write(SMALL + "train:\n  # batch_size: 3\nembedding: {tables: {cat_0: }}\n")
    config = load_config(path, ["train.epochs=2"])
    assert (config.train.batch_size, config.train.epochs) == (2048, 2)
    assert config.embedding.tables["cat_0"].optimizer is None
    assert load_config(path).train.epochs == 1


def test_plan_is_auto_a_path_or_written_inline(write: Any) -> None:
    assert load_config(write(SMALL), ["plan=plans/two.yaml"]).plan == Path("plans/two.yaml")
    assert load_config(write(SMALL), ["plan=auto"]).plan == "auto"
    inline = {"tables": {"cat_0": {"sharding": "row_wise"}, "*": "table_wise"}}
    assert load_config(write(SMALL + yaml.safe_dump({"plan": inline}))).plan == inline
    assert load_config(write(SMALL), ["plan.tables.cat_0=row_wise"]).plan == {"tables": {"cat_0": "row_wise"}}
    for value in ("5", "[row_wise]"):
        refused(write(SMALL), [f"plan={value}"], "key 'plan': it must be 'auto', a path, or a mapping", "got ")
    with pytest.raises(MesetaError) as caught:
        load_config(write(SMALL), ["plan=5"])
    assert str(caught.value).count("key 'plan'") == 1


def test_a_resolved_config_reads_back(write: Any) -> None:
    for override in ("plan=auto", "plan=plans/two.yaml", "plan.tables.x=row_wise"):
        config = load_config(write(SMALL), [override, "model.bottom_mlp=[7]", "embedding.tables.x.init.scale=0.5"])
        again = load_config(write(yaml.safe_dump(config.model_dump(mode="json"))))
        assert again.model_dump() == config.model_dump()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("sede=1", ["unknown key 'sede'", "did you mean 'seed'?"]),
        ("train.batchsize=1", ["unknown key 'train.batchsize'", "did you mean 'batch_size'?"]),
        ("embedding.optimizer.beta3=1", ["unknown key 'embedding.optimizer.beta3'", "did you mean 'beta"]),
        ("embedding.tables.cat_0.optimzer.lr=1", ["'embedding.tables.cat_0.optimzer'", "did you mean 'optimizer'?"]),
        ("embedding.tables.cat_0.optimizer.epz=1", ["'embedding.tables.cat_0.optimizer.epz'", "did you mean 'eps'?"]),
        ("embedding.tables.optimizer.optimzer=1", ["did you mean 'optimizer'?"]),
        ("dense.schedule.zebra=1", ["available: decay_start_step, decay_steps, end_factor"]),
        ("train.batch_size=many", ["key 'train.batch_size'", "valid integer", "got 'many'"]),
        ("train.batch_size=0", ["key 'train.batch_size'", "greater than or equal to 1", "got 0"]),
        ("train.max_steps=2.5", ["key 'train.max_steps'", "got 2.5"]),
        ("model.name=dlmr", ["key 'model.name'", "no model 'dlmr'; did you mean 'dlrm'?", "'package.module:Class'"]),
        ("model.name=a..b:C", ["key 'model.name'", "available: autoint, dcnv2"]),
        ("model.options={a: 1}", ["key 'model'", "'options' are for custom models", "'dlrm'"]),
        ("model.bottom_mlp=5", ["key 'model.bottom_mlp': input should be a list, got 5"]),
        ("model.bottom_mlp=[4, 0]", ["key 'model.bottom_mlp.1'", "got 0"]),
        ("embedding.optimizer.lr=.inf", ["key 'embedding.optimizer.lr'", "finite number", "got inf"]),
        ("dense.optimizer.weight_decay=.nan", ["key 'dense.optimizer.weight_decay'", "got nan"]),
        ("train=3", ["key 'train': it is a section and must hold keys, got 3"]),
        ("embedding.tables=3", ["key 'embedding.tables': input should be a mapping, got 3"]),
        ("seed=9223372036854775808", ["key 'seed'", "less than"]),
        ("run_dir=", ["key 'run_dir'", "got None"]),
        ("data=", ["key 'data': neither data.dir nor data.service.url is set; set data.dir to a folder"]),
        ("data.dir=", ["key 'data': neither data.dir nor data.service.url is set"]),
        (
            "data.service.url=grpc://h:1",
            ["key 'data': data.dir is '", "url is 'grpc://h:1'", "set data.dir=null"],
        ),
        (
            "data.service.url=https://h:1",
            ["key 'data.service.url': readers: an address must be grpc://HOST:PORT, or"],
        ),
        ("data.service.url=grpc://h", ["key 'data.service.url'", "grpc+tls://HOST:PORT, got 'grpc://h'"]),
        ("data.service.url=grpc://h:port", ["key 'data.service.url'", "grpc://HOST:PORT"]),
        ("data.service.url=grpc://h:1/path", ["key 'data.service.url'", "grpc://HOST:PORT"]),
        ("data.service.reader_timeout_s=0", ["key 'data.service.reader_timeout_s'", "greater than 0, got 0"]),
        ("data.service.ulr=grpc://h:1", ["unknown key 'data.service.ulr'; did you mean 'url'?"]),
        ("run_dir.x=3", ["override 'run_dir.x=3': 'run_dir' holds a value, not a section"]),
        ("seed", ["override 'seed' must look like train.batch_size=4096"]),
        ("=3", ["override '=3' must look like"]),
        ("seed=[1", ["override 'seed=[1': '[1' is not a YAML value"]),
    ],
)
def test_bad_overrides_are_named(write: Any, override: str, words: list[str]) -> None:
    refused(write(SMALL), [override], *words)


def test_bad_files_are_named(write: Any, tmp_path: Path) -> None:
    refused(tmp_path / "absent.yaml", [], "absent.yaml", "No such file")
    refused(tmp_path, [], "Is a directory")
    refused(write(""), [], "config.yaml", "must contain a mapping")
    refused(write("- a\n"), [], "must contain a mapping")
    refused(write("run_dir: [\n"), [], "is not YAML")
    refused(write(SMALL + "seed: 1\nseed: 2\n"), [], "key 'seed' is given twice, again in line 4")
    refused(write(SMALL + "1: 2\n"), [], "key '1'")
    refused(write("seed: 1\n"), [], "key 'run_dir' is missing", "key 'data' is missing")
    (tmp_path / "config.yaml").write_bytes(b"a\xff")
    refused(tmp_path / "config.yaml", [], "not valid UTF-8")


def test_every_key_is_documented() -> None:
    def undocumented(section: Any, path: str) -> list[str]:
        missing = []
        for name, field in section.model_fields.items():
            if hasattr(field.annotation, "model_fields"):
                missing += undocumented(field.annotation, f"{path}{name}.")
            elif not field.description and section.keys_described_by is None:
                missing.append(path + name)
        return missing

    assert undocumented(RunConfig, "") == []


@pytest.mark.parametrize(
    "key",
    ["embedding.clip_norm", "embedding.clip_grad_norm", "embedding.tables.user.max_grad_norm", "train.clip_grad_norm",
     "train.gradient_clip", "clip_norm"],
)  # fmt: skip
def test_clipping_in_another_section_is_an_error_with_the_keys(write: Any, key: str) -> None:
    refused(write(SMALL), [f"{key}=1.0"], f"unknown key '{key}'", "train.clip_norm", "embedding.optimizer.clip_norm")


def test_where_gradients_are_clipped_instead(write: Any) -> None:
    path = write(SMALL)
    refused(path, ["dense.optimizer.clip_norm=1.0"], "set dense.clip_norm")
    refused(path, ["dense.max_grad_norm=1.0"], "set dense.clip_norm")
    refused(path, ["dense.clip_norm=0"], "dense.clip_norm", "greater than 0")
    refused(path, ["embedding.optimizer.clip_normm=1.0"], "did you mean 'clip_norm'")
    refused(path, ["train.clip_norm=0"], "train.clip_norm", "greater than 0")
    both = "train.clip_norm and dense.clip_norm cannot be combined: both clip dense gradients; leave one out"
    refused(path, ["train.clip_norm=1", "dense.clip_norm=1"], both)
    config = load_config(path, ["dense.clip_norm=2", "dense.clip_value=1", "embedding.optimizer.clip_norm=3"])
    assert (config.dense.clip_norm, config.dense.clip_value, config.embedding.optimizer.clip_norm) == (2, 1, 3)


def test_averages_that_are_refused(write: Any) -> None:
    path = write(SMALL)
    half = "train.average_weights and embedding.dtype 'bfloat16' cannot be combined: rounded changes of rows"
    refused(path, ["train.average_weights=swa", "embedding.dtype=bfloat16"], half)
    refused(path, ["train.average_weights=mean"], "train.average_weights", "'ema' or 'swa'")
    refused(path, ["train.average_decay=1"], "train.average_decay", "less than 1")


def test_constants_that_a_dense_optimizer_does_not_use_are_refused(write: Any) -> None:
    path = write(SMALL)
    refused(path, ["dense.optimizer.momentum=0.9"], "'adam' does not use momentum", "beta1, beta2, eps")
    refused(path, ["dense.optimizer={name: sgd, beta1: 0.8}"], "'sgd' does not use beta1", "momentum")
    refused(path, ["dense.schedule.kind=step"], "needs step_every")
    load_config(path, ["dense.optimizer={name: lamb, beta1: 0.8, eps: 1e-3}", "dense.schedule.kind=cosine"])


def test_padding_does_not_go_with_batch_norm(write: Any) -> None:
    path = write(SMALL)
    assert load_config(path, ["data.last_batch=pad"]).data.last_batch == "pad"
    refused(path, ["data.last_batch=pad", "model.batch_norm=true"], "data.last_batch 'pad' and model.batch_norm")


COMMON = """
embedding:
  optimizer: {name: sgd, lr: 0.5, momentum: 0.9, clip_norm: 2.0}
  init: {kind: normal, scale: 0.1}
"""


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, {"name": "sgd", "lr": 0.5, "momentum": 0.9, "clip_norm": 2.0}),
        ({"lr": 0.05}, {"name": "sgd", "lr": 0.05, "momentum": 0.9, "clip_norm": 2.0}),
        ({"name": "sgd", "momentum": 0.0}, {"name": "sgd", "lr": 0.5, "clip_norm": 2.0}),
        ({"clip_norm": None}, {"name": "sgd", "lr": 0.5, "momentum": 0.9}),
        ({"name": "adam"}, {"name": "adam"}),
        ({"name": "adam", "lr": 0.3}, {"name": "adam", "lr": 0.3}),
    ],
)
def test_a_table_inherits_the_optimizer_unless_it_names_another(
    write: Any, overrides: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = load_config(write(SMALL + COMMON), [f"embedding.tables.user.optimizer={json.dumps(overrides)}"])
    assert OptimizerSpec(**config.embedding.table_optimizer("user")) == OptimizerSpec(**expected)
    assert config.embedding.table_optimizer("item") == config.embedding.optimizer.model_dump()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"scale": 0.7}, InitSpec(kind="normal", scale=0.7)),
        ({"kind": "normal"}, InitSpec(kind="normal", scale=0.1)),
        ({"kind": "uniform"}, InitSpec(kind="uniform")),
        ({"kind": "constant", "scale": 2.0}, InitSpec(kind="constant", scale=2.0)),
    ],
)
def test_initial_rows_go_the_same_way(write: Any, overrides: dict[str, Any], expected: InitSpec) -> None:
    config = load_config(write(SMALL + COMMON), [f"embedding.tables.user.init={json.dumps(overrides)}"])
    assert InitSpec(**config.embedding.table_init("user")) == expected


def test_what_a_table_leaves_open_is_not_written_down(write: Any) -> None:
    overrides = {"user": {"optimizer": {"lr": 0.05, "clip_norm": None}}, "item": {"init": {"scale": 3.0}}, "city": {}}
    config = load_config(write(SMALL + COMMON), [f"embedding.tables={json.dumps(overrides)}"])
    written = config.model_dump(mode="json")["embedding"]["tables"]
    assert {name: {k: v for k, v in entry.items() if v is not None} for name, entry in written.items()} == overrides
    assert load_config(write(yaml.safe_dump(config.model_dump(mode="json")))) == config


def test_a_table_is_checked_with_what_it_inherits(write: Any) -> None:
    load_config(write(SMALL + COMMON), ["embedding.tables.user.optimizer.momentum=0.5"])
    refused(
        write(SMALL + COMMON), ["embedding.tables.user.optimizer.beta1=0.5"],
        "tables.user.optimizer: row optimizer 'sgd' does not use beta1, which is set to 0.5",
    )  # fmt: skip


def test_what_is_hidden_is_a_word_or_a_list(write: Any) -> None:
    """YAML parses a bare `off` as false."""
    for value, expected in (("off", "off"), ("auto", "auto"), ("[ids, dense]", ["ids", "dense"]), ("[]", [])):
        assert load_config(write(f"{SMALL}pipeline: {{overlap: {value}}}\n"), []).pipeline.overlap == expected
        assert load_config(write(SMALL), [f"pipeline.overlap={value}"]).pipeline.overlap == expected
    of_words = "'pipeline.overlap': 'idz' is not one of ids, embeddings, gradients, dense, agree"
    assert "twice" not in refused(write(SMALL), ["pipeline.overlap=[idz]"], of_words)
    twice = "'pipeline.overlap': 'ids' is listed twice; list each name once"
    assert "none of" not in refused(write(SMALL), ["pipeline.overlap=[ids, ids]"], twice)
    refused(write(SMALL), ["pipeline.overlap=true"], "True is not 'auto', 'off' or a list of ids, embeddings")
