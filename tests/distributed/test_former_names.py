"""A run folder and a quarantined checkpoint with former names are read, and continued under new names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bad_input.commands import run_here, run_on_rank
from meseta.checkpoint.files import digest
from meseta.checkpoint.files.paths import checkpoint_path
from meseta.report.record import read_run
from small_run import final_checksum, metrics, settings, train, without_times, write_config

from .pool import RankPool

Ranks = Callable[[int], RankPool]

NUM_STEPS = 14
PLAN = {"tables": {"*": "row_wise", "user": {"sharding": "row_wise", "tier": "cached", "cache_rows": 120}}}
CHANGES: dict[str, Any] = {
    "plan": PLAN,
    "checkpoint__every_steps": 4,
    "checkpoint__keep_last": 20,
    "pipeline__overlap": ["embeddings", "dense"],
    "pipeline__staleness": 1,
    "comm__exchange": "hierarchical",
    "comm__dense_exchange": "cross_host",
    "comm__heartbeat_timeout_s": 9.0,
    "storage__cache_bytes": 1 << 20,
}

# Former names are spelled out here, because the tables in src are under test.
CONFIG_KEYS = {
    ("comm", "heartbeat_timeout_s"): "silent_s",
    ("comm", "stall_timeout_s"): "stall_s",
    ("pipeline", "staleness"): "stale",
    ("storage", "cache_bytes"): "near_bytes",
}
CONFIG_VALUES = {"hierarchical": "two_level", "cross_host": "twins"}
STAGES = {"dense_update": "update"}
COMPONENTS = {"gradient_dist": "backward", "table_update": "update"}
TRANSFERS = {"embeddings": "answers"}
TRANSFER_KEYS = {
    "num_calls": "num_times",
    "intra_host_bytes": "inside_bytes",
    "inter_host_bytes": "across_bytes",
    "wait_s": "waited_s",
}
ROW_TRAFFIC_KEYS = {"wait_s": "waited_s", "num_evicted": "num_pushed_out", "evicted_bytes": "pushed_bytes"}
SUMMARY_KEYS = {"unknown_collectives": "unlisted", "excluded_rows": "rows_left_out", "num_clamped": "clamped"}


def renamed(document: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    assert not set(names.values()) & document.keys()
    return {names.get(key, key): value for key, value in document.items()}


def with_former_transfers(transfers: dict[str, Any]) -> dict[str, Any]:
    return renamed({name: renamed(means, TRANSFER_KEYS) for name, means in transfers.items()}, TRANSFERS)


def former_config(document: dict[str, Any]) -> dict[str, Any]:
    document = json.loads(json.dumps(document))
    for (section, key), former in CONFIG_KEYS.items():
        if key in document.get(section, {}):
            document[section][former] = document[section].pop(key)
    for key in ("exchange", "dense_exchange"):
        document["comm"][key] = CONFIG_VALUES[document["comm"][key]]
    service = document["data"].get("service", {})
    if "reader_timeout_s" in service:
        service["give_up_s"] = service.pop("reader_timeout_s")
    overlap = document["pipeline"]["overlap"]
    document["pipeline"]["overlap"] = [TRANSFERS.get(name, name) for name in overlap]
    table = document["plan"]["tables"]["user"]
    table["near_rows"] = table.pop("cache_rows")
    return document


def former_plan(plan: dict[str, Any]) -> dict[str, Any]:
    plan = json.loads(json.dumps(plan))
    for table in plan["tables"].values():
        table["shards"] = [renamed(shard, {"cache_rows": "near_rows"}) for shard in table["shards"]]
    for key in ("exchange", "dense_exchange"):
        if key in plan:
            plan[key] = CONFIG_VALUES.get(plan[key], plan[key])
    return plan


def former_line(line: dict[str, Any]) -> dict[str, Any]:
    line = dict(line)
    if "stages_s" in line:
        line["stages_s"] = renamed(line["stages_s"], STAGES)
    if "transfers" in line:
        line["transfers"] = with_former_transfers(line["transfers"])
    if "row_traffic" in line:
        line["row_traffic"] = {name: renamed(one, ROW_TRAFFIC_KEYS) for name, one in line["row_traffic"].items()}
    return line


def former_summary(summary: dict[str, Any]) -> dict[str, Any]:
    summary = renamed(summary, SUMMARY_KEYS)
    summary["stages_s_by_rank"] = [renamed(stages, STAGES) for stages in summary["stages_s_by_rank"]]
    summary["transfers_by_rank"] = [with_former_transfers(one) for one in summary["transfers_by_rank"]]
    summary["overlap"] = {"hidden": ["answers", "dense"], "left_out": {"ids": "unknown"}}
    predicted = summary["predicted"]
    predicted["seconds"] = renamed(predicted["seconds"], COMPONENTS)
    predicted["transfers_by_rank"] = [with_former_transfers(one) for one in predicted["transfers_by_rank"]]
    return summary


def write_former_names(run: Path) -> None:
    """Rewrite the files of a run as an earlier version wrote them."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(former_config(config), sort_keys=False))
    (run / "plan.json").write_text(json.dumps(former_plan(json.loads((run / "plan.json").read_text()))))
    lines = [json.dumps(former_line(line)) + "\n" for line in metrics(run)]
    (run / "metrics.jsonl").write_text("".join(lines))
    (run / "summary.json").write_text(json.dumps(former_summary(json.loads((run / "summary.json").read_text()))))
    for path in (run / "checkpoints").glob("step-*/manifest.json"):
        manifest = json.loads(path.read_text())
        manifest["plan"] = former_plan(manifest["plan"])
        manifest["manifest_checksum"] = digest.hash_manifest(manifest)
        path.write_text(json.dumps(manifest))


def names_in(value: Any) -> Iterator[str]:
    """Yield all keys and strings of a document."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from names_in(one)
    elif isinstance(value, str):
        yield value


FORMER_NAMES = {*TRANSFERS.values(), *TRANSFER_KEYS.values(), *ROW_TRAFFIC_KEYS.values(), *SUMMARY_KEYS.values()}
FORMER_NAMES |= {*CONFIG_KEYS.values(), *CONFIG_VALUES.values(), "update", "near_rows", "left_out", "give_up_s"}


def documents(run: Path) -> dict[str, Any]:
    """Return the files of a run that have renamed keys. Of metrics.jsonl, return the lines of training only."""
    content = {name: json.loads((run / name).read_text()) for name in ("plan.json", "summary.json")}
    content["config.yaml"] = yaml.safe_load((run / "config.yaml").read_text())
    content["metrics.jsonl"] = [line for line in metrics(run) if "stages_s" in line]
    return content


@pytest.fixture(scope="module")
def current(ranks: Ranks, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of 14 steps on two ranks, under the current names."""
    run = tmp_path_factory.mktemp("current") / "run"
    ranks(2).run(train, settings(tiny, run, **CHANGES))
    return run


@pytest.fixture
def former(current: Path, tmp_path: Path) -> Path:
    """Return a copy of the run as an earlier version wrote it."""
    run = Path(shutil.copytree(current, tmp_path / "run"))
    write_former_names(run)
    return run


def test_current_files_have_no_former_names(current: Path, former: Path) -> None:
    for name, document in documents(current).items():
        assert not FORMER_NAMES & set(names_in(document)), name
    for name, document in documents(former).items():
        assert FORMER_NAMES & set(names_in(document)), name


def test_former_files_are_read_identically(current: Path, former: Path) -> None:
    first, second = read_run(current), read_run(former)
    assert first.plan == second.plan and first.plan is not None
    assert first.train_lines == second.train_lines and len(first.train_lines) > 2
    assert first.summary is not None and second.summary is not None
    for field in ("stages_s_by_rank", "transfers_by_rank", "unknown_collectives", "excluded_rows", "predicted"):
        assert getattr(first.summary, field) == getattr(second.summary, field)
    assert second.summary.overlap is not None
    assert second.summary.overlap.hidden == ["embeddings", "dense"]
    for path in ("pipeline.staleness", "storage.cache_bytes", "comm.exchange", "pipeline.overlap"):
        assert first.config_value(path) == second.config_value(path)


def test_former_runs_are_reported_without_a_warning(former: Path) -> None:
    ended = run_here("report", former)
    assert (ended.code, ended.err) == (0, "")
    assert "dense_update" in (former / "report.html").read_text()


def test_former_runs_are_resumed_under_new_names(
    ranks: Ranks, tiny: Path, current: Path, former: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "c.yaml", former_config(settings(tiny, former, **CHANGES)))
    last = checkpoint_path(former / "checkpoints", NUM_STEPS)
    (last / "dense.safetensors").unlink()
    (last / "passed-over.txt").write_text("dense.safetensors is missing\n")
    listed = run_here("checkpoint", "list", former)
    assert listed.code == 0 and listed.out.count("  model ") == 3 and str(last) in listed.out
    first, second = ranks(2).run(run_on_rank, ["train", str(config)])
    assert (first.code, second.code) == (0, 0), first.err
    assert "resuming from step 12" in first.err
    assert "config key 'comm.silent_s' is now 'comm.heartbeat_timeout_s'; rename it" in first.err
    assert "config key 'plan.tables.user.near_rows' is now 'cache_rows'; rename it" in first.err
    assert not (last / "passed-over.txt").exists()
    assert final_checksum(former) == final_checksum(current)
    assert without_times(metrics(former)) == without_times(metrics(current))
    for name, document in documents(former).items():
        written = document[-1:] if name == "metrics.jsonl" else document
        assert not FORMER_NAMES & set(names_in(written)), name


def test_former_runs_are_evaluated(ranks: Ranks, current: Path, former: Path) -> None:
    expected, _ = ranks(2).run(run_on_rank, ["eval", str(current)])
    ended, _ = ranks(2).run(run_on_rank, ["eval", str(former)])
    assert (ended.code, ended.err) == (0, expected.err)
    assert json.loads(ended.out) == {**json.loads(expected.out), "run": str(former)}
