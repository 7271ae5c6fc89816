"""Figures of an evaluation, in a line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def figures(line: Mapping[str, Any]) -> str:
    """`line`: as metrics.jsonl has it."""
    return (
        f"AUC {_number(line['auc'])}  NE {_number(line['ne'])}  logloss {_number(line['logloss'])}  "
        f"calibration {_number(line['calibration'])}  ({line['num_samples']:,} samples)"
    )


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4f}"
