"""Tests that one module each owns renames, locks, processes and the environment, and that class names are unique.

Each rule is also tested with a violation."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Collection, Iterable, Iterator

import pytest

from meseta.spec.stages import STAGES
from meseta.spec.tiers import CACHED, HBM
from source_tree import modules

PIPES = ("measure/harness/worker_group.py", "measure/harness/worker.py", "measure/doctor/child_processes.py")
"""Exchange lines of JSON with the processes that they start."""
ROWS = "data/formats/json_lines.py"
"""Decodes rows of JSON lines, whose numbers keep their spelling."""
OWNERS: dict[str, tuple[set[str], set[str]]] = {
    "renames": ({"os.replace", "os.rename", "os.renames", ".rename"}, {"system/files.py"}),
    "locks": ({"fcntl.flock", "fcntl.lockf"}, {"system/locks.py"}),
    "starts of processes": (
        {*(f"subprocess.{name}" for name in ("Popen", "run", "call", "check_call", "check_output")), "os.fork",
         "os.execv", "os.posix_spawn", "multiprocessing.get_context", "multiprocessing.Process"},
        {"system/processes.py"},
    ),
    "opening Parquet files": ({"pq.ParquetFile"}, {"data/dataset/part_files.py", "data/formats/parquet_files.py"}),
    "the environment": ({"os.environ", "os.getenv", "os.putenv"}, {"system/environment_variables.py"}),
    "YAML": ({"yaml.load", "yaml.safe_load", "yaml.SafeLoader", "yaml.Loader"}, {"system/yaml_text.py"}),
    "JSON": ({"json.load", "json.loads", "json.JSONDecoder"}, {"system/files.py", ROWS, *PIPES}),
}  # fmt: skip


def used(tree: ast.AST) -> Iterator[str]:
    """Return the dotted names, and methods of other objects as '.rename'."""
    modules = {alias.asname or alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            known = isinstance(node.value, ast.Name) and node.value.id in modules
            yield f"{node.value.id}.{node.attr}" if known else f".{node.attr}"  # type: ignore[attr-defined]
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files_of_other_owners(rule: str, uses: dict[str, set[str]]) -> list[str]:
    """Return the files that use names owned by another file. `uses` has the names of each file."""
    names, owners = OWNERS[rule]
    return sorted(path for path, its in uses.items() if path not in owners and names & its)


@pytest.fixture(scope="module")
def uses() -> dict[str, set[str]]:
    return {path: set(used(tree)) for path, tree in modules()}


@pytest.mark.parametrize("rule", OWNERS)
def test_one_module_owns_each_task(uses: dict[str, set[str]], rule: str) -> None:
    assert files_of_other_owners(rule, uses) == []
    names, owners = OWNERS[rule]
    assert all(names & uses[owner] for owner in owners), "an owner has nothing to own"


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
        ("YAML", "import yaml\nyaml.safe_load('a')"),
        ("JSON", "import json\njson.loads('1')"),
    ],
)
def test_the_rule_bites(rule: str, text: str) -> None:
    assert files_of_other_owners(rule, {"a.py": set(used(ast.parse(text)))}) == ["a.py"]


def literals(tree: ast.AST) -> Iterator[str]:
    """Return the strings of the source without docstrings."""
    notes = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in notes:
            yield node.value


def stage_lists(tree: ast.AST) -> int:
    """Return the displays with at least three stages of a step."""
    names = {stage.name for stage in STAGES}
    displays = (node for node in ast.walk(tree) if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict))
    parts = (node.keys if isinstance(node, ast.Dict) else node.elts for node in displays)
    return sum(sum(isinstance(p, ast.Constant) and p.value in names for p in of_one) >= 3 for of_one in parts)


def test_stages_are_listed_once() -> None:
    assert {path for path, tree in modules() if stage_lists(tree)} == {"spec/stages.py"}
    assert stage_lists(ast.parse("A = ('lookup', 'dense_update', 'dense_forward')")) == 1
    assert stage_lists(ast.parse("A = ('lookup', 'update')")) == 0


def test_tiers_are_named_by_their_owner_alone() -> None:
    tiers = {HBM, CACHED}  # 'host' and 'disk' are other things, too
    assert {path for path, tree in modules() if tiers & set(literals(tree))} == {"spec/tiers.py"}
    assert set(literals(ast.parse('"""hbm"""\na = "cached"'))) == {"cached"}


PROGRAMS = {"api/command.py", "cli/verify.py", "measure/doctor/checks.py", "data/service/server/local_readers.py"}
"""Name a module that a separate interpreter runs as a program."""
DOORS = {"__init__.py", "data/__init__.py", "data/prepare/__init__.py", "report/__init__.py", "train/__init__.py"}
"""Modules with names that are imported at their first use (PEP 562)."""


def module_paths(tree: ast.AST) -> list[str]:
    """Return the strings that name a module of the package, or an object in one."""
    paths = (text for text in literals(tree) if re.fullmatch(r"meseta(\.[a-z_0-9]+)+(:\w+)?", text))
    return [p for p in paths if importlib.util.find_spec(p.partition(":")[0]) is not None]


def test_no_import_is_a_string() -> None:
    assert {path for path, tree in modules() if module_paths(tree)} == PROGRAMS | DOORS
    assert module_paths(ast.parse("A = 'meseta.spec.tiers:HBM', 'meseta.spec.tiers', 'meseta.shard'")) == [
        "meseta.spec.tiers:HBM",
        "meseta.spec.tiers",
    ]


def doubled_classes(trees: Iterable[tuple[str, ast.Module]]) -> dict[str, list[str]]:
    """Return the files of each class name that several files define."""
    files_by_class: dict[str, list[str]] = {}
    for path, tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                files_by_class.setdefault(node.name, []).append(path)
    return {name: files for name, files in files_by_class.items() if len(files) > 1}


def test_no_name_has_two_classes() -> None:
    assert doubled_classes(modules()) == {}


def test_the_rule_of_names_bites() -> None:
    trees = [(path, ast.parse("class Window: pass")) for path in ("a.py", "b.py")]
    assert doubled_classes(trees) == {"Window": ["a.py", "b.py"]}


def imported(tree: ast.Module, known: Collection[str]) -> Iterator[str]:
    """Return the members of `known` that top-level imports name, including those for the type checker alone."""
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


MEMORY_MODEL = {
    "planner/cost/memory.py": {
        "DENSE_COPIES", "SORT_BYTES_PER_ID", "MAX_FRAME_BYTES", "PHASES", "RunBytes",
        "row_and_state_bytes", "copy_bytes", "save_bytes", "fixed_bytes", "memory_bytes_by_part",
    },
    "spec/shards.py": {"NUM_PENDING_WRITES"},
}  # fmt: skip
"""Owner of each part of the memory model, and of the functions that compute it."""
OTHER_PHASES = {"train/verify/steps.py"}
"""PHASES of this module are those of a comparison."""


def memory_models(trees: Iterable[tuple[str, ast.Module]]) -> set[tuple[str, str]]:
    """Return (module, name) of every part of the memory model that another module defines."""
    homes = {name: path for path, names in MEMORY_MODEL.items() for name in names}
    uses = set()
    for path, tree in trees:
        for node in ast.walk(tree):
            names = [node.name] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else []
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            uses |= {(path, name.lstrip("_")) for name in names if homes.get(name.lstrip("_"), path) != path}
    return {(path, name) for path, name in uses if not (path in OTHER_PHASES and name == "PHASES")}


def test_one_module_owns_the_memory_of_a_phase() -> None:
    assert memory_models(modules()) == set()
    defined = {path: ast.unparse(tree) for path, tree in modules() if path in MEMORY_MODEL}
    assert all(name in defined[path] for path, names in MEMORY_MODEL.items() for name in names), "a name has gone"


def test_the_rule_of_memory_bites() -> None:
    trees = [
        ("checkpoint/saving.py", ast.parse("_NUM_PENDING_WRITES = 6")),
        ("train/setup/memory.py", ast.parse("DENSE_COPIES: int = 4")),
        ("planner/search/cost_estimator.py", ast.parse("class Prices:\n    def fixed_bytes(self): pass")),
    ]
    assert {name for _, name in memory_models(trees)} == {"NUM_PENDING_WRITES", "DENSE_COPIES", "fixed_bytes"}
