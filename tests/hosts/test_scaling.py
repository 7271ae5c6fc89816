"""A small case of benchmarks/bench_scaling.py, in which the links of two readers limit the rate."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from bench_scaling import NUM_LINKS, Bench, links, tier

from data.service.tier import digest
from hosts import bits_per_s, why_impossible
from meseta.data import Dataset, Reader, ReaderOptions
from meseta.data.service.client.reader import ReaderServiceAddress, RunAttempt, ServedReader

NO_LINKS = why_impossible() or ("links are entered by root alone" if os.geteuid() else None)
BITS_PER_S = 40e6
NUM_READERS = 2
NUM_TRAINING_ROWS = 40_000


@pytest.mark.skipif(NO_LINKS is not None, reason=f"no slow links: {NO_LINKS}")
@pytest.mark.soak
def test_two_links_limit_two_readers(tmp_path: Path) -> None:
    bench = Bench(tmp_path, is_raw=True, num_rows=NUM_TRAINING_ROWS * 5 // 4)
    bench.keep(
        "memory", 3 * BITS_PER_S / 8 / bench.row_bytes
    )  # a link supplies a third of the rows that training consumes
    assert bits_per_s(bench.rate()) == pytest.approx(BITS_PER_S, rel=1e-3)
    options = ReaderOptions(batch_size=1000, shuffle=True, window_rows=8192)
    with links(bench) as (hosts, variables), tier(bench, variables, NUM_READERS, NUM_READERS) as url:
        reader = ServedReader(ReaderServiceAddress(url=url), "train", options, run=RunAttempt(name="small", attempt=0))
        before, begin_s = hosts.traffic(), time.monotonic()
        served = [digest(batch) for batch in reader.epoch()]
        seconds = time.monotonic() - begin_s
        received = [now.since(then).received_bytes for now, then in zip(hosts.traffic(), before, strict=True)][1:]
    assert served == [digest(batch) for batch in Reader(Dataset.load(bench.source), "train", options).epoch()]
    num_bytes = NUM_TRAINING_ROWS * bench.row_bytes
    busy = [num for num in received if num > num_bytes / 10]
    assert len(received) == NUM_LINKS and len(busy) == NUM_READERS
    assert sum(received) > num_bytes
    assert seconds > 0.9 * 8 * num_bytes / (NUM_READERS * BITS_PER_S)  # the token bucket was full
