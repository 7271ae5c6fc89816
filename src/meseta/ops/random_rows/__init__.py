"""Initial values of rows from a counter-based generator. They depend on seed, table, row and column only."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from meseta.ops.core import core
from meseta.ops.memory import empty
from meseta.ops.random_rows import reference
from meseta.sparse.shapes import Float, Int
from meseta.spec import MesetaError, TableSpec

# Each chunk of normal cells needs several float64 tensors. If these were larger, the allocator would return them to the
# system after every chunk, and clearing new pages takes as long as computing the cells.
CHUNK_CELLS = {"uniform": 1 << 18, "normal": 1 << 15}
"""Number of cells that are initialized at a time, which limits temporary memory."""


def table_key(seed: int, table: str) -> int:
    """Return the 64-bit generator key of a table: BLAKE2b of seed and name."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{table}".encode(), digest_size=8).digest(), "little")


def random_bits(
    key: int | Int[Tensor, ""], rows: tuple[int, int], columns: tuple[int, int], device: torch.device | str = "cpu"
) -> Int[Tensor, "rows columns"]:
    """Return 32 random bits for each cell, as int64 in 0..2^32-1. On a GPU the key may be a device scalar (int64).

    The generator is Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, section 3.3).
    Raises MesetaError if `rows` or `columns` are negative, reversed or too large.
    """
    # The counter is (low word of the row, high word of the row, column // 4, 0). A cell gets word column % 4.
    if not 0 <= rows[0] <= rows[1] < 1 << 63 or not 0 <= columns[0] <= columns[1] < 1 << 34:
        raise MesetaError(
            f"random_bits: invalid rows {rows[0]}..{rows[1]} or columns {columns[0]}..{columns[1]}; pass ascending "
            "ranges below 2**63 rows and 2**34 columns"
        )
    if torch.device(device).type != "cpu":
        return reference.random_bits(key, rows, columns, device)
    out = torch.empty(rows[1] - rows[0], columns[1] - columns[0], dtype=torch.int64)
    core().random_bits(int(key), rows[0], columns[0], out.numpy(), torch.get_num_threads())
    return out


def initial_rows(
    spec: TableSpec, *, rows: tuple[int, int], columns: tuple[int, int], seed: int, device: torch.device | str
) -> Float[Tensor, "rows columns"]:
    """Return the initial values of rows rows[0]..rows[1]-1 and columns columns[0]..columns[1]-1 of a table.

    Values are computed in float64 and rounded to the dtype of the table. 16-bit values are rounded to float32 first.
    """
    # A uniform cell is scale * (2 u - 1) with 24 random bits in u. A normal cell is the Box-Muller transform of the
    # pair of words that it belongs to.
    scale = spec.init.scale_of(spec.num_embeddings)
    shape = rows[1] - rows[0], columns[1] - columns[0]
    weight = empty(shape, getattr(torch, spec.dtype), device, keep=False)
    if spec.init.kind == "constant":
        return weight.fill_(scale)
    key, step = table_key(seed, spec.name), max(1, CHUNK_CELLS[spec.init.kind] // shape[1])
    for start in range(rows[0], rows[1], step):
        stop = min(start + step, rows[1])
        chunk = weight[start - rows[0] : stop - rows[0]]
        if spec.init.kind == "normal":
            bits = random_bits(key, (start, stop), _align_to_pairs(columns), device)
            chunk.copy_(_normal_cells(bits, columns).mul_(scale))
        elif weight.device.type != "cpu":
            chunk.copy_(reference.uniform(random_bits(key, (start, stop), columns, device), scale))
        else:
            exact = chunk.dtype in (torch.float32, torch.float64)
            cells = chunk if exact else torch.empty(chunk.shape, dtype=torch.float32)
            core().uniform_rows(key, start, columns[0], scale, cells.numpy(), torch.get_num_threads())
            if not exact:
                chunk.copy_(cells)
    return weight


def initial_rows_at(
    spec: TableSpec, rows: Int[Tensor, " n"], *, columns: tuple[int, int], seed: int
) -> Float[Tensor, "n columns"]:
    """Return the initial values of arbitrary rows, int64 [n] on the CPU. They are those of `initial_rows`."""
    scale, width = spec.init.scale_of(spec.num_embeddings), columns[1] - columns[0]
    weight = empty((len(rows), width), getattr(torch, spec.dtype), keep=False)
    if spec.init.kind == "constant":
        return weight.fill_(scale)
    key, step = table_key(seed, spec.name), max(1, CHUNK_CELLS[spec.init.kind] // width)
    for numbers, chunk in zip(rows.split(step), weight.split(step), strict=True):
        if spec.init.kind == "normal":
            bits = reference.cell_bits(key, numbers, _align_to_pairs(columns))
            chunk.copy_(_normal_cells(bits, columns).mul_(scale))
            continue
        exact = chunk.dtype in (torch.float32, torch.float64)
        cells = chunk if exact else torch.empty(chunk.shape, dtype=torch.float32)
        of_rows = numbers.contiguous().numpy()
        core().uniform_rows_at(key, of_rows, columns[0], scale, cells.numpy(), torch.get_num_threads())
        if not exact:
            chunk.copy_(cells)
    return weight


def _align_to_pairs(columns: tuple[int, int]) -> tuple[int, int]:
    return columns[0] // 2 * 2, -(-columns[1] // 2) * 2


def _normal_cells(bits: Tensor, columns: tuple[int, int]) -> Tensor:
    """Return standard normal cells, float64 [rows, columns], from words for whole pairs of columns."""
    first, _ = _align_to_pairs(columns)
    return reference.box_muller(bits)[:, columns[0] - first : columns[1] - first]
