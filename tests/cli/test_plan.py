"""Tests that the output of `meseta plan` and `meseta plan diff` agrees with the plan."""

import json
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from meseta.planner import documented_cost_model, find_plan, predict
from meseta.spec import Plan, Topology
from meseta.spec.workload import load_workload
from network_cases import constant_networks
from small_run import settings, write_config

WORKLOAD = {
    "format": "meseta.workload/1",
    "batch_size": 4096,
    "tables": {
        "user": {"num_embeddings": 2_000_000, "embedding_dim": 32},
        "item": {"num_embeddings": 300_000, "embedding_dim": 64, "pooling_factor": 20, "optimizer": "adam"},
        "page": {"num_embeddings": 10_000, "embedding_dim": 16, "copies": 3},
    },
    "dense": {"flops_per_sample": 1e6, "parameter_bytes": 100_000},
}


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., Path]:
    """`files("t.yaml", document)` writes YAML and returns its path."""

    def write(name: str, document: object) -> Path:
        (tmp_path / name).write_text(yaml.safe_dump(document))
        return tmp_path / name

    return write


def topology(files: Callable[..., Path], **changes: object) -> Path:
    document = {"devices_per_host": 2, "device": "h100", "hbm_bytes": 2_000_000_000, **changes}
    return files("topology.yaml", document)


def test_prints_the_plan_that_it_writes(output_of, files, tmp_path: Path) -> None:
    workload, machines = files("model.yaml", WORKLOAD), topology(files)
    plan_file, page = tmp_path / "plan.yaml", tmp_path / "plan.html"
    out = output_of("plan", workload, "--topology", machines, "--out", plan_file, "--html", page)

    model, where = load_workload(workload), Topology.load(machines)
    plan = Plan.load(plan_file, model.tables, 2)
    result = find_plan(model, where)
    assert plan == result.plan
    prediction = predict(plan, model, where)
    assert f"step {1e3 * prediction.step_s:.4g} ms, {model.batch_size / prediction.step_s:,.0f} samples/s" in out
    assert f"bound {1e3 * result.bound.step_s:.4g} ms" in out
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    for table in model.tables:
        assert str(plan[table.name].sharding) in lines[table.name]
    for rank in range(2):
        figures = lines[str(rank)].split()
        assert figures[2] == f"{1e3 * prediction.seconds['lookup'][rank]:.3g}"
        assert figures[7] == f"{prediction.peak_bytes()[rank] / 1e6:,.1f}"
    check_page(page.read_text(), [table.name for table in model.tables])


def check_page(page: str, names: list[str]) -> None:
    """Check that the page loads nothing external and names every table."""

    class Links(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.urls: list[str] = []

        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            self.urls += [value or "" for key, value in attributes if key in ("src", "href")]

    parser = Links()
    parser.feed(page)
    assert parser.urls == []
    assert page.count("<svg") >= 3
    assert all(name in page for name in names)


def test_a_narrow_terminal_cuts_no_number(output_of, files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    out = output_of("plan", files("model.yaml", WORKLOAD), "--topology", topology(files))
    assert "…" not in out


def test_plans_a_run_from_its_config(output_of, files, tiny: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.yaml", settings(tiny, tmp_path / "run"))
    out = output_of("plan", config, "train.batch_size=64", "--topology", topology(files), "--out", tmp_path / "p.json")
    names = [column["name"] for column in json.loads((tiny / "dataset.json").read_text())["sparse"]]
    assert set(json.loads((tmp_path / "p.json").read_text())["tables"]) == set(names)
    assert f"{len(names)} tables on 1 x 2 h100 ranks" in out


def test_takes_the_files_of_the_config(output_of, files, tiny: Path, tmp_path: Path) -> None:
    rules = files("rules.yaml", {"tables": {"*": {"sharding": ["row_wise", "column_wise"]}}})
    named = {"planner__topology": str(topology(files)), "planner__constraints": str(rules)}
    config = write_config(tmp_path / "config.yaml", settings(tiny, tmp_path / "run", **named))
    output_of("plan", config, "--out", tmp_path / "p.json")
    schemes = {entry["sharding"] for entry in json.loads((tmp_path / "p.json").read_text())["tables"].values()}
    assert schemes <= {"row_wise", "column_wise"}
    output_of("plan", write_config(config, settings(tiny, tmp_path / "run")), "--out", tmp_path / "same.json",
              "--topology", topology(files), "--constraints", rules)  # fmt: skip
    assert (tmp_path / "p.json").read_bytes() == (tmp_path / "same.json").read_bytes()


def test_a_model_that_cannot_be_built_is_left_out_and_said(run, files, tiny: Path, tmp_path: Path) -> None:
    document = settings(tiny, tmp_path / "run", model={"name": "own_models:NeedsAFile", "embedding_dim": 4})
    config = write_config(tmp_path / "config.yaml", document)
    code, _, err = run("plan", config, "--topology", topology(files), "--out", tmp_path / "p.json")
    assert code == 0 and (tmp_path / "p.json").exists()
    assert "the plan ignores the dense part, because model 'own_models:NeedsAFile' cannot be built here: " in err
    assert "no weights.bin here" in err


def test_diff_counts_rows_and_bytes(output_of, files, tmp_path: Path) -> None:
    def shards(*parts: tuple[list[int], int]) -> list[dict]:
        return [{"rows": rows, "columns": [0, 8], "ranks": [rank]} for rows, rank in parts]

    def plan(name: str, a: list[dict], b: list[dict]) -> Path:
        tables = {"a": {"sharding": "row_wise", "shards": a}, "b": {"sharding": "row_wise", "shards": b}}
        return files(name, {"num_ranks": 2, "tables": tables})

    before = plan("a.yaml", shards(([0, 60], 0), ([60, 100], 1)), shards(([0, 10], 1)))
    after = plan("b.yaml", shards(([0, 50], 0), ([50, 100], 1)), shards(([0, 10], 1)))
    out = output_of("plan", "diff", before, after)
    assert "1 of 2 tables differ; 10 rows and 0.0 MB move" in out
    model = {"batch_size": 8, "tables": {n: {"num_embeddings": 100, "embedding_dim": 8} for n in "ab"}}
    assert "10 rows" in output_of("plan", "diff", before, after, files("m.yaml", model))
    assert "0 of 2 tables differ; 0 rows" in output_of("plan", "diff", before, before)


def test_what_does_not_fit_gets_changes_with_their_cost(run, files) -> None:
    tables = {name: WORKLOAD["tables"][name] for name in ("user", "item")}
    workload = files("model.yaml", {**WORKLOAD, "tables": tables})
    code, out, err = run("plan", workload, "--topology", topology(files, hbm_bytes=250_000_000))
    assert code == 1 and out == ""
    assert "too much" in err and "'user'" in err
    assert " ms per step: store the rows of 'user'" in err
    assert " ms per step: use 1 more host, 2 in all" in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tables": {"user": {"embedding_dim": 8}}}, "key 'num_embeddings' is missing"),
        ({"tables": {"user": {"num_embeddings": 5, "embedding_dim": 8, "dims": 3}}}, "unknown key 'dims'"),
        ({"features": {"f": {"table": "users"}}}, "reads the unknown table 'users'; did you mean 'user'?"),
        ({"batch_size": "many"}, "batch_size must be an integer, got 'many'"),
        ({"dense": {"flops": 3}}, "unknown key 'flops'"),
        ({"features": {"f": {"table": "user", "pooling_factor": "x"}}}, "must be a number, got 'x'"),
        ({"features": {"f": {"table": "user", "reuse": {"edges": [0]}}}}, "reuse must have the keys window_samples"),
    ],
)
def test_bad_workloads_are_refused(error_of, files, change: dict, message: str) -> None:
    assert message in error_of("plan", files("model.yaml", {**WORKLOAD, **change}), "--topology", topology(files))


def test_bad_calls_are_refused(error_of, files, tmp_path: Path) -> None:
    workload, machines = files("model.yaml", WORKLOAD), topology(files)
    assert "specify the hosts with --topology" in error_of("plan", workload)
    assert "overrides a key of a config" in error_of("plan", workload, "seed=1", "--topology", machines)
    assert "no such file" in error_of("plan", tmp_path / "none.yaml", "--topology", machines).lower()
    assert "must have num_ranks and tables" in error_of("plan", "diff", machines, machines)


def test_subcommands_have_their_own_help(run, output_of, files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    for words, usage in ((["create"], "{config} [KEY=VALUE]..."), (["diff"], "{before} {after} [config]"),
                         (["check"], "{run_dir}"), ([], "COMMAND|CONFIG [ARGS]...")):  # fmt: skip
        out = output_of("plan", *words, "--help")
        assert f"Usage: {' '.join(['meseta plan', *words])} [OPTIONS] {usage}" in out
        assert ("--topology" in out) == (words == ["create"])
    for words, missing in ((["diff", "a.yaml"], "after"), (["check"], "run_dir"), (["--all"], "config")):
        code, out, err = run("plan", *words)
        assert (code, out) == (2, "") and f"Missing argument '{missing}'" in err


def test_options_may_precede_the_config(output_of, files) -> None:
    workload, hosts = files("model.yaml", WORKLOAD), ("--topology", topology(files))
    assert output_of("plan", *hosts, workload) == output_of("plan", "create", workload, *hosts)


def test_networks_and_the_bound_of_the_constants(output_of, files, tmp_path: Path) -> None:
    work, machines = files("model.yaml", WORKLOAD), topology(files, device="cpu")
    constants = documented_cost_model("cpu")
    model = replace(constants, neural=constant_networks(0.5, 0.5, 0.5))
    model.save(tmp_path / "cost.yaml")
    page = tmp_path / "plan.html"
    out = output_of("plan", work, "--topology", machines, "--cost", tmp_path / "cost.yaml", "--html", page)
    result = find_plan(load_workload(work), Topology.load(machines), model)
    alone = predict(result.plan, load_workload(work), Topology.load(machines), constants).step_s
    assert f"step {1e3 * result.prediction.step_s:.4g} ms" in out and "corrected by networks" in out
    assert f"by the constants alone, which predict {1e3 * alone:.4g} ms for this plan" in out
    assert f"gap {100 * result.bound.relative_gap(alone):.1f} %" in out
    assert "predicted from the constants of the cost model without its networks" in page.read_text()
