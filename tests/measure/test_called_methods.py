"""Methods that benchmarks call by name exist in their targets."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil

import pytest

import meseta.measure
from source_tree import SOURCE


def called_methods() -> list[tuple[str, str]]:
    """Return (file and line, method) of every call of `call` with a literal name."""
    calls = []
    for path in sorted((SOURCE / "measure").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "call":
                for argument in node.args[:1]:
                    if isinstance(argument, ast.Constant):
                        calls.append((f"{path.name}:{node.lineno}", str(argument.value)))
    return calls


def methods() -> set[str]:
    """Return the names of the methods of all classes in meseta.measure."""
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


@pytest.mark.parametrize(("where", "name"), called_methods())
def test_targets_have_the_method(known: set[str], where: str, name: str) -> None:
    assert name in known, where


def test_the_calls_are_seen() -> None:
    assert len(called_methods()) >= 8
