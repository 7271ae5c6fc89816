"""Limits of the hits in each folder. They may only fall, so that new code cannot make a folder worse."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from writing.measures import DOCSTRING_WORDS, OTHER_FOLDERS, REQUIRED, Part, num_tell_tale, read_part
from writing.names import leftovers
from writing.rules import begins_with_fragment, begins_with_question
from writing.texts import DOCSTRINGS, MESSAGES

LIMITS = Path("tests", "structure", "prose_limits.toml")
"""Path of the table, below the root."""
HEAD = """\
# Largest number of hits in each folder, held by tests/structure/test_prose.py. A number may only fall: after a rewrite,
# `python tools/prose.py --lower-limits` lowers it. A folder without a line has the limit 0. If a folder is renamed,
# rename its line, too.
#   prose            tell-tale words in docstrings, comments and pages
#   messages         tell-tale words in errors, help texts, printed texts and other strings
#   beginnings       docstrings that begin with a question word or a fragment
#   leftovers        variables and parameters with a leftover name
#   docstring_words  words of docstrings per 100 lines of Python, rounded up; at least the required value

"""

Counts = Mapping[str, Mapping[str, int]]


def folder_counts(root: Path, source: Part) -> dict[str, dict[str, int]]:
    """Count the hits in each package of `source`, the folder src below the root, and in each other folder."""
    counts: dict[str, dict[str, int]] = {}
    for entry in sorted(path for package in (root / "src").iterdir() for path in package.iterdir()):
        part = source.below(entry)
        if part.texts:
            folder = entry.relative_to(root).as_posix()
            counts[folder] = _hits(part)
            if part.num_lines:
                num_words = sum(text.num_words for text in part.texts if text.kind in DOCSTRINGS)
                counts[folder]["docstring_words"] = -(-100 * num_words // part.num_lines)
    return counts | {folder: _hits(read_part(root / folder)) for folder in OTHER_FOLDERS}


def exceeded(counts: Counts, limits: Counts) -> list[str]:
    """Return a line for each count above its limit."""
    return [
        f"{folder}: {name} {count}, limit {_limit(limits, folder, name)}"
        for folder, hits in counts.items()
        for name, count in hits.items()
        if count > _limit(limits, folder, name)
    ]


def lower_limits(root: Path) -> None:
    """Write the table with today's counts where they are below the limits. Without a table, write all counts."""
    path, counts = root / LIMITS, folder_counts(root, read_part(root / "src"))
    limits = read_limits(path) if path.exists() else counts
    lines = []
    for folder, hits in counts.items():
        lowered = {name: _limit({folder: {name: count}}, folder, name) for name, count in hits.items()}
        values = (f"{name} = {min(limit, _limit(limits, folder, name))}" for name, limit in lowered.items())
        lines.append(f'"{folder}" = {{ {", ".join(values)} }}\n')
    path.write_text(HEAD + "".join(lines), encoding="utf-8")


def read_limits(path: Path) -> Counts:
    """Read the table."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _limit(limits: Counts, folder: str, name: str) -> int:
    least = int(REQUIRED[DOCSTRING_WORDS]) if name == "docstring_words" else 0
    return max(least, limits.get(folder, {}).get(name, 0))


def _hits(part: Part) -> dict[str, int]:
    docstrings = [text.text for text in part.texts if text.kind in DOCSTRINGS]
    return {
        "prose": num_tell_tale(text for text in part.texts if text.kind not in MESSAGES),
        "messages": num_tell_tale(text for text in part.texts if text.kind in MESSAGES),
        "beginnings": sum(begins_with_question(text) or begins_with_fragment(text) for text in docstrings),
        "leftovers": len(leftovers(part.modules)),
    }
