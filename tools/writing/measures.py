"""Measures of the prose and names of a tree, their required values, and counts of each folder that may only fall."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from writing.messages import ERROR, RAISED
from writing.names import leftovers, repeated_classes
from writing.renames import RenameCheck, read_renames
from writing.rules import TELL_TALE, begins_with_fragment, begins_with_question, lacks_verb
from writing.source import Module
from writing.texts import (
    COMMENT,
    DOCSTRINGS,
    MESSAGES,
    NATIVE_COMMENT,
    NATIVE_SUFFIXES,
    NATIVE_TEXT,
    PAGE,
    STUB,
    Text,
    files_below,
    parse_all,
    texts_of,
)

TEST_FILE = re.compile(r"/tests?/|/test_[^/]*\.py$|_test\.py$|/(conftest|testing)\.py$")
OTHER_FOLDERS = ("tools", "examples", "tests", "benchmarks", "docs")
PROSE = (*DOCSTRINGS, COMMENT)
OTHER_MESSAGES = tuple(kind for kind in MESSAGES if kind not in (RAISED, ERROR, NATIVE_TEXT))
DOCSTRING_WORDS = "words of docstrings per 100 lines of Python"
COMMENT_LINES = "comment lines per 100 lines of Python"
RENAMES = "rows of the rename table whose old name is still defined"
REQUIRED = {
    "tell-tale words per 10,000: docstrings and comments": 8.0,
    "tell-tale words per 10,000: errors where they are raised": 8.0,
    "tell-tale words per 10,000: all errors": 8.0,
    "tell-tale words per 10,000: other messages": 8.0,
    "tell-tale words per 10,000: C++ comments": 8.0,
    "tell-tale words per 10,000: C++ text": 8.0,
    "tell-tale words per 10,000: docstrings of stubs": 8.0,
    "% of module docstrings that begin with a question word": 1.0,
    "% of class docstrings that begin with a question word": 1.0,
    "% of function docstrings that begin with a question word": 1.0,
    "% of field docstrings that begin with a question word": 1.0,
    "% of function docstrings that begin with a fragment": 2.0,
    "% of field docstrings that begin with a fragment": 2.0,
    DOCSTRING_WORDS: 140.0,
    COMMENT_LINES: 2.0,
    "leftover names of variables and parameters": 40.0,
    "class names used twice": 0.0,
    RENAMES: 0.0,
}
"""Largest allowed value of each measure; of `COMMENT_LINES`, the smallest."""


@dataclass(frozen=True)
class Part:
    """Files of one folder, with their modules and texts."""

    paths: list[Path]
    modules: list[Module]
    texts: list[Text]

    @property
    def num_lines(self) -> int:
        """Lines of Python, without stubs."""
        return sum(module.text.count("\n") for module in self.modules if module.path.suffix == ".py")

    def below(self, folder: Path) -> Part:
        """Return the part of this one that is in `folder`."""
        below = [path for path in self.paths if path.is_relative_to(folder)]
        are_below = set(below)
        return Part(
            below,
            [module for module in self.modules if module.path in are_below],
            [text for text in self.texts if text.path in are_below],
        )


def read_part(folder: Path, *, with_tests: bool = True) -> Part:
    """Read all files of a folder, or one file. An installed package may contain its tests."""
    paths = files_below(folder)
    if not with_tests:
        paths = [path for path in paths if not TEST_FILE.search(f"/{path.relative_to(folder).as_posix()}")]
    was_enabled = gc.isenabled()
    gc.disable()  # With millions of nodes alive, garbage collections take longer than the parser.
    try:
        modules = parse_all(paths)
        return Part(paths, modules, texts_of(paths, modules))
    finally:
        if was_enabled:
            gc.enable()


class Measure(NamedTuple):
    """A figure of a tree."""

    name: str
    value: float
    detail: str = ""
    """The counts that the value is made of."""

    @property
    def is_met(self) -> bool:
        """Whether the value is as required, or nothing is required."""
        required = REQUIRED.get(self.name)
        if required is None:
            return True
        return self.value >= required if self.name == COMMENT_LINES else self.value <= required


def num_tell_tale(texts: Iterable[Text]) -> int:
    """Count the tell-tale words of texts."""
    return sum(len(TELL_TALE.findall(text.text)) for text in texts)


def _tell_tale_rate(name: str, texts: Iterable[Text], kinds: Iterable[str]) -> Measure:
    texts = [text for text in texts if text.kind in kinds]
    hits, words = num_tell_tale(texts), sum(text.num_words for text in texts)
    return Measure(f"tell-tale words per 10,000: {name}", 1e4 * hits / max(words, 1), f"{hits} in {words:,} words")


def package_measures(part: Part) -> list[Measure]:
    """Measure the package. The names of the measures that have a requirement are keys of `REQUIRED`."""
    texts, num_lines = part.texts, max(part.num_lines, 1)
    measures = [
        _tell_tale_rate("docstrings and comments", texts, PROSE),
        _tell_tale_rate("errors where they are raised", texts, [RAISED]),
        _tell_tale_rate("all errors", texts, [RAISED, ERROR]),
        *(_tell_tale_rate(f"{kind} texts", texts, [kind]) for kind in OTHER_MESSAGES),
        _tell_tale_rate("other messages", texts, OTHER_MESSAGES),
        _tell_tale_rate("C++ comments", texts, [NATIVE_COMMENT]),
        _tell_tale_rate("C++ text", texts, [NATIVE_TEXT]),
        _tell_tale_rate("docstrings of stubs", texts, [STUB]),
    ]
    for begins, what in ((begins_with_question, "a question word"), (begins_with_fragment, "a fragment")):
        for kind in DOCSTRINGS:
            of_kind = [text for text in texts if text.kind == kind]
            hits = sum(begins(text.text) for text in of_kind)
            name = f"% of {kind} docstrings that begin with {what}"
            measures.append(Measure(name, 100 * hits / max(len(of_kind), 1), f"{hits} of {len(of_kind):,}"))
    docstrings = (docstring for module in part.modules for docstring in module.docstrings)
    functions = [docstring for docstring in docstrings if docstring.kind == "function"]
    hits = sum(map(lacks_verb, functions))
    name = "% of function docstrings that begin with no known verb"
    measures.append(Measure(name, 100 * hits / max(len(functions), 1), f"{hits} of {len(functions):,}"))
    words = sum(text.num_words for text in texts if text.kind in DOCSTRINGS)
    comments = sum(text.kind == COMMENT and text.path.suffix == ".py" for text in texts)
    return [
        *measures,
        Measure(DOCSTRING_WORDS, 100 * words / num_lines, f"{words:,} in {num_lines:,}"),
        Measure(COMMENT_LINES, 100 * comments / num_lines, f"{comments:,} in {num_lines:,}"),
        Measure("leftover names of variables and parameters", len(leftovers(part.modules))),
        Measure("class names used twice", len({name.text for name in repeated_classes(part.modules)})),
    ]


def other_measures(root: Path) -> list[Measure]:
    """Measure the tell-tale words of the other folders, and of the pages at the root."""
    measures = []
    for folder in OTHER_FOLDERS:
        if (root / folder).is_dir():
            texts = read_part(root / folder).texts
            groups = [("docstrings and comments", (*PROSE, NATIVE_COMMENT)), ("messages", MESSAGES), ("pages", [PAGE])]
            rates = [_tell_tale_rate(f"{name} of {folder}", texts, kinds) for name, kinds in groups]
            measures += [rate for rate in rates if not rate.detail.endswith(" 0 words")]
    pages = sorted(root.glob("*.md"))
    return measures + [_tell_tale_rate(page.name, read_part(page).texts, [PAGE]) for page in pages]


def remaining_renames(part: Part, tables: Iterable[Path]) -> tuple[Measure, list[str]]:
    """Return the measure of the rows that are not done, and a line for each name that is still defined."""
    renames = [rename for table in tables for rename in read_renames(table)]
    native = (path for path in part.paths if path.suffix in NATIVE_SUFFIXES)
    remaining = RenameCheck(renames, part.modules, native).remaining()
    lines = [
        f"{name} -> {old.new or 'see the table'} ({rename.table.name}:{rename.line})"
        for rename, names in remaining
        for name in names
        for old in rename.names
        if old.text == name.text
    ]
    return Measure(RENAMES, len(remaining), f"of {len(renames):,}"), lines
