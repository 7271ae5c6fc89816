"""What a save holds beside the model, and how it is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from meseta.checkpoint.files.rate_limit import WriteRateLimiter
from meseta.checkpoint.policy import DeltaBase
from meseta.config.row_bits import RowBits


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """The same on all ranks."""

    prefetched_embeddings: Mapping[str, Tensor] | None = None
    """Answers to the batch to come, where that was looked up before the last update; those of rank 0 are written."""
    base: DeltaBase | None = None
    """What a delta stands on; None: the save is whole."""
    bits: Mapping[str, RowBits] = field(default_factory=dict)
    """Of the rows that are written, by table; the other tables stay exact."""
    rate_limiter: WriteRateLimiter | None = None
    """How fast; each rank has one of its own, for all of its saves. None: as fast as it goes."""


DEFAULT_OPTIONS = SaveOptions()
"""The model alone, whole and exact."""
