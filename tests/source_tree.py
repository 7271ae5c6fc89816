"""Parsed source of the package, for tests of structure rules."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "meseta"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def modules() -> tuple[tuple[str, ast.Module], ...]:
    """Yield (path below src/meseta, syntax tree) of every Python file."""
    return tuple((str(path.relative_to(SOURCE)), ast.parse(path.read_text())) for path in sorted(SOURCE.rglob("*.py")))


def functions() -> Iterator[tuple[str, Function]]:
    """Yield ("path:line name", node) of every function and method, including nested ones."""
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                yield f"{name}:{node.lineno} {node.name}", node
