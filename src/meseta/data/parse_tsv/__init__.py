"""Parser of Criteo's TSV lines. The compiled core parses regular blocks, pyarrow all others."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from meseta.data.parse_tsv.reference import parse_tsv as reference
from meseta.data.schema.layout import RawRows, RawSparse, log_transform
from meseta.ops.core import baseline_core
from meseta.spec import MesetaError

__all__ = ["parse_tsv"]


def parse_tsv(raw: bytes, num_rows: int, types: Mapping[str, pa.DataType]) -> RawRows:
    """Parse `num_rows` lines into columns: a label, 13 whole numbers and 26 strings, separated by tabs.

    All fields but the label may be empty. `types` has the names and types of the columns for pyarrow. The core parses
    blocks whose labels are 0 or 1 and whose numbers have at most 18 digits. Raises pyarrow.ArrowInvalid if a line has
    another number of fields, or a field has another type.
    """
    return _parse_with_core(raw, num_rows) or reference(raw, types)


def _parse_with_core(raw: bytes, num_rows: int) -> RawRows | None:
    """Return `None` if a line is not regular, or if there is no compiled core."""
    try:
        core = baseline_core()
    except MesetaError:
        return None
    label = np.empty(num_rows, np.float32)
    dense = np.empty((13, num_rows), np.float64)
    offsets = np.empty((26, num_rows + 1), np.int32)
    data, firsts = np.empty(len(raw), np.uint8), np.empty(26, np.int64)
    if not core.parse_tsv(np.frombuffer(raw, np.uint8), label, dense, offsets, data, firsts):
        return None
    strings = pa.py_buffer(data)
    sparse = [
        pa.Array.from_buffers(
            pa.binary(), num_rows, [None, pa.py_buffer(offsets[k]), strings.slice(first, int(offsets[k, -1]))]
        )
        for k, first in enumerate(firsts.tolist())
    ]
    return RawRows([label], [log_transform(column) for column in dense], [RawSparse(column) for column in sparse])
