"""`meseta prepare`: make a dataset directory from raw click logs. Names are imported on first use (PEP 562)."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meseta.data.prepare.first_pass import Progress
    from meseta.data.prepare.options import PrepareOptions
    from meseta.data.prepare.run import load_prepared, prepare, read_layout, with_training_defaults
    from meseta.data.prepare.sources import find_teacher

_LAZY_IMPORTS = {
    "PrepareOptions": "meseta.data.prepare.options",
    "Progress": "meseta.data.prepare.first_pass",
    "find_teacher": "meseta.data.prepare.sources",
    **dict.fromkeys(("with_training_defaults", "load_prepared", "prepare", "read_layout"), "meseta.data.prepare.run"),
}

__all__ = [
    "PrepareOptions",
    "Progress",
    "find_teacher",
    "load_prepared",
    "prepare",
    "read_layout",
    "with_training_defaults",
]


def __getattr__(name: str) -> object:
    if name not in _LAZY_IMPORTS:
        raise AttributeError(f"module 'meseta.data.prepare' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY_IMPORTS[name]), name)
