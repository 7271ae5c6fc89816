"""Names of splits, and the choice of the validation split."""

from __future__ import annotations

from collections.abc import Collection

TEST, VALID = "test", "valid"
EVALUATED_SPLITS = (TEST, VALID)
"""Splits that runs evaluate. The first one is shown in headlines."""


def validation_split(splits: Collection[str]) -> str:
    """Return the split that is evaluated during training and selects models: valid if it exists, otherwise test."""
    # With a split valid, test is not used before the end.
    return VALID if VALID in splits else TEST


def selection_on_test_warning(split: str | None, chosen: Collection[str]) -> str:
    """Return a warning if the choices `chosen` were made on the test split, or an empty text."""
    if split != TEST or not chosen:
        return ""
    return (
        f"the test split decided {' and '.join(chosen)}, so its figures are flattered; data with a split valid "
        "(meseta prepare --valid-fraction 0.1) leave test untouched until the end"
    )
