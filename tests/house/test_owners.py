"""What one module does for all (renames, locks, processes, the environment), and names that one class has;
and no circle of imports. Each rule is shown to bite."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator

import pytest

from source_tree import SOURCE, modules

PEERS = "measure/e2e_peers.py"
"""Runs in the interpreters of other systems, where the package is not."""
OWNERS: dict[str, tuple[set[str], set[str]]] = {
    "renames": ({"os.replace", "os.rename", "os.renames", ".rename"}, {"machine/files.py"}),
    "locks": ({"fcntl.flock", "fcntl.lockf"}, {"machine/locks.py"}),
    "starts of processes": (
        {*(f"subprocess.{name}" for name in ("Popen", "run", "call", "check_call", "check_output")), "os.fork",
         "os.execv", "os.posix_spawn", "multiprocessing.get_context", "multiprocessing.Process"},
        {"machine/processes.py"},
    ),
    "opening Parquet files": ({"pq.ParquetFile"}, {"data/dataset/part_files.py", "data/formats/parquet_files.py"}),
    "the environment": ({"os.environ", "os.getenv", "os.putenv"}, {"machine/variables.py", PEERS}),
}  # fmt: skip


def used(tree: ast.AST) -> Iterator[str]:
    """Dotted names, and methods of what is no module, as '.rename'."""
    modules = {alias.asname or alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            known = isinstance(node.value, ast.Name) and node.value.id in modules
            yield f"{node.value.id}.{node.attr}" if known else f".{node.attr}"  # type: ignore[attr-defined]
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def strangers(rule: str, sources: dict[str, str]) -> list[str]:
    """Files that do what another one does for all."""
    names, owners = OWNERS[rule]
    found = (path for path, text in sources.items() if path not in owners and names & set(used(ast.parse(text))))
    return sorted(found)


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return {str(path.relative_to(SOURCE)): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}


@pytest.mark.parametrize("rule", OWNERS)
def test_one_module_does_it_for_all(sources: dict[str, str], rule: str) -> None:
    assert strangers(rule, sources) == []
    names, owners = OWNERS[rule]
    assert all(names & set(used(ast.parse(sources[owner]))) for owner in owners), "an owner has nothing to own"


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("renames", "import os\nos.replace('a', 'b')"),
        ("renames", "from os import rename"),
        ("renames", "from pathlib import Path\nPath('a').rename('b')"),
        ("locks", "import fcntl\nfcntl.flock(1, 2)"),
        ("starts of processes", "import subprocess as s, subprocess\nsubprocess.Popen(['a'])"),
        ("starts of processes", "from subprocess import run"),
        ("opening Parquet files", "import pyarrow.parquet as pq\npq.ParquetFile('a')"),
        ("the environment", "import os\nos.environ['A']"),
    ],
)
def test_the_rule_bites(rule: str, text: str) -> None:
    assert strangers(rule, {"a.py": text}) == ["a.py"]


def doubled_classes(trees: Iterable[tuple[str, ast.Module]]) -> dict[str, list[str]]:
    """Files by the name of a class that stands in several."""
    found: dict[str, list[str]] = {}
    for path, tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(path)
    return {name: files for name, files in found.items() if len(files) > 1}


def test_no_name_has_two_classes() -> None:
    assert doubled_classes(modules()) == {}


def test_the_rule_of_names_bites() -> None:
    trees = [(path, ast.parse("class Window: pass")) for path in ("a.py", "b.py")]
    assert doubled_classes(trees) == {"Window": ["a.py", "b.py"]}


def imported(tree: ast.Module, known: Collection[str]) -> Iterator[str]:
    """Those of `known` that imports at the head of a module name, for the type checker alone too."""
    bodies = [tree.body]
    while bodies:
        for node in bodies.pop():
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                yield from (name if name in known else node.module for name in names)
            elif isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.If):
                bodies += [node.body, node.orelse]


def circles(trees: Iterable[tuple[str, ast.Module]]) -> set[str]:
    """Modules that import each other, over whatever others: what is left when modules that import none of the rest, or
    that none of the rest imports, are taken away."""
    named = {f"meseta.{path.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}": t for path, t in trees}
    graph = {name: set(imported(tree, named)) & named.keys() - {name} for name, tree in named.items()}
    while True:
        wanted = {module for found in graph.values() for module in found}
        left = {name: found for name, found in graph.items() if found and name in wanted}
        if left.keys() == graph.keys():
            return set(graph)
        graph = {name: found & left.keys() for name, found in left.items()}


def test_imports_go_in_no_circle() -> None:
    assert circles(modules()) == set()


def test_the_rule_of_circles_bites() -> None:
    sources = {"a.py": "from meseta.b import C", "b.py": "if x:\n    from meseta import d", "d.py": "import meseta.a"}
    trees = [(path, ast.parse(text)) for path, text in sources.items()]
    assert circles(trees) == {"meseta.a", "meseta.b", "meseta.d"}
    assert circles(trees[:2]) == set()
