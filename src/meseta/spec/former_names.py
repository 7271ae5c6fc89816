"""Former names of keys and values in files. Readers accept them, and writers use the current names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meseta.errors import MesetaError

PLAN_KEYS = {"near_rows": "cache_rows"}
"""Keys of a table or shard in a plan."""


class FormerNameWarning(FutureWarning):
    """A config uses a former name, which a later version will refuse."""


def rename_keys(where: str, document: Mapping[Any, Any], former: Mapping[str, str]) -> dict[Any, Any]:
    """Return a copy of `document` with the keys in `former` renamed to their current names, in the same order.

    Raises MesetaError if the document has a key under both names. The message starts with `where`.
    """
    for name, current in former.items():
        if name in document and current in document:
            raise MesetaError(f"{where}: {name!r} is the former name of {current!r}; remove {name!r}")
    return {former.get(key, key) if isinstance(key, str) else key: value for key, value in document.items()}
