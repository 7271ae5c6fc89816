"""Sums over ranks add in one order under every algorithm, against plain torch in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from meseta.comm import World, sums
from meseta.comm.sums import CHUNK_ALIGNMENT, split_aligned
from meseta.spec.codecs import AllReduceAlgorithm

from .pool import RankPool

Ranks = Callable[[int], RankPool]
PATHS: tuple[AllReduceAlgorithm, ...] = ("flat", "cross_host", "chain")
SIZES = (0, 1, CHUNK_ALIGNMENT, 3 * CHUNK_ALIGNMENT + 5, 1000, 4099)
LAYOUTS = [(2, 1), (2, 2), (3, 1), (3, 3), (4, 1), (4, 2), (4, 4)]
"""(ranks, ranks of a host)."""


def part(rank: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers of many magnitudes, so that another order of additions has other bits."""
    generator = torch.Generator().manual_seed(rank)
    exponents = torch.randint(-12, 12, (size,), generator=generator)
    return (torch.randn(size, generator=generator, dtype=torch.float64) * 2.0**exponents).to(dtype)


def by_hand(num_ranks: int, per_host: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Add left to right over the ranks of a host, then over hosts."""
    hosts = []
    for first in range(0, num_ranks, per_host):
        total = part(first, size, dtype)
        for rank in range(first + 1, first + per_host):
            total = total + part(rank, size, dtype)
        hosts.append(total)
    total = hosts[0]
    for host in hosts[1:]:
        total = total + host
    return total


def add_up(per_host: int, path: AllReduceAlgorithm, chunk_bytes: int, by_itself: bool) -> list[bytes]:
    """Return sums of several sizes, as bytes."""
    world = replace(World.current().with_ranks_per_host(per_host), sum_algorithm=path)
    before, sums.CHUNK_BYTES = sums.CHUNK_BYTES, chunk_bytes
    try:
        tensors = [part(world.rank, size) for size in SIZES]
        if by_itself:
            for pending in [world.start_all_reduce(tensor, "dense") for tensor in tensors]:
                pending.wait()
        else:
            for tensor in tensors:
                world.all_reduce(tensor.view(1, -1), "dense")
        return [tensor.numpy().tobytes() for tensor in tensors]
    finally:
        sums.CHUNK_BYTES = before


@pytest.mark.parametrize(
    ("path", "size", "per_host"),
    [  # in `make test` one algorithm for each layout
        pytest.param(path, *layout, marks=[] if i % len(PATHS) == j else pytest.mark.soak)
        for i, layout in enumerate(LAYOUTS)
        for j, path in enumerate(PATHS)
    ],
)
def test_every_algorithm_has_the_bits_of_one_order(
    ranks: Ranks, path: AllReduceAlgorithm, size: int, per_host: int
) -> None:
    expected = [by_hand(size, per_host, n).numpy().tobytes() for n in SIZES]
    for chunk_bytes, by_itself in ((2**20, False), (256, True)):
        for rank, sums_of_rank in enumerate(ranks(size).run(add_up, per_host, path, chunk_bytes, by_itself)):
            assert sums_of_rank == expected, (rank, chunk_bytes)


def test_another_order_has_other_bits() -> None:
    # The test above compares something only if its numbers have other sums in another order.
    assert not torch.equal(by_hand(4, 2, 4099), by_hand(4, 4, 4099))
    assert not torch.equal(by_hand(4, 2, 4099), by_hand(4, 1, 4099))


def other_sums(per_host: int) -> list[Any]:
    """Return this rank's part of a sum that is scattered over its host, and sums of few numbers."""
    world = World.current().with_ranks_per_host(per_host)
    pieces = part(world.rank, 40 * per_host).view(per_host, 40)
    total = torch.empty(40)
    world.reduce_scatter_intra_host(total, pieces, "gradients of parameters")
    world.start_all_reduce_inter_host(total, "gradients of hosts").wait()
    few = world.all_reduce_small(part(world.rank, 5, torch.float64), "agree")
    counts = world.all_reduce_small(torch.tensor([world.rank, 2**40]), "out-of-range ids")
    return [total.tolist(), few.tolist(), counts.tolist()]


@pytest.mark.parametrize(("size", "per_host"), [(4, 2), (4, 4), (2, 2)])
def test_a_sum_scattered_over_a_host(ranks: Ranks, size: int, per_host: int) -> None:
    whole = by_hand(size, per_host, 40 * per_host).view(per_host, 40)
    few = by_hand(size, per_host, 5, torch.float64)
    for rank, sums_of_rank in enumerate(ranks(size).run(other_sums, per_host)):
        assert sums_of_rank == [whole[rank % per_host].tolist(), few.tolist(), [size * (size - 1) // 2, size * 2**40]]


@pytest.mark.parametrize("size", [0, 5, 16, 17, 100, 4096])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_pieces_begin_at_blocks(size: int, count: int) -> None:
    buffer = torch.arange(size)
    pieces = split_aligned(buffer, count)
    assert len(pieces) == count and torch.equal(torch.cat(pieces), buffer)
    assert all(int(piece[0]) % CHUNK_ALIGNMENT == 0 for piece in pieces if piece.numel())
    assert max(p.numel() for p in pieces) - min(p.numel() for p in pieces) < 2 * CHUNK_ALIGNMENT
