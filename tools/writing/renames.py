"""Rename tables, and the names in them that a source tree still defines."""

from __future__ import annotations

import ast
import csv
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from writing.names import Name
from writing.source import Module, nodes_with_owners

PYTHON_FILE = re.compile(r"[\w/]+\.pyi?\b")
IDENTIFIER = re.compile(r"\.?\w+(\.\w+)?$")
IN_PARENTHESES = re.compile(r"\(.*?\)")
DEFINED_AS = {
    "class": {"class", "variable"},
    "function": {"function", "variable"},
    "method": {"function", "variable"},
    "constant": {"variable"},
    "attribute": {"variable", "function"},
    "parameter": {"parameter"},
    "config key": {"variable"},
    "option": {"option", "parameter"},
}
"""Kinds of definitions that a row of each kind may refer to. A row of another kind may refer to any."""
MODULE_LEVEL = {"class", "function", "constant"}
"""Kinds of rows in which a name without an owner is one of the module."""
STORED = "stored"
"""Kind of the rows that are not checked, because readers accept the old name, too."""


@dataclass(frozen=True)
class OldName:
    """A name that a row of a table replaces."""

    text: str
    """A name, `Class.name`, `function.parameter` or `Class.method.parameter`. The path of a module, or its end."""
    new: str
    """Empty if unknown."""
    is_module: bool


@dataclass(frozen=True)
class Rename:
    """One row of a rename table."""

    table: Path
    line: int
    """The line of the table on which the row ends."""
    kind: str
    """Empty if the table has no kinds."""
    files: tuple[str, ...]
    """Paths below the package, or their ends. If empty, any file is meant."""
    names: tuple[OldName, ...]


@dataclass(frozen=True)
class Definition:
    """A definition in a Python file."""

    owners: tuple[str, ...]
    """The classes and functions around it, outermost first."""
    kind: str
    """`class`, `function`, `variable`, `parameter` or `option`."""
    name: str
    line: int


def read_renames(table: Path) -> list[Rename]:
    """Read a rename table: CSV with the columns kind, file, old and new, or pattern, old, new and where."""
    with table.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        return [_rename(table, rows.line_num, {key: value or "" for key, value in row.items()}) for row in rows]


def _rename(table: Path, line: int, row: dict[str, str]) -> Rename:
    if "file" in row:
        is_module = row["kind"] == "module"
        path = row["file"].rpartition(".")[0].removesuffix("/__init__")
        name = OldName(path if is_module else row["old"].strip(), row["new"].strip(), is_module)
        return Rename(table, line, row["kind"], (row["file"],), (name,))
    where = next(value for column, value in row.items() if column.startswith("where"))
    old, new = list(_names_in(row["old"])), [name for name, _ in _names_in(row["new"])]
    new = new if len(new) == len(old) else [""] * len(old)
    names = tuple(OldName(name, its_new, is_module) for (name, is_module), its_new in zip(old, new, strict=True))
    return Rename(table, line, "", tuple(PYTHON_FILE.findall(IN_PARENTHESES.sub("", where))), names)


def _names_in(text: str) -> Iterator[tuple[str, bool]]:
    """Yield (name, is_module) for each name in a list such as "Growth.update / .lately (rates), module wire"."""
    owner = ""
    for part in re.split(r",|\s/\s|:", IN_PARENTHESES.sub("", text)):
        words = part.split()
        is_module = bool(words) and words[0] in ("module", "package")
        if is_module or (words and IDENTIFIER.match(words[-1])):
            name = f"{owner}{words[-1]}" if words[-1].startswith(".") else words[-1]
            owner = name.partition(".")[0] if "." in name else owner
            yield name, is_module


class RenameCheck:
    """Finds the names of a rename table that a tree still defines."""

    def __init__(self, renames: Iterable[Rename], modules: Iterable[Module], native: Iterable[Path]) -> None:
        """`native` are the C++ files of the tree."""
        self._renames = list(renames)
        self._modules = {module.path.as_posix(): module for module in modules}
        self._native = {path.as_posix() for path in native}
        self._paths = [*self._modules, *self._native]
        self._new_names: dict[str, set[str]] = {}
        """New names of each class and function, which own methods and parameters."""
        self._new_paths: dict[str, str] = {}
        for name in (name for rename in self._renames for name in rename.names):
            self._new_names.setdefault(name.text.rpartition(".")[2], set()).add(name.new)
            if name.is_module and name.new:
                folder = "" if "/" in name.new else name.text.rpartition("/")[0]
                self._new_paths[f"/{name.text}"] = f"{folder and '/'}{folder}/{name.new}"

    def remaining(self) -> list[tuple[Rename, list[Name]]]:
        """Return each row with those of its names that the file of the row still defines.

        A moved file is replaced by its successor, or by all files if the table has none.
        """
        pairs = ((rename, list(self._defined(rename))) for rename in self._renames if rename.kind != STORED)
        return [(rename, names) for rename, names in pairs if names]

    def _defined(self, rename: Rename) -> Iterator[Name]:
        for name in rename.names:
            if name.new == name.text.rpartition("/")[2]:
                continue
            if name.is_module:
                yield from (Name(Path(path), 1, name.text) for path in self._paths if _is_module(path, name.text))
                continue
            for path in self._files(rename):
                if path in self._native:
                    yield from _defined_in_native(name.text, path)
                else:
                    yield from self._defined_in_module(name.text, path, rename.kind)

    def _files(self, rename: Rename) -> list[str]:
        paths: list[str] = []
        for file in rename.files:
            for end in (f"/{file}", self._successor(file)):
                if candidates := [path for path in self._paths if f"/{path}".endswith(end)]:
                    break
            else:
                return self._paths
            nearby = [path for path in candidates if paths and Path(path).parent == Path(paths[-1]).parent]
            depth = min(path.count("/") for path in candidates)
            paths += nearby or [path for path in candidates if "/" in file or path.count("/") == depth]
        return paths or self._paths

    def _successor(self, file: str) -> str:
        stem, suffix = f"/{file}".rpartition(".")[::2]
        for old, new in self._new_paths.items():
            stem = f"{stem.removesuffix(old)}{new}" if stem.endswith(old) else stem.replace(f"{old}/", f"{new}/")
        return f"{stem}.{suffix}"

    def _defined_in_module(self, name: str, path: str, kind: str) -> Iterator[Name]:
        *owners, last = name.split(".")
        for definition in _definitions(self._modules[path]):
            is_of_kind = definition.kind in DEFINED_AS.get(kind, {definition.kind})
            is_at_level = bool(owners) or not definition.owners or kind not in MODULE_LEVEL
            if definition.name == last and is_of_kind and is_at_level and self._contains(definition.owners, owners):
                yield Name(Path(path), definition.line, name)

    def _contains(self, owners: tuple[str, ...], named: list[str]) -> bool:
        """Whether all `named`, by their old or new names, are among `owners`, in this order."""
        rest = iter(owners)
        return all(any(owner == name or owner in self._new_names.get(name, ()) for owner in rest) for name in named)


def _defined_in_native(name: str, path: str) -> Iterator[Name]:
    """Yield a name if a C++ file has it in its code, other than as a member of an object or a namespace."""
    last = re.split(r"\.|::", name)[-1]
    if match := re.search(rf"(?<![.>:\w]){last}\b", source := _native_code(path)):
        yield Name(Path(path), source.count("\n", 0, match.start()) + 1, name)


@cache
def _definitions(module: Module) -> list[Definition]:
    """Return the definitions and command-line options of a file."""
    pairs = ((owners, _definition(owners, node)) for owners, node in nodes_with_owners(module.tree))
    return [definition for _, definition in pairs if definition]


def _definition(owners: tuple[str, ...], node: ast.AST) -> Definition | None:
    match node:
        case ast.ClassDef():
            return Definition(owners, "class", node.name, node.lineno)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return Definition(owners, "function", node.name, node.lineno)
        case ast.Name(ctx=ast.Store()):
            return Definition(owners, "variable", node.id, node.lineno)
        case ast.Attribute(ctx=ast.Store()):
            return Definition(owners, "variable", node.attr, node.lineno)
        case ast.arg():
            return Definition(owners, "parameter", node.arg, node.lineno)
        case ast.Constant(value=str(text)) if text.startswith("--"):
            return Definition(owners, "option", text, node.lineno)
    return None


def _is_module(path: str, name: str) -> bool:
    """Whether the file of a module is called `name`, or is in a package of this name."""
    return f"/{path.rpartition('.')[0]}".endswith(f"/{name}") or f"/{name}/" in f"/{path}"


@cache
def _native_code(path: str) -> str:
    """Return the text of a C++ file without comments, on the same lines."""
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda comment: "\n" * comment[0].count("\n"), text, flags=re.DOTALL)
