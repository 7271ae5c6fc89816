"""Which split of the data decides, and what is said of figures that decided. Imports nothing."""

from __future__ import annotations

from collections.abc import Collection

TEST, VALID = "test", "valid"
EVALUATED_SPLITS = (TEST, VALID)
"""Splits that runs evaluate, the one of the headline first."""


def validation_split(splits: Collection[str]) -> str:
    """The one that is evaluated on the way and decides: valid, so that test stays untouched until the end; test where
    there is no valid."""
    return VALID if VALID in splits else TEST


def selection_on_test_warning(split: str | None, chosen: Collection[str]) -> str:
    """A line for what was `chosen` by figures of the test split; empty where there is nothing to say."""
    if split != TEST or not chosen:
        return ""
    return (
        f"the test split decided {' and '.join(chosen)}, so its figures are flattered; data with a split valid "
        "(meseta prepare --valid-fraction 0.1) leave test untouched until the end"
    )
