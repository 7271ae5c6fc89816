"""Runs that start from another run: rows by value, settings, columns, and errors of one line."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from numpy.typing import NDArray
from sklearn.metrics import log_loss, roc_auc_score

from bad_input.commands import run_here
from checkpoint.arrow_rows import read_columns
from cli.processes import Command
from meseta import checkpoint
from meseta.checkpoint.files.digest import hash_manifest
from meseta.comm import World
from meseta.config import RunConfig
from meseta.data.prepare import PrepareOptions, prepare
from meseta.ops.random_rows import initial_rows
from meseta.spec import InitSpec, TableSpec
from meseta.train.trained_model import load_for_raw_rows
from meseta.train.trainer import Trainer
from small_run import final_checksum, settings, train

NUM_ROWS = 400


def write_day(path: Path, day: int, **more: Any) -> Path:
    """Write the rows of a day. Each day has ids that earlier days lack."""
    draw = np.random.default_rng(day)
    users, items = draw.integers(0, 60, NUM_ROWS) + 15 * day, draw.integers(0, 20, NUM_ROWS)
    bags = [[f"t{tag}" for tag in draw.integers(day, 12 + day, size)] for size in draw.integers(0, 4, NUM_ROWS)]
    columns = {
        "label": (users % 3 + items % 2 + draw.random(NUM_ROWS) > 2.2).astype(int),
        "price": np.exp(draw.normal(size=NUM_ROWS)).round(3),
        "user_id": [f"u{user}" for user in users],
        "item_id": [f"i{item}" for item in items],
        "tags": ["|".join(bag) for bag in bags],
        **{name: make(draw) for name, make in more.items()},
    }
    with path.open("w") as file:
        print(*columns, sep=",", file=file)
        for row in zip(*columns.values(), strict=True):
            print(*row, sep=",", file=file)
    return path


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the rows of three days, and a run `parent` on the first one."""
    folder = tmp_path_factory.mktemp("start")
    for day in range(3):
        write_day(folder / f"{day}.csv", day)
    prepare(
        PrepareOptions(
            sources=[str(folder / "0.csv")], out=folder / "data", vocabulary=True, min_count=2, test_fraction=0.1,
            multi_valued=["tags=|"],
        )
    )  # fmt: skip
    train(settings(folder / "data", folder / "parent", **MODEL))
    return folder


MODEL: dict[str, Any] = {
    "model__name": "deepfm",
    "embedding__init": {"kind": "uniform", "scale": None},
    "embedding__optimizer__name": "adam",
    "train__max_steps": 3,
}


def grow(days: Path, out: Path, day: int = 1, **options: Any) -> Path:
    prepare(PrepareOptions(sources=[str(days / f"{day}.csv")], out=out, like=days / "parent", grow=True, **options))
    return out


def columns_of(run_dir: Path) -> dict[str, dict[str, NDArray[Any]]]:
    """Return the values of the newest checkpoint by table and column."""
    return read_columns(max((run_dir / "checkpoints").glob("step-*")))


def values_of(folder: Path, feature: str) -> list[str | None]:
    values: list[str | None] = pq.read_table(folder / "vocabulary" / f"{feature}.parquet")["value"].to_pylist()
    return values


def save_before_first_step(document: dict[str, Any]) -> None:
    Trainer(RunConfig.model_validate(document), World.current()).save_initial_checkpoint(lambda model: None)


@pytest.mark.parametrize("new_rows", ["initial", "unknown"])
def test_rows_are_found_by_value(days: Path, tmp_path: Path, new_rows: str) -> None:
    data, seed = grow(days, tmp_path / "data"), 3
    document = settings(
        data, tmp_path / "child", **MODEL | {"embedding__init": {"scale": 0.25}}, seed=seed,
        start_from=str(days / "parent"), embedding__new_rows=new_rows, plan={"tables": {"*": "table_wise"}},
    )  # fmt: skip
    save_before_first_step(document)
    before, now = columns_of(days / "parent"), columns_of(tmp_path / "child")
    for feature in ("user_id", "item_id", "tags"):
        rows = {value: row for row, value in enumerate(values_of(days / "parent", feature)) if value is not None}
        values = values_of(data, feature)
        width = now[feature]["row"].shape[1]
        spec = TableSpec(name=feature, num_embeddings=len(values), embedding_dim=width, init=InitSpec(scale=0.25))
        initial = initial_rows(spec, rows=(0, len(values)), columns=(0, width), seed=seed, device="cpu").numpy()
        new = [row for row, value in enumerate(values) if row and value not in rows]
        assert new or feature == "item_id"
        for column, of_column in now[feature].items():
            for row, value in enumerate(values):
                if row == 0 or value in rows:
                    expected = before[feature][column][rows[value] if row and value is not None else 0]
                elif column == "row":
                    expected = before[feature]["row"][0] if new_rows == "unknown" else initial[row]
                else:
                    expected = np.zeros_like(of_column[row])
                assert np.array_equal(of_column[row], expected), (feature, column, row)


def test_one_command_a_day(days: Path, tmp_path: Path) -> None:
    """Settings are inherited, the parent's files stay, and the same command resumes without the parent."""
    parent = Path(shutil.copytree(days / "parent", tmp_path / "parent"))
    before = digests(parent)
    command = ("train", "--start-from", parent, "--data", days / "1.csv", f"run_dir={tmp_path / 'child'}")
    ended = run_here(*command)
    assert ended.code == 0, ended.err
    assert f"starting from {parent}/checkpoints/step-000000003" in ended.out + ended.err
    assert digests(parent) == before
    former, config = (yaml.safe_load((run / "config.yaml").read_text()) for run in (parent, tmp_path / "child"))
    assert config["model"] == former["model"] and config["embedding"]["optimizer"] == former["embedding"]["optimizer"]
    assert config["train"]["batch_size"] == former["train"]["batch_size"]
    assert (config["train"]["max_steps"], config["train"]["epochs"], config["data"]["shuffle"]) == (None, 1, False)
    # Without a scale, that of the parent depends on its number of rows.
    rows = len(values_of(parent, "user_id"))
    assert config["embedding"]["tables"]["user_id"]["init"]["scale"] == 1 / np.sqrt(rows)
    [saved] = (tmp_path / "child" / "checkpoints").glob("step-*")
    state = json.loads((saved / "manifest.json").read_text())["state"]
    steps = -(-NUM_ROWS // former["train"]["batch_size"])
    assert saved.name == f"step-{steps:09d}" and state["embedding_step"] == 3 + steps and state["num_samples"] == 400
    checksum = checkpoint.verify(saved)
    shutil.rmtree(parent)
    ended = run_here(*command)
    assert ended.code == 0, ended.err
    assert f"resuming from step {steps}" in ended.out + ended.err and checkpoint.verify(saved) == checksum


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_new_column_changes_no_prediction(days: Path, tmp_path: Path) -> None:
    more = {"age": lambda draw: draw.integers(18, 90, NUM_ROWS), "city": lambda draw: [
        f"c{city}" for city in draw.integers(0, 9, NUM_ROWS)
    ]}  # fmt: skip
    write_day(tmp_path / "wide.csv", 1, **more)
    command = ("train", "--start-from", days / "parent", "--data", tmp_path / "wide.csv", "--dense", "age", "--sparse")
    ended = run_here(*command, "city", f"run_dir={tmp_path / 'wide'}", "train.max_steps=1", "dense.optimizer.lr=0",
                     "embedding.optimizer.lr=0", "--no-grow")  # fmt: skip
    assert ended.code == 0, ended.err
    scores = []
    for run in (days / "parent", tmp_path / "wide"):
        out = tmp_path / f"{run.name}.parquet"
        assert run_here("predict", run, "--data", tmp_path / "wide.csv", "--out", out).code == 0
        scores.append(pq.read_table(out)["prediction"].to_numpy())
    np.testing.assert_allclose(*scores, rtol=0, atol=1e-6)
    assert np.ptp(scores[0]) > 0.05


def test_parts_that_are_not_loaded(days: Path, tmp_path: Path) -> None:
    data = grow(days, tmp_path / "data")
    common = {**MODEL, "start_from": str(days / "parent")}
    save_before_first_step(settings(data, tmp_path / "rows", **common, start={"load": ["tables"]}))
    save_before_first_step(settings(data, tmp_path / "reset", **common, start={"reset": ["tags", "dense"]}))
    before = columns_of(days / "parent")
    rows, reset = columns_of(tmp_path / "rows"), columns_of(tmp_path / "reset")
    assert np.array_equal(rows["user_id"]["row"][:20], before["user_id"]["row"][:20])
    assert not rows["user_id"]["exp_avg"].any() and before["user_id"]["exp_avg"].any()
    assert np.array_equal(reset["user_id"]["exp_avg"][:20], before["user_id"]["exp_avg"][:20])
    assert not reset["tags"]["exp_avg"].any()
    assert not (reset["tags"]["row"][:5] == before["tags"]["row"][:5]).all()


def change_step(path: Path, step: int) -> None:
    """Give a copied checkpoint another step."""
    document = json.loads((path / "manifest.json").read_text())
    del document["manifest_checksum"]
    document["step"] = step
    document["manifest_checksum"] = hash_manifest(document)
    (path / "manifest.json").write_text(json.dumps(document))


def test_errors_of_one_line(days: Path, tmp_path: Path) -> None:
    parent, data = days / "parent", ("--data", days / "1.csv")
    independent = tmp_path / "independent"
    prepare(
        PrepareOptions(
            sources=[str(days / "1.csv")], out=independent, vocabulary=True, min_count=2, multi_valued=["tags=|"]
        )
    )
    damaged = Path(shutil.copytree(parent, tmp_path / "damaged"))
    intact = shutil.copytree(next(damaged.glob("checkpoints/*")), damaged / "checkpoints" / "step-000000002")
    change_step(intact, 2)
    block = next(damaged.glob("checkpoints/step-000000003/tables/*/*.arrow"))
    block.write_bytes(block.read_bytes()[:-100])
    bare = Path(shutil.copytree(next(parent.glob("checkpoints/*")), tmp_path / "bare" / "step-000000003"))
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(parent / "config.yaml", empty)
    shutil.copy(parent / "dataset.json", empty)
    forgetful = Path(shutil.copytree(parent, tmp_path / "forgetful"))  # As of an older version.
    shutil.rmtree(forgetful / "vocabulary")
    config = yaml.safe_load((forgetful / "config.yaml").read_text())
    config["data"]["dir"] = str(tmp_path / "gone")
    (forgetful / "config.yaml").write_text(yaml.safe_dump(config))
    other_spelling = tmp_path / "other.csv"
    header, rows = (days / "1.csv").read_text().split("\n", 1)
    other_spelling.write_text(f"{header}\n" + 3 * re.sub(r",u(\d)", r",U\1", rows))
    cases: list[tuple[tuple[object, ...], str]] = [
        ((parent, *data, f"run_dir={parent}"), "is start_from itself; choose another run_dir"),
        ((tmp_path / "none", *data), "does not exist"),
        ((empty, *data), "is a run without a checkpoint"),
        ((damaged, *data), f"{str(intact)!r} is intact; start from it with --start-from"),
        ((forgetful, *data), "vocabulary"),
        ((bare, *data), "add --like RUN or DATASET"),
        ((parent, *data, "model.embedding_dim=12"), "embedding_dim 5 there, but 13 in the model"),
        ((parent, *data, "embedding.optimizer.name=sgd"), "set --load tables,dense, or reinitialize"),
        ((parent, *data, "dense.optimizer.name=sgd"), "the dense part was trained with Adam, but the config has SGD"),
        ((parent, *data, "model.dropout=0.5"), "has another model: model.dropout"),
        ((parent, *data, "--label", "price"), "price"),
        ((parent, f"data.dir={independent}"), "was encoded otherwise than that of start_from"),
        ((parent, *data, "--reset", "users"), "start.reset: 'users' is no sparse feature"),
        ((parent, "--data", other_spelling), "train: 100.00% of the 1,200 values of 'user_id' are unseen"),
    ]
    for number, (arguments, message) in enumerate(cases):
        ended = run_here("train", f"run_dir={tmp_path / f'run-{number}'}", "--start-from", *arguments)
        assert ended.code == 1, (arguments, ended.out)
        [error] = ended.errors
        assert message in error, (arguments, error)


def test_a_checkpoint_alone(days: Path, tmp_path: Path) -> None:
    """It needs the encoding of its data, and a config of the same model."""
    bare = Path(shutil.copytree(next((days / "parent").glob("checkpoints/*")), tmp_path / "bare" / "step-000000003"))
    document = yaml.safe_load((days / "parent" / "config.yaml").read_text())
    kept = {key: document[key] for key in ("model", "embedding", "dense")} | {"train": {"batch_size": 90}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(kept | {"data": {"shuffle": False}}))
    data = ("--data", days / "1.csv", "--no-grow")  # New rows would start at the scale of the config.
    alone = run_here("train", tmp_path / "config.yaml", "--start-from", bare, *data, "--like", days / "data",
                     f"run_dir={tmp_path / 'alone'}")  # fmt: skip
    whole = run_here("train", "--start-from", days / "parent", *data, f"run_dir={tmp_path / 'whole'}")
    assert alone.code == whole.code == 0, alone.err
    alone_columns = columns_of(tmp_path / "alone")
    for feature, columns in columns_of(tmp_path / "whole").items():
        assert all(np.array_equal(values, alone_columns[feature][name]) for name, values in columns.items())


def test_a_checkpoint_at_a_url(days: Path, tmp_path: Path) -> None:
    """Config and encoding are next to it, so that the run folder is not needed."""
    url = f"memory://bucket/{tmp_path.name}"
    train(settings(days / "data", tmp_path / "parent", **MODEL, checkpoint__dir=url))
    data = ("--data", days / "1.csv")
    shutil.move(tmp_path / "parent", tmp_path / "other-host")
    alone = run_here("train", "--start-from", url, *data, f"run_dir={tmp_path / 'alone'}")
    assert alone.code == 0, alone.err
    whole = run_here("train", "--start-from", tmp_path / "other-host", *data, f"run_dir={tmp_path / 'whole'}")
    assert whole.code == 0, whole.err
    alone_columns = columns_of(tmp_path / "alone")
    for feature, columns in columns_of(tmp_path / "whole").items():
        assert all(np.array_equal(values, alone_columns[feature][name]) for name, values in columns.items())
    for key in ("checkpoint.dir", "checkpoint.mirror"):
        same = run_here(
            "train", "--start-from", tmp_path / "other-host", *data, f"run_dir={tmp_path / key}", f"{key}={url}"
        )
        assert same.code == 1 and f"would be at {url!r}, where those of start_from are" in same.errors[0]
    filesystem = fsspec.filesystem("memory")
    filesystem.rm(f"/bucket/{tmp_path.name}/encoding/vocabulary/user_id.parquet")
    lacking = run_here("train", "--start-from", url, *data, f"run_dir={tmp_path / 'lacking'}")
    assert lacking.code == 1 and "lacks a file" in lacking.errors[0]
    assert not (tmp_path / "lacking" / "parent_encoding").exists()


def test_measurements_on_the_new_rows(days: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent's metrics are those of its predictions, and those of training of the logits before each update."""
    logits, labels, record = [], [], Trainer._record

    def record_and_keep(self: Trainer, result: Any) -> None:
        logits.append(result.logits.double().numpy().copy())
        labels.append(result.batch.label.numpy().copy())
        record(self, result)

    monkeypatch.setattr(Trainer, "_record", record_and_keep)
    run = tmp_path / "child"
    ended = run_here("train", "--start-from", days / "parent", "--data", days / "1.csv", f"run_dir={run}")
    assert ended.code == 0, ended.err
    continued = json.loads((run / "summary.json").read_text())["continued"]
    parent = load_for_raw_rows(days / "parent", [str(days / "1.csv")], World.single()).evaluate().to_dict()
    names = ("auc", "ne", "logloss", "calibration", "num_samples")
    assert {name: continued["test_first"]["total"][name] for name in names} == {name: parent[name] for name in names}

    score, clicked = np.concatenate(logits), np.concatenate(labels)
    total, probability = continued["progressive"]["total"], 1 / (1 + np.exp(-score))
    assert total["auc"] == pytest.approx(roc_auc_score(clicked, score), abs=1e-12)
    assert total["logloss"] == pytest.approx(log_loss(clicked, probability), rel=1e-6)
    known = {name: set(values_of(days / "parent", name)) - {None} for name in ("user_id", "item_id", "tags")}
    rows = [line.split(",") for line in (days / "1.csv").read_text().splitlines()[1:]]
    bags = [{*filter(None, tags.split("|"))} for *_, tags in rows]
    is_new = np.array([
        user not in known["user_id"] or item not in known["item_id"] or bool(bag - known["tags"])
        for (_, _, user, item, _), bag in zip(rows, bags, strict=True)
    ])  # fmt: skip
    group = continued["progressive"]["with_new_ids"]
    assert group["num_samples"] == is_new.sum() and 0 < is_new.sum() < NUM_ROWS
    assert group["auc"] == pytest.approx(roc_auc_score(clicked[is_new], score[is_new]), abs=1e-12)
    first, last = map(json.loads, (run / "history.jsonl").read_text().splitlines())
    assert (first["run"], last["run"], last["num_rows"]) == ("parent", "child", NUM_ROWS)
    assert last["progressive"]["total"] == total
    again = run_here("train", "--start-from", run, "--data", days / "1.csv", f"run_dir={tmp_path / 'again'}")
    assert again.code == 1 and "has nothing new to train on: run 'child'" in again.errors[0]
    again = run_here("train", "--start-from", run, "--data", days / "1.csv", "--again", f"run_dir={tmp_path / 'again'}")
    assert again.code == 0, again.err
    assert len((tmp_path / "again" / "history.jsonl").read_text().splitlines()) == 3


NUM_KILLS = 40


def continued_of(run_dir: Path) -> dict[str, Any]:
    """Return the measurements on new rows, without times."""
    continued: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())["continued"]
    del continued["test_first"]["time_s"]
    return continued


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_killed_commands_end_with_the_same_bits(days: Path, tmp_path: Path) -> None:
    """Kills at random moments of the preparation, the load, the steps and the saves, several of some runs."""
    parent = Path(shutil.copytree(days / "parent", tmp_path / "parent"))
    before, draw = digests(parent), random.Random(4)

    def command(run_dir: Path) -> list[object]:
        return ["train", "--start-from", parent, "--data", days / "1.csv", f"run_dir={run_dir}", "train.batch_size=20",
                "checkpoint.every_steps=3"]  # fmt: skip

    durations = []
    for name in ("whole", "again"):
        start_s = time.perf_counter()
        Command(tmp_path / "logs", *command(tmp_path / name)).succeed()
        durations.append(time.perf_counter() - start_s)
    expected, num_kills, number = final_checksum(tmp_path / "whole"), 0, 0
    while num_kills < NUM_KILLS:
        run_dir, number = tmp_path / f"run-{number}", number + 1
        for _ in range(draw.randint(1, 3)):
            killed = Command(tmp_path / "logs", *command(run_dir))
            time.sleep(draw.uniform(0.0, min(durations)))
            killed.send(signal.SIGKILL)
            num_kills += killed.wait() == -signal.SIGKILL
        Command(tmp_path / "logs", *command(run_dir)).succeed()
        assert final_checksum(run_dir) == expected, number
        assert continued_of(run_dir) == continued_of(tmp_path / "whole"), number
        assert digests(parent) == before
