"""The background thread: order, exceptions as they are, and no thread left behind."""

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from meseta.data.prefetch import prefetch


def is_running() -> bool:
    return any(thread.name == "meseta-prefetch" for thread in threading.enumerate())


@pytest.mark.parametrize("num_ahead", [0, 1, 5])
def test_same_items_in_order(num_ahead: int) -> None:
    assert list(prefetch(iter(range(100)), num_ahead)) == list(range(100))
    assert not is_running()


@pytest.mark.parametrize("num_ahead", [0, 1, 5])
def test_an_exception_comes_as_it_is_after_the_items_before_it(num_ahead: int) -> None:
    failure = KeyError("the very object")

    def items() -> Iterator[int]:
        yield from range(3)
        raise failure

    taken = []
    with pytest.raises(KeyError) as caught:
        for item in prefetch(items(), num_ahead):
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

    ahead = prefetch(items(), 3)
    assert next(ahead) == 0
    assert is_running()
    ahead.close()
    assert not is_running()
    assert len(made) <= 1 + 3 + 2  # taken, waiting, and one on its way


def test_a_held_iterator_does_not_keep_the_process_alive() -> None:
    code = "from meseta.data.prefetch import prefetch; import itertools; p = prefetch(itertools.count(), 2); next(p)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
