"""Python files, parsed once: their docstrings, strings, calls and names, and the values that each scope assigns."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
DocumentedNode = ast.Module | ast.ClassDef | FunctionNode
# Tuples, because `isinstance` of a union takes several times as long, and there are a million nodes.
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
STRINGS = (ast.Constant, ast.JoinedStr)
KEYS = (ast.Constant, ast.Tuple)
NAMING = (ast.Name, ast.Attribute, ast.arg, ast.ExceptHandler)
BINDING = (
    ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr, ast.For, ast.AsyncFor, ast.comprehension, ast.Return
)  # fmt: skip
"""Nodes that assign values to names, and `return`."""


@dataclass(eq=False)
class Scope:
    """A module or function with the expressions that it assigns to each name, also in the bodies of its classes."""

    outer: Scope | None = None
    function: FunctionNode | None = None
    """`None` for a module."""
    values: dict[str, list[ast.expr]] = field(default_factory=dict)
    """A loop variable has the iterable as its value."""
    returns: list[ast.expr] = field(default_factory=list)

    @property
    def module(self) -> Scope:
        """The scope of the module."""
        return self if self.outer is None else self.outer.module

    @property
    def parameters(self) -> set[str]:
        """Names of the function's parameters."""
        if self.function is None:
            return set()
        arguments = self.function.args
        return {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}

    def find(self, name: str) -> tuple[list[ast.expr], Scope]:
        """Return (values assigned to `name`, the innermost scope that assigns it)."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.values:
                return scope.values[name], scope
            scope = scope.outer
        return [], self


@dataclass(frozen=True)
class Docstring:
    """A docstring of a module, class, function or field."""

    kind: str
    """`module`, `class`, `function` or `field`."""
    node: ast.Constant
    owner: DocumentedNode | ast.stmt
    """The definition, or the assignment of the field."""


@dataclass(eq=False)
class Module:
    """A parsed file."""

    path: Path
    text: str
    tree: ast.Module
    scope: Scope = field(default_factory=Scope)
    scopes: list[Scope] = field(default_factory=list)
    docstrings: list[Docstring] = field(default_factory=list)
    strings: list[ast.Constant | ast.JoinedStr] = field(default_factory=list)
    """String literals in the order of the file, without docstrings, subscripts and strings inside f-strings."""
    calls: list[tuple[ast.Call, Scope]] = field(default_factory=list)
    raises: list[tuple[ast.Raise, Scope]] = field(default_factory=list)
    imports: dict[str, str] = field(default_factory=dict)
    """Module that `from` imports take each name from, without leading dots."""
    classes: list[ast.ClassDef] = field(default_factory=list)
    names: list[tuple[str, int]] = field(default_factory=list)
    """Each assigned variable or attribute, parameter and name of a caught exception, with its line."""


def parse(path: Path) -> Module:
    """Parse a file. Raises SyntaxError if it is not valid Python."""
    text = path.read_text(encoding="utf-8", errors="replace")
    module = Module(path, text, ast.parse(text, str(path)))
    module.scopes.append(module.scope)
    _visit_children(module, module.tree, module.scope)
    return module


def nodes_with_owners(tree: ast.Module) -> Iterator[tuple[tuple[str, ...], ast.AST]]:
    """Yield (names of the classes and functions around it, outermost first, node) for every node below `tree`."""
    waiting: list[tuple[tuple[str, ...], ast.AST]] = [((), tree)]
    while waiting:
        owners, node = waiting.pop()
        inner = (*owners, node.name) if isinstance(node, ast.ClassDef | FunctionNode) else owners
        for child in ast.iter_child_nodes(node):
            yield inner, child
            waiting.append((inner, child))


def _visit_children(module: Module, node: ast.AST, scope: Scope) -> None:
    if isinstance(body := getattr(node, "body", None), list):
        _collect_docstrings(module, node, body)
    for name in node._fields:  # as ast.iter_child_nodes, which takes twice as long
        value = getattr(node, name, None)
        for child in value if isinstance(value, list) else (value,):
            if isinstance(child, ast.AST) and child._fields:  # operators and contexts have none
                _visit(module, child, scope)


def _visit(module: Module, node: ast.AST, scope: Scope) -> None:
    if isinstance(node, ast.Name):  # a third of all nodes
        _record_names(module, node)
        return
    if isinstance(node, STRINGS):
        _visit_string(module, node, scope)
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring, or a constant without effect
    if isinstance(node, ast.Subscript) and isinstance(node.slice, KEYS):
        _visit(module, node.value, scope)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else []
        for part in parts:
            if not isinstance(part, ast.Constant):  # a key, or a shape of jaxtyping
                _visit(module, part, scope)
        return
    if isinstance(node, NAMING):
        _record_names(module, node)
    if isinstance(node, BINDING):
        _record_values(node, scope)
    elif isinstance(node, ast.Call):
        module.calls.append((node, scope))
    elif isinstance(node, ast.Raise):
        module.raises.append((node, scope))
    elif isinstance(node, ast.ImportFrom) and node.module:
        module.imports |= {alias.asname or alias.name: node.module for alias in node.names}
    elif isinstance(node, ast.ClassDef):
        module.classes.append(node)
    elif isinstance(node, FUNCTIONS):
        scope = Scope(outer=scope, function=node)
        module.scopes.append(scope)
    _visit_children(module, node, scope)


def _visit_string(module: Module, node: ast.Constant | ast.JoinedStr, scope: Scope) -> None:
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            module.strings.append(node)
        return
    module.strings.append(node)
    num_strings = len(module.strings)
    for part in node.values:
        if isinstance(part, ast.FormattedValue):
            _visit(module, part.value, scope)
    del module.strings[num_strings:]


def _record_names(module: Module, node: ast.AST) -> None:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        module.names.append((node.id, node.lineno))
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        module.names.append((node.attr, node.lineno))
    elif isinstance(node, ast.arg):
        module.names.append((node.arg, node.lineno))
    elif isinstance(node, ast.ExceptHandler) and node.name:
        module.names.append((node.name, node.lineno))


def _record_values(node: ast.AST, scope: Scope) -> None:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            _bind(target, node.value, scope)
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
        _bind(node.target, node.value, scope)
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        _bind(node.target, node.iter, scope)
    elif isinstance(node, ast.Return) and node.value is not None:
        scope.returns.append(node.value)


def _bind(target: ast.expr, value: ast.expr, scope: Scope) -> None:
    """Record that `target` is assigned `value`. An element of a tuple that cannot be matched is assigned all of it."""
    if isinstance(target, ast.Name):
        scope.values.setdefault(target.id, []).append(value)
    elif isinstance(target, ast.Tuple | ast.List):
        matches = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
        values: Iterable[ast.expr] = value.elts if matches else [value] * len(target.elts)  # type: ignore[attr-defined]
        for element, part in zip(target.elts, values, strict=True):
            _bind(element, part, scope)


def _collect_docstrings(module: Module, node: ast.AST, body: list[ast.stmt]) -> None:
    """Record the docstring that begins a body of statements, and those of fields assigned in it."""
    kind = {ast.Module: "module", ast.ClassDef: "class"}.get(type(node), "function")
    for previous, statement in zip([None, *body], body, strict=False):
        match statement:
            case ast.Expr(value=ast.Constant(value=str()) as text):
                if previous is None and isinstance(node, DocumentedNode):
                    module.docstrings.append(Docstring(kind, text, node))
                elif isinstance(previous, ast.Assign | ast.AnnAssign):
                    module.docstrings.append(Docstring("field", text, previous))
