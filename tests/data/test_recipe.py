"""Tests that a recipe and the prepared dataset have the same description and bitwise identical batches."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.click_log import make_lines, write_tsv
from data.recipe_cases import CASES, batches, both, described, make_small, raw_options
from meseta.data import Dataset, PrepareOptions, Reader, ReaderOptions
from meseta.data.formats import text as text_format
from meseta.data.formats.format import Block
from meseta.data.prepare import prepare
from meseta.data.prepare.recipe_index import RowRange
from meseta.data.prepare.recipe_rows import CursorPool
from meseta.data.read.recipe_rows import RecipeRows
from meseta.data.read.rows import WindowTimer
from meseta.data.read.selection import RowSelection
from meseta.data.synth import SynthOptions, write_click_log
from meseta.spec import MesetaError
from sampling import fewer_examples
from small_run import REAL_ROWS


def equal(whole: Dataset, recipe: Dataset, **options: Any) -> bool:
    """Whether all batches of all splits are equal."""
    return all(batches(whole, split, **options) == batches(recipe, split, **options) for split in whole.splits)


@pytest.mark.parametrize(("kind", "split", "more"), CASES)
def test_batches_of_every_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, split: str, more: dict[str, Any]
) -> None:
    make_small(monkeypatch)
    whole, recipe = both(tmp_path, **raw_options(tmp_path, kind, split, more))
    assert described(whole) == described(recipe)
    assert {name: rows.num_rows for name, rows in recipe.splits.items()}["train"] > 100
    assert not list((tmp_path / "recipe").glob("*/*part*"))
    for name in whole.sparse:
        if name.vocabulary is not None:
            table, again = (pq.read_table(dataset.dir / name.vocabulary) for dataset in (whole, recipe))
            assert table.equals(again)
    if whole.touched is not None:
        assert (whole.dir / whole.touched).read_bytes() == (recipe.dir / whole.touched).read_bytes()
    assert equal(whole, recipe)
    assert equal(whole, recipe, shuffle=True, seed=7)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("csv", {"filter": "city == 'Paris' or age > 20", "negative_keep": 0.6}),
        ("csv", {"filter": "ts >= '2023-11-14T22:15:00'"}),
        pytest.param("tsv", {"negative_keep": 0.3}, marks=pytest.mark.soak),
        ("parquet", {"filter": "price >= 1 and click == 0"}),
    ],
)
def test_rows_that_are_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any]
) -> None:
    make_small(monkeypatch)
    whole, recipe = both(tmp_path, **raw_options(tmp_path, kind, "drawn", {}))
    assert 0 < Reader(whole, "train", ReaderOptions(batch_size=1, **options)).num_rows < whole.splits["train"].num_rows
    assert equal(whole, recipe, **options)
    assert equal(whole, recipe, shuffle=True, **options)


def test_labels_and_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)
    whole, recipe = both(tmp_path, **raw_options(tmp_path, "parquet", "drawn", {}))
    for labels in (["buy"], ["buy", "click"]):
        options = ReaderOptions(batch_size=50, shuffle=True)
        for rank in range(3):
            readers = [
                Reader(one.with_labels(labels), "train", options, rank=rank, num_ranks=3) for one in (whole, recipe)
            ]
            assert [b.label.tolist() for b in readers[0].epoch()] == [b.label.tolist() for b in readers[1].epoch()]


@fewer_examples(2)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    block_bytes=st.integers(60, 900),
    share=st.sampled_from([0.0, 0.15, 0.5]),
    seed=st.integers(0, 2**31),
    shuffle=st.booleans(),
    data=st.data(),
)
def test_jagged_files_and_blocks(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    block_bytes: int,
    share: float,
    seed: int,
    shuffle: bool,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("jagged")
    draw = np.random.default_rng(seed)
    ends = [data.draw(st.sampled_from(["", "\n", "\r\n", "\n\n"])) for _ in lengths]
    for number, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        fields = [
            [draw.integers(2), draw.integers(99), 'q"' * draw.integers(3) + "\n" * draw.integers(2)]
            for _ in range(length)
        ]
        text = "\n".join(f'{label},{price},"{city.replace(chr(34), 2 * chr(34))}"' for label, price, city in fields)
        (folder / f"{number}.csv").write_bytes(f"label,price,city\n{text}{end}".encode())
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        patch.setattr(text_format, "BLOCK_BYTES", block_bytes)
        rows = {"test_fraction": 0.0, "valid_fraction": 0.0} if share == 0.0 else {"test_fraction": share}
        try:
            whole, recipe = both(
                folder, sources=[f"{folder}/*.csv"], dense=["price"], sparse=["city"], hash_rows=50, seed=seed, **rows
            )
        except MesetaError as error:  # no row for training, or a row that is too long for four blocks
            assert "is left for training" in str(error) or "no row ends within" in str(error)
            return
        assert described(whole) == described(recipe)
        assert equal(whole, recipe, shuffle=shuffle)


def test_whole_row_groups_and_real_rows(tmp_path: Path) -> None:
    """Default sizes: 80,000 rows are three row groups, in two windows."""
    write_click_log(SynthOptions(out=tmp_path / "raw", num_rows=80_000))
    whole, recipe = both(tmp_path, sources=[f"{tmp_path}/raw/*.tsv"], valid_fraction=0.05)
    assert described(whole) == described(recipe)
    for options in ({"shuffle": False}, {"shuffle": True}):
        assert equal(whole, recipe, batch_size=4096, window_rows=65_536, **options)


@pytest.mark.skipif(not REAL_ROWS.exists(), reason="the real rows are not there")
@pytest.mark.parametrize("vocabulary", [False, True])
def test_real_rows(tmp_path: Path, vocabulary: bool) -> None:
    options = {"sources": [str(REAL_ROWS)], "valid_fraction": 0.1, "vocabulary": vocabulary, "min_count": 3}
    whole, recipe = both(tmp_path, **options)
    assert described(whole) == described(recipe)
    assert equal(whole, recipe, shuffle=True, batch_size=512, window_rows=262_144)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_sources_by_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    make_small(monkeypatch)
    options = raw_options(tmp_path, kind, "drawn", {})
    root = f"memory://{tmp_path.name}-{kind}"
    fsspec.filesystem("memory").put(f"{tmp_path}/raw/", root, recursive=True)
    whole = prepare(PrepareOptions(out=tmp_path / "whole", **options))
    recipe = prepare(
        PrepareOptions(out=tmp_path / "recipe", recipe_only=True, **{**options, "sources": [f"{root}/*.{kind}"]})
    )
    assert equal(whole, recipe, shuffle=True)


def test_like_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meseta.data.prepare.prepare_like import PrepareLikeOptions, prepare_like

    make_small(monkeypatch)
    whole, recipe = both(tmp_path, **raw_options(tmp_path, "tsv", "drawn", {"vocabulary": True, "min_count": 2}))
    write_tsv(tmp_path / "new.tsv", make_lines(50, seed=9))
    sources = [str(tmp_path / "new.tsv")]
    likes = [
        prepare_like(PrepareLikeOptions(sources=sources, out=tmp_path / f"like-{one.dir.name}", like=one.dir))[0]
        for one in (whole, recipe)
    ]
    assert likes[1].recipe is None
    assert batches(likes[0], "test") == batches(likes[1], "test")


def test_what_making_rows_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured times are those of a stopwatch, and no time counts as decoding."""
    make_small(monkeypatch)
    _, recipe = both(tmp_path, **raw_options(tmp_path, "tsv", "drawn", {}))
    rows = RecipeRows(recipe, "train", RowSelection(recipe, condition=None, negative_keep=1.0, seed=0), shuffle=True)
    read, times = CursorPool.read, WindowTimer()

    def slow(self: CursorPool, stretch: RowRange) -> Block:
        time.sleep(0.05)
        return read(self, stretch)

    monkeypatch.setattr(CursorPool, "read", slow)
    begin_s = time.perf_counter()
    rows.read(range(len(rows.group_rows)), by_row=True, times=times)
    passed_s = time.perf_counter() - begin_s
    assert 0 < times.transform_s < times.storage_s and times.decode_s == 0
    assert times.total_s == pytest.approx(passed_s, rel=0.2)
