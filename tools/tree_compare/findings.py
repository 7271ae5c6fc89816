"""What a comparison finds: differences that it refuses, and strings that a person should look at."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

MAX_FRAGMENT = 100


@dataclass(frozen=True, order=True)
class Difference:
    """A difference that no rule accepts."""

    path: str
    before_line: int
    """0 if the place does not exist before."""
    after_line: int
    before: str
    after: str
    reason: str

    def __str__(self) -> str:
        places = f"{self.path}:{self.before_line or '-'} -> {self.after_line or '-'}"
        return f"{places}: {self.reason}: {self.before or 'nothing'} | {self.after or 'nothing'}"


@dataclass(frozen=True, order=True)
class Notice:
    """A place after the change that a person should look at."""

    path: str
    line: int
    reason: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}: {self.text}"


@dataclass
class Findings:
    """Everything that a comparison reports."""

    differences: set[Difference] = field(default_factory=set)
    notices: set[Notice] = field(default_factory=set)
    renamed: set[tuple[str, str]] = field(default_factory=set)
    """Names outside of functions that differ, as (old, new)."""
    num_moved: int = 0
    """Number of files that a rename of a module or folder has moved."""
    num_local: int = 0
    """Number of local names that differ."""
    _seen: set[tuple[str, str, str, str]] = field(default_factory=set)

    def refuse(self, difference: Difference) -> None:
        """Add a difference. One between two names is reported at its first place in a file only."""
        key = difference.path, difference.before, difference.after, difference.reason
        if difference.before.isidentifier() and difference.after.isidentifier():
            if key in self._seen:
                return
            self._seen.add(key)
        self.differences.add(difference)

    def merge(self, other: Findings) -> None:
        self.differences |= other.differences
        self.notices |= other.notices
        self.renamed |= other.renamed
        self.num_local += other.num_local


def fragment(node: ast.AST | str | None) -> str:
    """Return the code of `node` on one line, at most `MAX_FRAGMENT` characters of it."""
    if isinstance(node, ast.AST):
        try:
            node = ast.unparse(node)
        except (AttributeError, ValueError):  # a part that is no code by itself
            node = type(node).__name__
    text = re.sub(r"\s+", " ", node or "").strip()
    return text if len(text) <= MAX_FRAGMENT else f"{text[: MAX_FRAGMENT - 3]}..."
