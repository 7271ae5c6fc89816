"""Multi-valued text columns without a schema file: named by options, with separators that are inferred or named."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh64_intdigest

from bad_input.commands import run_here
from data.click_log import read_split
from meseta.cli.prepare import column_options
from meseta.data import Reader, ReaderOptions
from meseta.data.prepare import PrepareOptions, load_prepared, prepare, read_layout
from meseta.data.prepare.prepare_like import PrepareLikeOptions, prepare_like
from meseta.data.schema.roles import NamedColumns
from meseta.data.schema.separators import infer_separator
from meseta.spec import MesetaError
from sampling import sample

GENRES = ["Action", "Comedy, Musical", "Sci-Fi", "Film-Noir", "Children's", "Ávila"]
FORMATS = ["log.csv", "log.jsonl", "log.parquet"]
NUM_ROWS = 90


def make_table(seed: int = 0) -> dict[str, list[Any]]:
    draw, rows = random.Random(seed), range(NUM_ROWS)
    return {
        "click": [draw.randrange(2) for _ in rows],
        "user_id": [draw.randrange(20) for _ in rows],
        "genres": ["|".join(draw.sample(GENRES, draw.randrange(4))) for _ in rows],
        "tag_ids": [" ".join(str(draw.randrange(9)) for _ in range(1 + draw.randrange(3))) for _ in rows],
        "price": [draw.random() for _ in rows],
    }


def write(path: Path, table: dict[str, list[Any]]) -> Path:
    rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    if path.suffix == ".parquet":
        pq.write_table(pa.table(table), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([list(table), *(row.values() for row in rows)])
    return path


def options(path: Path, out: str = "out", **chosen: Any) -> PrepareOptions:
    return PrepareOptions(sources=[str(path)], out=path.parent / out, **{"hash_rows": 50, **chosen})


def files(folder: Path) -> dict[str, bytes]:
    """Return the content of all files except the record of the options."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "prepare.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("name", sample(FORMATS, k=1, seed=0))
def test_the_dataset_is_that_of_a_schema_file(tmp_path: Path, name: str) -> None:
    table = make_table()
    log = write(tmp_path / name, table)
    (tmp_path / "schema.yaml").write_text(
        "label: click\ndense: [price]\ncategorical: [user_id, genres, tag_ids]\nwhole_numbers: [user_id, tag_ids]\n"
        "multi_valued: {genres: '|', tag_ids: ' '}\n"
    )
    outs = {
        "inferred": {"multi_valued": ["genres", "tag_ids"]},
        "named": {"multi_valued": ["genres=|", "tag*= "]},
        "schema": {"schema": tmp_path / "schema.yaml"},
    }
    for out, chosen in outs.items():
        prepare(options(log, out, **chosen))
    assert files(tmp_path / "inferred") == files(tmp_path / "named") == files(tmp_path / "schema")
    # The ids are those of the published hash of each value.
    seed = xxh64_intdigest(b"genres", 0)
    hashed = {genre: xxh64_intdigest(genre.encode(), seed) * 50 >> 64 for genre in GENRES}
    stored = [ids for split in ("train", "test") for ids in read_split(tmp_path / "named", split)["genres"].to_pylist()]
    expected = [[hashed[genre] for genre in text.split("|") if genre] for text in table["genres"]]
    assert sorted(stored) == sorted(expected)
    new = write(tmp_path / f"new.{name.partition('.')[2]}", {k: v for k, v in table.items() if k != "click"})
    prepare_like(PrepareLikeOptions(sources=[str(new)], out=tmp_path / "new", like=tmp_path / "inferred"))
    assert read_split(tmp_path / "new", "test")["genres"].to_pylist() == expected


@pytest.mark.soak
@pytest.mark.parametrize("name", FORMATS)
def test_a_recipe_encodes_the_same_rows(tmp_path: Path, name: str) -> None:
    log = write(tmp_path / name, make_table())
    batches = []
    for out, recipe_only in (("rows", False), ("recipe", True)):
        chosen = {"multi_valued": ["genres=|", "tag_ids"], "recipe_only": recipe_only}
        prepare(options(log, out, vocabulary=True, min_count=2, **chosen))
        batches.append(list(Reader(tmp_path / out, "train", ReaderOptions(batch_size=30)).epoch()))
    for written, encoded in zip(*batches, strict=True):
        assert written.sparse.values.equal(encoded.sparse.values)
        assert written.sparse.lengths.equal(encoded.sparse.lengths) and len(written.sparse.lengths) > 0


def test_the_printed_schema_gives_the_same_dataset(tmp_path: Path) -> None:
    log = write(tmp_path / "log.csv", make_table())
    ended = run_here("prepare", log, "--out", tmp_path / "a", "--multi-valued", "genres,tag_ids= ")
    assert ended.code == 0
    printed = ended.out
    assert "- genres                      # values separated by '|', inferred: " in printed
    assert "- tag_ids                     # values separated by ' ', as --multi-valued says: " in printed
    assert '  multi_valued:\n    genres: "|"\n    tag_ids: " "\n' in printed
    arguments = ["prepare", log, "--out", tmp_path / "b"]
    ended = run_here(*arguments, "--multi-valued", "genres", "--multi-valued", "tag_ids", "--print-schema")
    (tmp_path / "schema.yaml").write_text(ended.out)
    assert run_here(*arguments, "--schema", tmp_path / "schema.yaml").code == 0
    assert files(tmp_path / "a") == files(tmp_path / "b")


BAD = [
    (["genrez"], "has no column 'genrez' for --multi-valued; did you mean 'genres'"),
    (["x*=|"], r"has no column 'x\*' for --multi-valued"),
    (["genres=||"], "'genres=||': the separator '||' must be one ASCII character, .* write --multi-valued 'genres=|'"),
    (["genres="], "'genres=': the separator '' must be one ASCII character"),
    (["genres=é"], "the separator 'é' must be one ASCII character"),
    (["genres", "genres=;"], "--multi-valued selects column 'genres' twice, with different separators"),
    (["single"], "of 'single' for --multi-valued: no usual separator occurs in its values: 'Sci-Fi'; name it"),
    (["seen"], "its values are times: '2026-01-31 9:30'; leave it out of --multi-valued, or name it"),
    (["brackets"], r"its values have brackets: '\[1, 2\]'; write a\|b in place of"),
    (["nothing"], "'nothing' for --multi-valued: no sampled row has a value; name it, as in .* 'nothing=|'"),
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_columns_without_a_separator_are_refused(tmp_path: Path, name: str) -> None:
    strange = {
        "single": ["Sci-Fi"], "seen": ["2026-01-31 9:30"], "brackets": ["[1, 2]"], "nothing": [""],
    }  # fmt: skip
    log = write(tmp_path / name, make_table() | {key: values * NUM_ROWS for key, values in strange.items()})
    for entries, message in BAD:
        with pytest.raises(MesetaError, match=message):
            read_layout(options(log, multi_valued=entries))
    message = (
        "'user_id' for --multi-valued is int64, but only text"
        if name == "log.parquet"
        else "its values are single numbers: "
    )
    with pytest.raises(MesetaError, match=message):
        read_layout(options(log, multi_valued=["user_id"]))
    for other, message in (
        ({"dense": ["genres"]}, "'genres' is selected by --dense and --multi-valued"),
        ({"ignore": ["genres"]}, "'genres' is named by --ignore and as a feature"),
        ({"schema": tmp_path / "schema.yaml"}, "--schema cannot be used with .* --multi-valued"),
    ):
        with pytest.raises(MesetaError, match=message):
            read_layout(options(log, multi_valued=["genres"], **other))


def test_lists_and_other_formats_are_refused(tmp_path: Path) -> None:
    table = make_table() | {"bag": [["a", "b"]] * NUM_ROWS}
    for name, message in (
        ("log.jsonl", "'bag' for --multi-valued contains lists"),
        ("log.parquet", "'bag' for --multi-valued is list<"),
    ):
        with pytest.raises(MesetaError, match=message):
            read_layout(options(write(tmp_path / name, table), multi_valued=["bag"]))
    (tmp_path / "log.svm").write_text("1 1:1\n0 2:1\n")
    with pytest.raises(MesetaError, match="only --sparse or categorical"):
        read_layout(options(tmp_path / "log.svm", multi_valued=["features"]))
    (tmp_path / "day").write_text("\t".join(["1", *"1" * 13, *"a" * 26]) + "\n")
    with pytest.raises(MesetaError, match="--multi-valued, --ignore and --time do not apply to Criteo logs"):
        read_layout(options(tmp_path / "day", multi_valued=["cat_1"]))
    (tmp_path / "days" / "tags=a|b").mkdir(parents=True)
    write(tmp_path / "days" / "tags=a|b" / "log.csv", make_table())
    with pytest.raises(MesetaError, match="column 'tags' comes from a folder name, which is a single value"):
        read_layout(options(tmp_path / "days", multi_valued=["tags=|"]))


def test_names_and_patterns_of_several_options(tmp_path: Path) -> None:
    log = write(tmp_path / "log.csv", make_table())

    def separators(**chosen: Any) -> dict[str, str | None]:
        return {column.name: column.separator for column in read_layout(options(log, **chosen)).sparse}

    single = {"user_id": None, "genres": None, "tag_ids": None}
    assert separators(multi_valued=["*[rd]*s"]) == single | {"genres": "|", "tag_ids": " "}
    assert separators(multi_valued=["g*", "genres=,"]) == single | {"genres": ","}
    assert separators(multi_valued=["g*"], sparse=["genres"]) == single | {"genres": "|"}
    assert separators(multi_valued=["genres"], dense=["g*"], ignore=["*s"]) == {"user_id": None, "genres": "|"}
    assert separators(multi_valued=["*s"], ignore=["tag_ids"]) == {"user_id": None, "genres": "|"}
    layout = read_layout(options(log, multi_valued=["genres=;"]))
    assert "no sampled text has two: " in layout.reasons["genres"]
    named = NamedColumns(multi_valued=["a=b=|", "c=="])
    assert named.separators("x", ["a=b", "c"]) == {"a=b": "|", "c": "="}


def test_commas_and_spaces_may_be_separators() -> None:
    cases = {
        "genres=,,tags=|": ["genres=,", "tags=|"],
        "genres= , tags= ": ["genres= ", "tags= "],
        " a , b=; ,c": ["a", "b=;", "c"],
        "a==": ["a=="],
        "a=,": ["a=,"],
        "a=,b": ["a=", "b"],
    }
    for text, expected in cases.items():
        assert column_options({"multi_valued": [text]}) == {"multi_valued": expected}, text


WORDS = st.text(alphabet="abcXYZ019-_.' ", min_size=1, max_size=6).filter(lambda word: word.strip() == word)


@given(st.lists(st.lists(WORDS, min_size=1, max_size=4), min_size=1), st.sampled_from("|;,\t^~\x01"))
def test_the_separator_that_joined_values_is_inferred(rows: list[list[str]], separator: str) -> None:
    texts = [separator.join(row) for row in rows]
    has_lists = any(len(row) > 1 for row in rows)
    spaces = any(" " in text for text in texts)
    assert infer_separator(texts) == (separator if has_lists else " " if spaces else None)


def test_a_rare_character_is_no_separator() -> None:
    assert infer_separator(["rock pop"] * 999 + ["a,b rock"]) == " "
    assert infer_separator(["Action|Comedy, Musical"] * 3 + ["Comedy, Musical"] * 9) == "|"
    assert infer_separator(["New York|Lima", "New York"]) == "|"
    assert infer_separator(["AC/DC", "Queen"]) == "/"
    assert infer_separator(["rock ", " pop"]) is None


def test_an_earlier_dataset_is_used_unchanged(tmp_path: Path) -> None:
    """Datasets of earlier versions have no such option in their record."""
    log = write(tmp_path / "log.csv", make_table())
    prepare(options(log))
    record = json.loads((tmp_path / "out/prepare.json").read_text())
    assert "multi_valued" not in record["options"]
    assert load_prepared(options(log)) is not None
    with pytest.raises(MesetaError, match=r"the option multi_valued was null and is \[\"genres\"\] now"):
        load_prepared(options(log, multi_valued=["genres"]))
