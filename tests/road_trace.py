"""Tracer of the package's functions, in the order in which each is first called."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from source_tree import SOURCE

Call = tuple[str, str]
"""(file below src/meseta, qualified name of the function)."""


@contextmanager
def calls() -> Iterator[list[Call]]:
    """Context manager that collects first calls, in this thread and in threads that start meanwhile."""
    made: dict[Call, None] = {}
    seen: dict[int, CodeType] = {}
    root = f"{SOURCE}/"

    def note(frame: FrameType, _event: str, _: object) -> None:
        code = frame.f_code
        if id(code) in seen:  # hashing the code itself is slow
            return
        seen[id(code)] = code
        is_function = code.co_flags & inspect.CO_OPTIMIZED  # bodies of modules and classes run when they are imported
        if is_function and code.co_filename.startswith(root):
            name = code.co_qualname.partition(".<locals>")[0]
            made.setdefault((code.co_filename.removeprefix(root), name))

    result: list[Call] = []
    before = sys.gettrace()
    threading.settrace(note)  # called for calls alone, while a profile function is also called for returns
    sys.settrace(note)
    try:
        yield result
    finally:
        sys.settrace(before)
        threading.settrace(None)  # type: ignore[arg-type]
        result += made


def first_call_of(owner: type, method: str, number: int, action: Callable[[], Any]) -> list[Call]:
    """Return the calls within call `number` (from 1) of a method while `action` runs, the method first."""
    original, count, result = getattr(owner, method), 0, list[Call]()

    def watched(*arguments: Any, **options: Any) -> Any:
        nonlocal count, result
        count += 1
        if count != number:
            return original(*arguments, **options)
        with calls() as result:
            return original(*arguments, **options)

    setattr(owner, method, watched)
    try:
        action()
    finally:
        setattr(owner, method, original)
    return result
