"""Changes between the config of a run, or of its parent, and its present one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from meseta.config import RunConfig
from meseta.config.load import get_value

Change = tuple[str, Any, Any]
"""Tuple (key, value before, value now)."""
# Config keys or sections that define the model.
_MODEL_KEYS = ("model", "embedding.pooling")


def find_model_change(before: RunConfig, now: RunConfig) -> Change | None:
    """Return the first change that makes another model, or `None` if both configs define the same one."""
    return next(iter((*diff_configs(before, now, _MODEL_KEYS), *_diff_poolings(before, now))), None)


def diff_configs(before: RunConfig, now: RunConfig, keys: Sequence[str]) -> Iterator[Change]:
    """Yield the changes of some keys or sections. Schedules of the tables and the dense part are resolved."""
    documents = [_to_document(config) for config in (before, now)]
    for key in keys:
        one, other = (get_value(document, key) for document in documents)
        if isinstance(one, dict):
            values = {name: (one.get(name), other.get(name)) for name in {**one, **other}}
            yield from ((f"{key}.{name}", was, now) for name, (was, now) in values.items() if was != now)
        elif one != other:
            yield key, one, other


def _diff_poolings(before: RunConfig, now: RunConfig) -> Iterator[Change]:
    for table in {**before.embedding.tables, **now.embedding.tables}:
        one, other = (config.embedding.table_pooling(table) for config in (before, now))
        if one != other:
            yield f"embedding.tables.{table}.pooling", one, other


def _to_document(config: RunConfig) -> dict[str, Any]:
    # A schedule may be written in several places, so resolve both of them.
    document = config.model_dump(mode="json")
    for part, schedule in (("embedding", config.embedding_schedule), ("dense", config.dense_schedule)):
        document[part]["schedule"] = schedule.model_dump(mode="json")
    return document
