"""What rows on a disk cost, as it is measured here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meseta.cli.calibrate import calibrate
from meseta.measure.calibrate import disks
from meseta.planner import documented_cost_model
from meseta.spec import CostModel, MesetaError
from meseta.spec.cost_model import TierCost


def test_rates_are_filled_in_and_keep_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"FILE_BYTES": 1 << 25, "PASS_S": 0.02, "READS_AT_ONCE": 2000, "NUM_NEAR": 1 << 12, "NUM_IDS": 256}
    for name, value in {**sizes, "NUM_BATCHES": 3}.items():
        monkeypatch.setattr(disks, name, value)
    before, threads = TierCost(cached_share=0.3), torch.get_num_threads()
    found = disks.measure_disk(tmp_path / "new", before, 1, "here", max_reads_per_s=10_000.0)
    assert found.measured and found.source == "here" and found.cached_share == 0.3
    assert 1 / found.disk_row_s <= 1.1 * 10_000  # and the first reads, which a full bucket lets pass
    assert all(value > 0 for value in (found.disk_bytes_per_s, found.disk_write_bytes_per_s, found.disk_processor_s))
    assert found.host_bytes_per_s == before.host_bytes_per_s and torch.get_num_threads() == threads
    assert list((tmp_path / "new").iterdir()) == []
    model = replace(documented_cost_model("cpu"), tiers=found)
    assert CostModel.from_dict(model.to_dict()) == model


def test_a_cost_model_of_a_former_version_is_read() -> None:
    document = documented_cost_model("a100").to_dict()
    for name in ("near_shard_s", "near_id_s", "disk_write_bytes_per_s", "disk_processor_s"):
        del document["tiers"][name]
    former = CostModel.from_dict(document).tiers
    assert (former.near_id_s, former.disk_write_bytes_per_s) == (
        TierCost().near_id_s,
        TierCost().disk_write_bytes_per_s,
    )


def test_a_limit_needs_a_disk(tmp_path: Path) -> None:
    with pytest.raises(MesetaError, match="--max-reads-per-s is of a disk; name a folder on it with --disk"):
        calibrate(tmp_path / "cost.yaml", max_reads_per_s=100.0)
