"""Tests that windows are decoded once for all ranks, in bounded memory, and that no wait is infinite."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from meseta.data.read.options import CancellationCheck
from meseta.data.service.server import window_store
from meseta.data.service.server.window_store import CancelledCall, WindowStore
from meseta.spec import MesetaError

SIZE = 100


class Decoded(list[tuple[int, int]]):
    """Places that were decoded, in order."""

    def __call__(self, place: tuple[int, int]) -> str:
        self.append(place)
        return f"{place}".ljust(SIZE)


def take(
    store: WindowStore[str],
    decoded: Decoded,
    window: int,
    rank: int = 0,
    takers: int = 1,
    hold: threading.Event | None = None,
) -> str:
    place = (0, window)
    with store.window("order", place, set(range(takers)), rank, SIZE, lambda check: decoded(place)) as content:
        if hold is not None:
            assert hold.wait(10)
        return content()


def store_of(windows: int) -> WindowStore[str]:
    return WindowStore(windows * SIZE, len)


def test_a_window_is_decoded_once_for_all_ranks_and_then_forgotten() -> None:
    store, decoded = store_of(2), Decoded()
    with ThreadPoolExecutor(4) as pool:
        windows = list(pool.map(lambda rank: take(store, decoded, 3, rank, 4), range(4)))
    assert (len(set(windows)), decoded, store.buffered_bytes) == (1, [(0, 3)], 0)
    assert (store.num_decoded, store.num_redecoded) == (1, {})


def test_who_leaves_in_the_middle_may_come_again() -> None:
    store, decoded = store_of(2), Decoded()
    with pytest.raises(KeyboardInterrupt), store.window("order", (0, 1), {0}, 0, SIZE, lambda check: decoded((0, 1))):
        raise KeyboardInterrupt
    assert store.buffered_bytes == SIZE
    take(store, decoded, 1)
    assert (decoded, store.buffered_bytes) == ([(0, 1)], 0)


def test_a_window_waits_for_room_unless_it_comes_before_all_others() -> None:
    store, decoded, hold = store_of(2), Decoded(), threading.Event()
    with ThreadPoolExecutor(4) as pool:
        held = [pool.submit(take, store, decoded, window, 0, 1, hold) for window in (5, 6)]
        while len(decoded) < 2:
            time.sleep(0.01)
        later = pool.submit(take, store, decoded, 7)
        assert take(store, decoded, 4).startswith("(0, 4)")  # otherwise no rank would reach 5
        time.sleep(0.2)
        assert not later.done() and store.buffered_bytes <= 3 * SIZE
        hold.set()
        assert later.result(10).startswith("(0, 7)")
        assert all(future.result(10) for future in held)
    assert store.buffered_bytes == 0


def test_unrequested_windows_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_store, "IDLE_TIMEOUT_S", 0.1)
    store, decoded = store_of(1), Decoded()
    take(store, decoded, 1, rank=0, takers=2)  # rank 1 has died
    assert store.buffered_bytes == SIZE
    take(store, decoded, 2)
    take(store, decoded, 1, rank=1, takers=2)
    assert decoded == [(0, 1), (0, 2), (0, 1)] and store.num_redecoded == {"idle": 1}


def test_a_blocked_rank_pins_no_window_and_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its window makes room for others, and is decoded again when it moves."""
    monkeypatch.setattr(window_store, "STALLED_TIMEOUT_S", 0.3)
    store, decoded = store_of(1), Decoded()
    with store.window("order", (0, 1), {0}, 0, SIZE, lambda check: decoded((0, 1))) as content:
        first = content()
        began_s = time.monotonic()
        take(store, decoded, 2)  # of whom rows are taken
        assert time.monotonic() - began_s > 0.2 and store.buffered_bytes == 0
        assert content() == first
        assert store.buffered_bytes == SIZE
    assert decoded == [(0, 1), (0, 2), (0, 1)] and (store.buffered_bytes, store.num_redecoded) == (0, {"idle": 1})


def test_who_takes_rows_slowly_keeps_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_store, "STALLED_TIMEOUT_S", 0.5)
    store, decoded, pool = store_of(1), Decoded(), ThreadPoolExecutor(1)
    with pool, store.window("order", (0, 1), {0}, 0, SIZE, lambda check: decoded((0, 1))) as content:
        later = pool.submit(take, store, decoded, 2)
        for _ in range(10):
            time.sleep(0.1)
            assert content() and not later.done()
    assert later.result(10) and decoded == [(0, 1), (0, 2)]


def test_a_damaged_window_fails_all_waiting_ranks_and_is_retried() -> None:
    store = store_of(1)

    def fail(check: CancellationCheck) -> str:
        time.sleep(0.1)
        raise MesetaError("damaged")

    def ask(rank: int) -> str:
        with pytest.raises(MesetaError, match="damaged"), store.window("order", (0, 0), {0, 1}, rank, SIZE, fail):
            pass
        return "told"

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, range(2))) == ["told", "told"]
    assert store.buffered_bytes == 0
    assert take(store, Decoded(), 0)


class Caller(threading.Event):
    """A caller, which cancels when it is set."""

    def check(self) -> None:
        if self.is_set():
            raise CancelledCall


class PiecewiseDecode:
    """Decodes in pieces of 10 ms, before each of which it checks whether anybody waits."""

    def __init__(self, most: int = 150) -> None:
        self.most = most
        self.num_pieces = 0
        self.num_begun = 0

    def __call__(self, check: CancellationCheck) -> str:
        self.num_begun += 1
        for _ in range(self.most):
            check()
            self.num_pieces += 1
            time.sleep(0.01)
        return " " * SIZE


def ask(store: WindowStore[str], decode: PiecewiseDecode, caller: Caller, rank: int = 0) -> bool:
    """Whether the window came."""
    try:
        with store.window("order", (0, 0), {0, 1}, rank, SIZE, decode, caller.check) as content:
            return bool(content())
    except CancelledCall:
        return False


def begun(decode: PiecewiseDecode) -> None:
    while not decode.num_pieces:
        time.sleep(0.01)


def test_decoding_ends_without_waiting_ranks() -> None:
    store, decode, caller = store_of(1), PiecewiseDecode(), Caller()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, store, decode, caller)
        begun(decode)
        caller.set()
        assert asked.result(10) is False
    assert decode.num_pieces < 150 and (store.num_buffered, store.num_decoded) == (0, 0)
    assert ask(store, PiecewiseDecode(1), Caller()), "and may be asked for again"


def test_decoding_continues_for_another_caller_and_waits_can_be_canceled() -> None:
    store, decode, callers = store_of(1), PiecewiseDecode(), [Caller() for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ask, store, decode, callers[0])]
        begun(decode)
        asked += [pool.submit(ask, store, decode, caller, 1) for caller in callers[1:]]
        time.sleep(0.2)
        callers[0].set()
        callers[1].set()
        assert asked[1].result(10) is False
        assert not asked[0].done(), "who cancels does not wait for the end of the decoding"
        assert asked[2].result(10) is True and decode.num_begun == 1
        asked[0].result(10)


def take_later(store: WindowStore[str], decode: PiecewiseDecode, caller: Caller) -> None:
    with store.window("another", (0, 6), {0}, 0, SIZE, decode, caller.check):
        pass


def test_who_waits_for_room_may_cancel() -> None:
    store, hold, caller, decode = store_of(1), threading.Event(), Caller(), PiecewiseDecode()
    with ThreadPoolExecutor(2) as pool:
        held = pool.submit(take, store, Decoded(), 1, hold=hold)
        while not store.num_decoded:
            time.sleep(0.01)

        with store.window("another", (0, 5), {0}, 0, 0, lambda check: ""):  # so that the next one is not the first
            waiting = pool.submit(take_later, store, decode, caller)
            time.sleep(0.1)
            caller.set()
            with pytest.raises(CancelledCall):
                waiting.result(5)
        hold.set()
        assert held.result(10) and decode.num_begun == 0


def test_windows_of_many_ranks_cost_nothing_for_each() -> None:
    store, ranks = store_of(1), range(1 << 40)
    begin_s = time.process_time()
    with store.window("order", (0, 0), ranks, 7, SIZE, lambda check: " " * SIZE) as content:
        assert content()
    assert time.process_time() - begin_s < 0.1 and store.num_buffered == 1
