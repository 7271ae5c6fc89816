"""Figures of prepared data against counts in plain Python on the raw rows."""

import json
import statistics
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.click_log import DENSE, SPARSE, Oracle, make_lines, write_tsv
from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.describe import DatasetSummary, describe
from meseta.data.dataset.records import DataFile, SparseFeature, SparseStatistics, Split
from meseta.data.prepare import PrepareOptions, prepare
from meseta.report.data_page import data_page
from meseta.spec import MesetaError, Reuse

TRAIN, TEST = make_lines(700, seed=1, num_values=400), make_lines(300, seed=2, num_values=400)
TABLE_ROWS = 1000


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("describe")
    sources = [str(write_tsv(folder / name, lines)) for name, lines in (("train.tsv", TRAIN), ("test.tsv", TEST))]
    return prepare(
        PrepareOptions(sources=sources, test_files=sources[1:], out=folder / "data", hash_rows=TABLE_ROWS, seed=3)
    )


@pytest.fixture(scope="module")
def description(prepared: Dataset) -> DatasetSummary:
    return describe(prepared)


def test_splits(description: DatasetSummary) -> None:
    for name, lines in (("train", TRAIN), ("test", TEST)):
        split = description.splits[name]
        assert (split.num_rows, split.labels) == (len(lines), {"label": sum(float(line[0]) for line in lines)})
        assert (split.weights, split.num_groups, split.time_range) == (None, None, None)


@pytest.mark.parametrize("place", range(len(DENSE)))
def test_dense_features_are_described_in_the_unit_of_the_source(description: DatasetSummary, place: int) -> None:
    def values(lines: list[str]) -> list[int]:
        return [max(int(line.split("\t")[1 + place] or 0), 0) for line in lines]

    described, expected = description.dense[place], values([*TRAIN, *TEST])
    assert described.name == DENSE[place]
    described_values = described.values
    assert described_values.mean == pytest.approx(statistics.fmean(expected), rel=1e-5)
    assert described_values.std == pytest.approx(statistics.pstdev(expected), rel=1e-5)
    assert (described_values.min, described_values.max) == (min(expected), pytest.approx(max(expected), rel=1e-5))
    assert described_values.share_zero == expected.count(0) / len(expected)
    logs = np.log1p(expected)
    assert sum(described.bins) == len(expected)
    # Values on an edge may fall to either side of it.
    cumulated = np.searchsorted(np.sort(logs), np.linspace(logs.min(), logs.max(), 25)[1:-1] + 1e-5)
    below = np.searchsorted(np.sort(logs), np.linspace(logs.min(), logs.max(), 25)[1:-1] - 1e-5)
    assert (below <= np.cumsum(described.bins)[:-1]).all()
    assert (np.cumsum(described.bins)[:-1] <= cumulated).all()
    train, test = np.log1p(values(TRAIN)), np.log1p(values(TEST))
    assert described.test_shift == pytest.approx((test.mean() - train.mean()) / train.std(), abs=1e-5)


@pytest.mark.parametrize("place", [0, 11, 25])
def test_sparse_features(description: DatasetSummary, place: int) -> None:
    oracle = Oracle.of([*TRAIN, *TEST], TRAIN, TABLE_ROWS, seed=3)
    ids = [row[place] for row in oracle.sparse]
    counts, test = Counter(ids[: len(TRAIN)]), ids[len(TRAIN) :]
    figures = description.sparse[place]
    ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    assert figures.name == SPARSE[place]
    assert (figures.num_lookups, figures.num_uniques) == (len(TRAIN), len(counts))
    assert figures.coverage == len(counts) / TABLE_ROWS
    assert (figures.mean_pooling_factor, figures.max_pooling_factor, figures.share_empty) == (1.0, 1, 0.0)
    assert [(top.id, top.value, top.count) for top in figures.top] == [(i, None, n) for i, n in ranked[:5]]
    assert figures.top_shares == tuple(sum(n for _, n in ranked[:k]) / len(TRAIN) for k in (1, 10, 100))
    half = next(k for k in range(1, len(ranked) + 1) if sum(n for _, n in ranked[:k]) >= len(TRAIN) / 2)
    assert figures.num_half == half
    assert figures.unseen_lookups == sum(i not in counts for i in test) / len(test)
    assert figures.unseen_uniques == len(set(test) - set(counts)) / len(set(test))


def test_progress_adds_up_to_the_rows(prepared: Dataset) -> None:
    seen: list[float] = []
    describe(prepared, seen.append)
    assert sum(seen) == pytest.approx(1000)


@pytest.fixture
def samples(tmp_path: Path) -> Dataset:
    """Two labels, weights, groups, times, a bag with a vocabulary and no test split; row groups of two rows."""
    bags: list[list[int]] = [[2, 2], [], [1, 2, 3], [2], [0]]
    table = pa.table(
        {
            "click": np.float32([1, 0, 1, 0, 0]),
            "buy": np.float32([0.5, 0, 0, 0, 0]),
            "worth": np.float32([0, 1, 2, 1, 1]),
            "user": np.array([7, -1, 7, 7, -1]),
            "at": np.array([5.0, 3.0, 86_400.0, 4.0, 4.0]),
            "page": pa.array(bags, pa.list_(pa.int32())),
        }
    )
    (tmp_path / "train").mkdir()
    pq.write_table(table, tmp_path / "train" / "a.parquet", row_group_size=2)
    names = pa.array([None, "home", "<script>", "help"], pa.large_string())
    pq.write_table(pa.table({"value": names, "id": range(4), "count": [0] * 4}), tmp_path / "pages.parquet")
    reuse = Reuse(window_samples=5, edges=(0, 1, 2), rows=(0.75, 0.0, 0.25), lookups=(0.4, 0.0, 0.6))
    counted = SparseStatistics(num_rows=5, num_lookups=7, num_uniques=4, mean_pooling_factor=1.4, reuse=reuse)
    page = SparseFeature(
        name="page", num_embeddings=4, encoding="vocabulary", vocabulary="pages.parquet", multi_valued=True,
        statistics=counted,
    )  # fmt: skip
    files = (DataFile(path="train/a.parquet", num_rows=5),)
    train = Split(num_rows=5, num_positives=2.0, positives={"click": 2.0, "buy": 0.5}, files=files)
    Dataset(
        labels=("click", "buy"), weight="worth", group="user", time="at", dense=(), sparse=(page,),
        splits={"train": train},
    ).save(tmp_path)  # fmt: skip
    return Dataset.load(tmp_path)


def test_what_belongs_to_samples(samples: Dataset) -> None:
    description = describe(samples)
    split = description.splits["train"]
    assert split.labels == {"click": 2.0, "buy": 0.5}
    assert split.weights is not None
    assert (split.weights.mean, split.weights.min, split.weights.max, split.weights.share_zero) == (1.0, 0, 2, 0.2)
    assert split.weights.std == pytest.approx(statistics.pstdev([0, 1, 2, 1, 1]))
    assert (split.num_groups, split.max_group_rows, split.time_range) == (2, 3, (3.0, 86_400.0))
    [page] = description.sparse
    assert (page.num_lookups, page.mean_pooling_factor, page.max_pooling_factor, page.share_empty) == (7, 1.4, 3, 0.2)
    assert [(top.id, top.value, top.count) for top in page.top] == [
        (2, "<script>", 4), (0, None, 1), (1, "home", 1), (3, "help", 1)
    ]  # fmt: skip
    assert (page.num_half, page.unseen_lookups, page.unseen_uniques) == (1, None, None)
    json.dumps(description.to_dict())


def test_the_page_shows_all_of_it_and_runs_nothing(samples: Dataset) -> None:
    page = data_page("a & b", samples, describe(samples))
    for shown in ("a &amp; b", "click rate", "40.00%", "groups of user", "1970-01-02 00:00", "&lt;script&gt;"):
        assert shown in page
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")


def test_the_page_of_hashed_data_marks_nothing_that_is_alike(prepared: Dataset, description: DatasetSummary) -> None:
    page = data_page("log", prepared, description)
    assert page.count("Reuse histogram") == len(SPARSE)
    assert page.count('aria-label="Distribution"') == len(DENSE)


def test_ids_outside_and_lost_files_point_to_the_check(samples: Dataset) -> None:
    narrow = samples.model_copy(update={"sparse": (samples.sparse[0].model_copy(update={"num_embeddings": 3}),)})
    with pytest.raises(MesetaError, match=r"ids of 'page' must be in 0\.\.2, got ids in 1\.\.3; run `meseta data"):
        describe(narrow)
    (samples.dir / "train" / "a.parquet").unlink()
    with pytest.raises(MesetaError, match=r"a\.parquet': column .* cannot be read .*`meseta data check"):
        describe(samples)
