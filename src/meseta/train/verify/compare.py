"""Tolerances between a sharded run and a single process: the contract on numbers of docs/design.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meseta.comm import World
from meseta.config import RunConfig
from meseta.data.dataset.dataset import DATASET_FILE, Dataset
from meseta.spec import Communication, MesetaError, Plan, ShardingType, TableSpec
from meseta.storage import ROW
from meseta.train.dataset_checks import open_dataset
from meseta.train.setup.build import choose_device
from meseta.train.setup.specs import make_specs
from meseta.train.verify.steps import PHASES, PLAN_FILE, RecordedStep, as_bits, record_path, run_steps, slice_sizes

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
    """Return the largest number of ids per bag of each table, given bag lengths and table names by feature."""
    longest: dict[str, int] = {}
    for feature, lengths in batch_lengths.items():
        table = features[feature]
        longest[table] = max(longest.get(table, 0), int(lengths.max()) if lengths.numel() else 0)
    return longest


@dataclass
class TableComparison:
    """Largest differences of a table within one phase."""

    rule: ToleranceRule = field(default_factory=lambda: ToleranceRule("bits"))
    """Tolerance of the rows after the last step."""
    max_row_difference: float = 0.0
    """Largest absolute difference of a row value."""
    max_state_difference: float = 0.0
    """Largest absolute difference of an optimizer state."""


@dataclass
class Verification:
    """Result of comparing a sharded run with one process."""

    plan: Plan
    """Plan of the sharded run."""
    comm: Communication
    """Codecs of the sharded run."""
    tables: dict[str, dict[str, TableComparison]]
    """Comparison by phase, then by table name."""
    losses: list[tuple[float, float]] = field(default_factory=list)
    """Pairs (sharded loss, unsharded loss), one per step."""
    first_mismatch: Mismatch | None = None
    """First value outside its tolerance, ordered by (phase, step, table, row). `None` if all values are within
    tolerance."""

    @property
    def num_steps(self) -> int:
        """Number of steps per phase."""
        return len(self.losses)


def compare(config: RunConfig, folder: Path, num_steps: int, num_ranks: int) -> Verification:
    """Repeat in one process the steps that `record` wrote to `folder` on `num_ranks` ranks, and compare the results.

    Memory holds one copy of the model and the touched rows of one step. Record files are deleted once they are read.
    Raises MesetaError if training fails, or the dataset differs from the one that the ranks read.
    """
    dataset = open_dataset(config, World.single())
    read_by_ranks = Dataset.load(folder)
    (folder / DATASET_FILE).unlink()
    if read_by_ranks.to_dict() != dataset.to_dict():
        raise MesetaError(
            f"verify: dataset {str(dataset.dir)!r} changed while the ranks read it; run the command again, without "
            "preparing the dataset at the same time"
        )
    tables, features = make_specs(config, dataset)
    plan = Plan.load(folder / PLAN_FILE, tables, num_ranks)
    (folder / PLAN_FILE).unlink()
    comm = config.comm.communication
    result = Verification(
        plan=plan, comm=comm, tables={phase: {t.name: TableComparison() for t in tables} for phase in PHASES}
    )
    unsharded_config = config.model_copy(update={"plan": "auto"})
    replicated_tables = [entry.table for entry in plan.tables if entry.sharding is ShardingType.DATA_PARALLEL]
    world = World.single(choose_device(config))
    for phase in PHASES:
        comparison = _PhaseComparison(phase, tables, {f.name: f.table for f in features}, folder, result)
        for local_step in run_steps(unsharded_config, world, phase, num_steps, num_ranks, replicated_tables):
            comparison.compare_step(local_step)
        comparison.compare_untouched_rows(num_steps)
        del local_step, comparison  # Free the model of this phase before the next one is created.
    return result


class _PhaseComparison:
    def __init__(
        self, phase: str, tables: list[TableSpec], features: dict[str, str], folder: Path, result: Verification
    ) -> None:
        self.phase = phase
        self.tables = {table.name: table for table in tables}
        self.features = features
        self.folder = folder
        self.result = result
        self.max_bag_sizes = dict.fromkeys(self.tables, 0)
        self.first_position: tuple[int, ...] | None = None
        self.is_exact_share = True

    def compare_step(self, local_step: RecordedStep) -> None:
        """Compare recorded rows, lookups and loss with `local_step`, and delete the record files of the step."""
        num_ranks = self.result.plan.num_ranks
        lengths = {name: local_step.batch[name].lengths for name in self.features}
        for name, longest in max_bag_sizes(lengths, self.features).items():
            self.max_bag_sizes[name] = max(self.max_bag_sizes[name], longest)
        sizes = slice_sizes(local_step.batch.batch_size, num_ranks)
        self.is_exact_share &= all(_is_power_of_two(size / local_step.batch.batch_size) for size in sizes if size)
        records = [self._load(local_step.number, rank) for rank in range(num_ranks)]
        if local_step.loss is not None:
            self._compare_losses(local_step.number, records[0]["loss"], local_step.loss)
        if local_step.pooled is not None:
            self._compare_lookups(local_step, records)
        shards = {shard.spec.name: shard for shard in local_step.shards}
        for name, table in self.tables.items():
            # Only touched rows can have changed. Other changed rows are reported after the last step.
            rows, shard = local_step.touched_rows[name], shards[name]
            expected = {name: _as_matrix(value) for name, value in shard.gather(rows).items()}
            seen = torch.zeros(rows.numel(), table.embedding_dim, dtype=torch.bool)
            pieces = [(rank, piece) for rank, record in enumerate(records) for piece in record["pieces"]]
            for rank, piece in [entry for entry in pieces if entry[1]["table"] == name]:
                at = torch.searchsorted(rows, piece["rows"])
                seen[at, slice(*piece["columns"])] = True
                self._compare_piece(local_step.number, table, rank, piece, {k: v[at] for k, v in expected.items()})
            self._check_coverage(local_step.number, name, rows, seen, expected[ROW])

    def _load(self, step: int, rank: int) -> Any:
        path = record_path(self.folder, self.phase, step, rank)
        document = torch.load(path, weights_only=True)
        path.unlink()
        return document

    def _rule(self, table: TableSpec, step: int, of: str) -> ToleranceRule:
        return table_rule(
            table,
            self.result.plan,
            phase=self.phase,
            step=step,
            max_bag_size=self.max_bag_sizes[table.name],
            is_exact_share=self.is_exact_share,
            value_kind=of,
            comm=self.result.comm,
        )

    def _compare_piece(
        self, step: int, table: TableSpec, rank: int, piece: dict[str, Any], expected: dict[str, Tensor]
    ) -> None:
        seen = self.result.tables[self.phase][table.name]
        for name, value in piece["values"].items():
            got, columns = _as_matrix(value), slice(*piece["columns"])
            expected_value = expected[name]
            is_row = name == "row"
            first_column = piece["columns"][0] if value.dim() == 2 else 0
            expected_value = (expected_value[:, columns] if value.dim() == 2 else expected_value).contiguous()
            rule = self._rule(table, step, "row" if is_row else "state")
            largest, difference = max_difference(got, expected_value)
            if is_row:
                seen.max_row_difference, seen.rule = max(seen.max_row_difference, largest), rule
            else:
                seen.max_state_difference = max(seen.max_state_difference, largest)
            what = "row" if is_row else f"state {name!r} of row"
            wrong = find_violations(rule, got, expected_value, difference, is_state=not is_row)
            if wrong.any():
                row, column = wrong.nonzero()[0].tolist()
                number = int(piece["rows"][row])
                self._keep_first(
                    Mismatch(
                        phase=self.phase,
                        step=step,
                        table=table.name,
                        description=f"{what} {number:,}, column {first_column + column},",
                        row=number,
                        column=first_column + column,
                        rank=rank,
                        values=(float(got[row, column]), float(expected_value[row, column])),
                        rule=rule,
                    )
                )

    def _compare_lookups(self, local_step: RecordedStep, records: list[Any]) -> None:
        assert local_step.pooled is not None
        first = 0
        for rank, record in enumerate(records):
            got = record["pooled"]
            expected, column = local_step.pooled[first : first + got.shape[0]], 0
            for feature, name in self.features.items():
                table = self.tables[name]
                columns = slice(column, column + table.embedding_dim)
                a, b = got[:, columns].contiguous(), expected[:, columns].contiguous()
                rule = self._rule(table, local_step.number, "lookup")
                wrong = find_violations(rule, a, b, max_difference(a, b)[1], is_state=False)
                column = columns.stop
                if wrong.any():
                    sample, at = wrong.nonzero()[0].tolist()
                    self._keep_first(
                        Mismatch(
                            phase=self.phase,
                            step=local_step.number,
                            table=name,
                            description=f"lookup of feature {feature!r} for sample {first + sample:,}, column {at},",
                            row=first + sample,
                            column=at,
                            rank=rank,
                            values=(float(a[sample, at]), float(b[sample, at])),
                            rule=rule,
                        ),
                        order=0,
                    )
            first += got.shape[0]

    def _compare_losses(self, step: int, got: float, expected: float) -> None:
        self.result.losses.append((got, expected))
        rule = loss_rule(list(self.tables.values()), self.result.plan, step, self.result.comm)
        a, b = (torch.tensor([value], dtype=torch.float64) for value in (got, expected))
        if find_violations(rule, a, b, max_difference(a, b)[1], is_state=False).any():
            self._keep_first(
                Mismatch(
                    phase=self.phase, step=step, table=None, description="the loss", row=0, column=0, rank=0,
                    values=(got, expected), rule=rule,
                )
            )  # fmt: skip

    def _check_coverage(self, step: int, table: str, rows: Tensor, seen: Tensor, expected: Tensor) -> None:
        """Report the first touched row that is in no recorded shard."""
        if not seen.all():
            row, column = (~seen).nonzero()[0].tolist()
            self._keep_first(
                Mismatch(
                    phase=self.phase, step=step, table=table, row=int(rows[row]), column=column, rank=0,
                    description=f"row {int(rows[row]):,}, column {column}, which no rank holds,",
                    values=(torch.nan, float(expected[row, column])), rule=ToleranceRule("bits"),
                )
            )  # fmt: skip

    def compare_untouched_rows(self, num_steps: int) -> None:
        """Report rows that changed on a rank although no batch read them."""
        for rank in range(self.result.plan.num_ranks):
            for table, name, row, column, now, before in self._load(0, rank):
                what = "row" if name == "row" else f"state {name!r} of row"
                self._keep_first(
                    Mismatch(
                        phase=self.phase, step=num_steps, table=table, row=row, column=column, rank=rank,
                        description=f"{what} {row:,}, column {column}, which no batch read,", values=(now, before),
                        rule=ToleranceRule("bits"),
                    )
                )  # fmt: skip

    def _keep_first(self, mismatch: Mismatch, order: int = 1) -> None:
        """Store the mismatch if it precedes the stored one by (step, `order`, table, row). The loss follows all
        tables."""
        names = [*self.tables, None]
        place = mismatch.step, order, names.index(mismatch.table), mismatch.row, mismatch.column
        first = self.result.first_mismatch
        if first is None or (
            first.phase == self.phase and self.first_position is not None and place < self.first_position
        ):
            self.result.first_mismatch, self.first_position = mismatch, place


def _as_matrix(values: Tensor) -> Tensor:
    """Return values as [rows, D]. A state with one value per row becomes [rows, 1]."""
    return values if values.dim() == 2 else values[:, None]


def _is_power_of_two(share: float) -> bool:
    return share.hex().startswith("0x1.0000000000000p")
