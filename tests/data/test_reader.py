"""The reader: every row once, the same global batches for any number of ranks, exact resume."""

import json
import math
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meseta.data import Batch, Dataset, Reader, ReaderOptions
from meseta.data.dataset.records import DataFile, DenseFeature, SparseFeature, SparseStatistics, Split
from meseta.spec import MesetaError, Reuse

GROUP_ROWS = 37
FILE_ROWS = (400, 150, 1)
NUM_ROWS = sum(FILE_ROWS)
FIRST_ROWS = [435, 124, 420, 357, 351, 509, 405, 354]
STATISTICS = SparseStatistics(
    num_rows=0,
    num_lookups=0,
    num_uniques=0,
    mean_pooling_factor=1.0,
    reuse=Reuse(window_samples=65_536, edges=(0,), rows=(0.0,), lookups=(0.0,)),
)


def sparse(name: str, **kinds: bool) -> SparseFeature:
    return SparseFeature(name=name, num_embeddings=10**9, encoding="hash", statistics=STATISTICS, **kinds)


def bag(row: int) -> list[int]:
    """Return the r % 4 ids of row r, which encode the row and the position in the bag."""
    return [10 * row + place for place in range(row % 4)]


def make_dataset(folder: Path, *, multi_valued: bool) -> Dataset:
    """Write a dataset whose every value encodes its row."""
    features = [sparse("single"), sparse("other")]
    if multi_valued:
        features[1:1] = [sparse("bag", multi_valued=True), sparse("heavy", multi_valued=True, weighted=True)]
    (folder / "train").mkdir(parents=True)
    files, first = [], 0
    for number, num_rows in enumerate(FILE_ROWS):
        rows = np.arange(first, first + num_rows)
        columns: dict[str, Any] = {
            "label": (rows % 2).astype(np.float32),
            "d0": rows.astype(np.float32),
            "d1": -rows.astype(np.float32),
            "single": rows.astype(np.int32),
            "other": rows + 10**8,
        }
        if multi_valued:
            bags = [bag(row) for row in rows.tolist()]
            columns["bag"] = pa.array(bags, pa.list_(pa.int32()))
            columns["heavy"] = pa.array(bags, pa.list_(pa.int64()))
            columns["heavy.weight"] = pa.array([[i / 8 for i in b] for b in bags], pa.list_(pa.float32()))
        path = f"train/part-{number:05d}.parquet"
        pq.write_table(pa.table(columns), folder / path, row_group_size=GROUP_ROWS)
        files.append(DataFile(path=path, num_rows=num_rows))
        first += num_rows
    dataset = Dataset(
        dense=tuple(DenseFeature(name=name, fill=0.0, mean=0.0, std=1.0) for name in ("d0", "d1")),
        sparse=tuple(features),
        splits={"train": Split(num_rows=NUM_ROWS, num_positives=float(NUM_ROWS // 2), files=tuple(files))},
    )
    dataset.save(folder)
    return Dataset.load(folder)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("single") / "data", multi_valued=False)


@pytest.fixture(scope="module")
def jagged_dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("multi") / "data", multi_valued=True)


def rows_of(batch: Batch) -> list[int]:
    """Return the rows of a batch, with which all other values must agree."""
    rows = batch.dense[:, 0].to(torch.int64)
    assert batch.dense.dtype == batch.label.dtype == torch.float32
    assert batch.sparse.values.dtype == batch.sparse.lengths.dtype == torch.int64
    assert torch.equal(batch.dense[:, 1], -rows.float())
    assert torch.equal(batch.label, (rows % 2).float())
    assert batch.sparse["single"].values.tolist() == rows.tolist()
    assert batch.sparse["other"].values.tolist() == (rows + 10**8).tolist()
    if "bag" in batch.sparse.keys:
        for key in ("bag", "heavy"):
            bags = batch.sparse[key]
            assert bags.lengths.tolist() == [row % 4 for row in rows.tolist()]
            assert bags.values.tolist() == [i for row in rows.tolist() for i in bag(row)]
        heavy, light = batch.sparse["heavy"], batch.sparse["bag"]
        assert heavy.weights is not None and light.weights is not None
        assert torch.equal(heavy.weights, heavy.values.float() / 8)
        assert (light.weights == 1).all()
    return rows.tolist()


def global_batches(dataset: Dataset, options: ReaderOptions, num_ranks: int, num_epochs: int = 1) -> list[list[int]]:
    """Return the rows of every global batch, joined from the slices of all ranks."""
    ranks = [
        [rows_of(b) for b in Reader(dataset, "train", options, rank=r, num_ranks=num_ranks).epochs(num_epochs)]
        for r in range(num_ranks)
    ]
    for slices in zip(*ranks, strict=True):
        sizes = [len(s) for s in slices]
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)
    return [[row for s in slices for row in s] for slices in zip(*ranks, strict=True)]


@given(
    num_ranks=st.integers(1, 4),
    batch_size=st.integers(1, 700),
    window_rows=st.integers(1, 700),
    shuffle=st.booleans(),
    last_batch=st.sampled_from(["keep", "drop"]),
    prefetch_batches=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 2**63 - 1),
)
def test_every_row_once_and_the_same_batches_for_any_ranks(
    dataset: Dataset, num_ranks: int, batch_size: int, last_batch: Any, prefetch_batches: int, **order: Any
) -> None:
    batch_size = max(batch_size, 20)  # other tests use smaller ones
    options = ReaderOptions(batch_size=batch_size, last_batch=last_batch, prefetch_batches=prefetch_batches, **order)
    batches = global_batches(dataset, options, num_ranks)
    rows = [row for batch in batches for row in batch]
    expected = NUM_ROWS // batch_size * batch_size if last_batch == "drop" else NUM_ROWS
    assert len(rows) == len(set(rows)) == expected
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert len(batches) == Reader(dataset, "train", options).num_batches
    assert batches == global_batches(dataset, ReaderOptions(batch_size=batch_size, last_batch=last_batch, **order), 1)
    if not order["shuffle"]:
        assert rows == list(range(expected))


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_multi_valued_and_weighted_features(jagged_dataset: Dataset, num_ranks: int) -> None:
    for shuffle in (False, True):
        options = ReaderOptions(batch_size=50, shuffle=shuffle, window_rows=100)
        batches = global_batches(jagged_dataset, options, num_ranks)
        assert sorted(row for batch in batches for row in batch) == list(range(NUM_ROWS))


def test_small_batches_leave_ranks_without_rows(jagged_dataset: Dataset) -> None:
    batches = global_batches(jagged_dataset, ReaderOptions(batch_size=2, shuffle=True), 3)
    assert len(batches) == math.ceil(NUM_ROWS / 2)
    assert sorted(row for batch in batches for row in batch) == list(range(NUM_ROWS))


def test_order_is_a_function_of_seed_and_epoch(dataset: Dataset) -> None:
    def flat(seed: int) -> list[int]:
        options = ReaderOptions(batch_size=64, shuffle=True, seed=seed, window_rows=200)
        return [row for batch in global_batches(dataset, options, 1, num_epochs=2) for row in batch]

    first, again, other = flat(1), flat(1), flat(2)
    assert first == again != other
    assert first[:NUM_ROWS] != first[NUM_ROWS:]
    assert sorted(first[:NUM_ROWS]) == sorted(first[NUM_ROWS:]) == list(range(NUM_ROWS))


def test_order_never_changes(dataset: Dataset) -> None:
    """Literal values: resumed runs depend on them across versions of this package and of numpy."""
    options = ReaderOptions(batch_size=8, shuffle=True, seed=42, window_rows=200, prefetch_batches=0)
    assert rows_of(next(Reader(dataset, "train", options).epoch())) == FIRST_ROWS


@given(
    consumed=st.integers(0, 30),
    ranks=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    sizes=st.tuples(st.sampled_from([37, 50, 64]), st.sampled_from([37, 50, 64])),
    shuffle=st.booleans(),
)
@settings(max_examples=10)
def test_resume_is_exact_to_the_row(
    dataset: Dataset, consumed: int, ranks: tuple[int, int], sizes: tuple[int, int], shuffle: bool
) -> None:
    """Resumes with another number of ranks and another batch size, inside windows and across epochs."""

    def options(batch_size: int) -> ReaderOptions:
        return ReaderOptions(batch_size=batch_size, shuffle=shuffle, seed=9, window_rows=100)

    whole = [row for batch in global_batches(dataset, options(1000), 1, num_epochs=3) for row in batch]
    head: list[list[int]] = []
    states = []
    for rank in range(ranks[0]):
        reader = Reader(dataset, "train", options(sizes[0]), rank=rank, num_ranks=ranks[0])
        batches = reader.epochs(3)
        head.append([len(rows_of(next(batches))) for _ in range(consumed)])
        states.append(reader.get_state())
    assert all(state == states[0] for state in states)
    num_consumed = sum(map(sum, head))
    tail: list[list[list[int]]] = []
    for rank in range(ranks[1]):
        reader = Reader(dataset, "train", options(sizes[1]), rank=rank, num_ranks=ranks[1])
        reader.set_state(json.loads(json.dumps(states[0])))
        tail.append([rows_of(batch) for batch in reader.epochs(3)])
    resumed = [row for slices in zip(*tail, strict=True) for s in slices for row in s]
    assert resumed == whole[num_consumed:]


def test_epoch_resumes_where_the_last_loop_stopped(dataset: Dataset) -> None:
    reader = Reader(dataset, "train", ReaderOptions(batch_size=100))
    assert (reader.num_batches, reader.num_remaining_batches, reader.epoch_index) == (6, 6, 0)
    head = []
    for batch in reader.epoch():
        head += rows_of(batch)
        if len(head) == 200:
            break
    assert reader.get_state()["row"] == 200
    assert reader.num_remaining_batches == 4
    assert head + [row for batch in reader.epoch() for row in rows_of(batch)] == list(range(NUM_ROWS))
    assert (reader.epoch_index, reader.get_state()["row"]) == (1, 0)
    assert list(reader.epochs(1)) == []
    assert len(list(reader.epoch())) == 6


def test_batches_own_their_memory(dataset: Dataset) -> None:
    reader = Reader(dataset, "train", ReaderOptions(batch_size=10, prefetch_batches=0))
    batches = reader.epoch()
    first = next(batches)
    for tensor in (first.dense, first.label, first.sparse.values, first.sparse.lengths):
        tensor.zero_()
    assert rows_of(next(batches)) == list(range(10, 20))


def refuse_state(reader: Reader, message: str, **changes: Any) -> None:
    with pytest.raises(MesetaError, match=message):
        reader.set_state({**reader.get_state(), **changes})


def test_states_of_other_orders_are_refused(dataset: Dataset) -> None:
    reader = Reader(dataset, "train", ReaderOptions(batch_size=10, shuffle=True))
    refuse_state(reader, "saved with seed 1, but this reader has 0", seed=1)
    refuse_state(reader, "saved with window_rows 5", window_rows=5)
    refuse_state(reader, "saved with num_rows 3", num_rows=3)
    refuse_state(reader, "is not a position", row=NUM_ROWS + 1)
    refuse_state(reader, "is not a position", epoch=-1)
    with pytest.raises(MesetaError, match="key 'format' is missing"):
        reader.set_state({})


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"window_rows": 0}, {"prefetch_batches": -1}])
def test_bad_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(MesetaError, match=f"{next(iter(options))} must be at least"):
        ReaderOptions(**{"batch_size": 1, **options})


@pytest.mark.parametrize(("rank", "num_ranks"), [(2, 2), (-1, 2), (0, 0)])
def test_bad_ranks_are_refused(dataset: Dataset, rank: int, num_ranks: int) -> None:
    with pytest.raises(MesetaError, match="rank must be in"):
        Reader(dataset, "train", ReaderOptions(batch_size=1), rank=rank, num_ranks=num_ranks)


def test_unknown_split_is_named(dataset: Dataset) -> None:
    with pytest.raises(MesetaError, match="did you mean 'train'"):
        Reader(dataset, "trian", ReaderOptions(batch_size=1))


def read_all(folder: Path, columns: Sequence[str] = ()) -> None:
    for _ in Reader(folder, "train", ReaderOptions(batch_size=100)).epoch():
        pass


def test_damaged_files_are_named(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", multi_valued=False)
    path = tmp_path / "data" / "train" / "part-00001.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with pytest.raises(MesetaError, match=r"part-00001.parquet' cannot be read"):
        read_all(tmp_path / "data")
    damaged = bytearray(whole)
    damaged[4:200] = bytes(196)
    path.write_bytes(bytes(damaged))
    with pytest.raises(MesetaError, match=r"part-00001.parquet' cannot be read"):
        read_all(tmp_path / "data")
    table = pq.read_table(pa.BufferReader(whole))
    pq.write_table(table.drop_columns(["d1"]), path)
    with pytest.raises(MesetaError, match="has no column 'd1'"):
        read_all(tmp_path / "data")
    pq.write_table(table.slice(1), path)
    with pytest.raises(MesetaError, match=r"holds 149 rows, but dataset.json says 150"):
        read_all(tmp_path / "data")
    path.unlink()
    with pytest.raises(MesetaError, match=r"part-00001.parquet' cannot be read"):
        read_all(tmp_path / "data")


def test_a_batch_that_is_let_go_is_freed(jagged_dataset: Dataset) -> None:
    batches = Reader(jagged_dataset, "train", ReaderOptions(batch_size=16, prefetch_batches=2)).epoch()
    for _ in range(3):
        held = weakref.ref(next(batches))
        assert held() is None
