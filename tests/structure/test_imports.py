"""Imports follow the layers, and only `comm` issues collectives."""

import ast
import subprocess
import sys
from pathlib import Path

import grimp
import networkx
import pytest

from source_tree import SOURCE, modules

# Only comm/ communicates with other ranks. The command line may start them.
MAY_USE_DISTRIBUTED = ("comm/", "cli/")
MAX_TRAINER_IMPORTS = 25


def test_import_contracts_are_kept(tmp_path: Path) -> None:
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    run = subprocess.run(
        [sys.executable, "-c", program, "--config", str(SOURCE.parents[1] / "pyproject.toml"), "--no-cache"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(SOURCE.parent), "PATH": ""},
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def import_cycles(package: str) -> list[list[str]]:
    """Return groups of modules that import each other. Imports in functions count, type-checking ones do not."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=True, cache_dir=None)
    imports = networkx.DiGraph(
        [(module, used) for module in graph.modules for used in graph.find_modules_directly_imported_by(module)]
    )
    return sorted(sorted(group) for group in networkx.strongly_connected_components(imports) if len(group) > 1)


def test_no_modules_import_each_other() -> None:
    cycles = import_cycles("meseta")
    print(f"{len(cycles)} import cycles")
    assert cycles == []


def test_cycles_inside_functions_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "looped"
    package.mkdir()
    for name, text in {
        "__init__": "",
        "one": "import looped.two",
        "two": "def f():\n    import looped.one",
        "three": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import looped.four",
        "four": "import looped.three",
    }.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert import_cycles("looped") == [["looped.one", "looped.two"]]


def distributed_uses(tree: ast.Module) -> list[int]:
    """Return the lines that name torch.distributed or the modules that issue its collectives."""
    lines = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        if any(
            name == "torch.distributed" or name.startswith(("torch.distributed.", "torch.nn.parallel"))
            for name in names
        ):
            lines.append(node.lineno)
    return lines


def test_the_trainer_imports_few_modules() -> None:
    """The training loop delegates to other modules, so that a reader needs to know few of them."""
    tree = ast.parse((SOURCE / "train/trainer.py").read_text())
    imports = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    assert sum(module.partition(".")[0] == "meseta" for module in imports) <= MAX_TRAINER_IMPORTS


def test_every_collective_lives_in_comm() -> None:
    violations = [
        f"{name}:{line}"
        for name, tree in modules()
        if not name.startswith(MAY_USE_DISTRIBUTED)
        for line in distributed_uses(tree)
    ]
    assert not violations, f"torch.distributed outside {MAY_USE_DISTRIBUTED}: {violations}"


def test_the_collective_rule_sees_every_spelling() -> None:
    spellings = [
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import all_reduce",
        "import torch\ntorch.distributed.barrier()",
        "from torch.nn.parallel import DistributedDataParallel",
    ]
    assert all(distributed_uses(ast.parse(text)) for text in spellings)
    assert not distributed_uses(ast.parse("import torch\ntorch.zeros(1)"))
