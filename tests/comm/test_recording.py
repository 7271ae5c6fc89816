"""Tests of the record of a rank in the run folder."""

from pathlib import Path

import pytest

from meseta.comm.recording import publish_record
from meseta.telemetry.rank_record import CurrentRankRecord, RankRecord, create_record_file, parse_record, record_path


def test_a_host_without_the_run_folder_has_records_of_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 creates its run folder, which is another one if hosts share no file system."""
    monkeypatch.setattr(CurrentRankRecord, "record", RankRecord(create_record_file(tmp_path), rank=3, num_ranks=4))
    publish_record(tmp_path / "runs/clicks", 7)
    state = parse_record(record_path(tmp_path / "runs/clicks", 3).read_bytes(), "the record")
    assert (state.rank, state.num_ranks) == (3, 4)
