"""Runs that save delta checkpoints end with the bits of a run without deltas, also after interruptions and failed
saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoint.simulated import many_files
from meseta.checkpoint import compact, compare, list_checkpoints, summarize
from meseta.checkpoint.files import layout
from sampling import product, sample
from small_run import settings, train

from .test_saving import fill_disk_at

POLICIES = ("one_shot", "consecutive", "intermittent", "rolling")
STEPS = {"train__epochs": 2, "train__max_steps": 20, "checkpoint__every_steps": 2, "checkpoint__keep_last": 99}
SMALL_BYTES = 2048


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "BLOCK_BYTES", SMALL_BYTES)


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoints of a run without deltas, written in small blocks."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "BLOCK_BYTES", SMALL_BYTES)
        train(settings(tiny, folder / "run", **STEPS))
    return folder / "run/checkpoints"


def files(run_dir: Path) -> dict[str, bytes]:
    """Return the table files of all checkpoints. Manifests and dense files of an interrupted run have other times and
    metrics."""
    return {name: content for name, content in many_files(run_dir / "checkpoints").items() if name.endswith(".arrow")}


def with_deltas(tiny: Path, run_dir: Path, policy: str, **changes: Any) -> None:
    train(settings(tiny, run_dir, **STEPS | {"checkpoint__deltas": policy, "checkpoint__max_chain": 4} | changes))


@pytest.mark.parametrize("policy", sample(POLICIES, 1, seed=6))
def test_a_run_that_was_stopped_writes_the_same_files(tiny: Path, whole: Path, tmp_path: Path, policy: str) -> None:
    with_deltas(tiny, tmp_path / "one", policy)
    for stop in (6, 14, 20):
        with_deltas(tiny, tmp_path / "other", policy, train__max_steps=stop)
    assert files(tmp_path / "one") == files(tmp_path / "other")
    summaries = [summarize(listed.path) for listed in list_checkpoints(tmp_path / "one")]
    assert len(summaries) == 10 and sum(one.policy == policy for one in summaries) >= 6
    for summary in summaries:
        plain = whole / summary.path.name
        made = compact(summary.path, tmp_path / "made")
        assert many_files(made / "tables") == many_files(plain / "tables")
        assert list(compare(summary.path, plain)) == []


@pytest.mark.parametrize("case", sample(product(policy=POLICIES, background=["always", "never"]), 1, seed=7))
def test_rows_of_a_save_that_failed_are_in_the_next(
    tiny: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: dict[str, str]
) -> None:
    policy, background = case["policy"], case["background"]
    changes = {"checkpoint__background": background, "checkpoint__on_failure": "continue"}
    with monkeypatch.context() as full:
        fill_disk_at({2, 6, 12, 14}, full)
        with_deltas(tiny, tmp_path / "full", policy, **changes)
    saved = list_checkpoints(tmp_path / "full")
    assert [int(listed.path.name[-2:]) for listed in saved] == [4, 8, 10, 16, 18, 20]
    for listed in saved:
        assert list(compare(listed.path, whole / listed.path.name)) == []


def test_tables_that_update_all_rows_are_saved_completely(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, where in (("all", "embedding__optimizer"), ("one", "embedding__tables__user__optimizer")):
        changes = {f"{where}__{key}": value for key, value in (("weight_decay", 0.1), ("stepped_rows", "all"))}
        changes["train__max_steps"] = 8
        with_deltas(tiny, tmp_path / name, "rolling", **changes)
        assert "so each delta has all of them" in capsys.readouterr().err
        train(settings(tiny, tmp_path / f"{name}-whole", **STEPS | changes))
        for listed in list_checkpoints(tmp_path / name):
            assert list(compare(listed.path, tmp_path / f"{name}-whole" / "checkpoints" / listed.path.name)) == []
        assert all(
            (summarize(one.path).policy is None) == (name == "all") for one in list_checkpoints(tmp_path / name)[1:]
        )


def test_a_policy_may_change_in_the_middle(tiny: Path, whole: Path, tmp_path: Path) -> None:
    for stop, policy in ((4, "none"), (8, "one_shot"), (12, "rolling"), (16, "intermittent"), (20, "consecutive")):
        with_deltas(tiny, tmp_path / "run", policy, train__max_steps=stop)
    for listed in list_checkpoints(tmp_path / "run"):
        assert list(compare(listed.path, whole / listed.path.name)) == []
