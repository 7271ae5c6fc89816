"""How a split is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from meseta.spec import MesetaError

LastBatch = Literal["keep", "drop", "pad"]
CancellationCheck = Callable[[], None]
"""Called between pieces of work. It raises if nobody waits for the result any more."""


def never_cancelled() -> None:
    """Let work go on to its end."""


@dataclass(frozen=True, kw_only=True)
class ReaderOptions:
    """How a split is read; the same on all ranks."""

    batch_size: int
    """Samples of a global batch, over all ranks."""
    shuffle: bool = False
    """Permute row groups, and rows within windows, anew in each epoch; else the order of the files."""
    seed: int = 0
    """Of the shuffle."""
    window_rows: int = 262_144
    """Rows decoded and permuted together; a larger row group makes a window of its own."""
    prefetch_batches: int = 4
    """Batches made ahead by a background thread, while another one decodes the next window; 0: neither."""
    last_batch: LastBatch = "keep"
    """The last global batch of an epoch where it is short: as it is, left out, or filled with samples of weight 0."""
    filter: str | None = None
    """Condition on the rows that are read, see meseta.data.read.row_filter; None: all."""
    negative_keep: float = 1.0
    """Share of the negatives that is read, drawn by (seed, number of the row in the split), the same in each epoch."""

    def __post_init__(self) -> None:
        if self.last_batch not in ("keep", "drop", "pad"):
            raise MesetaError(f"reader: last_batch must be 'keep', 'drop' or 'pad', got {self.last_batch!r}")
        for name, least in (("batch_size", 1), ("window_rows", 1), ("prefetch_batches", 0)):
            if getattr(self, name) < least:
                raise MesetaError(f"reader: {name} must be at least {least}, got {getattr(self, name)}")

    @property
    def excludes_rows(self) -> bool:
        """Whether rows may be left out."""
        return self.filter is not None or self.negative_keep < 1
