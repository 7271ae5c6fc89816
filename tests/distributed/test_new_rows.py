"""Predictions of raw rows on several ranks have the bytes of one rank, and an error is raised on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from bad_input.commands import run_here, run_on_rank
from meseta.comm import World
from meseta.data.prepare import PrepareOptions, prepare
from meseta.spec import MesetaError
from meseta.train.predictions import write_raw_predictions
from meseta.train.trained_model import load_for_raw_rows
from small_run import settings, train

from .pool import RankPool
from .scenario import IS_SOAK
from .test_training import ROW_WISE

Ranks = Callable[[int], RankPool]


def predict_here(run_dir: Path, source: Path, out: Path, keys: list[str]) -> tuple[int, float | None]:
    """Return the number of rows, and the AUC if there are labels. Runs on every rank."""
    trained = load_for_raw_rows(run_dir, [str(source)], World.current(), keys=keys)
    written = write_raw_predictions(trained.model, trained.reader, trained.world, out)
    return written.num_rows, written.metrics["label"]["auc"] if written.metrics else None


def message_here(*arguments: object) -> str:
    """Return the error of a prediction. Runs on every rank."""
    with pytest.raises(MesetaError) as caught:
        predict_here(*arguments)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_the_same_bytes_on_several_ranks(ranks: Ranks, tiny: Path, tmp_path: Path, size: int) -> None:
    """331 rows in batches of 130: the last one has 71, so that slices differ in length."""
    train(settings(tiny, tmp_path / "run", train__max_steps=4, plan=ROW_WISE))
    table = pq.read_table(tiny.parent / "tiny.parquet").slice(0, 331)
    labelled, bare = tmp_path / "labelled.parquet", tmp_path / "bare.parquet"
    pq.write_table(table, labelled)
    pq.write_table(table.drop_columns(["label"]), bare)
    cases = [(labelled, "csv", ["user", "price"]), (bare, "parquet", ["tags"])]
    for source, suffix, keys in [*cases, (bare, "csv", [])] if IS_SOAK else cases:
        one, many = tmp_path / f"one.{suffix}", tmp_path / f"many.{suffix}"
        here = predict_here(tmp_path / "run", source, one, keys)
        assert ranks(size).run(predict_here, tmp_path / "run", source, many, keys) == [here] * size
        assert here[0] == 331 and (here[1] is None) == (source == bare)
        assert many.read_bytes() == one.read_bytes()


def test_average_of_runs_on_several_ranks(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """The runs have other batch sizes, and the last batch has other rows per rank than the first ones."""
    for run, batch_size in (("one", 130), ("two", 50)):
        changes = {"seed": batch_size, "train__eval_batch_size": batch_size}
        train(settings(tiny, tmp_path / run, train__max_steps=2, plan=ROW_WISE, **changes))
    pq.write_table(pq.read_table(tiny.parent / "tiny.parquet").slice(0, 331), tmp_path / "rows.parquet")
    runs = [str(tmp_path / run) for run in ("one", "two")]
    command = ["predict", *runs, "--data", str(tmp_path / "rows.parquet"), "--keys", "user,price", "--out"]
    here = run_here(*command, tmp_path / "here.csv")
    there = ranks(2).run(run_on_rank, [*command, str(tmp_path / "there.csv")])
    assert [here.code, *(ended.code for ended in there)] == [0, 0, 0], there
    assert (tmp_path / "there.csv").read_bytes() == (tmp_path / "here.csv").read_bytes()
    assert there[0].out.splitlines()[1:] == here.out.splitlines()[1:] and "AUC" in here.out


def test_errors_are_raised_on_every_rank(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    train(settings(tiny, tmp_path / "run", train__max_steps=2, plan=ROW_WISE))
    table = pq.read_table(tiny.parent / "tiny.parquet")
    pq.write_table(table.drop_columns(["user"]), tmp_path / "less.parquet")
    out = tmp_path / "p.csv"
    for source, keys, message in (
        (tmp_path / "less.parquet", [], "lacks 'user'"),
        (tiny.parent / "tiny.parquet", ["usr"], "has no column 'usr'"),
        (tiny.parent / "tiny.parquet", ["tags"], "CSV does not support"),
    ):
        messages = ranks(2).run(message_here, tmp_path / "run", source, out, keys)
        assert len(messages) == 2 and all(message in one for one in messages), messages
    assert not list(tmp_path.glob("*p.csv*"))


def unseen_here(run_dir: Path, source: Path, out: Path) -> tuple[list[tuple[str, float]], list[str]]:
    """Return shares and warnings of unseen values. Runs on every rank."""
    trained = load_for_raw_rows(run_dir, [str(source)], World.current(), allow_unseen=True)
    unseen = write_raw_predictions(trained.model, trained.reader, trained.world, out).unseen
    return unseen.shares(), unseen.warnings()


def test_unseen_values_on_several_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Every rank counts all rows, so that either all stop or none does."""
    lines = [f"{row % 2},u{row % 50}" for row in range(400)]
    (tmp_path / "log.csv").write_text("\n".join(["label,user", *lines]) + "\n")
    prepare(PrepareOptions(sources=[f"{tmp_path}/log.csv"], out=tmp_path / "data", vocabulary=True, min_count=1))
    train(settings(tmp_path / "data", tmp_path / "run", train__max_steps=2, plan=ROW_WISE))
    (tmp_path / "new.csv").write_text("\n".join(["user", *["u1"] * 10, *["v1"] * 990]) + "\n")
    out, size = tmp_path / "p.csv", 4 if IS_SOAK else 2
    messages = ranks(size).run(message_here, tmp_path / "run", tmp_path / "new.csv", out, [])
    assert len(messages) == size and all("99.00% of the 1,000 values of 'user' are unseen" in one for one in messages)
    assert not list(tmp_path.glob("*p.csv*"))
    here = unseen_here(tmp_path / "run", tmp_path / "new.csv", out)
    assert here[0] == [("user", 0.99)] and len(here[1]) == 1
    assert ranks(size).run(unseen_here, tmp_path / "run", tmp_path / "new.csv", out) == [here] * size
