"""Pages of the reference: every public name of every package, with its docstring."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType

import meseta

INTERNAL = {"meseta.ops.row_update"}
"""Packages whose names serve this project's own code."""


def packages() -> dict[str, ModuleType]:
    """Return the packages that define `__all__`, by name."""
    by_name = {"meseta": meseta}
    for info in pkgutil.walk_packages(meseta.__path__, "meseta."):
        if info.ispkg and info.name not in INTERNAL:
            module = importlib.import_module(info.name)
            if getattr(module, "__all__", None):
                by_name[info.name] = module
    return by_name


def public_names(package: ModuleType) -> list[str]:
    """Return the public names of a package except its version."""
    return sorted(name for name in package.__all__ if not name.startswith("__"))


def page(name: str, package: ModuleType) -> str:
    """Return the page of one package as Markdown with directives for mkdocstrings."""
    parts = [f"# {name}\n", f"{inspect.cleandoc(package.__doc__ or '')}\n"]
    for public in public_names(package):
        parts.append(f"::: {_home(name, public, getattr(package, public))}\n    options:\n      heading: {public}\n")
    return "\n".join(parts)


def _home(package: str, name: str, value: object) -> str:
    """Return the path at which a name is defined, because mkdocstrings cannot follow lazy imports."""
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    is_own = isinstance(module, str) and module.startswith("meseta.") and qualified
    return f"{module}.{qualified}" if is_own else f"{package}.{name}"
