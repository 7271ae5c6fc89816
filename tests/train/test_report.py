"""The report page: contents, damaged inputs, and independence of other files."""

import json
import math
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from meseta.report import write_report
from meseta.report.charts.chart import make_axis
from meseta.report.charts.plan_treemap import shards_by_rank, squarify
from meseta.report.record import read_run
from meseta.spec import MesetaError, Plan, TableSpec
from meseta.spec.plan import read_explicit_plan
from meseta.telemetry.formatting import format_bytes, format_duration, format_percent, format_si
from meseta.train.metrics import compute_metrics

SECTIONS = ["Curves", "Evaluation", "Importance", "Plan", "Step time", "Data", "Config", "Environment"]
FILES = ["config.yaml", "dataset.json", "plan.json", "environment.json", "metrics.jsonl", "summary.json"]
ROWS = {"user": 50_000, "item": 20_000, "city": 40, "day": 7}
HOSTILE = '<script>alert("x")</script>&\'\x00'


class Page(HTMLParser):
    """Parser that checks the nesting of a page and stores its tags, attributes and text."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(markup)
        self.close()
        assert self._open == []

    @property
    def text(self) -> str:
        return "\n".join(self.texts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def train_line(step: int, **changes: Any) -> dict[str, Any]:
    line = {"kind": "train", "step": step, "num_samples": step * 1024, "time_s": step / 40, "loss": 0.6 - step / 2000}
    line |= {
        "ne": 1.0 - step / 2000,
        "auc": 0.7 + step / 4000,
        "samples_per_s": 41_234.0,
        "lr_dense": 1e-3,
        "lr_sparse": 0.04,
    }
    stages = {"data": 0.001, "lookup": 0.004, "backward": 0.012, "my_own_stage": 0.002}
    return line | {"stages_s": stages} | changes


def traffic(**changes: float) -> dict[str, float]:
    return {
        "num_calls": 1.0,
        "intra_host_bytes": 2e6,
        "inter_host_bytes": 0.0,
        "seconds": 0.004,
        "wait_s": 0.001,
        **changes,
    }


def eval_line(step: int, split: str = "test") -> dict[str, Any]:
    labels = [int(i % 4 == 0) for i in range(400)]
    logits = [math.sin(i) + label - 1.5 for i, label in enumerate(labels)]
    return {"kind": "eval", "step": step, "split": split, "time_s": 0.5, **compute_metrics(logits, labels).to_dict()}


def dataset(names: dict[str, int]) -> dict[str, Any]:
    edges = [0, *(2**k for k in range(16))]
    reuse = {"window_samples": 65_536, "edges": edges, "rows": [0.5, 0.3] + [0.2 / 15] * 15, "lookups": [1 / 17] * 17}
    counts = {"num_rows": 10_000, "num_lookups": 21_000, "num_uniques": 37, "mean_pooling_factor": 2.1, "reuse": reuse}
    sparse = [{"name": n, "num_embeddings": v, "encoding": "hash", "statistics": counts} for n, v in names.items()]
    files = {
        name: [{"path": f"{name}.parquet", "num_rows": rows}] for name, rows in (("train", 102_400), ("test", 4_000))
    }
    splits = {
        "train": {"num_rows": 102_400, "num_positives": 25_600, "files": files["train"]},
        "test": {"num_rows": 4_000, "num_positives": 1_000, "files": files["test"]},
    }
    dense = [{"name": "age", "fill": 0.0, "mean": 3.25, "std": 1.5}]
    return {"format": "meseta.dataset/1", "labels": ["label"], "dense": dense, "sparse": sparse, "splits": splits}


def make_run(run_dir: Path, num_ranks: int = 2, names: dict[str, int] = ROWS) -> Path:
    """Write a finished run of 100 steps."""
    run_dir.mkdir(parents=True, exist_ok=True)
    tables = [TableSpec(name=name, num_embeddings=rows, embedding_dim=32) for name, rows in names.items()]
    kinds = ["row_wise", "column_wise", "data_parallel", "table_wise"]
    plan = Plan.from_dict({"tables": dict(zip(names, kinds, strict=True))}, tables, num_ranks)
    plan.save(run_dir / "plan.json")
    config = {
        "run_dir": "runs/a",
        "seed": 11,
        "model": {"name": "dlrm", "embedding_dim": 32},
        "train": {"batch_size": 1024},
    }
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    (run_dir / "dataset.json").write_text(json.dumps(dataset(names)))
    (run_dir / "environment.json").write_text(json.dumps({"commit": "abc1234", "versions": {"torch": "2.13.0"}}))
    lines = [train_line(step) for step in range(10, 101, 10)] + [eval_line(50), eval_line(100)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {
        "test": eval_line(100),
        "teacher": {"auc": 0.8765, "ne": 0.7654},
        "num_steps": 100,
        "num_samples": 102_400,
    }
    summary["test"] |= {"auc": 0.8123, "ne": 0.8456}
    summary |= {"train_s": 151.2, "samples_per_s": 41_300.0, "num_ranks": num_ranks}
    stages = {"input_dist": 0.001, "lookup": 0.002, "backward": 0.01, "dense_forward": 0.005, "table_update": 0.0035}
    summary["stages_s_by_rank"] = [stages] * num_ranks
    seconds = {
        name: [0.001] * num_ranks for name in ("input_dist", "lookup", "output_dist", "gradient_dist", "table_update")
    }
    summary["predicted"] = {
        "step_s": 0.02,
        "seconds": seconds | {"dense": [0.012] * num_ranks},
        "constants": "of c.yaml",
    }
    summary["importance"] = importance({"age": 0.02, **dict.fromkeys(names, -0.001)})
    (run_dir / "summary.json").write_text(json.dumps(summary))
    return run_dir


def importance(increases: dict[str, float]) -> dict[str, Any]:
    """Return importances with intervals of 0.004 around them, the first one of a dense feature."""
    features = [
        {"name": name, "kind": "sparse" if i else "dense", "logloss": v, "low": v - 0.004, "high": v + 0.004}
        for i, (name, v) in enumerate(increases.items())
    ]
    rows = {"split": "valid", "label": "click<b>", "num_rows": 6410, "num_permutations": 1}
    return {**rows, "logloss": 0.4321, "constant_logloss": 0.5, "features": features}


def report(run_dir: Path) -> Page:
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    assert sorted(p.name for p in run_dir.iterdir() if p.name.startswith(".")) == []
    page = Page(path.read_text(encoding="utf-8"))
    check_self_contained(page)
    check_numbers(page)
    return page


def check_self_contained(page: Page) -> None:
    for tag, attributes in page.tags:
        assert tag not in {"script", "link", "img", "iframe", "object", "embed", "base"}
        assert not {"src", "href", "srcset", "action"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
        assert "url(" not in (attributes.get("style") or "")


def check_numbers(page: Page) -> None:
    """Check that all coordinates are finite and no size is negative."""
    for tag, attributes in page.tags:
        for name in ("x", "y", "cx", "cy", "r", "rx", "width", "height"):
            if name in attributes and tag in {"rect", "circle", "text", "svg", "line"}:
                value = float(attributes[name] or "nan")
                assert math.isfinite(value)
                assert value >= 0 or name in {"x", "y", "cx", "cy"}
        if tag == "path":
            assert re.fullmatch(r"([MLHVv] ?-?[\d.]+( -?[\d.]+)?)+", attributes["d"] or ""), attributes["d"]


def test_a_finished_run_shows_everything(tmp_path: Path) -> None:
    page = report(make_run(tmp_path / "first"))
    for heading in ["first", *SECTIONS]:
        assert heading in page.texts
    for figure in [
        "0.8123",
        "0.8456",
        "teacher 0.8765",
        "teacher 0.7654",
        "41.3k",
        "100",
        "102k samples",
        "2 min 31 s",
    ]:
        assert figure in page.texts
    assert "dlrm · width 32 · batch 1024 · seed 11" in page.texts
    assert "25.00%" in page.texts and "2.1" in page.text and "50,000" in page.texts
    assert "my_own_stage" in page.texts and "12.00" in page.texts
    assert "1.00 / 2.00" in page.texts and "12.00 / 15.00" in page.texts and "1.00 / 3.50" in page.texts
    assert "constants of c.yaml" in page.text
    assert "versions.torch" in page.texts and "abc1234" in page.texts
    assert "Not shown" not in page.text and "not in the run folder" not in page.text


def test_the_best_step_is_marked_and_both_splits_are_shown(tmp_path: Path) -> None:
    """The run of 100 steps selected step 20 on valid and ended with its weights."""
    run_dir = make_run(tmp_path / "run")
    steps = [*range(10, 101, 5), 100]
    lines = [train_line(step) for step in range(10, 101, 10)] + [eval_line(step, "valid") for step in steps]
    lines += [eval_line(20)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = json.loads((run_dir / "summary.json").read_text())
    summary["test"]["step"] = 20
    summary["valid"] = eval_line(20, "valid") | {"auc": 0.8234, "ne": 0.8321}
    summary["best"] = {"metric": "ne", "split": "valid", "step": 20, "value": 0.8}
    summary["selected"] = {"split": "valid", "what": ["the best weights"]}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    page = report(run_dir)
    assert "teacher 0.8765, valid 0.8234, best at step 20" in page.texts
    assert "teacher 0.7654, valid 0.8321, best at step 20" in page.texts
    assert "test AUC" in page.texts and "flattered" not in page.text
    marked = {attributes["d"] for tag, attributes in page.tags if attributes.get("class") == "best"}
    dots = [attributes["cx"] for _, attributes in page.tags if attributes.get("class") == "other-dot"]
    [path] = marked  # at one position in all charts, that of the third evaluation of valid
    assert path is not None and path.startswith(f"M{dots[2]} ")
    assert page.texts.count("best") == 3 and page.texts.count(" best") == 1
    at = page.texts.index(" best")
    assert page.texts[at - 1] == "valid" and page.texts[at - 2] == "20"
    assert page.texts[at - 2 :].count("valid") == 12 + 1  # the best is older than the last twelve
    assert "The last 12 of 20 evaluations, and the best and the final one." in page.texts


def test_selection_on_the_test_split_is_reported(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    summary = json.loads((run_dir / "summary.json").read_text())
    summary["best"] = {"metric": "ne", "step": 50, "value": 0.8}
    summary["selected"] = {"split": "test", "what": ["early stopping"]}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    page = report(run_dir)
    assert "The test split decided early stopping, so its figures are flattered" in page.text
    assert page.texts.count("best") == 3  # a mark in each chart


def test_importances_are_sorted_and_in_units_of_ne(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    page = report(run_dir)
    assert "Label 'click<b>', 6,410 rows of the valid split, each column permuted once." in page.text
    assert "age: 0.04 (0.032 to 0.048)" in page.texts and "city: -0.002 (-0.01 to 0.006)" in page.texts
    at = page.texts.index("constant")
    assert page.texts[at - 4 : at + 4] == ["model", "–", "0.4321", "0.8642", "constant", "–", "0.5000", "1.0000"]
    assert "logistic regression" not in page.texts
    whiskers = [attributes for _, attributes in page.tags if attributes.get("class") == "whisker"]
    assert len(whiskers) == 1 + len(ROWS)
    summary = json.loads((run_dir / "summary.json").read_text())
    logistic = {"logistic_logloss": 0.45678, "logistic_auc": 0.71236, "num_logistic_rows": 49152}
    summary["importance"] = importance({"age": 0.02}) | logistic
    (run_dir / "summary.json").write_text(json.dumps(summary))
    page = report(run_dir)
    at = page.texts.index("logistic regression")
    assert page.texts[at + 1 : at + 5] == ["0.7124", "0.4568", "0.9136", "constant"]
    assert "fitted briefly, to 49,152 training rows" in page.text
    summary["importance"] = importance({f"f{i}": 0.001 * i for i in range(50)}) | {"constant_logloss": 0.0}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    page = report(run_dir)
    names = [name for name in page.texts if re.fullmatch(r"f\d+", name)]
    assert names == [f"f{i}" for i in range(49, 9, -1)] and "10 less important features are not shown." in page.texts
    assert "f49: 0.049 (0.045 to 0.053)" in page.texts and "Increase of log loss" in page.text


def test_trials_memory_and_stages_are_described(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    page = report(run_dir)
    assert "Trials before the run" not in page.texts
    assert ": read and pool owned rows" in page.texts and ": update dense parameters" not in page.texts
    assert page.texts[page.texts.index("memory") + 1] == "–"
    summary = json.loads((run_dir / "summary.json").read_text()) | {"peak_memory_bytes_by_rank": [5 * 10**8, 2 * 10**9]}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    trials = [{"settings": {"a.lr<b>": 0.005}, "value": 0.7123}, {"settings": {"a.lr<b>": 0.05}, "value": None}]
    record = {"metric": "auc", "split": "valid", "selected": 0, "trials": trials}
    (run_dir / "trials.json").write_text(json.dumps(record))
    page = report(run_dir)
    assert page.texts[page.texts.index("memory") + 1 :][:2] == ["2.00 GB", "peak of a rank"]
    at = page.texts.index("a.lr<b>")
    assert page.texts[at + 1 : at + 7] == ["valid AUC", "0.005", " selected", "0.7123", "0.05", "–"]
    (run_dir / "trials.json").write_text('{"metric": "auc"}')
    assert "trials.json: key 'split': field required." in report(run_dir).texts


def test_labels_and_segments_have_their_rows(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    summary = json.loads((run_dir / "summary.json").read_text())
    metrics = {"num_samples": 400, "num_positives": 100, "auc": 0.61, "gauc": {"value": 0.5432, "num_groups": 3}}
    both = {"click": metrics, "buy": metrics | {"auc": 0.7272}}
    segments = [{"value": 1234, **metrics, "tasks": both}, {"value": None, **metrics, "tasks": both}]
    summary["test"] |= {"tasks": both, "segments": {"city<b>": segments}}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    page = report(run_dir)
    cells = page.texts
    assert "By label" in cells and "By city<b>" in cells and cells.count("0.5432") == 6 and cells.count("0.7272") == 3
    assert [name for name in cells if name.endswith(", buy")] == ["1,234, buy", "all others, buy"]


def test_the_whole_run_has_a_curve(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    life = {"logloss": 0.5, "ne": 0.9, "auc_binned": 0.7}
    lines = [train_line(step, lifetime=life) for step in range(10, 101, 10)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = report(run_dir)
    drawn = [a["d"] or "" for tag, a in page.tags if tag == "path" and a.get("class") == "life-line"]
    assert [d.count("L") for d in drawn] == [9, 9, 9] and "whole run" in page.texts


def test_with_several_labels_all_curves_are_those_of_the_first(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    life = {"logloss": 0.5, "ne": 0.9, "auc_binned": 0.7}
    lines = [train_line(step, lifetime=life, loss=7.7, logloss=0.5) for step in range(10, 101, 10)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = report(run_dir)
    curves = {
        a["class"]: a["d"]
        for tag, a in reversed(page.tags)
        if tag == "path" and a.get("class") in {"train-line", "life-line"}
    }
    assert curves["train-line"] == curves["life-line"]


def test_curves_have_a_point_per_line(tmp_path: Path) -> None:
    page = report(make_run(tmp_path))
    lines = [a["d"] or "" for tag, a in page.tags if tag == "path" and a.get("class") == "train-line"]
    assert [d.count("L") for d in lines] == [9, 9, 9]
    dots = [a for tag, a in page.tags if tag == "circle" and a.get("class") == "test-dot"]
    assert len(dots) == 3 * 2 + 20
    assert [d for tag, a in page.tags if tag == "path" and (d := a.get("class")) == "reference"] == ["reference"] * 2


def test_long_runs_give_small_pages(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(train_line(s)) + "\n" for s in range(1, 5001)))
    report(tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 300_000


def test_undefined_figures_break_the_line(tmp_path: Path) -> None:
    make_run(tmp_path)
    broken = {30: {"auc": None}, 60: {"auc": math.nan}, 80: {"loss": 1e308}, 90: {"loss": -1e308}}
    lines = [train_line(step, **broken.get(step, {})) for step in range(10, 101, 10)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = report(tmp_path)
    auc = [a["d"] or "" for tag, a in page.tags if tag == "path" and a.get("class") == "train-line"][2]
    assert auc.count("M") == 3 and auc.count("L") == 5


@pytest.mark.parametrize("missing", FILES)
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    make_run(tmp_path)
    (tmp_path / missing).unlink()
    page = report(tmp_path)
    assert f"{missing}: not in the run folder." in page.texts
    for heading in SECTIONS:
        assert heading in page.texts


@pytest.mark.parametrize("broken", [name for name in FILES if name.endswith(".json")])
@pytest.mark.parametrize(
    "content", ["{", "[]", "null", '"x"', "[" * 100_000, '{"num_ranks": -1, "sparse": 7, "test": []}']
)
def test_a_broken_file_is_named(tmp_path: Path, broken: str, content: str) -> None:
    make_run(tmp_path)
    (tmp_path / broken).write_text(content)
    page = report(tmp_path)
    if not (broken == "environment.json" and content.startswith('{"')):  # any mapping is valid
        assert f"{broken}: " in page.text
    assert "This run has not ended" not in page.text


def test_an_interrupted_run(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / "summary.json").unlink()
    lines = [train_line(10), train_line(20, loss=9.0), train_line(20), eval_line(20), train_line(30)]
    content = "\n".join(json.dumps(line) for line in lines)
    (tmp_path / "metrics.jsonl").write_text(content[:-30])
    page = report(tmp_path)
    assert "This run has not ended, or was interrupted." in page.text
    assert "1 of its lines cannot be read (line 5)" in page.text
    assert "at step 20" in page.texts and "median so far" in page.texts and "0.5 s" in page.texts
    record = read_run(tmp_path)
    assert [line.step for line in record.train_lines] == [10, 20]
    assert record.train_lines[1].loss == pytest.approx(0.59)


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run_dir: x\n")
    page = report(tmp_path)
    assert page.text.count("Not shown") == 8
    assert "no evaluation yet" in page.texts


def test_a_directory_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(MesetaError, match="is not a folder"):
        write_report(tmp_path / "absent")
    (tmp_path / "dataset.json").write_text("{}")
    with pytest.raises(MesetaError, match="contains no run"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_failed_write_keeps_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path)
    (tmp_path / "report.html").write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(MesetaError, match="No space left on device"):
        write_report(tmp_path)
    assert (tmp_path / "report.html").read_text() == "old"
    assert not list(tmp_path.glob(".meseta-*"))


def test_hostile_names_are_text(tmp_path: Path) -> None:
    make_run(tmp_path, names={HOSTILE[:-1]: 5_000, "</title></style>": 3_000, '"><img src=x>': 2_000, "a" * 500: 7})
    (tmp_path / "config.yaml").write_text(f"model:\n  name: {json.dumps(HOSTILE[:-1])}\n")
    (tmp_path / "environment.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    page = report(tmp_path)
    assert '<script>alert("x")</script>&\'' in page.text
    assert page.text.count('"><img src=x>') >= 2
    assert "\x00" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_half_a_surrogate_is_no_text(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / "environment.json").write_text(json.dumps({"half": "\ud800"}))
    assert "environment.json: not valid JSON" in report(tmp_path).text


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 16])
def test_areas_are_in_proportion_to_bytes(tmp_path: Path, num_ranks: int) -> None:
    make_run(tmp_path, num_ranks)
    record = read_run(tmp_path)
    assert record.plan is not None
    held = shards_by_rank(record.plan, 4)
    city = [[p for p in pieces if p.table == "city"] for pieces in held.values()]
    assert all(len(pieces) == 1 and pieces[0].num_bytes == 40 * 32 * 4 for pieces in city)
    total = sum(p.num_bytes for pieces in held.values() for p in pieces)
    assert total == 4 * 32 * (50_000 + 20_000 + 40 * num_ranks + 7)
    page = report(tmp_path)
    assert sum(text.startswith("rank ") and text[5:].isdigit() for text in page.texts) == num_ranks
    titles = [text for text in page.texts if text.startswith("user\nrow_wise")]
    assert len(titles) == num_ranks
    drawings = [i for i, (tag, a) in enumerate(page.tags) if tag == "svg" and "plan" in (a.get("class") or "")]
    rects = [a for tag, a in page.tags[drawings[0] :] if tag == "rect"][: len(held[0])]
    areas = [(float(a["width"] or 0) + 1.5) * (float(a["height"] or 0) + 1.5) for a in rects]
    assert areas[0] / areas[1] == pytest.approx(held[0][0].num_bytes / held[0][1].num_bytes, rel=0.02)


def test_plan_pieces_by_hand() -> None:
    shard = {"rows": [0, 10], "columns": [0, 4], "ranks": [0, 1]}
    plan, _ = read_explicit_plan({"num_ranks": 2, "tables": {"t": {"sharding": "data_parallel", "shards": [shard]}}})
    (piece,) = shards_by_rank(plan, 2)[1]
    assert (piece.num_bytes, piece.size, piece.part) == (80, "10 × 4", "whole")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=40), st.floats(10, 1000), st.floats(10, 1000))
def test_squarify_tiles_its_box(weights: list[float], width: float, height: float) -> None:
    scale = width * height / sum(weights)
    areas = sorted((w * scale for w in weights), reverse=True)
    boxes = squarify(areas, width, height)
    for area, (x, y, w, h) in zip(areas, boxes, strict=True):
        assert w * h == pytest.approx(area, rel=1e-6)
        assert x >= -1e-6 and y >= -1e-6 and x + w <= width * (1 + 1e-6) and y + h <= height * (1 + 1e-6)
    for i, (x, y, w, h) in enumerate(boxes):
        for u, v, p, q in boxes[:i]:
            assert min(x + w, u + p) - max(x, u) < 1e-6 * width or min(y + h, v + q) - max(y, v) < 1e-6 * height


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-1e29, 1e29), min_size=1, max_size=5))
def test_axes_hold_their_values_and_have_round_ticks(values: list[float]) -> None:
    axis = make_axis(values, 0.0, 100.0)
    assert all(-1e-6 <= axis.to_pixel(v) <= 100 + 1e-6 for v in values)
    assert 2 <= len(axis.ticks) <= 8
    assert len(set(axis.labels)) == len(axis.ticks)


def test_figures() -> None:
    assert make_axis([0.781, 0.842], 0, 1).labels == ("0.78", "0.80", "0.82", "0.84", "0.86")
    assert make_axis([0, 2_048_000], 0, 1, widen=False).labels == ("0", "1M", "2M")
    assert (format_si(41_300), format_si(999_950), format_si(0.0123), format_si(None)) == ("41.3k", "1M", "0.0123", "–")
    assert (format_bytes(512), format_bytes(1.2e9), format_bytes(9.997e8)) == ("512 B", "1.20 GB", "1,000 MB")
    assert (format_duration(3.21), format_duration(151.2), format_duration(18_720)) == (
        "3.21 s",
        "2 min 31 s",
        "5 h 12 min",
    )
    assert (format_percent(0.256), format_percent(0.0312), format_percent(0.0)) == ("26%", "3.1%", "0%")


def test_command_prints_the_path(tmp_path: Path) -> None:
    import typer

    from meseta.cli.report import report as command

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [str(make_run(tmp_path / "run"))])
    assert result.exit_code == 0
    assert result.stdout.strip() == str(tmp_path / "run" / "report.html")


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_opens_in_a_browser_without_a_console_message(tmp_path: Path) -> None:
    path = write_report(make_run(tmp_path / "run", num_ranks=4))
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync --enable-logging=stderr --log-level=0 --dump-dom"
    command = ["chromium", *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    for heading in SECTIONS:
        assert f"<h2>{heading}</h2>" in result.stdout
    assert result.stdout.count("<svg") >= 12
    assert "CONSOLE" not in result.stderr


def test_replayed_and_eager_steps_are_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert "CUDA graphs" not in write_report(run).read_text()
    summary = json.loads((run / "summary.json").read_text())
    summary["graphs"] = {"num_graphs": 2, "num_replayed_steps": 1234, "eager_steps": {"short batch": 5}}
    (run / "summary.json").write_text(json.dumps(summary))
    page = write_report(run).read_text()
    assert "Steps replayed from 2 CUDA graphs: 1,234." in page
    assert "Eager steps: 5, because of short batch." in page


def test_exchanges_are_means_over_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert "Exchanges per step" not in write_report(run).read_text()
    lines = [
        train_line(10, transfers={"ids": traffic(), "dense": traffic(num_calls=2.0, inter_host_bytes=4e9)}),
        train_line(20, transfers={"ids": traffic(intra_host_bytes=4e6, wait_s=0.003)}),
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_report(run).read_text()
    table = page[page.index("Exchanges per step") :].partition("</table>")[0]
    cells = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in table.split("<tr>")[2:]]
    assert cells == [
        ["ids", "1", "3.00 MB", "0 B", "4.00", "2.00", "2.00"],
        ["dense", "1", "1.00 MB", "2.00 GB", "2.00", "1.50", "0.50"],
    ]
    assert "Hidden behind" not in page
    summary = json.loads((run / "summary.json").read_text())
    summary["overlap"] = {"hidden": ["ids", "agree"], "excluded": {"embeddings": "MMoE computes nothing"}}
    (run / "summary.json").write_text(json.dumps(summary))
    page = write_report(run).read_text()
    assert "Hidden behind computation: ids, agree." in page
    assert "Not hidden: embeddings, because MMoE computes nothing." in page


def test_waits_for_rows_are_means_over_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert "rows were waited for" not in write_report(run).read_text()
    first, second = "grpc://127.0.0.1:7", "grpc://<b>:8"
    lines = [
        train_line(10, row_waits={first: wait(storage_s=0.002, transfer_s=0.001), second: wait(decode_s=0.004)}),
        train_line(20, row_waits={first: wait(transform_s=0.006), "no reader": wait(no_lease_s=0.01)}),
        train_line(30),
        train_line(40, row_waits={first: wait(storage_s=float("nan"))}),
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_report(run).read_text()
    table = page[page.index("that rows were waited for, rank 0") :].partition("</table>")[0]
    cells = [re.findall(r"<td[^>]*>(?:<b>)?([^<]*)", row) for row in table.split("<tr>")[2:]]
    assert cells == [
        ["127.0.0.1:7", "0.50", "0.00", "1.50", "0.25", "0.00", "2.25"],
        ["&lt;b&gt;:8", "0.00", "1.00", "0.00", "0.00", "0.00", "1.00"],
        ["no reader", "0.00", "0.00", "0.00", "0.00", "2.50", "2.50"],
        ["all", "0.50", "1.00", "1.50", "0.25", "2.50", "5.75"],
    ]
    assert table.count("<rect") == 4 * 5 and "transform: 6 ms" in table
    heads = re.findall(r"</span>([a-z ]+)</th>", table)
    assert heads == ["storage", "decode", "transform", "wire", "no lease"]


def wait(**seconds: float) -> dict[str, float]:
    return {**dict.fromkeys(("storage_s", "decode_s", "transform_s", "transfer_s", "no_lease_s"), 0.0), **seconds}
