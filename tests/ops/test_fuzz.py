"""Fuzz tests of every operator: a call with hostile arguments raises an error with a message or gives the result of the
reference. No other memory is written.

Under tools/sanitize.sh the same calls verify that no other memory is read.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fuzz_calls import CALLS, Call, spoil, spoil_code
from meseta.measure.threads import use_num_threads
from meseta.ops.bucketize import reference as bucketize
from meseta.ops.coalesce import reference as coalesce
from meseta.ops.codec import reference as codec
from meseta.ops.columns import reference as columns
from meseta.ops.common import DTYPE_CODES
from meseta.ops.dot_interaction import reference as dot_interaction
from meseta.ops.hash_ids import reference as hash_ids
from meseta.ops.id_policy import reference as id_policy
from meseta.ops.jagged import reference as jagged
from meseta.ops.mlp import reference as mlp
from meseta.ops.pooled_lookup import _reference as pooled_lookup
from meseta.ops.product import reference as product
from meseta.ops.quantize import reference as quantize
from meseta.ops.row_lookup import reference as row_lookup
from meseta.ops.row_program.lowering import Op
from meseta.ops.row_update import reference as row_update
from meseta.ops.row_update.call import ApplyCall, UpdateCall
from meseta.ops.unique import reference as unique
from meseta.ops.weight_gradient import _reference as weight_gradient
from meseta.spec import MesetaError


def row_apply(*arguments: Any) -> None:
    """Call the reference with the numbers cast to the dtype in which the operator computes."""
    call = ApplyCall(*arguments)
    stores = [
        (op, b) for op, _, _, b, _ in call.code.tolist() if op in (Op.STORE_WEIGHT, Op.STORE_STATE, Op.STORE_STAT)
    ]
    if call.sums is not None and set(stores) != {(Op.STORE_STAT, index) for index in range(len(call.sums))}:
        raise ValueError("a stage writes all sums and nothing else")
    if call.table.dtype in DTYPE_CODES:
        call = replace(call, gradient=call.gradient.float(), stats=call.stats.float())
    row_update.row_apply(call)


REFERENCES = {
    "pooled_lookup": pooled_lookup,
    "row_lookup": row_lookup.row_lookup,
    "weight_gradient": weight_gradient,
    "coalesce": coalesce.coalesce,
    "bucketize": bucketize.bucketize,
    "count_outside": id_policy.count_outside,
    "fix_ids": id_policy.fix_ids,
    "unique": unique.unique,
    "permute_keys": jagged.permute_keys,
    "place_columns": columns.place_columns,
    "encode_columns": codec.encode_columns,
    "decode_columns": codec.decode_columns,
    "lengths_to_offsets": jagged.lengths_to_offsets,
    "hash_ids": hash_ids.hash_ids,
    "quantize_rows": quantize.quantize_rows,
    "dequantize_rows": quantize.dequantize_rows,
    "relu_backward": mlp.relu_backward,
    "dot_interaction": dot_interaction.dot_interaction,
    "dot_interaction_backward": dot_interaction.dot_interaction_backward,
    "product": product.batched_product,
    "row_update": lambda *arguments: row_update.row_update(UpdateCall(*arguments)),
    "row_apply": row_apply,
}
NAN_BYTES = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""Formats of quantized rows that keep NaN. Any bit pattern of NaN is correct."""
soak = pytest.mark.soak
FEW, PART, MANY = 120, 1000, 10_000
"""Number of calls of each operator in `make test`, in one test of `make soak`, and in all of `make soak`."""
PARTS = [range(FEW), *(range(start, start + PART) for start in range(FEW, FEW + MANY, PART))]


def in_order(bounds: list[int], limit: int) -> bool:
    return len(bounds) > 0 and bounds[0] >= 0 and bounds[-1] <= limit and all(a <= b for a, b in pairwise(bounds))


def ids_inside(tables: list[Tensor], ids: Tensor, bounds: list[int]) -> bool:
    """Whether all ids are valid rows of their tables. A table without columns is never read."""
    parts = [ids[start:stop] for start, stop in pairwise(bounds)]
    return all(
        t.shape[1] == 0 or not bool(((rows < 0) | (rows >= len(t))).any())
        for t, rows in zip(tables, parts, strict=True)
    )


def sound(call: Call) -> bool:
    """Whether an accepted call has valid arguments."""
    a = call.arguments
    if call.name in ("pooled_lookup", "weight_gradient"):
        tables, ids, offsets = a[0], a[1], a[2].tolist()
        step = (len(offsets) - 1) // len(tables)
        read = [
            t if call.name == "pooled_lookup" or flag & 1 else t[:, :0] for t, flag in zip(tables, a[-1], strict=True)
        ]
        return step == 0 or (
            in_order(offsets, ids.numel())
            and ids_inside(read, ids, [offsets[f * step] for f in range(len(tables) + 1)])
        )
    if call.name == "row_update":
        return a[9] == 0 or sound_update(*a[:1], *a[6:10])
    if call.name == "row_apply":
        return bool((a[6].diff() > 0).all()) and ids_inside([a[0]], a[6], [0, len(a[6])])
    if call.name == "row_lookup":
        return in_order(a[2], a[1].numel()) and ids_inside(a[0], a[1], a[2])
    if call.name == "coalesce":
        return bool(((a[1] >= 0) & (a[1] < len(a[3]))).all())
    return sound_numbers(call)


def sound_update(tables: list[Tensor], features: list[int], ids: Tensor, offsets: Tensor, num_bags: int) -> bool:
    """Whether an accepted update has valid arguments."""
    bounds = offsets.tolist()
    inside = [
        ids_inside([tables[table]], ids, [bounds[position * num_bags], bounds[(position + 1) * num_bags]])
        for position, table in zip(features[::6], features[1::6], strict=True)
    ]
    return in_order(bounds, ids.numel()) and min(features[::6] + features[1::6], default=0) >= 0 and all(inside)


def sound_numbers(call: Call) -> bool:
    """Whether an accepted call of an operator without tables has valid arguments."""
    a = call.arguments
    if call.name == "bucketize":
        return bool((a[1] >= 0).all()) and int(a[1].sum()) == a[0].numel()
    if call.name in ("count_outside", "unique"):
        return in_order(a[1], a[0].numel())
    if call.name in ("fix_ids", "lengths_to_offsets"):
        lengths = a[1] if call.name == "fix_ids" else a[0]
        return bool((lengths >= 0).all())
    if call.name == "permute_keys":
        per_array = len(a[1]) // max(len(a[0]), 1)
        bounds = [a[1][i * per_array : (i + 1) * per_array] for i in range(len(a[0]))]
        return all(in_order(b, len(x)) for b, x in zip(bounds, a[0], strict=True)) and min(a[2], default=0) >= 0
    if call.name == "hash_ids":
        return bool(a[1] > 0)
    return True


def alike(result: Any, expected: Any) -> bool:
    """Whether all outputs are equal: integers exactly, floats within rounding."""
    if isinstance(result, (tuple, list)):
        return len(result) == len(expected) and all(map(alike, result, expected))
    if result is None or expected is None:
        return result is expected
    if result.shape != expected.shape:
        return False
    if not expected.is_floating_point():
        return bool(torch.equal(result.long(), expected.long()))
    slack = 1e-4 if expected.element_size() > 2 else 2e-2
    result, expected = result.double(), expected.double()
    largest = expected.nan_to_num(0, 0, 0).abs().amax().item() if expected.numel() else 0.0
    return torch.allclose(result, expected, rtol=slack, atol=slack * max(largest, 1), equal_nan=True)


def kept_rows(call: Call) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return (tensor, copy, mask of the rows that must not change) for each tensor that an update writes."""
    if call.name not in ("row_update", "row_apply"):
        return []
    a = call.arguments
    tables, states, ids = (a[0], a[1], a[7]) if call.name == "row_update" else ([a[0]], a[1], a[6])
    kept = []
    for tensor in [*tables, *states]:
        if tensor.dim() and tensor.numel():
            named = ids.flatten()[(ids.flatten() >= 0) & (ids.flatten() < len(tensor))].long()
            free = torch.ones(len(tensor), dtype=torch.bool)
            free[named] = False
            kept.append((tensor, tensor.clone(), free))
    return kept


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(7), b.nan_to_num(7))


def outputs(name: str, result: Any, arguments: list[Any]) -> list[Any]:
    """Return the results of an operator and the arguments that it writes to."""
    if name == "row_update":
        return [*arguments[0], *arguments[1]]
    if name in ("place_columns", "decode_columns"):
        return arguments[:1]
    if name == "encode_columns":
        return [arguments[0], *arguments[7:]]
    if name == "row_apply":
        return [arguments[0], *arguments[1], *arguments[9:10]]
    if name == "quantize_rows" and arguments[1] in NAN_BYTES:
        numbers = result.flatten().view(NAN_BYTES[arguments[1]])
        return [numbers.masked_fill(numbers.isnan(), math.nan).view(torch.int16)]
    return [result, arguments[0]] if name == "relu_backward" else [result]


def overlap(tensors: list[Any]) -> bool:
    """Whether two tensors share memory."""
    starts = [x.data_ptr() for x in tensors if isinstance(x, Tensor) and x.numel()]
    return len(set(starts)) < len(starts)


def is_refusal(error: Exception, call: Call) -> bool:
    """Whether the error is a MesetaError, or one of torch about the schema or float64 rows."""
    schema = "Expected a value of type" in str(error)
    rows = call.arguments[0][:1] if isinstance(call.arguments[0], list) else call.arguments[:1]
    by_torch = isinstance(rows[0], Tensor) and rows[0].dtype == torch.float64 if rows else True
    return isinstance(error, MesetaError) or (
        isinstance(error, RuntimeError | ValueError | LookupError) and (schema or by_torch)
    )


def check(call: Call) -> str:
    """Make the call and check its effects. Return 'refused', 'answered', or 'equal' if it equals the reference."""
    arguments = copy.deepcopy(call.arguments)
    kept = kept_rows(call)
    try:
        result = call.run()
        outcome = "answered"
    except Exception as error:
        assert is_refusal(error, call) and str(error).strip(), "an error of another kind, or without a message"
        outcome = "refused"
    assert all(torch.equal(guard, before) for guard, before in call.guards), "memory next to a tensor was written"
    assert all(same(now[free], before[free]) for now, before, free in kept), "a row without an id was written"
    if outcome == "refused":
        return outcome
    assert sound(Call(call.name, arguments)), "invalid arguments were accepted"
    written = outputs(call.name, result, call.arguments)
    if call.name in ("row_update", "row_apply") and overlap(written):
        return outcome  # the order of the updates is undefined
    if call.name == "pooled_lookup" and not arguments[0][0].is_floating_point():
        return outcome  # integers times weights are rounded differently by each path
    try:
        expected = REFERENCES[call.name](*arguments)
    except (ValueError, RuntimeError, LookupError, TypeError):
        return outcome  # the reference refuses more calls
    assert alike(written, outputs(call.name, expected, arguments)), "not the reference's result"
    return "equal"


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # roots of negative float64 states, in the reference
@pytest.mark.filterwarnings(
    "ignore:This overload of", "ignore:Truncating the start"
)  # nonsense programs and columns there
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("seeds", [pytest.param(p, id=f"{p[0]}", marks=soak if p[0] else ()) for p in PARTS])
def test_hostile_calls_are_refused_or_answered_rightly(name: str, seeds: range) -> None:
    outcomes = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        call = CALLS[name](rng)
        spoiled = seed % 4
        if spoiled and call.code_at is not None and rng.integers(2):
            call.arguments[call.code_at] = spoil_code(rng, call.arguments[call.code_at])
            spoiled = int(rng.integers(2))
        for _ in range(spoiled):
            spoil(rng, call.arguments)
        try:
            with use_num_threads(1 + seed % 2):
                outcomes.append(check(call))
            assert seed % 4 or outcomes[-1] == "equal", "a good call was refused"
        except BaseException as error:
            error.add_note(f"{name}, seed {seed}: {call.arguments}"[:2000])
            raise
    assert "refused" in outcomes


PLAIN_ON_CPU = (
    "concat",
    "cross_backward",
    "cross_entropy",
    "cross_entropy_backward",
    "linear",
    "linear_backward",
    "linear_cross",
    "mask_and_sum",
    "scalar_linear",
    "scalar_linear_backward",
)
"""Operators with a kernel for GPUs only. On a CPU their references in plain torch run."""


def test_every_operator_is_called() -> None:
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("meseta::")}
    assert {f"meseta::{name}" for name in (*CALLS, *PLAIN_ON_CPU)} == registered and set(REFERENCES) == set(CALLS)
