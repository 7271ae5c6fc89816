"""Tolerances between a sharded run and a single process: the contract on numbers of docs/design.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meseta.spec import Communication, Plan, TableSpec
from meseta.train.verify.steps import as_bits

TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "float16": 1e-5, "bfloat16": 1e-5}
"""Largest absolute difference of losses and rows over 20 steps, by dtype of the table. For 16-bit tables it applies to
losses and optimizer states of a single step."""


@dataclass(frozen=True)
class ToleranceRule:
    """Allowed difference of a value from its unsharded counterpart."""

    kind: str
    """'bits' allows no difference, 'tolerance' an absolute one, 'share' one relative to the largest compared value,
    'neighbours' adjacent values of the dtype, and 'free' any difference."""
    tolerance: float = 0.0
    """Largest difference. For 'share' it is relative to the largest compared value, and for optimizer states above 1 to
    the state."""

    def __str__(self) -> str:
        if self.kind == "tolerance":
            return f"{self.tolerance:.0e}"
        if self.kind == "share":
            return f"{self.tolerance:.0e} of the largest"
        return {"bits": "equal bits", "neighbours": "neighbouring values", "free": "no bound"}[self.kind]


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Value that differs by more than its rule allows."""

    phase: str
    """'embedding' or 'training'."""
    step: int
    """Step number, starting at 1."""
    table: str | None
    """Table name, or `None` for the loss."""
    description: str
    """Phrase that names the value in the message."""
    row: int
    """Row of the table, or sample of the batch."""
    column: int
    rank: int
    """Rank that computed the sharded value."""
    values: tuple[float, float]
    """Pair (sharded value, unsharded value)."""
    rule: ToleranceRule

    def __str__(self) -> str:
        place = "" if self.table is None else f"table {self.table!r}, "
        run = "embedding alone" if self.phase == "embedding" else "training"
        a, b = self.values
        return (
            f"step {self.step} ({run}): {place}{self.description} is {a:.9g} on rank {self.rank} and {b:.9g} "
            f"unsharded, "
            f"{abs(a - b):.3g} apart; allowed: {self.rule}"
        )


def table_rule(
    table: TableSpec,
    plan: Plan,
    *,
    phase: str,
    step: int,
    max_bag_size: int,
    is_exact_share: bool,
    value_kind: str,
    comm: Communication,
) -> ToleranceRule:
    """Return the tolerance of a table after `step`.

    Args:
        table: Table that is compared.
        plan: Plan of the sharded run.
        phase: 'embedding' or 'training'.
        step: Step number, starting at 1.
        max_bag_size: Largest number of ids in a bag of the table so far.
        is_exact_share: Whether the share of each rank in the batch was a power of two in all steps so far.
        value_kind: 'row', 'state' or 'lookup'.
        comm: Codecs of the exchanges.
    """
    placed = plan[table.name]
    is_cut = any(shard.num_rows != table.num_embeddings for shard in placed.shards) and max_bag_size > 1
    is_replicated = any(len(shard.ranks) > 1 for shard in placed.shards)
    # Gradients of mean-pooled bags are divided before or after they are scaled by the rank's share of the batch. The
    # order does not matter if the share is a power of two.
    is_rounded = is_cut or is_replicated or (max_bag_size > 1 and not is_exact_share)
    if plan.num_ranks == 1 or (phase == "embedding" and not is_rounded):
        return ToleranceRule("bits")
    parts = len({shard.rows for shard in placed.shards})
    # With lossy codecs, one process emulates the rounding of the ranks. It cannot do so for each partial bag of row
    # shards, nor for the gradient sums of replicas.
    is_mixed = is_cut or (is_replicated and parts > 1)
    if value_kind == "lookup" and is_mixed and not comm.codec("forward").is_lossless:
        return ToleranceRule("share", 2 * parts * comm.codec("forward").relative_rounding_error)
    # In training, the last bits of the dense part decide in which direction a value near a midpoint is rounded. So
    # there is no bound after the first forward pass.
    if (phase == "training" and not comm.is_lossless) or (is_rounded and not comm.codec("backward").is_lossless):
        return ToleranceRule("free")
    if table.dtype not in ("float16", "bfloat16"):
        return ToleranceRule("tolerance", TOLERANCE[table.dtype])
    if step > 1:
        return ToleranceRule("free")
    return ToleranceRule("neighbours") if value_kind == "row" else ToleranceRule("tolerance", TOLERANCE[table.dtype])


def loss_rule(tables: Sequence[TableSpec], plan: Plan, step: int, comm: Communication) -> ToleranceRule:
    """Return the tolerance of the loss of `step`."""
    if plan.num_ranks == 1:
        return ToleranceRule("bits")
    if not comm.is_lossless:
        return (
            ToleranceRule("free")
            if step > 1
            else ToleranceRule("share", max(plan.num_ranks * comm.codec("forward").relative_rounding_error, 1e-5))
        )
    dtype = tables[0].dtype
    return (
        ToleranceRule("free")
        if dtype in ("float16", "bfloat16") and step > 1
        else ToleranceRule("tolerance", TOLERANCE[dtype])
    )


def max_difference(got: Tensor, expected: Tensor) -> tuple[float, Tensor]:
    """Return (largest difference, all differences) in float64. A difference is 0 if both values are nan, and inf if one
    is."""
    a, b = got.double(), expected.double()
    difference = (a - b).abs()
    difference = difference.masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0).nan_to_num(nan=torch.inf)
    return float(difference.max()) if difference.numel() else 0.0, difference


def find_violations(rule: ToleranceRule, got: Tensor, expected: Tensor, difference: Tensor, is_state: bool) -> Tensor:
    """Return a mask of the values of `got` that break the rule."""
    if rule.kind == "bits":
        return as_bits(got) != as_bits(expected)
    if rule.kind == "share":
        return difference > rule.tolerance * expected.double().abs().max()
    if rule.kind == "tolerance":
        allowed = rule.tolerance * (expected.double().abs().clamp(min=1.0) if is_state else 1.0)
        return difference > allowed
    if rule.kind == "neighbours":
        return (_ordinals(got) - _ordinals(expected)).abs() > 1
    return torch.zeros_like(difference, dtype=torch.bool)


def _ordinals(values: Tensor) -> Tensor:
    """Map 16-bit floats to integers in the same order, such that adjacent floats differ by 1."""
    whole = as_bits(values.contiguous()).to(torch.int32)
    return torch.where(whole < 0, -(whole & 0x7FFF), whole)


def max_bag_sizes(batch_lengths: Mapping[str, Tensor], features: Mapping[str, str]) -> dict[str, int]:
    """Return the largest number of ids in a bag of each table.

    Args:
        batch_lengths: Bag lengths by feature.
        features: Table name of each feature.
    """
    longest: dict[str, int] = {}
    for feature, lengths in batch_lengths.items():
        table = features[feature]
        longest[table] = max(longest.get(table, 0), int(lengths.max()) if lengths.numel() else 0)
    return longest
