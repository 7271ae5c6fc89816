"""Tracks of a timeline against time painted nanosecond by nanosecond, and the trace file against its format."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meseta.spec import MesetaError
from meseta.system.files import format_json, parse_json
from meseta.telemetry.span import Span, TransferSpan
from meseta.telemetry.timeline import (
    OUTSIDE_STAGES,
    WAITING,
    RankClock,
    Slice,
    StepRange,
    Timeline,
    TraceDocument,
    Track,
    make_rank_tracks,
    split_nested,
    to_trace_document,
)

STAGES = ("data", "lookup", "backward", "table_update", "agree")
LENGTH = 60


@st.composite
def nested(draw: st.DrawFn) -> list[Span]:
    """Draw spans in the order of their ends, nested or disjoint. Times are nanoseconds, converted to seconds."""
    spans: list[Span] = []

    def fill(low: int, high: int, depth: int) -> None:
        while low < high and draw(st.booleans()):
            begin = draw(st.integers(low, high))
            end = draw(st.integers(begin, high))
            if depth:
                fill(begin, end, depth - 1)
            spans.append(Span(draw(st.sampled_from(STAGES)), 0, begin / 1e9, end / 1e9, 0.0))
            low = end

    fill(0, LENGTH, 3)
    return [*spans, Span("step", 0, 0.0, LENGTH / 1e9, 0.0)]


transfers = st.lists(
    st.builds(
        lambda name, begin, length, waited: TransferSpan(
            name, 0, 1, 8.0, 16.0, begin / 1e9, (begin + length) / 1e9, min(waited, length) / 1e9
        ),
        st.sampled_from(["ids", "embeddings", "dense"]),
        st.integers(0, LENGTH),
        st.integers(0, LENGTH),
        st.integers(0, LENGTH),
    ),
    max_size=8,
)


@given(nested())
def test_stages_without_inner_stages_add_up_to_the_step(spans: list[Span]) -> None:
    painted = np.full(LENGTH, "", dtype=object)
    # The outer spans first. Of equal spans, the last one in the list comes first.
    for k in sorted(range(len(spans)), key=lambda k: (spans[k].begin_s - spans[k].end_s, -k)):
        span = spans[k]
        painted[round(1e9 * span.begin_s) : round(1e9 * span.end_s)] = span.stage
    tracks = [track for track in make_rank_tracks(0, spans, []) if track.kind == "stage"]
    drawn = np.full(LENGTH, "", dtype=object)
    for track in tracks:
        for one in track.slices:
            assert not any(drawn[one.begin_ns : one.end_ns]), "a rank is in one stage at a time"
            drawn[one.begin_ns : one.end_ns] = "step" if track.name == OUTSIDE_STAGES else track.name
    assert drawn.tolist() == painted.tolist()


@given(nested(), transfers)
def test_the_file_follows_its_format_and_is_read_back(spans: list[Span], sent: list[TransferSpan]) -> None:
    tracks = [*make_rank_tracks(0, spans, sent), *make_rank_tracks(1, spans, sent, offset_s=-3e-9, first=10)]
    written = Timeline(1, 11, (RankClock("a", 0.0, 0.0), RankClock("b", -3e-9, 1e-9)), tuple(tracks))
    text = format_json(to_trace_document(written))
    check_format(json.loads(text))
    read = TraceDocument.model_validate(parse_json(text.encode())).to_timeline()
    assert (read.first, read.last, read.ranks) == (written.first, written.last, written.ranks)
    begin_ns = min(one.begin_ns for track in tracks for one in track.slices)
    assert read.tracks == tuple(
        Track(track.rank, track.name, track.kind, tuple(moved(one, begin_ns) for one in track.slices))
        for track in tracks
    )


def moved(one: Slice, begin_ns: int) -> Slice:
    return one._replace(begin_ns=one.begin_ns - begin_ns, end_ns=one.end_ns - begin_ns)


def check_format(document: dict[str, Any]) -> None:
    """Check the keys of each kind of event, times from 0, one process per thread, slices that are nested or disjoint,
    and flows that begin and end in a slice."""
    keys = {
        "M": {"ph", "name", "pid", "tid", "args"},
        "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"},
        "s": {"ph", "name", "cat", "pid", "tid", "ts", "id"},
        "f": {"ph", "name", "cat", "pid", "tid", "ts", "id", "bp"},
    }
    threads: dict[int, set[int]] = defaultdict(set)
    slices: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in document["traceEvents"]:
        assert set(event) == keys[event["ph"]], event
        assert event.get("ts", 0.0) >= 0 and event.get("dur", 0.0) >= 0
        if event["tid"]:
            threads[event["tid"]].add(event["pid"])
        if event["ph"] == "X":
            begin_ns = round(1e3 * event["ts"])
            slices[event["tid"]].append((begin_ns, begin_ns + round(1e3 * event["dur"])))
    assert all(len(processes) == 1 for processes in threads.values())
    names = Counter(e["tid"] for e in document["traceEvents"] if e["name"] == "thread_name")
    assert set(names) == set(slices) and set(names.values()) <= {1}
    for of_thread in slices.values():
        for one in of_thread:
            for other in of_thread:
                apart = one[1] <= other[0] or other[1] <= one[0]
                inside = (one[0] <= other[0] and other[1] <= one[1]) or (other[0] <= one[0] and one[1] <= other[1])
                assert apart or inside
    flows = [event for event in document["traceEvents"] if event["ph"] in "sf"]
    assert sorted(Counter(event["id"] for event in flows).values()) == [2] * (len(flows) // 2)
    for event in flows:
        assert any(begin <= round(1e3 * event["ts"]) < end for begin, end in slices[event["tid"]])


def test_overlapping_transfers_are_on_separate_tracks() -> None:
    sent = [
        TransferSpan("ids", 3, 1, 100.0, 0.0, 1.0, 5.0, 1.0),
        TransferSpan("ids", 4, 1, 200.0, 0.0, 3.0, 8.0, 0.0),
        TransferSpan("dense", 3, 1, 0.0, 7.0, 0.5, 2.0, 0.0),
        TransferSpan("ids", 4, 1, 300.0, 0.0, 5.0, 6.0, 0.0),
        TransferSpan("ids", None, 1, 300.0, 0.0, 8.0, 9.0, 0.0),
    ]
    slices = {track.name: track.slices for track in make_rank_tracks(0, [], sent, first=20)}
    assert list(slices) == ["ids in flight", "ids in flight (2)", "dense in flight"]
    shown = [(one.name, one.begin_ns / 1e9, one.end_ns / 1e9, one.step) for one in slices["ids in flight"]]
    assert shown == [("ids", 1.0, 5.0, 24), (WAITING, 4.0, 5.0, 24), ("ids", 5.0, 6.0, 25), ("ids", 8.0, 9.0, None)]
    assert [one.args["intra-host bytes"] for one in slices["ids in flight (2)"]] == [200.0]
    assert slices["dense in flight"][0].args["inter-host bytes"] == 7.0


def test_steps_have_their_numbers_in_the_run_and_the_gaps_between_them() -> None:
    spans = [Span("step", 0, 1.0, 2.0, 0.0), Span("dense_update", 1, 2.25, 2.5, 0.0), Span("step", 1, 3.0, 4.0, 0.0)]
    steps, update, no_stage = make_rank_tracks(2, spans, [], first=100)
    assert [(one.name, one.step) for one in steps.slices] == [
        ("step 101", 101), ("between steps", None), ("step 102", 102)
    ]  # fmt: skip
    timeline = Timeline(101, 102, (RankClock("a", 0.0, 0.0),) * 3, (steps, update, no_stage))
    assert [one.step for one in timeline.steps(2)] == [101, 102] and timeline.steps(0) == []
    assert (update.name, no_stage.name, len(no_stage.slices)) == ("dense_update", OUTSIDE_STAGES, 2)


def test_a_clock_that_rounds_leaves_no_overlap() -> None:
    timed = [Slice("lookup", 10, 21, 1), Slice("backward", 0, 20, 1), Slice("agree", 20, 30, 1)]
    assert [piece[:3] for piece in split_nested(timed)] == [("backward", 0, 10), ("lookup", 10, 20), ("agree", 20, 30)]


@pytest.mark.parametrize(
    ("text", "rule"),
    [("", "must be FIRST:LAST, as 101:110, got ''"), ("3-5", "got '3-5'"), ("3:", "got '3:'"), (":5", "got ':5'"),
     ("-1:5", "got '-1:5'"), ("1:2:3", "got '1:2:3'"), ("0:4", "1 <= FIRST <= LAST"), ("5:4", "1 <= FIRST <= LAST"),
     ("1:101", "are 101 steps, but a timeline"), ("9" * 100, "must be FIRST:LAST"), ("²:3", "got '²:3'")],
)  # fmt: skip
def test_steps_that_cannot_be_profiled(text: str, rule: str) -> None:
    with pytest.raises(MesetaError) as caught:
        StepRange.parse(text)
    assert rule in str(caught.value)


def test_steps_to_profile() -> None:
    assert StepRange.parse("101:110") == (101, 110) and StepRange.parse("7") == (7, 7)
    assert StepRange.default_after(0, 1000) == (11, 20)
    assert StepRange.default_after(500, 1000) == (511, 520)
    assert StepRange.default_after(0, 15) == (8, 15)
    assert StepRange.default_after(0, 1) == (1, 1)
    assert StepRange.default_after(6, 8) == (8, 8)
