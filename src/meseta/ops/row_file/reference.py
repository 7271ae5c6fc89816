"""The same in plain Python: a record by row, and copies."""

from __future__ import annotations

import torch
from torch import Tensor


class InMemoryRowFile:
    """What `RowFile` and `RowFileSnapshot` hold, in a dict."""

    def __init__(self, num_rows: int, record_bytes: int) -> None:
        self.num_rows, self.record_bytes = num_rows, record_bytes
        self.records: dict[int, bytes] = {}

    def read(self, rows: Tensor, out: Tensor) -> Tensor:
        """Put records of rows, int64 [n], into `out`, uint8 [n, record_bytes]; bool [n], which there are."""
        present = torch.tensor([row in self.records for row in rows.tolist()], dtype=torch.bool)
        for at, row in enumerate(rows.tolist()):
            if row in self.records:
                out[at] = torch.frombuffer(bytearray(self.records[row]), dtype=torch.uint8)
        return present

    def write(self, rows: Tensor, records: Tensor) -> None:
        """Put rows, int64 [n], with records, uint8 [n, record_bytes]."""
        for row, record in zip(rows.tolist(), records, strict=True):
            self.records[row] = bytes(record.tolist())

    def snapshot(self) -> InMemoryRowFile:
        """A copy."""
        copy = InMemoryRowFile(self.num_rows, self.record_bytes)
        copy.records = dict(self.records)
        return copy
