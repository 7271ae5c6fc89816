"""Checks that several specs share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from numbers import Real
from typing import Any, TypeVar

from meseta.errors import MesetaError, nearest

T = TypeVar("T")


def check_choice(owner: str, name: str, value: object, known: Collection[str]) -> None:
    """Raise MesetaError unless `value` is one of `known`."""
    if value not in known:
        raise MesetaError(f"{owner}: {name} {value!r} is unknown; {nearest(value, known)}")


def check_number(owner: str, name: str, value: object) -> float:
    """The value; raises MesetaError unless it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise MesetaError(f"{owner}: {name} must be a finite number, got {value!r}")
    return float(value)


def doubled(names: Iterable[T]) -> list[T]:
    """Names that come more than once, each once; in time that grows with the names, of which there may be thousands."""
    return [name for name, count in Counter(names).items() if count > 1]


def is_whole(value: object) -> bool:
    """Whether it is an int; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_keys(where: str, document: Mapping[Any, Any], known: Collection[str]) -> None:
    """Raise MesetaError for a key of a document that is not one of `known`."""
    for key in document:
        if key not in known:
            raise MesetaError(f"{where}: unknown key {key!r}; {nearest(key, known)}")
