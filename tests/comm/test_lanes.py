"""Lanes run one action after the other, in the thread that waits first, and yield to exchanges of rows."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from meseta.comm import messages
from meseta.comm.messages import Lane, RowPriority
from meseta.spec import MesetaError


def test_a_lane_runs_actions_in_order() -> None:
    lane, done = Lane("sums", None), list[int]()
    gate = threading.Event()
    works = [lane.submit(lambda n=n: (gate.wait(), done.append(n))) for n in range(4)]  # type: ignore[misc]
    assert done == [] and works[0].done_s is None
    before_s = time.perf_counter()
    gate.set()
    works[2].wait()
    assert done[:3] == [0, 1, 2]
    works[3].wait()
    lane.shutdown()
    assert done == [0, 1, 2, 3]
    assert works[2].done_s is not None and before_s <= works[2].done_s <= time.perf_counter()


def test_an_action_waited_for_immediately_needs_no_other_thread() -> None:
    lane, threads = Lane("sums", None), set[str]()
    lane.submit(lambda: threads.add(threading.current_thread().name), in_background=False).wait()
    assert threads == {threading.current_thread().name}
    later = lane.submit(lambda: threads.add(threading.current_thread().name))
    while later.done_s is None:
        time.sleep(0.001)
    assert threads == {threading.current_thread().name, "meseta-sums"}
    lane.shutdown()
    assert not [thread for thread in threading.enumerate() if thread.name == "meseta-sums"]
    lane.submit(lambda: None).wait()  # a lane restarts after its end
    lane.shutdown()


def test_an_error_is_raised_by_wait() -> None:
    lane, done = Lane("sums", None), list[int]()

    def fail() -> None:
        raise MesetaError("lost")

    failed, after = lane.submit(fail), lane.submit(lambda: done.append(1))
    after.wait()
    for _ in range(2):
        with pytest.raises(MesetaError, match=r"^lost$"):
            failed.wait()
    assert done == [1]
    lane.shutdown()


def test_a_chunk_yields_while_its_rank_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "YIELD_TIMEOUT_S", 60.0)
    crossing, order, has_begun = RowPriority(), list[str](), threading.Event()

    def piece() -> None:
        has_begun.set()
        crossing.yield_to_row_exchange()
        order.append("sum")

    with crossing.row_wait(), crossing.row_wait():
        thread = threading.Thread(target=piece)
        thread.start()
        has_begun.wait()
        time.sleep(0.02)
        order.append("rows")
    thread.join()
    assert order == ["rows", "sum"]
    crossing.yield_to_row_exchange()


def test_a_chunk_yields_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "YIELD_TIMEOUT_S", 0.01)
    crossing = RowPriority()
    with crossing.row_wait():
        crossing.yield_to_row_exchange()


def test_wait_does_not_run_later_actions() -> None:
    """The second action may need another rank, which needs this one to continue."""
    lane, has_begun, gates = Lane("sums", None), threading.Event(), [threading.Event(), threading.Event()]

    def carry(gate: threading.Event) -> None:
        has_begun.set()
        gate.wait(20)

    first, second = (lane.submit(partial(carry, gate)) for gate in gates)
    has_begun.wait(20)  # in the thread of the lane
    waiter = threading.Thread(target=first.wait)
    waiter.start()
    time.sleep(0.2)  # so that it waits
    gates[0].set()
    waiter.join(10)
    try:
        assert not waiter.is_alive() and second.done_s is None
    finally:
        gates[1].set()
        second.wait()
        lane.shutdown()
