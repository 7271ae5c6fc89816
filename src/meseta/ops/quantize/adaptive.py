"""Reference of the adaptive quantization range in plain PyTorch. The method is described in grid.h and adaptive.h."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_BINS, NUM_NARROWING_STEPS, NUM_FITS = 32, 16, 3


@dataclass(frozen=True)
class QuantizationGrid:
    """Codes 0..max_code, and the numbers that scale, offset and levels may be."""

    max_code: int
    has_fp16_scales: bool
    """Whether scale and offset must be float16 numbers. Otherwise they are float32 numbers."""
    unit_share: float
    """Unit of the levels of a row, divided by the largest power of two in the row."""
    min_unit: float
    """Minimum unit of the levels of a row."""

    @classmethod
    def from_dtype(cls, bits: int, dtype: torch.dtype) -> QuantizationGrid:
        halves = bits < 8
        part = {torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}.get(dtype, 2.0**-22 if halves else 2.0**-21)
        smallest = 2.0**-24 if halves or dtype == torch.float16 else 2.0**-126
        return cls(2**bits - 1, halves, part, smallest)

    def can_represent(self, values: Tensor) -> Tensor:
        narrow = values.float()
        exact = narrow.double() == values
        return exact & (narrow.half().float() == narrow) & (narrow.abs() <= 65504) if self.has_fp16_scales else exact

    def codes(self, rows: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        """Return the nearest codes as floats, ties to even."""
        return ((rows - offset) * (1 / scale)).clamp(0, self.max_code).round()


def adaptive_codes(rows: Tensor, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, uint8 [n, D], scales and offsets, float32 [n, 1] each. `dtype` is the original one of `rows`."""
    grid, (n, dim) = QuantizationGrid.from_dtype(bits, dtype), rows.shape
    # A row that is on a grid keeps its grid. For others the best range is searched.
    if n == 0 or dim == 0:
        return rows.to(torch.uint8), rows.new_zeros(n, 1), rows.new_zeros(n, 1)
    low, high = row_range(rows)
    scale, offset, is_on_grid = _grid_scales(rows, grid)
    searched = _RangeSearch(rows, grid).best() if grid.has_fp16_scales else _full_range_scales(low, high, grid)
    scale, offset = torch.where(is_on_grid, scale, searched[0]), torch.where(is_on_grid, offset, searched[1])
    codes = grid.codes(rows, scale, offset)
    collapsed = (codes == codes[:, :1]).all(1, keepdim=True) & (low < high)
    # Take the scale and offset that the dequantized row would get, so that quantizing it again changes nothing.
    restored = codes * scale + offset
    settled = _grid_scales(restored, grid)
    codes = grid.codes(restored, settled[0], settled[1])
    unit = _level_unit(low, high, grid.unit_share, grid.min_unit).double()
    middle = _constant_scales((((low.double() + high) / 2 / unit).round() * unit).float() + 0.0, grid)
    constant = _constant_scales(low, grid)
    scale, offset = (
        torch.where(low == high, constant[i], torch.where(collapsed, middle[i], settled[i])) for i in range(2)
    )
    return torch.where((low == high) | collapsed, 1.0, codes).to(torch.uint8), scale, offset


def row_range(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the minimum and maximum of each row, [n, 1] each. Without columns they are 0. Zeros are positive."""
    if rows.shape[1] == 0:
        return rows.new_zeros(len(rows), 1), rows.new_zeros(len(rows), 1)
    return rows.amin(1, keepdim=True) + 0.0, rows.amax(1, keepdim=True) + 0.0


def _power_of_two_part(values: Tensor) -> Tensor:
    return (values.view(torch.int32) & 0x7F800000).view(torch.float32)


def _level_unit(low: Tensor, high: Tensor, part: float, smallest: float) -> Tensor:
    return (_power_of_two_part(torch.maximum(low.abs(), high.abs())) * part).clamp(min=smallest)


def _constant_scales(values: Tensor, grid: QuantizationGrid) -> tuple[Tensor, Tensor]:
    scale, offset = torch.zeros_like(values), values
    for _ in range(2 if grid.has_fp16_scales else 0):
        whole = offset + scale
        nearest = whole.half()
        bits = nearest.view(torch.int16)
        lower = torch.where(bits == 0, -32767, torch.where(bits < 0, bits + 1, bits - 1)).to(torch.int16)
        offset = torch.where(nearest.float() > whole, lower.view(torch.float16), nearest).float() + 0.0
        scale = (whole - offset).half().float()
    return scale, offset


def _grid_scales(rows: Tensor, grid: QuantizationGrid) -> tuple[Tensor, Tensor, Tensor]:
    """Return (scale, offset, is_on_grid), [n, 1] each. Scale and offset are meaningful for rows on a grid only."""
    low, high = row_range(rows)
    unit = _level_unit(low, high, 2.0**-23, grid.min_unit).double()
    units = (rows.double() - low.double()) / unit
    fits = (units == units.floor()).all(1, keepdim=True) & (low < high)
    # The greatest common divisor of the distances from the minimum is the largest possible step between levels.
    whole = torch.where(fits, units, 1.0).long()
    distance = whole.amax(1, keepdim=True)
    step = distance.clone()
    for c in range(rows.shape[1]):
        step = torch.gcd(step, whole[:, c : c + 1])
    fits &= distance <= step * grid.max_code
    scale, offset, done = torch.ones_like(low), torch.zeros_like(low), torch.zeros_like(fits)
    highest = distance // step.clamp(min=1)
    for part in range(1, grid.max_code + 1 if grid.has_fp16_scales and bool(fits.any()) else 2):
        for below in range(grid.max_code - part + 1 if grid.has_fp16_scales and bool(fits.any()) else 1):
            wide = step * unit / part
            start = low.double() - below * wide
            right = (
                fits
                & ~done
                & (highest * part + below <= grid.max_code)
                & grid.can_represent(wide)
                & grid.can_represent(start)
            )
            scale, offset = torch.where(right, wide.float(), scale), torch.where(right, start.float(), offset)
            done |= right
    done &= (grid.codes(rows, scale, offset) * scale + offset == rows).all(1, keepdim=True)
    return scale, offset, done


def _full_range_scales(low: Tensor, high: Tensor, grid: QuantizationGrid) -> tuple[Tensor, Tensor]:
    unit = _level_unit(low, high, grid.unit_share, grid.min_unit).double()
    offset = (low.double() / unit).floor() * unit
    steps = torch.ceil((high.double() - offset) / 255.0 / unit).clamp(min=1.0)
    return (steps * unit).float(), offset.float()


def _sum_columns(values: Tensor) -> Tensor:
    """Sum columns from left to right: [n, D] -> [n, 1]."""
    # The compiled kernel adds in this order.
    total = torch.zeros_like(values[:, :1])
    for c in range(values.shape[1]):
        total = total + values[:, c : c + 1]
    return total


class _RangeSearch:
    """Search for the range with the lowest squared error. Candidates are (scale, offset, error), [n, 1] each."""

    def __init__(self, rows: Tensor, grid: QuantizationGrid) -> None:
        self.rows, self.max_code = rows, grid.max_code
        self.low, self.high = row_range(rows)
        self.unit = _level_unit(self.low, self.high, grid.unit_share, grid.min_unit)

    def best(self) -> tuple[Tensor, Tensor, Tensor]:
        best = self._narrow()
        for _ in range(NUM_FITS):
            best = _lower_error(self._fit_least_squares(*best), best)
        return best

    def _round_to_half(self, values: Tensor) -> Tensor:
        # Adding and subtracting 1.5 * 2^23 units rounds to a multiple of the unit.
        shift = torch.maximum(_power_of_two_part(values) * 2.0**-10, self.unit) * (1.5 * 2**23)
        return (values + shift) - shift

    def _to_codes(self, steps: Tensor) -> Tensor:
        return steps.clamp(0, self.max_code).round()

    def _evaluate(self, scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scale = torch.maximum(self._round_to_half(scale), self.unit)
        steps = (self.rows - offset) * (1 / scale)
        return scale, offset, _sum_columns((steps - self._to_codes(steps)) ** 2) * scale * scale

    def _evaluate_range(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        offset = self._round_to_half(low)
        return self._evaluate((high - offset) / self.max_code, offset)

    def _narrow(self) -> tuple[Tensor, Tensor, Tensor]:
        low, high = self.low, self.high
        step, best = (high - low) / NUM_BINS, self._evaluate_range(low, high)
        for _ in range(NUM_NARROWING_STEPS):
            up, down = self._evaluate_range(low + step, high), self._evaluate_range(low, high - step)
            upper = down[2] - up[2] > 0
            low, high = torch.where(upper, low + step, low), torch.where(upper, high, high - step)
            best = _lower_error(_lower_error(up, down), best)
        return best

    def _fit_least_squares(self, scale: Tensor, offset: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, count = self.rows - offset, float(self.rows.shape[1])
        codes = self._to_codes(values * (1 / scale))
        sums = _sum_columns(codes)
        spread = count * _sum_columns(codes * codes) - sums * sums
        slope = (count * _sum_columns(codes * values) - sums * _sum_columns(values)) / spread
        slope = torch.where((spread > 0) & (slope > 0), slope, scale)
        start, margin = offset + (_sum_columns(values) - slope * sums) / count, (self.high - self.low) * 0.125
        offset = self._round_to_half(torch.clamp(start, (self.low - margin).clamp(min=-65504.0), self.high))
        limit = (self.high + margin - offset) / self.max_code
        return self._evaluate(torch.minimum(slope, limit), offset)


def _lower_error(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Select the candidate with the lower error for each row, or `b` in a tie."""
    less = b[2] - a[2] > 0
    scale, offset, error = (torch.where(less, x, y) for x, y in zip(a, b, strict=True))
    return scale, offset, error
