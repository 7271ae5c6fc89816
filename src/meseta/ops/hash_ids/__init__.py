"""Hashing of arbitrary ids to rows of a table."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from meseta.ops.common import contiguous_ids, register
from meseta.ops.core import core
from meseta.ops.hash_ids import reference
from meseta.sparse.shapes import Int
from meseta.spec import MesetaError, suggest

HashMethod = Literal["splitmix64", "xxh64"]


def hash_ids(
    ids: Int[Tensor, " nnz"], num_rows: int, seed: int = 0, method: HashMethod = "splitmix64"
) -> Int[Tensor, " nnz"]:
    """Return a row in 0..num_rows-1 for each id, as int64.

    Args:
        ids: int32 or int64 ids. Equal numbers of both dtypes have equal rows.
        num_rows: Number of rows, 1..2^63-1.
        seed: Seed, 0..2^64-1.
        method: "splitmix64" is the fastest: output number `seed` of SplitMix64 started with the id (Steele et al.,
            "Fast splittable pseudorandom number generators", OOPSLA 2014). "xxh64" is XXH64 of the eight bytes of the
            id, as `meseta.data.hash_categories` computes it for strings.

    Raises:
        MesetaError: `num_rows` or `seed` is out of range, or `method` is unknown.
    """
    # The row is the upper 64 bits of hash * num_rows, which is distributed as evenly as a modulo.
    if not 1 <= num_rows < 2**63:
        raise MesetaError(f"hash_ids: num_rows must be in 1..2**63-1, got {num_rows}")
    if not 0 <= seed < 2**64:
        raise MesetaError(f"hash_ids: seed must be in 0..2**64-1, got {seed}")
    _check_method(method)
    rows: Tensor = _operator(ids, num_rows, seed - 2**64 if seed >= 2**63 else seed, method)
    return rows


def _check_method(method: str) -> None:
    if method not in get_args(HashMethod):
        raise MesetaError(f"hash_ids: method {method!r} is unknown; {suggest(method, get_args(HashMethod))}")


def _cpu(ids: Tensor, num_rows: int, seed: int, method: str) -> Tensor:
    ids = contiguous_ids("hash_ids", ids)
    _check_method(method)
    rows = torch.empty(ids.numel(), dtype=torch.int64)
    try:
        core().hash_ids(
            ids.data_ptr(),
            ids.numel(),
            ids.dtype == torch.int64,
            num_rows,
            seed % 2**64,
            method == "xxh64",
            rows.data_ptr(),
            torch.get_num_threads(),
        )
    except ValueError as error:
        raise MesetaError(f"hash_ids: {error}") from None
    return rows


def _fake(ids: Tensor, num_rows: int, seed: int, method: str) -> Tensor:
    return torch.empty_like(ids, dtype=torch.int64)


_operator = register(
    "hash_ids(Tensor ids, int num_rows, int seed, str method) -> Tensor",
    cpu=_cpu,
    cuda=reference.hash_ids,
    fake=_fake,
)
