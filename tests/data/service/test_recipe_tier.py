"""Readers make the rows of a recipe from its raw files: the batches are those of the prepared dataset."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from data.click_log import make_lines
from data.recipe_cases import both, make_small, raw_options
from data.service.tier import Tier, digest, running
from meseta.data import Reader, ReaderOptions
from meseta.data.service.client.reader import ServedReader
from meseta.spec import MesetaError


def served(tier: Tier, split: str, options: ReaderOptions, **more: Any) -> list[Any]:
    reader = ServedReader(tier.service, split, options, **more)
    return [reader.num_rows, reader.excluded_rows, reader.get_state(), *map(digest, reader.epochs(2))]


def local(whole: Any, split: str, options: ReaderOptions, **more: Any) -> list[Any]:
    reader = Reader(whole, split, options, **more)
    return [reader.num_rows, reader.excluded_rows, reader.get_state(), *map(digest, reader.epochs(2))]


@pytest.mark.parametrize(
    ("kind", "chosen"), [("csv", "label == 1"), pytest.param("parquet", "click == 1", marks=pytest.mark.soak)]
)
def test_batches_are_those_of_the_prepared_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, chosen: str
) -> None:
    make_small(monkeypatch)
    whole, recipe = both(tmp_path, **raw_options(tmp_path, kind, "drawn", {"vocabulary": True, "min_count": 2}))
    with running({"log": recipe.dir}, 2) as tier:
        for split, choice in (("train", {"shuffle": True}), ("valid", {}), ("test", {"filter": chosen})):
            options = ReaderOptions(batch_size=21, window_rows=70, **choice)
            for rank in range(2):
                share = {"rank": rank, "num_ranks": 2}
                assert served(tier, split, options, **share) == local(whole, split, options, **share)


def test_zipped_sources_come_in_order_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)
    (tmp_path / "raw").mkdir()
    for number in range(2):
        lines = make_lines(300, seed=number)
        (tmp_path / f"raw/{number}.tsv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    whole, recipe = both(tmp_path, sources=[f"{tmp_path}/raw/*"], hash_rows=300)
    plain, shuffled = (ReaderOptions(batch_size=21, window_rows=70, shuffle=shuffle) for shuffle in (False, True))
    message = (
        r"0.tsv.gz' is compressed, or not in UTF-8, so its rows can only be read in order and not shuffled: "
        r"convert it and make"
    )
    with running({"log": recipe.dir}, 2) as tier:
        assert served(tier, "train", plain) == local(whole, "train", plain) == local(recipe, "train", plain)
        with pytest.raises(MesetaError, match=message):
            ServedReader(tier.service, "train", shuffled)
    with pytest.raises(MesetaError, match=message):
        Reader(recipe, "train", shuffled)


def test_a_source_that_changes_ends_all_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)
    _, recipe = both(tmp_path, **raw_options(tmp_path, "tsv", "drawn", {}))
    with running({"log": recipe.dir}, 1) as tier:
        reader = ServedReader(tier.service, "train", ReaderOptions(batch_size=21, window_rows=70, prefetch_batches=0))
        batches = reader.epoch()
        next(batches)
        for path in sorted((tmp_path / "raw").glob("*.tsv")):
            path.write_bytes(path.read_bytes()[:-1000])
        with pytest.raises(MesetaError, match=r"'.*\.tsv' has changed since the recipe was made: restore it, or make"):
            list(batches)
        batches.close()
