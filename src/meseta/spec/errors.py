"""The one error that users meet: it names the object, the rule, the value and the way out."""

import difflib
from collections.abc import Iterable


class MesetaError(ValueError):
    """Bad input, a broken file or a plan that does not fit. The command line prints its text alone, without traceback."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A closing clause for an unknown name: the nearest valid one, or the whole list when none is near."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known) or 'none'}"
