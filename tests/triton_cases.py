"""Cases of the Triton kernels, for the interpreter on a CPU and for a GPU. They need only torch, numpy and triton."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from meseta.ops.id_policy import reference as ids_reference
from meseta.ops.pooled_lookup import reference as lookup_reference
from meseta.ops.row_lookup import reference as rows_reference
from meseta.ops.row_marks import Consumer, RowMarks
from meseta.ops.row_program.optimizer import Hyper, RowOptimizer
from meseta.ops.row_program.program import trace
from meseta.ops.row_update import reference as update_reference
from meseta.ops.row_update.call import UpdateCall, unpack_features
from meseta.ops.weight_gradient import reference as weights_reference

TYPES = [torch.float32, torch.float16, torch.bfloat16]


@contextmanager
def no_wait() -> Iterator[None]:
    """Context manager in which any synchronization with the device is an error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def ragged(random: np.random.Generator, num_bags: int, max_length: int) -> Any:
    """Return lengths of bags, about half of them zero."""
    return random.integers(0, max_length + 1, num_bags) * random.integers(0, 2, num_bags)


def allowed_error(plain: Tensor, exact: Tensor) -> float:
    """Return the documented tolerance: twice the error of the reference in the same precision, plus one unit in the
    last place."""
    ulp = torch.finfo(torch.float32).eps * float(exact.abs().max())
    return 2 * float((plain.double() - exact).abs().max()) + ulp


@dataclass(frozen=True)
class Lookup:
    """Arguments of pooled_lookup."""

    tables: list[Tensor]
    ids: Tensor
    offsets: Tensor
    weights: Tensor | None
    flags: list[int]

    def to(self, device: str) -> Lookup:
        weights = None if self.weights is None else self.weights.to(device)
        tables = [table.to(device) for table in self.tables]
        return Lookup(tables, self.ids.to(device), self.offsets.to(device), weights, self.flags)

    def by_reference(self, dtype: torch.dtype | None = None) -> Tensor:
        tables = self.tables if dtype is None else [table.to(dtype) for table in self.tables]
        weighted, mean = [bool(flag & 1) for flag in self.flags], [bool(flag & 2) for flag in self.flags]
        return lookup_reference.pooled_lookup(tables, self.ids, self.offsets, self.weights, weighted, mean)


def lookup_case(
    seed: int,
    dims: Sequence[int],
    dtype: torch.dtype = torch.float32,
    num_samples: int = 9,
    integers: torch.dtype = torch.int64,
    max_length: int = 7,
) -> Lookup:
    """Return random rows, with some features weighted and some averaged. One table in four has one row."""
    random = np.random.default_rng(seed)
    rows = [int(random.integers(1, 30)) if random.random() < 0.75 else 1 for _ in dims]
    tables = [torch.from_numpy(random.normal(size=(n, dim))).to(dtype) for n, dim in zip(rows, dims, strict=True)]
    lengths = [ragged(random, num_samples, max_length) for _ in dims]
    ids = np.concatenate([random.integers(0, n, length.sum()) for n, length in zip(rows, lengths, strict=True)])
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    flags = [int(flag) for flag in random.integers(0, 4, len(dims))]
    weights = torch.from_numpy(random.normal(size=ids.size)).float() if any(flag & 1 for flag in flags) else None
    return Lookup(tables, torch.from_numpy(ids).to(integers), torch.from_numpy(offsets).to(integers), weights, flags)


def check_lookup(case: Lookup, device: str) -> None:
    """Compare the kernel on `device` with the reference and float64, with one bag and with several bags per lane."""
    from meseta.ops.pooled_lookup import triton

    moved = case.to(device)
    plain, exact = case.by_reference(), case.by_reference(torch.float64)
    for min_warps in (0, triton.MIN_WARPS):
        with mock.patch.object(triton, "MIN_WARPS", min_warps):
            got = triton.pooled_lookup(moved.tables, moved.ids, moved.offsets, moved.weights, moved.flags).cpu()
        assert got.shape == plain.shape and got.dtype == torch.float32
        if got.numel():
            assert (got.double() - exact).abs().max() <= allowed_error(plain, exact)
        assert torch.equal(got, plain), "the reference adds in the same order, and nothing is fused"


def check_surrounded_rows(dims: Sequence[int], dtype: torch.dtype, shift: int, device: str) -> None:
    """Check tables that start `shift` elements after a multiple of 16 bytes. Their neighbors in memory, and some of the
    rows, are NaN or infinite."""
    from meseta.ops.pooled_lookup import triton
    from meseta.ops.row_lookup import triton as rows

    case = lookup_case(shift, dims, dtype)
    for table in case.tables:
        table[1::3] = torch.nan
        table[2::3, ::2] = torch.inf
    moved = case.to(device)
    tables = [surrounded(table, shift) for table in moved.tables]
    expected, exactly = case.by_reference(), {"rtol": 0.0, "atol": 0.0, "equal_nan": True}
    for min_warps in (0, triton.MIN_WARPS):
        # numpy, which computes for the interpreter, warns of inf - inf.
        with mock.patch.object(triton, "MIN_WARPS", min_warps), np.errstate(invalid="ignore"):
            got = triton.pooled_lookup(tables, moved.ids, moved.offsets, moved.weights, moved.flags)
        torch.testing.assert_close(got.cpu(), expected, **exactly)
    bounds = case.offsets[:: (case.offsets.numel() - 1) // len(dims)].tolist()
    expected_rows = rows_reference.row_lookup(case.tables, case.ids, bounds)
    for result, plain in zip(rows.row_lookup(tables, moved.ids, bounds), expected_rows, strict=True):
        torch.testing.assert_close(result.cpu(), plain, **exactly)


def surrounded(table: Tensor, shift: int) -> Tensor:
    """Return a copy of the table that starts `shift` elements after a multiple of 16 bytes, between NaN."""
    end = shift + table.numel()
    memory = torch.full((end + 16,), torch.nan, dtype=table.dtype, device=table.device)
    memory[shift:end] = table.flatten()
    return memory[shift:end].view(table.shape)


def check_repaired_ids(case: Lookup, device: str, seed: int = 0) -> None:
    """Check all ids of a case, a third of them invalid. Nothing is rounded, so that results are equal."""
    from meseta.ops.id_policy import triton

    random = np.random.default_rng(seed)
    num_bags = (case.offsets.numel() - 1) // len(case.tables)
    strange = [-1, 7, 2**31 - 1, -(2**31)] + [2**63 - 1, -(2**63), 2**40] * (case.ids.dtype == torch.int64)
    ids = torch.where(
        torch.from_numpy(random.random(case.ids.numel()) < 1 / 3),
        torch.from_numpy(random.choice(strange, case.ids.numel())),
        case.ids,
    ).to(case.ids.dtype)
    bags = [num_bags * feature for feature in range(len(case.tables) + 1)]
    policies = random.choice([0, 2, 3], len(case.tables)).tolist()
    rest = (case.offsets.diff(), bags, [table.shape[0] for table in case.tables], policies)
    expected = ids_reference.check_ids(ids, *rest)
    for padding in (0, 40):
        padded = torch.cat([ids, torch.full((padding,), -5, dtype=ids.dtype)])
        got = triton.check_ids(*(value.to(device) if isinstance(value, Tensor) else value for value in (padded, *rest)))
        assert len(got[0]) == len(padded)
        for result, plain in zip((got[0][: len(ids)], *got[1:]), expected, strict=True):
            assert result.dtype == torch.int64 and torch.equal(result.cpu(), plain)
        # The offsets are known.
        numbers = bags, [int(expected[1][bag]) for bag in bags], *rest[2:]
        zeros = torch.zeros_like(expected[2]).to(device)
        fixed, report = triton.check_placed_ids(padded.to(device), zeros, expected[1].to(device), numbers)
        assert torch.equal(fixed[: len(ids)].cpu(), expected[0]) and torch.equal(report.cpu(), expected[2])


def check_row_lookup(case: Lookup, device: str) -> None:
    """Look up all ids of a case one by one. Nothing is computed, so that bits are equal."""
    from meseta.ops.row_lookup import triton

    bounds = case.offsets[:: (case.offsets.numel() - 1) // len(case.tables) or 1].tolist()
    bounds = bounds if case.offsets.numel() > 1 else [0] * (len(case.tables) + 1)
    moved = case.to(device)
    got = triton.row_lookup(moved.tables, moved.ids, bounds)
    for result, plain in zip(got, rows_reference.row_lookup(case.tables, case.ids, bounds), strict=True):
        assert result.dtype == torch.float32 and torch.equal(result.cpu(), plain)


def check_weight_gradient(case: Lookup, device: str, seed: int = 0) -> None:
    """Compare the kernel on `device` with the reference and float64."""
    from meseta.ops.weight_gradient import triton

    num_bags = (case.offsets.numel() - 1) // len(case.tables)
    width = sum(table.shape[1] for table in case.tables)
    gradient = torch.randn(num_bags, width, generator=torch.Generator().manual_seed(seed))
    weighted, mean = [bool(flag & 1) for flag in case.flags], [bool(flag & 2) for flag in case.flags]
    moved = case.to(device)
    got = triton.weight_gradient(moved.tables, moved.ids, moved.offsets, gradient.to(device), case.flags).cpu()
    rest = (case.ids, case.offsets, gradient, weighted, mean)
    plain = weights_reference.weight_gradient(case.tables, *rest)
    exact = weights_reference.weight_gradient([table.double() for table in case.tables], *rest)
    if got.numel():
        assert (got.double() - exact).abs().max() <= allowed_error(plain, exact)
    assert torch.equal(got, plain), "the reference adds in the same order, and nothing is fused"


def update_case(
    optimizer: RowOptimizer,
    seed: int = 0,
    dims: Sequence[int] = (16, 40),
    dtype: torch.dtype = torch.float32,
    num_samples: int = 9,
    max_length: int = 6,
    max_rows: int = 30,
) -> UpdateCall:
    """Return an update with two features per table: pooled, weighted or not pooled, in any order."""
    random = np.random.default_rng(seed)
    program = trace(optimizer)
    tables, states, origins, features, ids, lengths, gradients = [], [], [], [], [], [], list[Tensor]()
    width = 2 * sum(dims) + 4
    for t, dim in enumerate(dims):
        weight = torch.from_numpy(random.normal(size=(int(random.integers(1, max_rows + 1)), dim))).to(dtype)
        tables.append(weight)
        state = optimizer.init(weight)
        states += [
            state[name] + torch.from_numpy(random.random(state[name].shape)).float() for name in program.state_names
        ]
        origins += [int(random.integers(2**40)), 16 * int(random.integers(9)), int(random.integers(-(2**63), 2**63))]
        for k in range(2):
            length = ragged(random, num_samples, max_length)
            lengths.append(length)
            ids.append(random.integers(0, weight.shape[0], length.sum()))
            kind = int(random.integers(3))
            if kind == 2:
                gradients.append(torch.from_numpy(random.normal(size=(length.sum(), dim))).float())
            column = 0 if kind == 2 else 4 * int(random.integers((width - dim) // 4))
            features.append((2 * t + k, t, len(gradients) if kind == 2 else 0, column, kind == 2, kind == 1))
    random.shuffle(features)
    values = torch.from_numpy(np.concatenate(ids))
    hypers = [Hyper(0.1, 3, dim) for dim in dims]
    return UpdateCall(
        tables=tables,
        states=states,
        code=program.fused_update.instructions,
        uniforms=torch.tensor([program.uniform_values(hyper) for hyper in hypers], dtype=torch.float64),
        state_is_row=[kind == "row" for kind in program.state_kinds],
        origins=origins,
        features=[int(number) for feature in features for number in feature],
        ids=values,
        offsets=torch.from_numpy(np.concatenate([[0], np.cumsum(np.concatenate(lengths))])),
        num_bags=num_samples,
        gradients=[torch.from_numpy(random.normal(size=(num_samples, width))).float(), *gradients],
        weights=torch.from_numpy(random.normal(size=values.numel())).float(),
        step=3,
    )


def copied(call: UpdateCall, device: str = "cpu", dtype: torch.dtype | None = None) -> UpdateCall:
    """Return a copy of the call on another device, or in float64."""

    def copy(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.to(device=device, dtype=dtype or tensor.dtype, copy=True) for tensor in tensors]

    return replace(
        call,
        tables=copy(call.tables),
        states=copy(call.states),
        gradients=copy(call.gradients),
        row_ids=None if call.row_ids is None else [ids.to(device) for ids in call.row_ids],
        marks=None if call.marks is None else [marks.to(device) for marks in call.marks],
        ids=call.ids.to(device),
        offsets=call.offsets.to(device),
        weights=None if call.weights is None else call.weights.to(device),
    )


def updated(call: UpdateCall, device: str) -> list[Tensor]:
    """Run the kernels on copies, and return rows and states."""
    from meseta.ops.row_update import triton

    moved = copied(call, device)
    triton.row_update(moved)
    return [tensor.cpu() for tensor in (*moved.tables, *moved.states)]


def check_found_inf(call: UpdateCall, device: str) -> None:
    """Check that 0 gives the bits of no flag, and other numbers leave all bits unchanged."""
    before, plain = (*call.tables, *call.states), updated(call, device)
    for number, expected in ((0.0, plain), (1.0, before), (torch.nan, before)):
        got = updated(replace(call, found_inf=torch.tensor(number, device=device)), device)
        assert all(torch.equal(result, other) for result, other in zip(got, expected, strict=True)), number


def in_slots(call: UpdateCall, seed: int = 0) -> tuple[UpdateCall, list[Tensor]]:
    """Return the call with the rows of every other table in slots of any order, some of them empty, and the slot of
    each row of each table."""
    random, num_states = np.random.default_rng(seed), len(call.state_is_row)
    tables, states, row_ids, slots, ids = [], [], [], [], call.ids.clone()
    positions = {feature.position: feature.table for feature in unpack_features(call.features)}
    for t, table in enumerate(call.tables):
        table_states = call.states[t * num_states : (t + 1) * num_states]
        if t % 2:
            tables, states = [*tables, table], [*states, *table_states]
            row_ids.append(torch.empty(0, dtype=torch.int64))
            slots.append(torch.arange(len(table)))
            continue
        of_row = torch.from_numpy(random.permutation(len(table) + 5))[: len(table)]
        of_slot = torch.full((len(table) + 5,), -1)
        of_slot[of_row] = torch.arange(len(table))
        row_ids.append(of_slot)
        slots.append(of_row)
        for target, value in ((tables, table), *((states, state) for state in table_states)):
            spread = torch.full((len(table) + 5, *value.shape[1:]), -3.0, dtype=value.dtype)
            spread[of_row] = value
            target.append(spread)
        for position in (position for position, of in positions.items() if of == t):
            begin, end = (
                call.offsets[position * call.num_bags].item(),
                call.offsets[(position + 1) * call.num_bags].item(),
            )
            ids[begin:end] = of_row[call.ids[begin:end]]
    return replace(call, tables=tables, states=states, ids=ids, row_ids=row_ids), slots


def check_slots(call: UpdateCall, run: Callable[[UpdateCall], Sequence[Tensor]]) -> None:
    """Check that rows in slots get the same update as rows in order. `run` returns rows, then states."""
    num_states, (moved, slots) = len(call.state_is_row), in_slots(call)
    expected, got = run(call), run(moved)
    of_tables = [*slots, *(slots[t] for t in range(len(slots)) for _ in range(num_states))]
    for result, other, of_row in zip(got, expected, of_tables, strict=True):
        assert torch.equal(result[of_row], other)
        if len(result) > len(other):
            rest = torch.ones(len(result), dtype=torch.bool)
            rest[of_row] = False
            assert bool((result[rest] == -3.0).all())


def check_marks(call: UpdateCall, device: str, run: Callable[[UpdateCall], None]) -> None:
    """Check that `run` marks the distinct rows of the bags, in slots or in order, and no row if the update is
    suppressed."""
    ids: list[list[Tensor]] = [[] for _ in call.tables]
    for feature in unpack_features(call.features):
        begin, end = (call.offsets[(feature.position + k) * call.num_bags].item() for k in range(2))
        ids[feature.table].append(call.ids[begin:end])
    for one in (call, in_slots(call)[0]):
        for found_inf in (None, 0.0, 1.0):
            marks = [RowMarks(len(table), device) for table in call.tables]
            moved = copied(replace(one, marks=[mark.words for mark in marks]), device)
            run(replace(moved, found_inf=None if found_inf is None else torch.tensor(found_inf, device=device)))
            for mark, of_table in zip(marks, ids, strict=True):
                rows = np.unique(torch.cat(of_table).numpy()) if not found_inf else np.empty(0, np.int64)
                assert all(np.array_equal(mark.marked_rows(consumer).numpy(), rows) for consumer in Consumer)


def check_update(call: UpdateCall, device: str) -> None:
    """Compare the kernels on `device` with the reference and float64."""
    # The references stay on the device: on a CPU they call the compiled core, which a GPU's machine may lack.
    got, plain, exact = updated(call, device), copied(call, device), copied(call, device, torch.float64)
    update_reference.row_update(plain)
    update_reference.row_update(exact)
    references = zip((*plain.tables, *plain.states), (*exact.tables, *exact.states), strict=True)
    for result, pair in zip(got, references, strict=True):
        reference, true = (tensor.cpu() for tensor in pair)
        assert result.dtype == reference.dtype
        if device == "cpu":
            assert torch.equal(result, reference), "the interpreter's float32 has no freedom"
        elif result.dtype == torch.float32:
            assert (result.double() - true).abs().max() <= allowed_error(reference, true)
        else:  # one of the two neighbours
            spacing = (
                2 * torch.finfo(result.dtype).eps * true.abs().clamp(min=torch.finfo(result.dtype).smallest_normal)
            )
            assert ((result.double() - true).abs() <= spacing).all()
