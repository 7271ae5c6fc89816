"""Reference of the random generator: Philox4x32-10 and Box-Muller in plain PyTorch, for any device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_WORD_MASK = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Apply ten rounds of Philox to four int64 tensors of 32-bit words. A tensor `key` is an int64 scalar."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & _WORD_MASK, (key >> 32) & _WORD_MASK
    for _ in range(10):
        # Products wrap around in int64. Shift and mask still return their upper words.
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _WORD_MASK) ^ c1 ^ k0,
            product1 & _WORD_MASK,
            ((product0 >> 32) & _WORD_MASK) ^ c3 ^ k1,
            product0 & _WORD_MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _WORD_MASK, (k1 + 0xBB67AE85) & _WORD_MASK
    return c0, c1, c2, c3


def random_bits(
    key: int | Tensor, rows: tuple[int, int], columns: tuple[int, int], device: torch.device | str
) -> Tensor:
    """Implement `meseta.ops.random_rows.random_bits` in plain PyTorch."""
    return cell_bits(key, torch.arange(*rows, device=device), columns)


def cell_bits(key: int | Tensor, rows: Tensor, columns: tuple[int, int]) -> Tensor:
    """Return the random bits of rows with arbitrary numbers, int64 [n]."""
    group = torch.arange(columns[0] // 4, -(-columns[1] // 4), device=rows.device)[None, :]
    row, group = torch.broadcast_tensors(rows[:, None], group)
    words = philox((row & _WORD_MASK, (row >> 32) & _WORD_MASK, group & _WORD_MASK, torch.zeros_like(row)), key)
    bits = torch.stack(words, dim=-1).flatten(1)
    first = columns[0] // 4 * 4
    return bits[:, columns[0] - first : columns[1] - first].contiguous()


def uniform(bits: Tensor, scale: float) -> Tensor:
    """Convert words [rows, columns] to float64 in [-scale, scale), from the upper 24 bits of each word."""
    return (bits >> 8).double().mul_(2.0**-23).sub_(1.0).mul_(scale)


def box_muller(bits: Tensor) -> Tensor:
    """Convert words [rows, 2n] to standard normal float64: the cosine and the sine of each pair of words."""
    first, second = bits[:, 0::2].double(), bits[:, 1::2].double()
    radius = torch.sqrt(-2 * torch.log((first + 1) * 2.0**-32))
    angle = second * (2 * math.pi * 2.0**-32)
    return torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], dim=-1).flatten(1)
