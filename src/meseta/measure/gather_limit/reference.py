"""Reference of the gather checksum in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def checksum(tables: Sequence[Tensor], ids: NDArray[np.int64], bounds: Sequence[int]) -> int:
    """Return `GatherResult.checksum` of a gather with these arguments and rows of a multiple of 4 bytes."""
    total = 0
    for segment, (start, stop) in enumerate(pairwise(bounds)):
        rows = tables[segment % len(tables)][torch.from_numpy(ids[start:stop])]
        total += int(rows.contiguous().view(torch.int32).sum(dtype=torch.int64))
    return total % 2**32
