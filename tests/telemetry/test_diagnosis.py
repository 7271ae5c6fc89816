"""Grace period of ranks at different transfers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest

from meseta.telemetry.diagnosis import DIVERGENCE_GRACE_S, Diagnosis, DivergenceGracePeriod, find_diverged
from meseta.telemetry.rank_record import RECORD_BYTES, RankRecord, RankState, TransferInfo, parse_record

ROWS = (0, "rows")


@pytest.fixture
def records() -> Iterator[list[RankRecord]]:
    records = []
    for rank in range(3):
        with tempfile.TemporaryFile() as file:
            os.ftruncate(file.fileno(), RECORD_BYTES)
            records.append(RankRecord(os.dup(file.fileno()), rank, 3))
    yield records
    for record in records:
        os.close(record.descriptor)


def states(records: list[RankRecord]) -> dict[int, RankState]:
    return {
        record.rank: parse_record(os.pread(record.descriptor, RECORD_BYTES, 0), f"of rank {record.rank}")
        for record in records
    }


def test_the_grace_period_does_not_begin_again_when_more_ranks_wait(records: list[RankRecord]) -> None:
    grace_period, texts = DivergenceGracePeriod(), []
    for record, name in zip(records, ("ids", "ids", "norms"), strict=True):
        record.start_transfer(ROWS, 7, TransferInfo("counts"))
        record.start_transfer(ROWS, 7, TransferInfo(name))
    for now_s in (0.0, DIVERGENCE_GRACE_S / 2, DIVERGENCE_GRACE_S):
        trouble = find_diverged(states(records))
        assert trouble is not None and (trouble.ranks, trouble.sequence_number) == ((2,), 2)
        assert grace_period.filter_diagnosis(trouble, now_s) == (trouble if now_s == DIVERGENCE_GRACE_S else None)
        texts.append(trouble.text)
        records[len(texts) - 1].record_wait(ROWS[0], 2)
    assert len({*texts}) == 3


def test_the_grace_period_begins_again_for_another_transfer_or_after_none() -> None:
    grace_period = DivergenceGracePeriod()
    first, second = (Diagnosis("astray", (2,), "rank 2 is astray", number) for number in (4, 5))
    stuck = Diagnosis("stuck", (2,), "rank 2 is stuck")
    looks = [(first, None), (first, None), (second, None), (second, None), (None, None), (second, None)]
    looks += [(stuck, stuck), (second, None), (second, None), (second, second)]
    for number, (diagnosis, expected) in enumerate(looks):
        assert grace_period.filter_diagnosis(diagnosis, number * DIVERGENCE_GRACE_S / 2) is expected, number
