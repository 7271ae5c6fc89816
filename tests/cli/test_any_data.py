"""Tests of one command that trains from files of public formats, without a handwritten schema."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from cli.processes import Command
from meseta.cli import train
from meseta.data import Dataset, PrepareOptions
from meseta.train.interop.default_settings import default_batch_size, default_run_dir

Output = Callable[..., str]
SMALL = ("model.embedding_dim=4", "model.bottom_mlp=[8]", "model.top_mlp=[8]", "train.epochs=3", "num_threads=1",
         "dense.optimizer.lr=0.01", "embedding.optimizer.lr=0.1")  # fmt: skip


def write_csv(path: Path) -> None:
    """Write strings and missing values. The label is more likely in one city and at a low price."""
    draw = random.Random(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["row_id", "is_click", "price", "user_id", "city", "time"])
        for row in range(2000):
            city, price = draw.choice(["Ávila", 'the "old" town, León', "two\nlines", ""]), draw.choice([1, 20, None])
            click = draw.random() < 0.05 + 0.5 * (city == "Ávila") + 0.4 * (price == 1)
            writer.writerow([row, int(click), price, draw.randrange(300), city, "2026-01-02 10:00:00"])


def write_parquet(path: Path) -> None:
    """Write lists with weights. The label is more likely if a certain item has a large weight."""
    draw = random.Random(1)
    bags = [
        [(f"item {draw.randrange(5)}", draw.choice([0.0, 3.0])) for _ in range(draw.randrange(4))] for _ in range(2000)
    ]
    click = [draw.random() < 0.05 + 0.25 * min(3, sum(w for item, w in bag if item == "item 0")) for bag in bags]
    pair = pa.struct([("item", pa.string()), ("weight", pa.float32())])
    pq.write_table(pa.table({"history": pa.array(bags, pa.list_(pair)), "click": click}), path)


def write_ffm(path: Path) -> None:
    """Write two fields, one of them with values. The label is more likely if index 3 of field 1 has a large value."""
    draw = random.Random(2)
    lines = []
    for _ in range(2000):
        pairs = [f"0:{draw.randrange(40)}:1", *(f"1:{draw.randrange(5)}:{draw.choice([0.1, 3])}" for _ in range(2))]
        lines.append(f"{2 * (draw.random() < 0.05 + 0.8 * ('1:3:3' in pairs)) - 1:+d} {' '.join(pairs)}\n")
    path.write_text("".join(lines))


@pytest.mark.parametrize(
    ("name", "write", "features"),
    [
        (
            "log.csv",
            write_csv,
            dict.fromkeys(("user_id", "city", "time.hour", "time.weekday"), (False, False)),
        ),
        ("log.ffm", write_ffm, {"field_0": (True, False), "field_1": (True, True)}),
        pytest.param("log.parquet", write_parquet, {"history": (True, True)}, marks=pytest.mark.soak),
    ],
)
def test_one_command_from_file_to_report(
    tmp_path: Path,
    output_of: Output,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    write: Callable[[Path], None],
    features: dict[str, tuple[bool, bool]],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / name)
    printed = output_of("train", "--data", name, *SMALL)
    assert "columns, as inferred:" in printed and "--print-schema" in printed
    sparse = [column for column in Dataset.load("runs/log/data").sparse if column.encoding != "buckets"]
    assert {s.name: (s.multi_valued, s.weighted) for s in sparse} == features
    assert float(printed.split("test AUC ")[1].split()[0]) > 0.7
    assert printed.endswith("report: runs/log/report.html\n")
    assert Path("runs/log/report.html").stat().st_size > 1000
    config = yaml.safe_load(Path("runs/log/config.yaml").read_text())
    assert (config["train"]["batch_size"], config["data"]["dir"]) == (32, "runs/log/data")


@pytest.fixture
def clicks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File clicks.csv in the current folder."""
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "clicks.csv")
    return tmp_path / "clicks.csv"


def test_prepared_files_are_taken_as_they_are_until_something_changes(
    clicks: Path, output_of: Output, error_of: Output
) -> None:
    settings = [*SMALL, "train.max_steps=2"]
    output_of("train", "--data", "clicks.csv", *settings, "data.dir=prepared", "run_dir=runs/a")
    before = Path("prepared/dataset.json").stat().st_mtime_ns
    printed = output_of("train", "--data", "click?.csv", *settings, "data.dir=prepared", "run_dir=runs/b")
    assert "columns, as inferred" not in printed and Path("prepared/dataset.json").stat().st_mtime_ns == before
    command = ["train", "--data", "clicks.csv", *settings, "data.dir=prepared", "run_dir=runs/c"]
    (clicks.parent / "more.csv").write_text(clicks.read_text())
    assert "more.csv' was not one of its sources" in error_of(*command, "--data", "more.csv")
    assert 'the option label was null and is "price" now' in error_of(*command, "--label", "price")
    os.utime(clicks, ns=(0, 0))
    refusal = error_of(*command)
    assert "clicks.csv' has changed, or" in refusal and "use --force to prepare it again" in refusal
    (clicks.parent / "prepared/prepare.json").unlink()
    assert "it has no record of its sources" in error_of(*command)
    assert not Path("runs/c").exists()
    shutil.rmtree("prepared")
    output_of(*command)


def test_a_tenth_is_kept_for_choosing_and_known_to_eval_and_predict(clicks: Path, output_of: Output) -> None:
    settings = [*SMALL, "train.max_steps=2"]
    printed = output_of("train", "--data", "clicks.csv", *settings)
    dataset = Dataset.load("runs/clicks/data")
    num_rows = dataset.splits["valid"].num_rows
    assert dataset.valid_fraction == 0.1 and 150 < num_rows < 250
    assert f"  valid {num_rows:>13,} rows, 1 files" in printed
    evaluation = json.loads(output_of("eval", "runs/clicks", "--split", "valid"))
    assert (evaluation["split"], evaluation["num_samples"]) == ("valid", num_rows)
    printed_line = output_of("predict", "runs/clicks", "--split", "valid", "--out", "valid.parquet")
    assert printed_line == f"wrote {num_rows:,} predictions of valid to valid.parquet\n"
    labels = pq.read_table("runs/clicks/data/valid", columns=["label"])["label"]
    assert pq.read_table("valid.parquet")["label"].to_pylist() == labels.to_pylist()


def test_files_for_choosing_and_testing(clicks: Path, output_of: Output, error_of: Output) -> None:
    settings = [*SMALL, "train.max_steps=2"]
    with clicks.open(newline="") as file:
        header, *rows = list(csv.reader(file))
    for day in range(3):
        with Path(f"day_{day}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([header, *rows[day * 600 : (day + 1) * 600 - 100 * day]])
    command = ["train", "--data", "day_*.csv", "--test-files", "day_2.csv", *settings]
    output_of(*command, "--valid-files", "day_1.csv")
    sizes = {name: split.num_rows for name, split in Dataset.load("runs/day/data").splits.items()}
    assert sizes == {"train": 600, "valid": 500, "test": 400}
    assert "is in another split" in error_of(*command)
    output_of(*command, "--valid-fraction", "0", "run_dir=runs/none")
    assert list(Dataset.load("runs/none/data").splits) == ["train", "test"]
    assert "--valid-files, --split-by needs raw files" in error_of(
        "train", "a=b", "--valid-files", "x", "--split-by", "y"
    )


def test_a_slip_in_the_config_comes_before_the_work(clicks: Path, error_of: Output) -> None:
    assert "did you mean 'epochs'?" in error_of("train", "--data", "clicks.csv", "train.epoch=2")
    assert "key 'run_dir'" in error_of("train", "--data", "clicks.csv", "run_dir=[1]")
    assert "key 'data'" in error_of("train", "--data", "clicks.csv", "data=3")
    assert "absent.yaml" in error_of("train", "absent.yaml", "--data", "clicks.csv")
    assert "no training data" in error_of("train")
    assert "add --data" in error_of("train", "a=b", "--label", "x")
    assert "no such file" in error_of("train", "--data", "absent.csv")
    assert [path.name for path in clicks.parent.iterdir()] == ["clicks.csv"]


def test_a_config_overrides_the_defaults_for_raw_files(clicks: Path, output_of: Output) -> None:
    Path("c.yaml").write_text("run_dir: mine\ntrain: {batch_size: 100, max_steps: 1}\ndata:\n")
    output_of("train", "c.yaml", "--data", "clicks.csv", *SMALL[:3])
    config = yaml.safe_load(Path("mine/config.yaml").read_text())
    assert (config["train"]["batch_size"], config["data"]["dir"]) == (100, "mine/data")


def test_the_first_of_several_ranks_prepares_and_the_others_wait(clicks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = PrepareOptions(sources=["clicks.csv"], out=Path("out"))
    with ThreadPoolExecutor(1) as pool:
        with monkeypatch.context() as patch:
            patch.setenv("RANK", "1")
            waiting = pool.submit(train._ensure_prepared, options)
            time.sleep(0.5)
            assert not waiting.done() and not Path("out").exists()
        prepared = train._ensure_prepared(options)
        assert waiting.result(60) == prepared


def test_two_ranks_from_a_raw_file(clicks: Path) -> None:
    options = (*SMALL, "train.batch_size=100", "train.epochs=4", "--nproc", 2)
    command = Command(clicks.parent, "train", "--data", "clicks.csv", *options).succeed()
    printed = command.out.read_text()
    assert printed.count("columns, as inferred:") == 1 and "2 ranks" in printed
    assert float(printed.split("test AUC ")[1].split()[0]) > 0.7


@pytest.mark.parametrize(
    ("pattern", "run_dir"),
    [
        ("clicks.csv", "runs/clicks"),
        ("logs/day_1.tsv.gz", "runs/day_1"),
        ("logs/day_*.tsv", "runs/day"),
        ("logs/*.parquet", "runs/logs"),
        ("s3://bucket/logs/2026-01-??/*.csv.gz", "runs/2026-01"),
        ("memory://*", "runs/first"),
        ("a b/[0-9]", "runs/a_b"),
    ],
)
def test_a_run_is_called_after_its_files(pattern: str, run_dir: str) -> None:
    assert default_run_dir([pattern, "other"]) == run_dir


def test_batches_of_small_data_are_small() -> None:
    sizes = [default_batch_size(rows) for rows in (1, 6_400, 12_799, 12_800, 100_000, 409_600, 10**9)]
    assert sizes == [32, 32, 32, 64, 256, 2048, 2048]


def test_columns_with_names_longer_than_those_of_files(
    tmp_path: Path, output_of: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["x" * 300, "x" * 301, "列" * 100]
    rows = [[str(row % 2), *(f"{name[0]}{row % 3}" for name in names)] for row in range(200)]
    Path("long.csv").write_text("\n".join(map(",".join, [["label", *names], *rows])))
    output_of("prepare", "long.csv", "--out", "data", "--vocabulary", "--min-count", "1")
    assert [column.name for column in Dataset.load("data").sparse] == names
    document = {"run_dir": "run", "data": {"dir": "data"}, "num_threads": 1}
    document |= {"model": {"name": "logistic_regression", "embedding_dim": 1}, "train": {"batch_size": 100}}
    Path("c.yaml").write_text(yaml.safe_dump(document))
    output_of("train", "c.yaml")
    output_of("eval", "run")
    output_of("checkpoint", "export", "run", "--out", "tables")
    assert len(list(Path("tables/tables").iterdir())) == 3
