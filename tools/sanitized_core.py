"""A pytest plugin: the tests take the compiled core from the folder MESETA_CORE_DIR, not from the installed package."""

import importlib.util
import os
import sys
from pathlib import Path

import torch  # noqa: F401  (first, so that both share one OpenMP runtime)

for path in sorted(Path(os.environ["MESETA_CORE_DIR"]).glob("_C*.so")):
    name = f"meseta.{path.name.partition('.')[0]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
