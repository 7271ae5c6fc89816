"""Vocabularies against collections.Counter."""

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.click_log import make_lines, read_split, write_tsv
from meseta.data.dataset.growth import GrowthRule, VocabularyParts, grow_vocabulary
from meseta.data.dataset.vocabulary import VocabularyCounter, count_values
from meseta.data.prepare import PrepareOptions, prepare


def expected_rows(training: list[str], min_count: int) -> dict[str, int]:
    counts = Counter(training)
    kept = sorted((value for value in counts if counts[value] >= min_count), key=lambda v: (-counts[v], v.encode()))
    return {value: row for row, value in enumerate(kept, start=1)}


def test_prepare_with_vocabularies(tmp_path: Path) -> None:
    lines = make_lines(500, num_values=30)
    write_tsv(tmp_path / "a.tsv", lines[:400])
    write_tsv(tmp_path / "b.tsv", lines[400:])
    dataset = prepare(
        PrepareOptions(
            sources=[f"{tmp_path}/a.tsv"],
            test_files=[f"{tmp_path}/b.tsv"],
            out=tmp_path / "out",
            vocabulary=True,
            min_count=12,
        )
    )
    train, test = read_split(tmp_path / "out", "train"), read_split(tmp_path / "out", "test")
    for place, feature in enumerate(dataset.sparse):
        values = [line.split("\t")[14 + place] for line in lines]
        rows = expected_rows(values[:400], 12)
        assert feature.encoding == "vocabulary" and feature.vocabulary is not None
        assert feature.num_embeddings == len(rows) + 1
        assert train.column(feature.name).to_pylist() == [rows.get(value, 0) for value in values[:400]]
        assert test.column(feature.name).to_pylist() == [rows.get(value, 0) for value in values[400:]]
        assert feature.statistics.num_uniques == len({rows.get(value, 0) for value in values[:400]})
        table = pq.read_table(tmp_path / "out" / feature.vocabulary).to_pydict()
        counts = Counter(values[:400])
        unknown = sum(count for value, count in counts.items() if value not in rows)
        assert table == {
            "value": [None, *rows],
            "id": list(range(len(rows) + 1)),
            "count": [unknown, *(counts[value] for value in rows)],
            "last": [1] * (len(rows) + 1),
        }


def test_training_rows_of_a_fraction_make_the_vocabulary(tmp_path: Path) -> None:
    source = write_tsv(tmp_path / "a.tsv", make_lines(300))
    options = {"sources": [str(source)], "test_fraction": 0.5, "seed": 1}
    prepare(PrepareOptions(out=tmp_path / "all", vocabulary=True, min_count=1, **options))
    train = read_split(tmp_path / "all", "train")
    table = pq.read_table(tmp_path / "all" / "vocabulary" / "cat_0.parquet")
    assert sum(table.column("count").to_pylist()) == train.num_rows
    assert set(train.column("cat_0").to_pylist()) == set(range(1, table.num_rows))
    assert 0 in read_split(tmp_path / "all", "test").column("cat_5").to_pylist()


@pytest.mark.parametrize("budget_bytes", [1 << 30, 20_000, 500])
def test_counts_do_not_depend_on_memory(tmp_path: Path, budget_bytes: int) -> None:
    """Small budgets spill to disk."""
    draw = np.random.default_rng(0)
    values = [b"\xff%d" % i for i in (2000 ** draw.random(8000)).astype(int)]
    counter = VocabularyCounter("f/1", tmp_path / "spill", budget_bytes)
    (tmp_path / "spill").mkdir()
    for start in range(0, len(values), 500):
        counter.add(count_values(pa.array(values[start : start + 500])))
    assert any((tmp_path / "spill").iterdir()) == (budget_bytes < 1 << 30)
    rule = GrowthRule(min_count=3)
    vocabulary = grow_vocabulary("f/1", counter.partitions(), VocabularyParts.empty(), rule, 0, tmp_path)
    kept = {value: count for value, count in Counter(values).items() if count >= 3}
    table = pq.read_table(tmp_path / vocabulary.path)
    assert vocabulary.path == "vocabulary/f%2F1.parquet"
    assert dict(zip(table["value"].to_pylist()[1:], table["count"].to_pylist()[1:], strict=True)) == kept
    assert table["count"].to_pylist()[1:] == sorted(kept.values(), reverse=True)
    assert table["count"][0].as_py() == len(values) - sum(kept.values())
