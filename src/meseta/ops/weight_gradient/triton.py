"""Gradient of per-sample weights on a GPU, with one launch for all features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from meseta.ops.common import check_tables, contiguous_ids, device_constant
from meseta.ops.triton_shared import ROW_TYPES, find_last_at_most, sum_16
from meseta.spec import MesetaError

IDS = tl.constexpr(64)
"""Number of ids per program."""
FEATURE_WORDS = tl.constexpr(5)
"""Words per feature: address, rows and columns of its table, its first column in the gradient, flags."""


def weight_gradient(
    tables: Sequence[Tensor], ids: Tensor, offsets: Tensor, gradient: Tensor, flags: Sequence[int]
) -> Tensor:
    """Implement `meseta.ops.weight_gradient.weight_gradient` on a GPU. Ids outside their table get 0."""
    check_tables("weight_gradient", tables)
    ids, offsets = contiguous_ids("weight_gradient", ids), offsets.to(torch.int64).contiguous()
    num_bags, rest = divmod(offsets.numel() - 1, len(tables))
    width = sum(table.shape[1] for table in tables)
    if rest or offsets.numel() == 0 or list(gradient.shape) != [num_bags, width]:
        raise MesetaError(
            f"weight_gradient: {offsets.numel()} offsets and a gradient {list(gradient.shape)} for {len(tables)} "
            f"tables with {width} columns; pass F * B + 1 offsets and a gradient [B, {width}]"
        )
    out = torch.zeros(ids.numel(), dtype=torch.float32, device=ids.device)
    if out.numel() == 0 or num_bags == 0:
        return out
    words, column = [len(tables), num_bags, width, ids.numel()], 0
    for table, flag in zip(tables, flags, strict=True):
        words += [table.data_ptr(), *table.shape, column, flag]
        column += table.shape[1]
    with torch.cuda.device_of(ids):
        _dots[(triton.cdiv(ids.numel(), IDS.value),)](
            out,
            device_constant(tuple(words), ids.device),
            ids,
            offsets,
            gradient.to(torch.float32).contiguous(),
            ROW=ROW_TYPES[tables[0].dtype],
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


@triton.jit
@no_type_check  # Triton parses the source, so that no decorator that checks types may wrap the function.
def _dots(out, words, ids, offsets, gradient, ROW: tl.constexpr):
    num_features, num_bags, width = tl.load(words), tl.load(words + 1), tl.load(words + 2)
    n = tl.program_id(0).to(tl.int64) * IDS + tl.arange(0, IDS)
    live = (n >= tl.load(offsets)) & (n < tl.load(offsets + num_features * num_bags)) & (n < tl.load(words + 3))
    bag = find_last_at_most(offsets, tl.zeros([IDS], dtype=tl.int64), num_features * num_bags, n, live)
    length = tl.load(offsets + bag + 1, mask=live, other=1) - tl.load(offsets + bag, mask=live, other=0)
    feature = words + 4 + bag // num_bags * FEATURE_WORDS
    flags = tl.load(feature + 4, mask=live, other=0)
    row = tl.load(ids + n, mask=live, other=0).to(tl.int64)
    live = live & (row >= 0) & (row < tl.load(feature + 1, mask=live, other=0)) & ((flags & 1) != 0)
    dim = tl.load(feature + 2, mask=live, other=0)
    address = tl.load(feature, mask=live, other=0) + row * dim * (ROW.primitive_bitwidth // 8)
    line = bag % num_bags * width + tl.load(feature + 3, mask=live, other=0)
    count = tl.where((flags & 2) != 0, length, 1).to(tl.float32)[:, None] + tl.zeros([IDS, 16], dtype=tl.float32)
    total = tl.zeros([IDS], dtype=tl.float32)
    # Each iteration handles 16 columns of all ids of this program.
    for first in range(0, tl.max(dim, axis=0), 16):
        column = first + tl.arange(0, 16)[None, :]
        inside = column < dim[:, None]
        values = tl.load(address.to(tl.pointer_type(ROW))[:, None] + column, mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(gradient + (line[:, None] + column), mask=inside, other=0.0)
        total += sum_16(tl.div_rn(upstream, count) * values)
    tl.store(out + n, total, mask=live)
