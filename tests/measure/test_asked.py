"""What teams are asked by name, their contenders can do."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil

import pytest

import meseta.measure
from source_tree import SOURCE


def asked() -> list[tuple[str, str]]:
    """(file and line, method) of every call of `call` with a name."""
    found = []
    for path in sorted((SOURCE / "measure").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "call":
                for argument in node.args[:1]:
                    if isinstance(argument, ast.Constant):
                        found.append((f"{path.name}:{node.lineno}", str(argument.value)))
    return found


def methods() -> set[str]:
    """Names of the methods of all classes below meseta.measure."""
    names: set[str] = set()
    for module in pkgutil.walk_packages(meseta.measure.__path__, "meseta.measure."):
        if module.name.rpartition(".")[2] in ("peers",) or "peer" in module.name:
            continue  # need other systems
        for _, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            names |= {name for name, _ in inspect.getmembers(kind, inspect.isfunction)}
    return names


@pytest.fixture(scope="module")
def known() -> set[str]:
    return methods()


@pytest.mark.parametrize(("where", "name"), asked())
def test_contenders_have_the_method(known: set[str], where: str, name: str) -> None:
    assert name in known, where


def test_the_calls_are_seen() -> None:
    assert len(asked()) >= 8
