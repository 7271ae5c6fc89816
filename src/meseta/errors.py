"""The one error that users meet: it names the object, the rule, the value and the way out; and checks that raise it."""

from __future__ import annotations

import copy
import difflib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from numbers import Real
from typing import Any, Self, TypeVar


class MesetaError(ValueError):
    """Bad input, a broken file or a plan that does not fit. The command line prints the text alone, no traceback.

    Attributes, those of subclasses included, must be picklable: they are sent to other ranks with the error.
    """

    rank: int | None = None
    """The rank that met it, where all ranks were told; the text begins with it."""
    remedy: str | None = None
    """What the user can do, without a full stop at the end. `None`: nothing, or the reason says it."""

    def __init__(self, reason: object, *, remedy: str | None = None) -> None:
        """The text is `str(reason)`, made when it is needed, followed by "; " and `remedy` if there is one."""
        super().__init__(reason)
        self.remedy = remedy

    def __str__(self) -> str:
        return self.reason if self.remedy is None else f"{self.reason}; {self.remedy}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _copy_of, (type(self), self.reason), self.__dict__

    @property
    def reason(self) -> str:
        """Text without the remedy."""
        return str(self.args[0])

    def with_prefix(self, prefix: str) -> Self:
        """Return a copy of the same class and with the same attributes, whose text begins with `prefix`."""
        error = copy.copy(self)
        error.args = (f"{prefix}{self.reason}",)
        return error

    def with_suffix(self, suffix: str) -> Self:
        """Return a copy of the same class and with the same attributes, whose text, and so its remedy if it has one,
        ends with `suffix`."""
        error = copy.copy(self)
        if self.remedy is None:
            error.args = (f"{self.reason}{suffix}",)
        else:
            error.remedy = f"{self.remedy}{suffix}"
        return error


def _copy_of(kind: type[MesetaError], reason: str) -> MesetaError:
    return kind.__new__(kind, reason)  # without __init__, whose parameters differ between subclasses


class StorageError(MesetaError):
    """A file that could not be read, or found, by no fault of what it holds: another host, or another time, may do
    better."""


class UnknownColumnError(MesetaError):
    """A column that the user names and the data lack."""

    def __init__(self, where: str, column: str, known: Iterable[str]) -> None:
        """The text is "`where` has no column 'column'" and the nearest of the `known` columns, or all of them."""
        super().__init__(f"{where} has no column {column!r}", remedy=suggest(column, [name for name in known if name]))
        self.column = column
        """Name as the user gave it, which may be a pattern."""


def reading_error(error: Exception, reason: str, remedy: str | None = None) -> MesetaError:
    """A MesetaError with this text for what reading a file has raised: a StorageError where the system or the network
    under it has failed, which say so by an error number or a class of their own; libraries that meet damaged content
    raise an OSError without one."""
    is_of_storage = isinstance(error, ConnectionError | TimeoutError) or getattr(error, "errno", None) is not None
    return (StorageError if is_of_storage else MesetaError)(reason, remedy=remedy)


def format_value(value: object) -> str:
    """A value of a stranger's in a message: escaped, and no longer than a line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a whole number of more digits than Python shows; a structure without end
        return f"a value of type {type(value).__name__} that is too long to show"
    return text if len(text) <= 80 else f"{text[:77]}..."


def error_summary(error: BaseException) -> str:
    """What an error of a library says, in one line; its class where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


ERROR_PREFIX = "error: "
"""Prefix of the line on standard error with which a command fails."""


def suggest(name: object, known: Iterable[object]) -> str:
    """A closing clause for an unknown name: the nearest valid one, or the whole list when none is near.

    Names read from YAML may be numbers, and known names may be members of an enum: both are compared as text.
    """
    known = sorted(str(entry) for entry in known)
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known) or 'none'}"


T = TypeVar("T")


def check_choice(owner: str, name: str, value: object, known: Collection[str]) -> None:
    """Raise MesetaError unless `value` is one of `known`."""
    if value not in known:
        raise MesetaError(f"{owner}: {name} {value!r} is unknown; {suggest(value, known)}")


def check_number(owner: str, name: str, value: object) -> float:
    """The value; raises MesetaError unless it is a finite number."""
    if not isinstance(value, bool) and isinstance(value, Real):
        with suppress(OverflowError):  # of whole numbers
            if math.isfinite(number := float(value)):
                return number
    raise MesetaError(f"{owner}: {name} must be a finite number, got {format_value(value)}")


def duplicates(names: Iterable[T]) -> list[T]:
    """Names that come more than once, each once; in time that grows with the names, of which there may be thousands."""
    return [name for name, count in Counter(names).items() if count > 1]


def is_int(value: object) -> bool:
    """Whether it is an int; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


MAX_INT64 = 2**63 - 1
"""Largest whole number in what people write: what 64 bits hold."""


def check_keys(where: str, document: Mapping[Any, Any], known: Collection[str]) -> None:
    """Raise MesetaError for a key of a document that is not one of `known`."""
    for key in document:
        if key not in known:
            raise MesetaError(f"{where}: unknown key {key!r}; {suggest(key, known)}")
