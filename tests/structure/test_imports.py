"""Imports go one way, top to bottom, and collectives live in one place."""

import ast
import subprocess
import sys
from pathlib import Path

from source_tree import SOURCE, modules

# Only comm/ talks to other ranks; the command line may start them, and other systems are measured as they are.
MAY_USE_DISTRIBUTED = ("comm/", "cli/", "measure/bench/e2e_peers.py")


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


def distributed_uses(tree: ast.Module) -> list[int]:
    """Lines that name torch.distributed or the modules that issue its collectives."""
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


def test_every_collective_lives_in_comm() -> None:
    found = [
        f"{name}:{line}"
        for name, tree in modules()
        if not name.startswith(MAY_USE_DISTRIBUTED)
        for line in distributed_uses(tree)
    ]
    assert not found, f"torch.distributed outside {MAY_USE_DISTRIBUTED}: {found}"


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
