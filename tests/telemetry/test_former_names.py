"""Files of earlier versions are read under the current names."""

from __future__ import annotations

from typing import Any

import pytest

from meseta.planner.cost.documented import documented_cost_model
from meseta.spec import CostModel, MesetaError, Plan, TableSpec
from meseta.spec.workload import read_workload
from meseta.telemetry.metrics_file import TrainLine
from meseta.telemetry.timeline import RankClock, Slice, Timeline, TraceDocument, Track, to_trace_document

FORMER_TRANSFERS = {
    "answers": "embeddings",
    "whole bags": "embeddings inter-host",
    "gradients of whole bags": "gradients inter-host",
    "counts inside": "counts intra-host",
    "ids inside": "ids intra-host",
    "weights inside": "weights intra-host",
    "dense": "dense",
}
MEANS = {"num_times": 1.0, "inside_bytes": 2.0, "across_bytes": 3.0, "seconds": 4.0, "waited_s": 5.0}


def train_line(**changes: Any) -> TrainLine:
    measured = {
        "kind": "train",
        "step": 4,
        "num_samples": 8,
        "loss": 0.5,
        "samples_per_s": 1.0,
        "seconds_per_step": 1.0,
    }
    return TrainLine.model_validate({**measured, **changes})


def test_transfers_stages_traffic_and_waits_of_a_line() -> None:
    traffic = {"num_hits": 1.0, "num_misses": 2.0, "waited_s": 3.0, "num_pushed_out": 4.0, "pushed_bytes": 5.0}
    line = train_line(
        stages_s={"backward": 1.0, "update": 2.0},
        transfers=dict.fromkeys(FORMER_TRANSFERS, MEANS),
        row_traffic={"user": traffic},
        row_waits={"a": {"wire_s": 2.0}},
    )
    assert line.stages_s == {"backward": 1.0, "dense_update": 2.0}
    assert list(line.transfers) == list(FORMER_TRANSFERS.values())
    means = line.transfers["embeddings inter-host"]
    assert (means.num_calls, means.intra_host_bytes, means.inter_host_bytes, means.wait_s) == (1.0, 2.0, 3.0, 5.0)
    traffic_read = line.row_traffic["user"]
    assert (traffic_read.wait_s, traffic_read.num_evicted, traffic_read.evicted_bytes) == (3.0, 4.0, 5.0)
    assert line.row_waits["a"].transfer_s == 2.0
    with pytest.raises(ValueError, match="'update' is the former name of 'dense_update'"):
        train_line(stages_s={"update": 1.0, "dense_update": 2.0})


def test_tracks_slices_and_measurements_of_a_timeline() -> None:
    def timeline(stage: str, outside: str, transfer: str, suffix: str, arguments: dict[str, float]) -> Timeline:
        tracks = (
            Track(0, "step", "step", (Slice("step 1", 0, 9, 1),)),
            Track(0, stage, "stage", (Slice(stage, 0, 5, 1),)),
            Track(0, outside, "stage", (Slice("step", 5, 9, 1),)),
            Track(0, f"{transfer}{suffix}", "transfer", (Slice(transfer, 1, 2, 1, arguments),)),
            Track(0, f"{transfer}{suffix} (2)", "transfer", (Slice(transfer, 1, 2, 1),)),
        )
        return Timeline(1, 1, (RankClock("a", 0.0, 0.0),), tracks)

    former = {"bytes to its host": 1.0, "bytes to other hosts": 2.0, "other ranks": 3.0, "ms waited for": 4.0}
    current = {"intra-host bytes": 1.0, "inter-host bytes": 2.0, "peers": 3.0, "wait ms": 4.0}
    document = to_trace_document(timeline("update", "in no stage", "whole bags", " under way", former))
    read = TraceDocument.model_validate(document).to_timeline()
    expected = timeline("dense_update", "outside stages", "embeddings inter-host", " in flight", current)
    assert read.tracks == expected.tracks


def test_plans_workloads_and_cost_models() -> None:
    table = {"sharding": "table_wise", "tier": "cached", "near_rows": 3}
    document = {"exchange": "two_level", "dense_exchange": "twins", "tables": {"a": table}}
    plan = Plan.from_dict(document, [TableSpec(name="a", num_embeddings=8, embedding_dim=4)], 1)
    assert (plan.exchange, plan.dense_exchange, plan["a"].shards[0].cache_rows) == ("hierarchical", "cross_host", 3)
    assert "near_rows" not in str(plan.to_dict())
    tables = {"a": {"num_embeddings": 8, "embedding_dim": 4}}
    assert read_workload({"batch_size": 4, "tables": tables, "overlap": ["answers"]}).overlap == ("embeddings",)
    model = documented_cost_model("cpu")
    stored = model.to_dict()
    tiers = {key.replace("cache_", "near_"): value for key, value in stored["tiers"].items() if key[:6] == "cache_"}
    assert len(tiers) == 4
    stored["tiers"] = {key: value for key, value in stored["tiers"].items() if key[:6] != "cache_"} | tiers
    assert CostModel.from_dict(stored) == model
    with pytest.raises(MesetaError, match="'near_row_s' is the former name of 'cache_row_s'; remove 'near_row_s'"):
        CostModel.from_dict({**stored, "tiers": {**stored["tiers"], "cache_row_s": 0.0}})
