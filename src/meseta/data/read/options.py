"""Options of readers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from meseta.spec import MesetaError

LastBatch = Literal["keep", "drop", "pad"]
CancellationCheck = Callable[[], None]
"""Called between units of work. Raises if the result is not needed any more."""


def never_cancelled() -> None:
    """Never cancel."""


@dataclass(frozen=True, kw_only=True)
class ReaderOptions:
    """Options for reading a split. They must be the same on all ranks."""

    batch_size: int
    """Number of samples of a global batch, over all ranks."""
    shuffle: bool = False
    """Whether row groups, and rows within windows, are permuted in each epoch. Otherwise rows are in the order of the
    files."""
    seed: int = 0
    """Seed of the permutations and of the drawn negatives."""
    window_rows: int = 262_144
    """Maximum number of rows that are decoded and permuted together. A larger row group is a window by itself."""
    prefetch_batches: int = 4
    """Number of batches that a background thread makes ahead. Another thread then decodes the next window. 0 disables
    both."""
    last_batch: LastBatch = "keep"
    """Treatment of an incomplete last batch: kept as it is, dropped, or padded with samples of weight 0."""
    filter: str | None = None
    """Condition on the rows to read, see `meseta.data.read.selection`. `None` reads all rows."""
    negative_keep: float = 1.0
    """Share of the negatives to read. They are drawn by (seed, number of the row in the split), identically in all
    epochs."""

    def __post_init__(self) -> None:
        if self.last_batch not in ("keep", "drop", "pad"):
            raise MesetaError(f"reader: last_batch must be 'keep', 'drop' or 'pad', got {self.last_batch!r}")
        for name, least in (("batch_size", 1), ("window_rows", 1), ("prefetch_batches", 0)):
            if getattr(self, name) < least:
                raise MesetaError(f"reader: {name} must be at least {least}, got {getattr(self, name)}")

    @property
    def excludes_rows(self) -> bool:
        return self.filter is not None or self.negative_keep < 1
