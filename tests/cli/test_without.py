"""`data.without`: features that a model does not use, and that new rows may lack."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.service.tier import running
from meseta.comm import World
from meseta.config import validate_document
from meseta.data import Dataset
from meseta.spec import MesetaError
from meseta.train.setup.build import make_reader
from meseta.train.setup.source import make_row_source
from small_run import metrics, without_times

Output = Callable[..., str]
LEFT_OUT = ("age", "noise", "tags")
FIXED = ("train.epochs=2", "train.finish=last", "schedule.kind=constant", "embedding.optimizer.lr=0.05",
         "num_threads=1", "report.importance=false")  # fmt: skip


def write_log(path: Path, left_out: tuple[str, ...] = ()) -> Path:
    draw = np.random.default_rng(0)
    items = draw.integers(0, 9, 600)
    columns = {
        "label": (draw.random(600) < 0.1 + 0.8 * (items % 2)).astype(int),
        "item": [f"i{item}" for item in items],
        "noise": [f"n{number}" for number in draw.integers(0, 80, 600)],
        "tags": [" ".join(f"t{number}" for number in draw.integers(0, 5, 2)) for _ in range(600)],
        "age": draw.normal(40, 9, 600).round(3),
        "price": draw.lognormal(0, 1, 600).round(3),
    }
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        names = [name for name in columns if name not in left_out]
        writer.writerow(names)
        writer.writerows(zip(*(columns[name] for name in names), strict=True))
    return path


def read_scores(path: Path) -> list[str]:
    with path.open() as file:
        return [row["prediction"] for row in csv.DictReader(file)]


def test_left_out_features_equal_ignored_columns_and_new_rows_lack_them(
    output_of: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log, short = write_log(tmp_path / "log.csv"), write_log(tmp_path / "short.csv", LEFT_OUT)
    parse = (
        "--buckets",
        "none",
        "--sparse",
        "item",
        "--sparse",
        "noise",
        "--sparse",
        "tags",
        "--multi-valued",
        "tags= ",
    )
    ignore = [option for name in LEFT_OUT for option in ("--ignore", name)]
    whole, ignored = f"data.without=[{','.join(LEFT_OUT)}]", ("--buckets", "none", "--sparse", "item")
    output_of("train", "--data", log, "--valid-fraction", "0.2", *parse, whole, "run_dir=a", *FIXED)
    output_of("train", "--data", log, "--valid-fraction", "0.2", *ignored, *ignore, "run_dir=b", *FIXED)
    assert without_times(metrics(tmp_path / "a")) == without_times(metrics(tmp_path / "b"))
    for run_dir, data in (("a", short), ("b", short)):
        output_of("predict", run_dir, "--data", data, "--out", f"{run_dir}.csv")
    assert read_scores(tmp_path / "a.csv") == read_scores(tmp_path / "b.csv")
    # Prepared rows without the columns, and a second start, which finds the run finished.
    evaluated = [output_of("eval", run_dir, "--data", "b/data", "--split", "test") for run_dir in ("a", "b")]
    assert evaluated[0].splitlines()[0] == evaluated[1].splitlines()[0]
    output_of("train", "a/config.yaml")


def test_unknown_names_are_refused_with_the_nearest(tiny: Path) -> None:
    dataset = Dataset.load(tiny)
    with pytest.raises(MesetaError, match=r"data.without: 'usr' is not a feature of .*did you mean 'user'"):
        dataset.select(None, ["price", "usr"])
    with pytest.raises(MesetaError, match=r"data.without: .* are all sparse features"):
        dataset.select(None, [feature.name for feature in dataset.sparse])
    reduced = dataset.select(None, ["usr", "tags"], allow_missing=True)
    assert [feature.name for feature in reduced.sparse] == ["user", "item", "city"]
    again = Dataset.from_dict(reduced.to_dict(), tiny)
    assert again == reduced and again.select(None, ["tags"]) == reduced and dataset.select(None, []) is dataset


def test_a_filter_cannot_use_a_left_out_column(tiny: Path) -> None:
    document = {"run_dir": "run", "data": {"dir": str(tiny), "without": ["age"], "filter": "age > 3"}}
    config = validate_document(document)
    dataset = make_row_source(config.data).dataset().select(None, config.data.without)
    with pytest.raises(MesetaError, match=r"'age' is left out by data.without"):
        make_reader(config, dataset, "train", World.single())


def test_readers_do_not_send_left_out_features(tiny: Path) -> None:
    document = {"run_dir": "run", "data": {"dir": str(tiny), "without": ["age", "tags"]}}
    with running({"click": tiny}, 1) as tier:
        service = {"dir": None, "service": {"url": tier.dispatcher.url}}
        batches = []
        for data in (document["data"], {**document["data"], **service}):
            config = validate_document({**document, "data": data})
            dataset = make_row_source(config.data).dataset().select(None, config.data.without)
            batches.append(list(make_reader(config, dataset, "test", World.single()).epoch()))
    for local, served in zip(*batches, strict=True):
        assert local.sparse.keys == served.sparse.keys == ("user", "item", "city")
        assert local.dense.shape[1] == 1 and (local.dense == served.dense).all()
        assert (local.sparse.values == served.sparse.values).all()
