"""A log with two labels, of which samples may lack one or both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq

ROWS = 600


def columns(seed: int = 0) -> dict[str, list[Any]]:
    """The click is known in most rows, the purchase in few, and both are missing in some."""
    draw = np.random.default_rng(seed)
    known = draw.random((ROWS, 2)) < [0.8, 0.3]
    labels = draw.integers(0, 2, (ROWS, 2))
    return {
        "row": list(range(ROWS)),
        "click": [int(label) if is_known else None for label, is_known in zip(labels[:, 0], known[:, 0], strict=True)],
        "bought": [int(label) if is_known else None for label, is_known in zip(labels[:, 1], known[:, 1], strict=True)],
        "price": draw.random(ROWS).round(3).tolist(),
        "city": [f"c{number}" for number in draw.integers(0, 5, ROWS)],
    }


def write(path: Path, table: dict[str, list[Any]]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.table(table), path)
    else:
        arrow_csv.write_csv(pa.table(table), path)
    return str(path)
