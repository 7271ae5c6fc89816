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
    """Packages that say which of their names are public, by name."""
    found = {"meseta": meseta}
    for info in pkgutil.walk_packages(meseta.__path__, "meseta."):
        if info.ispkg and info.name not in INTERNAL:
            module = importlib.import_module(info.name)
            if getattr(module, "__all__", None):
                found[info.name] = module
    return found


def public_names(package: ModuleType) -> list[str]:
    """Names of a package that are not the version."""
    return sorted(name for name in package.__all__ if not name.startswith("__"))


def page(name: str, package: ModuleType) -> str:
    """The page of one package, as Markdown with directives for mkdocstrings."""
    parts = [f"# {name}\n", f"{inspect.cleandoc(package.__doc__ or '')}\n"]
    for public in public_names(package):
        parts.append(f"::: {_home(name, public, getattr(package, public))}\n    options:\n      heading: {public}\n")
    return "\n".join(parts)


def _home(package: str, name: str, value: object) -> str:
    """Where a name is defined: what is imported lazily is not found in the source of its package."""
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    is_own = isinstance(module, str) and module.startswith("meseta.") and qualified
    return f"{module}.{qualified}" if is_own else f"{package}.{name}"
