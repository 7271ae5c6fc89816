"""Sizes of the complete benchmark, and of a quick run of all its parts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sizes:
    rows_per_day: int
    num_days: int
    """Days that are trained. Another one is scored only."""
    scale: float
    seeds: tuple[int, ...]
    scratch_days: tuple[int, ...]
    """Days after which a model is trained from scratch on all days so far."""
    scratch_seeds: tuple[int, ...]
    rate_seeds: tuple[int, ...]
    """Seeds on which learning rates are compared, and of which no other result is reported."""
    hash_rows: int
    many_days: int
    """Days of the part `thirty_days`."""
    rows_per_many: int
    """Rows of each of the many days."""
    settings: tuple[str, ...] = ()
    """Overrides of the first day."""


FULL = Sizes(
    rows_per_day=200_000, num_days=10, scale=0.01, seeds=(0, 1, 2, 3, 4), scratch_days=(2, 5, 10),
    scratch_seeds=(0, 1, 2), rate_seeds=(100, 101), hash_rows=100_000, many_days=30, rows_per_many=20_000,
)  # fmt: skip
QUICK = Sizes(
    rows_per_day=300, num_days=2, scale=0.0005, seeds=(0,), scratch_days=(2,), scratch_seeds=(0,), rate_seeds=(100,),
    hash_rows=100, many_days=3, rows_per_many=300,
    settings=("train.search_budget=0", "train.epochs=1", "report.importance=false"),
)  # fmt: skip
