"""Normal forms of string literals, docstrings and empty statements."""

from __future__ import annotations

import ast
from itertools import groupby

Literal = ast.Constant | ast.JoinedStr


def statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a body that do something: no docstrings, no `pass`, no `...`."""
    return [statement for statement in body if not _is_empty(statement)]


def _is_empty(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Pass):
        return True
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
        return False
    return isinstance(statement.value.value, str) or statement.value.value is ...


def is_text(node: ast.AST) -> bool:
    """Whether `node` is a string constant."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def joined(node: ast.AST) -> ast.AST:
    """Return a literal in its shortest form: `"a" + "b"` and `f"a" "b"` become `"ab"`. Return other nodes as is."""
    if isinstance(node, ast.JoinedStr):
        return _merge(node.values, node)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = joined(node.left), joined(node.right)
        contents = [side.value for side in (left, right) if isinstance(side, ast.Constant)]
        texts = [content for content in contents if isinstance(content, bytes)]
        if len(texts) == 2:
            return ast.copy_location(ast.Constant(b"".join(texts)), node)
        if _is_string(left) and _is_string(right):
            return _merge([*_values(left), *_values(right)], node)
    return node


def _is_string(node: ast.AST) -> bool:
    return is_text(node) or isinstance(node, ast.JoinedStr)


def _values(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.JoinedStr):
        return node.values
    return [node] if isinstance(node, ast.expr) else []


def _merge(values: list[ast.expr], place: ast.AST) -> Literal:
    """Return one literal of the parts of an f-string, with neighboring constants merged."""
    merged: list[ast.expr] = []
    for is_constant, group in groupby(values, is_text):
        if not is_constant:
            merged.extend(group)
        elif text := "".join(getattr(value, "value", "") for value in group):
            merged.append(ast.copy_location(ast.Constant(text), place))
    if not merged:
        return ast.copy_location(ast.Constant(""), place)
    if len(merged) == 1 and isinstance(merged[0], ast.Constant):
        return merged[0]
    return ast.copy_location(ast.JoinedStr(merged), place)


def starts_text(node: ast.AST) -> bool:
    """Whether `node` is a string literal or a sum with one."""
    node = joined(node)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return starts_text(node.left) or starts_text(node.right)
    return _is_string(node)


def interpolated(node: ast.AST) -> list[ast.AST]:
    """Return the expressions that a message inserts into its text, in their order."""
    if not starts_text(node):
        return [node]
    node = joined(node)
    if isinstance(node, ast.BinOp):
        return [*interpolated(node.left), *interpolated(node.right)]
    return [value for value in _values(node) if isinstance(value, ast.FormattedValue)]


def last_name(node: ast.AST | None) -> str:
    """Return `c` of the expressions `c`, `a.b.c` and `c[...]`. Empty for others."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    return node.id if isinstance(node, ast.Name) else ""
