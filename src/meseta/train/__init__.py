"""Training, evaluation and prediction with a config."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meseta.train.sweep import grid_settings, parse_setting, random_settings
    from meseta.train.trained_model import open_trained
    from meseta.train.workload import run_workload

# Public names are imported when first used (PEP 562), so that importing a module of this package loads no other one.
_LAZY_IMPORTS = {
    "grid_settings": "meseta.train.sweep",
    "open_trained": "meseta.train.trained_model",
    "parse_setting": "meseta.train.sweep",
    "random_settings": "meseta.train.sweep",
    "run_workload": "meseta.train.workload",
}

__all__ = ["grid_settings", "open_trained", "parse_setting", "random_settings", "run_workload"]


def __getattr__(name: str) -> object:
    if name not in _LAZY_IMPORTS:
        raise AttributeError(f"module 'meseta.train' has no attribute {name!r}; available: {', '.join(__all__)}")
    return getattr(importlib.import_module(_LAZY_IMPORTS[name]), name)
