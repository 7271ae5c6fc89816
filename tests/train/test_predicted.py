"""Predicted and measured times of a run: summary, report page and command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meseta.cli.main import app
from meseta.report.prediction import compare_cache_misses, compare_components, compare_transfers
from meseta.report.record import read_run
from meseta.spec.stages import STEP_COMPONENTS, component_stages
from meseta.telemetry.summary import read_summary
from small_run import settings, train


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    run_dir = tmp_path_factory.mktemp("predicted") / "run"
    train(settings(tiny, run_dir))
    return run_dir


def test_every_stage_of_a_step_is_in_one_component(finished: Path) -> None:
    document = json.loads((finished / "summary.json").read_text())
    [stages] = document["stages_s_by_rank"]
    inside = [name for component in STEP_COMPONENTS for name in component_stages(component)]
    assert set(stages) <= {*inside, "data", "copy"} and len(inside) == len(set(inside))
    assert set(document["predicted"]["seconds"]) == set(STEP_COMPONENTS)
    components = {component.component: component for component in compare_components(read_run(finished).summary)}
    assert (
        components["table_update"].measured_s == stages["table_update"] and components["table_update"].predicted_s > 0
    )
    dense = sum(stages[name] for name in ("dense_forward", "agree", "backward", "dense_update"))
    assert components["dense"].measured_s == pytest.approx(dense)
    assert components["lookup"].ratio == pytest.approx(stages["lookup"] / document["predicted"]["seconds"]["lookup"][0])


def test_transfers_are_compared_by_name(finished: Path, tmp_path: Path) -> None:
    """Values are means over ranks. A transfer that is only predicted, or only measured, is 0 in the other."""
    assert compare_transfers(read_run(finished).summary) == []  # one rank
    document = json.loads((finished / "summary.json").read_text())
    one, two = ({"num_calls": 1, "intra_host_bytes": size, "inter_host_bytes": 4e3, "seconds": 2e-3, "wait_s": 1e-3}
                for size in (1e3, 3e3))  # fmt: skip
    document["transfers_by_rank"] = [{"ids": one, "embeddings": one}, {"ids": two, "embeddings": two}]
    document["predicted"]["transfers_by_rank"] = [{"ids": two, "dense": one}, {"ids": two, "dense": two}]
    (tmp_path / "summary.json").write_text(json.dumps(document))
    transfers = {one.name: one for one in compare_transfers(read_summary(tmp_path))}
    assert [*transfers] == ["ids", "dense", "embeddings"]
    assert (transfers["ids"].predicted.intra_host_bytes, transfers["ids"].measured.intra_host_bytes) == (3e3, 2e3)
    assert transfers["dense"].measured.seconds == 0.0 and transfers["embeddings"].predicted.inter_host_bytes == 0.0
    result = CliRunner().invoke(app, ["plan", "check", str(tmp_path)])
    [row] = [line.split() for line in result.output.splitlines() if line.startswith("ids ")]
    assert row == ["ids", "2", "2", "1", "1", "3", "2", "4", "4"]
    assert "hidden" not in result.output.splitlines()[-1]
    document["overlap"] = {"hidden": ["ids", "dense"]}
    document["predicted"]["overlap"] = ["ids", "dense"]
    (tmp_path / "summary.json").write_text(json.dumps(document))
    assert CliRunner().invoke(app, ["plan", "check", str(tmp_path)]).output.strip().endswith("hidden: ids, dense")
    del document["predicted"]["overlap"]  # an older version, whose prediction had no overlap
    (tmp_path / "summary.json").write_text(json.dumps(document))
    result = CliRunner().invoke(app, ["plan", "check", str(tmp_path)])
    [row] = [line.split() for line in result.output.splitlines() if line.startswith("ids ")]
    assert row == ["ids", "2", "2", "1", "3", "2", "4", "4"]
    assert "the prediction of an older version does not include" in result.output


def test_misses_are_compared_by_table(tmp_path: Path, tiny: Path) -> None:
    """The measured misses are those of the last line, when the caches are full."""
    tables = {"user": {"sharding": "table_wise", "tier": "cached", "cache_rows": 150}, "*": "table_wise"}
    train(settings(tiny, tmp_path / "run", plan={"tables": tables}))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    counted = [line["row_traffic"]["user"]["num_misses"] for line in lines if line["kind"] == "train"][-1]
    misses = compare_cache_misses(read_run(tmp_path / "run"))
    assert set(misses) == {"user"} and misses["user"][1] == counted
    result = CliRunner().invoke(app, ["plan", "check", str(tmp_path / "run")])
    [row] = [line.split() for line in result.output.splitlines() if line.startswith("user ")]
    assert row[1:3] == [f"{misses['user'][0]:,.1f}", f"{counted:,.1f}"]


def test_the_command_prints_both(finished: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["plan", "check", str(finished)])
    assert result.exit_code == 0, result.output
    [row] = [line.split() for line in result.output.splitlines() if line.startswith("table_update")]
    document = json.loads((finished / "summary.json").read_text())
    assert float(row[3]) == pytest.approx(1e3 * document["stages_s_by_rank"][0]["table_update"], rel=0.01)
    assert "documented for cpu" in result.output
    del document["predicted"]
    (tmp_path / "summary.json").write_text(json.dumps(document))
    for names, words in (([str(tmp_path)], "no predicted and measured times"), ([], "Missing argument 'run_dir'")):
        refused = CliRunner().invoke(app, ["plan", "check", *names])
        assert refused.exit_code != 0 and words in f"{refused.exception}{refused.output}"
