"""Scopes of a Python module: which definition a name refers to."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

Function = ast.FunctionDef | ast.AsyncFunctionDef
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
MODULE, CLASS, FUNCTION, COMPREHENSION = "module", "class", "function", "comprehension"


@dataclass(eq=False)
class Scope:
    """Names that a module, class, function, lambda or comprehension binds."""

    kind: str
    parent: Scope | None = None
    names: set[str] = field(default_factory=set)
    imported: set[str] = field(default_factory=set)
    """The names that import statements bind."""
    global_names: set[str] = field(default_factory=set)
    nonlocal_names: set[str] = field(default_factory=set)

    def module(self) -> Scope:
        scope = self
        while scope.parent is not None:
            scope = scope.parent
        return scope

    def bind(self, name: str, *, is_import: bool = False) -> None:
        if name in self.nonlocal_names:
            return
        scope = self.module() if name in self.global_names else self
        scope.names.add(name)
        if is_import:
            scope.imported.add(name)

    def resolve(self, name: str) -> Scope | None:
        """Return the scope that binds `name` where code of this scope uses it. `None` means a builtin name."""
        if name in self.global_names:
            return self.module()
        scope: Scope | None = self
        while scope is not None:
            # Functions do not see the names of the class around them.
            if name in scope.names and (scope is self or scope.kind != CLASS):
                return scope
            scope = scope.parent
        return None


class Scopes(ast.NodeVisitor):
    """All scopes of a module."""

    def __init__(self, tree: ast.Module) -> None:
        self.root = Scope(MODULE)
        self._of: dict[ast.AST, Scope] = {tree: self.root}
        self._scope = self.root
        for statement in tree.body:
            self.visit(statement)

    def of(self, node: ast.AST) -> Scope:
        """Return the scope that a module, class, function, lambda or comprehension opens."""
        return self._of[node]

    def _visit_in(self, scope: Scope, nodes: Iterable[ast.AST]) -> None:
        outer, self._scope = self._scope, scope
        for node in nodes:
            self.visit(node)
        self._scope = outer

    def _open(self, node: ast.AST, kind: str) -> Scope:
        scope = self._of[node] = Scope(kind, self._scope)
        return scope

    def _visit_function(self, node: Function | ast.Lambda) -> None:
        if not isinstance(node, ast.Lambda):
            self._scope.bind(node.name)
        for part in outer_parts(node):
            self.visit(part)
        scope = self._open(node, FUNCTION)
        for argument in arguments(node.args):
            scope.bind(argument.arg)
        self._visit_in(scope, [node.body] if isinstance(node, ast.Lambda) else node.body)

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _visit_function

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scope.bind(node.name)
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(part)
        self._visit_in(self._open(node, CLASS), node.body)

    def _visit_comprehension(self, node: Comprehension) -> None:
        first, *others = node.generators
        self.visit(first.iter)  # evaluated outside
        inner = [first.target, *first.ifs, *others]
        inner += [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        self._visit_in(self._open(node, COMPREHENSION), inner)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _visit_comprehension

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        scope = self._scope
        while scope.kind == COMPREHENSION and scope.parent is not None:
            scope = scope.parent
        scope.bind(node.target.id)
        self.visit(node.value)

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self._scope.bind(node.id)

    def _visit_import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            self._scope.bind(bound_name(node, alias), is_import=True)

    visit_Import = visit_ImportFrom = _visit_import

    def visit_Global(self, node: ast.Global) -> None:
        self._scope.global_names.update(node.names)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self._scope.nonlocal_names.update(node.names)

    def generic_visit(self, node: ast.AST) -> None:
        name = node.rest if isinstance(node, ast.MatchMapping) else getattr(node, "name", None)
        if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar | ast.MatchMapping) and name is not None:
            self._scope.bind(name)
        super().generic_visit(node)


def outer_parts(node: Function | ast.Lambda) -> Iterator[ast.AST]:
    """Yield the parts of a function that the scope around it evaluates: decorators, defaults and annotations."""
    if not isinstance(node, ast.Lambda):
        yield from node.decorator_list
        yield from [node.returns] if node.returns is not None else []
    yield from node.args.defaults
    yield from (default for default in node.args.kw_defaults if default is not None)
    yield from (argument.annotation for argument in arguments(node.args) if argument.annotation is not None)


def arguments(args: ast.arguments) -> list[ast.arg]:
    """Return the parameters of a function in their order, with `*args` and `**kwargs`."""
    starred = [argument for argument in (args.vararg, args.kwarg) if argument is not None]
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *starred]


def bound_name(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    """Return the name that an import binds: `a` for both `import a.b` and `from b import a`."""
    if alias.asname is not None:
        return alias.asname
    return alias.name.partition(".")[0] if isinstance(node, ast.Import) else alias.name
