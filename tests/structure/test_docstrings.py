"""Modules and public classes have docstrings, and so do numbers in specs and configs whose names have no unit.

tests/config/test_config_keys.py checks the texts of config keys.
"""

import ast
import re
from collections.abc import Iterator

import pytest

from source_tree import modules

SPECS = ("spec/", "config/")
NUMBER = re.compile(r"\b(int|float)\b")
UNIT = re.compile(r"(^|_)(num|per)_|_(bits|bytes|columns|flops|ms|ns|ranks|ratio|rows|s|samples|share|steps|us)$")
"""Parts of a name that state what a number counts."""


def public_classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for name, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield f"{name}:{node.lineno} {node.name}", node


def undocumented_fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield (name, type) of each public field without a docstring, constants without a type left out."""
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            has_docstring = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            name, kind = statement.target.id, ast.unparse(statement.annotation)
            if not has_docstring and not name.startswith("_") and not kind.startswith("ClassVar"):
                yield name, kind


def is_documented(node: ast.ClassDef) -> bool:
    """Whether there is a docstring, or each field of a record has one."""
    if ast.get_docstring(node):
        return True
    has_fields = any(isinstance(statement, ast.AnnAssign) for statement in node.body)
    return has_fields and not list(undocumented_fields(node))


def numbers_without_unit(node: ast.ClassDef) -> list[str]:
    """Return the fields that are numbers, and have neither a docstring nor a unit in their names."""
    return [name for name, kind in undocumented_fields(node) if NUMBER.search(kind) and not UNIT.search(name)]


def test_modules_have_docstrings() -> None:
    assert not [name for name, tree in modules() if tree.body and not ast.get_docstring(tree)]


def test_public_classes_have_docstrings() -> None:
    classes = list(public_classes())
    assert classes
    assert not [name for name, node in classes if not is_documented(node)]


def test_numbers_of_specs_have_units() -> None:
    # A config that mirrors a spec has "See meseta.X" in place of docstrings.
    missing = {
        name: fields
        for name, node in public_classes()
        if name.startswith(SPECS) and not (ast.get_docstring(node) or "").startswith("See ")
        if (fields := numbers_without_unit(node))
    }
    assert not missing


@pytest.mark.parametrize(
    ("source", "is_accepted", "without_unit"),
    [
        ("class A:\n    'A record.'\n    lr: float\n    num_rows: int\n    path: Path", True, ["lr"]),
        ("class A:\n    lr: float\n    'A rate.'\n    wait_s: float\n    'A time.'", True, []),
        ("class A:\n    lr: float | None\n    'A rate.'\n    max_bytes: int", False, []),
        ("class A:\n    'A record.'\n    limit: ClassVar = 3\n    _size: int", True, []),
    ],
)
def test_the_rules_bite(source: str, is_accepted: bool, without_unit: list[str]) -> None:
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.ClassDef)
    assert is_documented(node) is is_accepted
    assert numbers_without_unit(node) == without_unit
