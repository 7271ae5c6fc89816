"""The one error that users meet: it names the object, the rule, the value and the way out."""

import difflib
from collections.abc import Iterable


class MesetaError(ValueError):
    """Bad input, a broken file or a plan that does not fit. The command line prints the text alone, no traceback."""

    rank: int | None = None
    """The rank that met it, where all ranks were told; the text begins with it."""


def shown(value: object) -> str:
    """A value of a stranger's in a message: escaped, and no longer than a line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def one_line(error: BaseException) -> str:
    """What an error of a library says, in one line; its class where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def nearest(name: object, known: Iterable[object]) -> str:
    """A closing clause for an unknown name: the nearest valid one, or the whole list when none is near.

    Names read from YAML may be numbers, and known names may be members of an enum: both are compared as text.
    """
    known = sorted(str(entry) for entry in known)
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known) or 'none'}"
