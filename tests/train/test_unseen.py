"""Unseen values: counts of the test split, and new rows with too many, which `predict` refuses or warns about."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from bad_input.commands import Ended, run_here, tree
from data.new_files import Table, write_csv
from meseta.cli.prepare import print_unseen
from meseta.data.dataset.check import check_dataset
from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.records import SparseFeature
from meseta.data.dataset.statistics import UnseenValues
from meseta.data.hash_categories import reference
from meseta.data.prepare import PrepareOptions, prepare
from meseta.spec import MesetaError
from sampling import product, sample
from small_run import settings, train

NUM_TRAIN, NUM_TEST = 300, 200
HASH_ROWS = 3000
IN_TEST = {"never": 0, "seldom": 40, "often": 99, "half": 100, "more": 101, "always": 200, "tags": 0}
"""Number of unseen values of each feature in the test split, of 200. 'tags' has two values per row."""


class Seen:
    """Oracle of the values that training has seen: sets, and hashes in plain Python."""

    def __init__(self, feature: SparseFeature, values: list[str], min_count: int = 1) -> None:
        self._feature = feature
        times = Counter(map(self._row, values))
        self._rows = {row for row, number in times.items() if number >= (min_count if feature.vocabulary else 1)}

    def has(self, value: str) -> bool:
        return self._row(value) in self._rows

    def fresh(self) -> Iterator[str]:
        """Yield values that training has not seen."""
        return (value for value in map("n{}".format, count()) if not self.has(value))

    def _row(self, value: str) -> str | int:
        if self._feature.vocabulary:
            return value
        seed = int(self._feature.hash_seed or "", 16)
        return int(reference.hash_to_rows([value], self._feature.num_embeddings, seed)[0])


def expected_counts(dataset: Dataset, training: Table, test: Table, min_count: int) -> dict[str, Any]:
    """Return {feature: (lookups, unseen)} of `test`."""
    counts = {}
    for feature in dataset.sparse:
        if feature.encoding == "buckets":
            continue
        parts = [table[feature.name] for table in (training, test)]
        if feature.multi_valued:
            parts = [[value for cell in cells for value in cell.split("|") if value] for cells in parts]
        seen = Seen(feature, parts[0], min_count)
        counts[feature.name] = (len(parts[1]), sum(not seen.has(value) for value in parts[1]))
    return counts


def stored_counts(dataset: Dataset) -> dict[str, Any]:
    named = [(feature.name, feature.test_lookups) for feature in dataset.sparse]
    return {name: (counts.num_lookups, counts.num_unseen) for name, counts in named if counts is not None}


def rows(table: Table, places: Iterable[int]) -> Table:
    return {name: [values[place] for place in places] for name, values in table.items()}


SPLITS: dict[str, dict[str, Any]] = {"files": {"test_files": ["later.csv"]}, "time": {"test_after": "350"}}


@pytest.mark.parametrize(
    "case", sample(product(split=SPLITS, min_count=[0, 1, 2, 5], threads=[1, 4], recipe=[False, True]), 4, seed=2)
)  # fmt: skip
def test_counts_of_the_test_split(tmp_path: Path, case: dict[str, Any]) -> None:
    """`min_count` 0 means hashed values."""
    draw = random.Random(3)
    table = {
        "label": [draw.randrange(2) for _ in range(500)],
        "at": list(range(500)),
        "city": [draw.choice(["", f"c{draw.randrange(60 + row // 4)}"]) for row in range(500)],
        "shop": [f"s{int(300 * draw.random() ** 2)}" for _ in range(500)],
        "tags": ["|".join(f"t{draw.randrange(90)}" for _ in range(draw.randrange(4))) for _ in range(500)],
        "age": [draw.randrange(70) for _ in range(500)],
    }
    order = list(range(500))
    if case["split"] == "time":
        draw.shuffle(order)
    for name, places in (("first.csv", order[:350]), ("later.csv", order[350:])):
        write_csv(tmp_path / name, rows(table, places))
    schema = {"label": "label", "time": "at", "categorical": ["city", "shop", "tags"], "buckets": {"age": 4},
              "multi_valued": {"tags": "|"}}  # fmt: skip
    (tmp_path / "schema.yaml").write_text(json.dumps(schema))
    options = dict(SPLITS[case["split"]])
    options |= {"test_files": [str(tmp_path / "later.csv")]} if case["split"] == "files" else {}
    dataset = prepare(
        PrepareOptions(
            sources=[str(tmp_path / name) for name in ("first.csv", "later.csv")], out=tmp_path / "data",
            schema=tmp_path / "schema.yaml", vocabulary=case["min_count"] > 0, min_count=case["min_count"] or 1,
            hash_rows=400, num_threads=case["threads"], recipe_only=case["recipe"], **options,
        )
    )  # fmt: skip
    expected = expected_counts(dataset, rows(table, range(350)), rows(table, range(350, 500)), case["min_count"])
    assert stored_counts(dataset) == expected
    assert any(0 < unseen < lookups for lookups, unseen in expected.values())


def test_tables_too_large_for_bits_have_no_counts(tmp_path: Path) -> None:
    """Buckets have no counts either, since they have no unseen values."""
    table = {"label": [0, 1] * 50, "city": [f"c{row}" for row in range(100)], "age": list(range(100))}
    (tmp_path / "schema.yaml").write_text(
        json.dumps(
            {"label": "label", "categorical": ["city"], "buckets": {"age": 4}, "crosses": {"both": ["city", "age"]}}
        )
    )
    dataset = prepare(
        PrepareOptions(
            sources=[str(write_csv(tmp_path / "log.csv", table))], out=tmp_path / "data", test_fraction=0.3,
            schema=tmp_path / "schema.yaml", hash_rows_by_feature={"city": 2**26 + 1, "both": 2**26},
        )
    )  # fmt: skip
    assert stored_counts(dataset) == {"both": (dataset.splits["test"].num_rows,) * 2}


def bounds(test: Fraction | None) -> list[tuple[int, int]]:
    """Return numbers of lookups and of unseen ones on both sides of every bound."""
    shares = [Fraction(1, 2), Fraction(99, 100), 2 * (test or Fraction()), Fraction(0), Fraction(1)]
    candidates = [(num, math.floor(num * share) + more) for num in (1, 7, 999, 1000, 1001) for share in shares
            for more in (-1, 0, 1)]  # fmt: skip
    return sorted({(num, unseen) for num, unseen in candidates if 0 <= unseen <= num})


def outcome(num: int, unseen: int, test: Fraction | None) -> tuple[bool, bool]:
    """Return (stops, warns): whether `predict` stops, and whether it warns if it does not, by the documentation."""
    share = Fraction(unseen, num)
    stops = num >= 1000 and share >= Fraction(99, 100) and test is not None and test < Fraction(1, 2)
    return stops, stops or (share > Fraction(1, 2) and (test is None or share >= 2 * test))


TEST_SHARES = [None, *(Fraction(unseen, 1000) for unseen in (0, 1, 251, 260, 333, 498, 499, 500, 501, 1000))]


@pytest.mark.parametrize("test", TEST_SHARES, ids=str)
def test_both_sides_of_every_bound(test: Fraction | None) -> None:
    outcomes = set()
    for num, unseen in bounds(test):
        shares = {} if test is None else {"a": float(test)}
        values = UnseenValues(unseen_counts=Counter(a=unseen), value_counts=Counter(a=num), test_shares=shares)
        stops, warns = outcome(num, unseen, test)
        assert bool(values.warnings()) == warns, (num, unseen)
        if stops:
            with pytest.raises(MesetaError, match="values of 'a' are unseen"):
                values.check()
        else:
            values.check()
        outcomes.add((stops, warns))
    assert (True, True) in outcomes or test is None or test >= Fraction(1, 2)
    assert (False, True) in outcomes or (test is not None and test > Fraction(1, 2))
    assert (False, False) in outcomes


def test_of_many_features_the_worst_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"f{place}" for place in range(30)]
    values = UnseenValues(
        unseen_counts=Counter({name: 990 + place % 11 for place, name in enumerate(names)}),
        value_counts=Counter(dict.fromkeys(names, 1000)),
        test_shares=dict.fromkeys(names[:25], 0.25),
    )
    with pytest.raises(
        MesetaError,
        match=r"100\.00% of the 1,000 values of 'f10' .* 25\.00%\), and so are those of 24 other features; ",
    ):
        values.check()
    print_unseen(values)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11 and lines[-1] == "warning: and 20 more features with this problem"
    assert len(values.warnings()) == 30 and "'f29' are unseen (test split: not stored)" in "".join(values.warnings())


ENCODINGS = ("vocabulary", "hash")
ONE_ENCODING = pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.soak] * (name == "hash")) for name in ENCODINGS], indirect=True
)
"""Marks tests of properties that do not depend on the encoding."""


@pytest.fixture(scope="module", params=ENCODINGS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run whose test split has the unseen values of `IN_TEST`."""
    folder = tmp_path_factory.mktemp(request.param)
    columns = {name: [f"k{row % 20}" for row in range(NUM_TRAIN)] for name in IN_TEST}
    columns["tags"] = [f"{value}|{value}" for value in columns["tags"]]
    first = write_csv(folder / "first.csv", {"label": [row % 2 for row in range(NUM_TRAIN)], **columns})
    (folder / "schema.yaml").write_text(
        json.dumps({"label": "label", "categorical": [*IN_TEST], "multi_valued": {"tags": "|"}})
    )
    options = {"out": folder / "data", "schema": folder / "schema.yaml", "vocabulary": request.param == "vocabulary",
               "min_count": 1, "hash_rows": HASH_ROWS}  # fmt: skip
    prepare(PrepareOptions(sources=[str(first)], test_fraction=0.0, **options))  # for the seeds of the hashes
    later = write_csv(folder / "later.csv", new_rows(folder, NUM_TEST, IN_TEST) | {"label": [0, 1] * 100})
    prepare(PrepareOptions(sources=[str(first)], test_files=[str(later)], force=True, **options))
    train(settings(folder / "data", folder / "run", train__max_steps=2))
    return folder


def new_rows(folder: Path, num_rows: int, unseen: dict[str, int]) -> dict[str, list[Any]]:
    """Return rows with the given numbers of unseen values. For 'tags' the number is that of rows with two."""
    columns: dict[str, list[Any]] = {}
    for feature in Dataset.load(folder / "data").sparse:
        fresh = Seen(feature, [f"k{value}" for value in range(20)]).fresh()
        number = unseen.get(feature.name, 0)
        values = [next(fresh) if row < number else f"k{row % 20}" for row in range(num_rows)]
        columns[feature.name] = [f"{value}|{value}" for value in values] if feature.multi_valued else values
    return columns


def warned(ended: Ended) -> list[str]:
    return [line for line in ended.err.splitlines() if line.startswith("warning: ")]


@ONE_ENCODING
def test_the_run_keeps_the_counts(case: Path) -> None:
    expected = {name: (NUM_TEST, unseen) for name, unseen in IN_TEST.items()} | {"tags": (2 * NUM_TEST, 0)}
    for folder in (case / "data", case / "run"):
        assert stored_counts(Dataset.load(folder)) == expected


MATRIX = [
    (name, num, unseen)
    for name in ("never", "seldom", "often", "half", "more", "always")
    for num, unseen in bounds(Fraction(IN_TEST[name], NUM_TEST))
    if num >= 999 and unseen > 400
]


def cells() -> list[Any]:
    """Return every encoding with every case of `MATRIX`. `make test` has a case that stops."""
    cases = []
    for encoding in ENCODINGS:
        for new in sample(MATRIX, 4, seed=372):
            is_sampled = encoding == "vocabulary" and new.values[0][0] == "never"
            marks = new.marks if is_sampled else [pytest.mark.soak]
            cases.append(pytest.param(encoding, *new.values, marks=marks, id=f"{encoding}-{new.id}"))
    return cases


@pytest.mark.parametrize(("case", "new"), cells(), indirect=["case"])
def test_predict_and_prepare(case: Path, tmp_path: Path, new: tuple[str, int, int]) -> None:
    name, num, unseen = new
    stops, warns = outcome(num, unseen, Fraction(IN_TEST[name], NUM_TEST))
    source, out = write_csv(tmp_path / "new.csv", new_rows(case, num, {name: unseen})), tmp_path / "p.csv"
    out.write_text("of yesterday")
    before = tree(tmp_path)
    command = ["predict", case / "run", "--data", source, "--out", out]
    ended = run_here(*command)
    text = (
        f"{unseen / num:.2%} of the {num:,} values of '{name}' are unseen (test split: {IN_TEST[name] / 2:.2f}%); check"
    )
    assert ended.code == stops
    if stops:
        assert ended.errors[0].startswith(f"error: predict: {text}") and tree(tmp_path) == before
        assert ended.errors[0].endswith(", or predict with --allow-unseen")
        ended = run_here(*command, "--allow-unseen")
        assert ended.code == 0
    assert len(out.read_text().splitlines()) == num + 1
    like = run_here("prepare", source, "--like", case / "run", "--out", tmp_path / "like")
    assert like.code == 0
    for command_ended in (ended, like):
        assert [line.startswith(f"warning: {text}") for line in warned(command_ended)] == [True] * warns
    ended = run_here("predict", case / "run", "--data", tmp_path / "like", "--out", out)  # a prepared folder
    assert ended.code == 0 and not warned(ended)


@ONE_ENCODING
@pytest.mark.parametrize(("num_rows", "stops"), [(499, False), (500, True)])
def test_lookups_count_not_rows(case: Path, tmp_path: Path, num_rows: int, stops: bool) -> None:
    new = write_csv(tmp_path / "new.csv", new_rows(case, num_rows, {"tags": num_rows}))
    ended = run_here("predict", case / "run", "--data", new, "--out", tmp_path / "p.csv")
    assert ended.code == stops and bool(warned(ended)) != stops
    assert (f"100.00% of the {2 * num_rows:,} values of 'tags' are unseen (test split: 0.00%)") in ended.err
    assert (tmp_path / "p.csv").exists() != stops


@ONE_ENCODING
def test_files_count_together(case: Path, tmp_path: Path) -> None:
    rows = new_rows(case, 1000, {"never": 995})
    for number in range(4):
        part = {name: values[250 * number : 250 * number + 250] for name, values in rows.items()}
        write_csv(tmp_path / f"{number}.csv", part)
    ended = run_here("predict", case / "run", "--data", tmp_path / "?.csv", "--out", tmp_path / "p.parquet")
    assert ended.code == 1 and "99.50% of the 1,000 values of 'never'" in ended.err
    assert not list(tmp_path.glob("*p.parquet*"))


def old_run(case: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    run = tmp_path / "run"
    shutil.copytree(case / "run", run)
    document = json.loads((run / "dataset.json").read_text())
    for feature in document["sparse"]:
        change(feature)
    (run / "dataset.json").write_text(json.dumps(document))
    return run


@ONE_ENCODING
def test_a_run_without_the_counts_is_only_warned(case: Path, tmp_path: Path) -> None:
    run = old_run(case, tmp_path, lambda feature: feature.pop("test_lookups"))
    new = write_csv(tmp_path / "new.csv", new_rows(case, 1200, {"never": 1200, "half": 601, "more": 600}))
    ended = run_here("predict", run, "--data", new, "--out", tmp_path / "p.csv")
    assert ended.code == 0 and (tmp_path / "p.csv").exists()
    never, half = warned(ended)
    assert never.startswith("warning: 100.00% of the 1,200 values of 'never' are unseen (test split: not stored); ")
    assert "values of 'half'" in half


@ONE_ENCODING
def test_commands_without_new_rows_never_stop(case: Path, tmp_path: Path) -> None:
    """They do not stop even if the stored counts make every value of the data suspicious."""
    run = old_run(case, tmp_path, lambda feature: feature.update(test_lookups={"num_lookups": 1000, "num_unseen": 0}))
    for command in (["eval", run], ["predict", run, "--out", tmp_path / "p.csv"],
                    ["predict", run, "--out", tmp_path / "p.csv", "--data", case / "data"]):  # fmt: skip
        ended = run_here(*command)
        assert ended.code == 0 and not warned(ended), ended.err
    ended = run_here("predict", run, "--out", tmp_path / "p.csv", "--allow-unseen")
    assert ended.errors == ["error: predict: --allow-unseen needs raw files in --data; omit it"]


@ONE_ENCODING
def test_descriptions(case: Path, tmp_path: Path) -> None:
    """Missing counts are not written, since older versions do not know them. Impossible counts are refused."""
    dataset = Dataset.load(case / "data")
    bare = dataset.model_copy(
        update={"sparse": tuple(feature.model_copy(update={"test_lookups": None}) for feature in dataset.sparse)}
    )
    assert "test_lookups" not in json.dumps(bare.to_dict()) and Dataset.from_dict(bare.to_dict()).sparse == bare.sparse
    assert Dataset.from_dict(dataset.to_dict(), dataset.dir) == dataset
    for counts, rule in (({"num_lookups": 5, "num_unseen": 6}, "6 of 5 lookups cannot be unseen"),
                         ({"num_lookups": 0, "num_unseen": 0}, "greater than or equal to 1")):  # fmt: skip
        document = dataset.to_dict()
        document["sparse"][0]["test_lookups"] = counts
        with pytest.raises(MesetaError, match=rule):
            Dataset.from_dict(document)
    shutil.copytree(case / "data", tmp_path / "data")
    assert not check_dataset(tmp_path / "data").faults
    document = dataset.to_dict()
    document["sparse"][0]["test_lookups"]["num_lookups"] += 1
    (tmp_path / "data/dataset.json").write_text(json.dumps(document))
    [fault] = check_dataset(tmp_path / "data").faults
    assert (
        str(fault)
        == "split 'test': feature 'never' must have 201 ids, as in dataset.json, got 200; prepare the dataset again"
    )
