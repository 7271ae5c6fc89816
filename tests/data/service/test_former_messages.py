"""Messages that processes of earlier versions send are understood."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data.service.attackers import BEAT
from data.service.tier import running
from meseta.data.service.dispatcher_client import DispatcherClient
from meseta.data.service.messages import (
    Heartbeat,
    HeartbeatReply,
    LeaseRequest,
    Message,
    ReaderServiceStatus,
    RowCounts,
    WindowTicket,
    WindowTimings,
)
from meseta.spec import MesetaError

ROWS = {"dataset": "d", "digest": "0" * 64, "split": "train", "labels": [], "shuffle": True, "seed": 0,
        "window_rows": 8, "filter": None, "negative_keep": 1.0}  # fmt: skip
SESSION = {"rows": ROWS, "run": "r", "attempt": 0, "rank": 0, "num_ranks": 1}
FAILURE = {"window": 1, "reader": "a"}
FORMER_BEAT = {"reader": "grpc://127.0.0.1:7077", "held_bytes": 0, "buffer_bytes": 1, "num_rows": 0, "num_windows": 0,
               "num_again": {}, "busy_s": 0.0, "is_leaving": False}  # fmt: skip
CASES: list[tuple[type[Message], dict[str, Any], dict[str, Any]]] = [
    (Heartbeat, FORMER_BEAT, BEAT),
    (
        LeaseRequest,
        {"session": SESSION, "epoch": 0, "windows": [1], "troubles": [{**FAILURE, "what": "no room"}],
         "waited_s": 1.0, "passed_s": 2.0},
        {"session": SESSION, "epoch": 0, "windows": [1],
         "failures": [{**FAILURE, "kind": "failed", "reason": "no room"}], "wait_s": 1.0, "elapsed_s": 2.0},
    ),
    (
        LeaseRequest,
        {"session": SESSION, "epoch": 0, "windows": [1], "troubles": [{**FAILURE, "what": "slow"}]},
        {"session": SESSION, "epoch": 0, "windows": [1], "failures": [{**FAILURE, "kind": "slow", "reason": "slow"}]},
    ),
    (
        WindowTicket,
        {"session": SESSION, "epoch": 0, "window": 1, "begin": 2, "batch_size": 3, "last_batch": "keep", "num_had": 4},
        {"session": SESSION, "epoch": 0, "window": 1, "first_row": 2, "batch_size": 3, "last_batch": "keep",
         "num_received": 4},
    ),
    (
        WindowTimings,
        {"storage_s": 1.0, "decode_s": 2.0, "transform_s": 3.0, "ready_s": 4.0},
        {"storage_s": 1.0, "decode_s": 2.0, "transform_s": 3.0, "buffered_s": 4.0},
    ),
    (
        RowCounts,
        {"groups": [0], "group_rows": [1], "by_filter": 2, "negatives": 3, "wide_features": ["f"]},
        {"groups": [0], "group_rows": [1], "num_filtered": 2, "num_dropped_negatives": 3, "int64_features": ["f"]},
    ),
    (
        ReaderServiceStatus,
        {"datasets": {}, "readers": [], "sessions": [], "num_moved": {}, "scale": {"wanted": 1, "least": 2, "most": 3}},
        {"datasets": {}, "readers": [], "sessions": [], "num_moved": {},
         "scale": {"target": 1, "min_readers": 2, "max_readers": 3}},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("form", "former", "current"), CASES)
def test_former_keys(form: type[Message], former: dict[str, Any], current: dict[str, Any]) -> None:
    received = form.from_bytes(json.dumps(former).encode(), "a peer")
    assert received == form.from_bytes(json.dumps(current).encode(), "a peer")
    written = json.loads(received.to_bytes())
    for name in former.keys() - current.keys():
        assert name not in written
        with pytest.raises(MesetaError, match=f"'{name}': Extra inputs are not permitted"):
            form.from_bytes(json.dumps({**current, name: former[name]}).encode(), "a peer")


def test_the_former_action(tiny: Path) -> None:
    with running({"click": tiny}, 1) as tier:
        client = DispatcherClient(tier.dispatcher.url)
        reply = client._request("beat", Heartbeat(**BEAT), HeartbeatReply)
        assert reply.datasets.keys() == {"click"}
        assert BEAT["reader"] in [reader.reader for reader in tier.leases.readers()]
