"""Tests of the heartbeat, which continues while the interpreter lock is held."""

from __future__ import annotations

import ctypes
import os
import struct
import tempfile
import time
from collections.abc import Iterator

import pytest

from meseta.ops.heartbeat import start_heartbeat, stop_heartbeat


@pytest.fixture
def file() -> Iterator[int]:
    with tempfile.TemporaryFile() as opened:
        os.ftruncate(opened.fileno(), 4096)
        yield opened.fileno()
        stop_heartbeat()


def beat(file: int, place: int) -> tuple[int, int]:
    time_ns, processor_ns = struct.unpack("<qq", os.pread(file, 16, place))
    return time_ns, processor_ns


def test_continues_while_the_interpreter_lock_is_held(file: int) -> None:
    before_ns = time.monotonic_ns()
    start_heartbeat(file, 64)
    first, _ = beat(file, 64)
    assert before_ns <= first <= time.monotonic_ns()
    # PyDLL keeps the interpreter's lock while it sleeps, so that no thread of Python runs.
    ctypes.PyDLL(None).usleep(1_200_000)
    second, processor_ns = beat(file, 64)
    assert 0.9e9 < second - first < 1.3e9 and 0 < processor_ns <= time.process_time_ns()
    assert os.pread(file, 4096, 0).count(0) >= 4096 - 16


def test_stops(file: int) -> None:
    start_heartbeat(file, 0)
    stop_heartbeat()
    stop_heartbeat()
    last = beat(file, 0)
    time.sleep(1.1)
    assert beat(file, 0) == last


@pytest.mark.parametrize("place", [4, 4088, 4096, 1 << 40])
def test_places_outside_are_refused(file: int, place: int) -> None:
    with pytest.raises(ValueError, match="start_heartbeat"):
        start_heartbeat(file, place)


def test_paths_that_are_no_files_are_refused() -> None:
    reader, writer = os.pipe()
    with pytest.raises(ValueError, match="too short for this offset, or is not a regular file"):
        start_heartbeat(reader, 0)
    os.close(reader)
    os.close(writer)
