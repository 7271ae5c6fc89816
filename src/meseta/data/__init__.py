"""Data pipeline from raw click logs to batches: `prepare` writes a dataset directory and `Reader` reads it."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meseta.data.dataset.dataset import Dataset
    from meseta.data.prepare.options import PrepareOptions
    from meseta.data.read.batch import Batch
    from meseta.data.read.options import ReaderOptions
    from meseta.data.read.reader import Reader

# Names are imported on first use (PEP 562), because only Batch and Reader need torch.
_LAZY_IMPORTS = {
    "Batch": "meseta.data.read.batch",
    "Dataset": "meseta.data.dataset.dataset",
    "PrepareOptions": "meseta.data.prepare.options",
    "Reader": "meseta.data.read.reader",
    "ReaderOptions": "meseta.data.read.options",
}

__all__ = ["Batch", "Dataset", "PrepareOptions", "Reader", "ReaderOptions"]


def __getattr__(name: str) -> object:
    if name not in _LAZY_IMPORTS:
        raise AttributeError(
            f"module 'meseta.data' has no attribute {name!r}; available: {', '.join(sorted(_LAZY_IMPORTS))}"
        )
    return getattr(importlib.import_module(_LAZY_IMPORTS[name]), name)
