"""Windows are decoded once for all ranks, within a bound on their bytes, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from meseta.readers import window_store
from meseta.readers.window_store import WindowStore
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
    with store.window("order", place, set(range(takers)), rank, SIZE, lambda: decoded(place)) as content:
        if hold is not None:
            assert hold.wait(10)
        return content()


def store_of(windows: int) -> WindowStore[str]:
    return WindowStore(windows * SIZE, len)


def test_a_window_is_decoded_once_for_all_ranks_and_then_forgotten() -> None:
    store, decoded = store_of(2), Decoded()
    with ThreadPoolExecutor(4) as pool:
        came = list(pool.map(lambda rank: take(store, decoded, 3, rank, 4), range(4)))
    assert (len(set(came)), decoded, store.held_bytes) == (1, [(0, 3)], 0)
    assert (store.num_decoded, store.num_again) == (1, {})


def test_who_leaves_in_the_middle_may_come_again() -> None:
    store, decoded = store_of(2), Decoded()
    with pytest.raises(KeyboardInterrupt), store.window("order", (0, 1), {0}, 0, SIZE, lambda: decoded((0, 1))):
        raise KeyboardInterrupt
    assert store.held_bytes == SIZE
    take(store, decoded, 1)
    assert (decoded, store.held_bytes) == ([(0, 1)], 0)


def test_a_window_waits_for_room_unless_it_comes_before_all_others() -> None:
    store, decoded, hold = store_of(2), Decoded(), threading.Event()
    with ThreadPoolExecutor(4) as pool:
        held = [pool.submit(take, store, decoded, window, 0, 1, hold) for window in (5, 6)]
        while len(decoded) < 2:
            time.sleep(0.01)
        later = pool.submit(take, store, decoded, 7)
        assert take(store, decoded, 4).startswith("(0, 4)")  # else nobody would ever get to 5
        time.sleep(0.2)
        assert not later.done() and store.held_bytes <= 3 * SIZE
        hold.set()
        assert later.result(10).startswith("(0, 7)")
        assert all(future.result(10) for future in held)
    assert store.held_bytes == 0


def test_what_nobody_comes_for_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_store, "IDLE_S", 0.1)
    store, decoded = store_of(1), Decoded()
    take(store, decoded, 1, rank=0, takers=2)  # rank 1 has died
    assert store.held_bytes == SIZE
    take(store, decoded, 2)
    take(store, decoded, 1, rank=1, takers=2)
    assert decoded == [(0, 1), (0, 2), (0, 1)] and store.num_again == {"idle": 1}


def test_who_stands_still_keeps_no_window_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its window makes room for others, and is decoded again when it moves."""
    monkeypatch.setattr(window_store, "STILL_S", 0.3)
    store, decoded = store_of(1), Decoded()
    with store.window("order", (0, 1), {0}, 0, SIZE, lambda: decoded((0, 1))) as content:
        first = content()
        began_s = time.monotonic()
        take(store, decoded, 2)  # of whom rows are taken
        assert time.monotonic() - began_s > 0.2 and store.held_bytes == 0
        assert content() == first
        assert store.held_bytes == SIZE
    assert decoded == [(0, 1), (0, 2), (0, 1)] and (store.held_bytes, store.num_again) == (0, {"idle": 1})


def test_who_takes_rows_slowly_keeps_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_store, "STILL_S", 0.5)
    store, decoded, pool = store_of(1), Decoded(), ThreadPoolExecutor(1)
    with pool, store.window("order", (0, 1), {0}, 0, SIZE, lambda: decoded((0, 1))) as content:
        later = pool.submit(take, store, decoded, 2)
        for _ in range(10):
            time.sleep(0.1)
            assert content() and not later.done()
    assert later.result(10) and decoded == [(0, 1), (0, 2)]


def test_a_damaged_window_is_told_to_all_who_wait_and_tried_again() -> None:
    store = store_of(1)

    def fail() -> str:
        time.sleep(0.1)
        raise MesetaError("damaged")

    def ask(rank: int) -> str:
        with pytest.raises(MesetaError, match="damaged"), store.window("order", (0, 0), {0, 1}, rank, SIZE, fail):
            pass
        return "told"

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, range(2))) == ["told", "told"]
    assert store.held_bytes == 0
    assert take(store, Decoded(), 0)
