"""Comparison of two whole source trees."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from tree_compare.cpp import CppFile, Token, compare_cpp, tokens, without_messages
from tree_compare.findings import Difference, Findings, Notice, fragment
from tree_compare.index import FileIndex, index_file
from tree_compare.literals import is_text
from tree_compare.messages import MessageRules, TextPositions, find_rules, prose
from tree_compare.pages import python_code
from tree_compare.python_files import ClassPairs, Context, PythonComparison, PythonFile
from tree_compare.renames import RenameTable, words
from tree_compare.scopes import Scopes
from tree_compare.trees import CPP_SUFFIXES, PAGE_SUFFIX, PYTHON_SUFFIXES, is_below, suffix
from tree_compare.whole_tree import Tree, check_classes, check_missing, check_uses

# Prose: nothing of it but the code of pages is compared.
PROSE_SUFFIXES = {PAGE_SUFFIX, ".txt", ".css"}
TESTS = "tests/"


@dataclass(frozen=True)
class Options:
    """What a comparison accepts."""

    table: RenameTable = field(default_factory=RenameTable)
    messages: bool = False
    """Whether the texts of messages may change."""
    expectations: bool = False
    """Whether strings in assertions and in `match=` of tests may change."""
    allowed: tuple[str, ...] = ()
    """Files and folders that may be added or removed, or change if they are no code."""
    texts: tuple[str, ...] = ()
    """Files and folders in which all strings with a space may change, such as reports."""


@dataclass
class Result:
    """What a comparison has found, and in how many files."""

    findings: Findings
    num_files: int = 0
    num_changed: int = 0


class _Comparison:
    def __init__(self, before: Mapping[str, bytes], after: Mapping[str, bytes], options: Options) -> None:
        self.before, self.after, self.options = before, after, options
        self.table, self.findings = options.table, Findings()
        self.paths = self._pair()
        """The path after of each file that both trees have."""
        self.parsed: dict[tuple[str, bytes], PythonFile] = {}
        self.classes: list[ClassPairs] = []

    def _pair(self) -> dict[str, str]:
        moved = self.table.moved(self.before)
        gone = [path for path, target in moved.items() if target not in self.after]
        added = self.after.keys() - moved.values()
        for path in gone:
            if not is_below(path, self.options.allowed):
                self.findings.refuse(Difference(path, 0, 0, path, "", "file removed"))
        for path in added:
            if not is_below(path, self.options.allowed):
                self.findings.refuse(Difference(path, 0, 0, "", path, "file added"))
        for path in self.before.keys() - set(gone):
            if moved[path] != path:
                self.findings.num_moved += 1
        return {path: target for path, target in moved.items() if target in self.after}

    def run(self) -> Result:
        pairs = {path: (self.before[path], self.after[target]) for path, target in self.paths.items()}
        changed = {path for path, (one, other) in pairs.items() if one != other}
        olds = self._python(self.before)
        news = self._python(self.after)
        before, after = (Tree({path: _index(file) for path, file in files.items()}) for files in (olds, news))
        context = Context(self.table, _keyword_calls(before), dict(before.descendants()))
        rules = find_rules(_source(olds)) if self.options.messages else None
        for path in sorted(changed):
            if path in olds and self.paths[path] in news:
                self._compare_python(olds[path], news[self.paths[path]], context, rules)
            elif suffix(path) not in CPP_SUFFIXES | PROSE_SUFFIXES:
                self._compare_other(path)
        self._compare_cpp(changed)
        check_missing(before, after, {target: path for path, target in self.paths.items()}, self.findings)
        check_classes(before, self.classes, self.findings)
        check_uses(before, after, self.classes, self.findings)
        self._list_strings(news)
        return Result(self.findings, len(self.paths), len(changed))

    def _python(self, tree: Mapping[str, bytes]) -> dict[str, PythonFile]:
        """Parse the Python files and pages of a tree. Refuses those that cannot be parsed."""
        files = {}
        for path, content in tree.items():
            is_page = suffix(path) == PAGE_SUFFIX
            if not is_page and suffix(path) not in PYTHON_SUFFIXES:
                continue
            if (path, content) not in self.parsed:
                text = content.decode()
                try:
                    module = ast.parse(python_code(text) if is_page else text)
                except SyntaxError as error:
                    reason = f"no valid Python: {error.msg}"
                    self.findings.refuse(Difference(path, 0, error.lineno or 0, "", fragment(error.text or ""), reason))
                    continue
                self.parsed[path, content] = PythonFile(path, module, Scopes(module))
            files[path] = self.parsed[path, content]
        return files

    def _compare_python(
        self, before: PythonFile, after: PythonFile, context: Context, rules: MessageRules | None
    ) -> None:
        if rules is not None:
            before.texts = TextPositions(before.tree, rules).nodes
        if self.options.expectations and before.path.startswith(TESTS):
            before.listed_texts |= _expectations(before.tree)
        if is_below(before.path, self.options.texts):
            before.listed_texts |= prose(before.tree)
        comparison = PythonComparison(before, after, context, self.findings)
        comparison.run()
        self.classes.extend(comparison.classes)

    def _compare_other(self, path: str) -> None:
        """Compare a file that is neither code nor prose: only names of the table may change."""
        one, other = self.before[path], self.after[self.paths[path]]
        if is_below(path, self.options.allowed):
            return
        olds, news = one.decode(errors="replace").splitlines(), other.decode(errors="replace").splitlines()
        if len(olds) != len(news):
            reason = f"number of lines changed from {len(olds)} to {len(news)}"
            self.findings.refuse(Difference(path, 1, 1, path, self.paths[path], reason))
            return
        for line, (old, new) in enumerate(zip(olds, news, strict=True), 1):
            if old != new and self.table.explains_text(old, new):
                self.findings.notices.add(Notice(self.paths[path], line, "line changed", fragment(new)))
            elif old != new:
                self.findings.refuse(Difference(path, line, line, fragment(old), fragment(new), "line changed"))

    def _compare_cpp(self, changed: set[str]) -> None:
        paths = [path for path in self.before if suffix(path) in CPP_SUFFIXES]
        if changed.isdisjoint(paths):
            return
        files = {path: CppFile.parse(path, self._tokens(self.before[path])) for path in paths}
        global_names = {name for file in files.values() for name in file.units.global_names}
        for path in sorted(changed.intersection(paths)):
            news = self._tokens(self.after[self.paths[path]])
            compare_cpp(files[path], news, self.table, global_names, self.findings)

    def _tokens(self, content: bytes) -> list[Token]:
        found = tokens(content.decode())
        return without_messages(found) if self.options.messages else found

    def _list_strings(self, files: Mapping[str, PythonFile]) -> None:
        """List the strings that still have an old name of this comparison."""
        olds = {old for old, _ in self.findings.renamed}
        for path, content in self.after.items():
            text = content.decode(errors="replace")
            if olds.isdisjoint(words(text)):
                continue
            if path in files:
                strings = list(_strings(files[path].tree))
            elif suffix(path) in CPP_SUFFIXES:
                strings = [(token.line, token.text) for token in tokens(text) if token.kind in ("string", "raw")]
            else:
                continue
            for line, string in strings:
                for name in sorted(olds & words(string)):
                    reason = "word of a text" if _is_word(name, string) else "string"
                    notice = Notice(path, line, f"{reason} with the old name {name}", fragment(repr(string)))
                    self.findings.notices.add(notice)


def _is_word(name: str, text: str) -> bool:
    """Whether `name` in `text` is probably an ordinary word, not code."""
    return " " in text and name.isalpha() and name.islower() and not re.search(rf"[`.]{name}\b|\b{name}[`=(]", text)


def compare_trees(before: Mapping[str, bytes], after: Mapping[str, bytes], options: Options) -> Result:
    """Compare two trees, each given as the content of every file by its path."""
    return _Comparison(before, after, options).run()


@cache
def _index(file: PythonFile) -> FileIndex:
    return index_file(file.path, file.tree, file.scopes)


def _keyword_calls(tree: Tree) -> set[tuple[str, str]]:
    return {(use.owner, use.name) for file in tree.files.values() for use in file.uses if use.is_keyword}


def _source(files: Mapping[str, PythonFile]) -> dict[str, ast.AST]:
    """Return the files without tests and pages, which may use a message in any way."""
    return {
        path: file.tree
        for path, file in files.items()
        if not path.startswith(TESTS) and suffix(path) in PYTHON_SUFFIXES
    }


def _expectations(tree: ast.Module) -> set[ast.AST]:
    """Return the strings with which a test compares messages."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) or (isinstance(node, ast.keyword) and node.arg == "match"):
            found |= {part for part in ast.walk(node) if is_text(part) or isinstance(part, ast.JoinedStr)}
    return found


def _strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the string constants of a module that are no docstrings."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            pending.extend(ast.iter_child_nodes(node))
