"""Settings of training in whole runs: micro-batches, clipping, task weights, penalties."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from meseta.comm import World
from meseta.config import RunConfig, load_config
from meseta.models import FinalMLP
from meseta.spec import MesetaError
from meseta.train.resuming import check_same_model
from meseta.train.run_dir import RunDir
from small_run import final_checksum, manifest, metrics, settings, table_checksums, tiny_data, train


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_data(tmp_path_factory.getbasetemp())


def main_metrics(run_dir: Path) -> list[Any]:
    return [(line["step"], line.get("loss", 0.0), line["ne"], line["auc"]) for line in metrics(run_dir)]


def test_micro_batches_train_as_the_whole_batch_and_resume(tiny: Path, tmp_path: Path) -> None:
    common = {"embedding__dtype": "float64", "dense__clip_norm": 0.5, "dense__optimizer__name": "lamb"}
    common |= {"train__max_steps": 8}
    train(settings(tiny, tmp_path / "whole", **common))
    train(settings(tiny, tmp_path / "parts", **common, train__accumulate_steps=4))
    for a, b in zip(main_metrics(tmp_path / "whole"), main_metrics(tmp_path / "parts"), strict=True):
        assert a == pytest.approx(b, rel=1e-9)
    train(settings(tiny, tmp_path / "cut", **{**common, "train__max_steps": 5}, train__accumulate_steps=4))
    train(settings(tiny, tmp_path / "cut", **common, train__accumulate_steps=4))
    assert final_checksum(tmp_path / "cut") == final_checksum(tmp_path / "parts")
    assert main_metrics(tmp_path / "cut")[-1] == main_metrics(tmp_path / "parts")[-1]


def test_clipping_and_task_weights_change_a_run(tiny: Path, tmp_path: Path) -> None:
    few = {"train__max_steps": 4}
    train(settings(tiny, tmp_path / "plain", **few))
    changes = ({"dense__clip_norm": 0.01}, {"dense__clip_value": 1e-4}, {"train__task_weights": {"label": 3.0}})
    for number, change in enumerate(changes):
        train(settings(tiny, tmp_path / str(number), **few, **change))
        assert main_metrics(tmp_path / str(number)) != main_metrics(tmp_path / "plain")
    with pytest.raises(MesetaError, match=r"task_weights has 'labels', which is not a label .*; did you mean 'label'"):
        train(settings(tiny, tmp_path / "none", train__task_weights={"labels": 1.0}))
    with pytest.raises(MesetaError, match="must not be 0 for all labels"):
        train(settings(tiny, tmp_path / "none", train__task_weights={"label": 0.0}))


def test_one_norm_of_layers_and_tables(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A norm above all others changes only rounding. A small one changes the run, and a resumed run reports its
    removal."""
    few = {"train__max_steps": 4, "embedding__dtype": "float64"}
    for name, norm in (("plain", None), ("large", 1e9), ("small", 1e-3)):
        train(settings(tiny, tmp_path / name, **few, train__clip_norm=norm))
    plain, large, small = (main_metrics(tmp_path / name) for name in ("plain", "large", "small"))
    assert np.ravel(large) == pytest.approx(np.ravel(plain), rel=1e-12)
    assert np.ravel(small) != pytest.approx(np.ravel(plain), rel=1e-4)
    capsys.readouterr()
    train(settings(tiny, tmp_path / "small", **{**few, "train__max_steps": 6}, train__clip_norm=None))
    assert "train.clip_norm was 0.001, is None" in capsys.readouterr().err


def test_regularization_of_rows(tiny: Path, tmp_path: Path) -> None:
    few = {"train__max_steps": 4, "embedding__optimizer": {"name": "adagrad", "lr": 0.1}}
    ours = {f"embedding__regularization__{key}": value for key, value in (("l2", 0.1), ("l1", 0.01))}
    train(settings(tiny, tmp_path / "penalty", **few, **ours))
    same = {"name": "adagrad", "lr": 0.1, "weight_decay": 0.1, "l1": 0.01}
    train(settings(tiny, tmp_path / "decay", **{**few, "embedding__optimizer": same}))
    assert table_checksums(tmp_path / "penalty") == table_checksums(tmp_path / "decay")
    whole = {**few, **ours, "embedding__regularization__rows": "all"}
    train(settings(tiny, tmp_path / "all", **whole))
    train(settings(tiny, tmp_path / "cut", **{**whole, "train__max_steps": 2}))
    train(settings(tiny, tmp_path / "cut", **whole))
    assert table_checksums(tmp_path / "all") == table_checksums(tmp_path / "cut") != table_checksums(tmp_path / "decay")
    each = {**few, **ours, "embedding__regularization__rows": "looked_up"}
    train(settings(tiny, tmp_path / "each", **each))
    counted = {**same, "stepped_rows": "looked_up"}
    train(settings(tiny, tmp_path / "counted", **{**few, "embedding__optimizer": counted}))
    assert table_checksums(tmp_path / "each") == table_checksums(tmp_path / "counted")
    assert table_checksums(tmp_path / "each") != table_checksums(tmp_path / "decay")
    with pytest.raises(MesetaError, match="regularization on table 'user', whose row optimizer is 'ftrl'"):
        train(settings(tiny, tmp_path / "none", **ours, embedding__optimizer={"name": "ftrl"}))
    with pytest.raises(MesetaError, match="also sets weight_decay, l1 or stepped_rows"):
        train(settings(tiny, tmp_path / "none", **ours, embedding__optimizer=same))


def test_momentum_cannot_be_added_or_removed_by_a_resumed_run(tiny: Path, tmp_path: Path) -> None:
    sgd = {"dense__optimizer": {"name": "sgd", "lr": 0.1}, "train__max_steps": 3}
    heavy = {"dense__optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, "train__max_steps": 3}
    for name, before, after, words in (("a", sgd, heavy, "without momentum"), ("b", heavy, sgd, "with momentum")):
        train(settings(tiny, tmp_path / name, **before))
        with pytest.raises(MesetaError, match=f"was trained {words}.* set dense.optimizer.momentum back"):
            train(settings(tiny, tmp_path / name, **after))


def test_changed_settings_are_reported_and_used(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {"embedding__tables": {"user": {"optimizer": {"eps": 1e-8}}}, "train__max_steps": 2}
    train(settings(tiny, tmp_path / "run", **before))
    after = {"embedding__optimizer__eps": 0.5, "dense__optimizer__lr": 0.02, "train__max_steps": 3}
    capsys.readouterr()
    train(settings(tiny, tmp_path / "run", **after))
    assert (
        "note: the run continues with changed settings: eps of all tables was 1e-08, is 0.5 "
        "(embedding.optimizer.eps=1e-08 keeps it); dense.optimizer.lr was 0.01, is 0.02\n"
    ) in capsys.readouterr().err
    assert {table["optimizer"]["eps"] for table in manifest(tmp_path / "run")["tables"].values()} == {0.5}
    tables = {"embedding__tables": {"user": {"optimizer": {"lr": 0.3}}}}
    train(settings(tiny, tmp_path / "run", **{**after, **tables, "train__max_steps": 4}))
    assert (
        "settings: lr of table 'user' was 0.1, is 0.3 (embedding.tables.user.optimizer.lr=0.1 keeps it)\n"
    ) in capsys.readouterr().err
    train(settings(tiny, tmp_path / "run", **{**after, **tables, "train__max_steps": 5}))
    assert "note:" not in capsys.readouterr().err


def test_another_layout_of_ranks_is_reported(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(settings(tiny, tmp_path / "run", train__max_steps=2))
    plan = tmp_path / "run" / "plan.json"
    plan.write_text(json.dumps({**json.loads(plan.read_text()), "num_ranks": 4, "devices_per_host": 2}))
    capsys.readouterr()
    train(settings(tiny, tmp_path / "run", train__max_steps=3))
    assert (
        "note: from now on sums are computed over 1 rank, before over 4 ranks on 2 hosts: results agree with "
        "those of an unchanged run within tolerance, not bit for bit\n"
    ) in capsys.readouterr().err
    train(settings(tiny, tmp_path / "run", train__max_steps=4))
    assert "note:" not in capsys.readouterr().err


def test_another_model_of_equal_shapes_is_refused(tiny: Path, tmp_path: Path) -> None:
    train(settings(tiny, tmp_path / "run", train__max_steps=2, embedding__tables={"tags": {"pooling": "sum"}}))
    for key, value, words in (
        ("model__dropout", 0.5, "model.dropout was 0.0 and is 0.5 now"),
        ("embedding__pooling", "mean", "embedding.pooling was 'sum' and is 'mean' now"),
        ("embedding__tables", {"tags": {"pooling": "mean"}}, "embedding.tables.tags.pooling was 'sum' and is 'mean'"),
    ):
        with pytest.raises(MesetaError, match=f"run_dir .* has another model: {words}.*; set it back"):
            train(settings(tiny, tmp_path / "run", **{key: value}))


LATER_KEYS = {"finalmlp": ("first_dropout", "second_dropout"), "masknet": ("embedding_layer_norm",)}
"""Keys of models that the configs of older runs lack."""


def without_later_keys(config: RunConfig) -> str:
    document = config.model_dump(mode="json")
    for key in LATER_KEYS[config.model.name]:
        del document["model"][key]
    return yaml.safe_dump(document)


@pytest.mark.parametrize("name", LATER_KEYS)
def test_a_config_without_later_keys_is_of_the_same_model(tiny: Path, tmp_path: Path, name: str) -> None:
    config = RunConfig.model_validate(settings(tiny, tmp_path, model__name=name, model__dropout=0.3))
    (tmp_path / "config.yaml").write_text(without_later_keys(config))
    check_same_model(RunDir(tmp_path), config, World.single())
    for key in LATER_KEYS[name]:
        other = settings(tiny, tmp_path, model__name=name, model__dropout=0.3, **{f"model__{key}": 0.0})
        with pytest.raises(MesetaError, match=rf"model\.{key} was (None|True) and is (0\.0|False) now"):
            check_same_model(RunDir(tmp_path), RunConfig.model_validate(other), World.single())


@pytest.mark.soak  # the test above checks the configs in `make test`
def test_a_run_of_an_older_version_continues_unchanged(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fusion matrix started ten times wider."""
    keys = {"model__name": "finalmlp", "model__dropout": 0.3}
    with monkeypatch.context() as older:
        fill = FinalMLP._set_initial_weights

        def fill_wide(model: FinalMLP, seed: int) -> None:
            fill(model, seed)
            with torch.no_grad():
                model.fusion.heads.mul_(10)

        older.setattr(FinalMLP, "_set_initial_weights", fill_wide)
        train(settings(tiny, tmp_path / "whole", **keys, train__max_steps=4))
        train(settings(tiny, tmp_path / "cut", **keys, train__max_steps=2))
    path = tmp_path / "cut" / "config.yaml"
    path.write_text(without_later_keys(load_config(path, is_stored=True)))
    train(settings(tiny, tmp_path / "cut", **keys, train__max_steps=4))
    assert final_checksum(tmp_path / "cut") == final_checksum(tmp_path / "whole")
    train(settings(tiny, tmp_path / "new", **keys, train__max_steps=4))
    assert final_checksum(tmp_path / "new") != final_checksum(tmp_path / "whole")
