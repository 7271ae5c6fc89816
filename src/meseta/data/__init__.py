"""From raw click logs to batches. `meseta prepare` writes a dataset, and `Reader` streams its batches.

Names are imported on first use (PEP 562), so that preparing data does not import torch. Only `Batch` and `Reader` do.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meseta.data.batch import Batch
    from meseta.data.dataset.dataset import Dataset
    from meseta.data.prepare.options import PrepareOptions
    from meseta.data.read.options import ReaderOptions
    from meseta.data.read.reader import Reader

_LAZY_IMPORTS = {
    "Batch": "meseta.data.batch",
    "Dataset": "meseta.data.dataset.dataset",
    "PrepareOptions": "meseta.data.prepare.options",
    "Reader": "meseta.data.read.reader",
    "ReaderOptions": "meseta.data.read.options",
}

__all__ = ["Batch", "Dataset", "PrepareOptions", "Reader", "ReaderOptions"]


def __getattr__(name: str) -> object:
    if name not in _LAZY_IMPORTS:
        raise AttributeError(
            f"module 'meseta.data' has no attribute {name!r}; it has {', '.join(sorted(_LAZY_IMPORTS))}"
        )
    return getattr(importlib.import_module(_LAZY_IMPORTS[name]), name)
