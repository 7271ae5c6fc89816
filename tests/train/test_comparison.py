"""Comparison of runs: differences of metrics, settings and data, and warnings to the reader."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from meseta.cli.main import app
from meseta.report.comparison import EvaluationPart, Fact, FactDifference, compare_runs, group_differences, speed_ratio
from meseta.report.comparison_page import write_comparison
from meseta.spec import MesetaError
from meseta.telemetry.formatting import format_difference

HOSTILE = "<script>x</script>"


def eval_line(step: int, **changes: Any) -> dict[str, Any]:
    line = {"kind": "eval", "step": step, "split": "test", "logloss": 0.5, "ne": 0.9, "auc": 0.75, "calibration": 1.1}
    return line | changes


def make_run(
    path: Path, config: dict[str, Any] | None = None, test: dict[str, Any] | None = None, **changes: Any
) -> Path:
    """Write a finished run of 40 steps of 100 samples. `test` changes its last evaluation, `changes` its summary."""
    path.mkdir(parents=True)
    document = {"run_dir": str(path), "seed": 0, "train": {"batch_size": 100}, "model": {"bottom_mlp": [8, 4]}}
    document["train"] |= config or {}
    (path / "config.yaml").write_text(yaml.safe_dump(document))
    splits = {name: split(name, rows, rows / 4) for name, rows in (("train", 4000), ("test", 1000))}
    reuse = {"window_samples": 100, "edges": [0, 1], "rows": [0.5, 0.5], "lookups": [0.2, 0.8]}
    counts = {"num_rows": 4000, "num_lookups": 4000, "num_uniques": 40, "mean_pooling_factor": 1.0, "reuse": reuse}
    sparse = [{"name": f"cat_{i}", "num_embeddings": 50, "encoding": "hash", "statistics": counts} for i in range(6)]
    dense = [{"name": "age", "fill": 0.0, "mean": 1.0, "std": 2.0}]
    (path / "dataset.json").write_text(json.dumps({"splits": splits, "sparse": sparse, "dense": dense}))
    table = {"sharding": "table_wise", "shards": [{"rows": [0, 50], "columns": [0, 8], "ranks": [0]}]}
    (path / "plan.json").write_text(json.dumps({"num_ranks": 1, "tables": {s["name"]: table for s in sparse}}))
    (path / "environment.json").write_text(json.dumps({"processor": "A", "num_ranks": 1, "versions": {"torch": "2"}}))
    train = [
        {"kind": "train", "step": s, "num_samples": s * 100, "time_s": s / 10, "loss": 0.6 - s / 400, "ne": 1 - s / 400,
         "auc": 0.7, "samples_per_s": 1000.0, "stages_s": {"lookup": 0.02, "backward": 0.03}}
        for s in range(10, 41, 10)
    ]  # fmt: skip
    lines = [*train, eval_line(20, auc=0.7), eval_line(40) | (test or {})]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {"test": eval_line(40) | (test or {}), "num_steps": 40, "num_samples": 4000, "num_ranks": 1}
    summary |= {"train_s": 4.0, "samples_per_s": 1000.0}
    (path / "summary.json").write_text(json.dumps(summary | changes))
    return path


def split(name: str, num_rows: int, num_positives: float) -> dict[str, Any]:
    files = [{"path": f"{name}.parquet", "num_rows": num_rows}]
    return {"num_rows": num_rows, "num_positives": num_positives, "files": files}


def edit(path: Path, change: Any) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def add_valid(run: Path, auc: float, *, with_test: bool, num_rows: int = 500) -> Path:
    """Add a validation split that was evaluated after steps 20 and 40."""
    lines = [eval_line(20, split="valid", auc=0.6), eval_line(40, split="valid", auc=auc)]
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    edit(run / "summary.json", lambda d: d.update(valid=lines[-1]) or (None if with_test else d.pop("test")))
    edit(run / "dataset.json", lambda d: d["splits"].update(valid=split("valid", num_rows, 9)))
    return run


def test_runs_that_were_not_all_tested_compare_on_valid(tmp_path: Path) -> None:
    tested = add_valid(make_run(tmp_path / "tested"), 0.74, with_test=True)
    others = [add_valid(make_run(tmp_path / f"{auc}"), auc, with_test=False) for auc in (0.72, 0.73)]
    comparison = compare_runs([tested, *others])
    [auc] = [metric for metric in comparison.metrics if metric.key == "auc"]
    assert comparison.split == "valid" and comparison.best_value(auc) == 0.74
    assert [comparison.value(auc, run) for run in comparison.runs] == [0.74, 0.72, 0.73]
    assert [note for note in comparison.notes if "test" in note.split(",")[0]] == [
        "tested on test, at step 40: log loss 0.5000, NE 0.9000, AUC 0.7500."
    ]
    page = write_comparison(comparison, tmp_path / "page.html").read_text()
    assert "Valid AUC" in page and "Test AUC" not in page
    both = compare_runs([tested, add_valid(make_run(tmp_path / "both"), 0.5, with_test=True)])
    assert both.split == "test" and {both.value(auc, run) for run in both.runs} == {0.75}
    unlike = add_valid(make_run(tmp_path / "unlike"), 0.9, with_test=False, num_rows=501)
    comparison = compare_runs([tested, unlike])
    assert not comparison.is_comparable(comparison.runs[1]) and comparison.best_value(auc) is None


def test_metrics_are_compared_with_the_first_run(tmp_path: Path) -> None:
    first = make_run(tmp_path / "first")
    second = make_run(
        tmp_path / "second", test={"auc": 0.7625, "ne": 0.9001, "calibration": 0.95}, samples_per_s=1500.0
    )
    comparison = compare_runs([first, second])
    named = {metric.key: metric for metric in comparison.metrics}
    assert list(named) == ["logloss", "ne", "auc", "calibration"]  # the metrics of these lines
    differences = {key: comparison.difference(metric, comparison.runs[1]) for key, metric in named.items()}
    assert differences == pytest.approx({"logloss": 0.0, "ne": 0.0001, "auc": 0.0125, "calibration": -0.15})
    best = {key: comparison.best_value(metric) for key, metric in named.items()}
    assert best == {"logloss": None, "ne": 0.9, "auc": 0.7625, "calibration": 0.95}  # closer to 1 than 1.1
    assert speed_ratio(comparison.runs[1], comparison.runs[0]) == 1.5
    assert comparison.runs[0].stages_ms_per_1000_samples == pytest.approx({"lookup": 200.0, "backward": 300.0})
    assert comparison.notes == () and comparison.config == comparison.data == comparison.plan == ()


def test_labels_and_segments_are_compared_too(tmp_path: Path) -> None:
    def parts(auc: float, city: int) -> dict[str, Any]:
        one, two = {"auc": auc, "ne": 0.9}, {"auc": 0.6, "gauc": {"value": 0.55, "num_groups": 3}}
        segments = [{"value": city, "auc": auc, "tasks": {"click": one, "buy": two}}, {"value": None, "auc": 0.5}]
        return {"tasks": {"click": one, "buy": two}, "segments": {"city": segments}}

    runs = [make_run(tmp_path / "first", test=parts(0.7, 3)), make_run(tmp_path / "second", test=parts(0.8, 4))]
    comparison = compare_runs(runs)
    segments = ["city 3, click", "city 3, buy", "city others", "city 4, click", "city 4, buy"]
    click = EvaluationPart("label", "click")
    assert [part.text for part in comparison.part_names] == ["label click", "label buy", *segments]
    auc = next(metric for metric in comparison.metrics if metric.key == "auc")
    assert comparison.difference(auc, comparison.runs[1], click) == pytest.approx(0.1)
    absent = EvaluationPart("segment", "city 4, click")
    assert comparison.difference(auc, comparison.runs[1], absent) is None  # missing in the first run
    assert comparison.to_dict()["runs"][1]["parts"]["city 4, buy"]["auc"] == 0.6
    page = write_comparison(comparison, tmp_path / "page.html").read_text()
    assert "By label" in page and "By segment" in page and "city others" in page


def test_a_segment_of_a_feature_that_is_called_label_is_no_label(tmp_path: Path) -> None:
    tasks = {"1, click": {"auc": 0.75}, "buy": {"auc": 0.6}}
    segments = {"label": [{"value": 1, "auc": 0.5, "tasks": {"click": {"auc": 0.55}, "buy": {"auc": 0.65}}}]}
    comparison = compare_runs([make_run(tmp_path / "run", test={"tasks": tasks, "segments": segments})])
    auc = next(metric for metric in comparison.metrics if metric.key == "auc")
    [run] = comparison.runs
    values = {part: comparison.value(auc, run, part) for part in comparison.part_names}
    assert values == {
        EvaluationPart("label", "1, click"): 0.75,
        EvaluationPart("label", "buy"): 0.6,
        EvaluationPart("segment", "label 1, click"): 0.55,
        EvaluationPart("segment", "label 1, buy"): 0.65,
    }
    page = write_comparison(comparison, tmp_path / "page.html").read_text()
    assert page.index("By label") < page.index("label buy") < page.index("By segment") < page.index("label 1, buy")


def test_only_what_differs_is_listed(tmp_path: Path) -> None:
    first = make_run(tmp_path / "first")
    second = make_run(tmp_path / "second", config={"batch_size": 200, "epochs": 3})

    def cut(plan: dict[str, Any]) -> None:
        plan["num_ranks"] = 2
        for name in ("cat_1", "cat_2", "cat_4"):
            shards = [{"rows": [25 * r, 25 * r + 25], "columns": [0, 8], "ranks": [r]} for r in (0, 1)]
            plan["tables"][name] = {"sharding": "row_wise", "shards": shards}

    edit(second / "plan.json", cut)
    comparison = compare_runs([first, second])
    assert [(row.name, row.values) for row in comparison.config] == [
        ("train.batch_size", ("100", "200")),
        ("train.epochs", ("–", "3")),
    ]
    assert [(row.name, row.values) for row in group_differences(comparison.plan)] == [
        ("ranks", ("1", "2")),
        ("table cat_1, cat_2, cat_4", ("table_wise on 0", "row_wise on 0, 1")),
    ]


def test_many_tables_with_equal_sharding_are_one_line() -> None:
    rows = [FactDifference(fact=Fact(kind="table", subject=f"t{i}"), values=("a", "b")) for i in range(26)]
    assert [row.name for row in group_differences(rows)] == ["table t0, t1, t2, t3 and 22 more"]


def test_a_feature_that_is_called_features_hides_no_number_of_features(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in ("first", "second")]
    for run, size in zip(runs, (50, 60), strict=True):
        edit(run / "dataset.json", lambda d, size=size: d["sparse"][0].update(name="features", num_embeddings=size))
    edit(runs[1] / "dataset.json", lambda d: d["sparse"].pop())
    rows = [
        (row.name, row.values) for row in group_differences(compare_runs(runs).data) if row.name.startswith("sparse")
    ]
    assert rows == [
        ("sparse features", ("6", "5")),
        ("sparse features", ("50 rows, hash", "60 rows, hash")),
        ("sparse cat_5", ("50 rows, hash", "–")),
    ]


def test_runs_on_other_data_are_reported(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in ("first", "more", "other")]
    edit(runs[1] / "dataset.json", lambda d: d["splits"].update(train=split("train", 9999, 1000)))
    edit(runs[2] / "dataset.json", lambda d: d["splits"]["test"].update(num_positives=1))
    edit(runs[2] / "summary.json", lambda d: d["test"].update(auc=0.99))
    comparison = compare_runs(runs)
    assert comparison.notes == (
        "other was evaluated on other rows than first: their metrics cannot be compared.",
        "more was trained on other data than first: see section Data.",
    )
    auc = next(metric for metric in comparison.metrics if metric.key == "auc")
    edit(runs[1] / "summary.json", lambda d: d["test"].update(auc=0.8))
    assert compare_runs(runs).best_value(auc) == 0.8  # not the 0.99 measured on other rows


def test_unfinished_and_unevaluated_runs_are_reported(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in ("first", "cut", "begun", "torn", "broken")]
    (runs[1] / "summary.json").unlink()
    for name in ("metrics.jsonl", "summary.json"):
        (runs[2] / name).unlink()
    (runs[3] / "dataset.json").write_text("{")
    (runs[4] / "summary.json").write_text("{")
    comparison = compare_runs(runs)
    text = "\n".join(comparison.notes)
    assert "cut has not ended, or was interrupted: its metrics are preliminary, up to step 40." in text
    assert "begun has no evaluation yet" in text and "torn, dataset.json: not valid JSON" in text
    assert "broken, summary.json: not valid JSON" in text and "broken has not ended" not in text
    assert "cut, summary.json" not in text
    assert comparison.to_dict()["runs"][2]["metrics"]["auc"] is None
    page = write_comparison(comparison, tmp_path / "page.html").read_text()
    assert "begun has no evaluation yet" in page and page.count(", not ended</span>") == 2


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, config={"note": HOSTILE}) for name in ("first", "second", "&lt;3")]
    (runs[1] / "config.yaml").write_text("model: {name: '" + HOSTILE + "'}\n")
    page = write_comparison(compare_runs(runs), tmp_path / "page.html").read_text()
    assert not re.search(r"<(script|link|img|iframe)|(src|href)=|url\(", page)
    assert HOSTILE not in page and "&lt;script&gt;" in page and "&amp;lt;3" in page
    for title in ("Metrics", "Curves", "Config", "Data", "Plan", "Speed", "Environment"):
        assert f"<h2>{title}</h2>" in page
    for curve in re.findall(r'<path d="([^"]*)" class="run-\d+-line"', page):
        assert all(math.isfinite(float(x)) for x in re.findall(r"-?[\d.]+", curve))
    # Loss, NE, AUC and samples/s over samples, steps and seconds.
    assert page.count('class="run-0-line"') == 4 * 3
    assert page.count('class="run-2-link"') == 3 * 3


def test_names_and_repeats(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / parent / "run") for parent in ("a", "b")]
    assert [run.label for run in compare_runs(runs).runs] == [str(path) for path in runs]
    with pytest.raises(MesetaError, match="is listed twice"):
        compare_runs([runs[0], runs[0] / ".." / "run"])
    with pytest.raises(MesetaError, match="is not a folder"):
        compare_runs([runs[0], tmp_path / "absent"])


def test_thirty_runs(tmp_path: Path) -> None:
    first = make_run(tmp_path / "run-0")
    runs = [first, *(Path(shutil.copytree(first, tmp_path / f"run-{i}")) for i in range(1, 30))]
    page = write_comparison(compare_runs(runs), tmp_path / "page.html")
    assert page.stat().st_size < 400_000
    assert "svg .run-8-line, svg .run-8-link { stroke: var(--run-0); stroke-dasharray: 6 3; }" in page.read_text()


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("one"))
    make_run(Path("two"), config={"batch_size": 50}, test={"auc": 0.74})
    result = CliRunner().invoke(app, ["report", "one", "two"])
    assert result.exit_code == 0
    assert "0.7400 -0.0100" in result.stdout and "config of two: train.batch_size 100 -> 50" in result.stdout
    assert result.stdout.splitlines()[-1] == "report: comparison.html" and Path("comparison.html").exists()
    document = json.loads(CliRunner().invoke(app, ["report", "one", "two", "--json", "--out", "x.html"]).stdout)
    assert document["runs"][1]["differences"]["auc"] == pytest.approx(-0.01)
    assert document["differences"]["config"] == {"train.batch_size": ["100", "50"]} and Path("x.html").exists()
    assert CliRunner().invoke(app, ["report", "one", "--out", "y.html"]).stdout == "y.html\n"
    assert not Path("one/report.html").exists()
    for out in ("absent/z.html", "one"):
        assert isinstance(CliRunner().invoke(app, ["report", "one", "two", "--out", out]).exception, MesetaError)


@pytest.mark.soak  # test_report.py opens a page with the same parts
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_opens_in_a_browser_without_a_console_message(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in ("one", "two")]
    page = write_comparison(compare_runs(runs), tmp_path / "page.html")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync --enable-logging=stderr --log-level=0 --dump-dom"
    command = ["chromium", *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "<h2>Speed</h2>" in result.stdout and "CONSOLE" not in result.stderr


def test_signed() -> None:
    assert [format_difference(v) for v in (0.0, 0.00123, -0.25, 4e-9, -3.2109e23)] == [
        "=",
        "+0.0012",
        "-0.2500",
        "+4e-09",
        "-3.211e+23",
    ]
