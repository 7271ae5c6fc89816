"""Self-contained HTML pages about a run, a comparison of runs, a plan, a dataset or a suite of trainings.

Names are imported on first use (PEP 562), because plan pages need no dataset.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meseta.report.page import write_report

__all__ = ["write_report"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'meseta.report' has no attribute {name!r}")
    return getattr(importlib.import_module("meseta.report.page"), name)
