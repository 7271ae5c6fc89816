"""The background thread: order, exceptions as they are, and no thread left behind."""

import itertools
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest

from meseta.data.dataset.queues import PrefetchIterator

OTHERS: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def others() -> None:
    """Threads of what other tests still hold."""
    OTHERS.clear()
    OTHERS.update(threading.enumerate())


def is_running() -> bool:
    return any(thread.name == "meseta-prefetch" for thread in set(threading.enumerate()) - OTHERS)


@pytest.mark.parametrize("num_ahead", [0, 1, 5])
def test_same_items_in_order(num_ahead: int) -> None:
    assert list(PrefetchIterator(iter(range(100)), num_ahead)) == list(range(100))
    assert not is_running()


@pytest.mark.parametrize("num_ahead", [0, 1, 5])
def test_an_exception_comes_as_it_is_after_the_items_before_it(num_ahead: int) -> None:
    failure = KeyError("the very object")

    def items() -> Iterator[int]:
        yield from range(3)
        raise failure

    taken = []
    with pytest.raises(KeyError) as caught:
        for item in PrefetchIterator(items(), num_ahead):
            taken.append(item)
    assert caught.value is failure
    assert taken == [0, 1, 2]
    assert not is_running()


def test_closing_early_stops_the_thread() -> None:
    made = []

    def items() -> Iterator[int]:
        for item in range(1_000_000):
            made.append(item)
            yield item

    ahead = PrefetchIterator(items(), 3)
    assert next(ahead) == 0
    assert is_running()
    ahead.close()
    assert not is_running()
    assert len(made) <= 1 + 3 + 2  # taken, waiting, and one on its way


def test_a_held_iterator_does_not_keep_the_process_alive() -> None:
    code = (
        "from meseta.data.dataset.queues import PrefetchIterator as P; import itertools; p = P(itertools.count(), "
        "2); next(p)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("num_taken", [0, 2])
def test_dropping_it_stops_the_thread(num_taken: int) -> None:
    ahead = PrefetchIterator(itertools.count(), 2)
    assert is_running()  # before the first item is asked for
    assert [next(ahead) for _ in range(num_taken)] == list(range(num_taken))
    del ahead
    assert not is_running()


@pytest.mark.parametrize("num_ahead", [0, 2])
def test_nothing_comes_after_the_end_and_after_closing(num_ahead: int) -> None:
    ended, closed = PrefetchIterator(iter("ab"), num_ahead), PrefetchIterator(iter("ab"), num_ahead)
    assert list(ended) == ["a", "b"]
    assert list(ended) == []
    closed.close()
    assert list(closed) == []
    closed.close()


def test_a_taken_item_is_not_held() -> None:
    class Item:
        pass

    ahead = PrefetchIterator((Item() for _ in range(10)), 2)
    for _ in range(5):
        item = next(ahead)
        held = weakref.ref(item)
        del item
        assert held() is None
