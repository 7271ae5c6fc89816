"""Comparison of blocks of import statements, whose order may change."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from tree_compare.renames import RenameTable
from tree_compare.scopes import bound_name

Import = ast.Import | ast.ImportFrom


@dataclass(frozen=True)
class Entry:
    """One imported name."""

    module: str
    level: int
    name: str
    """Empty for `import module`."""
    has_alias: bool
    bound: str
    line: int

    @property
    def text(self) -> str:
        alias = f" as {self.bound}" if self.has_alias else ""
        module = "." * self.level + self.module
        return f"from {module} import {self.name}{alias}" if self.name else f"import {module}{alias}"


def entries(block: list[Import]) -> Iterator[Entry]:
    for node in block:
        for alias in node.names:
            bound = bound_name(node, alias)
            has_alias = alias.asname is not None and alias.asname != alias.name
            if isinstance(node, ast.Import):
                yield Entry(alias.name, 0, "", has_alias, bound, node.lineno)
            else:
                yield Entry(node.module or "", node.level, alias.name, has_alias, bound, node.lineno)


def pair_imports(
    before: list[Import], after: list[Import], table: RenameTable
) -> tuple[list[tuple[Entry, Entry]], list[Entry], list[Entry]]:
    """Return (pairs of imports that agree after renames, imports that are gone, imports that are new)."""

    def is_same(one: Entry, other: Entry) -> bool:
        return (one.module, one.level, one.name, one.bound) == (other.module, other.level, other.name, other.bound)

    def is_renamed(one: Entry, other: Entry) -> bool:
        olds, news = f"{one.module}.{one.name}".split("."), f"{other.module}.{other.name}".split(".")
        # A name that becomes its alias needs none.
        is_bound_alike = one.has_alias == other.has_alias or one.bound == other.bound
        return (
            is_bound_alike
            and (one.level, bool(one.name)) == (other.level, bool(other.name))
            and len(olds) == len(news)
            and all(old == new or table.explains(old, new) for old, new in zip(olds, news, strict=True))
        )

    gone, added = list(entries(before)), list(entries(after))
    pairs = []
    for accepts in (is_same, is_renamed):
        for entry in list(gone):
            match = next((other for other in added if accepts(entry, other)), None)
            if match is not None:
                pairs.append((entry, match))
                gone.remove(entry)
                added.remove(match)
    return pairs, gone, added
