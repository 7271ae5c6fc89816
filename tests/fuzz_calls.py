"""Valid calls of every operator that reads ids, offsets, lengths, programs or shapes, and ways to spoil them."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meseta import ops
from meseta.ops.codec.layout import pack_layouts
from meseta.ops.quantize.reference import CODE_BITS, FORMATS, row_bytes
from meseta.ops.row_program.optimizer import Hyper
from meseta.ops.row_program.program import RowProgram, trace
from meseta.optim import make_row_optimizer
from meseta.spec import OptimizerSpec
from meseta.spec.codecs import CODECS
from meseta.spec.optimizer import USED_FIELDS

for module in pkgutil.iter_modules(ops.__path__, "meseta.ops."):
    importlib.import_module(module.name)  # registers the operators
importlib.import_module("meseta.ops.row_update.staged")

Rng = np.random.Generator
HOSTILE = (-1, -2, 1, 5, 7, 40, 2**31 - 1, -(2**31), 2**31, 2**32, 2**33 + 1, 2**62, 2**63 - 1, -(2**63))
OPTIMIZERS = [name for name, used in USED_FIELDS.items() if used]
NUMBERS = (math.nan, math.inf, -math.inf, 3e38, -70000.0, 1e-45, -0.0)
ANY_TYPE = (
    torch.int16, torch.int32, torch.int64, torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.uint8,
    torch.bool,
)  # fmt: skip
TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
GUARD = 64


@dataclass
class Call:
    """Arguments of one operator."""

    name: str
    arguments: list[Any]
    guards: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Memory next to an operator's outputs, and its expected content."""
    code_at: int | None = None
    """Index of the argument that is a program for the core, or `None`."""

    def run(self) -> Any:
        return getattr(torch.ops.meseta, self.name).default(*self.arguments)


def pick(rng: Rng, values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def integers(rng: Rng, low: int, high: int, count: int, wide: bool = True) -> Tensor:
    return torch.from_numpy(rng.integers(low, high, count)).to(torch.int64 if wide else torch.int32)


def floats(rng: Rng, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)


def tables_of(rng: Rng, num_tables: int) -> list[Tensor]:
    dtype = pick(rng, TYPES)
    sizes = [(pick(rng, (1, 5, 40)), pick(rng, (1, 3, 16, 17, 40, 130))) for _ in range(num_tables)]
    return [floats(rng, rows, dim, dtype=dtype) for rows, dim in sizes]


def bags_of(rng: Rng, tables: list[Tensor]) -> tuple[Tensor, Tensor, list[int], int]:
    """Return ids, offsets, the first bag of each feature, and the number of samples."""
    num_bags, wide = int(rng.integers(0, 5)), bool(rng.integers(2))
    lengths = rng.integers(0, 4, (len(tables), num_bags))
    per_feature = lengths.sum(1)
    ids = [integers(rng, 0, len(t), n, wide) for t, n in zip(tables, per_feature, strict=True)]
    offsets = torch.tensor([0, *np.cumsum(lengths)]).to(pick(rng, (torch.int64, torch.int32)))
    return torch.cat(ids), offsets, list(accumulate(map(int, per_feature), initial=0)), num_bags


def pooled_lookup(rng: Rng) -> Call:
    tables = tables_of(rng, pick(rng, (1, 2, 3)))
    ids, offsets, _, _ = bags_of(rng, tables)
    weights = floats(rng, ids.numel()) if rng.integers(2) else None
    return Call("pooled_lookup", [tables, ids, offsets, weights, [pick(rng, (0, 1, 2, 3)) for _ in tables]])


def row_lookup(rng: Rng) -> Call:
    tables = tables_of(rng, pick(rng, (1, 2, 3)))
    ids, _, bounds, _ = bags_of(rng, tables)
    return Call("row_lookup", [tables, ids, bounds])


def weight_gradient(rng: Rng) -> Call:
    tables = tables_of(rng, pick(rng, (1, 2, 3)))
    ids, offsets, _, num_bags = bags_of(rng, tables)
    gradient = floats(rng, num_bags, sum(t.shape[1] for t in tables))
    return Call("weight_gradient", [tables, ids, offsets, gradient, [pick(rng, (0, 1, 3)) for _ in tables]])


def coalesce(rng: Rng) -> Call:
    num_ids, num_sources = int(rng.integers(0, 20)), int(rng.integers(1, 9))
    gradient = floats(rng, num_sources, pick(rng, (1, 3, 17)), dtype=pick(rng, (torch.float32, torch.float64)))
    ids, source = integers(rng, 0, 6, num_ids), integers(rng, 0, num_sources, num_ids)
    if num_ids and rng.integers(2):
        ids[: num_ids // 2] = pick(rng, HOSTILE)
    scale = floats(rng, num_ids) if rng.integers(2) else None
    return Call("coalesce", [ids, source, integers(rng, 0, 3, num_ids).sort().values, gradient, scale])


def bucketize(rng: Rng) -> Call:
    num_features, num_bags, wide = pick(rng, (1, 2, 3)), int(rng.integers(0, 5)), bool(rng.integers(2))
    lengths = integers(rng, 0, 4, num_features * num_bags, bool(rng.integers(2)))
    cuts: list[int] = []
    sizes: list[int] = []
    for _ in range(num_features):
        bounds = [int(rng.integers(1, 40))] if rng.integers(2) else [0, *sorted(rng.integers(0, 9, 3).tolist()), 9]
        cuts, sizes = cuts + bounds, [*sizes, len(bounds)]
    return Call("bucketize", [integers(rng, 0, 9, int(lengths.sum()), wide), lengths, cuts, sizes])


def count_outside(rng: Rng) -> Call:
    bounds = [0, *sorted(rng.integers(0, 9, 2).tolist()), 9]
    return Call("count_outside", [integers(rng, -3, 9, 9, bool(rng.integers(2))), bounds, [5, 1, 2**33]])


def fix_ids(rng: Rng) -> Call:
    lengths = integers(rng, 0, 4, 6, bool(rng.integers(2)))
    ids = integers(rng, -3, 9, int(lengths.sum()), bool(rng.integers(2)))
    return Call("fix_ids", [ids, lengths, [0, 2, 6], [4, 1], rng.integers(0, 4, 2).tolist()])


def unique(rng: Rng) -> Call:
    count = int(rng.integers(0, 40))
    bounds = [0, *sorted(rng.integers(0, count + 1, 2).tolist()), count]
    return Call("unique", [integers(rng, -3, 9, count, bool(rng.integers(2))), bounds])


def permute_keys(rng: Rng) -> Call:
    arrays, bounds = [], []
    for _ in range(pick(rng, (1, 2, 3))):
        offsets = [0, *sorted(rng.integers(0, 12, 3).tolist())]
        dtype = pick(rng, (torch.int64, torch.int32, torch.float32, torch.float16, torch.uint8))
        arrays, bounds = [*arrays, integers(rng, 0, 99, offsets[-1]).to(dtype)], bounds + offsets
    return Call("permute_keys", [arrays, bounds, rng.permutation(3).tolist()])


def place_columns(rng: Rng) -> Call:
    call, dtype = Call("place_columns", []), pick(rng, (torch.float32, torch.float64))
    num_rows = int(rng.integers(0, 9))
    sources = [floats(rng, num_rows, width, dtype=dtype) for width in rng.integers(0, 9, 2).tolist()]
    moves = []
    for source in rng.integers(0, 2, 3).tolist():
        width = int(rng.integers(0, sources[source].shape[1] + 1))
        start = int(rng.integers(0, sources[source].shape[1] - width + 1))
        moves += [source, start, int(rng.integers(0, 9 - width)), width, int(rng.integers(2))]
    call.arguments = [written(rng, call, floats(rng, num_rows, 8, dtype=dtype)), sources, moves, 0.5]
    return call


def encode_columns(rng: Rng) -> Call:
    call, placed = Call("encode_columns", []), place_columns(rng)
    codec, pieces = pick(rng, list(CODECS.values())[1:]), pick(rng, ((8,), (3, 0, 5)))
    num_rows = len(placed.arguments[0])
    sources = [source.float() for source in placed.arguments[1]]
    random: list[int] = []
    if codec.scale_bytes and rng.integers(2):
        random = [*rng.integers(-(2**63), 2**63, len(pieces)).tolist(), *[16] * len(pieces), 2**33]
    rows = integers(rng, 0, 2**40, num_rows) if rng.integers(2) else None
    out = written(rng, call, torch.zeros(num_rows, codec.row_bytes(pieces), dtype=torch.uint8))
    layout, count = pack_layouts(codec, 3, [pieces]), written(rng, call, torch.zeros(1, dtype=torch.int64))
    call.arguments = [out, sources, placed.arguments[2], layout, 0.5, random, rows, count]
    return call


def decode_columns(rng: Rng) -> Call:
    call, placed = Call("decode_columns", []), place_columns(rng)
    codec, num_rows = pick(rng, list(CODECS.values())[1:]), len(placed.arguments[0])
    pieces = [(source.shape[1],) for source in placed.arguments[1]]
    sources = [
        torch.from_numpy(rng.integers(0, 256, (num_rows, codec.row_bytes(piece))).astype("uint8")) for piece in pieces
    ]
    out = written(rng, call, floats(rng, num_rows, 8))
    call.arguments = [out, sources, placed.arguments[2], pack_layouts(codec, 3, pieces), 0.5]
    return call


def lengths_to_offsets(rng: Rng) -> Call:
    return Call("lengths_to_offsets", [integers(rng, 0, 9, int(rng.integers(0, 40)), bool(rng.integers(2)))])


def hash_ids(rng: Rng) -> Call:
    ids = integers(rng, -9, 9, int(rng.integers(0, 40)), bool(rng.integers(2)))
    return Call("hash_ids", [ids, pick(rng, (1, 7, 2**40)), pick(rng, HOSTILE), pick(rng, ("splitmix64", "xxh64"))])


def quantize_rows(rng: Rng) -> Call:
    rows = floats(rng, int(rng.integers(0, 5)), int(rng.integers(0, 20)), dtype=pick(rng, TYPES[:3]))
    row_format, adaptive = pick(rng, FORMATS), bool(rng.integers(2))
    adaptive = adaptive and row_format in CODE_BITS
    return Call("quantize_rows", [rows, row_format, adaptive, not adaptive and bool(rng.integers(2)), 7, 0, 0])


def dequantize_rows(rng: Rng) -> Call:
    row_format, dim = pick(rng, FORMATS), int(rng.integers(0, 20))
    codes = integers(rng, 0, 256, 3 * row_bytes(row_format, dim)).to(torch.uint8).view(3, row_bytes(row_format, dim))
    return Call("dequantize_rows", [codes, row_format, dim])


def relu_backward(rng: Rng) -> Call:
    gradient = floats(rng, int(rng.integers(0, 20)), int(rng.integers(1, 40)), dtype=pick(rng, TYPES))
    output = gradient.clone() if rng.integers(2) else None
    return Call("relu_backward", [gradient, output, bool(rng.integers(2))])


def dot_interaction(rng: Rng) -> Call:
    samples, features, dim = int(rng.integers(0, 20)), int(rng.integers(0, 6)), int(rng.integers(1, 20))
    x = floats(rng, samples, dim, dtype=pick(rng, TYPES))
    return Call("dot_interaction", [x, floats(rng, samples, features * dim, dtype=x.dtype)])


def dot_interaction_backward(rng: Rng) -> Call:
    x, pooled = dot_interaction(rng).arguments
    vectors = pooled.shape[1] // x.shape[1] + 1
    gradient = floats(rng, len(x), x.shape[1] + vectors * (vectors - 1) // 2, dtype=x.dtype)
    return Call("dot_interaction_backward", [gradient, x, pooled])


def written(rng: Rng, call: Call, values: Tensor) -> Tensor:
    """Return the values, in half of the calls between guards."""
    if rng.integers(2) or values.numel() == 0:
        return values
    memory = torch.full((values.numel() + 2 * GUARD,), 5, dtype=values.dtype)
    memory[GUARD:-GUARD] = values.flatten()
    call.guards += [(guard, guard.clone()) for guard in (memory[:GUARD], memory[-GUARD:])]
    return memory[GUARD:-GUARD].view(values.shape)


def spoil_code(rng: Rng, code: Tensor) -> Tensor:
    """Return the program with some numbers changed, or random valid operations on valid registers."""
    registers = np.array([-1, 0, 1, 2, 63, 64, 65, 127, *range(128, 141), 2**31 - 1, -(2**31)])
    if rng.integers(2):
        code = code.clone()
        for _ in range(int(rng.integers(1, 4))):
            code.view(-1)[int(rng.integers(code.numel()))] = int(rng.choice(registers))
        return code
    words = rng.choice(registers[:-2], (int(rng.integers(1, 4)), 5))
    words[:, 0] = rng.integers(0, 19, len(words))
    return torch.cat([code, torch.from_numpy(words).to(torch.int32)])


def states_of(program: RowProgram, table: Tensor) -> list[Tensor]:
    dtype = torch.float64 if table.dtype == torch.float64 else torch.float32
    return [
        torch.full(tuple(table.shape)[: 1 if kind == "row" else 2], 0.5, dtype=dtype) for kind in program.state_kinds
    ]


def row_update(rng: Rng) -> Call:
    call = Call("row_update", [])
    program = trace(make_row_optimizer(OptimizerSpec(name=pick(rng, OPTIMIZERS), lr=0.1)))
    tables = tables_of(rng, pick(rng, (1, 2)))
    call.code_at = None if tables[0].dtype == torch.float64 else 2
    ids, offsets, bounds, num_bags = bags_of(rng, tables)
    features: list[int] = []
    gradients = []
    for t, table in enumerate(tables):
        per_id, column = int(rng.integers(2)), pick(rng, (0, 3))
        lines = bounds[t + 1] - bounds[t] if per_id else num_bags
        dtype = torch.float64 if table.dtype == torch.float64 else torch.float32
        gradients.append(floats(rng, lines, table.shape[1] + column, dtype=dtype))
        features += [t, t, t, column, per_id, int(rng.integers(2))]
    uniforms = torch.tensor([program.uniform_values(Hyper(0.1, 3, t.shape[1])) for t in tables], dtype=torch.float64)
    call.arguments = [
        [written(rng, call, table) for table in tables],
        [written(rng, call, state) for table in tables for state in states_of(program, table)],
        program.fused_update.instructions,
        uniforms.view(len(tables), -1),
        [kind == "row" for kind in program.state_kinds],
        [n for _ in tables for n in (0, 16, 7)],
        features,
        ids,
        offsets,
        num_bags,
        gradients,
        floats(rng, ids.numel()) if rng.integers(2) else None,
        3,
    ]
    return call


def row_apply(rng: Rng) -> Call:
    call = Call("row_apply", [])
    program = trace(make_row_optimizer(OptimizerSpec(name=pick(rng, OPTIMIZERS), lr=0.1)))
    [table] = tables_of(rng, 1)
    call.code_at = None if table.dtype == torch.float64 else 2
    rows = integers(rng, 0, len(table), int(rng.integers(1, 8))).unique()
    dtype = torch.float64 if table.dtype == torch.float64 else torch.float32
    num_stats = sum(map(len, program.stat_names))
    stage = int(rng.integers(len(program.stages))) if program.stages and rng.integers(2) else None
    own_stats = 0 if stage is None else len(program.stat_names[stage])
    sums = torch.zeros(own_stats, len(rows), -(-table.shape[1] // 16), dtype=dtype)
    call.arguments = [
        written(rng, call, table),
        [written(rng, call, state) for state in states_of(program, table)],
        (program.staged_update if stage is None else program.stages[stage]).instructions,
        torch.tensor(program.uniform_values(Hyper(0.1, 3, table.shape[1])), dtype=torch.float64),
        [kind == "row" for kind in program.state_kinds],
        [0, 16, 7],
        rows,
        floats(rng, len(rows), table.shape[1], dtype=dtype),
        torch.ones(num_stats, len(rows), dtype=dtype),
        None if stage is None else written(rng, call, sums),
        3,
    ]
    return call


def product(rng: Rng) -> Call:
    items, rows, terms, columns = (int(rng.integers(0, top)) for top in (4, 20, 40, 40))
    a, dtype = (items, rows, terms), pick(rng, TYPES)
    bias = floats(rng, columns, dtype=dtype) if rng.integers(2) else None
    return Call("product", [floats(rng, *a, dtype=dtype), floats(rng, items, terms, columns, dtype=dtype), bias])


CALLS: dict[str, Callable[[Rng], Call]] = {
    make.__name__: make
    for make in (
        pooled_lookup, row_lookup, weight_gradient, coalesce, bucketize, count_outside, fix_ids, unique, permute_keys,
        place_columns, encode_columns, decode_columns, lengths_to_offsets, hash_ids, quantize_rows, dequantize_rows,
        relu_backward, dot_interaction, dot_interaction_backward, product, row_update, row_apply,
    )
}  # fmt: skip


def spoil(rng: Rng, arguments: list[Any]) -> None:
    """Change one argument, or one member of a list, to a hostile or different value."""
    index = int(rng.integers(len(arguments)))
    value = arguments[index]
    if isinstance(value, list) and value and rng.integers(3):
        spoil(rng, value)
    elif isinstance(value, list):
        arguments[index] = pick(rng, ([], value[:-1], value + value[:1], value[::-1]))
    elif isinstance(value, Tensor):
        arguments[index] = spoil_tensor(rng, value)
    elif isinstance(value, bool):
        arguments[index] = not value
    elif isinstance(value, int):
        arguments[index] = pick(rng, (*HOSTILE, value + 1, value - 1))
    elif isinstance(value, str):
        arguments[index] = pick(rng, ("nonsense", "", *FORMATS))


def spoil_tensor(rng: Rng, x: Tensor) -> Tensor:
    kind = pick(rng, ("entries", "entries", "entries", "dtype", "short", "long", "shape", "layout", "empty"))
    if kind == "entries" and x.numel() and x.dtype != torch.bool:
        return spoil_entries(rng, x)
    if kind == "dtype":
        return x.to(pick(rng, ANY_TYPE))
    if kind == "short" and x.dim():
        return x[:-1].clone()
    if kind == "long" and x.dim():
        return torch.cat([x, x[-1:]])
    if kind == "shape":
        return pick(rng, (x[None], x[..., None], x.flatten(), x.sum() if x.is_floating_point() else x.flatten()))
    if kind == "layout" and x.dim() and x.numel():
        shifted = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)  # away from the alignment of a start
        strided = torch.stack([x, x], dim=-1)[..., 0]
        return pick(rng, (shifted, strided, x[:1].expand(x.shape), x.mT.contiguous().mT if x.dim() > 1 else strided))
    return x[..., :0].clone() if x.dim() else x


def spoil_entries(rng: Rng, x: Tensor) -> Tensor:
    """Change one or two entries to a neighbor of another entry or a hostile value, or keep their sum."""
    x = x.clone(memory_format=torch.contiguous_format)
    if not x.is_floating_point() and rng.integers(4) == 0:
        at, by = rng.integers(x.numel(), size=2), int(rng.integers(1, 4))
        x.view(-1)[int(at[0])] += by
        x.view(-1)[int(at[1])] -= by
        return x
    for _ in range(int(rng.integers(1, 3))):
        at, by = rng.integers(x.numel(), size=2), pick(rng, (-1, 1))
        old = x.reshape(-1)[int(at[0])]
        if x.is_floating_point():
            x.view(-1)[int(at[1])] = pick(rng, (float(old) + by, float(pick(rng, HOSTILE)), pick(rng, NUMBERS)))
        else:
            x.view(-1)[int(at[1])] = old + by if rng.integers(3) == 0 else torch.tensor(pick(rng, HOSTILE)).to(x.dtype)
    return x
