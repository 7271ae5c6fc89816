"""Definitions and uses of names in one Python file, for the checks over a whole tree."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass, field

from tree_compare.literals import last_name
from tree_compare.scopes import Function, Scopes, arguments, bound_name


@dataclass(eq=False)
class ClassIndex:
    """A class of one file."""

    path: str
    name: str
    bases: tuple[str, ...]
    line: int
    names: dict[str, int] = field(default_factory=dict)
    """Names of its body and attributes of `self` and `cls`, with the line of the first use."""
    fields: set[str] = field(default_factory=set)
    """Annotated names of the body, which a generated constructor takes."""


@dataclass(frozen=True)
class Use:
    """An attribute, or a keyword of a call, of an object that is not `self`."""

    name: str
    line: int
    text: str
    owner: str
    """The name before the dot, or the last name of the called function. Empty for other expressions."""
    root: str = ""
    """The name at the beginning of the expression, such as `a` of `a.b.c`."""
    is_keyword: bool = False


@dataclass
class FileIndex:
    """Names of one Python file."""

    path: str
    scopes: Scopes
    classes: list[ClassIndex] = field(default_factory=list)
    parameters: dict[str, list[set[str]]] = field(default_factory=lambda: defaultdict(list))
    """Parameters of each function of that name. A set with `**` takes any keyword."""
    attributes: dict[str, int] = field(default_factory=dict)
    """Attributes that are defined: in class bodies and by assignments to `x.name`."""
    uses: list[Use] = field(default_factory=list)
    imports: list[tuple[str, str, str, int]] = field(default_factory=list)
    """(module, name, bound name, line). The name is empty for `import module`."""

    @property
    def names(self) -> set[str]:
        """Names that the module defines."""
        return self.scopes.root.names


class _Indexer(ast.NodeVisitor):
    def __init__(self, index: FileIndex) -> None:
        self.index = index
        self.classes: list[ClassIndex] = []
        self.selves: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        bases = tuple(filter(None, map(last_name, node.bases)))
        record = ClassIndex(self.index.path, node.name, bases, node.lineno)
        self.index.classes.append(record)
        for name in self.index.scopes.of(node).names:
            record.names[name] = node.lineno
            self.index.attributes.setdefault(name, node.lineno)
        targets = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
        record.fields = {target.id for target in targets if isinstance(target, ast.Name)}
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(part)
        self.classes.append(record)
        selves, self.selves = self.selves, []
        for part in node.body:
            self.visit(part)
        self.classes.pop()
        self.selves = selves

    def _visit_function(self, node: Function) -> None:
        names = {argument.arg for argument in arguments(node.args)} | ({"**"} if node.args.kwarg else set())
        function = node.name
        if self.classes and not self.selves:
            function = self.classes[-1].name if node.name == "__init__" else node.name
        self.index.parameters[function].append(names)
        self.selves.append(self_name(node, is_method=bool(self.classes) and not self.selves))
        self.generic_visit(node)
        self.selves.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = _visit_function

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        if not isinstance(node.ctx, ast.Load):
            self.index.attributes.setdefault(node.attr, node.lineno)
        if self.classes and is_own(node, self.selves):
            self.classes[-1].names.setdefault(node.attr, node.lineno)
        else:
            text = f"{owner or '...'}.{node.attr}"
            self.index.uses.append(Use(node.attr, node.lineno, text, owner, _root(node)))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        owner = last_name(node.func)
        if owner == "partial" and node.args:
            owner = last_name(node.args[0])
        for keyword in node.keywords:
            name = keyword.arg or "**"
            text = f"{owner}({name}=)"
            self.index.uses.append(Use(name, keyword.value.lineno, text, owner, _root(node.func), is_keyword=True))
        self.generic_visit(node)

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        for name in node.kwd_attrs:
            text = f"{last_name(node.cls)}({name}=)"
            self.index.uses.append(Use(name, node.lineno, text, last_name(node.cls)))
        self.generic_visit(node)

    def _visit_import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            module = alias.name if isinstance(node, ast.Import) else "." * node.level + (node.module or "")
            name = "" if isinstance(node, ast.Import) else alias.name
            self.index.imports.append((module, name, bound_name(node, alias), node.lineno))

    visit_Import = visit_ImportFrom = _visit_import


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def self_name(node: Function, *, is_method: bool) -> str:
    """Return the name of the parameter through which a method sees its object or class."""
    positional = [*node.args.posonlyargs, *node.args.args]
    is_static = any(last_name(decorator) == "staticmethod" for decorator in node.decorator_list)
    return positional[0].arg if is_method and positional and not is_static else ""


def is_own(node: ast.Attribute, selves: list[str]) -> bool:
    """Whether an attribute is one of the object itself: `self.name` or `super().name`."""
    value = node.value
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and bool(value.id) and value.id in selves[:1]


def index_file(path: str, tree: ast.Module, scopes: Scopes) -> FileIndex:
    """Return the names of one file."""
    index = FileIndex(path, scopes)
    indexer = _Indexer(index)
    for statement in tree.body:
        indexer.visit(statement)
    return index
