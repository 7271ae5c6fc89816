"""Calls of the codecs, with expected results from torch's casts, for tests on CPU, Triton's interpreter and GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meseta.ops.codec import HalfRange, StochasticRounding, decode_columns, encode_columns, reference
from meseta.ops.codec.layout import pack_layouts
from meseta.ops.columns.reference import place_columns
from meseta.ops.random_rows import random_bits
from meseta.spec.codecs import CODECS, Codec

NAMES = ["fp16", "bf16", "fp8", "int8"]
SPECIAL = [0.0, -0.0, 65504.0, -65519.0, 65520.0, 1e-45, -3e-42, 1e-38, 3.4e38, -7e4, 2.0**-9, 448.0]
NOT_FINITE = [float("nan"), float("inf"), -float("inf")]


@dataclass(frozen=True)
class Case:
    """Arguments of encode_columns, except the result."""

    codec: Codec
    pieces: tuple[int, ...]
    sources: list[Tensor]
    moves: tuple[int, ...]
    num_rows: int
    scale: float = 1.0
    exponent: int = 0
    rounding: StochasticRounding | None = None

    def to(self, device: str) -> Case:
        rounding = self.rounding
        if rounding is not None and isinstance(rounding.row_numbers, Tensor):
            rounding = replace(rounding, row_numbers=rounding.row_numbers.to(device))
        return replace(self, sources=[source.to(device) for source in self.sources], rounding=rounding)

    def placed(self) -> Tensor:
        values = torch.zeros(self.num_rows, sum(self.pieces))
        place_columns(values, self.sources, self.moves, self.scale)
        return values

    def empty(self, device: str = "cpu") -> Tensor:
        return torch.full((self.num_rows, self.codec.row_bytes(self.pieces)), 77, dtype=torch.uint8, device=device)

    def encoded(self, device: str = "cpu") -> tuple[Tensor, int]:
        """Return the result of the operator."""
        case, out = self.to(device), self.empty(device)
        overflows = torch.full((1,), 5, dtype=torch.int64, device=device)
        half = HalfRange(self.exponent, overflows)
        encode_columns(
            out,
            case.sources,
            case.moves,
            case.codec,
            case.pieces,
            scale=case.scale,
            rounding=case.rounding,
            half_range=half,
        )
        return out.cpu(), int(overflows) - 5

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments of the registered operator after `out`."""
        random: list[int] = []
        rows = None
        if self.rounding is not None:
            rows = self.rounding.row_numbers if isinstance(self.rounding.row_numbers, Tensor) else None
            first = 0 if isinstance(self.rounding.row_numbers, Tensor) else self.rounding.row_numbers
            keys = [key - 2**64 if key >= 2**63 else key for key in self.rounding.keys]
            random = [*keys, *self.rounding.columns, first]
        layout = pack_layouts(self.codec, self.exponent, [self.pieces])
        return self.sources, list(self.moves), layout, self.scale, random, rows, torch.zeros(1, dtype=torch.int64)

    def by(self, implementation: Any) -> tuple[Tensor, int]:
        """Return the result of the reference, or of Triton under its interpreter."""
        out, arguments = self.empty(), self.arguments()
        with np.errstate(all="ignore"):  # Triton's interpreter uses numpy, which warns about overflows
            implementation.encode_columns(out, *arguments)
        return out, int(arguments[-1])


def draw_moves(random: np.random.Generator, widths: list[int], num_columns: int, count: int) -> tuple[int, ...]:
    """Draw any moves, some of them by groups of four columns."""
    numbers: list[int] = []
    step = 4 if random.integers(2) else 1
    for _ in range(count):
        source = int(random.integers(len(widths)))
        most = min(widths[source], num_columns) // step
        width = int(random.integers(most + 1)) * step
        start = int(random.integers((widths[source] - width) // step + 1)) * step
        to = int(random.integers((num_columns - width) // step + 1)) * step
        numbers += [source, start, to, width, int(random.integers(2))]
    return tuple(numbers)


def make_case(
    seed: int, name: str, num_rows: int, pieces: tuple[int, ...], *, drawn: bool = False, finite: bool = False
) -> Case:
    """Return a case of normal numbers of several sizes and all special values, with moves that cover the row, or any
    moves."""
    random = np.random.default_rng(seed)
    columns = sum(pieces)
    widths = [columns, *(int(width) for width in random.integers(0, 50, 2))]
    sources = []
    for width in widths:
        stride = width + int(random.integers(2)) * 3
        values = torch.from_numpy(random.normal(size=(num_rows, stride))).float()
        values *= torch.from_numpy(10.0 ** random.integers(-3, 4, (num_rows, 1))).float()
        rare = torch.from_numpy(random.random((num_rows, stride))) < 0.02
        kinds = torch.tensor(SPECIAL if finite else SPECIAL + NOT_FINITE)
        values = torch.where(rare, kinds[torch.from_numpy(random.integers(len(kinds), size=rare.shape))], values)
        values[torch.from_numpy(random.random(num_rows)) < 0.1] *= float(random.choice([0.0, 1e-41]))
        sources.append(values[:, :width])
    whole = (0, 0, 0, columns, 0)
    kind = int(random.integers(3))
    moves = whole if kind == 0 else draw_moves(random, widths, columns, 5)
    moves = whole + moves if kind == 2 else moves
    rounding = None
    if drawn and name in ("fp8", "int8"):
        keys = tuple(int(key) for key in random.integers(0, 2**64, len(pieces), dtype=np.uint64))
        firsts = tuple(int(column) * 16 for column in random.integers(0, 9, len(pieces)))
        rows = torch.from_numpy(random.integers(0, 2**40, num_rows)) if random.integers(2) else 2**33 - 2
        rounding = StochasticRounding(keys, firsts, rows)
    scale = float(random.choice([1.0, 0.5, 1 / 3]))
    return Case(CODECS[name], pieces, sources, moves, num_rows, scale, int(random.choice([0, -7, 13])), rounding)  # type: ignore[index]


def recast(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """View the bytes [B, any] as another dtype. Torch refuses this for empty matrices with strides of 0."""
    size = matrix.shape[1] * matrix.element_size() // dtype.itemsize
    return matrix.flatten().clone().view(dtype).view(len(matrix), size)


def expected_bytes(case: Case) -> tuple[Tensor, int]:
    """Return the bytes by torch's casts, block by block, and the number of overflows."""
    values = case.placed()
    if case.codec.name == "bf16":
        codes = values.to(torch.bfloat16).view(torch.int16)
        return recast(torch.where(values.isnan(), 0x7FC0, codes), torch.uint8), 0
    if case.codec.name == "fp16":
        scaled = values * torch.tensor(2.0**case.exponent)
        beyond = (scaled.abs() > 65504) & values.isfinite()
        clamped = torch.where(values.isfinite(), scaled.clamp(-65504, 65504), values)
        codes = torch.where(values.isnan(), 0x7E00, clamped.to(torch.float16).view(torch.int16))
        return recast(codes, torch.uint8), int(beyond.sum())
    numbers, scales = [torch.zeros(case.num_rows, 0, dtype=torch.uint8)], []
    for index, (first, width) in enumerate(zip(accumulate(case.pieces, initial=0), case.pieces, strict=False)):
        for start in range(0, width, 16):
            block = values[:, first + start : first + min(start + 16, width)]
            words = None if case.rounding is None else _words(case, index, start, block.shape[1])
            codes, scale = _block(block, case.codec, words)
            numbers.append(codes)
            scales.append(scale)
    numbers += [torch.zeros(case.num_rows, sum(case.pieces) % 2, dtype=torch.uint8)]
    return torch.cat([*numbers, *scales], dim=1), 0


def _words(case: Case, piece: int, start: int, width: int) -> Tensor:
    rounding = case.rounding
    assert rounding is not None
    first = rounding.columns[piece] + start
    numbers = rounding.row_numbers
    rows = numbers.tolist() if isinstance(numbers, Tensor) else range(numbers, numbers + case.num_rows)
    words = [random_bits(rounding.keys[piece], (row, row + 1), (first, first + width)) for row in rows]
    return torch.cat(words) if words else torch.zeros(0, width, dtype=torch.int64)


def _block(block: Tensor, codec: Codec, words: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return codes [B, width] and bytes [B, 2] of the scale."""
    largest = block.abs().amax(1, keepdim=True)
    exact = torch.div(largest, torch.full_like(largest, codec.max_scaled_value))
    unit = exact.to(torch.bfloat16).float()  # nearest: up, or one below it
    one_up = (unit.to(torch.bfloat16).view(torch.int16) + 1).to(torch.int16).view(torch.bfloat16).float()
    unit = torch.where((unit < exact) | ((unit == 0) & (largest > 0)), one_up, unit)
    quotients = (block / torch.where(unit == 0, 1.0, unit)).clamp(-codec.max_scaled_value, codec.max_scaled_value)
    if codec.name == "int8":
        down = quotients.floor()
        up = down if words is None else down + ((words >> 8) * 2.0**-24 < quotients - down)
        codes = (quotients.round() if words is None else up).nan_to_num().to(torch.int8).view(torch.uint8)
    elif words is None:
        codes = quotients.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = _random_e4m3(quotients, words)
    bad = ~block.isfinite().all(1, keepdim=True)
    codes = torch.where(bad | (largest == 0), torch.zeros_like(codes), codes)
    scale = torch.where(bad, torch.full_like(unit, float("nan")), unit).to(torch.bfloat16).view(torch.int16)
    scale = torch.where(bad, 0x7FC0, scale)
    return codes, recast(scale, torch.uint8)


def _random_e4m3(quotients: Tensor, words: Tensor) -> Tensor:
    """Round randomly to one of the two neighbors among all numbers of the type."""
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    magnitude = quotients.abs().double().nan_to_num()
    below = torch.searchsorted(grid, magnitude.contiguous(), right=True) - 1
    above = (below + 1).clamp(max=126)
    gap = (grid[above] - grid[below]).clamp(min=2.0**-9)
    is_up = (words >> 8).double() * 2.0**-24 < (magnitude - grid[below]) / gap
    codes = torch.where(is_up, above, below).to(torch.uint8)
    return codes | (quotients.signbit().to(torch.uint8) << 7)


def expected_numbers(codes: Tensor, codec: Codec, pieces: tuple[int, ...], exponent: int) -> Tensor:
    """Return float32 [B, columns] of encoded rows."""
    columns = sum(pieces)
    whole = codes[:, : columns * codec.element_bytes]
    if codec.name == "bf16":
        return recast(whole, torch.bfloat16).float()
    if codec.name == "fp16":
        return recast(whole, torch.float16).float() * torch.tensor(2.0**-exponent)
    numbers = recast(whole, torch.float8_e4m3fn if codec.name == "fp8" else torch.int8).float()
    scales = recast(codes[:, columns + columns % 2 :], torch.bfloat16).float()
    per_block = [min(16, width - start) for width in pieces for start in range(0, width, 16)]
    return numbers * scales.repeat_interleave(torch.tensor(per_block, dtype=torch.int64), dim=1)


def decode_case(seed: int, name: str, num_rows: int, all_pieces: list[tuple[int, ...]]) -> dict[str, Any]:
    """Return encoded matrices, moves from them, and a result that is not empty."""
    random = np.random.default_rng(seed)
    codec, exponent = CODECS[name], int(random.choice([0, -7, 13]))  # type: ignore[index]
    sources = [make_case(seed + i, name, num_rows, pieces).by(reference)[0] for i, pieces in enumerate(all_pieces)]
    num_columns = int(random.integers(1, 70))
    moves = draw_moves(random, [sum(pieces) for pieces in all_pieces], num_columns, 4)
    out = torch.from_numpy(random.normal(size=(num_rows, num_columns + 2))).float()
    return {
        "out": out, "sources": sources, "moves": moves, "codec": codec, "pieces": all_pieces,
        "exponent": exponent, "scale": float(random.choice([1.0, 1 / 3])),
    }  # fmt: skip


def check_decode(case: dict[str, Any], device: str = "cpu", implementation: Any = None) -> None:
    """Compare with matrices that are decoded as a whole and then moved."""
    codec, pieces, exponent = case["codec"], case["pieces"], case["exponent"]
    width = case["out"].shape[1] - 2
    expected = case["out"].clone()
    numbers = [expected_numbers(m, codec, p, exponent) for m, p in zip(case["sources"], pieces, strict=True)]
    place_columns(expected[:, :width], numbers, case["moves"], case["scale"])
    got = case["out"].clone().to(device)
    sources = [source.to(device) for source in case["sources"]]
    if implementation is None:
        decode_columns(got[:, :width], sources, case["moves"], codec, pieces, exponent=exponent, scale=case["scale"])
    else:
        layout = pack_layouts(codec, exponent, pieces)
        with np.errstate(all="ignore"):
            implementation.decode_columns(got[:, :width], sources, list(case["moves"]), layout, case["scale"])
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.cpu().signbit() | got.cpu().isnan(), expected.signbit() | expected.isnan())


def check_encode(case: Case) -> None:
    codes, overflows = case.encoded()
    expected, beyond = expected_bytes(case)
    assert torch.equal(codes, expected)
    assert overflows == beyond


def same_as_reference(case: Case, codes: Tensor, overflows: int) -> None:
    expected, beyond = case.by(reference)
    assert torch.equal(codes, expected) and overflows == beyond
