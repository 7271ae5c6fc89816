"""Builds of the compiled core that this processor supports, for tests that compare their bits."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest

from meseta.ops.core import MODULES, instruction_set

SUPPORTED = list(MODULES)[list(MODULES).index(instruction_set()) :]
"""Instruction sets from the chosen one down to `baseline`, the fastest first."""


def load_core(name: str) -> ModuleType:
    """Import the compiled core of an instruction set."""
    return importlib.import_module(MODULES[name])


def each_core(operator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Make `operator`, a module that calls its global `core`, use each supported build in turn. Yields its name."""
    for name in SUPPORTED:
        module = load_core(name)
        monkeypatch.setattr(operator, "core", lambda module=module: module)
        yield name
