"""Tests of leases: all ranks receive the same assignment, and windows move away from unresponsive or slow readers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meseta.data.service.messages import Heartbeat, LeaseRequest, ReaderFailure, RowOrder, Session
from meseta.data.service.server import lease_table
from meseta.data.service.server.lease_table import (
    HEARTBEAT_TIMEOUT_S,
    NUM_RETAINED_WINDOWS,
    READER_BACKOFF_S,
    SESSION_TIMEOUT_S,
    LeaseTable,
)
from meseta.spec import MesetaError

ROWS = RowOrder(
    dataset="click",
    digest="0" * 64,
    split="train",
    labels=("label",),
    shuffle=True,
    seed=1,
    window_rows=100,
    filter=None,
    negative_keep=1.0,
)


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def asked(
    *windows: int, rank: int = 0, attempt: int = 1, run: str = "run", failures: tuple[ReaderFailure, ...] = ()
) -> LeaseRequest:
    session = Session(rows=ROWS, run=run, attempt=attempt, rank=rank, num_ranks=2)
    return LeaseRequest(session=session, epoch=0, windows=windows, failures=failures)


def beat(name: str) -> Heartbeat:
    return Heartbeat(
        reader=name, buffered_bytes=0, max_buffer_bytes=1, num_rows=0, num_windows=0, num_redecoded={}, busy_s=0.0
    )


def of(table: LeaseTable, *windows: int, **options: object) -> dict[int, str]:
    return {lease.window: lease.reader for lease in table.lease(asked(*windows, **options)).leases}  # type: ignore[arg-type]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> LeaseTable:
    table = LeaseTable(clock)
    for name in ("a", "b", "c"):
        table.record_heartbeat(beat(name))
    return table


def test_all_ranks_receive_the_same_leases_and_readers_share(table: LeaseTable) -> None:
    first = of(table, 0, 1, 2, 3, 4, 5)
    assert sorted(first.values()) == ["a", "a", "b", "b", "c", "c"]
    assert of(table, 5, 3, 0, rank=1) == {window: first[window] for window in (5, 3, 0)}


def test_no_leases_without_readers(clock: Clock) -> None:
    answer = LeaseTable(clock).lease(asked(0, 1))
    assert (answer.leases, answer.num_readers) == ((), 0)


def test_windows_of_an_unresponsive_reader_move(table: LeaseTable, clock: Clock) -> None:
    before = of(table, 0, 1, 2)
    clock.now_s = HEARTBEAT_TIMEOUT_S
    table.record_heartbeat(beat("b"))
    clock.now_s += 0.1
    assert set(of(table, 0, 1, 2).values()) == {"b"}
    assert table.num_reassigned == {"silent": sum(reader != "b" for reader in before.values())}
    table.record_heartbeat(beat("a"))  # returns: moved windows stay moved
    assert set(of(table, 0, 1, 2).values()) == {"b"}


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ({"kind": "slow"}, "slow"),
        ({"kind": "failed", "reason": "the link broke"}, "lost"),
        ({"kind": "failed", "reason": "slow"}, "lost"),
        ({"what": "slow"}, "slow"),  # of an older version, as is the next one
        ({"what": "the link broke"}, "lost"),
    ],
)
def test_trouble_moves_a_window_and_keeps_the_run_away(
    table: LeaseTable, clock: Clock, document: dict[str, str], why: str
) -> None:
    reader = of(table, 7)[7]
    request = asked(7).model_dump(mode="json") | {"failures": [{"window": 7, "reader": reader, **document}]}
    received = LeaseRequest.from_bytes(json.dumps(request).encode(), "trainer")
    assert LeaseRequest.from_bytes(received.to_bytes(), "trainer") == received
    [trouble] = received.failures
    moved = of(table, 7, failures=(trouble,))[7]
    assert moved != reader and table.num_reassigned == {why: 1}
    assert of(table, 7, rank=1, failures=(trouble,))[7] == moved, "a report of a failure that was handled"
    assert reader not in of(table, *range(8, 20)).values()
    assert reader in of(table, *range(20, 32), run="another").values()
    clock.now_s += READER_BACKOFF_S + 0.1
    for name in ("a", "b", "c"):
        table.record_heartbeat(beat(name))
    assert reader in of(table, *range(40, 52)).values()


def test_a_reader_that_leaves_gives_what_it_has_and_gets_no_more(table: LeaseTable) -> None:
    before = of(table, 0, 1, 2)
    table.record_heartbeat(beat("a").model_copy(update={"is_draining": True}))
    assert of(table, 0, 1, 2) == before and table.num_reassigned == {}
    assert sorted(of(table, *range(3, 9)).values()) == ["b", "b", "b", "c", "c", "c"]
    assert table.lease(asked(0)).num_readers == 2
    for name in ("b", "c"):
        table.record_heartbeat(beat(name).model_copy(update={"is_draining": True}))
    assert of(table, 20) == {}, "they would never be done"
    [kept] = [window for window, reader in before.items() if reader == "a"]
    assert of(table, kept, failures=(ReaderFailure(window=kept, reader="a", kind="slow"),)) == {kept: "a"}


def test_who_comes_later_does_not_have_to_catch_up(clock: Clock) -> None:
    table = LeaseTable(clock)
    table.record_heartbeat(beat("b"))
    for window in range(40):
        assert of(table, window) == {window: "b"}
    table.record_heartbeat(beat("a"))
    assert [of(table, window)[window] for window in range(40, 46)] == ["a", "b", "a", "b", "a", "b"]


def test_trainings_count_by_the_rank_that_waits_most(table: LeaseTable, clock: Clock) -> None:
    def tell(waited_s: float, passed_s: float, **of_whom: Any) -> None:
        request = asked(0, **of_whom).model_copy(update={"wait_s": waited_s, "elapsed_s": passed_s})
        table.lease(request)

    for passed_s in (0.0, 4.0, 8.0, 12.0):
        clock.now_s = passed_s
        tell(0.1 * passed_s, passed_s)
        tell(0.25 * passed_s, passed_s, rank=1)
        tell(0.0, passed_s, run="another")
        if passed_s < 10:
            assert table.training_waiting_shares() == []
    assert sorted(table.training_waiting_shares()) == [0.0, pytest.approx(0.25)]
    tell(0.0, 0.5, rank=1, attempt=2)  # begun again
    assert sorted(table.training_waiting_shares()) == [0.0, pytest.approx(0.1)]
    clock.now_s += SESSION_TIMEOUT_S + 0.1
    assert table.training_waiting_shares() == [] and table.sessions() == []


def test_the_only_reader_keeps_what_it_has(clock: Clock) -> None:
    table = LeaseTable(clock)
    table.record_heartbeat(beat("a"))
    assert of(table, 0) == {0: "a"}
    assert of(table, 0, failures=(ReaderFailure(window=0, reader="a", kind="slow"),)) == {0: "a"}


def test_ranks_of_a_former_attempt_are_turned_away(table: LeaseTable) -> None:
    of(table, 0, attempt=3)
    of(table, 0, attempt=4)
    with pytest.raises(MesetaError, match="rank 1 belongs to an earlier attempt of run 'run'"):
        of(table, 0, attempt=3, rank=1)
    of(table, 0, attempt=3, run="another")


@given(moves=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 300), st.booleans()), max_size=60))
def test_what_is_kept_is_bounded_and_readers_are_always_there(moves: list[tuple[str, int, bool]]) -> None:
    clock = Clock()
    table = LeaseTable(clock)
    there = {}
    for name, window, passes in moves:
        table.record_heartbeat(beat(name))
        there[name] = clock.now_s
        reader = of(table, window)[window]
        assert clock.now_s - there[reader] <= HEARTBEAT_TIMEOUT_S
        clock.now_s += 2.0 * passes
    assert num_leases(table) <= 300 + NUM_RETAINED_WINDOWS


def num_leases(table: LeaseTable) -> int:
    return sum(reader.num_leases for reader in table.readers())


def test_what_is_remembered_has_a_limit(table: LeaseTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of made-up windows, runs and readers."""
    monkeypatch.setattr(lease_table, "MAX_LEASES", 3)
    monkeypatch.setattr(lease_table, "MAX_RUNS", 3)
    monkeypatch.setattr(lease_table, "MAX_READERS", 4)
    for window in range(20):
        of(table, 0, 1 + window)
    assert num_leases(table) == 3
    for run in "pqrstu":
        reader = of(table, 7, run=run)[7]
        of(table, 7, run=run, failures=(ReaderFailure(window=7, reader=reader, kind="failed", reason="broken"),))
    assert num_leases(table) == 3
    table.record_heartbeat(beat("d"))
    with pytest.raises(MesetaError, match="a dispatcher has at most 4 readers"):
        table.record_heartbeat(beat("e"))
    table.record_heartbeat(beat("d"))
    assert len(table.readers()) == 4
