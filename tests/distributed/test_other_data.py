"""Data that differ from those of training are rejected by eval, predict, train and verify, on one rank and on two."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from meseta.checkpoint.files.digest import hash_manifest
from meseta.cli.main import main
from meseta.comm import World
from meseta.config import RunConfig
from meseta.data.prepare import PrepareOptions, prepare
from meseta.spec import MesetaError
from meseta.train.predictions import write_predictions
from meseta.train.trained_model import load_trained
from meseta.train.trainer import Trainer
from meseta.train.verify import record
from small_run import manifest, settings, train, write_config

from .pool import RankPool
from .scenario import IS_SOAK
from .test_training import ROW_WISE

Ranks = Callable[[int], RankPool]
Change = Callable[[dict[str, Any]], Any]


def feature(document: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in [*document["dense"], *document["sparse"]] if one["name"] == name)


def rename(document: dict[str, Any], old: str, new: str) -> None:
    feature(document, old)["name"] = new


SPOILS: dict[str, tuple[Change, str]] = {
    "permuted": (lambda d: feature(d, "city").update(vocabulary_digest="0" * 64), "sparse feature 'city': vocabulary"),
    "mean": (lambda d: feature(d, "price").update(mean=0.5), "dense column 'price': mean, which was"),
    "deviation": (lambda d: feature(d, "price").update(std=0.5), "dense column 'price': deviation, which was"),
    "fill": (lambda d: feature(d, "price").update(fill=1.0), "dense column 'price': fill value, which was 0.0"),
    "buckets": (lambda d: feature(d, "age.bucket").update(boundaries=[30, 51]), "'age.bucket': buckets, whose"),
    "seed": (lambda d: feature(d, "shop").update(hash_seed="0x7"), "sparse feature 'shop': seed of the hash"),
    "cross": (lambda d: feature(d, "both").update(made_of=["shop", "age"]), "'both': columns that it is made of"),
    "dense order": (lambda d: d["dense"].reverse(), "order of the dense columns: number 1 was 'price'"),
    "sparse order": (lambda d: d["sparse"].reverse(), "order of the sparse features: number 1 was"),
    "renamed": (lambda d: rename(d, "both", "pair"), "sparse feature 'both' is missing now (and 1 other difference"),
    "label": (
        lambda d: (d.update(label_source="buy"), d["source_form"].update(labels=["buy"])),
        "label, which was column 'click' and is 'buy' now",
    ),
}  # fmt: skip
OTHER_ROWS: dict[str, tuple[Change, str]] = {
    "rows": (lambda d: d["splits"]["train"].update(num_positives=1), "other rows, as splits in dataset.json shows"),
    "statistics": (lambda d: feature(d, "city")["statistics"].update(num_uniques=1), "other rows, as statistics in"),
}
"""Differences that allow an evaluation but no further training."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a prepared dataset with every kind of encoding. Feature 'shop' is hashed, although `prepare` gives all a
    vocabulary."""
    folder = tmp_path_factory.mktemp("other_data")
    lines = [f"{n % 3 == 0:d},{n % 7},{n % 11},{n % 60},c{n * n % 13},s{n % 9}" for n in range(300)]
    (folder / "raw.csv").write_text("\n".join(["click,price,stock,age,city,shop", *lines]) + "\n")
    schema = {"label": "click", "dense": ["price", "stock"], "categorical": ["city", "shop"]}
    schema |= {"buckets": {"age": [30, 50]}, "crosses": {"both": ["city", "age"]}}
    (folder / "schema.yaml").write_text(json.dumps(schema))
    options = {"vocabulary": True, "min_count": 2, "test_fraction": 0.2, "schema": folder / "schema.yaml"}
    prepare(PrepareOptions(sources=[str(folder / "raw.csv")], out=folder / "data", **options))  # type: ignore[arg-type]
    change(folder / "data", lambda d: feature(d, "shop").update(
        encoding="hash", hash_seed="0x5", vocabulary=None, vocabulary_digest=None))  # fmt: skip
    return folder / "data"


def change(folder: Path, spoil: Change) -> None:
    document = json.loads((folder / "dataset.json").read_text())
    spoil(document)
    (folder / "dataset.json").write_text(json.dumps(document))


@pytest.fixture
def run(data: Path, tmp_path: Path) -> Path:
    """Return a run of two steps."""
    train(config(data, tmp_path / "run", 2))
    return tmp_path / "run"


def config(data: Path, run_dir: Path, max_steps: int) -> dict[str, Any]:
    return settings(data, run_dir, train__max_steps=max_steps, train__batch_size=60, num_threads=1, plan=ROW_WISE)


def spoilt(data: Path, folder: Path, spoils: dict[str, tuple[Change, str]]) -> list[Path]:
    """Return a copy of the data for each change. No Parquet file is read."""
    copies = []
    for name, (spoil, _) in spoils.items():
        copies.append(Path(shutil.copytree(data, folder / name.replace(" ", "-"))))
        change(copies[-1], spoil)
    return copies


def messages_of_commands(run_dir: Path, folder: Path, copies: Sequence[Path]) -> list[list[str]]:
    """Return the errors of eval and predict, train, and verify for each copy. Runs on every rank."""
    world, messages = World.current(), []
    for copy in copies:
        document = RunConfig.model_validate(config(copy, run_dir, 4))
        actions: list[Callable[[], Any]] = [
            lambda copy=copy: load_trained(run_dir, "test", world, copy),  # type: ignore[misc]
            lambda document=document: Trainer(document, world).run(),  # type: ignore[misc]
            lambda document=document: record(document, world, folder, 1),  # type: ignore[misc]
        ]
        messages.append([refusal(action) for action in actions])
    return messages


def refusal(action: Callable[[], Any]) -> str:
    try:
        action()
    except MesetaError as error:
        return str(error)
    return "not refused"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_messages(
    messages: list[list[list[str]]], spoils: dict[str, tuple[Change, str]], only: slice = slice(None)
) -> None:
    """Check messages by rank, copy and command."""
    for of_rank in messages:
        for (name, (_, message)), of_copy in zip(spoils.items(), of_rank, strict=True):
            for text in of_copy[only]:
                assert message in text and "run_dir" in text and "\n" not in text, (name, text)


@pytest.mark.parametrize("size", [1, 2])
def test_other_data_are_rejected_by_all_commands(
    ranks: Ranks, data: Path, run: Path, tmp_path: Path, size: int
) -> None:
    before = contents(run)
    pool = [messages_of_commands] if size == 1 else []
    spoilt_encodings, other_rows = SPOILS, OTHER_ROWS
    if size > 1 and not IS_SOAK:
        spoilt_encodings = {name: SPOILS[name] for name in ("permuted", "dense order", "label")}
        other_rows = {"rows": OTHER_ROWS["rows"]}
    for spoils, only in ((spoilt_encodings, slice(None)), (other_rows, slice(1, 2))):
        copies = spoilt(data, tmp_path / "copies" / str(len(spoils)), spoils)
        messages = [f(run, tmp_path, copies) for f in pool] or ranks(2).run(messages_of_commands, run, tmp_path, copies)
        assert len(messages) == size
        check_messages(messages, spoils, only)
    assert contents(run) == before


@pytest.mark.parametrize("command", ["eval", "predict", "train", "verify"])
def test_commands_name_the_difference_and_a_remedy(
    command: str,
    data: Path,
    run: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [copy] = spoilt(data, tmp_path, {"permuted": SPOILS["permuted"]})
    path = write_config(tmp_path / "run.yaml", config(copy, run, 4))
    arguments = {
        "eval": ["eval", str(run), "--data", str(copy)],
        "predict": ["predict", str(run), "--data", str(copy), "--out", str(tmp_path / "out.parquet")],
        "train": ["train", str(path)],
        "verify": ["verify", str(path), "--nproc", "1", "--steps", "1", "--record-to", str(tmp_path)],
    }[command]
    monkeypatch.setattr(sys, "argv", ["meseta", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1
    error = capfd.readouterr().err
    way_out = "choose another run_dir, or start from the beginning with --force"
    if command in ("eval", "predict"):
        way_out = f"prepare them in one call with the sources of '{data}', as --test-files"
    digest = json.loads((data / "dataset.json").read_text())["sparse"][0]["vocabulary_digest"]
    assert (
        f"error: run_dir '{run}' was trained on other data than those of '{copy}': sparse feature 'city': vocabulary, "
        f"whose SHA-256 was {digest[:8]}... and is 00000000... now; "
        f"{way_out}\n"
    ) in error
    assert not (tmp_path / "out.parquet").exists()


def accept(run_dir: Path, folder: Path, data: Path) -> tuple[int, int, int]:
    """Return the steps of eval, the rows of predict, and the steps of train. Runs on every rank."""
    world = World.current()
    trained = load_trained(run_dir, "test", world, data)
    num_rows = write_predictions(trained.model, trained.reader, world, folder / "out.parquet")
    record(RunConfig.model_validate(config(data, run_dir, 3)), world, folder, 1)
    steps = Trainer(RunConfig.model_validate(config(data, run_dir, 3)), world).run()["num_steps"]
    return trained.step, num_rows, steps


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_equal_content_under_another_path_is_accepted(
    ranks: Ranks, data: Path, run: Path, tmp_path: Path, size: int
) -> None:
    copy = Path(shutil.copytree(data, tmp_path / "elsewhere"))
    results = [accept(run, tmp_path, copy)] if size == 1 else ranks(2).run(accept, run, tmp_path, copy)
    num_test = json.loads((data / "dataset.json").read_text())["splits"]["test"]["num_rows"]
    assert results == [(2, num_test, 3)] * size


def test_a_checkpoint_alone_is_enough_to_compare(data: Path, run: Path, tmp_path: Path) -> None:
    """A mirror has the checkpoints alone."""
    (run / "dataset.json").unlink()
    copies = spoilt(data, tmp_path, {"mean": SPOILS["mean"]})
    check_messages([messages_of_commands(run, tmp_path, copies)], {"mean": SPOILS["mean"]})


def make_older(run: Path) -> None:
    """Rewrite a run as by a version that stored neither digests nor the encoding of the training data."""
    forget(run)
    document = manifest(run)
    del document["state"]["encoding"]
    document["manifest_checksum"] = hash_manifest(document)
    (run / "checkpoints/step-000000002/manifest.json").write_text(json.dumps(document))


def forget(folder: Path) -> None:
    def without(document: dict[str, Any]) -> None:
        del document["label_source"]
        for one in document["sparse"]:
            one.pop("vocabulary_digest", None)
            one.pop("test_lookups", None)

    change(folder, without)


def test_an_older_run_is_compared_as_far_as_recorded(
    data: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_older(run)
    source = Path(shutil.copytree(data, tmp_path / "source"))
    path = run / "config.yaml"
    path.write_text(path.read_text().replace(str(data), str(source)))
    cases = {name: SPOILS[name] for name in ("permuted", "mean")}
    check_messages([messages_of_commands(run, tmp_path, spoilt(data, tmp_path / "copies", cases))], {
        name: (spoil, message) for name, (spoil, message) in cases.items()
    })  # fmt: skip
    capsys.readouterr()
    assert load_trained(run, "test", World.single(), source).step == 2
    text = capsys.readouterr().err
    assert "note: the name of the label cannot be compared, because an older version did not record it" in text
    shutil.rmtree(source)  # deletes the vocabularies, too
    assert load_trained(run, "test", World.single(), data).step == 2
    assert "note: the name of the label and 2 more cannot be compared" in capsys.readouterr().err


def open_apart(run_dir: Path, data: Path, other: Path) -> str:
    """Return the error of ranks whose hosts have different data under one path."""
    world = World.current()
    return refusal(lambda: load_trained(run_dir, "test", world, other if world.rank else data))


def test_ranks_with_different_data_are_rejected_on_all(ranks: Ranks, data: Path, run: Path, tmp_path: Path) -> None:
    [other] = spoilt(data, tmp_path, {"rows": OTHER_ROWS["statistics"]})
    for text in ranks(2).run(open_apart, run, data, other):
        assert "rank 1 and rank 0 have different files dataset.json" in text
