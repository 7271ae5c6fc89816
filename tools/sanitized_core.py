"""A pytest plugin: the tests take the compiled core from the folder MESETA_CORE_DIR, not from the installed package."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import torch  # noqa: F401  (first, so that both share one OpenMP runtime)

FOLDER = Path(os.environ["MESETA_CORE_DIR"])


class OnlyThere:
    """Refuses the installed core, whose C++ library and that of a sanitized one free each other's memory."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.startswith("meseta._C"):
            raise ImportError(f"{name} was not built in {FOLDER}")
        return None


for file in sorted(FOLDER.glob("_C*.so")):
    module = f"meseta.{file.name.partition('.')[0]}"
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None and spec.loader is not None
    sys.modules[module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[module])
sys.meta_path.insert(0, OnlyThere())
