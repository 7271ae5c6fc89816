"""`meseta prepare --like RUN --as train`: the next part has the encoding of the first one, also with other columns."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bad_input.commands import run_here
from data.click_log import read_split
from data.new_files import KINDS, NUM_ROWS, NUM_TRAIN
from data.test_growth import LOGS, Days
from data.test_resume_prepare import interrupted, kill, small, tree, write_sources  # noqa: F401
from meseta.data import Dataset, PrepareOptions, Reader, ReaderOptions
from meseta.data.dataset.check import check_dataset
from meseta.data.dataset.describe import describe
from meseta.data.dataset.statistics import read_touched
from meseta.data.prepare import load_prepared, prepare, with_training_defaults
from meseta.data.prepare.copy_tables import copy_tables
from meseta.spec import MesetaError

NAMES = ["click", "user", "item", "price"]


def draw_rows(day: int, num_rows: int = 120) -> list[list[Any]]:
    """Return rows of a day whose users leave over time."""
    draw = np.random.default_rng(day)
    users = day * 10 + np.minimum(draw.geometric(0.1, num_rows), 40)
    items, prices = draw.integers(12, size=num_rows), draw.gamma(2, size=num_rows)
    return [[i % 2, f"u{user}", f"i{item}", f"{price:.3f}"] for i, (user, item, price) in
            enumerate(zip(users, items, prices, strict=True))]  # fmt: skip


def write_rows(path: Path, rows: Sequence[Sequence[Any]], names: Sequence[str] = NAMES) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, *rows])
    return path


def first(folder: Path, **options: Any) -> Dataset:
    source = write_rows(folder / "0.csv", draw_rows(0))
    chosen = {"vocabulary": True, "min_count": 3, "test_fraction": 0.0, "buckets": ["price=4"], **options}
    return prepare(PrepareOptions(sources=[str(source)], out=folder / "0", **chosen))


def follow(folder: Path, day: int, like: Path, out: str | None = None, **options: Any) -> Dataset:
    source = write_rows(folder / f"{day}.csv", draw_rows(day))
    return prepare(PrepareOptions(sources=[str(source)], out=folder / (out or str(day)), like=like, **options))


def words(dataset: Dataset, feature: str = "user") -> list[str | None]:
    return pq.read_table(dataset.dir / "vocabulary" / f"{feature}.parquet")["value"].to_pylist()


def ids(dataset: Dataset, feature: str = "user") -> list[int]:
    return read_split(dataset.dir, "train")[feature].to_pylist()


@pytest.mark.parametrize("vocabulary", [pytest.param(False, marks=pytest.mark.soak), True])
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.soak] * (kind != "csv")) for kind in KINDS])
def test_training_rows_have_the_earlier_encoding(tmp_path: Path, kind: str, vocabulary: bool) -> None:
    """Rows of every kind of column equal those of the test split of the first preparation."""
    train, test, _, options = KINDS[kind](tmp_path)
    before = prepare(
        PrepareOptions(
            sources=list(map(str, train)), test_files=[str(test)], out=tmp_path / "data", hash_rows=70, min_count=2,
            vocabulary=vocabulary, seed=5, **options,
        )
    )  # fmt: skip
    after = prepare(PrepareOptions(sources=[str(test)], out=tmp_path / "next", like=before.dir))
    assert read_split(after.dir, "train").equals(read_split(before.dir, "test"))
    assert list(after.splits) == ["train"] and not check_dataset(after.dir).faults
    assert (after.dense, after.seed, after.source_form, after.part) == (before.dense, 5, before.source_form, 1)
    for now, former in zip(after.sparse, before.sparse, strict=True):
        assert now.vocabulary_digest == former.vocabulary_digest and now.hash_seed == former.hash_seed
        assert now.statistics.num_rows == NUM_ROWS - NUM_TRAIN and now.test_lookups == former.test_lookups
    split = prepare(PrepareOptions(sources=[str(test)], out=tmp_path / "split", like=after.dir, valid_fraction=0.3))
    assert set(split.splits) == {"train", "valid"} and split.splits["valid"].num_rows > 20


def test_a_chain_of_growing_vocabularies(tmp_path: Path) -> None:
    """Each day has the ids of its vocabulary, known values keep their rows, and one preparation finds the same."""
    dataset = first(tmp_path)
    for day in range(1, 3):
        before = words(dataset)
        run = tmp_path / f"run-{day}"
        run.mkdir()
        copy_tables(dataset, run).save(run)  # as a run folder keeps it
        dataset = follow(tmp_path, day, run, grow=True)
        assert words(dataset)[: len(before)] == before and dataset.part == day + 1 and dataset.min_count == 3
        rows = {word: row for row, word in enumerate(words(dataset))}
        assert ids(dataset) == [rows.get(row[1], 0) for row in draw_rows(day)]
        assert dataset.dense == Dataset.load(tmp_path / "0").dense and not check_dataset(dataset.dir).faults
        user = next(feature for feature in dataset.sparse if feature.name == "user")
        assert user.num_added == len(words(dataset)) - len(before) > 0 and user.num_retired == 0
        assert user.statistics.num_uniques == len({*ids(dataset)})
    counts = Counter(row[1] for day in range(3) for row in draw_rows(day))
    assert {*words(dataset)[1:]} == {user for user, number in counts.items() if number >= 3}
    whole = prepare(
        PrepareOptions(
            sources=[f"{tmp_path}/[0-9].csv"], out=tmp_path / "whole", vocabulary=True, min_count=3, test_fraction=0.0
        )
    )
    assert {*words(whole)} == {*words(dataset)} and {*words(whole, "item")} == {*words(dataset, "item")}


def test_retired_values_free_their_rows(tmp_path: Path) -> None:
    dataset = first(tmp_path)
    sizes = [len(words(dataset))]
    for day in range(1, 3):
        dataset = follow(tmp_path, day, dataset.dir, grow=True, retire_after=1)
        sizes.append(len(words(dataset)))
        seen = {row[1] for row in draw_rows(day)}
        assert {word for word in words(dataset)[1:] if word is not None} <= seen
        assert not check_dataset(dataset.dir).faults
    assert max(sizes) < 2 * sizes[0]
    source = write_rows(tmp_path / "few.csv", draw_rows(2, 30) * 2)
    few = prepare(
        PrepareOptions(sources=[str(source)], out=tmp_path / "few", like=dataset.dir, grow=True, retire_after=1)
    )
    assert None in words(few)[1:] and len(words(few)) == len(words(dataset)) and not check_dataset(few.dir).faults
    same = prepare(PrepareOptions(sources=[str(source)], out=tmp_path / "same", like=few.dir))
    assert ids(same) == ids(few) and words(same) == words(few)
    word, row = next((word, row) for row, word in enumerate(words(few)) if word and row in ids(few))
    batches = Reader(few, "train", ReaderOptions(batch_size=500, filter=f"user == {word!r}")).epoch()
    assert sum(batch.batch_size for batch in batches) == ids(few).count(row)
    user = next(feature for feature in describe(few).sparse if feature.name == "user")
    assert [top.value for top in user.top] == [words(few)[top.id] for top in user.top]


def test_another_count_keeps_everything_else(tmp_path: Path) -> None:
    before = first(tmp_path)
    after = follow(tmp_path, 5, before.dir, recount=True)
    alone = prepare(
        PrepareOptions(sources=[f"{tmp_path}/5.csv"], out=tmp_path / "alone", vocabulary=True, min_count=3,
                       test_fraction=0.0, buckets=["price=4"])
    )  # fmt: skip
    assert words(after) == words(alone) and ids(after) == ids(alone)
    assert after.dense == before.dense != alone.dense
    cut, former = (next(f for f in one.sparse if f.encoding == "buckets") for one in (after, before))
    assert cut.boundaries == former.boundaries


def test_touched_rows_are_those_of_all_parts(tmp_path: Path) -> None:
    dataset = first(tmp_path, vocabulary=False, hash_rows=300)
    seen = {*ids(dataset)}
    for day in (1, 2):
        dataset = follow(tmp_path, day, dataset.dir, grow=True, test_fraction=0.2)
        seen |= {*ids(dataset)}
        bits = np.unpackbits(read_touched(dataset)["user"], bitorder="little")
        assert {*np.flatnonzero(bits).tolist()} == seen
        user = next(feature for feature in dataset.sparse if feature.name == "user")
        test = read_split(dataset.dir, "test")["user"].to_pylist()
        assert user.test_lookups is not None and user.test_lookups.num_unseen == sum(row not in seen for row in test)
    (tmp_path / "old").mkdir()
    copy_tables(dataset, tmp_path / "old").model_copy(update={"touched": None}).save(tmp_path / "old")
    assert follow(tmp_path, 3, tmp_path / "old", grow=True).touched is None


def test_columns_come_and_go(tmp_path: Path) -> None:
    before = first(tmp_path)
    rows = [[*row[:3], f"c{number % 3}", f"{number % 7 - 3}", "5"] for number, row in enumerate(draw_rows(1))]
    write_rows(tmp_path / "new.csv", rows, [*NAMES[:3], "city", "balance", "other"])
    options: dict[str, Any] = {"sources": [f"{tmp_path}/new.csv"], "like": before.dir, "grow": True}
    new = {"dense": ["balance", "user*"], "sparse": ["city"]}
    with pytest.raises(MesetaError, match="lacks 'price'; add the columns, or leave them out with --without price"):
        prepare(PrepareOptions(**options, **new, out=tmp_path / "none"))
    with pytest.raises(MesetaError, match="column 'user' cannot be dense, because it is a sparse feature"):
        prepare(PrepareOptions(**options, **new, without=["price"], out=tmp_path / "none"))
    new["dense"] = ["balance"]
    after = prepare(PrepareOptions(**options, **new, without=["price"], out=tmp_path / "after"))
    assert [feature.name for feature in after.dense] == ["balance"]
    assert [feature.name for feature in after.sparse] == ["user", "item", "city"] and not check_dataset(
        after.dir
    ).faults
    values = np.array([number % 7 - 3 for number in range(120)])
    logs = (np.sign(values) * np.log1p(np.abs(values))).astype(np.float32)
    assert after.dense[0].signed and after.dense[0].mean == pytest.approx(logs.mean(dtype=np.float64))
    assert words(after, "city") == [None, "c0", "c1", "c2"] and after.without == ("price", "price.bucket")
    (tmp_path / "schema.yaml").write_text(
        "label: click\ndense: [price, balance]\ncategorical: [user, item, city]\nbuckets: {balance: 3}\n"
    )
    rows = [[*row[:3], "c1", "2", row[3]] for row in draw_rows(2)]
    write_rows(tmp_path / "back.csv", rows, [*NAMES[:3], "city", "balance", "price"])
    again = prepare(
        PrepareOptions(sources=[f"{tmp_path}/back.csv"], like=after.dir, schema=tmp_path / "schema.yaml", grow=True,
                       out=tmp_path / "again")
    )  # fmt: skip
    assert [feature.name for feature in again.dense] == ["balance", "price"] and again.dense[0] == after.dense[0]
    assert [feature.name for feature in again.sparse] == ["user", "item", "city", "balance.bucket"]
    assert again.without == ("price.bucket",) and words(again, "city")[1:] == ["c0", "c1", "c2"]
    assert not check_dataset(again.dir).faults
    # Parquet lists the columns of features in another order.
    arrow = pacsv.read_csv(tmp_path / "back.csv")
    pq.write_table(arrow, tmp_path / "back.parquet")
    same = prepare(PrepareOptions(sources=[f"{tmp_path}/back.parquet"], like=again.dir, out=tmp_path / "same"))
    assert read_split(same.dir, "train").equals(read_split(again.dir, "train"))
    assert (same.source_form, same.part) == (again.source_form, 3)


def test_a_dataset_of_an_earlier_version_starts_counting(tmp_path: Path) -> None:
    before = first(tmp_path)
    for feature in ("user", "item"):
        (tmp_path / f"0/vocabulary/{feature}+candidates.parquet").unlink()
        path = tmp_path / f"0/vocabulary/{feature}.parquet"
        pq.write_table(pq.read_table(path).drop_columns(["last"]), path)
    document = json.loads((tmp_path / "0/dataset.json").read_text())
    del document["min_count"]
    for feature in document["sparse"]:
        feature.pop("candidates", None)
    (tmp_path / "0/dataset.json").write_text(json.dumps(document))
    assert Dataset.load(tmp_path / "0").sparse[0].vocabulary_digest == before.sparse[0].vocabulary_digest
    source = write_rows(tmp_path / "1.csv", draw_rows(1))
    ended = run_here("prepare", source, "--like", tmp_path / "0", "--grow", "--out", tmp_path / "1")
    assert (
        ended.code == 0 and ended.err.count("note: ") == 1 and "counting starts at zero for 'user', 'item'" in ended.err
    )
    after = Dataset.load(tmp_path / "1")
    counts = Counter(row[1] for row in draw_rows(1))
    new = {user for user, number in counts.items() if number >= 3} - {*words(before)}
    assert after.min_count == 3 and {*words(after)} == {*words(before), *new} and new
    assert f"  user: {len(new)} new values, {len(words(after))} rows" in ended.out


@pytest.mark.parametrize("stage", ["read", pytest.param("write", marks=pytest.mark.soak)])
def test_an_interrupted_part_resumes(tmp_path: Path, small: None, stage: str) -> None:  # noqa: F811
    before = first(tmp_path)
    write_rows(tmp_path / "1.csv", [row for day in (1, 2, 3) for row in draw_rows(day, 250)])
    options, other = (
        PrepareOptions(sources=[f"{tmp_path}/1.csv"], out=tmp_path / out, like=before.dir, grow=True, retire_after=1,
                       num_threads=1)
        for out in ("out", "other")
    )  # fmt: skip
    interrupted(options, stage, after_rows=600)
    calls: dict[str, int] = {}
    dataset = prepare(options, lambda stage, rows, share: calls.setdefault(stage, rows) and None)
    assert calls["read"] > 0 and prepare(other) and tree(tmp_path / "out") == tree(tmp_path / "other")
    assert with_training_defaults(options) == options and load_prepared(options) == dataset
    (before.dir / "dataset.json").rename(tmp_path / "moved.json")
    assert load_prepared(options, checks_like=False) == dataset
    with pytest.raises(MesetaError, match="cannot read dataset"):
        load_prepared(options)
    document = json.loads((tmp_path / "moved.json").read_text())
    (before.dir / "dataset.json").write_text(json.dumps({**document, "part": 3}))
    with pytest.raises(MesetaError, match="the dataset of --like has changed, or is another one"):
        load_prepared(options)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
def test_a_killed_part_resumes(tmp_path: Path, seed: int) -> None:
    (tmp_path / "first").mkdir()
    sources = write_sources(tmp_path / "first", "csv")
    options = {"vocabulary": True, "min_count": 2, "bad_rows": "skip", "test_fraction": 0.5}
    prepare(PrepareOptions(sources=sources, out=tmp_path / "before", **options))
    now = {"like": str(tmp_path / "before"), "grow": True, "retire_after": 1, "hash_rows": 100_000, "bad_rows": "skip"}
    (tmp_path / "next").mkdir()
    assert kill(tmp_path / "next", "csv", num_kills=6, seed=seed, **now) > 0


@pytest.mark.soak
@given(days=LOGS, min_count=st.integers(1, 3), retire_after=st.none() | st.integers(1, 2))
def test_days_of_files(days: list[list[bytes]], min_count: int, retire_after: int | None) -> None:
    """The files of `prepare` follow the counts of raw values."""
    oracle = Days(min_count, retire_after)
    with TemporaryDirectory() as name:
        folder, like = Path(name), None
        for part, day in enumerate([[b"a", *day] for day in days], start=1):
            texts = [value.decode(errors="ignore") for value in day]
            write_rows(folder / f"{part}.csv", [[0, 1, text] for text in texts], ["click", "price", "city"])
            first_options = {"vocabulary": True, "min_count": min_count, "sparse": ["city"], "test_fraction": 0.0}
            later_options = {"like": like, "grow": True, "retire_after": retire_after}
            options: dict[str, Any] = first_options if like is None else later_options
            like = folder / str(part)
            prepare(PrepareOptions(sources=[f"{folder}/{part}.csv"], out=like, **options))
            oracle.add([text.encode() for text in texts])
            table = pq.read_table(like / "vocabulary/city.parquet")
            assert table.set_column(0, "value", table["value"].cast(pa.large_binary())).to_pydict() == oracle.table()
            rows = [text.encode() for text in texts]
            assert ids(Dataset.load(like), "city") == [
                oracle.rows.index(v) + 1 if v in oracle.rows else 0 for v in rows
            ]


REFUSED = {
    "--grow needs an earlier dataset; add --like": ["--grow"],
    "--recount needs an earlier dataset; add --like": ["--recount"],
    "--without needs an earlier dataset; add --like": ["--without", "price"],
    "--as needs an earlier dataset; add --like": ["--as", "train"],
    "--as must be test or train, got 'valid'": ["--like", "0", "--as", "valid"],
    "--as test excludes --grow and --recount": ["--like", "0", "--as", "test", "--grow"],
    "--retire-after frees rows of a growing vocabulary": ["--like", "0", "--as", "train", "--retire-after", 2],
    "--retire-after must be at least 1, got 0": ["--like", "0", "--grow", "--retire-after", 0],
    "--grow and --recount exclude each other": ["--like", "0", "--grow", "--recount"],
    "--max-candidates must be at least 0, got -1": ["--max-candidates", -1],
    "--seed, --min-count cannot be combined with --like": ["--like", "0", "--grow", "--seed", 3, "--min-count", 2],
    "--dense cannot be combined with --like, which determines the encoding; omit one, or make training rows with --as":
        ["--like", "0", "--dense", "price"],
    "label 'price' is not that of": ["--like", "0", "--grow", "--label", "price"],
    "--without 'prise' is not a column of": ["--like", "0", "--grow", "--without", "prise"],
    "--without leaves no sparse feature of": ["--like", "0", "--grow", "--without", "user,item,price.bucket"],
    "cannot read dataset.json": ["--like", "nowhere", "--grow"],
}  # fmt: skip


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first(tmp_path)
    write_rows(tmp_path / "empty.csv", [])
    names = ["click", "buy", "city"]
    write_rows(tmp_path / "two.csv", [[0, 1, "a"], [1, 0, "b"]], names)
    write_rows(tmp_path / "unlabelled.csv", [["", "", "a"]] * 3, names)
    prepare(PrepareOptions(sources=["two.csv"], label=names[:2], test_fraction=0.0, out=tmp_path / "two"))
    write_rows(tmp_path / "bare.csv", [row[1:] for row in draw_rows(1)], NAMES[1:])
    cases = {message: ["0.csv", *options] for message, options in REFUSED.items()}
    cases["'empty.csv' contains no rows; leave it out"] = ["empty.csv", "--like", "0", "--grow"]
    cases["none of 3 rows has a label, so there is nothing new"] = ["unlabelled.csv", "--like", "two", "--as", "train"]
    cases["lacks 'click'; training needs the label 'click'"] = ["bare.csv", "--like", "0", "--as", "train"]
    for message, arguments in cases.items():
        ended = run_here("prepare", *arguments, "--out", tmp_path / "out")
        assert ended.code == 1 and len(ended.errors) == 1 and message in ended.errors[0], (message, ended.err)
        assert not list(tmp_path.glob("out*"))
    taken = run_here("prepare", "0.csv", "--like", "0", "--grow", "--label", "click", "--out", tmp_path / "out")
    assert taken.code == 0, taken.err
