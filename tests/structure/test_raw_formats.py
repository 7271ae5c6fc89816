"""Only data/formats/ depends on the raw format of a file."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from meseta.data.formats.registry import FORMATS
from source_tree import modules

HOME = "data/formats/"


def asked(trees: Iterable[tuple[str, ast.Module]]) -> list[str]:
    """Return the places outside of data/formats/ that compare or match a value with the name of a raw format."""
    names = {raw_format.name for raw_format in FORMATS}
    places = []
    for path, tree in trees:
        for node in ast.walk(tree) if not path.startswith(HOME) else ():
            literals: list[ast.AST] = []
            if isinstance(node, ast.Compare):
                literals = [inner for side in (node.left, *node.comparators) for inner in ast.walk(side)]
            elif isinstance(node, ast.MatchValue):
                literals = [node.value]
            if any(isinstance(literal, ast.Constant) and literal.value in names for literal in literals):
                places.append(f"{path}:{node.lineno}")
    return places


def test_nothing_else_asks_which_format_a_file_has() -> None:
    assert asked(modules()) == []


def test_the_rule_bites() -> None:
    for text in ("source.kind == 'csv'", "kind in ('libsvm', None)", "match kind:\n    case 'parquet':\n        pass"):
        assert asked([("data/read/a.py", ast.parse(text))]) != [], text
        assert asked([("data/formats/a.py", ast.parse(text))]) == []
