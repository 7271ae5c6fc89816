"""Hostile arguments of every operator: an error with a message, or the reference's result; nothing else is written.

Under tools/sanitize.sh the same calls show that nothing else is read.
"""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

from fuzz_calls import CALLS, Call, spoil, spoil_code
from meseta.ops.bucketize import reference as bucketize
from meseta.ops.coalesce import reference as coalesce
from meseta.ops.dot_interaction import reference as dot_interaction
from meseta.ops.hash_ids import reference as hash_ids
from meseta.ops.id_policy import reference as id_policy
from meseta.ops.jagged import reference as jagged
from meseta.ops.mlp import reference as mlp
from meseta.ops.pooled_lookup import _reference as pooled_lookup
from meseta.ops.quantize import reference as quantize
from meseta.ops.row_lookup import reference as row_lookup
from meseta.ops.unique import reference as unique
from meseta.ops.weight_gradient import _reference as weight_gradient
from threads import threads

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
    "lengths_to_offsets": jagged.lengths_to_offsets,
    "hash_ids": hash_ids.hash_ids,
    "quantize_rows": quantize.quantize_rows,
    "dequantize_rows": quantize.dequantize_rows,
    "relu_backward": mlp.relu_backward,
    "dot_interaction": dot_interaction.dot_interaction,
    "dot_interaction_backward": dot_interaction.dot_interaction_backward,
}
PER_PART = 30
PARTS = 19  # 18 operators x 19 parts x 30 calls: over 10000


def in_order(bounds: list[int], limit: int) -> bool:
    return len(bounds) > 0 and bounds[0] >= 0 and bounds[-1] <= limit and all(a <= b for a, b in pairwise(bounds))


def ids_inside(tables: list[Tensor], ids: Tensor, bounds: list[int]) -> bool:
    """Whether each table's ids are its rows; a table without columns is never read."""
    parts = [ids[start:stop] for start, stop in pairwise(bounds)]
    return all(
        t.shape[1] == 0 or not bool(((own < 0) | (own >= len(t))).any()) for t, own in zip(tables, parts, strict=True)
    )


def sound(call: Call) -> bool:
    """Whether the numbers of a call that was answered deserved an answer."""
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
    if call.name == "row_lookup":
        return in_order(a[2], a[1].numel()) and ids_inside(a[0], a[1], a[2])
    if call.name == "bucketize":
        return bool((a[1] >= 0).all()) and int(a[1].sum()) == a[0].numel()
    if call.name == "coalesce":
        return bool(((a[1] >= 0) & (a[1] < len(a[3]))).all())
    if call.name in ("count_outside", "unique"):
        return in_order(a[1], a[0].numel())
    if call.name in ("fix_ids", "lengths_to_offsets"):
        lengths = a[1] if call.name == "fix_ids" else a[0]
        return bool((lengths >= 0).all())
    return True


def alike(result: Any, expected: Any) -> bool:
    """Equal integers, floats within rounding, of all outputs."""
    if isinstance(result, (tuple, list)):
        return len(result) == len(expected) and all(map(alike, result, expected))
    if result.shape != expected.shape:
        return False
    if not expected.is_floating_point():
        return bool(torch.equal(result.long(), expected.long()))
    slack = 1e-4 if expected.element_size() > 2 else 2e-2
    result, expected = result.double(), expected.double()
    largest = expected.nan_to_num(0, 0, 0).abs().amax().item() if expected.numel() else 0.0
    return torch.allclose(result, expected, rtol=slack, atol=slack * max(largest, 1), equal_nan=True)


def kept_rows(call: Call) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For an update: each tensor that it writes, a copy, and the rows that it may not touch."""
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


def check(call: Call) -> str:
    """Make the call and check what it did; 'refused', 'answered' or 'equal' to the reference."""
    given = copy.deepcopy(call.arguments)
    kept = kept_rows(call)
    try:
        result = call.run()
    except (ValueError, RuntimeError, TypeCheckError) as error:
        assert str(error).strip(), "an error without a message"
        outcome = "refused"
    else:
        outcome = "answered"
    assert all(torch.equal(guard, before) for guard, before in call.guards), "memory beside a tensor was written"
    assert all(same(now[free], before[free]) for now, before, free in kept), "a row without an id was written"
    if outcome == "refused" or call.name not in REFERENCES:
        return outcome
    assert sound(Call(call.name, given)), "hostile numbers were taken"
    try:
        expected = REFERENCES[call.name](*given)
    except (ValueError, RuntimeError, IndexError, TypeCheckError):
        return outcome  # the reference has less patience
    assert alike(result, expected), "not the reference's result"
    return "equal"


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # roots of negative float64 states, in the reference
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("part", [pytest.param(p, marks=pytest.mark.soak if p else ()) for p in range(PARTS)])
def test_hostile_calls_are_refused_or_answered_rightly(name: str, part: int) -> None:
    outcomes = []
    for seed in range(part * PER_PART, (part + 1) * PER_PART):
        rng = np.random.default_rng(seed)
        call = CALLS[name](rng)
        spoiled = seed % 4
        if spoiled and call.code_at is not None and rng.integers(2):
            call.arguments[call.code_at] = spoil_code(rng, call.arguments[call.code_at])
            spoiled = int(rng.integers(2))
        for _ in range(spoiled):
            spoil(rng, call.arguments)
        try:
            with threads(1 + seed % 2):
                outcomes.append(check(call))
        except BaseException as error:
            error.add_note(f"{name}, seed {seed}: {call.arguments}"[:2000])
            raise
        assert seed % 4 or outcomes[-1] != "refused", f"seed {seed}: a good call was refused"
    assert "refused" in outcomes
