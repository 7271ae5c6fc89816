"""Tests of the checkout before, made to call what they called where it stands now: by a table of moves, read from both
trees, and a table of calls, `former_tests.txt`. No expected value, tolerance or case is in the first; the second says
each that differs."""

from __future__ import annotations

import ast
import fnmatch
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from house_parts.checkouts import Checkout, Ledger

CALLS = Path(__file__).with_suffix(".txt")
FOLDER = "former-tests"
"""In the present checkout, beside its own tests, while they run."""
_IMPORT = re.compile(r"^([ \t]*)from (meseta[\w.]*) import (\([^)]*\)|[^\n(]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Call:
    """One line of the table of calls."""

    files: str
    """Pattern of the test files, below tests/."""
    old: str
    new: str

    def apply(self, path: str, text: str) -> str:
        """The text of a file; `old` stands for whole words alone."""
        if not fnmatch.fnmatch(path, self.files):
            return text
        begin, end = (r"\b" if re.match(r"\w", sign) else "" for sign in (self.old[0], self.old[-1]))
        return re.sub(begin + re.escape(self.old) + end, lambda _: self.new, text)


def read_calls() -> list[Call]:
    """The table: lines of `files | old => new`, in which \\n is a line end; '#' begins a note."""
    calls = []
    for line in CALLS.read_text().splitlines():
        if line and not line.startswith("#"):
            files, _, change = line.partition(" | ")
            old, _, new = change.partition(" => ")
            calls.append(Call(files, old.replace("\\n", "\n"), new.replace("\\n", "\n")))
    return calls


class Moves:
    """Where modules and names of one source tree are in another one."""

    def __init__(self, before: Path, after: Path, commit: str) -> None:
        """`commit` of `before`, in the history of `after`."""
        self.modules = dict(_moved_modules(after, commit))
        self.after = {module: path.read_text() for module, path in _modules(after)}
        self.doors = {module: path.read_text() for module, path in _modules(before) if path.name == "__init__.py"}
        self.homes: dict[str, list[str]] = {}
        for module, text in self.after.items():
            for name in _defined(text):
                self.homes.setdefault(name, []).append(module)
        self.lost: dict[str, str] = {}
        """Names that are nowhere, by the module that had them."""

    def of(self, module: str, name: str) -> str:
        """The module that has a former module's name now; where none has, that which the module became."""
        moved = self.modules.get(module, module)
        homes = self.homes.get(name, [])
        if (module, name) == ("meseta", "_C"):  # the compiled core, which is no file of the sources
            return module
        if moved in homes or f"{moved}.{name}" in self.after or re.search(rf"\b{name}\b", self._door(moved)):
            return moved
        near = [home for home in homes if home.split(".")[:2] == moved.split(".")[:2]]
        for choice in (homes, near):
            if len(choice) == 1:
                return choice[0]
        self.lost[name] = module
        return moved

    def rewritten(self, text: str) -> str:
        """A test's text, with imports and module paths as they are now."""
        text = _IMPORT.sub(self._imports, text)
        former = sorted(self.modules, key=len, reverse=True)
        path = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, former))})(?!\w)")
        lines = text.split("\n")
        return "\n".join(
            line if line.lstrip().startswith("from meseta") else path.sub(lambda m: self.modules[m[1]], line)
            for line in lines
        )

    def _door(self, module: str) -> str:
        """The text of a package's `__init__.py`, which may hand on names of its modules."""
        return self.after.get(module, "") if any(m.startswith(f"{module}.") for m in self.after) else ""

    def _imports(self, found: re.Match[str]) -> str:
        indent, module, names = found.groups()
        lines = []
        for entry in filter(None, (part.strip() for part in re.sub(r"#.*", "", names).strip("()").split(","))):
            name, _, alias = entry.partition(" as ")
            if f"{module}.{name}" in self.modules and not re.search(rf"\b{name}\b", self.doors.get(module, "")):
                home, _, stem = self.modules[f"{module}.{name}"].rpartition(".")
                lines.append(f"{indent}from {home} import {stem} as {alias or name}")
            else:
                lines.append(f"{indent}from {self.of(module, name)} import {entry}")
        return "\n".join(lines)


def write_tests(before: Path, after: Path, commit: str) -> Moves:
    """The tests of `before` for the sources of `after`, in its FOLDER."""
    folder = after / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(before / "tests", folder, ignore=shutil.ignore_patterns("__pycache__"))
    moves, calls = Moves(before, after, commit), read_calls()
    for path in folder.rglob("*.py"):
        text = moves.rewritten(path.read_text())
        for call in calls:
            text = call.apply(str(path.relative_to(folder)), text)
        path.write_text(text)
    return moves


def compare_tests(before: Checkout, after: Checkout, folder: Path) -> Ledger:
    """What each test of `before` says of `after`, and names that neither table says the place of."""
    ledger = Ledger("tests")
    head = ["git", "-C", str(before.root), "rev-parse", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()
    moves = write_tests(before.root, after.root, commit)
    try:
        known = {word for call in read_calls() for word in re.findall(r"\w+", call.old)}
        for name, module in sorted(moves.lost.items()):
            if name not in known:
                ledger.differ(f"{module}.{name}", "has no place")
        report = folder / "tests.xml"
        command = [str(after.root / ".venv/bin/python"), "-m", "pytest", "-n", "auto", "--maxprocesses", "4", FOLDER,
                   "-o", f"pythonpath={FOLDER} benchmarks", f"--junitxml={report}"]  # fmt: skip
        subprocess.run(command, cwd=after.root, check=False)
    finally:
        shutil.rmtree(after.root / FOLDER, ignore_errors=True)
    for case in ElementTree.parse(report).iter("testcase"):
        where = f"{case.get('classname')}.{case.get('name')}"
        outcomes = [child for child in case if child.tag in ("failure", "error")]
        ledger.compare(where, "outcome", "passed", outcomes[0].get("message", "")[:120] if outcomes else "passed")
    return ledger


def _modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Name and file of each module, those of benchmarks in folders too."""
    for path in sorted((root / "src/meseta").rglob("*.py")):
        yield _name(path.relative_to(root / "src")), path
    for path in sorted((root / "benchmarks").glob("*/*.py")):
        yield _name(path.relative_to(root / "benchmarks")), path


def _name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _defined(text: str) -> Iterator[str]:
    """Names that a module gives a value at its top level."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in filter(None, targets):
            yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))


def _moved_modules(root: Path, commit: str) -> Iterator[tuple[str, str]]:
    """Former and present name of each module that has another one, as git finds them by their text."""
    command = ["git", "-C", str(root), "diff", "-M30%", "-l5000", "--name-status", commit, "HEAD", "--", "src"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for kind, *paths in (line.split("\t") for line in listed.splitlines()):
        if kind.startswith("R") and paths[0].endswith(".py"):
            yield _name(Path(paths[0]).relative_to("src")), _name(Path(paths[1]).relative_to("src"))
