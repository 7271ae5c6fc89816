"""Formats the metrics of an evaluation as one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def format_metrics(line: Mapping[str, Any]) -> str:
    """Format an entry of metrics.jsonl."""
    return (
        f"AUC {_format_metric(line['auc'])}  NE {_format_metric(line['ne'])}  logloss "
        f"{_format_metric(line['logloss'])}  "
        f"calibration {_format_metric(line['calibration'])}  ({line['num_samples']:,} samples)"
    )


def _format_metric(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4f}"
