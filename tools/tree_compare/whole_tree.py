"""Checks over whole trees: that every use of a name has followed its definition."""

from __future__ import annotations

import builtins
import importlib
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import PurePosixPath

from tree_compare.findings import Difference, Findings, Notice
from tree_compare.index import ClassIndex, FileIndex
from tree_compare.python_files import ClassPairs

ROOTS = ("", "src", "tests", "benchmarks", "tools")
OTHER_LIBRARIES = {"numpy", "torch", "pyarrow", "pydantic"}
MAX_PLACES = 4


class Tree:
    """The Python files of one tree."""

    def __init__(self, files: Mapping[str, FileIndex]) -> None:
        self.files = files
        self._folders = {str(parent) for path in files for parent in PurePosixPath(path).parents}
        self.classes: dict[str, list[ClassIndex]] = defaultdict(list)
        self.parameters: dict[str, list[set[str]]] = defaultdict(list)
        for file in files.values():
            for record in file.classes:
                self.classes[record.name].append(record)
            for name, found in file.parameters.items():
                self.parameters[name].extend(found)
        self.attributes = {name for file in files.values() for name in file.attributes}
        self.attributes |= {name for file in files.values() for name in file.names}

    def find_module(self, module: str, importer: str) -> str | None:
        """Return the file of a module that `importer` imports, or its folder if that is no package."""
        name = module.lstrip(".")
        folder = PurePosixPath(importer).parent
        if level := len(module) - len(name):
            roots = [[folder, *folder.parents][level - 1]]
        else:
            roots = [*map(PurePosixPath, ROOTS), folder, *folder.parents]
        for root in roots:
            path = root.joinpath(*name.split(".")) if name else root
            for file in (f"{path}.py", f"{path}.pyi", f"{path}/__init__.py"):
                if file in self.files:
                    return file
            if str(path) in self._folders:
                return str(path)
        return None

    def defines(self, module: str, name: str) -> bool:
        """Whether the file or folder of a module defines `name`, also as a module inside it."""
        if module in self.files:
            names = self.files[module].names
            if name in names or name == "*" or "__getattr__" in names:
                return True
            if PurePosixPath(module).name != "__init__.py":
                return False
            module = str(PurePosixPath(module).parent)
        path = f"{module}/{name}"
        return f"{path}.py" in self.files or f"{path}.pyi" in self.files or path in self._folders

    def missing(self) -> Iterator[tuple[str, int, str, str]]:
        """Yield (path, line, module, name) of each use of a name that a module of the tree does not define."""
        for path, file in self.files.items():
            modules: dict[str, set[str | None]] = defaultdict(set)
            for module, name, bound, line in file.imports:
                found = self.find_module(module, path)
                if found is None:
                    yield path, line, module, ""
                elif name and not self.defines(found, name):
                    yield path, line, module, name
                inner = f"{module.rstrip('.')}.{name}" if name else module
                modules[bound].add(self.find_module(inner, path) if name or "." not in module else None)
            for use in file.uses:
                # Functions of one file may import several modules by one name.
                module_path = next(iter(modules[use.owner])) if len(modules.get(use.owner, ())) == 1 else None
                if module_path and not use.is_keyword and not self.defines(module_path, use.name):
                    yield path, use.line, use.owner, use.name

    def libraries(self, path: str) -> set[str]:
        """Return the names that a file imports from outside of the tree."""
        imports = self.files[path].imports
        return {bound for module, _, bound, _ in imports if self.find_module(module, path) is None}

    def find_base(self, record: ClassIndex, base: str) -> ClassIndex | None:
        """Return the class that `base` names in the file of `record`, if that is certain."""
        candidates = [other for other in self.classes.get(base, []) if other is not record]
        local = [other for other in candidates if other.path == record.path]
        if len(local or candidates) == 1:
            return (local or candidates)[0]
        for module, name, _, _ in self.files[record.path].imports:
            if name == base and (found := self.find_module(module, record.path)):
                home = str(PurePosixPath(found).parent) if found.endswith("__init__.py") else found
                inside = [other for other in candidates if f"{other.path}/".startswith(f"{home}/")]
                if len(inside) == 1:
                    return inside[0]
        return None

    def ancestors(self, record: ClassIndex) -> list[ClassIndex]:
        """Return the classes of the tree that a class derives from."""
        found: list[ClassIndex] = []
        pending = [record]
        while pending:
            derived = pending.pop()
            for base in derived.bases:
                other = self.find_base(derived, base)
                if other is not None and other is not record and other not in found:
                    found.append(other)
                    pending.append(other)
        return found

    def descendants(self) -> dict[str, set[str]]:
        """Return for each class name the names of the classes that derive from it."""
        below: dict[str, set[str]] = defaultdict(set)
        for records in self.classes.values():
            for record in records:
                for ancestor in self.ancestors(record):
                    below[ancestor.name].add(record.name)
        return below

    def accepts(self, function: str, keyword: str) -> bool:
        """Whether a function or class of that name takes a keyword."""
        if any(keyword in names or "**" in names for names in self.parameters.get(function, [])):
            return True
        records = self.classes.get(function, [])
        return any(keyword in one.fields for record in records for one in (record, *self.ancestors(record)))


def check_missing(before: Tree, after: Tree, paths: Mapping[str, str], findings: Findings) -> None:
    """Refuse uses of names that their module no longer defines. `paths` maps files after to files before."""
    known = {(path, module, name) for path, _, module, name in before.missing()}
    for path, line, module, name in after.missing():
        old_path = paths.get(path, path)
        if (old_path, module, name) in known:
            continue
        if not name and before.find_module(module, old_path) is None and after.find_module(module, path) is None:
            continue  # of another library; the comparison of the file refuses a new one
        text = f"{module} has no {name}" if name else f"there is no module {module}"
        findings.refuse(Difference(path, 0, line, "", f"{module}.{name}".strip("."), text))


def check_classes(before: Tree, pairs: Iterable[ClassPairs], findings: Findings) -> None:
    """Refuse a name of a class that differs from the same name in its bases, and two that have become one."""
    compared = {(one.path, one.name, one.line): one for one in pairs}

    def pairs_of(record: ClassIndex) -> dict[tuple[str, str], tuple[int, int]]:
        one = compared.get((record.path, record.name, record.line))
        return one.pairs if one is not None else {(name, name): (line, line) for name, line in record.names.items()}

    for records in before.classes.values():
        for record in records:
            forward: dict[str, tuple[str, ClassIndex]] = {}
            backward: dict[str, tuple[str, ClassIndex]] = {}
            for owner in (record, *before.ancestors(record)):
                for (old, new), lines in pairs_of(owner).items():
                    other, former = forward.setdefault(old, (new, owner)), backward.setdefault(new, (old, owner))
                    if other[0] != new:
                        reason = f"{old} is {new} in {owner.name}, but {other[0]} in {other[1].name}"
                    elif former[0] != old:
                        reason = f"{former[0]} of {former[1].name} and {old} of {owner.name} have both become {new}"
                    else:
                        continue
                    findings.refuse(Difference(owner.path, *lines, old, new, reason))


def check_uses(before: Tree, after: Tree, pairs: Iterable[ClassPairs], findings: Findings) -> None:
    """Refuse attributes and keywords that have an old name which nothing defines any more, and list doubtful ones."""
    attributes = {old for one in pairs for old, new in one.pairs if old != new}
    renamed = attributes | {old for old, _ in findings.renamed}
    doubtful: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for path, file in after.files.items():
        libraries = after.libraries(path)
        for use in file.uses:
            if use.name not in renamed or use.root in libraries:
                continue
            if use.is_keyword and _lost_keyword(use.owner, use.name, before, after, findings):
                reason, is_certain = f"{use.owner} takes no {use.name} any more", not hasattr(dict, use.owner)
            elif not use.is_keyword and use.name in attributes:
                reason = f"{use.name} was renamed, and nothing else has this name"
                is_certain = use.name not in after.attributes and use.name not in external_names()
            else:
                continue
            if is_certain:
                findings.refuse(Difference(path, 0, use.line, "", use.text, reason))
            else:
                doubtful[use.name].append((path, use.line))
    for name, places in doubtful.items():
        more = [f"{path}:{line}" for path, line in places[1:MAX_PLACES]]
        more += [f"{len(places) - MAX_PLACES} more"] if len(places) > MAX_PLACES else []
        reason = "attribute or keyword with a renamed name that others still have"
        findings.notices.add(Notice(*places[0], reason, ", ".join([name, *more])))


def _lost_keyword(function: str, keyword: str, before: Tree, after: Tree, findings: Findings) -> bool:
    """Whether the functions of that name took a keyword before, under their old name, and do not take it now."""
    known = function in after.parameters or function in after.classes
    olds = {function, *(old for old, new in findings.renamed if new == function)}
    return known and not after.accepts(function, keyword) and any(before.accepts(old, keyword) for old in olds)


@cache
def external_names() -> frozenset[str]:
    """Return the attributes of builtin types and of the classes of modules that are loaded or installed."""
    names: set[str] = set()
    modules = [builtins]
    for name in sorted({"threading", "subprocess", "pathlib", "collections", "socket", *OTHER_LIBRARIES}):
        try:
            modules.append(importlib.import_module(name))
        except ImportError:
            continue  # not installed
    modules += [module for name, module in sys.modules.items() if name in sys.stdlib_module_names]
    for module in modules:
        for value in list(vars(module).values()):
            names.update(dir(value) if isinstance(value, type) else ())
        names.update(dir(module))
    return frozenset(names)
