"""Code of the user's own that a config names by its import path: run only where that is meant, and told beforehand."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

from meseta.machine.ranks import is_first_rank, print_note


def import_custom(what: str, module_name: str) -> ModuleType:
    """The module, found as Python finds it, and in the current folder; `what` names the key, as in `log_user_code`.

    Raises what importing raises.
    """
    log_user_code(what, module_name)
    add_current_folder_to_path()
    return importlib.import_module(module_name)


def log_user_code(what: str, module_name: str) -> None:
    """Tell, on the first rank, which files will run where a module is imported; nothing where it was before.

    The files of the packages that it lies in run as well. Nothing is run to find them.
    """
    if module_name in sys.modules or not is_first_rank():
        return
    add_current_folder_to_path()
    files = _module_files(module_name)
    if files:
        print_note(f"{what} runs the code in {', '.join(map(repr, files))}")


def add_current_folder_to_path() -> None:
    """Let Python look in the current folder too, after all other places: `meseta` is no script of this folder."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _module_files(module_name: str) -> list[str]:
    """Those that importing the module runs first: of its packages, then its own."""
    found, places, parts = [], None, module_name.split(".")
    if not all(parts):
        return []  # no name of a module, as importing says
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        specs = (finder.find_spec(name, places, None) for finder in sys.meta_path)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None:
            break
        if spec.has_location and spec.origin and name not in sys.modules:
            found.append(spec.origin)
        if spec.submodule_search_locations is None:
            break
        places = list(spec.submodule_search_locations)
    return found
