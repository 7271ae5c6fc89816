"""Tests of a run with checkpoints at a URL: the bits are those of a run with local checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from cli.conftest import Run
from meseta.checkpoint import list_checkpoints, verify
from small_run import final_checksum, metrics, settings, train, without_times, write_config

URL = "memory://bucket/run"
COMMON = {"train__max_steps": 12, "checkpoint__every_steps": 4, "train__eval_every_steps": 4}


@pytest.fixture
def url() -> Iterator[str]:
    yield URL
    fsspec.filesystem("memory").store.clear()


def test_a_run_at_a_url(run: Run, tiny: Path, tmp_path: Path, url: str) -> None:
    """Start in one run_dir and resume in an empty one. All commands read the checkpoints at the URL."""
    train(settings(tiny, tmp_path / "plain", **COMMON))
    deltas = {"checkpoint__dir": url, "checkpoint__deltas": "consecutive", "checkpoint__max_chain": 3}
    train(settings(tiny, tmp_path / "begun", **{**COMMON, "train__max_steps": 8}, **deltas))
    assert not (tmp_path / "begun" / "checkpoints").exists()
    document = settings(tiny, tmp_path / "run", **COMMON, **deltas)
    assert run("train", write_config(tmp_path / "c.yaml", document))[0] == 0
    checksum = final_checksum(tmp_path / "plain")
    assert [listed.problem for listed in list_checkpoints(url)] == ["", ""]
    assert verify(f"{url}/step-000000012") == checksum
    plain, there = metrics(tmp_path / "plain"), metrics(tmp_path / "run")
    assert without_times(plain)[-len(there) :] == without_times(there)
    code, out, _ = run("checkpoint", "list", tmp_path / "run", "--json")
    assert code == 0 and [entry["path"] for entry in json.loads(out)] == [f"{url}/step-{step:09d}" for step in (8, 12)]
    for place in (tmp_path / "run", url):
        assert checksum in run("checkpoint", "verify", place)[1]
        assert run("checkpoint", "inspect", place)[0] == 0
        assert run("checkpoint", "diff", place, tmp_path / "plain")[0] == 0
        assert run("checkpoint", "export", place, "--out", tmp_path / f"out-{len(str(place))}")[0] == 0
    evaluated = [json.loads(run("eval", tmp_path / name)[1]) for name in ("run", "plain")]
    assert {**evaluated[0], "run": ""} == {**evaluated[1], "run": ""}
    assert run("predict", tmp_path / "run", "--out", tmp_path / "p.parquet")[0] == 0
    code, _, err = run("checkpoint", "export", url, "--format", "torch-export", "--out", tmp_path / "program")
    assert code == 1 and "is not in a run; pass the run_dir of its training" in err
    assert run("train", tmp_path / "c.yaml", "--force", "train.max_steps=4")[0] == 0
    assert [listed.path.name for listed in list_checkpoints(url)] == ["step-000000004"]


def test_dir_and_mirror_are_one_too_many(run: Run, tiny: Path, tmp_path: Path) -> None:
    document = settings(tiny, tmp_path / "run", checkpoint__dir=URL, checkpoint__mirror="memory://bucket/other")
    code, _, err = run("train", write_config(tmp_path / "c.yaml", document))
    assert code == 1 and "checkpoints at a URL are not copied; leave one out" in err


@pytest.mark.parametrize("key", ["dir", "mirror"])
def test_a_sweep_has_no_place_for_one(run: Run, tiny: Path, tmp_path: Path, key: str) -> None:
    config = write_config(tmp_path / "c.yaml", settings(tiny, tmp_path / "run", **{f"checkpoint__{key}": URL}))
    code, _, err = run("sweep", config, "seed=[1,2]", "--out", tmp_path / "sweep")
    assert code == 1 and "would be shared by all trials; remove it" in err
