"""Triton's interpreter without work whose results it does not use."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def fast_interpreter() -> Iterator[None]:
    """Context manager in which kernels have the same results in less time. Triton must have been imported with
    TRITON_INTERPRET=1.

    The interpreter compares integers with their limits for assertions that exist only in debug mode. It also
    replaces the functions of `triton.language` in each call of a function, not only in each launch.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    replace_functions = interpreter._patch_lang

    def replace_missing_functions(function: Any) -> Any:
        languages = [module for module in function.__globals__.values() if inspect.ismodule(module)]
        if any(tl.core.is_builtin(module.arange) for module in languages if module in (tl, tl.core)):
            return replace_functions(function)
        return interpreter._LangPatchScope()

    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    with (
        mock.patch.object(interpreter.interpreter_builder, "options", options),
        mock.patch.object(interpreter, "_patch_lang", replace_missing_functions),
    ):
        yield
