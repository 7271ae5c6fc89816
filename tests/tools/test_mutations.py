"""Tests of tools/compare_trees.py on mutated files: changes of behavior are reported, changes of layout accepted."""

from __future__ import annotations

import ast
import os
import random
from collections.abc import Iterator
from itertools import islice

import pytest
from tree_compare.compare import Options, compare_trees

from sampling import sample
from source_tree import SOURCE

FILES = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if path.stat().st_size > 1000)
NUM_MUTATIONS = 25 if os.environ.get("MESETA_SOAK") else 8
UNCHANGED = (ast.Name, ast.expr_context, ast.operator, ast.cmpop, ast.arguments, ast.arg, ast.alias, ast.keyword)
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
COMPARISONS = {ast.Lt: ast.LtE, ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.In: ast.NotIn, ast.Gt: ast.Lt}


def stripped(tree: ast.Module) -> ast.Module:
    """Return the tree without docstrings."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list):
                kept = [
                    part for part in body if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
                ]
                setattr(node, name, kept or ([ast.Pass()] if body else []))
    return ast.fix_missing_locations(tree)


def mutate(node: ast.AST, random: random.Random) -> bool:
    """Change the behavior of one node, and return whether it was possible."""
    match node:
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            node.op = OPERATORS[type(op)]()
        case ast.BinOp() | ast.Compare(comparators=[_]) if random.random() < 0.5:
            other = node.right if isinstance(node, ast.BinOp) else node.comparators[0]
            node.left, swapped = other, node.left
            if isinstance(node, ast.BinOp):
                node.right = swapped
            else:
                node.comparators = [swapped]
        case ast.Compare(ops=[op, *_]) if type(op) in COMPARISONS:
            node.ops[0] = COMPARISONS[type(op)]()
        case ast.Constant(value=bool() | int() | float()):
            node.value = not node.value if isinstance(node.value, bool) else node.value + 1
        case ast.Constant(value=str()):
            node.value += "x"
        case ast.Attribute() if not isinstance(node.ctx, ast.Store):
            node.attr += "_"
        case ast.Call(args=[_, _, *_]):
            node.args[0], node.args[1] = node.args[1], node.args[0]
        case ast.Call(keywords=[_, *_]):
            node.keywords.pop()
        case ast.If() | ast.IfExp() | ast.While():
            node.test = ast.UnaryOp(ast.Not(), node.test)
        case ast.Return(value=ast.AST()):
            node.value = ast.Constant(None)
        case ast.FormattedValue():
            node.conversion = ord("a") if node.conversion == -1 else -1
        case ast.FunctionDef(decorator_list=[_, *_]):
            node.decorator_list.pop()
        case ast.FunctionDef(args=ast.arguments(defaults=[_, *_])):
            node.args.defaults[-1] = ast.Constant("another")
        case ast.FunctionDef(body=[_, _, *_]):
            del node.body[random.randrange(len(node.body))]
        case ast.ClassDef(bases=[_, *_]):
            node.bases.pop()
        case ast.ImportFrom(names=[_, _, *_]):
            node.names.pop()
        case ast.Raise() | ast.Assert():
            node.__dict__.update({name: None for name in ("exc", "cause", "msg") if getattr(node, name, None)})
        case _:
            return False
    return True


def swap_names(function: ast.FunctionDef, random: random.Random) -> bool:
    """Replace one local name of a function by another one, in one place."""
    stored = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    loads = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id in stored]
    if len(stored) < 2:
        return False
    name = random.choice(loads)
    name.id = random.choice(sorted(stored - {name.id}))
    return True


def mutations(text: str, seed: int) -> Iterator[ast.Module]:
    """Yield changed copies of a module, each at another place."""
    draw = random.Random(seed)
    places = [index for index, node in enumerate(ast.walk(ast.parse(text))) if not isinstance(node, UNCHANGED)]
    draw.shuffle(places)
    for place in places:
        tree = ast.parse(text)
        node = next(islice(ast.walk(tree), place, None))
        is_function = isinstance(node, ast.FunctionDef) and draw.random() < 0.5
        if swap_names(node, draw) if is_function else mutate(node, draw):
            yield ast.fix_missing_locations(tree)


def differences(before: str, after: str) -> list[str]:
    trees = ({"src/meseta/a.py": text.encode()} for text in (before, after))
    return sorted(map(str, compare_trees(*trees, Options()).findings.differences))


@pytest.mark.parametrize("file", sample(FILES, 6, seed=0))
def test_a_changed_file_is_found_and_a_reformatted_one_accepted(file: str) -> None:
    text = (SOURCE / file).read_text()
    code = ast.unparse(stripped(ast.parse(text)))
    assert differences(text, code) == []
    same = ast.dump(ast.parse(code))
    for changed in islice(mutations(code, seed=len(text)), NUM_MUTATIONS):
        if ast.dump(ast.parse(ast.unparse(changed))) != same:
            assert differences(text, ast.unparse(changed)) != [], ast.unparse(changed)
