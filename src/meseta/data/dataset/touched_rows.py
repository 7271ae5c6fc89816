"""Rows of hashed tables that training looks up, one bit per row, for the detection of unseen values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from meseta.data.dataset.dataset import Dataset
from meseta.errors import error_summary
from meseta.spec import MesetaError

TOUCHED_ROWS_FILE = "touched.parquet"
MAX_TOUCHED_TABLE_ROWS = 1 << 26
"""Largest number of table rows for which the bits are stored. They take 8 MiB."""


def write_touched(folder: Path, bits: Mapping[str, NDArray[np.uint8] | None]) -> str | None:
    """Write `folder`/touched.parquet with the columns feature and bits, and return its name.

    Tables that are too large are left out. Returns `None`, and writes nothing, if no table remains.
    """
    kept = {name: one for name, one in bits.items() if one is not None and one.size <= MAX_TOUCHED_TABLE_ROWS // 8}
    if not kept:
        return None
    rows = pa.array([one.tobytes() for one in kept.values()], pa.large_binary())
    table = pa.table({"feature": list(kept), "bits": rows})
    pq.write_table(table, folder / TOUCHED_ROWS_FILE, compression="zstd", use_dictionary=False, write_statistics=False)
    return TOUCHED_ROWS_FILE


def read_touched(dataset: Dataset) -> dict[str, NDArray[np.uint8]]:
    """Return the bits [ceil(rows / 8)] of each table whose bits are stored. Only hashed features have them.

    Raises MesetaError if the file cannot be read, or if the bits do not fit their table.
    """
    if dataset.touched is None:
        return {}
    path = dataset.resolve_file(dataset.touched)
    try:
        table = pq.read_table(path, columns=["feature", "bits"]).cast(_SCHEMA)
        kept = zip(table["feature"].to_pylist(), table["bits"], strict=True)
        bits = {name: np.frombuffer(one.as_buffer() or b"", np.uint8) for name, one in kept}
    except (pa.ArrowException, OSError, KeyError) as error:
        raise MesetaError(
            f"dataset file {str(path)!r} cannot be read ({error_summary(error)})", remedy="prepare the dataset again"
        ) from None
    sizes = {feature.name: -(-feature.num_embeddings // 8) for feature in dataset.sparse if feature.encoding == "hash"}
    for name, one in bits.items():
        if one.size != sizes.get(name):
            raise MesetaError(
                f"dataset file {str(path)!r} has {one.size} bytes for feature {name!r}, which do not match the size of "
                "its table",
                remedy="prepare the dataset again",
            )
    return bits


_SCHEMA = pa.schema([("feature", pa.string()), ("bits", pa.large_binary())])
