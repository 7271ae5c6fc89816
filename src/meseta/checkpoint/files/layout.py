"""Layout of a table's blocks. It depends on the table only, never on the ranks or the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
from torch import Tensor

from meseta.spec import MesetaError, TableSpec
from meseta.spec.shards import BLOCK_BYTES, GLOBAL_ROW_ID_BYTES, rows_per_block
from meseta.storage import ROW
from meseta.system.files import has_control_characters

StoredType = Literal[
    "float64", "float32", "float16", "bfloat16",
    "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8",
]  # fmt: skip
"""Data types that a column of a checkpoint can have."""
# Blocks are read as a whole, and have at least one row.
MAX_ROW_BYTES = BLOCK_BYTES
"""Maximum size of a row with its id and states."""
STORED_TYPES = get_args(StoredType)
ID = "id"
"""Name of the Arrow column with row ids, the first one."""


@dataclass(frozen=True)
class Column:
    """Checksummed column of a block."""

    name: str
    """'row' for the embeddings, or the name of an optimizer state."""
    kind: Literal["row", "element"]
    """'row' for one value per row, of shape [rows], and 'element' for one value per element, of shape [rows, D]."""
    dtype: str
    """Data type of the values, such as 'float32'."""

    @property
    def stored_dtype(self) -> str:
        """Data type in files. bfloat16 is stored as uint16 with the same bits, because numpy and Arrow lack it."""
        return "uint16" if self.dtype == "bfloat16" else self.dtype


@dataclass(frozen=True)
class BlockSchema:
    """Columns of the blocks of one table."""

    embedding_dim: int
    columns: tuple[Column, ...]
    """Column of the rows, followed by those of the optimizer states in the order of their names."""

    @property
    def row_bytes(self) -> int:
        """Size of a row with its id and states."""
        return GLOBAL_ROW_ID_BYTES + self.value_bytes

    @property
    def value_bytes(self) -> int:
        """Size of a row with its states, without its id."""
        return sum(np.dtype(c.stored_dtype).itemsize * self.width(c) for c in self.columns)

    @property
    def block_rows(self) -> int:
        """Number of rows in each block. The last block may have fewer."""
        return rows_per_block(self.row_bytes, BLOCK_BYTES)

    @property
    def max_frame_bytes(self) -> int:
        """Upper bound for the size of a block's file without its rows."""
        schema_bytes: int = self.to_arrow().serialize().size  # The header and the footer both contain the schema.
        return 2 * schema_bytes + 4096 + 512 * (1 + len(self.columns))

    def width(self, column: Column) -> int:
        """Return the number of values per row."""
        return self.embedding_dim if column.kind == "element" else 1

    def invalid_reason(self) -> str | None:
        """Return the reason why no table can have these columns, or `None`."""
        first, *states = self.columns
        if (first.name, first.kind) != (ROW, "element"):
            return f"its first column must be {ROW!r}, one value per element"
        names = [state.name for state in states]
        if names != sorted({*names} - {ID, ROW}):
            return "the names of its states must be in ascending order, without duplicates and reserved names"
        if any(not name or has_control_characters(name) for name in names):
            return "a state's name is empty or has control characters"
        if unknown := [column.dtype for column in self.columns if column.dtype not in STORED_TYPES]:
            return f"dtype {unknown[0]} is not supported; supported: {', '.join(STORED_TYPES)}"
        if self.row_bytes > MAX_ROW_BYTES:
            return f"a row with its states has {self.row_bytes:,} bytes, more than the limit of {MAX_ROW_BYTES:,}"
        return None

    def shape(self, column: Column, num_rows: int) -> tuple[int, ...]:
        """Return the shape of a column: [rows, D] or [rows]."""
        return (num_rows, self.embedding_dim) if column.kind == "element" else (num_rows,)

    def to_arrow(self) -> pa.Schema:
        """Return the Arrow schema of a complete block, with int64 row ids.

        Columns with one value per element are fixed-size lists. If the stored type of a column differs from its data
        type, the metadata of its field has the latter, such as {'dtype': 'bfloat16'}.
        """
        return _to_arrow(self, pa.int64())

    def rows_to_arrow(self) -> pa.Schema:
        """Return the Arrow schema of a file with some rows of a block. The uint32 ids count from the first row of the
        block."""
        return _to_arrow(self, pa.uint32())

    @staticmethod
    def from_dict(entry: Mapping[str, Any]) -> BlockSchema:
        """Parse a table's entry in a manifest. Raises KeyError or TypeError if it is malformed."""
        columns = tuple(Column(name=c["name"], kind=c["kind"], dtype=c["dtype"]) for c in entry["columns"])
        return BlockSchema(embedding_dim=entry["embedding_dim"], columns=columns)


# Many tables have equal schemas.
@lru_cache(64)
def _to_arrow(schema: BlockSchema, id_type: pa.DataType) -> pa.Schema:
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
    """Table specification with the columns of its blocks."""

    spec: TableSpec
    schema: BlockSchema

    @staticmethod
    def from_values(spec: TableSpec, values: Mapping[str, Tensor]) -> TableLayout:
        """Return the layout for values of a table's shard by name. Raises MesetaError if a state cannot be stored."""
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
        """Return the row ranges (first, stop) of all blocks."""
        step, total = self.schema.block_rows, self.spec.num_embeddings
        return [(first, min(first + step, total)) for first in range(0, total, step)]

    def to_dict(self) -> dict[str, Any]:
        """Return the table's entry in a manifest, without its blocks."""
        return {
            "num_embeddings": self.spec.num_embeddings,
            "embedding_dim": self.spec.embedding_dim,
            "dtype": self.spec.dtype,
            "optimizer": asdict(self.spec.optimizer),
            "columns": [asdict(column) for column in self.schema.columns],
            "block_rows": self.schema.block_rows,
        }


def widen_bfloat16(stored: np.ndarray) -> np.ndarray:
    """Convert stored bfloat16 values to float32. Their bits are the upper half of those of the float32."""
    return (stored.astype(np.uint32) << 16).view(np.float32)


def narrow_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Convert float32 values to stored bfloat16 values. Raises ValueError if one is not representable."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    if (bits & 0xFFFF).any():
        raise ValueError("some values are not representable as bfloat16")
    return (bits >> 16).astype(np.uint16)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
