"""Features of times, compared with datetime and numpy, and the valid split by time."""

from __future__ import annotations

import csv
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.click_log import read_split
from data.recipe_cases import make_small
from meseta.cli.prepare import column_options, run_prepare
from meseta.data import Dataset, PrepareOptions
from meseta.data.dataset.encoding import DatasetEncoding
from meseta.data.prepare import load_prepared, prepare, with_training_defaults
from meseta.data.prepare.prepare_like import PrepareLikeOptions, prepare_like
from meseta.data.prepare.recipe import Recipe
from meseta.data.prepare.recipe_rows import RowMaker
from meseta.data.prepare.staging import load_record
from meseta.spec import MesetaError

BERLIN = ZoneInfo("Europe/Berlin")
FIRST, LAST = datetime(2026, 3, 28, 22, 59, 59, tzinfo=UTC), datetime(2026, 10, 25, 12, tzinfo=UTC)
# Both changes of the clock, the hour that occurs twice, and ends of hours, days and weeks.
MOMENTS = [
    datetime(2026, 3, 29, 1, 59, 59, tzinfo=BERLIN),
    datetime(2026, 3, 29, 3, 0, 0, tzinfo=BERLIN),
    datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN),
    datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=1),
    datetime(2026, 5, 31, 23, 59, 59, tzinfo=ZoneInfo("Asia/Kolkata")),
    datetime(2026, 6, 1, 0, 0, tzinfo=ZoneInfo("America/New_York")),
    datetime(2026, 8, 2, 23, 59, 59, tzinfo=UTC),
    datetime(2026, 8, 3, 0, 0, tzinfo=UTC),
    FIRST,
    LAST,
]
# Before 1970, on a leap day, and immediately before and after training.
OTHER_MOMENTS = [
    datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC),
    datetime(2024, 2, 29, 0, 0, tzinfo=UTC),
    FIRST - timedelta(seconds=1),
    LAST + timedelta(seconds=1),
    datetime(2100, 1, 1, tzinfo=UTC),
]
FORMATS = {
    "offset": lambda moment: moment.isoformat(),
    "naive": lambda moment: moment.astimezone(UTC).replace(tzinfo=None).isoformat(sep=" "),
    "slashes": lambda moment: moment.astimezone(UTC).strftime("%Y/%m/%d %H:%M:%S"),
    "seconds": lambda moment: str(int(moment.timestamp())),
    "milliseconds": lambda moment: str(int(moment.timestamp()) * 1000),
}


def write_rows(path: Path, texts: list[str], **more: list[Any]) -> None:
    columns = {"click": [place % 2 for place in range(len(texts))], "timestamp": texts, **more}
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def expected(moment: datetime | None, first: datetime = FIRST, last: datetime = LAST) -> tuple[int, int, float]:
    """Return (row of the hour, row of the weekday, logarithm of the age)."""
    if moment is None:
        return 0, 0, 0.0
    utc = moment.astimezone(UTC)
    age = min(max((utc - first) / (last - first), 0.0), 1.0)
    return utc.hour + 1, utc.isoweekday(), float(np.log1p(age))


def values(dataset: Dataset, split: str, column: str = "timestamp") -> list[tuple[int, int, float]]:
    """Return the same numbers, from the files of a dataset."""
    rows = read_split(dataset.dir, split)
    [age] = [feature for feature in dataset.dense if feature.name == f"{column}.age"]
    logs = rows[f"{column}.age"].to_numpy().astype(np.float64) * age.std + age.mean
    parts = [rows[f"{column}.{part}"].to_pylist() for part in ("hour", "weekday")]
    return list(zip(*parts, logs.tolist(), strict=True))


def assert_values(actual: list[tuple[int, int, float]], moments: list[datetime | None]) -> None:
    now = [expected(moment) for moment in moments]
    assert [row[:2] for row in actual] == [row[:2] for row in now]
    np.testing.assert_allclose([row[2] for row in actual], [row[2] for row in now], atol=1e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_features_equal_those_of_datetime(tmp_path: Path, name: str) -> None:
    write_rows(tmp_path / "train.csv", [FORMATS[name](moment) for moment in MOMENTS])
    later = [*OTHER_MOMENTS, *MOMENTS]
    if name == "milliseconds":  # A number below 1e11 counts as seconds.
        later = later[1:]
    write_rows(tmp_path / "test.csv", [FORMATS[name](moment) for moment in later])
    options = PrepareOptions(
        sources=[f"{tmp_path}/train.csv"], test_files=[f"{tmp_path}/test.csv"], time=["timestamp"], out=tmp_path / "out"
    )
    dataset = prepare(options)
    assert [(f.name, f.encoding, f.num_embeddings, f.made_of) for f in dataset.sparse] == [
        ("timestamp.hour", "hour", 25, ("timestamp",)),
        ("timestamp.weekday", "weekday", 8, ("timestamp",)),
    ]
    [age] = dataset.dense
    assert age.age is not None and (age.age.origin, age.age.last) == (FIRST.timestamp(), LAST.timestamp())
    assert_values(values(dataset, "train"), [*MOMENTS])
    assert_values(values(dataset, "test"), [*later])
    like, _ = prepare_like(
        PrepareLikeOptions(sources=[f"{tmp_path}/test.csv"], like=tmp_path / "out", out=tmp_path / "l")
    )
    assert read_split(like.dir, "test").equals(read_split(dataset.dir, "test"))
    assert DatasetEncoding.from_dict(DatasetEncoding.from_dataset(dataset).to_dict(), "x").dense == dataset.dense


@pytest.mark.parametrize("has_clock", [False, True])
def test_dates_give_no_hour(tmp_path: Path, capsys: pytest.CaptureFixture[str], has_clock: bool) -> None:
    """The clock times of test rows do not matter."""
    texts = [f"2026-03-{day:02}" for day in range(1, 12)]
    write_rows(tmp_path / "train.csv", [*texts, "", "2026-03-12 00:00:01" if has_clock else "2026-03-12"])
    write_rows(tmp_path / "test.csv", ["2026-03-13 17:00"])
    options = PrepareOptions(
        sources=[f"{tmp_path}/train.csv"], test_files=[f"{tmp_path}/test.csv"], time=["timestamp"], out=tmp_path / "out"
    )
    dataset = run_prepare(options)
    printed = "timestamp has dates without clock times, so timestamp.hour is no feature" in capsys.readouterr().out
    assert ["timestamp.hour" in [feature.name for feature in dataset.sparse], printed] == [has_clock, not has_clock]
    weekdays = [datetime(2026, 3, day, tzinfo=UTC).isoweekday() for day in range(1, 12)]
    assert read_split(dataset.dir, "train")["timestamp.weekday"].to_pylist()[:11] == weekdays
    prepare_like(PrepareLikeOptions(sources=[f"{tmp_path}/test.csv"], like=tmp_path / "out", out=tmp_path / "l"))
    assert read_split(tmp_path / "l", "test").equals(read_split(dataset.dir, "test"))


def test_missing_times_and_other_time_columns(tmp_path: Path) -> None:
    seconds = [str(int(moment.timestamp())) for moment in MOMENTS]
    texts = [FORMATS["naive"](moment) for moment in MOMENTS]
    texts[3], texts[5] = "", "NA"
    write_rows(tmp_path / "train.csv", texts, seen=seconds[::-1])
    write_rows(tmp_path / "test.csv", texts, seen=seconds[::-1])
    options = PrepareOptions(
        sources=[f"{tmp_path}/train.csv"],
        test_files=[f"{tmp_path}/test.csv"],
        time_features=["time*", "seen"],
        ignore=["seen"],
        out=tmp_path / "out",
    )
    dataset = prepare(options)
    assert_values(values(dataset, "test"), [None if place in (3, 5) else MOMENTS[place] for place in range(10)])
    assert_values(values(dataset, "test", "seen"), [*MOMENTS[::-1]])
    write_rows(tmp_path / "new.csv", texts)
    with pytest.raises(MesetaError, match=r"lacks 'seen'; the model needs all features"):
        prepare_like(PrepareLikeOptions(sources=[f"{tmp_path}/new.csv"], like=tmp_path / "out", out=tmp_path / "l"))


def test_features_are_chosen_by_options_and_schema(tmp_path: Path) -> None:
    texts = [FORMATS["naive"](moment) for moment in MOMENTS]
    write_rows(tmp_path / "log.csv", texts, price=[place + 0.5 for place in range(10)])
    sources = [f"{tmp_path}/log.csv"]
    off = prepare(PrepareOptions(sources=sources, time_features=(), out=tmp_path / "off", test_fraction=0.0))
    assert (off.time, [f.name for f in off.dense], [f.name for f in off.sparse]) == (
        "timestamp",
        ["price"],
        ["no_category"],
    )
    like, _ = prepare_like(PrepareLikeOptions(sources=sources, like=tmp_path / "off", out=tmp_path / "l"))
    assert (like.dense, like.sparse) == (off.dense, off.sparse)
    with pytest.raises(MesetaError, match="'price' for --time-features is read as dense; add it to --ignore"):
        prepare(PrepareOptions(sources=sources, time_features=["price"], out=tmp_path / "x"))
    schema = tmp_path / "schema.yaml"
    schema.write_text("label: click\ntime: timestamp\ndense: [price]\n")
    no_features = prepare(PrepareOptions(sources=sources, schema=schema, out=tmp_path / "s", test_fraction=0.0))
    assert no_features.dense == off.dense
    schema.write_text("label: click\ntime_features: [timestamp]\ndense: [price]\n")
    features = prepare(PrepareOptions(sources=sources, schema=schema, out=tmp_path / "f", test_fraction=0.0))
    assert features.time is None
    assert_values(values(features, "train"), [*MOMENTS])
    schema.write_text("label: click\ntime_features: [price]\ndense: [price]\n")
    with pytest.raises(MesetaError, match="'price' is named twice"):
        prepare(PrepareOptions(sources=sources, schema=schema, out=tmp_path / "x"))


def test_bits_do_not_depend_on_threads_or_on_the_form_of_the_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_small(monkeypatch)
    draw = np.random.default_rng(0)
    times = [datetime.fromtimestamp(int(s), UTC) for s in draw.integers(1_700_000_000, 1_710_000_000, 600)]
    write_rows(tmp_path / "log.csv", [FORMATS["naive"](time) for time in times], city=[f"c{n % 7}" for n in range(600)])
    pq.write_table(
        pa.table({"click": [n % 2 for n in range(600)], "timestamp": times, "city": [f"c{n % 7}" for n in range(600)]}),
        tmp_path / "log.parquet",
    )
    made = [
        prepare(
            PrepareOptions(
                sources=[f"{tmp_path}/log.{kind}"],
                out=tmp_path / f"out-{number}",
                valid_fraction=0.1,
                valid_by_time=True,
                num_threads=num_threads,
                recipe_only=recipe_only,
            )
        )
        for number, (kind, num_threads, recipe_only) in enumerate(
            [("csv", 1, False), ("csv", 3, False), ("csv", 2, True), ("parquet", 2, False)]
        )
    ]
    first, second, recipe, parquet = made
    files = [file.path for split in first.splits.values() for file in split.files]
    assert [(first.dir / f).read_bytes() for f in files] == [(second.dir / f).read_bytes() for f in files]
    assert first.dense == second.dense == recipe.dense == parquet.dense
    maker = RowMaker.from_recipe(recipe, Recipe.load(recipe), 2)
    for split in ("train", "valid", "test"):
        table = pa.concat_tables(maker.make_groups(split, range(len(maker.group_rows(split)))))
        assert table.combine_chunks().equals(read_split(first.dir, split).combine_chunks())
        assert read_split(parquet.dir, split).equals(read_split(first.dir, split))


def make_timed_log(path: Path, num_rows: int, seed: int = 0) -> np.ndarray:
    """Write a log whose times are often equal and sometimes missing. Returns the times."""
    draw = np.random.default_rng(seed)
    times = draw.integers(1_700_000_000, 1_700_001_000, num_rows).astype(np.float64)
    times[draw.random(num_rows) < 0.02] = np.nan
    write_rows(
        path, ["" if np.isnan(t) else str(int(t)) for t in times], row=[f"r{place}" for place in range(num_rows)]
    )
    return times


def row_numbers(dataset: Dataset, split: str) -> list[int]:
    words = pq.read_table(dataset.dir / "vocabulary/row.parquet")
    by_id = dict(zip(words["id"].to_pylist(), words["value"].to_pylist(), strict=True))
    return [
        int(by_id[i].decode().removeprefix("r")) if by_id.get(i) else -1
        for i in read_split(dataset.dir, split)["row"].to_pylist()
    ]


def test_valid_is_the_last_tenth_of_the_rows_outside_test(tmp_path: Path) -> None:
    times = make_timed_log(tmp_path / "log.csv", 4000)
    base = {"sources": [f"{tmp_path}/log.csv"], "sparse": ["row"]}
    dataset = prepare(with_training_defaults(PrepareOptions(**base, out=tmp_path / "out")))
    plain = prepare(PrepareOptions(**base, out=tmp_path / "plain", vocabulary=True, min_count=1))
    tests = [read_split(one.dir, "test")["timestamp"].to_numpy() for one in (dataset, plain)]
    assert np.array_equal(*tests, equal_nan=True)
    other = read_split(plain.dir, "train")["timestamp"].to_numpy()
    present = np.sort(other[~np.isnan(other)])
    last_train = present[present.size - int(present.size * 0.1) - 1]
    valid = read_split(dataset.dir, "valid")["timestamp"].to_numpy()
    assert np.array_equal(valid, other[other > last_train])
    train = read_split(dataset.dir, "train")["timestamp"].to_numpy()
    assert np.array_equal(train, other[~(other > last_train)], equal_nan=True) and np.isnan(train).any()
    assert np.isnan(times).any() and dataset.valid_from == valid.min() and dataset.split_by is None
    [age] = [feature.age for feature in dataset.dense if feature.age]
    assert (age.origin, age.last) == (np.nanmin(train), np.nanmax(train))


@pytest.mark.parametrize("case", ["few", "equal"])
def test_valid_is_drawn_if_the_last_rows_are_few_or_equal(tmp_path: Path, case: str) -> None:
    if case == "few":
        make_timed_log(tmp_path / "log.csv", 1500)
    else:
        write_rows(tmp_path / "log.csv", ["1700000000"] * 1000 + ["1700000001"] * 2000, row=[*range(3000)])
    base = {"sources": [f"{tmp_path}/log.csv"], "sparse": ["row"]}
    dataset = prepare(with_training_defaults(PrepareOptions(**base, out=tmp_path / "out")))
    drawn = prepare(PrepareOptions(**base, out=tmp_path / "drawn", vocabulary=True, min_count=2, valid_fraction=0.1))
    assert dataset.valid_from is None and dataset.dense == drawn.dense
    for split in ("train", "valid", "test"):
        one, other = (read_split(made.dir, split) for made in (dataset, drawn))
        assert one.drop(["timestamp"]).equals(other.drop(["timestamp"]))


def test_the_rule_of_the_valid_split_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, num_rows in enumerate((3000, 1000)):
        make_timed_log(tmp_path / f"log-{number}.csv", num_rows)
        options = PrepareOptions(sources=[f"{tmp_path}/log-{number}.csv"], sparse=["row"], out=tmp_path / f"{number}")
        dataset = run_prepare(with_training_defaults(options))
        printed = capsys.readouterr().out
        assert "timestamp.hour, timestamp.weekday, timestamp.age" in printed
        if dataset.valid_from is None:
            assert "valid rows are drawn at random" in printed and "fewer than 200" in printed
        else:
            moment = datetime.fromtimestamp(dataset.valid_from, UTC).strftime("%Y-%m-%d %H:%M:%S")
            assert f"valid rows are the last 0.1 of the other rows by timestamp, from {moment} UTC on" in printed
        assert (dataset.valid_from is None) == (num_rows == 1000)


def test_options_of_the_command() -> None:
    assert column_options({"time_features": ["none"]}) == {"time_features": ()}
    assert column_options({"time_features": ["a,b*", "c"]}) == {"time_features": ["a", "b*", "c"]}
    assert column_options({"time_features": None}) == {}


def test_records_of_earlier_versions_keep_their_choices(tmp_path: Path) -> None:
    make_timed_log(tmp_path / "log.csv", 3000)
    options = PrepareOptions(sources=[f"{tmp_path}/log.csv"], sparse=["row"], out=tmp_path / "out")
    now = with_training_defaults(options)
    assert now.valid_by_time and now.time_features is None
    earlier = prepare(
        PrepareOptions(
            sources=options.sources,
            sparse=["row"],
            out=options.out,
            time_features=(),
            vocabulary=True,
            min_count=2,
            valid_fraction=0.1,
        )
    )
    record = load_record(options.out)
    assert record is not None and not {"time_features", "valid_by_time"} & {*record["options"]}
    again = load_prepared(with_training_defaults(options))
    assert again is not None and (again.dense, again.valid_from) == (earlier.dense, None)
    document = json.loads((options.out / "dataset.json").read_text())
    for feature in document["dense"]:
        del feature["age"]
    (options.out / "dataset.json").write_text(json.dumps(document))
    assert Dataset.load(options.out).dense == earlier.dense


def test_other_splits_are_not_changed_by_the_default(tmp_path: Path) -> None:
    options = PrepareOptions(sources=["x.csv"], out=tmp_path / "out")
    for chosen in (
        {"valid_fraction": 0.2},
        {"valid_fraction": 0.0},
        {"valid_after": "2026-01-01"},
        {"split_by": "group"},
    ):
        assert not with_training_defaults(
            PrepareOptions(sources=options.sources, out=options.out, **chosen)
        ).valid_by_time
