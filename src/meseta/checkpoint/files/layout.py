"""What a table's blocks hold and where they begin: a function of the table alone, never of ranks or plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
from torch import Tensor

from meseta.machine.files import has_control_characters
from meseta.spec import MesetaError, TableSpec
from meseta.spec.checkpoint_blocks import BLOCK_BYTES, GLOBAL_ROW_ID_BYTES, rows_per_block
from meseta.storage import ROW

StoredType = Literal[
    "float64", "float32", "float16", "bfloat16",
    "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8",
]  # fmt: skip
"""What a column's values may be."""
MAX_ROW_BYTES = BLOCK_BYTES
"""A row with its id and states may have no more: a block is read whole."""
STORED_TYPES = get_args(StoredType)
ID = "id"
"""Arrow column of logical row numbers, which every block has before those of ROW, the rows of the table, and of the
states."""


@dataclass(frozen=True)
class Column:
    """One checksummed column of a block."""

    name: str
    """'row' for the embedding itself, else the name of an optimizer state."""
    kind: Literal["row", "element"]
    """Whether there is one value per row [rows], or one per element [rows, D]."""
    dtype: str
    """Type of the values, for example 'float32'."""

    @property
    def stored_dtype(self) -> str:
        """Type of the values in files: neither numpy nor Arrow has bfloat16, whose bits are kept as uint16."""
        return "uint16" if self.dtype == "bfloat16" else self.dtype


@dataclass(frozen=True)
class BlockSchema:
    """Columns of the blocks of one table."""

    embedding_dim: int
    """D, the width of columns of kind 'element'."""
    columns: tuple[Column, ...]
    """The rows first, then the optimizer states by name."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one logical row with its id and state."""
        return GLOBAL_ROW_ID_BYTES + self.value_bytes

    @property
    def value_bytes(self) -> int:
        """Of one row and its state, without its id."""
        return sum(np.dtype(c.stored_dtype).itemsize * self.width(c) for c in self.columns)

    @property
    def block_rows(self) -> int:
        """Rows of every block but the last."""
        return rows_per_block(self.row_bytes, BLOCK_BYTES)

    @property
    def max_frame_bytes(self) -> int:
        """The most bytes that the file of a block has beside its rows."""
        schema_bytes: int = self.to_arrow().serialize().size  # It stands at the beginning, and in the footer again.
        return 2 * schema_bytes + 4096 + 512 * (1 + len(self.columns))

    def width(self, column: Column) -> int:
        """Values per row."""
        return self.embedding_dim if column.kind == "element" else 1

    def invalid_reason(self) -> str | None:
        """Why no table has such columns; None where one may."""
        first, *states = self.columns
        if (first.name, first.kind) != (ROW, "element"):
            return f"its first column must be {ROW!r}, one value per element"
        names = [state.name for state in states]
        if names != sorted({*names} - {ID, ROW}):
            return "the names of its states must rise, and none may be given twice or reserved"
        if any(not name or has_control_characters(name) for name in names):
            return "a state's name is empty or has control characters"
        if unknown := [column.dtype for column in self.columns if column.dtype not in STORED_TYPES]:
            return f"values of type {unknown[0]}, and files have {', '.join(STORED_TYPES)}"
        if self.row_bytes > MAX_ROW_BYTES:
            return f"a row with its states has {self.row_bytes:,} bytes, and may have {MAX_ROW_BYTES:,}"
        return None

    def shape(self, column: Column, num_rows: int) -> tuple[int, ...]:
        """[rows, D] or [rows]."""
        return (num_rows, self.embedding_dim) if column.kind == "element" else (num_rows,)

    def to_arrow(self) -> pa.Schema:
        """Of a block: id int64, then fixed-size lists of D values, or plain values for what a row has one of.

        A field whose stored type is not the column's has that in its metadata: {'dtype': 'bfloat16'}.
        """
        return _to_arrow(self, pa.int64())

    def rows_to_arrow(self) -> pa.Schema:
        """Of some rows of a block: id uint32, counted from the first row of the block, then as `to_arrow`."""
        return _to_arrow(self, pa.uint32())

    @staticmethod
    def from_dict(entry: Mapping[str, Any]) -> BlockSchema:
        """Read a table's entry in a manifest; raises KeyError or TypeError when it is malformed."""
        columns = tuple(Column(name=c["name"], kind=c["kind"], dtype=c["dtype"]) for c in entry["columns"])
        return BlockSchema(embedding_dim=entry["embedding_dim"], columns=columns)


@lru_cache(64)
def _to_arrow(schema: BlockSchema, id_type: pa.DataType) -> pa.Schema:
    """Made once for all tables that are alike."""
    fields = [pa.field(ID, id_type, nullable=False)]
    for column in schema.columns:
        kind = pa.from_numpy_dtype(np.dtype(column.stored_dtype))
        if column.kind == "element":
            kind = pa.list_(pa.field("item", kind, nullable=False), schema.embedding_dim)
        metadata = {"dtype": column.dtype} if column.stored_dtype != column.dtype else None
        fields.append(pa.field(column.name, kind, nullable=False, metadata=metadata))
    return pa.schema(fields)


@dataclass(frozen=True)
class TableLayout:
    """One table of a checkpoint."""

    spec: TableSpec
    schema: BlockSchema

    @staticmethod
    def from_values(spec: TableSpec, values: Mapping[str, Tensor]) -> TableLayout:
        """The layout that any shard of the table implies, of its values by name; raises MesetaError for a state that
        cannot be stored."""
        columns = [Column(name=ROW, kind="element", dtype=spec.dtype)]
        held = _dtype(values[ROW])
        if held != spec.dtype:
            raise MesetaError(f"checkpoint: table {spec.name!r} is {spec.dtype}, but its shard holds {held}")
        for name, tensor in sorted(values.items()):
            if name == ROW:
                continue
            if name == ID:
                raise MesetaError(f"checkpoint: table {spec.name!r}: the state name {name!r} is reserved; rename it")
            columns.append(Column(name=name, kind="row" if tensor.dim() == 1 else "element", dtype=_dtype(tensor)))
        schema = BlockSchema(embedding_dim=spec.embedding_dim, columns=tuple(columns))
        if fault := schema.invalid_reason():
            raise MesetaError(f"checkpoint: table {spec.name!r} cannot be saved: {fault}")
        return TableLayout(spec=spec, schema=schema)

    def block_ranges(self) -> list[tuple[int, int]]:
        """First row and the row after the last of every block."""
        step, total = self.schema.block_rows, self.spec.num_embeddings
        return [(first, min(first + step, total)) for first in range(0, total, step)]

    def to_dict(self) -> dict[str, Any]:
        """The table's entry in a manifest, without its blocks."""
        return {
            "num_embeddings": self.spec.num_embeddings,
            "embedding_dim": self.spec.embedding_dim,
            "dtype": self.spec.dtype,
            "optimizer": asdict(self.spec.optimizer),
            "columns": [asdict(column) for column in self.schema.columns],
            "block_rows": self.schema.block_rows,
        }


def widen_bfloat16(stored: np.ndarray) -> np.ndarray:
    """float32 of a bfloat16's stored bits, which are its upper half."""
    return (stored.astype(np.uint32) << 16).view(np.float32)


def narrow_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Undo `widen_bfloat16`. Raises ValueError for a float32 that is no bfloat16."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    if (bits & 0xFFFF).any():
        raise ValueError("some values are no bfloat16")
    return (bits >> 16).astype(np.uint16)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
