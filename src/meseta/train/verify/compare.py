"""Repeats recorded steps in one process and compares the results with those of the ranks."""

from __future__ import annotations

from collections.abc import Iterator
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
from meseta.train.verify.rules import (
    Mismatch,
    ToleranceRule,
    find_violations,
    loss_rule,
    max_bag_sizes,
    max_difference,
    table_rule,
)
from meseta.train.verify.steps import PHASES, PLAN_FILE, RecordedStep, record_path, run_steps, slice_sizes


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

    def compare_step(self, own: RecordedStep) -> None:
        """Compare the recorded rows, lookups and loss of a step with `own`. Deletes the record files of the step."""
        num_ranks = self.result.plan.num_ranks
        lengths = {name: own.batch[name].lengths for name in self.features}
        for name, longest in max_bag_sizes(lengths, self.features).items():
            self.max_bag_sizes[name] = max(self.max_bag_sizes[name], longest)
        sizes = slice_sizes(own.batch.batch_size, num_ranks)
        self.is_exact_share &= all(_is_power_of_two(size / own.batch.batch_size) for size in sizes if size)
        records = [self._load(own.number, rank) for rank in range(num_ranks)]
        if own.loss is not None:
            self._compare_losses(own.number, records[0]["loss"], own.loss)
        if own.pooled is not None:
            self._compare_lookups(own, records)
        shards = {shard.spec.name: shard for shard in own.shards}
        for name, table in self.tables.items():
            # Only touched rows can have changed. Other changed rows are reported after the last step.
            rows, shard = own.touched_rows[name], shards[name]
            expected = {name: _as_matrix(value) for name, value in shard.gather(rows).items()}
            seen = torch.zeros(rows.numel(), table.embedding_dim, dtype=torch.bool)
            for rank, piece in _table_shards(records, name):
                at = torch.searchsorted(rows, piece["rows"])
                seen[at, slice(*piece["columns"])] = True
                self._compare_piece(own.number, table, rank, piece, {k: v[at] for k, v in expected.items()})
            self._check_coverage(own.number, name, rows, seen, expected[ROW])

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


def _table_shards(records: list[Any], table: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for rank, record in enumerate(records):
        for piece in record["pieces"]:
            if piece["table"] == table:
                yield rank, piece


def _as_matrix(values: Tensor) -> Tensor:
    """Return values as [rows, D]. A state with one value per row becomes [rows, 1]."""
    return values if values.dim() == 2 else values[:, None]


def _is_power_of_two(share: float) -> bool:
    return share.hex().startswith("0x1.0000000000000p")
