"""Suite files: validation, trials of each config, and folders that are continued."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from meseta.config.models import MODEL_NAMES
from meseta.spec import MesetaError
from source_tree import ROOT
from tools.quality.study import FORMER_FORMULA, FORMULA, Study
from tools.quality.suite import QualitySuite, load_suite

BASE = {"model": {"name": "dlrm"}, "train": {"batch_size": 256}}
SUITE = {
    "base": "base.yaml",
    "worlds": [{"world": "pairs", "rows": 2000, "scale": 0.001}],
    "configs": {"a": {}, "b": {"set": {"model.name": "fm"}}},
    "tune": {"dense.optimizer.lr": "loguniform(1e-4, 1e-1)"},
    "trials": 4,
}


def write_suite(folder: Path, **changes: Any) -> QualitySuite:
    """Write and load a suite file with `changes`. A change to `None` omits the key."""
    (folder / "base.yaml").write_text(yaml.safe_dump(BASE))
    document = {key: value for key, value in {**SUITE, **changes}.items() if value is not None}
    (folder / "suite.yaml").write_text(yaml.safe_dump(document))
    return load_suite(folder / "suite.yaml")


def error_of(folder: Path, **changes: Any) -> str:
    with pytest.raises(MesetaError) as caught:
        Study(write_suite(folder, **changes), "suite", folder / "out").open()
    text = str(caught.value)
    assert "\n" not in text and not (folder / "out").exists()
    return text


def test_all_configs_have_the_same_number_of_trials(tmp_path: Path) -> None:
    lists = {"dense.optimizer.lr": [0.1, 0.2, 0.3], "model.top_mlp": [[8], [16]]}
    suite = write_suite(tmp_path, configs={"a": {}, "b": {"tune": lists}, "c": {"tune": {"train.epochs": [1, 2]}}})
    trials = {name: suite.trial_settings(name) for name in suite.configs}
    assert [len(settings) for settings in trials.values()] == [4, 4, 4]
    assert [len({str(one) for one in settings}) for settings in trials.values()] == [4, 4, 4]
    assert {str(one["model.top_mlp"]) for one in trials["b"]} <= {"[8]", "[16]"}
    assert all(set(one) == {"dense.optimizer.lr", "train.epochs"} for one in trials["c"])
    fewer = write_suite(tmp_path, trials=2, configs={"a": {}, "b": {"tune": lists}})
    assert [fewer.trial_settings(name) for name in "ab"] == [trials[name][:2] for name in "ab"]


def test_keys_that_a_config_sets_are_not_tuned(tmp_path: Path) -> None:
    suite = write_suite(
        tmp_path, configs={"a": {}, "b": {"set": {"dense.optimizer.lr": 1.0}, "tune": {"seedless": [1, 2, 3, 4]}}}
    )
    assert set(suite.tuned_settings("b")) == {"seedless"} and set(suite.tuned_settings("a")) == {"dense.optimizer.lr"}


def test_final_runs_use_other_seeds_than_trials(tmp_path: Path) -> None:
    suite = write_suite(tmp_path, first_seed=7, seeds=3)
    assert [*suite.fresh_seeds] == [8, 9, 10]
    study = Study(suite, "suite", tmp_path / "out")
    study.open()
    [entry] = study.suite.entries
    assert {run.seed for run in study.tuning_round(entry).runs} == {7}
    assert not any(run.reads_test for run in study.tuning_round(entry).runs)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"worlds": [{"world": "pair"}]}, "key 'worlds.0.world': unknown world 'pair'; did you mean 'pairs'?"),
        ({"worlds": [{"world": "pairs", "strength": 1.5}]}, "less than or equal to 1"),
        ({"worlds": [{"world": "pairs", "strength": -0.1}]}, "greater than or equal to 0"),
        ({"worlds": [{"world": "pairs", "strenght": 1}]}, "unknown key 'worlds.0.strenght'; did you mean 'strength'?"),
        ({"worlds": [{"world": "pairs"}, {"world": "pairs", "rows": 5000}]}, "'pairs-S1' is listed twice"),
        ({"worlds": None}, "a suite needs data to train on"),
        ({"worlds": None, "datasets": [{"dir": "nowhere"}]}, "cannot read dataset.json"),
        ({"configs": {"a": {}}}, "configs"),
        ({"config": {}}, "unknown key 'config'; did you mean 'configs'?"),
        ({"base": None}, "config 'a' has no 'base'"),
        ({"reference": "c"}, "reference 'c' is no config; available: a, b"),
        ({"tune": None}, "config 'a' has no keys to tune, but trials is 4"),
        ({"trials": 0}, "config 'a' has keys to tune, but trials is 0"),
        ({"tune": {"dense.optimizer.lr": [0.1, 0.2]}}, "config 'a': 'tune' has 2 combinations for 4 trials"),
        ({"tune": {"dense.optimizer.lr": "0.1"}}, "must have a list or a range"),
        ({"set": {"seed": 3}}, "config 'a' must not set seed, which the suite sets"),
        ({"set": {"data.dir": "x"}}, "config 'a' must not set data.dir, which the suite sets"),
        ({"set": {"model.nam": "x"}}, "config 'a' (dense.optimizer.lr="),
        ({"set": {"model.nam": "x"}}, "did you mean 'name'?"),
        ({"tune": {"dense.optimizer.lr": [1, 2, 3, -4]}}, "greater than or equal to 0"),
    ],
)
def test_invalid_suites_are_rejected_in_one_line(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    assert words in error_of(tmp_path, **changes)


def test_folders_are_continued_unless_settings_differ(tmp_path: Path) -> None:
    def study(**changes: Any) -> Study:
        return Study(write_suite(tmp_path, **changes), "suite", tmp_path / "out")

    study().open()
    study(seeds=9, trials=6).open()
    study(configs={**SUITE["configs"], "c": {}}).open()  # type: ignore[dict-item]
    with pytest.raises(MesetaError, match="pairs-S1/a' has results of other settings; delete it"):
        study(set={"train.batch_size": 128}).open()
    with pytest.raises(MesetaError, match="pairs-S1' has results of other settings"):
        study(worlds=[{"world": "pairs", "rows": 4000, "scale": 0.001}]).open()


def test_runs_with_other_settings_are_rejected(tmp_path: Path) -> None:
    study = Study(write_suite(tmp_path), "suite", tmp_path / "out")
    study.open()
    [entry] = study.suite.entries
    study.tuning_round(entry).pending_runs()
    other = Study(write_suite(tmp_path, tune={"dense.optimizer.lr": "uniform(1, 2)"}), "suite", tmp_path / "out")
    with pytest.raises(MesetaError, match="has results of other settings"):
        other.tuning_round(entry).pending_runs()


def test_suites_of_this_repository_match_their_page(tmp_path: Path) -> None:
    page = (ROOT / "docs/quality.md").read_text()
    documented = dict(re.findall(r"^\| `(\w+)` \| .* \| (\d+) \|$", page, re.MULTILINE))
    num_runs = {}
    for path in sorted((ROOT / "examples/quality").glob("*.yaml")):
        study = Study(load_suite(path), path.stem, tmp_path / path.stem)
        study.open()
        num_runs[path.stem] = str(study.num_runs)
    assert num_runs == documented
    names = " ".join(re.findall(r"model\.name: \W?([\w.:]+)", (ROOT / "examples/quality/models.yaml").read_text()))
    assert set(MODEL_NAMES) - {"mmoe"} <= {"dlrm", *names.split()}  # mmoe needs several labels.


def test_folders_with_the_former_path_of_the_formula_are_continued(tmp_path: Path) -> None:
    formula = {"set": {"model.name": FORMULA, "model.options": {"world": "pairs"}}}
    suite = write_suite(tmp_path, configs={"a": {}, "formula": formula})
    Study(suite, "suite", tmp_path / "out").open()
    [file] = (tmp_path / "out").glob("*/formula/document.json")
    file.write_text(file.read_text().replace(FORMULA, FORMER_FORMULA))
    Study(suite, "suite", tmp_path / "out").open()
