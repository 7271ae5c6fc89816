"""Names of a source tree that say little: leftover names of variables, and class names used twice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from writing.source import Module

LEFTOVERS = {"own", "found", "told", "came", "met", "mine", "theirs", "wanted", "given"}
"""Names that do not say what a variable holds."""


@dataclass(frozen=True)
class Name:
    """A name and the place where it is defined."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def leftovers(modules: Iterable[Module]) -> list[Name]:
    """Return the variables, attributes and parameters that have one of the names `LEFTOVERS`."""
    names = (Name(module.path, line, name) for module in modules for name, line in module.names)
    return [name for name in names if name.text.strip("_") in LEFTOVERS]


def repeated_classes(modules: Iterable[Module]) -> list[Name]:
    """Return the classes that have the name of another class."""
    classes: dict[str, list[Name]] = {}
    for module in modules:
        for node in module.classes:
            classes.setdefault(node.name, []).append(Name(module.path, node.lineno, node.name))
    return [name for names in classes.values() if len(names) > 1 for name in names]
