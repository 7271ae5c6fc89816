"""Former names of keys and values in files. Readers accept them, and writers use the current names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meseta.errors import MesetaError

# Each table maps a former name to the current one.
PLAN_KEYS = {"near_rows": "cache_rows"}
"""Keys of a table or shard in a plan."""
EXCHANGES = {"two_level": "hierarchical"}
"""Values of `exchange` in plans and configs."""
DENSE_EXCHANGES = {"twins": "cross_host"}
"""Values of `dense_exchange` in plans and configs."""
OVERLAPS = {"answers": "embeddings"}
"""Values of `overlap` in configs, workloads and summaries."""
STAGES = {"update": "dense_update"}
"""Stages of a step in metrics.jsonl and summary.json."""
COMPONENTS = {"backward": "gradient_dist", "update": "table_update"}
"""Components of a predicted step in summary.json."""
TRANSFERS = {
    "answers": "embeddings",
    "whole bags": "embeddings inter-host",
    "gradients of whole bags": "gradients inter-host",
    "counts inside": "counts intra-host",
    "ids inside": "ids intra-host",
    "weights inside": "weights intra-host",
}
"""Transfers in metrics.jsonl and summary.json."""
TIER_COST_KEYS = {
    "near_call_s": "cache_call_s",
    "near_shard_s": "cache_shard_s",
    "near_id_s": "cache_id_s",
    "near_row_s": "cache_row_s",
}
"""Keys of `tiers` in a cost model."""
TRANSFER_KEYS = {
    "num_times": "num_calls",
    "inside_bytes": "intra_host_bytes",
    "across_bytes": "inter_host_bytes",
    "waited_s": "wait_s",
}
"""Keys of a transfer in metrics.jsonl and summary.json."""
ROW_TRAFFIC_KEYS = {"waited_s": "wait_s", "num_pushed_out": "num_evicted", "pushed_bytes": "evicted_bytes"}
"""Keys of `row_traffic` in metrics.jsonl."""
ROW_WAIT_KEYS = {"wire_s": "transfer_s"}
"""Keys of `row_waits` in metrics.jsonl and of `row_waits_by_rank` in summary.json."""


class FormerNameWarning(FutureWarning):
    """A config uses a former name, which a later version will refuse."""


def rename_keys(where: str, document: Mapping[Any, Any], former: Mapping[str, str]) -> dict[Any, Any]:
    """Return a copy of `document` with the keys in `former` renamed to their current names, in the same order.

    Raises MesetaError if the document has a key under both names. The message starts with `where`.
    """
    for name, current in former.items():
        if name in document and current in document:
            raise MesetaError(f"{where}: {name!r} is the former name of {current!r}; remove {name!r}")
    return {rename_value(key, former): value for key, value in document.items()}


def rename_value(value: Any, former: Mapping[str, str]) -> Any:
    """Return the current name of `value`, which may be of any type."""
    return former.get(value, value) if isinstance(value, str) else value
