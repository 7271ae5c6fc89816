"""Text positions: the expressions of a program whose string constants only people read."""

from __future__ import annotations

import ast
import builtins
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tree_compare.literals import is_text, last_name
from tree_compare.scopes import Function, arguments

PRINT_CALLS = {"print", "echo", "secho"}
MESSAGE_CALLS = PRINT_CALLS | {"warn", "warning", "log", "debug", "info", "error", "exception", "critical", "note"}
MESSAGE_KEYWORDS = {"help"}
# Report calls: the positions of their arguments that are texts.
REPORT_CALLS = {"tag": range(1, 20), "text": range(20), "escape": range(20)}
TEXT_FUNCTIONS = {"__str__"}
TEXT_METHODS = {"join", "format"}
MAX_ROUNDS = 5
BUILTIN_ERRORS = {
    name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)
}


@dataclass
class MessageRules:
    """What counts as a message call in one tree."""

    errors: set[str] = field(default_factory=lambda: set(BUILTIN_ERRORS))
    """Names of exception classes."""
    parameters: dict[str, set[tuple[int, str]]] = field(default_factory=dict)
    """Parameters, by the name of their function, that are used in text positions only: (position, name)."""
    functions: set[str] = field(default_factory=set)
    """Functions and properties whose results are used in text positions only."""
    _parts: dict[Function, _Parts] = field(default_factory=dict)

    def is_message_call(self, name: str) -> bool:
        return name in MESSAGE_CALLS or name in self.errors

    def parts(self, node: Function) -> _Parts:
        """Return the names and calls of a function, collected once."""
        if node not in self._parts:
            self._parts[node] = _Parts(node)
        return self._parts[node]

    def writes_messages(self, node: Function) -> bool:
        """Whether a function may have text positions."""
        parts = self.parts(node)
        return (
            parts.raises
            or node.name in self.functions | TEXT_FUNCTIONS
            or any(
                self.is_message_call(name) or name in self.parameters or name in REPORT_CALLS for name in parts.calls
            )
        )


class _Parts:
    """Names and calls of one function, with the functions inside it."""

    def __init__(self, node: Function) -> None:
        self.loads: list[ast.Name] = []
        self.bound = {argument.arg for argument in arguments(node.args)}
        self.calls: set[str] = set()
        self.raises = False
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
                self.loads.append(part)
            elif isinstance(part, ast.Name):
                self.bound.add(part.id)
            elif isinstance(part, ast.Call):
                self.calls.add(last_name(part.func))
                self.raises = self.raises or any(keyword.arg in MESSAGE_KEYWORDS for keyword in part.keywords)
            self.raises = self.raises or isinstance(part, ast.Raise)


class TextPositions(ast.NodeVisitor):
    """The nodes of one tree that are in text positions: there, string constants may change."""

    def __init__(self, tree: ast.AST, rules: MessageRules) -> None:
        self.nodes: set[ast.AST] = set()
        self.parameters: dict[str, list[set[tuple[int, str]]]] = defaultdict(list)
        """For each function of this tree: the parameters that are used in text positions only."""
        self._rules = rules
        self._text_locals: set[str] = set()
        self._class = ""
        self.visit(tree)

    def mark(self, node: ast.AST) -> None:
        """Add `node` and the parts of it that become text as they are."""
        self.nodes.add(node)
        for part in _text_parts(node):
            self.mark(part)

    def visit_Raise(self, node: ast.Raise) -> None:
        if isinstance(node.exc, ast.Call):
            self._mark_arguments(node.exc)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = last_name(node.func)
        if self._rules.is_message_call(name):
            self._mark_arguments(node)
        sinks = self._rules.parameters.get(name, set())
        positions = {position for position, _ in sinks} | set(REPORT_CALLS.get(name, ()))
        for position, argument in enumerate(node.args):
            if position in positions:
                self.mark(argument)
        for keyword in node.keywords:
            if keyword.arg in MESSAGE_KEYWORDS or any(keyword.arg == parameter for _, parameter in sinks):
                self.mark(keyword.value)
        self.generic_visit(node)

    def _mark_arguments(self, node: ast.Call) -> None:
        """Mark the texts of a message call. A single word may be a key, except where everything is printed."""
        name = last_name(node.func)
        is_error = name not in MESSAGE_CALLS
        for argument in node.args:
            if is_error or name in PRINT_CALLS or not _is_word(argument):
                self.mark(argument)
        for keyword in node.keywords if is_error else ():
            if not _is_word(keyword.value):
                self.mark(keyword.value)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self._class = self._class, node.name
        self.generic_visit(node)
        self._class = outer

    def _visit_function(self, node: Function) -> None:
        outer = self._text_locals
        if not outer and self._rules.writes_messages(node):  # nested functions share the names of the outermost one
            self._text_locals = self._find_text_locals(node)
        self.generic_visit(node)
        self._mark_returns(node)
        self._record_parameters(node)
        self._text_locals = outer

    def _mark_returns(self, node: Function) -> None:
        if node.name in self._rules.functions or node.name in TEXT_FUNCTIONS:
            for returned in _returns(node):
                self.mark(returned)

    visit_FunctionDef = visit_AsyncFunctionDef = _visit_function

    def _visit_assignment(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Name) and target.id in self._text_locals and node.value is not None:
                self.mark(node.value)
        self.generic_visit(node)

    visit_Assign = visit_AnnAssign = visit_AugAssign = _visit_assignment

    def _find_text_locals(self, node: Function) -> set[str]:
        """Return the local names that are loaded in text positions only."""
        parts = self._rules.parts(node)
        loads = [name for name in parts.loads if name.id in parts.bound]
        known: set[str] = set()
        while True:
            # What else is text, if the names that are known to be texts are assigned texts?
            trial = TextPositions(ast.Module([], []), self._rules)
            trial._text_locals, trial._class = known or {""}, self._class
            for statement in node.body:
                trial.visit(statement)
            trial._mark_returns(node)
            found = {name.id for name in loads} - {name.id for name in loads if name not in trial.nodes}
            if found <= known:
                return known
            known = known | found

    def _record_parameters(self, node: Function) -> None:
        name = self._class if node.name == "__init__" and self._class else node.name
        parameters = [argument.arg for argument in arguments(node.args)]
        if self._class and parameters[:1] in (["self"], ["cls"]):
            parameters = parameters[1:]
        loads = self._rules.parts(node).loads if self._rules.writes_messages(node) else []
        texts = {load.id for load in loads} - {load.id for load in loads if load not in self.nodes}
        self.parameters[name].append({(i, name) for i, name in enumerate(parameters) if name in texts})


def _is_word(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value


def _returns(node: Function) -> Iterator[ast.expr]:
    """Yield what a function returns, without the functions inside it."""
    pending: list[ast.AST] = list(node.body)
    while pending:
        part = pending.pop()
        if isinstance(part, ast.Return) and part.value is not None:
            yield part.value
        if not isinstance(part, Function | ast.Lambda):
            pending.extend(ast.iter_child_nodes(part))


def _text_parts(node: ast.AST) -> Iterable[ast.AST]:
    """Return the parts of an expression that become text if the expression does."""
    match node:
        case ast.JoinedStr():
            return [value.value for value in node.values if isinstance(value, ast.FormattedValue)]
        case ast.BinOp(op=ast.Add() | ast.Mult() | ast.Mod()):
            return [node.left, node.right]
        case ast.IfExp():
            return [node.body, node.orelse]
        case ast.BoolOp():
            return node.values
        case ast.Tuple() | ast.List() | ast.Set():
            return node.elts
        case ast.Starred() | ast.NamedExpr() | ast.FormattedValue():
            return [node.value]
        case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
            return [node.elt]
        case ast.Subscript(value=ast.Dict() as table):
            return table.values
        case ast.Subscript(value=ast.Tuple() | ast.List()):
            return [node.value]
        case ast.Call(func=ast.Attribute(attr=method)) if method in TEXT_METHODS:
            return [node.func.value, *node.args, *(keyword.value for keyword in node.keywords)]  # type: ignore[attr-defined]
    return []


def find_rules(trees: Mapping[str, ast.AST]) -> MessageRules:
    """Return the message calls of a tree: its exceptions, and functions that pass texts on to message calls only."""
    rules = MessageRules()
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    size = 0
    while size != len(rules.errors):
        size = len(rules.errors)
        rules.errors |= {node.name for node in classes if any(last_name(base) in rules.errors for base in node.bases)}
    references = Counter(_references(trees.values()))
    for _ in range(MAX_ROUNDS):
        parameters: dict[str, list[set[tuple[int, str]]]] = defaultdict(list)
        calls: Counter[str] = Counter()
        for tree in trees.values():
            positions = TextPositions(tree, rules)
            for name, sinks in positions.parameters.items():
                parameters[name].extend(sinks)
            for node in positions.nodes:
                used = node.func if isinstance(node, ast.Call) else node
                calls.update([last_name(used)] if isinstance(used, ast.Name | ast.Attribute) else [])
        # Functions of one name must agree, since a call is known by its name alone.
        agreed = {name: set.intersection(*found) for name, found in parameters.items()}
        functions = {name for name in parameters if calls[name] and calls[name] == references[name]}
        found = {name: sinks for name, sinks in agreed.items() if sinks}
        if found == rules.parameters and functions == rules.functions:
            break
        rules.parameters, rules.functions = found, functions
    return rules


def _references(trees: Iterable[ast.AST]) -> Iterator[str]:
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                yield last_name(node)


def prose(tree: ast.AST) -> set[ast.AST]:
    """Return the strings with a space in them that are no keys and are not compared with anything."""
    found: set[ast.AST] = set()
    pending = [tree]
    while pending:
        node = pending.pop()
        values = node.values if isinstance(node, ast.JoinedStr) else [node]
        if any(is_text(value) and " " in getattr(value, "value", "") for value in values):
            found.add(node)
        if isinstance(node, ast.Dict):
            pending += node.values
        elif isinstance(node, ast.Subscript):
            pending.append(node.value)
        elif not isinstance(node, ast.Compare):
            pending += ast.iter_child_nodes(node)
    return found
