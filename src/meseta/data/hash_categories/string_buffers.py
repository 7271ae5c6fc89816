"""Buffers of Arrow strings, for the compiled core."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from meseta.spec import MesetaError


def string_buffers(strings: pa.Array) -> tuple[NDArray[np.uint8], NDArray[np.int32] | NDArray[np.int64]]:
    """Return (bytes, n + 1 offsets) of n strings. Nulls become empty strings. Without nulls nothing is copied.

    Raises MesetaError if the array is not a string or binary array, or one of their large forms.
    """
    kind = strings.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        offset_type: Any = np.int32
    elif pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        offset_type = np.int64
    else:
        raise MesetaError(f"expected an Arrow string or binary array, got {kind}; cast it first")
    if strings.null_count:
        strings = strings.fill_null(b"" if "binary" in str(kind) else "")
    _, offset_buffer, data_buffer = strings.buffers()
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.empty(0, np.uint8)
    if len(strings) == 0:
        return data, np.zeros(1, offset_type)
    first = strings.offset
    return data, np.frombuffer(offset_buffer, offset_type)[first : first + len(strings) + 1]
