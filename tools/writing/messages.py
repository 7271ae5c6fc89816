"""Messages of Python files: errors, help texts, log lines and printed texts, wherever their words are written.

A message is often built before it is used: in a variable, by a helper function, or by a function that returns an error.
The search therefore starts at each `raise`, constructor of an error, `help=`, logging call and `print`. It follows
names to their assignments, and calls to the values that the called functions return. If a function passes a parameter
on into a message, the arguments of its calls are messages, too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from writing.source import Module, Scope

RAISED = "raised"
"""Kind of a literal message in a `raise` statement."""
ERROR = "error"
"""Kind of the other messages of errors."""
HELP, LOG, PRINT = "help", "log", "print"
PRIORITY = (RAISED, ERROR, HELP, LOG, PRINT)
"""A string that belongs to messages of several kinds counts as the first of these."""

ERROR_NAME = re.compile(r"\w*(Error|Exception|Warning)$|BadParameter$|SystemExit$")
HELP_KEYWORDS = {"help", "short_help", "epilog", "description"}
LOG_METHODS = re.compile(r"(debug|info|warn|warning|error|exception|critical|fatal|log)(_\w+)?$")
LOGGER = re.compile(r"log", re.IGNORECASE)
PRINT_FUNCTIONS = {"print", "pprint", "echo", "secho"}
PHRASE = re.compile(r"[^\W\d_]+\S*\s+\S*[^\W\d_]+")
"""Two words, one after the other."""
MAX_DEPTH = 3
"""Variables followed when a message is rendered."""

Literal = ast.Constant | ast.JoinedStr


@dataclass(frozen=True)
class _Use:
    """An expression whose strings are messages of `kind`."""

    kind: str
    expression: ast.expr
    scope: Scope
    is_indirect: bool = False
    """Whether only phrases count, because the expression may also hold keys and names."""


class MessageIndex:
    """Kind of each string literal that is part of a message, over all modules of a tree."""

    def __init__(self, modules: Iterable[Module]) -> None:
        self._modules = {id(module.scope): module for module in modules}
        self._errors = _error_classes(node for module in self._modules.values() for node in module.classes)
        self._functions: dict[str, list[Scope]] = {}
        for scope in (scope for module in self._modules.values() for scope in module.scopes):
            if scope.function is not None:
                self._functions.setdefault(scope.function.name, []).append(scope)
        self._forwarders: set[Scope] = set()
        """Functions that pass a parameter on into a message."""
        self._kinds: dict[int, str] = {}
        self._followed: set[tuple[int, str]] = set()
        uses = list(self._direct_uses())
        uses += self._forwarded_uses(uses)
        for use in sorted(uses, key=lambda use: PRIORITY.index(use.kind)):
            self._mark(use.expression, use.kind, use.scope, use.is_indirect)

    def kind(self, node: Literal) -> str | None:
        """Return the kind of message that a string literal belongs to, or `None`."""
        return self._kinds.get(id(node))

    def error_messages(self) -> Iterator[tuple[Path, int, str]]:
        """Yield (path, line, message) for each error, with `{name}` in place of an interpolated value."""
        for module in self._modules.values():
            raised = {id(statement.exc) for statement, _ in module.raises}
            for call, scope in module.calls:
                is_error = id(call) in raised or self._kind_of_call(call) == ERROR
                if call.args and is_error and self._called(call, scope) not in self._forwarders:
                    yield module.path, call.lineno, _render(call.args[0], scope)

    def _direct_uses(self) -> Iterator[_Use]:
        for module in self._modules.values():
            raised = {id(statement.exc) for statement, _ in module.raises}
            for call, scope in module.calls:
                kind = ERROR if id(call) in raised else self._kind_of_call(call)
                for number, argument in enumerate(call.args if kind else []):
                    is_raised = id(call) in raised and number == 0 and isinstance(argument, Literal)
                    yield _Use(RAISED if is_raised else kind or "", argument, scope)
                for keyword in call.keywords:
                    if keyword.arg in HELP_KEYWORDS:
                        yield _Use(HELP, keyword.value, scope)
                    elif kind:
                        yield _Use(kind, keyword.value, scope, is_indirect=True)

    def _forwarded_uses(self, uses: list[_Use]) -> list[_Use]:
        """Find functions that pass a parameter on into one of `uses`. Return the arguments of the calls of these
        functions, and of the functions that pass a parameter on into those."""
        calls: dict[Scope, list[tuple[ast.Call, Scope]]] = {}
        for call, scope in (pair for module in self._modules.values() for pair in module.calls):
            if (called := self._called(call, scope)) is not None:
                calls.setdefault(called, []).append((call, scope))
        forwarded: list[_Use] = []
        waiting = list(uses)
        while waiting:
            use = waiting.pop()
            if use.scope in self._forwarders or use.scope.parameters.isdisjoint(_interpolated(use.expression)):
                continue
            self._forwarders.add(use.scope)
            kind = ERROR if use.kind == RAISED else use.kind
            for call, scope in calls.get(use.scope, []):
                values = [*call.args, *(keyword.value for keyword in call.keywords)]
                new = [_Use(kind, value, scope, is_indirect=True) for value in values]
                forwarded += new
                waiting += new
        return forwarded

    def _kind_of_call(self, call: ast.Call) -> str | None:
        """Return the kind of message that a call of a function outside the tree makes of its arguments."""
        name = _last_name(call.func)
        if name in self._errors or ERROR_NAME.match(name):
            return ERROR
        if isinstance(call.func, ast.Name):
            return PRINT if name in PRINT_FUNCTIONS else None
        value = call.func.value if isinstance(call.func, ast.Attribute) else call.func
        owner = _last_name(value.func if isinstance(value, ast.Call) else value)
        if (LOG_METHODS.match(name) and LOGGER.search(owner)) or (owner == "warnings" and name == "warn"):
            return LOG
        is_print = name in PRINT_FUNCTIONS or (name == "write" and owner in {"stdout", "stderr"})
        return PRINT if is_print else None

    def _called(self, call: ast.Call, scope: Scope) -> Scope | None:
        """Return the function of the tree that is called: the only one of its name, the one of the same module, or the
        one of the module that the name is imported from."""
        name = _last_name(call.func)
        candidates = self._functions.get(name, [])
        if len(candidates) > 1:
            source = self._modules[id(scope.module)].imports.get(name, "").replace(".", "/")
            local = [candidate for candidate in candidates if candidate.module is scope.module]
            imported = [c for c in candidates if source and source in self._modules[id(c.module)].path.as_posix()]
            candidates = local or imported
        return candidates[0] if len(candidates) == 1 else None

    def _mark(self, node: ast.expr, kind: str, scope: Scope, is_indirect: bool) -> None:
        """Set the kind of the strings of an expression, and of the strings that its names and calls refer to."""
        if isinstance(node, Literal):
            if not is_indirect or PHRASE.search(literal_text(node, placeholder="value")):
                self._kinds.setdefault(id(node), kind)
        elif isinstance(node, ast.Name):
            values, owner = scope.find(node.id)
            for value in values:
                self._follow(value, kind, owner)
        elif isinstance(node, ast.Call) and (called := self._called(node, scope)) is not None:
            for returned in called.returns:
                self._follow(returned, kind, called)
        is_indirect = is_indirect or not isinstance(node, ast.IfExp | ast.BinOp | ast.BoolOp)
        for part in _text_parts(node):
            self._mark(part, kind, scope, is_indirect)

    def _follow(self, node: ast.expr, kind: str, scope: Scope) -> None:
        kind = ERROR if kind == RAISED else kind
        if (id(node), kind) not in self._followed:
            self._followed.add((id(node), kind))
            self._mark(node, kind, scope, is_indirect=True)


def literal_text(node: Literal, placeholder: str | None = "") -> str:
    """Return the text of a string literal with a placeholder for each interpolated value. `None`: its expression."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    text = ""
    for part in node.values:
        if isinstance(part, ast.Constant):
            text += str(part.value)
        elif isinstance(part, ast.FormattedValue):
            text += f"{{{ast.unparse(part.value)}}}" if placeholder is None else placeholder
    return text


def _text_parts(node: ast.expr) -> list[ast.expr]:
    """Return the sub-expressions whose strings become part of the value of `node`."""
    match node:
        case ast.JoinedStr():
            return [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
        case ast.IfExp():
            return [node.body, node.orelse]
        case ast.BinOp():
            return [node.left, node.right]
        case ast.BoolOp():
            return node.values
        case ast.List() | ast.Tuple() | ast.Set():
            return node.elts
        case ast.Dict():
            return node.values
        case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
            return [node.elt]
        case ast.Subscript() | ast.Starred() | ast.NamedExpr() | ast.Await():
            return [node.value]
        case ast.Call():
            method_of = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            return [*method_of, *node.args, *(keyword.value for keyword in node.keywords)]
    return []


def _interpolated(node: ast.expr) -> Iterator[str]:
    """Yield the names that an expression is, or contains in replacement fields and concatenations."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.JoinedStr | ast.BinOp | ast.IfExp | ast.BoolOp | ast.Starred):
        for part in _text_parts(node):
            yield from _interpolated(part)


def _render(node: ast.expr, scope: Scope, depth: int = 0) -> str:
    """Format a message as a user reads it, with `{name}` in place of a value that is known only when the code runs."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr():
            return "".join(_render(part, scope, depth) for part in node.values)
        case ast.FormattedValue():
            text = _render(node.value, scope, depth)
            return f"'{text}'" if node.conversion == ord("r") else text
        case ast.BinOp(op=ast.Add()):
            return _render(node.left, scope, depth) + _render(node.right, scope, depth)
        case ast.BinOp(op=ast.Mod() | ast.Mult()):
            return _render(node.left, scope, depth)
        case ast.IfExp():
            return _render(node.body, scope, depth)
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)), attr="format")):
            return text
        case ast.Name():
            values, owner = scope.find(node.id)
            if len(values) == 1 and depth < MAX_DEPTH and isinstance(values[0], Literal | ast.IfExp):
                return _render(values[0], owner, depth + 1)
    return f"{{{_label(node)}}}"


def _label(node: ast.expr) -> str:
    """Return a name for the value of an expression."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return node.attr
        case ast.Subscript():
            return _label(node.value)
        case ast.Call():
            return _label(node.args[0]) if node.args else _label(node.func)
    return "value"


def _last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _error_classes(classes: Iterable[ast.ClassDef]) -> set[str]:
    """Return the names of the classes that inherit from an error."""
    bases = {node.name: [_last_name(base) for base in node.bases] for node in classes}
    errors: set[str] = set()
    while True:
        more = {
            name
            for name, parents in bases.items()
            if name not in errors and any(parent in errors or ERROR_NAME.match(parent) for parent in parents)
        }
        if not more:
            return errors
        errors |= more
