"""Defers the import of torch._dynamo, which takes as long as the import of torch, until it is needed.

Commands that compile nothing do not need it. torch imports it only to disable tracing, at the first use of
`torch.manual_seed`, an optimizer or the device 'meta' (`torch._compile._disable_dynamo`). A new process group also
clears its caches if it is imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

DYNAMO = "torch._dynamo"


def defer_dynamo_import() -> None:
    """Replace torch._dynamo with a stub that imports it at the first access that a compiler would make.

    Call this before torch is imported. Code that compiles, or imports a submodule, gets the real module. Functions
    whose tracing was disabled before remain untraced.
    """
    if DYNAMO not in sys.modules:
        sys.modules[DYNAMO] = _DynamoStub(DYNAMO)


class _DynamoStub(ModuleType):
    """Stub of torch._dynamo, which imports the real module when needed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # Read by code that iterates over modules, such as `inspect`.
            raise AttributeError(name)
        return getattr(_import_dynamo(self), name)

    @property
    def trace_rules(self) -> Any:
        """Stub of `trace_rules`, which a new process group accesses, or the real object after the import."""
        return _TraceRulesStub(self) if sys.modules.get(DYNAMO) is self else _import_dynamo(self).trace_rules

    def graph_break(self, *reason: Any, **more: Any) -> None:
        """Do nothing, as there is no graph. Optimizers call this before and after a step."""

    def disable(self, function: Callable[..., Any] | None = None, *how: Any, **more: Any) -> Callable[..., Any]:
        """Return a wrapper that calls `function` directly until torch._dynamo is imported, and untraced afterwards."""
        if function is None:
            return _import_dynamo(self).disable(function, *how, **more)
        untraced: list[Callable[..., Any]] = []

        def call(*args: Any, **kwargs: Any) -> Any:
            if sys.modules.get(DYNAMO) is self:
                return function(*args, **kwargs)
            if not untraced:
                untraced.append(sys.modules[DYNAMO].disable(function, *how, **more))
            return untraced[0](*args, **kwargs)

        return call


class _TraceRulesStub:
    """Stub of torch._dynamo.trace_rules, which imports the real module for all attributes except its cache."""

    def __init__(self, absent: _DynamoStub) -> None:
        self._stub = absent

    def __getattr__(self, name: str) -> Any:
        return getattr(_import_dynamo(self._stub).trace_rules, name)

    def clear_lru_cache(self) -> None:
        """Do nothing, as the cache is empty."""


def _import_dynamo(absent: _DynamoStub) -> Any:
    if sys.modules.get(DYNAMO) is absent:
        del sys.modules[DYNAMO]
    return importlib.import_module(DYNAMO)
