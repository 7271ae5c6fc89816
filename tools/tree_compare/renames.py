"""The table of renames: CSV with the columns kind, file, line, old, new and note."""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

STORED_KIND = "stored"
MODULE_KINDS = ("module", "package", "file", "folder")
_DOTTED = re.compile(r"[\w-]+(\.[\w-]+)*")
# Keys and options may be written with hyphens.
_WORD = re.compile(r"[A-Za-z_]\w*(?:-\w+)*")


class TableError(Exception):
    """A table of renames that cannot be read."""


@dataclass(frozen=True)
class Rename:
    """One row of the table."""

    kind: str
    file: str
    """Path of the definition. Empty for a name that is defined in several files."""
    old: str
    """The name, or the dotted path of it such as `Class.name`."""
    new: str

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The single names that differ. Empty for a phrase."""
        if self.is_phrase:
            return []
        olds, news = self.old.split("."), self.new.split(".")
        pairs = zip(olds, news, strict=True) if len(olds) == len(news) else [(olds[-1], news[-1])]
        return [(old, new) for old, new in pairs if old != new]

    @property
    def is_phrase(self) -> bool:
        """Whether the row renames a string of several words, such as a stored key."""
        return not (_DOTTED.fullmatch(self.old) and _DOTTED.fullmatch(self.new))

    @property
    def is_module(self) -> bool:
        return self.kind in MODULE_KINDS

    def is_in(self, path: str) -> bool:
        """Whether the row is about a definition in the file at `path`. Either path may leave out leading folders."""
        return not self.file or f"/{path}".endswith(f"/{self.file}") or f"/{self.file}".endswith(f"/{path}")

    def move(self, paths: Iterable[str]) -> tuple[str, str] | None:
        """Return (old path, new path) of the file or folder that this row renames. `None` if `paths` lack it."""
        old, new = self.old.rpartition(".")[2], self.new.rpartition(".")[2]
        # `x/y.py` below several folders is most likely the shortest: that of the package, not of its tests.
        path = min((path for path in paths if self.file and self.is_in(path)), key=len, default=None)
        if path is None:
            return None
        target = PurePosixPath(path)
        if target.name == "__init__.py":
            target = target.parent
        if target.stem != old:
            return None
        return str(target), str(target.with_name(new + target.suffix))


class RenameTable:
    """All renames that a comparison accepts."""

    def __init__(self, rows: Iterable[Rename] = ()) -> None:
        self.rows = list(rows)
        self._by_pair: dict[tuple[str, str], list[Rename]] = {}
        for row in self.rows:
            for pair in row.pairs:
                self._by_pair.setdefault(pair, []).append(row)
        self._phrases = [row for row in self.rows if row.is_phrase]

    @classmethod
    def load(cls, paths: Iterable[Path]) -> RenameTable:
        """Read tables. Raises TableError for a missing column and for an entry that is not a dotted name."""
        rows = []
        for path in paths:
            with path.open(newline="") as file:
                reader = csv.DictReader(file)
                if missing := {"kind", "file", "old", "new"} - set(reader.fieldnames or ()):
                    raise TableError(f"{path}: the table has no column {', '.join(sorted(missing))}")
                for row in reader:
                    rows.append(_parse(row, f"{path}:{reader.line_num}"))
        return cls(rows)

    def explains(self, old: str, new: str, path: str | None = None) -> bool:
        """Whether a row renames `old` to `new`; with `path`, whether one does so for definitions of that file."""
        rows = self._by_pair.get((old, new), [])
        return any(path is None or row.is_in(path) for row in rows)

    def moved(self, paths: Collection[str]) -> dict[str, str]:
        """Return the path that each file has after the renames of modules and packages."""
        moves = dict(filter(None, (row.move(paths) for row in self.rows if row.is_module)))
        moved = {}
        for path in paths:
            parts = PurePosixPath(path).parts
            names = [moves.get("/".join(parts[: depth + 1]), name) for depth, name in enumerate(parts)]
            moved[path] = "/".join(name.rpartition("/")[2] for name in names)
        return moved

    def explains_text(self, old: str, new: str) -> bool:
        """Whether renaming words of `old` gives `new`. Words of a list of names may change their order with it."""
        for row in self._phrases:
            if row.old in old and row.new in new:
                old = old.replace(row.old, row.new)
        old_words, new_words = _WORD.findall(old), _WORD.findall(new)
        if len(old_words) != len(new_words):
            return False
        if _WORD.split(old) == _WORD.split(new) and all(map(self._explains_word, old_words, new_words)):
            return True
        are_lists = set("".join(_WORD.split(old) + _WORD.split(new))) <= set(" \n")
        return are_lists and self.explains_order(old_words, new_words) is not None

    def _explains_word(self, old: str, new: str) -> bool:
        return old == new or self.explains(old, new) or self.explains(old.replace("-", "_"), new.replace("-", "_"))

    def explains_order(self, olds: list[str], news: list[str]) -> list[int] | None:
        """Return for each of `olds` the index in `news` of the name that it has now.

        `None` if a name is missing, or if none was renamed: then nothing explains another order.
        """
        free = dict.fromkeys(range(len(news)))
        order: list[int | None] = [None] * len(olds)
        for accepts in (str.__eq__, self._explains_word):  # unchanged names first
            for position, old in enumerate(olds):
                if order[position] is None:
                    order[position] = next((index for index in free if accepts(old, news[index])), None)
                    free.pop(order[position], None)  # type: ignore[arg-type]
        if free or None in order:
            return None
        indexes = [index for index in order if index is not None]
        return None if all(old == news[index] for old, index in zip(olds, indexes, strict=True)) else indexes


def words(text: str) -> set[str]:
    """Return the names that are whole words of a text, also those written with hyphens."""
    return {word.replace("-", "_") for word in _WORD.findall(text)}


def _parse(row: dict[str, str], place: str) -> Rename:
    kind = row["kind"].strip().lower()
    old, new = (row[column].replace("::", ".") for column in ("old", "new"))
    if kind in MODULE_KINDS:
        old, new = (name.strip().removesuffix(".py").strip("/").replace("/", ".") for name in (old, new))
    if _DOTTED.fullmatch(old.strip(" -")) and _DOTTED.fullmatch(new.strip(" -")):
        old, new = old.strip(" -"), new.strip(" -")
    elif kind != STORED_KIND:
        raise TableError(f"{place}: {old!r} -> {new!r} is no rename; write one name or dotted path per row")
    return Rename(kind, row["file"].strip().removeprefix("./"), old, new)
