"""Changed sources, damaged recipes, and what wants rows in files: refused in one line, and never other rows."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.click_log import make_lines, write_tsv
from data.recipe_cases import batches, both, make_small, raw_options
from meseta.data import Dataset, PrepareOptions, Reader, ReaderOptions
from meseta.data.dataset.check import check_dataset
from meseta.data.dataset.dataset import DATASET_FILE
from meseta.data.dataset.describe import describe
from meseta.data.prepare import prepare, recipe_rows
from meseta.data.prepare.recipe import RECIPE_FILE
from meseta.data.read.key_columns import KeyColumns
from meseta.spec import MesetaError
from sampling import sample

OPTIONS = ReaderOptions(batch_size=23, window_rows=100, prefetch_batches=0)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def replace(path: Path) -> None:
    """Other bytes, as many."""
    content = path.read_bytes()
    path.write_bytes(content[len(content) // 2 :] + content[: len(content) // 2])


def touch(path: Path) -> None:
    os.utime(path, (1, 1))


@pytest.mark.parametrize("kind", ["tsv", "parquet"])
@pytest.mark.parametrize(
    ("spoil", "problem"),
    [(cut, "has changed since the recipe was made"), (replace, "has changed since the recipe was made"),
     (touch, "has changed since the recipe was made"), (os.unlink, r"can no longer be read \(No such file .*\)")],
)  # fmt: skip
def test_a_source_that_is_another(
    tmp_path: Path, small: None, kind: str, spoil: Callable[[Path], None], problem: str
) -> None:
    recipe = prepare(PrepareOptions(out=tmp_path / "out", recipe_only=True, **raw_options(tmp_path, kind, "drawn", {})))
    source = tmp_path / f"raw/2.{kind}"
    message = (
        rf"^source '{source}' {problem}: restore it, or make the recipe again with `meseta prepare --recipe-only`$"
    )
    reader = Reader(recipe, "train", OPTIONS)
    with_open_files = iter(reader.epoch())
    next(with_open_files)
    spoil(source)
    with pytest.raises(MesetaError, match=message):
        list(with_open_files)
    with pytest.raises(MesetaError, match=message):
        Reader(recipe, "train", OPTIONS)


def test_changed_rows_with_the_same_size_and_time(tmp_path: Path, small: None) -> None:
    """Another file of the same size and time, with fewer rows, or rows that are none."""
    lines = make_lines(200)
    source = write_tsv(tmp_path / "log.tsv", lines)
    recipe = prepare(PrepareOptions(sources=[str(source)], out=tmp_path / "out", recipe_only=True))
    state, content = source.stat(), source.read_bytes()
    for other in (content.replace(b"\n", b"\t", 40), b"\n" * len(content), bytes(len(content))):
        source.write_bytes(other)
        os.utime(source, ns=(state.st_atime_ns, state.st_mtime_ns))
        with pytest.raises(MesetaError, match=r"log\.tsv'"):
            list(Reader(recipe, "train", OPTIONS).epoch())


def test_what_wants_files(tmp_path: Path, small: None) -> None:
    recipe = prepare(
        PrepareOptions(out=tmp_path / "out", recipe_only=True, **raw_options(tmp_path, "tsv", "drawn", {}))
    )
    way_out = "needs them; prepare it without --recipe-only"
    for call in (
        lambda: check_dataset(recipe.dir),
        lambda: describe(recipe),
        lambda: KeyColumns(recipe, "test", ["cat_1"]),
    ):
        with pytest.raises(MesetaError, match=f"is a recipe without Parquet files, but .* {way_out}"):
            call()
    assert KeyColumns(recipe, "test", []).take(5).num_rows == 0


def test_zipped_files_are_read_once_from_the_beginning(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds if only every second group is read: each cursor decompresses a byte once."""
    (tmp_path / "log.tsv.gz").write_bytes(gzip.compress("\n".join(make_lines(900)).encode()))
    whole, recipe = both(tmp_path, sources=[f"{tmp_path}/log.tsv.gz"], test_fraction=0.0, hash_rows=100)
    opened = 0

    def open_one(
        self: recipe_rows.CursorPool,
        stretch: recipe_rows.RowRange,
        take: Callable[..., object] = recipe_rows.CursorPool._acquire,
    ) -> object:
        nonlocal opened
        before = {id(cursor) for _, cursor in self._idle}
        cursor = take(self, stretch)
        opened += id(cursor) not in before
        return cursor

    monkeypatch.setattr(recipe_rows.CursorPool, "_acquire", open_one)
    assert batches(recipe, "train") == batches(whole, "train")
    assert 1 <= opened <= 2 * recipe_rows.MAX_IDLE_CURSORS_PER_FILE, "two epochs"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        prepare(PrepareOptions(out=folder / "out", recipe_only=True, **raw_options(folder, "csv", "drawn", {})))
    return folder / "out"


@pytest.mark.parametrize("name", [RECIPE_FILE, "index/blocks.parquet", "index/groups.parquet"])
def test_damaged_files(sound: Path, tmp_path: Path, name: str) -> None:
    expected = batches(Dataset.load(sound), "valid")
    shutil.copytree(sound, tmp_path / "out")
    file, content = tmp_path / "out" / name, (sound / name).read_bytes()
    draw = random.Random(name)
    for _ in range(20):
        place = draw.randrange(len(content))
        file.write_bytes(content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :])
        with pytest.raises(
            MesetaError, match=r"does not match the checksum in .*; make the recipe again with `meseta prep"
        ):
            Reader(tmp_path / "out", "valid", OPTIONS)
    file.unlink()
    with pytest.raises(
        MesetaError, match=r"cannot be read .*; make the recipe again with `meseta prepare --recipe-only`"
    ):
        Reader(tmp_path / "out", "valid", OPTIONS)
    file.write_bytes(content)
    assert batches(Dataset.load(tmp_path / "out"), "valid") == expected


def sealed(folder: Path) -> None:
    """Let recipe.json and dataset.json speak of what the files are now."""
    document = json.loads((folder / RECIPE_FILE).read_text())
    for name in ("blocks", "groups"):
        document[name]["sha256"] = sha256((folder / document[name]["path"]).read_bytes()).hexdigest()
    (folder / RECIPE_FILE).write_text(json.dumps(document))
    dataset = json.loads((folder / DATASET_FILE).read_text())
    dataset["recipe"] = sha256((folder / RECIPE_FILE).read_bytes()).hexdigest()
    (folder / DATASET_FILE).write_text(json.dumps(dataset))


@pytest.mark.parametrize("seed", sample(range(200), 12, seed=1))
def test_a_hostile_index_ends_in_one_line(sound: Path, tmp_path: Path, seed: int) -> None:
    """Numbers that no sources have, under digests that fit."""
    shutil.copytree(sound, tmp_path / "out")
    draw = np.random.default_rng(seed)
    for name in ("blocks", "groups"):
        path = tmp_path / f"out/index/{name}.parquet"
        table = pq.read_table(path)
        for _ in range(draw.integers(1, 4)):
            column, row = draw.integers(table.num_columns), draw.integers(table.num_rows)
            values = table.column(int(column)).to_numpy().copy()
            values[row] = draw.choice([values[row] + 1, values[row] - 1, -1, 0, 2**40, 2**62, draw.integers(500)])
            table = table.set_column(int(column), table.schema.field(int(column)), pa.array(values))
        pq.write_table(table, path)
    sealed(tmp_path / "out")
    try:
        for split in ("train", "valid", "test"):
            list(Reader(tmp_path / "out", split, OPTIONS).epoch())
    except MesetaError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_rows": 0}, "'group_rows': Input should be greater"),
        ({"splits": ["train", "other"]}, "is not a split"),
        ({"splits": ["train"]}, "has other splits than dataset.json"),
        ({"sources": []}, "'sources': Tuple should have at least 1 item"),
        ({"surprise": 1}, "'surprise': Extra inputs"),
        ({"format": "meseta.recipe/9"}, "'format': Input should be 'meseta.recipe/1'"),
    ],
)
def test_a_recipe_of_another_form(sound: Path, tmp_path: Path, change: dict[str, object], message: str) -> None:
    shutil.copytree(sound, tmp_path / "out")
    path = tmp_path / "out" / RECIPE_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    sealed(tmp_path / "out")
    with pytest.raises(MesetaError, match=f"recipe .*{message}.*; make the recipe again"):
        Reader(tmp_path / "out", "train", OPTIONS)
