"""Normal form of whole numbers in text: 12 for 12.0, +12, 1.2e1 and 12 between spaces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from meseta.data.hash_categories.string_buffers import string_buffers
from meseta.ops.core import baseline_core

__all__ = ["are_whole_numbers", "respell_whole_numbers"]

# A sign and 20 digits, the longest number of 64 bits.
_MAX_BYTES = 21


def respell_whole_numbers(strings: pa.Array) -> pa.Array:
    """Return the strings with whole numbers in -2^63..2^64-1 replaced by their sign and digits.

    `strings` is an Arrow string or binary array (or their large forms). A null becomes an empty string. Strings with
    leading zeros, such as 012, and strings that are not such numbers are unchanged. The result is `strings` itself if
    nothing changes, otherwise large_binary. Raises MesetaError if the type is unsupported or the compiled core is
    missing.
    """
    data, offsets = string_buffers(strings)
    core = baseline_core()
    num_respelled, _ = core.scan_whole_numbers(data, offsets)
    if not num_respelled:
        return strings
    out = np.empty(int(offsets[-1] - offsets[0]) + _MAX_BYTES * num_respelled, np.uint8)
    out_offsets = np.empty(offsets.size, np.int64)
    num_bytes = core.respell_whole_numbers(data, offsets, out, out_offsets)
    buffers = [None, pa.py_buffer(out_offsets), pa.py_buffer(out[:num_bytes])]
    return pa.Array.from_buffers(pa.large_binary(), len(strings), buffers)


def are_whole_numbers(texts: Sequence[str]) -> bool:
    """Whether all texts are whole numbers. Leading zeros and numbers beyond 64 bits count as whole numbers."""
    try:
        strings = pa.array(texts, pa.large_string())
    except UnicodeEncodeError:  # Surrogates, which JSON can contain.
        return False
    data, offsets = string_buffers(strings)
    _, num_others = baseline_core().scan_whole_numbers(data, offsets)
    return bool(num_others == 0)
