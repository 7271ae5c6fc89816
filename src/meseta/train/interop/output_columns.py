"""Columns of a file of predictions that the user chooses, orders and names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from meseta.errors import UnknownColumnError, duplicates
from meseta.spec import MesetaError, suggest

ROW, PREDICTION, LABEL = "row", "prediction", "label"
"""Columns of predictions besides keys. With several labels: prediction.NAME and label.NAME."""


@dataclass(frozen=True)
class OutputColumns:
    """Chosen columns in their order; without any, the file has all columns under their own names."""

    pairs: tuple[tuple[str, str], ...] = ()
    """(name in the file, name of the column: `row`, a key, `prediction...` or `label...`)."""

    @staticmethod
    def parse(entries: Sequence[str]) -> OutputColumns:
        """Read entries NEW=OLD, or NAME for a column that keeps its name. Raises MesetaError if a name is missing or
        two columns have the same one."""
        pairs = []
        for entry in entries:
            new, equals, old = (part.strip() for part in entry.partition("="))
            if not new or (equals and not old):
                raise MesetaError(
                    f"predict: --columns {entry!r} lacks a name; write NEW=OLD, or NAME to keep a column's name"
                )
            pairs.append((new, old or new))
        if twice := duplicates(new for new, _ in pairs):
            old = [old for new, old in pairs if new == twice[0]][-1]
            raise MesetaError(
                f"predict: --columns names two columns {twice[0]!r}; name one of them otherwise, as in "
                f"{f'{twice[0]}_2={old}'!r}"
            )
        return OutputColumns(tuple(pairs))

    @property
    def keys(self) -> list[str]:
        """Columns of the data among them."""
        return list(dict.fromkeys(old for _, old in self.pairs if old != ROW and _kind(old) not in (PREDICTION, LABEL)))

    def check_keys(self, keys: Sequence[str]) -> None:
        """Raise MesetaError for a key that `--keys` names and that would be left out."""
        for key in keys:
            if self.pairs and key not in self.keys:
                raise MesetaError(f"predict: --keys names {key!r}, and --columns leaves it out; add it to --columns")

    def check(self, names: Sequence[str]) -> None:
        """Raise MesetaError unless all chosen columns are among `names`, those of the predictions and their keys."""
        has_labels = any(_kind(name) == LABEL for name in names)
        for _, old in self.pairs:
            if old not in names:
                why = "the rows have no labels; " if _kind(old) == LABEL and not has_labels else ""
                raise MesetaError(f"predict: --columns: there is no column {old!r}; {why}{suggest(old, names)}")

    def explain_missing(self, error: MesetaError) -> MesetaError:
        """The error of a key that the data lack, with the column of the predictions that its name resembles."""
        if isinstance(error, UnknownColumnError) and error.column in self.keys:
            for close in difflib.get_close_matches(error.column, (ROW, PREDICTION, LABEL), n=1):
                return error.with_suffix(f"; the column of predictions is {close!r}")
        return error


def _kind(name: str) -> str:
    return name.partition(".")[0]
