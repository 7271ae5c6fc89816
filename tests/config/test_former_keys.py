"""Former names of config keys and values still work, with a warning."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from meseta.config import former_keys, load_config
from meseta.config.keys import all_keys, find_keys
from meseta.errors import FormerNameWarning
from meseta.spec import MesetaError

VALUES: dict[str, Any] = {
    "comm.silent_s": 3.0,
    "comm.stall_s": 4.0,
    "data.service.give_up_s": 5.0,
    "pipeline.stale": 1,
    "storage.near_bytes": 1000,
}


def nested(path: str, value: Any) -> Any:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def current_value(config: Any, path: str) -> Any:
    for name in former_keys.KEYS[path].split("."):
        config = getattr(config, name)
    return config


def test_current_keys_exist() -> None:
    known = {key.path for key in all_keys()}
    assert set(former_keys.KEYS.values()) <= known and not set(former_keys.KEYS) & known
    assert VALUES.keys() == former_keys.KEYS.keys()


@pytest.mark.parametrize("path", VALUES)
def test_a_former_key_in_a_file_and_as_override(path: str, tmp_path: Path) -> None:
    file, value = tmp_path / "a.yaml", VALUES[path]
    document = {"run_dir": "run", "data": {"dir": "data"}}
    first = path.split(".", maxsplit=1)[0]
    file.write_text(yaml.safe_dump({**document, first: {**document.get(first, {}), **nested(path, value)[first]}}))
    with pytest.warns(FormerNameWarning, match=f"config key '{path}' is now '{former_keys.KEYS[path]}'; rename it"):
        assert current_value(load_config(file), path) == value
    file.write_text(yaml.safe_dump(document))
    with pytest.warns(FormerNameWarning, match=path):
        assert current_value(load_config(file, [f"{path}={value}"]), path) == value


def test_both_names_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump({"run_dir": "r", "pipeline": {"stale": 1, "staleness": 0}}))
    with (
        pytest.warns(FormerNameWarning),
        pytest.raises(MesetaError, match=r"'pipeline.stale' is the former name of 'pipeline.staleness'; remove"),
    ):
        load_config(file)


def test_the_key_is_found_by_its_former_name() -> None:
    with pytest.warns(FormerNameWarning):
        assert [key.path for key in find_keys("pipeline.stale")] == ["pipeline.staleness"]


def test_the_command_prints_one_line() -> None:
    command = [sys.executable, "-m", "meseta.cli.main", "config", "storage.near_bytes"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "warning: config key 'storage.near_bytes' is now 'storage.cache_bytes'; rename it\n"
    assert "storage.cache_bytes" in done.stdout


@pytest.mark.parametrize("is_stored", [False, True])
def test_former_keys_and_values_of_a_plan(is_stored: bool, tmp_path: Path) -> None:
    shard = {"rows": [0, 8], "columns": [0, 4], "ranks": [0], "tier": "cached", "near_rows": 4}
    plan = {"exchange": "two_level", "tables": {"a": {"tier": "disk", "near_rows": 3}, "b": {"shards": [shard]}}}
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump({"run_dir": "r", "data": {"dir": "d"}, "plan": plan}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded: Any = load_config(file, is_stored=is_stored).plan
    shard["cache_rows"] = shard.pop("near_rows")
    assert loaded == {
        "exchange": "hierarchical",
        "tables": {"a": {"tier": "disk", "cache_rows": 3}, "b": {"shards": [shard]}},
    }
    texts = [str(one.message) for one in caught if one.category is FormerNameWarning]
    expected = [
        "config key 'plan.tables.a.near_rows' is now 'cache_rows'; rename it",
        "config key 'plan.tables.b.near_rows' is now 'cache_rows'; rename it",
        "value 'two_level' of config key 'plan.exchange' is now 'hierarchical'; rename it",
    ]
    assert texts == ([] if is_stored else expected)
