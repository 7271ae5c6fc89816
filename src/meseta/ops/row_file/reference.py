"""Reference of row files in plain Python."""

from __future__ import annotations

import torch
from torch import Tensor


class InMemoryRowFile:
    """Records of rows in a dict."""

    def __init__(self, num_rows: int, record_bytes: int) -> None:
        self.num_rows, self.record_bytes = num_rows, record_bytes
        self.records: dict[int, bytes] = {}

    def read(self, rows: Tensor, out: Tensor) -> Tensor:
        """Copy records of rows, int64 [n], into `out`, uint8 [n, record_bytes]. Returns whether each was written."""
        present = torch.tensor([row in self.records for row in rows.tolist()], dtype=torch.bool)
        for at, row in enumerate(rows.tolist()):
            if row in self.records:
                out[at] = torch.frombuffer(bytearray(self.records[row]), dtype=torch.uint8)
        return present

    def write(self, rows: Tensor, records: Tensor) -> None:
        """Store records, uint8 [n, record_bytes], of rows, int64 [n]."""
        for row, record in zip(rows.tolist(), records, strict=True):
            self.records[row] = bytes(record.tolist())

    def snapshot(self) -> InMemoryRowFile:
        """Return a copy."""
        copy = InMemoryRowFile(self.num_rows, self.record_bytes)
        copy.records = dict(self.records)
        return copy
