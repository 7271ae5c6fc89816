"""Errors that are reported to users without a traceback, and checks that raise them."""

from __future__ import annotations

import contextlib
import copy
import difflib
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

# `Self` would be shorter, but the type checks of `make soak` cannot resolve it.
ErrorT = TypeVar("ErrorT", bound="MesetaError")


class MesetaError(ValueError):
    """Invalid input, a damaged file, or a plan that cannot be used.

    The message names the object, the rule that it breaks, its value and a remedy. The command line prints the message
    without a traceback. All attributes of the error and its subclasses must be picklable, because errors are sent to
    other ranks.
    """

    rank: int | None = None
    """Rank that raised the error, if it was sent to all ranks. The message then starts with this rank."""
    remedy: str | None = None
    """Suggested fix, without a full stop. `None` if there is none, or if it is part of the reason."""

    def __init__(self, reason: object, *, remedy: str | None = None) -> None:
        """Create an error with the message "`reason`; `remedy`". `reason` is converted to text lazily."""
        super().__init__(reason)
        self.remedy = remedy

    def __str__(self) -> str:
        return self.reason if self.remedy is None else f"{self.reason}; {self.remedy}"

    def _render_traceback_(self) -> list[str]:
        """Return what notebooks show: the lines of the user's code and the message, without frames of this package."""
        import traceback

        hidden = re.compile(rf"{re.escape(str(Path(__file__).parent))}/|{re.escape(contextlib.__file__)}|.*/IPython/")
        frames = [frame for frame in traceback.extract_tb(self.__traceback__) if not hidden.match(frame.filename)]
        text = "".join([*traceback.format_list(frames), f"{type(self).__name__}: {self}"])
        return text.splitlines()

    def __reduce__(self) -> tuple[Any, ...]:
        return _copy_of, (type(self), self.reason), self.__dict__

    @property
    def reason(self) -> str:
        """Message without the remedy."""
        return str(self.args[0])

    def with_prefix(self: ErrorT, prefix: str) -> ErrorT:
        """Return a copy of this error with `prefix` before its message. Class and attributes are kept."""
        error = copy.copy(self)
        error.args = (f"{prefix}{self.reason}",)
        return error

    def with_suffix(self: ErrorT, suffix: str) -> ErrorT:
        """Return a copy of this error with `suffix` after its message. Class and attributes are kept.

        If the error has a remedy, the suffix becomes part of it.
        """
        error = copy.copy(self)
        if self.remedy is None:
            error.args = (f"{self.reason}{suffix}",)
        else:
            error.remedy = f"{self.remedy}{suffix}"
        return error


def _copy_of(kind: type[MesetaError], reason: str) -> MesetaError:
    return kind.__new__(kind, reason)  # The parameters of __init__ differ between subclasses.


class FormerNameWarning(FutureWarning):
    """Use of a former name, which a later version may refuse."""


class StorageError(MesetaError):
    """Failure to read or find a file that says nothing about its content. A retry, or another host, may succeed."""


class UnknownColumnError(MesetaError):
    """Reference to a column that the data does not have."""

    def __init__(self, where: str, column: str, known: Iterable[str], *, option: str | None = None) -> None:
        """Create an error whose remedy suggests the closest column in `known`, or lists all of them. `option` named the
        column."""
        user = "" if option is None else f" for {option}"
        remedy = suggest(column, [name for name in known if name])
        super().__init__(f"{where} has no column {column!r}{user}", remedy=remedy)
        self.column = column
        """Name or pattern that the user specified."""


def reading_error(error: Exception, reason: str, remedy: str | None = None) -> MesetaError:
    """Return a MesetaError for an exception raised while reading a file.

    The result is a StorageError if the operating system or the network failed.
    """
    # Libraries also raise OSError for damaged content, but without an error number.
    is_of_storage = isinstance(error, ConnectionError | TimeoutError) or getattr(error, "errno", None) is not None
    return (StorageError if is_of_storage else MesetaError)(reason, remedy=remedy)


def format_value(value: object) -> str:
    """Format untrusted input for an error message: escaped and truncated to one line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # An int beyond Python's limit of digits, or deeply nested data.
        return f"a value of type {type(value).__name__} that is too long to show"
    return text if len(text) <= 80 else f"{text[:77]}..."


def error_summary(error: BaseException) -> str:
    """Return the first line of an error message, or the name of the error's class if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


ERROR_PREFIX = "error: "
"""Prefix of the line that a failing command writes to stderr."""


def join_names(names: Sequence[str], limit: int, separator: str = ", ") -> str:
    """Join the first `limit` names. The number of further names follows."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return separator.join(names[:limit]) + more


def suggest(name: object, known: Iterable[object]) -> str:
    """Return a "did you mean" suggestion for `name`, or list all `known` names if none is close."""
    # Names from YAML may be numbers, and known names may be enum members, so compare them as text.
    known = sorted(str(entry) for entry in known)
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"available: {', '.join(known) or 'none'}"


T = TypeVar("T")


def check_choice(owner: str, name: str, value: object, known: Collection[str]) -> None:
    """Raise MesetaError if `value`, the setting `name` of `owner`, is not in `known`."""
    if value not in known:
        raise MesetaError(f"{owner}: {name} {value!r} is unknown; {suggest(value, known)}")


def check_number(owner: str, name: str, value: object) -> float:
    """Return `value` as a float. Raises MesetaError if it is not a finite number."""
    if not isinstance(value, bool) and isinstance(value, Real):
        with contextlib.suppress(OverflowError):  # An int may exceed the range of float.
            if math.isfinite(number := float(value)):
                return number
    raise MesetaError(f"{owner}: {name} must be a finite number, got {format_value(value)}")


def duplicates(names: Iterable[T]) -> list[T]:
    """Return the names that occur more than once, in order of first occurrence."""
    # Counting takes linear time. There may be thousands of names.
    return [name for name, count in Counter(names).items() if count > 1]


def is_int(value: object) -> bool:
    """Whether `value` is an int. Booleans do not count."""
    return isinstance(value, int) and not isinstance(value, bool)


MAX_INT64 = 2**63 - 1
"""Largest integer accepted in user input, the maximum of int64."""


def check_keys(where: str, document: Mapping[Any, Any], known: Collection[str]) -> None:
    """Raise MesetaError if `document` has a key that is not in `known`. The message starts with `where`."""
    for key in document:
        if key not in known:
            raise MesetaError(f"{where}: unknown key {key!r}; {suggest(key, known)}")
