"""A process that compiles nothing does without torch._dynamo, whose import takes as long as that of torch itself.

torch imports it at the first call of `torch.manual_seed`, of an optimizer, of an operator on the device 'meta', only to
tell it that it must not trace them (`torch._compile._disable_dynamo`); and where it is imported, a group of processes
tells it to forget what it has cached.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

DYNAMO = "torch._dynamo"


def defer_dynamo_import() -> None:
    """Until something of torch._dynamo is asked for but not to trace a function, it is not imported.

    For commands, before torch is imported. Whoever compiles, or imports a module of it, gets the true one, and what was
    not to be traced by then is not traced.
    """
    if DYNAMO not in sys.modules:
        sys.modules[DYNAMO] = _DynamoStub(DYNAMO)


class _DynamoStub(ModuleType):
    """Stands in for torch._dynamo until that is needed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # of those who go through all modules, as inspect does
            raise AttributeError(name)
        return getattr(_import_dynamo(self), name)

    @property
    def trace_rules(self) -> Any:
        """What a new group of processes asks for."""
        return _TraceRulesStub(self) if sys.modules.get(DYNAMO) is self else _import_dynamo(self).trace_rules

    def graph_break(self, *reason: Any, **more: Any) -> None:
        """Before and after the step of an optimizer. There is no graph."""

    def disable(self, function: Callable[..., Any] | None = None, *how: Any, **more: Any) -> Callable[..., Any]:
        """What torch asks for before it calls `function`, which is called as it is while nobody can trace it."""
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
    """Stands in for torch._dynamo.trace_rules until more than its cache is asked for."""

    def __init__(self, absent: _DynamoStub) -> None:
        self._stub = absent

    def __getattr__(self, name: str) -> Any:
        return getattr(_import_dynamo(self._stub).trace_rules, name)

    def clear_lru_cache(self) -> None:
        """Nothing is in it."""


def _import_dynamo(absent: _DynamoStub) -> Any:
    if sys.modules.get(DYNAMO) is absent:
        del sys.modules[DYNAMO]
    return importlib.import_module(DYNAMO)
