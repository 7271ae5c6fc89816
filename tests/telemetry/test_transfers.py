"""Means of transfers per step, by name."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from meseta.telemetry.span import NUM_RECENT_SPANS, TransferSpan, TransferTimes


def span(times: TransferTimes, name: str, inside: float, across: float, seconds: float) -> TransferSpan:
    return TransferSpan(name, times.step, 3, inside, across, begin_s=10.0, done_s=10.0 + seconds, wait_s=seconds / 2)


def test_means_are_per_step_since_the_last_call() -> None:
    times = TransferTimes()
    for size in (100.0, 300.0):
        with times.track_step():
            times.add(span(times, "ids", size, 2 * size, 0.5))
            times.add(span(times, "ids", size, 0.0, 0.5))
            times.add(span(times, "embeddings", 0.0, 8.0, 0.25))
    assert {name: astuple(one) for name, one in times.pop_means().items()} == {
        "ids": (2.0, 400.0, 400.0, 1.0, 0.5),
        "embeddings": (1.0, 0.0, 8.0, 0.25, 0.125),
    }
    assert times.pop_means() == {}
    with times.track_step():
        times.add(span(times, "ids", 50.0, 0.0, 2.0))
    assert times.pop_means()["ids"].intra_host_bytes == 50.0
    assert times.lifetime_means()["ids"].intra_host_bytes == pytest.approx((200 + 600 + 50) / 3)
    assert times.lifetime_means()["embeddings"].num_calls == pytest.approx(2 / 3)


def test_transfers_between_steps_count_for_no_step() -> None:
    times = TransferTimes()
    times.add(span(times, "ids", 1.0, 1.0, 1.0))
    with pytest.raises(ValueError, match="refused"), times.track_step():
        raise ValueError("refused")
    with times.track_step():
        pass
    assert times.pop_means() == {} and times.lifetime_means() == {}
    assert [one.step for one in times.recent_spans] == [None]


def test_transfers_with_unknown_names_are_kept_only_as_spans() -> None:
    times = TransferTimes()
    with times.track_step():
        times.add(span(times, "custom", 1.0, 1.0, 1.0))
    assert times.pop_means() == {} and [one.step for one in times.recent_spans] == [0]


def test_old_spans_are_dropped() -> None:
    times = TransferTimes()
    for _ in range(NUM_RECENT_SPANS + 10):
        times.add(span(times, "ids", 1.0, 0.0, 0.0))
    assert len(times.recent_spans) == NUM_RECENT_SPANS
