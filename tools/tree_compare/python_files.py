"""Comparison of two versions of a Python file: the syntax trees must be equal but for names and texts."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tree_compare.findings import Difference, Findings, Notice, fragment
from tree_compare.imports import Entry, Import, pair_imports
from tree_compare.index import is_own, self_name
from tree_compare.literals import interpolated, is_text, joined, last_name, statements
from tree_compare.names import NameMaps, keyword_reason
from tree_compare.renames import RenameTable
from tree_compare.scopes import CLASS, MODULE, Comprehension, Function, Scope, Scopes, arguments

Item = ast.stmt | list[Import]
IGNORED_FIELDS = {"ctx", "type_comment", "type_ignores", "kind", "lineno"}


@dataclass(eq=False)
class PythonFile:
    """One version of a Python file."""

    path: str
    tree: ast.Module
    scopes: Scopes
    texts: Set[ast.AST] = frozenset()
    """Nodes whose string constants may change."""
    listed_texts: Set[ast.AST] = frozenset()
    """The same; a person should look at their changes."""


@dataclass
class ClassPairs:
    """Names of one class as (before, after), each with the lines of its first use."""

    path: str
    name: str
    line: int
    pairs: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)


@dataclass
class Context:
    """What a comparison of files knows about the whole trees."""

    table: RenameTable
    keyword_calls: set[tuple[str, str]] = field(default_factory=set)
    """(function, keyword) of each call before; the keyword is `**` if the call unpacks a dictionary."""
    descendants: dict[str, Set[str]] = field(default_factory=dict)
    """Names of the classes before that derive from a class."""


class PythonComparison:
    """Walks both syntax trees of a file together."""

    def __init__(self, before: PythonFile, after: PythonFile, context: Context, findings: Findings) -> None:
        self.before, self.after = before, after
        self.context, self.table, self.findings = context, context.table, findings
        self.classes: list[ClassPairs] = []
        self._maps = NameMaps()
        self._scopes = (before.scopes.root, after.scopes.root)
        self._class: ClassPairs | None = None
        self._selves: list[tuple[str, str]] = []
        self._handlers: dict[type, Callable[[Any, Any], None]] = {
            kind: getattr(self, f"_{kind.__name__}") for kind in (ast.Name, ast.Attribute, ast.keyword, ast.Constant)
        }
        self._handlers |= {ast.ClassDef: self._class_definition, ast.Dict: self._dict, ast.Set: self._unordered}
        self._handlers |= dict.fromkeys((ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda), self._function)
        self._handlers |= dict.fromkeys(
            (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp), self._comprehension
        )
        self._handlers |= dict.fromkeys((ast.Global, ast.Nonlocal), self._scope_statement)
        named = (ast.ExceptHandler, ast.MatchAs, ast.MatchStar, ast.MatchMapping)
        self._handlers |= dict.fromkeys(named, self._named_part)
        self._handlers |= {ast.MatchClass: self._class_pattern, ast.Assign: self._assignment}

    def run(self) -> None:
        self._maps.pair(*self._scopes)
        self._body(self.before.tree.body, self.after.tree.body)
        self.findings.num_local += self._maps.num_local

    # Differences

    def _refuse(
        self, before: ast.AST | None, after: ast.AST | None, reason: str, old: str | None = None, new: str | None = None
    ) -> None:
        """Add a difference between two nodes, or between the names `old` and `new` in them."""
        old_line, new_line = (getattr(node, "lineno", 0) for node in (before, after))
        old, new = fragment(before if old is None else old), fragment(after if new is None else new)
        self.findings.refuse(Difference(self.before.path, old_line, new_line, old, new, reason))

    # Nodes

    def _walk(self, before: ast.AST, after: ast.AST) -> None:
        if before in self.before.texts or before in self.before.listed_texts:
            self._text(before, after)
        else:
            self._exact(before, after)

    def _exact(self, before: ast.AST, after: ast.AST) -> None:
        if isinstance(before, ast.BinOp | ast.JoinedStr) or isinstance(after, ast.BinOp | ast.JoinedStr):
            before, after = joined(before), joined(after)
        if type(before) is not type(after):
            self._refuse(before, after, "different code")
            return
        handler = self._handlers.get(type(before))
        if handler is not None:
            handler(before, after)
        else:
            self._fields(before, after)

    def _fields(self, before: ast.AST, after: ast.AST, skip: Sequence[str] = ()) -> None:
        for name in before._fields:
            if name in IGNORED_FIELDS or name in skip:
                continue
            one, other = getattr(before, name, None), getattr(after, name, None)
            if isinstance(one, list) and isinstance(other, list):
                self._list(one, other, before, after)
            elif isinstance(one, ast.AST) and isinstance(other, ast.AST):
                self._part(one, other, before, after)
            elif one != other:
                self._refuse(before, after, f"different {name}")

    def _part(self, before: ast.AST, after: ast.AST, outer: ast.AST, outer_after: ast.AST) -> None:
        if type(before) is not type(after) and not hasattr(before, "lineno"):
            self._refuse(outer, outer_after, "different operator or structure")
        else:
            self._walk(before, after)

    def _list(self, before: list[Any], after: list[Any], outer: ast.AST, outer_after: ast.AST) -> None:
        if any(isinstance(part, ast.stmt) for part in (*before, *after)):
            self._body(before, after, outer, outer_after)
            return
        if len(before) != len(after):
            self._refuse(outer, outer_after, "different number of parts")
            return
        for one, other in zip(before, after, strict=True):
            if isinstance(one, ast.AST) and isinstance(other, ast.AST):
                self._part(one, other, outer, outer_after)
            elif one != other:
                self._refuse(outer, outer_after, "different code")

    # Texts

    def _text(self, before: Any, after: Any) -> None:
        """Compare two messages: their texts may differ, and the inserted expressions may be in another order."""
        if before in self.before.listed_texts and not _is_equal(before, after):
            self.findings.notices.add(Notice(self.after.path, after.lineno, "text changed", fragment(after)))
        olds, news = interpolated(before), interpolated(after)
        if [before] == olds and [after] == news:
            self._exact(before, after)
            return
        if len(olds) != len(news):
            self._refuse(before, after, "different expressions in a message")
            return
        if all(self._can_pair(old, new) for old, new in zip(olds, news, strict=True)):
            return
        free = list(news)
        for old in olds:
            match = next((new for new in free if self._can_pair(old, new)), None)
            if match is None:
                self._refuse(before, after, "different expressions in a message")
                return
            free.remove(match)

    def _can_pair(self, before: ast.AST, after: ast.AST) -> bool:
        """Compare two expressions; keep what was found about names only if they agree."""
        findings, self.findings = self.findings, Findings()
        mark = self._maps.mark()
        self._exact(before, after)
        found, self.findings = self.findings, findings
        if found.differences:
            self._maps.undo(mark)
            return False
        findings.merge(found)
        return True

    def _string(self, before: Any, after: Any) -> None:
        if before.value == after.value:
            return
        if self.table.explains_text(before.value, after.value):
            text = f"{before.value!r} became {after.value!r}"
            self.findings.notices.add(Notice(self.after.path, after.lineno, "string changed", fragment(text)))
        else:
            self._refuse(before, after, "string changed")

    def _Constant(self, before: ast.Constant, after: ast.Constant) -> None:
        if is_text(before) and is_text(after):
            self._string(before, after)
        # repr tells -0.0 from 0.0, and True from 1.
        elif type(before.value) is not type(after.value) or repr(before.value) != repr(after.value):
            self._refuse(before, after, "constant changed")

    # Statements

    def _body(
        self,
        before: list[ast.stmt],
        after: list[ast.stmt],
        outer: ast.AST | None = None,
        outer_after: ast.AST | None = None,
    ) -> None:
        olds, news = _items(before), _items(after)
        if list(map(type, olds)) == list(map(type, news)):
            ranges = [(slice(len(olds)), slice(len(news)))]
        else:
            ranges = _aligned(olds, news)
        for old_range, new_range in ranges:
            one, other = olds[old_range], news[new_range]
            if len(one) == len(other):
                for old, new in zip(one, other, strict=True):
                    self._item(old, new)
                continue
            for old in one:
                self._refuse(_statement(old), None if other else outer_after, "statement removed")
            for new in other:
                self._refuse(None if one else outer, _statement(new), "statement added")

    def _item(self, before: Item, after: Item) -> None:
        if isinstance(before, list) and isinstance(after, list):
            self._imports(*pair_imports(before, after, self.table))
        elif isinstance(before, ast.stmt) and isinstance(after, ast.stmt):
            self._walk(before, after)
        else:
            self._refuse(_statement(before), _statement(after), "different statement")

    def _imports(self, pairs: list[tuple[Entry, Entry]], gone: list[Entry], added: list[Entry]) -> None:
        for entry in gone:
            self.findings.refuse(Difference(self.before.path, entry.line, 0, entry.text, "", "import removed"))
        for entry in added:
            self.findings.refuse(Difference(self.before.path, 0, entry.line, "", entry.text, "import added"))
        for one, other in pairs:
            before = ast.Name(one.bound, lineno=one.line)
            self._name(one.bound, other.bound, before, ast.Name(other.bound, lineno=other.line))

    def _assignment(self, before: ast.Assign, after: ast.Assign) -> None:
        is_list_of_names = [last_name(target) for target in before.targets] in (["__all__"], ["__slots__"])
        value = after.value
        if is_list_of_names and isinstance(before.value, ast.List | ast.Tuple) and type(before.value) is type(value):
            self._list(before.targets, after.targets, before, after)
            self._unordered(before.value, value)
        else:
            self._fields(before, after)

    # Displays whose order may change with names

    def _unordered(self, before: Any, after: Any) -> None:
        news = self._reordered(before.elts, after.elts)
        self._list(before.elts, after.elts if news is None else [after.elts[index] for index in news], before, after)

    def _dict(self, before: ast.Dict, after: ast.Dict) -> None:
        order = self._reordered(before.keys, after.keys)
        if order is not None:
            after = ast.copy_location(
                ast.Dict([after.keys[index] for index in order], [after.values[index] for index in order]), after
            )
        self._fields(before, after)

    def _reordered(self, before: Sequence[ast.AST | None], after: Sequence[ast.AST | None]) -> list[int] | None:
        """Return the positions of names after renames, if these explain that the order is another one."""
        olds, news = [_label(node) for node in before], [_label(node) for node in after]
        if None in olds or None in news or len(olds) != len(news):
            return None
        return self.table.explains_order([str(old) for old in olds], [str(new) for new in news])

    # Names

    def _Name(self, before: ast.Name, after: ast.Name) -> None:
        self._name(before.id, after.id, before, after)

    def _name(self, old: str, new: str, before: ast.AST, after: ast.AST) -> None:
        """Compare two uses of names that the scopes resolve."""
        one, other = self._scopes[0].resolve(old), self._scopes[1].resolve(new)
        if one is None or other is None:
            if one is not other:
                self._refuse(before, after, "one name is builtin or undefined, the other is defined here")
            elif old != new:
                self._refuse(before, after, "different builtin or undefined name")
            return
        if not self._maps.are_paired(one, other):
            self._refuse(before, after, f"names of different scopes: {one.kind} and {other.kind}")
            return
        conflict = self._maps.unify(one, old, new)
        if conflict is not None:
            self._refuse(before, after, conflict, old, new)
        elif old != new:
            self._accept_name(old, new, one, before, after)
        if one.kind == CLASS and self._class is not None:
            self._add_to_class(old, new, before, after)

    def _accept_name(self, old: str, new: str, scope: Scope, before: ast.AST, after: ast.AST) -> None:
        if scope.kind not in (MODULE, CLASS):
            return
        is_definition = scope.kind == MODULE and old not in scope.imported
        if not self.table.explains(old, new, self.before.path if is_definition else None) and not (
            is_definition and self.table.explains(old, new, self.after.path)
        ):
            self._refuse_rename(old, new, before, after, is_definition)
        else:
            self.findings.renamed.add((old, new))

    def _refuse_rename(self, old: str, new: str, before: ast.AST, after: ast.AST, is_definition: bool) -> None:
        reason = f"rename {old} -> {new} is not in the table"
        if is_definition and self.table.explains(old, new):
            reason = f"the table renames {old} -> {new} in other files only"
        self._refuse(before, after, reason, old, new)

    def _other_name(self, old: str, new: str, before: ast.AST, after: ast.AST) -> None:
        """Compare two names that only the table can explain: attributes and keywords."""
        if old == new:
            return
        if self.table.explains(old, new):
            self.findings.renamed.add((old, new))
        else:
            self._refuse_rename(old, new, before, after, False)

    def _Attribute(self, before: ast.Attribute, after: ast.Attribute) -> None:
        self._walk(before.value, after.value)
        self._other_name(before.attr, after.attr, before, after)
        if self._class is not None:
            olds, news = zip(*self._selves, strict=True) if self._selves else ((), ())
            if is_own(before, list(olds)) and is_own(after, list(news)):
                self._add_to_class(before.attr, after.attr, before, after)

    def _add_to_class(self, old: str, new: str, before: Any, after: Any) -> None:
        if self._class is not None:
            self._class.pairs.setdefault((old, new), (before.lineno, after.lineno))

    def _keyword(self, before: ast.keyword, after: ast.keyword) -> None:
        if before.arg is None or after.arg is None:
            if before.arg is not after.arg:
                self._refuse(before.value, after.value, "different code")
        else:
            self._other_name(before.arg, after.arg, before, after)
        self._walk(before.value, after.value)

    def _scope_statement(self, before: ast.Global, after: ast.Global) -> None:
        if len(before.names) != len(after.names):
            self._refuse(before, after, "different names")
        for old, new in zip(before.names, after.names, strict=False):
            self._name(old, new, before, after)

    def _named_part(self, before: Any, after: Any) -> None:
        name = "rest" if isinstance(before, ast.MatchMapping) else "name"
        self._fields(before, after, skip=[name])
        old, new = getattr(before, name), getattr(after, name)
        if old is not None and new is not None:
            self._name(old, new, before, after)
        elif old is not new:
            self._refuse(before, after, "different code")

    def _class_pattern(self, before: ast.MatchClass, after: ast.MatchClass) -> None:
        self._fields(before, after, skip=["kwd_attrs"])
        if len(before.kwd_attrs) != len(after.kwd_attrs):
            self._refuse(before, after, "different attributes")
        for old, new in zip(before.kwd_attrs, after.kwd_attrs, strict=False):
            self._other_name(old, new, before, after)

    # Definitions and their scopes

    @contextmanager
    def _inside(self, before: ast.AST, after: ast.AST) -> Iterator[None]:
        """Context manager that resolves names in the scopes which two nodes open."""
        outer = self._scopes
        self._scopes = (self.before.scopes.of(before), self.after.scopes.of(after))
        self._maps.pair(*self._scopes)
        yield
        self._scopes = outer

    def _comprehension(self, before: Comprehension, after: Comprehension) -> None:
        if len(before.generators) != len(after.generators):
            self._refuse(before, after, "different number of loops")
            return
        (old, *olds), (new, *news) = before.generators, after.generators
        self._walk(old.iter, new.iter)
        with self._inside(before, after):
            self._fields(old, new, skip=["iter"])
            self._list(olds, news, before, after)
            self._fields(before, after, skip=["generators"])

    def _class_definition(self, before: ast.ClassDef, after: ast.ClassDef) -> None:
        self._name(before.name, after.name, before, after)
        self._fields(before, after, skip=["name", "body"])
        outer = self._class, self._selves
        self._class, self._selves = ClassPairs(self.before.path, before.name, before.lineno), []
        self.classes.append(self._class)
        with self._inside(before, after):
            self._body(before.body, after.body, before, after)
        self._class, self._selves = outer

    def _function(self, before: Function | ast.Lambda, after: Function | ast.Lambda) -> None:
        outer = self._selves
        if isinstance(before, Function) and isinstance(after, Function):
            self._name(before.name, after.name, before, after)
            self._fields(before, after, skip=["name", "args", "body"])
            if self._scopes[0].kind == CLASS:
                self._selves = [(self_name(before, is_method=True), self_name(after, is_method=True))]
        self._parameters(before, after)
        with self._inside(before, after):
            self._fields(before, after, skip=["name", "args", "decorator_list", "returns"])
        self._selves = outer

    def _parameters(self, before: Function | ast.Lambda, after: Function | ast.Lambda) -> None:
        olds, news = arguments(before.args), arguments(after.args)
        if _shape(before.args) != _shape(after.args):
            self._refuse(before, after, "different parameters or defaults")
            return
        self._list(before.args.defaults, after.args.defaults, before, after)
        self._list(before.args.kw_defaults, after.args.kw_defaults, before, after)
        for old, new in zip(olds, news, strict=True):
            if old.annotation is not None and new.annotation is not None:
                self._walk(old.annotation, new.annotation)
        with self._inside(before, after):
            for old, new in zip(olds, news, strict=True):
                self._name(old.arg, new.arg, old, new)
        if isinstance(before, Function):
            names = len(before.args.posonlyargs)
            owner = self._class.name if self._class is not None and self._scopes[0].kind == CLASS else ""
            for old, new in zip(olds[names:], news[names:], strict=True):
                self._keyword_parameter(before, owner, old, new)

    def _keyword_parameter(self, function: Function, owner: str, old: ast.arg, new: ast.arg) -> None:
        if old.arg == new.arg or old in (function.args.vararg, function.args.kwarg):
            return
        if self.table.explains(old.arg, new.arg):
            self.findings.renamed.add((old.arg, new.arg))
            return
        calls, descendants = self.context.keyword_calls, self.context.descendants
        reason = keyword_reason(function, owner, old.arg, calls, descendants)
        if reason is not None:
            text = f"parameter {old.arg} -> {new.arg} of {function.name} is not in the table, and {reason}"
            self._refuse(old, new, text)


def _shape(args: ast.arguments) -> tuple[object, ...]:
    """Return which kinds of parameters there are, and which have defaults and annotations."""
    counts = len(args.posonlyargs), len(args.args), len(args.kwonlyargs), len(args.defaults)
    starred = args.vararg is None, args.kwarg is None
    defaults = [default is None for default in args.kw_defaults]
    return *counts, *starred, defaults, [argument.annotation is None for argument in arguments(args)]


def _label(node: ast.AST | None) -> str | None:
    """Return the string or the dotted name that `node` is."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else None


def _is_equal(before: ast.AST, after: ast.AST) -> bool:
    return ast.dump(joined(before)) == ast.dump(joined(after))


def _items(body: list[ast.stmt]) -> list[Item]:
    """Return the statements of a body, with neighboring imports as one item."""
    items: list[Item] = []
    for statement in statements(body):
        if not isinstance(statement, Import):
            items.append(statement)
        elif items and isinstance(items[-1], list):
            items[-1].append(statement)
        else:
            items.append([statement])
    return items


def _statement(item: Item) -> ast.stmt:
    return item[0] if isinstance(item, list) else item


def _aligned(before: list[Item], after: list[Item]) -> list[tuple[slice, slice]]:
    """Return ranges of statements that belong together, found by their structure."""

    def shapes(items: list[Item]) -> list[str]:
        return ["import" if isinstance(item, list) else _NAMES.sub("", ast.dump(item)) for item in items]

    matcher = difflib.SequenceMatcher(None, shapes(before), shapes(after), autojunk=False)
    return [(slice(i, i_end), slice(j, j_end)) for _, i, i_end, j, j_end in matcher.get_opcodes()]


_NAMES = re.compile(r"'(?:[^'\\]|\\.)*'")
