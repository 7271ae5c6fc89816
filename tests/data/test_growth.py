"""Vocabularies that grow over days, against collections.Counter over raw values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meseta.data.dataset import growth, vocabulary
from meseta.data.dataset.growth import Candidates, GrowthRule, VocabularyParts, grow_vocabulary
from meseta.data.dataset.records import SparseFeature
from meseta.data.dataset.statistics import FeatureStatistics
from meseta.data.dataset.vocabulary import Vocabulary, VocabularyCounter, count_values, values_digest
from meseta.data.hash_categories import hash_categories
from meseta.spec import MesetaError
from sampling import fewer_examples

SEED = 5
Day = Sequence[bytes]


class Days:
    """Plain statement of the rule: rows by value, from counts of raw values."""

    def __init__(self, min_count: int, retire_after: int | None = None) -> None:
        self.min_count, self.retire_after = min_count, retire_after
        self.counts: Counter[bytes] = Counter()
        self.last: dict[bytes, int] = {}
        self.rows: list[bytes | None] = []
        self.num_lookups = self.part = 0

    def add(self, day: Day) -> None:
        self.part += 1
        self.counts.update(day)
        self.last.update(dict.fromkeys(day, self.part))
        self.num_lookups += len(day)
        for value in [value for value, last in self.last.items() if self.is_retired(last)]:
            del self.last[value], self.counts[value]
            self.rows = [None if one == value else one for one in self.rows]
        new = [value for value in self.counts if self.counts[value] >= self.min_count and value not in self.rows]
        for value in sorted(new, key=lambda value: (-self.counts[value], value)):
            if None in self.rows:
                self.rows[self.rows.index(None)] = value
            else:
                self.rows.append(value)

    def is_retired(self, last: int) -> bool:
        return self.retire_after is not None and last + self.retire_after <= self.part

    def table(self) -> dict[str, list[object]]:
        """Return the content of the vocabulary file."""
        counts = [0 if value is None else self.counts[value] for value in self.rows]
        return {
            "value": [None, *self.rows],
            "id": list(range(len(self.rows) + 1)),
            "count": [self.num_lookups - sum(counts), *counts],
            "last": [self.part, *(0 if value is None else self.last[value] for value in self.rows)],
        }

    def candidates(self) -> dict[int, tuple[int, int]]:
        """Return (count, last part) of each value without a row, by hash."""
        rare = [value for value in self.counts if value not in self.rows]
        hashes = hash_categories(pa.array(rare, pa.large_binary()), SEED).tolist()
        return {one: (self.counts[value], self.last[value]) for one, value in zip(hashes, rare, strict=True)}


def feature_of(made: Vocabulary) -> SparseFeature:
    return SparseFeature(
        name="user", num_embeddings=made.num_embeddings, encoding="vocabulary", vocabulary=made.path,
        vocabulary_digest=made.digest, candidates=made.candidates,
        statistics=FeatureStatistics(made.num_embeddings).result(),
    )  # fmt: skip


def count(folder: Path, day: Day, budget_bytes: int = 1 << 30) -> Iterator[pa.Table]:
    counter = VocabularyCounter("user", folder, budget_bytes, SEED)
    for start in range(0, len(day), 10):
        counter.add(count_values(pa.array(day[start : start + 10], pa.large_binary())))
    return counter.partitions()


def grow(folder: Path, days: Sequence[Day], *, budget_bytes: int = 1 << 30, **rule: int | None) -> Iterator[Vocabulary]:
    """Yield the vocabulary after each day, which is read from files."""
    earlier = VocabularyParts.empty()
    for part, day in enumerate(days, start=1):
        out = folder / f"{part}"
        (out / "scratch").mkdir(parents=True)
        tables = count(out / "scratch", day, budget_bytes)
        made = grow_vocabulary("user", tables, earlier, GrowthRule(part=part, **rule), SEED, out)  # type: ignore[arg-type]
        yield made
        earlier = VocabularyParts.load(out, feature_of(made), SEED, part)


def binary(table: pa.Table) -> dict[str, list[object]]:
    return table.set_column(0, "value", table["value"].cast(pa.large_binary())).to_pydict()


VALUES = st.sampled_from([b"", b"a", b"b", b"c", b"dd", b"e", b"\xff", b"f", b"g"])
LOGS = st.lists(st.lists(VALUES, max_size=15), min_size=2, max_size=3)


@fewer_examples(3)
@given(days=LOGS, min_count=st.integers(1, 4), retire_after=st.none() | st.integers(1, 2))
def test_days_follow_raw_values(days: list[list[bytes]], min_count: int, retire_after: int | None) -> None:
    oracle = Days(min_count, retire_after)
    with TemporaryDirectory() as name:
        for day, made in zip(days, grow(Path(name), days, min_count=min_count, retire_after=retire_after), strict=True):
            oracle.add(day)
            out = Path(name) / str(oracle.part)
            assert binary(pq.read_table(out / made.path)) == oracle.table()
            stored = pq.read_table(out / (made.candidates or "")).to_pydict()
            assert dict(zip(stored["hash"], zip(stored["count"], stored["last"], strict=True), strict=True)) == (
                oracle.candidates()
            )
            values = [value for value in oracle.rows if value is not None]
            hashes = hash_categories(pa.array([*values, b"never"], pa.large_binary()), SEED)
            assert made.lookup(hashes).tolist() == [*(oracle.rows.index(value) + 1 for value in values), 0]
        if retire_after is None:
            whole = Days(min_count)
            whole.add([value for day in days for value in day])
            assert {*oracle.rows} == {*whole.rows}


def test_memory_does_not_change_the_result(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    days = [[b"%d" % i for i in (100 ** draw.random(300)).astype(int)] for _ in range(2)]
    for budget in (1 << 30, 500):
        list(grow(tmp_path / str(budget), days, budget_bytes=budget, min_count=3))
    assert any((tmp_path / "500/2/scratch").iterdir()) and not any((tmp_path / f"{1 << 30}/2/scratch").iterdir())
    for path in ("vocabulary/user.parquet", "vocabulary/user+candidates.parquet"):
        one, other = (pq.read_table(tmp_path / str(budget) / "2" / path) for budget in (1 << 30, 500))
        assert one.num_rows > 10 and one.equals(other)


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 4])
def test_candidates_that_were_seen_last_are_kept(tmp_path: Path, limit: int) -> None:
    """Then those with the largest count, then those with the smallest hash."""
    days = [[b"old", b"old", b"older"], [b"c", b"b", b"a", b"a"]]
    *_, made = grow(tmp_path, days, min_count=9, max_candidates=limit)
    rest = sorted([b"b", b"c"], key=lambda value: int(hash_categories(pa.array([value]), SEED)[0]))
    kept = Candidates.load(tmp_path / "2", feature_of(made)).hashes.tolist()
    expected = [b"a", *rest, b"old", b"older"][:limit]
    assert sorted(kept) == sorted(hash_categories(pa.array(expected, pa.large_binary()), SEED).tolist())


def test_values_with_one_hash_share_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def collide(strings: pa.Array, seed: int = 0) -> np.ndarray:
        return np.array([len(value) for value in strings.cast(pa.large_binary()).to_pylist()], np.uint64)

    monkeypatch.setattr(growth, "hash_categories", collide)
    monkeypatch.setattr(vocabulary, "hash_categories", collide)
    days = [[b"b", b"a", b"xx"], [b"c", b"yy", b"zz", b"zz"]]
    first, second = grow(tmp_path, days, min_count=2)
    assert pq.read_table(tmp_path / "1" / first.path).to_pydict()["value"] == [None, "a"]
    table = pq.read_table(tmp_path / "2" / second.path).to_pydict()
    assert (table["value"], table["count"]) == ([None, "a", "yy"], [0, 3, 4])


def test_a_freed_row_is_no_empty_value() -> None:
    texts = pa.array(["a", "", "b"])
    assert values_digest(texts) == values_digest(texts.cast(pa.large_binary()))
    assert values_digest(texts) != values_digest(pa.array(["a", None, "b"]))
    # The digest of an earlier version.
    assert values_digest(texts) == "e91bf52976d5a0402539916ed1b7f9bea9152ff4bb2e40dda2310878027c52d5"


def test_damaged_candidates_are_refused(tmp_path: Path) -> None:
    [made] = grow(tmp_path, [[b"a", b"b", b"b"]], min_count=2)
    path = tmp_path / "1" / (made.candidates or "")
    for change in ({"hash": ["x"]}, {"count": [None]}, {"last": [1 << 40]}, {"hash": [-1]}, {}):
        table = pa.table({"hash": [1], "count": [1], "last": [1], **change})
        pq.write_table(table if change else table.drop_columns(["last"]), path)
        with pytest.raises(MesetaError, match=r"candidates .* cannot be read .*; prepare the dataset again"):
            Candidates.load(tmp_path / "1", feature_of(made))
    for change in ({"count": ["x", "y"]}, {"count": [None, 1]}, {"last": ["x", "y"]}):
        table = pa.table({"value": [None, "b"], "id": [0, 1], "count": [1, 2], "last": [1, 1], **change})
        pq.write_table(table, tmp_path / "1" / made.path)
        with pytest.raises(MesetaError, match=r"vocabulary .* cannot be read .*; prepare the dataset again"):
            VocabularyParts.load(tmp_path / "1", feature_of(made), SEED, 1)
