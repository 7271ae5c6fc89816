"""One-to-one maps between the names of two versions of a scope, and the parameters that callers name."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Set

from tree_compare.literals import last_name
from tree_compare.scopes import CLASS, MODULE, Function, Scope

# Decorators that neither call a function by keyword nor read the names of its parameters.
PLAIN_DECORATORS = {
    *("staticmethod", "classmethod", "property", "setter", "cached_property", "override", "final"),
    *("abstractmethod", "overload", "cache", "lru_cache", "contextmanager", "no_grad", "inference_mode"),
}


class NameMaps:
    """For each pair of scopes, which name before is which name after."""

    def __init__(self) -> None:
        self._scopes: dict[Scope, Scope] = {}
        self._forward: dict[tuple[Scope, str], str] = {}
        self._backward: dict[tuple[Scope, str], str] = {}
        self._journal: list[tuple[Scope, str, str]] = []

    def pair(self, before: Scope, after: Scope) -> None:
        self._scopes[before] = after

    def are_paired(self, before: Scope, after: Scope) -> bool:
        return self._scopes.get(before) is after

    def unify(self, scope: Scope, old: str, new: str) -> str | None:
        """Record that `old` of `scope` is now `new`. Return why that cannot be."""
        known, taken = self._forward.get((scope, old)), self._backward.get((scope, new))
        if known is None and taken is None:
            self._forward[scope, old], self._backward[scope, new] = new, old
            self._journal.append((scope, old, new))
            return None
        if known is not None and known != new:
            return f"{old} has become both {known} and {new}"
        return None if taken == old else f"{taken} and {old} have both become {new}"

    def mark(self) -> int:
        """Return a point to which `undo` goes back."""
        return len(self._journal)

    def undo(self, mark: int) -> None:
        while len(self._journal) > mark:
            scope, old, new = self._journal.pop()
            del self._forward[scope, old], self._backward[scope, new]

    @property
    def num_local(self) -> int:
        """Number of names of functions that differ."""
        return sum(old != new for (scope, old), new in self._forward.items() if scope.kind not in (MODULE, CLASS))


def keyword_reason(
    node: Function, owner: str, name: str, calls: Set[tuple[str, str]], descendants: Mapping[str, Set[str]]
) -> str | None:
    """Return why parameter `name` of a function of class `owner` cannot be renamed like a local name."""
    if node.name.startswith("test_"):
        return "it names a fixture or a case"
    if any(last_name(_callee(decorator)) not in PLAIN_DECORATORS for decorator in node.decorator_list):
        return "a decorator may read it"
    for called in _called_names(node, owner, descendants):
        for keyword in (name, "**"):
            if (called, keyword) in calls:
                return f"{called}({keyword}{'=' if keyword == name else '...'}) is called"
    if node.name in ("forward", "__call__") and any(keyword == name for _, keyword in calls):
        return f"a call has the keyword {name}"
    return None


def _callee(decorator: ast.expr) -> ast.expr:
    return decorator.func if isinstance(decorator, ast.Call) else decorator


def _called_names(node: Function, owner: str, descendants: Mapping[str, Set[str]]) -> Iterator[str]:
    """Yield the names by which calls reach a function."""
    yield node.name
    if node.name in ("__init__", "__new__") and owner:
        yield from ("cls", "__class__", owner)
        yield from sorted(descendants.get(owner, ()))
