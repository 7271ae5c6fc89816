"""Sizes of rows and of their optimizer states."""

from __future__ import annotations

import math

from meseta.spec import TableSpec
from meseta.spec.tables import ELEMENT_BYTES
from meseta.spec.transfer import element_bytes


def value_bytes(table: TableSpec) -> int:
    """Return the bytes per stored element of a row."""
    return ELEMENT_BYTES[table.dtype]


def compute_bytes(table: TableSpec) -> int:
    """Return the bytes per element of bags, gradients and optimizer states."""
    return element_bytes((table,))


def state_bytes_per_row(table: TableSpec) -> int:
    """Return the bytes of the optimizer state of one row."""
    per_element, per_row = table.optimizer.num_states
    return (per_element * table.embedding_dim + per_row) * compute_bytes(table)


def shard_storage_bytes(table: TableSpec, num_rows: int, num_columns: int) -> int:
    """Return the bytes of a shard including its optimizer state, rounded up."""
    row_bytes = table.embedding_dim * value_bytes(table) + state_bytes_per_row(table)
    return math.ceil(num_rows * row_bytes * num_columns / table.embedding_dim)
