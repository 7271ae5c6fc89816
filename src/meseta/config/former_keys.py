"""Former names of config keys and values. They still work, with a warning."""

from __future__ import annotations

import warnings
from typing import Any

from meseta.errors import MesetaError
from meseta.spec.former_names import FormerNameWarning

KEYS = {
    "comm.silent_s": "comm.heartbeat_timeout_s",
    "comm.stall_s": "comm.stall_timeout_s",
    "data.service.give_up_s": "data.service.reader_timeout_s",
    "pipeline.stale": "pipeline.staleness",
    "storage.near_bytes": "storage.cache_bytes",
}
"""Current path of each former key."""


def current_key(key: str) -> str:
    """Return the current path of a config key such as `pipeline.stale`. Warns if `key` is a former path."""
    current = KEYS.get(key, key)
    if current != key:
        _warn(f"config key {key!r} is now {current!r}; rename it")
    return current


def rename_keys(document: dict[str, Any]) -> None:
    """Rename the former keys of a config document in place, with a warning each.

    Raises MesetaError if the document has a key under both names.
    """
    for path, current_path in KEYS.items():
        *parents, former = path.split(".")
        section: Any = document
        for name in parents:
            section = section.get(name) if isinstance(section, dict) else None
        if not isinstance(section, dict) or former not in section:
            continue
        current = current_key(path).rpartition(".")[2]
        if current in section:
            raise MesetaError(f"key {path!r} is the former name of {current_path!r}; remove {path!r}")
        section[current] = section.pop(former)


def _warn(text: str) -> None:
    warnings.warn(text, FormerNameWarning, stacklevel=2)
