"""Reference of row quantization in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from meseta.ops.quantize.adaptive import adaptive_codes, row_range
from meseta.ops.random_rows import random_bits

CODE_BITS = {"int8": 8, "int4": 4, "int3": 3, "int2": 2}
FORMATS = (*CODE_BITS, "fp8_e4m3", "fp8_e5m2", "fp16", "bf16")
_DTYPES = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
_MANTISSA_BITS = {"fp8_e4m3": 3, "fp8_e5m2": 2, "fp16": 10, "bf16": 7}
_MIN_EXPONENT = {"fp8_e4m3": -6, "fp8_e5m2": -14, "fp16": -14, "bf16": -126}


def row_bytes(row_format: str, dim: Any) -> Any:
    """Return the number of bytes of a quantized row. `dim` may be a symbolic int of torch, and so may the result."""
    if row_format == "int8":
        return dim + 8
    if row_format in CODE_BITS:
        return (dim * CODE_BITS[row_format] + 7) // 8 + 4
    return dim + 4 if row_format.startswith("fp8") else 2 * dim


def quantize_rows(
    rows: Tensor, row_format: str, adaptive: bool, stochastic: bool, key: int, first_row: int, first_column: int
) -> Tensor:
    """Implement `meseta.ops.quantize.quantize_rows` in plain PyTorch."""
    dtype, rows, (n, dim) = rows.dtype, rows.to(torch.float32), rows.shape
    bits = None
    if stochastic and rows.numel():
        corner = (first_row, first_row + n), (first_column, first_column + dim)
        bits = random_bits(key % 2**64, *corner, device=rows.device)
    if row_format in ("fp16", "bf16"):
        return _to_bytes(to_short(rows, row_format, bits))
    if row_format.startswith("fp8"):
        largest = torch.finfo(_DTYPES[row_format]).max
        scale = (_row_amax(rows.abs()) / largest).clamp(min=2.0**-126)
        scale = torch.where(_row_amax(rows.abs()) == 0, 1.0, scale)
        codes = to_short((rows / scale).clamp(-largest, largest), row_format, bits).view(torch.uint8)
        return torch.cat([codes, _to_bytes(scale)], dim=1)
    if adaptive:
        codes, scale, offset = adaptive_codes(rows, CODE_BITS[row_format], dtype)
    else:
        codes, scale, offset = _quantize_int(rows, row_format, bits)
    if row_format == "int8":
        return torch.cat([codes, _to_bytes(scale), _to_bytes(offset)], dim=1)
    return torch.cat(
        [_pack_codes(codes, CODE_BITS[row_format]), _to_bytes(scale.half()), _to_bytes(offset.half())], dim=1
    )


def _quantize_int(rows: Tensor, row_format: str, bits: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    (low, high), top = row_range(rows), 2 ** CODE_BITS[row_format] - 1
    if row_format == "int8":
        # Torch divides a number by a tensor as a product with the reciprocal, which rounds twice.
        scale, offset = (high - low) / 255, low
        inverse = torch.full_like(low, 255) / (high - low + 1e-8)
    else:
        offset = low.half().float()
        scale = ((high - offset) / top).half().float()
        scale = torch.where((scale == 0) | (1 / scale).isinf(), 1.0, scale)
        inverse = 1 / scale
    return _round((rows - offset) * inverse, bits).clamp(0, top).to(torch.uint8), scale, offset


def dequantize_rows(codes: Tensor, row_format: str, dim: int) -> Tensor:
    """Implement `meseta.ops.quantize.dequantize_rows` in plain PyTorch."""
    if row_format in ("fp16", "bf16"):
        return _from_bytes(codes, _DTYPES[row_format]).to(torch.float32)
    if row_format.startswith("fp8"):
        values = _from_bytes(codes[:, :dim], _DTYPES[row_format]).to(torch.float32)
        return values * _from_bytes(codes[:, dim:], torch.float32)
    if row_format == "int8":
        scale, offset = _from_bytes(codes[:, dim:], torch.float32).split(1, dim=1)
        return codes[:, :dim].float() * scale + offset
    scale, offset = _from_bytes(codes[:, -4:], torch.float16).float().split(1, dim=1)
    return _unpack_codes(codes[:, :-4], CODE_BITS[row_format], dim).float() * scale + offset


def _pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes into bytes, the first code in the lowest bits: uint8 [n, D] -> [n, ceil(D * bits / 8)]."""
    n, dim = codes.shape
    stream = (codes[:, :, None] >> torch.arange(bits, dtype=torch.uint8, device=codes.device)) & 1
    stream = pad(stream.view(n, dim * bits), (0, -dim * bits % 8)).view(n, (dim * bits + 7) // 8, 8)
    return (stream << torch.arange(8, dtype=torch.uint8, device=codes.device)).sum(2, dtype=torch.uint8)


def _unpack_codes(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Unpack codes: uint8 [n, ceil(dim * bits / 8)] -> [n, dim]."""
    stream = (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    stream = stream.flatten(1)[:, : dim * bits].reshape(len(packed), dim, bits)
    return (stream << torch.arange(bits, dtype=torch.uint8, device=packed.device)).sum(2, dtype=torch.uint8)


def _to_bytes(numbers: Tensor) -> Tensor:
    """Return the bytes of each row: [n, k] -> uint8 [n, k * itemsize]."""
    return numbers.flatten().clone().view(torch.uint8).view(len(numbers), numbers.shape[1] * numbers.element_size())


def _from_bytes(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Reinterpret bytes as numbers: uint8 [n, k] -> [n, k / itemsize]."""
    # The copy aligns the bytes, because `view` needs aligned storage.
    return data.flatten().clone().view(dtype).view(len(data), data.shape[1] // dtype.itemsize)


def _row_amax(rows: Tensor) -> Tensor:
    """Return the maximum of each row, [n, D] -> [n, 1], or 0 without columns."""
    return rows.amax(1, keepdim=True) if rows.shape[1] else rows.new_zeros(len(rows), 1)


def _round(values: Tensor, bits: Tensor | None) -> Tensor:
    """Round to nearest even, or stochastically: up if the upper 24 bits are below the fractional part."""
    if bits is None:
        return values.round()
    down = values.floor()
    return down + ((bits >> 8).float() * 2.0**-24 < values - down)


def to_short(values: Tensor, row_format: str, bits: Tensor | None) -> Tensor:
    """Convert float32 to a shorter format, to nearest even. `bits` rounds magnitudes stochastically to a neighbor."""
    if bits is None:
        return values.to(_DTYPES[row_format])
    exponent = (torch.frexp(values).exponent - 1).clamp(min=_MIN_EXPONENT[row_format])
    # Scale in two steps, because 2^133 is not a float32.
    step = exponent - _MANTISSA_BITS[row_format]
    half = step // 2
    scaled = torch.ldexp(torch.ldexp(values.abs(), -half), half - step)
    rounded = torch.ldexp(torch.ldexp(_round(scaled, bits), half), step - half)
    return torch.where(values.isfinite(), rounded.copysign(values), values).to(_DTYPES[row_format])
