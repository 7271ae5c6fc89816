"""Handling of out-of-range ids by the policy of their feature. No such id silently reads another row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from meseta.ops.common import contiguous_ids, register
from meseta.ops.core import core
from meseta.ops.id_policy import reference
from meseta.ops.id_policy.reference import NUM_REPORT_WORDS
from meseta.sparse import KeyedJaggedTensor
from meseta.sparse.shapes import Int
from meseta.spec import IdPolicy, MesetaError


@dataclass(frozen=True)
class CheckedIds:
    """Batch after id policies. All ids are valid rows unless `first_error` reports one."""

    kjt: KeyedJaggedTensor
    """Ids after the policies. On a CPU it is the input itself if all ids were in range."""
    num_outside: Int[Tensor, " F"]
    """Number of out-of-range ids per feature."""
    first_error: Int[Tensor, " 3"]
    """(feature, sample, id) of the first out-of-range id with policy 'error', or feature -1 if there is none.

    Ids with this policy read row 0 until the caller raises the error, which must happen before rows are updated.
    """
    joint_report: Int[Tensor, " words"] | None = None
    """Tensor of which `first_error` and `num_outside` are views, if there is one."""

    @property
    def report(self) -> Int[Tensor, " words"]:
        """The verdict, REJECTED_ID or 0, a word for the loss of a step, `first_error` and `num_outside`."""
        if self.joint_report is None:
            return reference.make_report(self.first_error, self.num_outside)
        return self.joint_report


NO_ERROR = torch.tensor([-1, 0, 0])
"""`first_error` of a CPU batch without out-of-range ids."""
# The core identifies a policy by its index.
POLICIES: tuple[IdPolicy, ...] = ("error", "drop", "clamp", "hash")


def apply_id_policy(kjt: KeyedJaggedTensor, num_rows: Sequence[int], policies: Sequence[IdPolicy]) -> CheckedIds:
    """Apply the policy of each feature to ids outside 0..num_rows-1.

    Args:
        kjt: Batch with int32 or int64 ids. If ids change, or on a GPU always, the result has int64 ids.
        num_rows: Number of rows of the table of each feature.
        policies: Policy of each feature. `clamp` selects the nearest row, `hash` a row by a hash of the id, and `drop`
            removes the id. On a GPU only `drop` needs a host sync.

    Raises:
        MesetaError: `num_rows` or `policies` do not have one entry per feature.
    """
    # The hash is the finalizer of SplitMix64 (Steele et al., "Fast splittable pseudorandom number generators", OOPSLA
    # 2014), modulo the number of rows.
    if not len(num_rows) == len(policies) == len(kjt.keys):
        raise MesetaError(
            f"apply_id_policy: {len(num_rows)} numbers of rows and {len(policies)} policies for {len(kjt.keys)} "
            "features; pass one of each per feature"
        )
    first_bags = list(accumulate(kjt.batch_sizes, initial=0))
    numbers = [POLICIES.index(policy) for policy in policies]
    if kjt.values.is_cuda and "drop" not in policies:
        from meseta.ops.id_policy import triton

        zeros = kjt.pop_zeros()
        if zeros is None:
            ids, offsets, report = triton.check_ids(kjt.values, kjt.lengths, first_bags, num_rows, numbers)
        else:
            offsets, bounds = kjt.offsets, kjt.key_offsets
            ids, report = triton.check_placed_ids(kjt.values, zeros, offsets, (first_bags, bounds, num_rows, numbers))
        first_error, num_outside = report[2:NUM_REPORT_WORDS], report[NUM_REPORT_WORDS:]
        return CheckedIds(kjt.with_values(ids, offsets), num_outside, first_error, report)
    num_outside = _count(kjt.values, kjt.key_offsets, list(num_rows))
    if kjt.values.is_cpu and not num_outside.any():
        return CheckedIds(kjt=kjt, num_outside=num_outside, first_error=NO_ERROR)
    ids, lengths, kept, first_error = _fix(kjt.values, kjt.lengths, first_bags, list(num_rows), numbers)
    if kept.numel() == kjt.values.numel():
        return CheckedIds(kjt=kjt.with_values(ids), num_outside=num_outside, first_error=first_error)
    weights = None if kjt.weights is None else kjt.weights[kept]
    shorter = KeyedJaggedTensor(kjt.keys, ids, lengths.to(kjt.lengths.dtype), weights, kjt.batch_sizes)
    return CheckedIds(kjt=shorter, num_outside=num_outside, first_error=first_error)


def _count_cpu(ids: Tensor, bounds: list[int], num_rows: list[int]) -> Tensor:
    counts = torch.zeros(len(num_rows), dtype=torch.int64)
    ids = contiguous_ids("count_outside", ids)
    try:
        core().count_outside(
            ids.data_ptr(),
            ids.numel(),
            ids.dtype == torch.int64,
            bounds,
            num_rows,
            counts.data_ptr(),
            torch.get_num_threads(),
        )
    except ValueError as error:
        raise MesetaError(f"count_outside: {error}") from None
    return counts


def _fix_cpu(
    ids: Tensor, lengths: Tensor, first_bags: list[int], num_rows: list[int], policies: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not first_bags or first_bags[-1] != lengths.numel():
        raise MesetaError(f"fix_ids: first_bags {first_bags} must end with {lengths.numel()}, the number of lengths")
    ids, lengths = contiguous_ids("fix_ids", ids), contiguous_ids("fix_ids", lengths, "lengths").to(torch.int64)
    fixed, kept = (torch.empty(ids.numel(), dtype=torch.int64) for _ in range(2))
    fixed_lengths, first_error = torch.zeros_like(lengths), torch.tensor([-1, 0, 0])
    try:
        num_kept = core().fix_ids(
            ids.data_ptr(),
            ids.numel(),
            ids.dtype == torch.int64,
            lengths.data_ptr(),
            first_bags,
            num_rows,
            policies,
            [out.data_ptr() for out in (fixed, fixed_lengths, kept, first_error)],
        )
    except ValueError as error:
        raise MesetaError(f"fix_ids: {error}") from None
    return fixed[:num_kept], fixed_lengths, kept[:num_kept], first_error


def _count_fake(ids: Tensor, bounds: list[int], num_rows: list[int]) -> Tensor:
    return ids.new_empty(len(num_rows), dtype=torch.int64)


def _fix_fake(
    ids: Tensor, lengths: Tensor, first_bags: list[int], num_rows: list[int], policies: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_kept = torch.library.get_ctx().new_dynamic_size()
    fixed, kept = (ids.new_empty(num_kept, dtype=torch.int64) for _ in range(2))
    return fixed, torch.empty_like(lengths, dtype=torch.int64), kept, ids.new_empty(3, dtype=torch.int64)


_count = register(
    "count_outside(Tensor ids, int[] bounds, int[] num_rows) -> Tensor",
    cpu=_count_cpu,
    cuda=reference.count_outside,
    fake=_count_fake,
)
_fix = register(
    "fix_ids(Tensor ids, Tensor lengths, int[] first_bags, int[] num_rows, int[] policies) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    cpu=_fix_cpu,
    cuda=reference.fix_ids,
    fake=_fix_fake,
)
