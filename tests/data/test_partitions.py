"""Folders as sources, and the columns that folders named KEY=VALUE make: the rows are those of one file that has these
columns itself."""

from __future__ import annotations

import csv
import datetime
import gzip
import io
import json
import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fsspec
import pyarrow as pa
import pyarrow.dataset as pds
import pyarrow.parquet as pq
import pytest

from bad_input.commands import run_here
from data.click_log import hashed, make_lines, read_split
from meseta.data import Dataset, Reader, ReaderOptions
from meseta.data.dataset.dataset import DATASET_FILE
from meseta.data.prepare import PrepareOptions, load_prepared, prepare, read_layout
from meseta.data.prepare.new_rows import NewRows
from meseta.data.prepare.prepare_like import PrepareLikeOptions, prepare_like
from meseta.data.prepare.staging import PREPARE_RECORD_FILE
from meseta.spec import MesetaError
from meseta.system.files import parse_json
from sampling import diagonal, sample
from small_run import settings, train

Row = dict[str, Any]
KINDS = ("csv", "csv.gz", "tsv", "dat", "jsonl", "parquet")
KEYS = (("date",), ("date", "country"), ("country", "hour"), ("label",), ("hour", "price", "date"))
WAYS = ("folder", "pattern", "deep pattern", "url")
COUNTRIES = ("ES", "Ávila y León", "a/b", "50%", "x=y", "05", "+", None)
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
SCHEMA = (
    "label: label\ndense: [price, hour]\ncategorical: [city, country]\ntime: date\ncrosses: {both: [city, country]}\n"
)
NAMES = ["label", "price", "hour", "city", "country", "date"]


def rows(num_rows: int = 240, seed: int = 0) -> list[Row]:
    draw = random.Random(seed)
    return [
        {
            "label": draw.randrange(2),
            "price": draw.choice([0.5, 2.25, 7.0]),
            "hour": draw.randrange(3),
            "city": f"city {draw.randrange(9)}",
            "country": draw.choice(COUNTRIES),
            "date": f"2026-01-{1 + draw.randrange(4):02}",
        }
        for _ in range(num_rows)
    ]


def content(kind: str, table: Sequence[Row]) -> bytes:
    names = list(table[0])
    if kind == "parquet":
        file = io.BytesIO()
        pq.write_table(pa.table({name: [row[name] for row in table] for name in names}), file)
        return file.getvalue()
    if kind == "jsonl":
        return "".join(json.dumps(row) + "\n" for row in table).encode()
    if kind == "dat":
        lines = ["::".join("" if value is None else str(value) for value in row.values()) for row in table]
        return "\n".join(["::".join(names), *lines, ""]).encode()
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter="\t" if kind == "tsv" else ",")
    writer.writerow(names)
    writer.writerows(row.values() for row in table)
    return gzip.compress(text.getvalue().encode()) if kind == "csv.gz" else text.getvalue().encode()


def folder_of(row: Row, keys: Sequence[str]) -> str:
    values = [HIVE_NULL if row[key] is None else quote(str(row[key]), safe=" ") for key in keys]
    return "/".join(f"{key}={value}" for key, value in zip(keys, values, strict=True))


def write_tree(root: Path, kind: str, table: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """Files below folders of `keys`; returns the rows in the order of the paths."""
    folders: dict[str, list[Row]] = {}
    for row in table:
        folders.setdefault(folder_of(row, keys), []).append(row)
    for folder, members in folders.items():
        (root / folder).mkdir(parents=True)
        values = [{name: value for name, value in row.items() if name not in keys} for row in members]
        (root / folder / f"part.{kind}").write_bytes(content(kind, values))
    return [row for folder in sorted(folders, key=lambda name: f"{name}/part") for row in folders[folder]]


def run(folder: Path, *sources: str, out: str = "out", **options: Any) -> Dataset:
    settings = {"test_fraction": 0.0, "hash_rows": 500, "out": folder / out, **options}
    return prepare(PrepareOptions(sources=sources, **settings))


def schema_file(folder: Path) -> Path:
    (folder / "schema.yaml").write_text(SCHEMA)
    return folder / "schema.yaml"


@pytest.mark.parametrize("case", diagonal(kind=KINDS, keys=KEYS, way=WAYS))
def test_rows_are_those_of_one_file(tmp_path: Path, case: Mapping[str, Any]) -> None:
    kind, keys = case["kind"], case["keys"]
    ordered = write_tree(tmp_path / "logs", kind, rows(), keys)
    sources = {
        "folder": f"{tmp_path}/logs",
        "pattern": f"{tmp_path}/logs/{'*/' * len(keys)}part.{kind}",
        "deep pattern": f"{tmp_path}/logs/**/*.{kind}",
        "url": f"file://{tmp_path}/logs",
    }
    flat = tmp_path / f"flat.{kind}"
    flat.write_bytes(content(kind, ordered))
    schema = schema_file(tmp_path)
    made = run(tmp_path, sources[case["way"]], schema=schema)
    run(tmp_path, str(flat), out="flat", schema=schema)
    assert made.source_form is not None and set(made.source_form.partition_keys) == set(keys)
    assert read_split(tmp_path / "out", "train").equals(read_split(tmp_path / "flat", "train"))
    sizes = Counter(folder_of(row, keys) for row in ordered)
    assert [source.num_rows for source in made.sources] == list(sizes.values())


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_values_are_those_that_arrow_reads(tmp_path: Path, kind: str) -> None:
    """Against pyarrow.dataset's own hive partitioning."""
    keys = ("date", "country")
    write_tree(tmp_path / "logs", kind, rows(), keys)
    run(tmp_path, f"{tmp_path}/logs", schema=schema_file(tmp_path))
    types = pa.schema([(key, pa.string()) for key in keys])
    parts = pds.dataset(tmp_path / "logs", format=kind, partitioning=pds.partitioning(types, flavor="hive"))
    files = [pds.dataset([path], format=kind, partitioning=parts.partitioning, schema=parts.schema,
                         partition_base_dir=str(tmp_path / "logs")) for path in sorted(parts.files)]  # fmt: skip
    expected = pa.concat_tables([one.to_table(NAMES) for one in files])
    prepared = read_split(tmp_path / "out", "train")
    for name in ("city", "country"):
        assert prepared[name].to_pylist() == [hashed(name, value or "") for value in expected[name].to_pylist()]
    crossed = zip(expected["city"].to_pylist(), expected["country"].to_pylist(), strict=True)
    assert prepared["both"].to_pylist() == [hashed("both", f"{city}\x1f{country or ''}") for city, country in crossed]
    days = [
        datetime.datetime.fromisoformat(f"{day}T00:00:00+00:00").timestamp() for day in expected["date"].to_pylist()
    ]
    assert prepared["date"].to_pylist() == days


MIXES = [
    {"city": pa.string(), "hour": pa.int8(), "price": pa.float32(), "label": pa.bool_()},
    {"city": pa.dictionary(pa.int8(), pa.string()), "hour": pa.float64(), "price": pa.float64(), "label": pa.int64()},
    {"city": pa.large_string(), "hour": pa.uint64(), "price": pa.decimal128(9, 3), "label": pa.float32()},
    {"city": pa.string_view(), "hour": pa.decimal128(19, 0), "price": pa.float16(), "label": pa.uint8()},
]


@pytest.mark.soak  # tests/data/test_one_table.py has these forms, too
def test_one_table_in_every_form(tmp_path: Path) -> None:
    """Every kind of file, and Parquet whose files differ in type, in folders and not."""
    schema, keys = schema_file(tmp_path), ("country",)
    tables = []
    for kind in KINDS:
        ordered = write_tree(tmp_path / kind, kind, rows(), keys)
        run(tmp_path, f"{tmp_path}/{kind}", out=f"out-{kind}", schema=schema)
        tables.append(read_split(tmp_path / f"out-{kind}", "train"))
    for number, (first, mix) in enumerate(zip(range(0, 240, 60), MIXES, strict=True)):
        table = {name: [row[name] for row in ordered[first : first + 60]] for name in NAMES}
        columns = {name: pa.array(values) for name, values in table.items()}
        columns |= {name: columns[name].cast(kind) for name, kind in mix.items()}
        pq.write_table(pa.table(columns), tmp_path / f"mixed-{number}.parquet")
    run(tmp_path, f"{tmp_path}/mixed-*.parquet", out="mixed", schema=schema)
    assert all(table.equals(tables[0]) for table in [*tables, read_split(tmp_path / "mixed", "train")])


def test_predictions_of_a_folder(tmp_path: Path) -> None:
    """`predict --data FOLDER` takes raw files, unless the folder is a prepared dataset."""
    write_tree(tmp_path / "logs", "csv", rows(), ("country",))
    run(tmp_path, f"{tmp_path}/logs", schema=schema_file(tmp_path), test_fraction=0.3)
    train(settings(tmp_path / "out", tmp_path / "run"))
    ordered = write_tree(tmp_path / "new", "csv", rows(50, seed=1), ("country",))
    num_test_rows = Dataset.load(tmp_path / "out").splits["test"].num_rows
    for source, num_rows in (("out", num_test_rows), ("new", 50)):
        keys = ["--keys", "country"] * (source == "new")
        ended = run_here("predict", tmp_path / "run", "--data", tmp_path / source, *keys, "--out", tmp_path / "p.csv")
        assert ended.code == 0, ended.err
        assert len((tmp_path / "p.csv").read_text().splitlines()) == num_rows + 1
    with (tmp_path / "p.csv").open(newline="") as file:
        assert [row["country"] for row in csv.DictReader(file)] == [row["country"] or "" for row in ordered]


@pytest.mark.parametrize("kind", sample(KINDS, 2, seed=0))
def test_roles_are_inferred_from_the_values_in_all_files(tmp_path: Path, kind: str) -> None:
    """Only eight of 20 files are sampled, which may all have the same country."""
    for number in range(20):
        folder = (
            tmp_path / f"logs/date=2026-02-{number + 1:02}/country={'PT' if number == 1 else 'ES'}/hour={number}/v=1"
        )
        folder.mkdir(parents=True)
        table = [{"label": row % 2, "city": f"c {row % 5}"} for row in range(20)]
        (folder / f"part.{kind}").write_bytes(content(kind, table))
    layout = read_layout(PrepareOptions(sources=[f"{tmp_path}/logs"], out=tmp_path / "out"))
    names = ["city", "country", "hour", "date.hour", "date.weekday"]
    assert layout.time == "date" and [column.name for column in layout.sparse] == names
    assert layout.ignored == ("v",) and layout.reasons["v"].endswith("a folder, and the same for all files: '1'")
    options = {"test_after": "2026-02-11", "test_fraction": None}
    dataset = run(tmp_path, f"{tmp_path}/logs", **options)
    assert (dataset.splits["train"].num_rows, dataset.splits["test"].num_rows) == (200, 200)


@pytest.mark.parametrize(
    ("pattern", "keys"),
    [
        ("logs/date=2026-01-01/country=ES/part.csv", ()),
        ("logs/date=2026-01-01/country=ES", ()),
        ("logs/date=2026-01-01", ("country",)),
        ("logs/date=2026-01-01/*/part.csv", ("country",)),
        ("logs/date=*/country=ES/part.csv", ("date", "country")),
        ("logs/date=*", ("date", "country")),
        ("logs/", ("date", "country")),
        ("log?/**/*.csv", ("date", "country")),
        ("logs/**", ("date", "country")),
    ],
)
@pytest.mark.parametrize("root", ["", "memory://{name}/"])
def test_only_folders_that_are_found_make_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, keys: tuple[str, ...], root: str
) -> None:
    for day in ("2026-01-01", "2026-01-02"):
        folder = tmp_path / f"logs/date={day}/country=ES"
        folder.mkdir(parents=True)
        (folder / "part.csv").write_bytes(
            content("csv", [{"label": row % 2, "city": f"c {row % 3}"} for row in range(9)])
        )
    monkeypatch.chdir(tmp_path)
    start = root.format(name=tmp_path.name)
    if start:
        fsspec.filesystem("memory").put(f"{tmp_path}/logs", f"{start}logs", recursive=True)
    layout = read_layout(PrepareOptions(sources=[start + pattern], out=tmp_path / "out"))
    assert {*layout.columns, *layout.ignored} == {"label", "city", *keys}


def test_a_test_file_that_is_named_has_the_columns_of_its_folders(tmp_path: Path) -> None:
    write_tree(tmp_path / "logs", "csv", rows(), ("date",))
    last = f"{tmp_path}/logs/date=2026-01-04/part.csv"
    dataset = run(tmp_path, f"{tmp_path}/logs", test_fraction=None, test_files=[last], schema=schema_file(tmp_path))
    start = datetime.datetime(2026, 1, 4, tzinfo=datetime.UTC).timestamp()
    assert set(read_split(tmp_path / "out", "test")["date"].to_pylist()) == {start}
    assert dataset.splits["test"].num_rows == sum(row["date"] == "2026-01-04" for row in rows())


def test_names_with_underscores_and_dots_are_skipped_and_links_are_followed(tmp_path: Path) -> None:
    ordered = write_tree(tmp_path / "logs", "csv", rows(), ("date",))
    for name in (
        "_SUCCESS",
        ".crc",
        "_temporary/x.csv",
        "date=2026-01-01/_metadata",
        ".hidden/x.csv",
        "date=2026-01-01/.a",
    ):
        (tmp_path / "logs" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "logs" / name).write_text("no row")
    (tmp_path / "logs/date=2026-01-02/loop").symlink_to(tmp_path / "logs")
    (tmp_path / "logs/a_copy").symlink_to(tmp_path / "logs/date=2026-01-01")
    (tmp_path / "logs/date=2026-01-03").rename(tmp_path / "elsewhere")
    (tmp_path / "logs/date=2026-01-03").symlink_to(tmp_path / "elsewhere")
    dataset = run(tmp_path, f"{tmp_path}/logs", schema=schema_file(tmp_path))
    paths = [f"{tmp_path}/logs/date=2026-01-0{day}/part.csv" for day in (1, 2, 3, 4)]
    assert [source.path for source in dataset.sources] == paths
    assert dataset.splits["train"].num_rows == len(ordered)


@pytest.mark.soak
def test_a_recipe_makes_the_same_rows(tmp_path: Path) -> None:
    write_tree(tmp_path / "logs", "csv", rows(), ("date", "country"))
    options = {"schema": schema_file(tmp_path)}
    batches = []
    for out, recipe_only in (("out", False), ("recipe", True)):
        dataset = run(tmp_path, f"{tmp_path}/logs", out=out, recipe_only=recipe_only, **options)
        [batch] = Reader(dataset, "train", ReaderOptions(batch_size=1000)).epoch()
        batches.append((batch.dense.tolist(), batch.label.tolist(), batch.sparse.values.tolist()))
    assert batches[0] == batches[1]


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_new_rows_in_folders_and_in_a_file(tmp_path: Path, kind: str) -> None:
    """New rows may come in folders, or in a file that has the columns; folders that the dataset does not know are no
    columns, but may be handed through."""
    keys = ("date", "country")
    write_tree(tmp_path / "logs", kind, rows(), keys)
    earlier = run(tmp_path, f"{tmp_path}/logs", schema=schema_file(tmp_path))
    ordered = write_tree(tmp_path / "new/source=web", kind, rows(seed=1), keys)
    (tmp_path / f"new.{kind}").write_bytes(content(kind, ordered))
    tables = []
    for number, source in enumerate((f"{tmp_path}/new", f"{tmp_path}/new.{kind}")):
        out = tmp_path / f"like{number}"
        prepare_like(PrepareLikeOptions(sources=[source], out=out, like=tmp_path / "out"))
        tables.append(read_split(out, "test"))
    assert tables[0].equals(tables[1])
    read = NewRows(earlier, [f"{tmp_path}/new"], keys=["country", "source", "city"]).read()
    handed = pa.Table.from_batches([part.keys for part in read if part.keys is not None])
    assert handed.to_pydict() == {
        "country": [row["country"] for row in ordered],
        "source": ["web"] * len(ordered),
        "city": [row["city"] for row in ordered],
    }
    with pytest.raises(
        MesetaError, match="lacks 'country'; the files of the earlier dataset were in folders 'country="
    ):
        prepare_like(PrepareLikeOptions(sources=[f"{tmp_path}/new/source=web/date=2026-01-01/country=ES/part.{kind}"],
                                 out=tmp_path / "x", like=tmp_path / "out"))  # fmt: skip


def test_former_datasets_ignore_the_folders(tmp_path: Path) -> None:
    """Covers datasets with and without the column in their files."""
    table = rows()
    (tmp_path / "a/date=2026-05-05").mkdir(parents=True)
    (tmp_path / "a/date=2026-05-05/log.csv").write_bytes(content("csv", table))
    exact = f"{tmp_path}/a/date=2026-05-05/log.csv"
    run(tmp_path, exact, schema=schema_file(tmp_path))
    prepare_like(PrepareLikeOptions(sources=[f"{tmp_path}/a"], out=tmp_path / "like", like=tmp_path / "out"))
    assert read_split(tmp_path / "like", "test").equals(read_split(tmp_path / "out", "train"))
    document = parse_json((tmp_path / "out" / DATASET_FILE).read_bytes())
    del document["source_form"]["partition_keys"]
    (tmp_path / "out" / DATASET_FILE).write_text(json.dumps(document))
    prepare_like(PrepareLikeOptions(sources=[f"{tmp_path}/a"], out=tmp_path / "again", like=tmp_path / "out"))
    assert read_split(tmp_path / "again", "test").equals(read_split(tmp_path / "out", "train"))


def test_a_prepared_folder_knows_which_folders_made_columns(tmp_path: Path) -> None:
    """The same files without their folders are different sources. Records of earlier versions are accepted."""
    write_tree(tmp_path / "logs", "csv", rows(), ("country",))
    options = {"out": tmp_path / "out", "test_fraction": 0.0}
    prepare(PrepareOptions(sources=[f"{tmp_path}/logs"], **options))
    assert load_prepared(PrepareOptions(sources=[f"{tmp_path}/logs"], **options)) is not None
    files = sorted(map(str, (tmp_path / "logs").rglob("*.csv")))
    with pytest.raises(MesetaError, match="has changed"):
        load_prepared(PrepareOptions(sources=files, **options))
    record = parse_json((tmp_path / "out" / PREPARE_RECORD_FILE).read_bytes())
    for entry in record["sources"].values():
        del entry["partition"]
    (tmp_path / "out" / PREPARE_RECORD_FILE).write_text(json.dumps(record))
    assert load_prepared(PrepareOptions(sources=files, **options)) is not None


def test_formats_without_columns_say_that_folders_make_none(tmp_path: Path) -> None:
    for kind, text in (("tsv", "\n".join(make_lines(60))), ("svm", "1 3:1 4:2\n0 5:1\n" * 30)):
        folder = tmp_path / kind / "date=2026-01-01"
        folder.mkdir(parents=True)
        (folder / f"log.{kind}").write_text(text)
        layout = read_layout(PrepareOptions(sources=[f"{tmp_path}/{kind}"], out=tmp_path / "out"))
        assert layout.ignored[-1] == "date" and "has no columns besides its own" in layout.reasons["date"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_is_also_a_column_is_refused(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "logs/city=x"
    folder.mkdir(parents=True)
    (folder / f"part.{kind}").write_bytes(content(kind, rows()))
    message = rf"part.{kind}' has column 'city', but is also in folder 'city=x'; rename one of them, or name the"
    for options in ({}, {"schema": schema_file(tmp_path)}):
        with pytest.raises(MesetaError, match=message):
            run(tmp_path, f"{tmp_path}/logs", **options)


@pytest.mark.parametrize("case", diagonal(value=["x", "1e", "12 EUR"], kind=["csv", "jsonl", "parquet"]))
def test_a_folder_that_is_no_number_is_named(tmp_path: Path, case: dict[str, str]) -> None:
    kind, value = case["kind"], case["value"]
    for hour in (3, value):
        folder = tmp_path / f"logs/hour={hour}"
        folder.mkdir(parents=True)
        table = [{key: row[key] for key in NAMES if key != "hour"} for row in rows()]
        (folder / f"part.{kind}").write_bytes(content(kind, table))
    with pytest.raises(MesetaError, match=rf"'hour'.*({value}' is not a number; rename the folder|must be a number)"):
        run(tmp_path, f"{tmp_path}/logs", schema=schema_file(tmp_path))


def test_lists_are_no_folders(tmp_path: Path) -> None:
    write_tree(tmp_path / "logs", "csv", rows(), ("country",))
    (tmp_path / "schema.yaml").write_text('label: label\ncategorical: [country]\nmulti_valued: {country: "|"}\n')
    with pytest.raises(
        MesetaError, match="column 'country' comes from a folder name, which is a single value and not a list"
    ):
        run(tmp_path, f"{tmp_path}/logs", schema=tmp_path / "schema.yaml")


def test_a_folder_whose_name_is_not_utf8(tmp_path: Path) -> None:
    for name in (b"city=\xff", b"city=%ff"):
        folder = os.path.join(os.fsencode(tmp_path), b"logs", name)
        os.makedirs(folder)
        Path(os.fsdecode(folder), "part.csv").write_text("label,price\n1,2\n0,1\n")
        with pytest.raises(MesetaError, match=r"folder 'city=.*' is not valid UTF-8; rename it"):
            run(tmp_path, f"{tmp_path}/logs")
        Path(os.fsdecode(folder), "part.csv").unlink()
