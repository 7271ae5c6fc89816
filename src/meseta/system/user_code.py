"""Import of user modules that a config names. The user is informed before their code runs."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

from meseta.system.ranks import is_first_rank, print_note


def import_custom(what: str, module_name: str) -> ModuleType:
    """Import a user module, which may be in the current folder. Errors of the import are passed on.

    `what` is the config key and its value, for the note that `log_user_code` prints.
    """
    log_user_code(what, module_name)
    add_current_folder_to_path()
    return importlib.import_module(module_name)


def log_user_code(what: str, module_name: str) -> None:
    """Print which files run when `module_name` is imported: its own and those of its parent packages.

    Only the first rank prints. Nothing is printed if the module was imported before. No user code runs here.
    """
    if module_name in sys.modules or not is_first_rank():
        return
    add_current_folder_to_path()
    files = _module_files(module_name)
    if files:
        print_note(f"{what} runs the code in {', '.join(map(repr, files))}")


def add_current_folder_to_path() -> None:
    """Append the current folder to Python's search path."""
    # Python adds the folder of a script, and the script `meseta` is in another one.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _module_files(module_name: str) -> list[str]:
    # importlib.util.find_spec would import the parent packages.
    files, places, parts = [], None, module_name.split(".")
    if not all(parts):
        return []  # Invalid name. The import raises an error.
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        specs = (finder.find_spec(name, places, None) for finder in sys.meta_path)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None:
            break
        if spec.has_location and spec.origin and name not in sys.modules:
            files.append(spec.origin)
        if spec.submodule_search_locations is None:
            break
        places = list(spec.submodule_search_locations)
    return files
