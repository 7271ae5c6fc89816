"""Times in text whose parts have one digit, or whose dates have slashes: inferred, parsed, and refused."""

from __future__ import annotations

import csv
import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.click_log import read_split
from meseta.api.fit import _split_options
from meseta.data.formats.table_rows import find_invalid_time, parse_times
from meseta.data.prepare import PrepareOptions, prepare, read_layout
from meseta.data.schema.infer import are_times, infer_role, role_from_name
from meseta.spec import MesetaError
from sampling import sample

MOMENTS = st.datetimes(datetime(1700, 1, 1), datetime(2199, 12, 31))


def assert_close(seconds: Any, expected: Any) -> None:
    """Check that times are equal to a microsecond, which float64 represents from 1700 to 2200."""
    np.testing.assert_allclose(seconds, expected, rtol=0, atol=1e-6)


@st.composite
def time_texts(draw: st.DrawFn) -> tuple[str, datetime]:
    """Return (text, the moment that it spells). Each part has one digit or two."""
    moment = draw(MOMENTS).replace(microsecond=0)
    part = lambda number: draw(st.sampled_from([f"{number:02}", str(number)]))  # noqa: E731
    sign, gap = draw(st.sampled_from("-/")), draw(st.sampled_from(" T"))
    text = sign.join([str(moment.year), part(moment.month), part(moment.day)])
    form = draw(st.sampled_from(["day", "minute", "second"]))
    if form == "day":
        return text, moment.replace(hour=0, minute=0, second=0)
    text += f"{gap}{part(moment.hour)}:{moment.minute:02}"
    if form == "minute":
        return text, moment.replace(second=0)
    return f"{text}:{moment.second:02}", moment


@given(st.lists(time_texts(), min_size=1, max_size=2))
def test_times_are_those_of_datetime_and_pandas(cases: list[tuple[str, datetime]]) -> None:
    pandas = pytest.importorskip("pandas")
    texts = [text for text, _ in cases]
    seconds = parse_times(pa.array(["", *texts]).cast(pa.binary()))
    assert np.isnan(seconds[0])
    assert_close(seconds[1:], [moment.replace(tzinfo=UTC).timestamp() for _, moment in cases])
    for text, second in zip(texts, seconds[1:], strict=True):
        # Of the two readings of a date, pandas must know only this one: the year comes first, then the month.
        assert_close(second, pandas.to_datetime(text, dayfirst=False, utc=True).timestamp())
    assert are_times(texts)


@given(
    st.lists(
        st.from_regex(re.compile(r"\A(20|1[89])\d\d([-/])\d{1,2}\2\d{1,2}( \d{1,2}:\d\d(:\d\d)?)?\Z", re.ASCII)),
        min_size=1,
        max_size=2,
    )
)
def test_texts_that_are_no_times_are_refused(texts: list[str]) -> None:
    """Whatever has the form of a time is the one of strptime, or an error."""
    for text in texts:
        forms = [f"%Y{sign}%m{sign}%d{time}" for sign in "-/" for time in ("", " %H:%M", " %H:%M:%S")]
        expected = None
        for form in forms:
            try:
                expected = datetime.strptime(text, form).replace(tzinfo=UTC).timestamp()
            except ValueError:
                continue
        if expected is None or text.endswith(":60"):
            with pytest.raises(pa.ArrowInvalid):
                parse_times(pa.array([text]))
        else:
            assert are_times([text])
            assert_close(parse_times(pa.array([text])), [expected])


def test_other_forms_stay_text() -> None:
    """The order of day and month is open, or a code has the form of a date."""
    others = [
        "7/11/2017 9:30",
        "07-11-2017",
        "1310-73-2",
        "2017-13-1",
        "2017/1-7",
        "17-1-7",
        "2017-1-7 24:00",
        "2017/1",
    ]
    for text in [*others, "2017-1-7 9", "2017-1-7  9:30", "2017-1-7 9:30 PM", " 2017-1-7", "٢٠١٧-1-7"]:
        assert not are_times([text]), text
        with pytest.raises(pa.ArrowInvalid):
            parse_times(pa.array([text]))
    times = [f"2017-11-{1 + row % 9} {row % 24}:30" for row in range(60)]
    assert infer_role("seen", times).is_time and infer_role("click_time", times).role == "ignore"
    assert infer_role("time", times).role == "time"
    assert infer_role("time", [*times, "soon", "soon"]).role == "categorical"


def test_zones_and_fractions() -> None:
    pandas = pytest.importorskip("pandas")
    texts = ["2017-11-07 9:30+05:30", "2017/11/7T9:30:15.25Z", "2017-11-07 09:30"]
    assert_close(parse_times(pa.array(texts)), [pandas.to_datetime(text, utc=True).timestamp() for text in texts])
    assert find_invalid_time(pa.array(["2017-11-07 9:30", "2017-11-07 25:30"])) == 1


TEXTS = [f"2017-11-{1 + row // 24} {row % 24}:{row % 60:02}" for row in range(96)]


@pytest.mark.parametrize("name", sample(["log.csv", "log.jsonl", "log.parquet"], k=1, seed=0))
def test_all_formats_infer_and_split_by_such_times(tmp_path: Path, name: str) -> None:
    columns = {"click": [row % 2 for row in range(96)], "time": TEXTS, "city": [f"c{row % 5}" for row in range(96)]}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    path = tmp_path / name
    if name == "log.parquet":
        pq.write_table(pa.table(columns), path)
    elif name == "log.jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([list(columns), *(row.values() for row in rows)])
    options = PrepareOptions(sources=[str(path)], out=tmp_path / "out", test_after="2017-11-4 9:30")
    assert read_layout(options).time == "time"
    dataset = prepare(options)
    expected = [datetime.strptime(text, "%Y-%m-%d %H:%M").replace(tzinfo=UTC).timestamp() for text in TEXTS]
    assert {split: dataset.splits[split].num_rows for split in dataset.splits} == {"train": 82, "test": 14}
    assert read_split(tmp_path / "out", "train").column("time").to_pylist() == expected[:82]
    assert read_split(tmp_path / "out", "test").column("time").to_pylist() == expected[82:]


@pytest.mark.soak
def test_a_bad_time_is_named(tmp_path: Path) -> None:
    lines = [f"{row % 2},c{row % 5},{text}" for row, text in enumerate([*TEXTS, "2017-2-30 9:30"])]
    (tmp_path / "log.csv").write_text("click,city,time\n" + "\n".join(lines) + "\n")
    with pytest.raises(MesetaError, match="line 98, column 'time': '2017-2-30 9:30' is not a time: write times as"):
        prepare(PrepareOptions(sources=[str(tmp_path / "log.csv")], out=tmp_path / "out"))


def test_a_dated_folder_is_no_time_of_fit(tmp_path: Path) -> None:
    assert _split_options("test", "2026-1-31", tmp_path) == ["--test-after", "2026-1-31"]
    assert _split_options("test", "2026/01/31", tmp_path) == ["--test-files", "2026/01/31"]


@pytest.mark.parametrize("name", ["ip", "IP", "ip_address", "device_ip", "clientIp", "IPAddress", "ipv4", "isp", "asn"])
def test_addresses_are_categories(name: str) -> None:
    assert infer_role(name, [str(row * 7919 % 300_000) for row in range(200)] * 2).role == "categorical"


def test_counts_of_addresses_are_measurements() -> None:
    names = ("num_ips", "ip_count", "clicks_per_ip_count", "ship", "zip", "strip")
    assert [role_from_name(name) for name in names] == ["dense", "dense", "dense", None, "categorical", None]
