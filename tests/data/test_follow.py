"""A growing folder: every part once in the order of names, resumed to the row, the same for any number of ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from data.click_log import Oracle, make_lines, write_tsv
from meseta.data import Batch, ReaderOptions
from meseta.data.prepare import PrepareOptions, prepare
from meseta.data.read.following_reader import FollowingReader
from meseta.spec import MesetaError

SIZES = {"day_0": 130, "day_1": 70, "day_2": 100}
LINES = {name: make_lines(size, seed=place) for place, (name, size) in enumerate(SIZES.items())}
OPTIONS = ReaderOptions(batch_size=40, shuffle=True, seed=2, prefetch_batches=2)


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("days")
    for name, lines in LINES.items():
        tsv = write_tsv(folder / f"{name}.tsv", lines)
        prepare(PrepareOptions(sources=[str(tsv)], out=folder / "parts" / name, test_fraction=0.0, hash_rows=1000))
    return folder / "parts"


def grow(days: Path, folder: Path, *names: str) -> None:
    for name in names:
        shutil.copytree(days / name, folder / name)


def same(one: list[Batch], other: list[Batch]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.dense, b.dense)
        assert torch.equal(a.sparse.values, b.sparse.values)
        assert torch.equal(a.label, b.label)


def test_all_parts_in_the_order_of_their_names_scaled_like_the_first(days: Path) -> None:
    options = ReaderOptions(batch_size=40)
    batches = list(FollowingReader(days, options).batches())
    assert [batch.batch_size for batch in batches] == [40, 40, 40, 10, 40, 30, 40, 40, 20]
    lines = [line for part in LINES.values() for line in part]
    oracle = Oracle.of(lines, LINES["day_0"], 1000, seed=0)
    np.testing.assert_allclose(torch.cat([batch.dense for batch in batches]), oracle.dense, rtol=1e-4, atol=1e-5)
    ids = torch.cat([batch.sparse.values.view(26, -1) for batch in batches], dim=1)
    assert ids.T.tolist() == oracle.sparse
    assert torch.cat([batch.label for batch in batches]).tolist() == oracle.label


def test_parts_that_come_meanwhile_are_taken_up(days: Path, tmp_path: Path) -> None:
    grow(days, tmp_path, "day_0")
    reader = FollowingReader(tmp_path, OPTIONS, poll_interval_s=0.01)
    seen = []
    for place, batch in enumerate(reader.batches(idle_timeout_s=0.1)):
        seen.append(batch)
        if place == 2:
            grow(days, tmp_path, "day_1")
            shutil.copytree(days / "day_2", tmp_path / "day_2.tmp")  # as `prepare` leaves it just before its end
    assert len(seen) == 6
    (tmp_path / "day_2.tmp").rename(tmp_path / "day_2")
    seen += reader.batches()
    same(seen, list(FollowingReader(days, OPTIONS).batches()))
    assert list(reader.batches()) == []


@pytest.mark.parametrize("num_taken", [0, 2, 4, 5, 9])
def test_resumed_to_the_row(days: Path, tmp_path: Path, num_taken: int) -> None:
    """Resumes inside a part and at its end, after a consumed part was deleted."""
    whole = list(FollowingReader(days, OPTIONS).batches())
    grow(days, tmp_path, *SIZES)
    first = FollowingReader(tmp_path, OPTIONS)
    batches = first.batches()
    for _ in range(num_taken):
        next(batches)
    state = json.loads(json.dumps(first.get_state()))
    for name in state["done"]:
        shutil.rmtree(tmp_path / name)
    second = FollowingReader(tmp_path, OPTIONS)
    second.set_state(state)
    same(list(second.batches()), whole[num_taken:])


def test_two_ranks_share_every_batch(days: Path) -> None:
    options = ReaderOptions(batch_size=41, last_batch="pad")
    whole = list(FollowingReader(days, options).batches())
    ranks = [list(FollowingReader(days, options, rank=rank, num_ranks=2).batches()) for rank in range(2)]
    for batch, *slices in zip(whole, *ranks, strict=True):
        assert torch.equal(torch.cat([part.dense for part in slices]), batch.dense)
        assert sum(part.num_padding for part in slices) == batch.num_padding
        assert not batch.dense[batch.batch_size - batch.num_padding :].any()


def test_ranks_see_what_the_first_one_sees(days: Path, tmp_path: Path) -> None:
    """A rank that lists the folder later, with one more part, must not begin that part."""
    grow(days, tmp_path, "day_0")
    messages: list[object] = []

    def broadcast(message: object) -> object:
        messages.append(message)
        return message

    first = list(FollowingReader(tmp_path, OPTIONS, broadcast=broadcast).batches())
    grow(days, tmp_path, "day_1")
    heard = iter(messages)
    same(list(FollowingReader(tmp_path, OPTIONS, broadcast=lambda message: next(heard)).batches()), first)


def test_parts_with_the_vocabulary_of_the_first_one(tmp_path: Path) -> None:
    values = [[f"c{number * number % (20 + 9 * day)}" for number in range(80)] for day in range(3)]
    for day, cities in enumerate(values):
        rows = "".join(f"{number % 2},{city}\n" for number, city in enumerate(cities))
        (tmp_path / f"{day}.csv").write_text(f"click,city\n{rows}")
    parts = tmp_path / "parts"
    sources = [[f"{tmp_path}/{day}.csv"] for day in range(3)]
    first = PrepareOptions(sources=sources[0], out=parts / "0", vocabulary=True, min_count=2, test_fraction=0.0)
    words = pq.read_table(prepare(first).dir / "vocabulary/city.parquet")["value"].to_pylist()
    prepare(PrepareOptions(sources=sources[1], out=parts / "1", like=parts / "0"))
    reader = FollowingReader(parts, ReaderOptions(batch_size=80))
    ids = torch.cat([batch.sparse.values for batch in reader.batches()]).tolist()
    assert ids == [words.index(city) if city in words else 0 for city in values[0] + values[1]] and 0 in ids
    state = json.loads(json.dumps(reader.get_state()))
    prepare(PrepareOptions(sources=sources[2], out=parts / "2", like=parts / "1", grow=True))
    later = FollowingReader(parts, ReaderOptions(batch_size=80))
    later.set_state(state)
    with pytest.raises(MesetaError, match=r"part '2' .* another vocabulary of 'city' .*train --start-from"):
        list(later.batches())


def test_what_cannot_be_one_stream(days: Path, tmp_path: Path) -> None:
    with pytest.raises(MesetaError, match="is not a directory; create it"):
        FollowingReader(tmp_path / "nowhere", OPTIONS)
    grow(days, tmp_path, "day_1")
    reader = FollowingReader(tmp_path, OPTIONS)
    assert len(list(reader.batches())) == 2
    grow(days, tmp_path, "day_0")
    with pytest.raises(MesetaError, match=r"part 'day_0' .* was added after 'day_1' was read"):
        list(reader.batches())
    source = str(write_tsv(tmp_path / "x.tsv", LINES["day_2"]))
    prepare(PrepareOptions(sources=[source], out=tmp_path / "day_3", hash_rows=500))
    shutil.rmtree(tmp_path / "day_0")
    with pytest.raises(MesetaError, match=r"part 'day_3' .* differs from the first part in sparse: .*500"):
        list(reader.batches())
    shutil.rmtree(tmp_path / "day_3")
    prepare(PrepareOptions(sources=[source], out=tmp_path / "day_4", vocabulary=True))
    with pytest.raises(MesetaError, match=r"part 'day_4' .* differs from the first part in sparse"):
        list(reader.batches())
    with pytest.raises(MesetaError, match="state of format None"):
        reader.set_state({})
