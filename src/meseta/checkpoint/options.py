"""Options of a save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from meseta.checkpoint.files.rate_limit import WriteRateLimiter
from meseta.checkpoint.policy import DeltaBase
from meseta.config.row_bits import RowBits


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """Options of one save, equal on all ranks except for the rate limiter."""

    prefetched_embeddings: Mapping[str, Tensor] | None = None
    """Embeddings of the next batch, which only rank 0 writes. `None` if there are none."""
    base: DeltaBase | None = None
    """Base checkpoint of a delta. `None` saves a full checkpoint."""
    bits: Mapping[str, RowBits] = field(default_factory=dict)
    """Bits per value of quantized rows, by table. Tables that are not listed are saved exactly."""
    rate_limiter: WriteRateLimiter | None = None
    """Limiter shared by all saves of this rank. `None` writes without a limit."""


DEFAULT_OPTIONS = SaveOptions()
