"""Public modules, classes and functions have docstrings, and so have numbers in specs and configs without a unit in
their names. Private functions and other fields need none. The text of each key of a config is held by
tests/config/test_config_keys.py."""

import ast
import re
from collections.abc import Iterator

import pytest

from source_tree import Function, modules

SPECS = ("spec/", "config/")
NUMBER = re.compile(r"\b(int|float)\b")
UNIT = re.compile(r"(^|_)(num|per)_|_(bits|bytes|columns|flops|ms|ns|ranks|ratio|rows|s|samples|share|steps|us)$")
"""Parts of a name that state what a number counts."""


def public_definitions() -> Iterator[tuple[str, Function | ast.ClassDef]]:
    for name, tree in modules():
        for node in tree.body:
            if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
                yield f"{name}:{node.lineno} {node.name}", node


def undocumented_fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield (name, type) of each public field without a docstring, constants without a type left out."""
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            has_docstring = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            name, kind = statement.target.id, ast.unparse(statement.annotation)
            if not has_docstring and not name.startswith("_") and not kind.startswith("ClassVar"):
                yield name, kind


def is_documented(node: Function | ast.ClassDef) -> bool:
    """Whether there is a docstring, or each field of a record has one."""
    if ast.get_docstring(node):
        return True
    has_fields = any(isinstance(statement, ast.AnnAssign) for statement in node.body)
    return isinstance(node, ast.ClassDef) and has_fields and not list(undocumented_fields(node))


def numbers_without_unit(node: ast.ClassDef) -> list[str]:
    """Return the fields that are numbers, and have neither a docstring nor a unit in their names."""
    return [name for name, kind in undocumented_fields(node) if NUMBER.search(kind) and not UNIT.search(name)]


def test_modules_have_docstrings() -> None:
    assert not [name for name, tree in modules() if tree.body and not ast.get_docstring(tree)]


def test_public_functions_and_classes_have_docstrings() -> None:
    definitions = list(public_definitions())
    assert definitions
    assert not [name for name, node in definitions if not is_documented(node)]


def test_numbers_of_specs_have_units() -> None:
    # A config that mirrors a spec has "See meseta.X" in place of docstrings.
    missing = {
        name: fields
        for name, node in public_definitions()
        if isinstance(node, ast.ClassDef)
        and name.startswith(SPECS)
        and not (ast.get_docstring(node) or "").startswith("See ")
        if (fields := numbers_without_unit(node))
    }
    assert not missing


@pytest.mark.parametrize(
    ("source", "is_accepted", "without_unit"),
    [
        ("def f(): 'Return a row.'", True, []),
        ("def f(): pass", False, []),
        ("class A:\n    'A record.'\n    lr: float\n    num_rows: int\n    path: Path", True, ["lr"]),
        ("class A:\n    lr: float\n    'A rate.'\n    wait_s: float\n    'A time.'", True, []),
        ("class A:\n    lr: float | None\n    'A rate.'\n    max_bytes: int", False, []),
        ("class A:\n    'A record.'\n    limit: ClassVar = 3\n    _size: int", True, []),
    ],
)
def test_the_rules_bite(source: str, is_accepted: bool, without_unit: list[str]) -> None:
    node = ast.parse(source).body[0]
    assert isinstance(node, Function | ast.ClassDef)
    assert is_documented(node) is is_accepted
    assert not isinstance(node, ast.ClassDef) or numbers_without_unit(node) == without_unit
