"""Nested arguments of operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor


def leaves(value: Any) -> Iterator[Any]:
    """Yield the members of nested lists, tuples and dictionaries."""
    if isinstance(value, (list, tuple)):
        for member in value:
            yield from leaves(member)
    elif isinstance(value, dict):
        for member in value.values():
            yield from leaves(member)
    else:
        yield value


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return nested lists, tuples and dictionaries with `function` applied to each other member."""
    if isinstance(value, dict):
        return {key: map_leaves(function, member) for key, member in value.items()}
    if isinstance(value, list):
        return [map_leaves(function, member) for member in value]
    if isinstance(value, tuple):
        members = [map_leaves(function, member) for member in value]
        return type(value)(*members) if hasattr(value, "_fields") else tuple(members)
    return function(value)


def is_tensors(value: Any) -> bool:
    """Whether `value` is a tensor, or a list that has one."""
    return any(isinstance(leaf, Tensor) for leaf in leaves(value))


def describe(value: Any) -> Any:
    """Return a scalar argument in a form that can be compared and printed."""
    if isinstance(value, (list, tuple)):
        return tuple(describe(member) for member in value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def name_arguments(func: Any, args: Sequence[Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator by name."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **arguments}
