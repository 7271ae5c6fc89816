"""Tests of the status of readers and their clients: rates, sessions and windows decoded twice."""

from __future__ import annotations

import json
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bad_input.commands import run_here
from data.service.test_lease_table import Clock
from data.service.test_waits import slowed
from data.service.tier import running
from data.test_reader import make_dataset
from meseta.data import Dataset, ReaderOptions
from meseta.data.read import decode as decoding
from meseta.data.service.client.reader import RunAttempt, ServedReader
from meseta.data.service.messages import ReaderServiceStatus, ReaderStatus, SessionStatus
from meseta.data.service.server.rates import RATE_WINDOW_S, BusyTime, CounterHistory
from meseta.data.service.server.status_text import prometheus_text, status_lines
from meseta.spec import MesetaError

READER = ReaderStatus(
    reader="grpc://127.0.0.1:7", buffered_bytes=45_000_000, max_buffer_bytes=512_000_000, num_rows=1_200_000,
    num_windows=5, num_redecoded={"room": 2, "idle": 1},
    busy_s=12.5, num_leases=3, rows_per_s=123_400.0, busy_share=0.8,
)  # fmt: skip
ODD = 'a "b" \\ \n \x1b[31m'
STATUS = ReaderServiceStatus(
    datasets={"clicks": "/data/clicks"},
    readers=(
        READER,
        READER.model_copy(update={"reader": "grpc://127.0.0.1:8", "is_draining": True, "num_redecoded": {}}),
    ),
    sessions=(
        SessionStatus(run=ODD, dataset="clicks", split="train", num_ranks=2, waiting_shares={"0": 0.125, "1": 0.03}),
    ),
    num_moved={"silent": 4, "slow": 1},
)


@pytest.fixture(scope="module")
def jagged(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("status") / "data", multi_valued=True)


def test_lines_for_people() -> None:
    *_, of_reader, leaving, of_run, of_all = lines = list(status_lines(STATUS))
    assert lines[0] == "dataset 'clicks': '/data/clicks'"
    assert of_reader == (
        "reader 'grpc://127.0.0.1:7': 123k rows/s, busy 80%; 3 windows leased, 45.0 MB of 512 MB held; "
        "1,200,000 rows in 5 windows decoded, of them again 2 to make room for earlier ones, "
        "1 after no rows were requested"
    )
    assert ", leaving: " in leaving and "again" not in leaving
    assert "2 ranks: waits 12% of the time (rank 0 12%, rank 1 3.0%)" in of_run
    assert of_all == "2 readers; windows that went to another one: 4 of one that fell silent, 1 of a slow one"
    assert all(line.isprintable() for line in lines)


def test_text_for_prometheus() -> None:
    """Read back by the grammar of the format, not by what wrote it."""
    samples: dict[tuple[str, tuple[str, ...]], float] = {}
    kinds: dict[str, str] = {}
    for line in prometheus_text(STATUS).splitlines():
        if line.startswith("# TYPE "):
            kinds[line.split()[2]] = line.split()[3]
        elif not line.startswith("#"):
            name, labels, value = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line).groups()  # type: ignore[union-attr]
            pairs = re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels or "")
            assert ",".join(f'{key}="{text}"' for key, text in pairs) == (labels or "")
            samples[name, tuple(json.loads(f'"{text}"', strict=False) for _, text in pairs)] = float(value)
    assert samples["meseta_readers", ()] == 1 and not any("target" in name for name, _ in samples)
    assert samples["meseta_reader_rows_total", ("grpc://127.0.0.1:8",)] == 1_200_000
    for name in ("meseta_reader_windows_redecoded_total", "meseta_reader_windows_again_total"):
        assert samples[name, ("grpc://127.0.0.1:7", "room")] == 2
    assert (
        samples["meseta_windows_reassigned_total", ("silent",)]
        == samples["meseta_windows_moved_total", ("silent",)]
        == 4
    )
    assert samples["meseta_waiting_ratio", (ODD, "clicks", "train", "1")] == 0.03
    assert {name for name, _ in samples} == set(kinds) and kinds["meseta_reader_rows_total"] == "counter"


def test_the_command(jagged: Dataset) -> None:
    options = ReaderOptions(batch_size=50, shuffle=True, window_rows=100)
    with running({"click": jagged.dir}, 1) as tier:
        readers = [
            ServedReader(tier.service, "train", options, rank=rank, num_ranks=2, run=RunAttempt(name="mine", attempt=1))
            for rank in range(2)
        ]
        began_s = time.monotonic()
        passes = [reader.epoch() for reader in readers]
        for batches in zip(*passes, strict=True):
            assert len(batches) == 2
            time.sleep(0.01)
        rows = tier.readers[0]._reader.num_rows
        while tier.dispatcher.status().readers[0].num_rows < rows:
            assert time.monotonic() - began_s < 10, "no beat"
            time.sleep(0.05)
        status = tier.dispatcher.status()
        [reader], [session] = status.readers, status.sessions
        assert 0 < reader.rows_per_s <= rows and 0 < reader.busy_share < 1
        assert (session.run, session.split, session.num_ranks) == ("mine", "train", 2)
        assert set(session.waiting_shares) == {"0", "1"}
        as_json = run_here("readers", "status", tier.dispatcher.url, "--json")
        assert ReaderServiceStatus.model_validate_json(as_json.out).readers[0].num_rows == rows
        assert "run 'mine', split 'train'" in run_here("readers", "status", tier.dispatcher.url).out
        assert "# TYPE meseta_reader_rows_total counter" in (
            run_here("readers", "status", tier.dispatcher.url, "--prometheus").out
        )


def test_the_share_that_is_waited_comes_to_the_dispatcher(jagged: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares with a stopwatch: decoding a window takes as long as consuming it."""
    monkeypatch.setattr("meseta.data.service.client.windows.STATUS_INTERVAL_S", 0.1)
    monkeypatch.setattr(decoding, "decode_rows", slowed(decoding.decode_rows, 0.05))
    with running({"click": jagged.dir}, 1) as tier:
        options = ReaderOptions(batch_size=37, window_rows=37, prefetch_batches=0)
        batches = ServedReader(tier.service, "train", options).epochs(4)
        next(batches)
        began_s = time.perf_counter()
        waited_s, expected = 0.0, pytest.approx(0.0)
        for number in range(40):
            [session] = tier.dispatcher.status().sessions
            if number >= 10 and session.waiting_share == expected:  # a blocked rank reports late
                break
            time.sleep(0.02)
            before_s = time.perf_counter()
            next(batches)
            waited_s += time.perf_counter() - before_s
            expected = pytest.approx(waited_s / (time.perf_counter() - began_s), abs=0.25)
        assert session.waiting_share == expected
        assert waited_s > 0.1
        batches.close()


@given(
    counts=st.lists(st.tuples(st.floats(0.1, 4.0), st.integers(0, 9)), min_size=2, max_size=30),
    restart=st.none() | st.integers(1, 29),
)
def test_growth_is_that_of_the_last_seconds(counts: list[tuple[float, int]], restart: int | None) -> None:
    growth, now_s, total, history = CounterHistory(), 0.0, 100, [(0.0, 100)]
    growth.update(0.0, 100)
    assert growth.recent_increase() == (0,) and growth.rates() == (0,)
    for number, (seconds, more) in enumerate(counts, 1):
        now_s += seconds
        if number == restart:
            history, total = [], 0
        total += more
        growth.update(now_s, total)
        history.append((now_s, total))
    since = max([h for h in history if h[0] <= now_s - RATE_WINDOW_S], default=history[0])
    assert growth.recent_increase() == (total - since[1],)
    seconds = now_s - since[0]
    assert growth.rates() == ((total - since[1]) / seconds if seconds else 0.0,)


def test_threads_are_busy_once() -> None:
    clock = Clock()
    busy = BusyTime(clock)
    with busy.track():
        clock.now_s = 2.0
        with pytest.raises(OSError), busy.track():
            clock.now_s = 3.0
            raise OSError
        clock.now_s = 4.0
        assert busy.seconds == 4.0
    clock.now_s = 9.0
    assert busy.seconds == 4.0


def test_a_status_that_is_none_is_refused() -> None:
    for change in ('"num_redecoded":{"why":1}', '"busy_s":-1', '"reader":""', '"rows_per_s":1e999'):
        key = change.partition(":")[0]
        content = re.sub(key + r":(\{[^}]*\}|[^,}]+)", change.replace("\\", ""), STATUS.model_dump_json(), count=1)
        with pytest.raises(MesetaError, match="dispatcher sent an invalid ReaderServiceStatus"):
            ReaderServiceStatus.from_bytes(content.encode(), "dispatcher")
    assert ReaderServiceStatus.from_bytes(STATUS.to_bytes(), "dispatcher") == STATUS
