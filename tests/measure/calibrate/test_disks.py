"""Measured costs of rows on a disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meseta.cli.calibrate import calibrate
from meseta.measure.calibrate import disks, row_cache
from meseta.planner import documented_cost_model
from meseta.spec import CostModel, MesetaError
from meseta.spec.cost_model import TierCost
from meseta.spec.tiers import StorageOptions


def test_rates_are_filled_in_and_keep_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MAX_FILE_BYTES": 1 << 25, "RANDOM_READ_WINDOW_S": 0.02, "READS_PER_BATCH": 2000}.items():
        monkeypatch.setattr(disks, name, value)
    for name, value in {
        "NUM_ROWS": 1 << 14,
        "NUM_CACHE_ROWS": 1 << 13,
        "NUM_ROUNDS": 1,
        "NUM_STEPS_PER_ROUND": 2,
    }.items():
        monkeypatch.setattr(row_cache, name, value)
    before, threads = TierCost(cached_share=0.3), torch.get_num_threads()
    costs = disks.measure_disk(tmp_path / "new", before, 1, "here", max_reads_per_s=10_000.0)
    assert costs.measured and costs.source == "here" and costs.cached_share == 0.3
    assert 1 / costs.disk_row_s <= 1.1 * 10_000  # plus the first reads, which a full bucket admits
    assert costs.disk_bytes_per_s > 0 < costs.disk_write_bytes_per_s and torch.get_num_threads() == threads
    assert list((tmp_path / "new").iterdir()) == []
    model = replace(documented_cost_model("cpu"), tiers=costs)
    assert CostModel.from_dict(model.to_dict()) == model


def test_constants_of_the_row_cache_are_recovered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated steps last as long as known constants predict, and the fit returns these constants."""
    known = {
        "cache_call_s": 1e-4, "cache_shard_s": 2e-5, "cache_id_s": 1e-8, "cache_row_s": 2e-8, "host_row_s": 2e-7,
        "host_byte_s": 1e-10,
    }  # fmt: skip

    def counted(case: row_cache.RowCacheCase, options: StorageOptions) -> row_cache.RowCacheCost:
        misses = case.num_tables * case.num_cold
        rows = 0.9 * case.num_tables * min(case.num_hot, case.batch_size) + misses
        terms = row_cache.cost_terms(case, rows, misses)
        return row_cache.RowCacheCost(terms, sum(term * s for term, s in zip(terms, known.values(), strict=False)))

    monkeypatch.setattr(row_cache, "measure_case", counted)
    before = documented_cost_model("cpu").tiers
    costs = row_cache.measure_row_cache(before, 1)
    assert [getattr(costs, name) for name in list(known)[:5]] == pytest.approx(list(known.values())[:5], rel=0.02)
    assert costs.host_bytes_per_s == pytest.approx(1e10, rel=0.02)
    assert costs.disk_processor_s == before.disk_processor_s


def test_steps_are_counted_as_they_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "NUM_ROWS": 1 << 14,
        "NUM_CACHE_ROWS": 1 << 12,
        "NUM_ROUNDS": 2,
        "NUM_STEPS_PER_ROUND": 2,
    }.items():
        monkeypatch.setattr(row_cache, name, value)
    for tier in ("cached", "disk"):
        case = row_cache.RowCacheCase(tier, 2, 16, 512, 64, 128)
        _, shards, ids, rows, in_host, copied, on_disk = row_cache.measure_case(
            case, StorageOptions(dir=tmp_path)
        ).terms
        assert (shards, ids) == (2, 1024) and 2 * (64 + 120) <= rows <= 2 * (64 + 128)
        # At times, a quarter of the rows is in the cache.
        assert 150 < in_host + on_disk <= 256 and (in_host == 0) == (tier == "disk")
        assert copied == 2 * 4 * 17 * in_host
    assert not [*tmp_path.iterdir()]


def test_a_cost_model_of_an_older_version_is_read() -> None:
    document = documented_cost_model("a100").to_dict()
    for name in ("cache_call_s", "cache_row_s", "cache_id_s", "disk_write_bytes_per_s", "disk_processor_s"):
        del document["tiers"][name]
    former = CostModel.from_dict(document).tiers
    assert (former.cache_id_s, former.disk_write_bytes_per_s) == (
        TierCost().cache_id_s,
        TierCost().disk_write_bytes_per_s,
    )


def test_a_limit_needs_a_disk(tmp_path: Path) -> None:
    with pytest.raises(MesetaError, match="--max-reads-per-s needs a disk; name a folder on it with --disk"):
        calibrate(tmp_path / "cost.yaml", max_reads_per_s=100.0)
