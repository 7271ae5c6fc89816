"""Former names of config keys and values. They still work, with a warning."""

from __future__ import annotations

import warnings
from typing import Any

from meseta.errors import FormerNameWarning, MesetaError
from meseta.spec.codecs import FORMER_DENSE_EXCHANGES, FORMER_EXCHANGES
from meseta.spec.documents import rename_value
from meseta.spec.plan import FORMER_KEYS
from meseta.spec.stages import FORMER_OVERLAPS

KEYS = {
    "comm.silent_s": "comm.heartbeat_timeout_s",
    "comm.stall_s": "comm.stall_timeout_s",
    "data.service.give_up_s": "data.service.reader_timeout_s",
    "pipeline.stale": "pipeline.staleness",
    "storage.near_bytes": "storage.cache_bytes",
}
"""Current path of each former key."""
FLAGS = {"train.tensorboard": ("train.loggers", "tensorboard")}
"""(current key, entry that `true` adds to its list) of each former key with a truth value."""
VALUES = {
    "comm.exchange": FORMER_EXCHANGES,
    "comm.dense_exchange": FORMER_DENSE_EXCHANGES,
    "plan.exchange": FORMER_EXCHANGES,
    "plan.dense_exchange": FORMER_DENSE_EXCHANGES,
    "pipeline.overlap": FORMER_OVERLAPS,
}
"""Current name of each former value, by the path of its key."""


def current_key(key: str) -> str:
    """Return the current path of a config key such as `pipeline.stale`. Warns if `key` is a former path."""
    current = KEYS.get(key, key)
    if current != key:
        _warn(f"config key {key!r} is now {current!r}; rename it")
    return current


def rename_keys(document: dict[str, Any], *, warns: bool) -> None:
    """Rename the former keys of a config document in place. If `warns`, warn about each.

    Raises MesetaError if the document has a key under both names.
    """
    for path, current_path in KEYS.items():
        section, former = _section_with(document, path)
        if section is None:
            continue
        current = (current_key(path) if warns else current_path).rpartition(".")[2]
        if current in section:
            raise MesetaError(f"key {path!r} is the former name of {current_path!r}; remove {path!r}")
        section[current] = section.pop(former)


def rename_values(document: dict[str, Any], *, warns: bool) -> None:
    """Rename the former values of a config document, and former keys in its plan, in place. If `warns`, warn about
    each."""
    _rename_plan_keys(document, warns=warns)
    _move_flags(document, warns=warns)
    for path, former in VALUES.items():
        section, key = _section_with(document, path)
        if section is None:
            continue
        value = section[key]
        section[key] = (
            [rename_value(one, former) for one in value] if isinstance(value, list) else rename_value(value, former)
        )
        for name in value if isinstance(value, list) else [value]:
            if warns and (current := rename_value(name, former)) != name:
                _warn(f"value {name!r} of config key {path!r} is now {current!r}; rename it")


def _move_flags(document: dict[str, Any], *, warns: bool) -> None:
    """Replace former keys with a truth value by entries of lists, in place. Other values are left to the validation."""
    for path, (current_path, entry) in FLAGS.items():
        section, former = _section_with(document, path)
        if section is None or not isinstance(section[former], bool):
            continue
        if warns:
            _warn(f"config key {path!r} is now an entry of {current_path!r}; write {current_path}: [{entry}]")
        key = current_path.rpartition(".")[2]
        entries = section.get(key) or []
        if section.pop(former) and entry not in entries:
            section[key] = [*entries, entry]


def _rename_plan_keys(document: dict[str, Any], *, warns: bool) -> None:
    """Rename the former keys of tables and shards in the plan of a config. A plan file has no warning."""
    section, key = _section_with(document, "plan.tables")
    tables = None if section is None else section[key]
    for name, table in tables.items() if isinstance(tables, dict) else ():
        shards = table.get("shards") if isinstance(table, dict) else None
        for entry in (table, *(shards if isinstance(shards, list) else ())):
            for former, current in FORMER_KEYS.items() if isinstance(entry, dict) else ():
                if former not in entry or current in entry:
                    continue  # The parser of plans refuses an entry with both names.
                entry[current] = entry.pop(former)
                if warns:
                    _warn(f"config key 'plan.tables.{name}.{former}' is now {current!r}; rename it")


def _section_with(document: dict[str, Any], path: str) -> tuple[dict[str, Any] | None, str]:
    """Return (section, last name of `path`). The section is `None` if the document has no such key."""
    *parents, key = path.split(".")
    section: Any = document
    for name in parents:
        section = section.get(name) if isinstance(section, dict) else None
    return (section if isinstance(section, dict) and key in section else None), key


def _warn(text: str) -> None:
    warnings.warn(text, FormerNameWarning, stacklevel=2)
