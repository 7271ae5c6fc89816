"""Lookups of averages in place of rows. Only the looked-up averages are computed, and no row changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from meseta.ops.pooled_lookup import LookupGroup, lookup_group
from meseta.ops.row_lookup import row_lookup
from meseta.ops.row_update import TableRows
from meseta.optim.row.average import ERA, LAG, average_rows
from meseta.sparse.shapes import Float, Int
from meseta.spec.average import MAX_GATHERED_ROWS, AverageSpec


@dataclass(frozen=True)
class RowAverages:
    """Averages of the rows of all tables after `step` steps."""

    average: AverageSpec
    step: int

    def gather(self, table: TableRows, ids: Int[Tensor, " n"]) -> Float[Tensor, "n D"]:
        """Return the averages of the rows `ids`."""
        rows = table.weight.index_select(0, ids)
        states = {name: table.state[name] for name in (LAG, ERA) if name in table.state}
        for part, part_ids in zip(rows.split(MAX_GATHERED_ROWS), ids.split(MAX_GATHERED_ROWS), strict=True):
            state = {name: value.index_select(0, part_ids) for name, value in states.items()}
            part.copy_(average_rows(self.average, self.step, part, state))
        return rows

    def pool(
        self,
        tables: Sequence[TableRows],
        group: LookupGroup,
        ids: Int[Tensor, " nnz"],
        offsets: Int[Tensor, " F_times_B_plus_1"],
        weights: Float[Tensor, " nnz"] | None,
    ) -> Float[Tensor, "B sum_of_dims"]:
        """Do `lookup_group` for averages. `tables` are those of the group."""
        num_bags = (offsets.numel() - 1) // len(tables)
        if not num_bags:
            return lookup_group(group, ids, offsets, weights)
        # Each id has its own row, so that the rows of a bag are added in the same order.
        rows, places = [], torch.zeros_like(ids)
        for table, (first, stop) in zip(tables, pairwise(offsets[::num_bags].tolist()), strict=True):
            rows.append(self.gather(table, ids[first:stop]))
            torch.arange(stop - first, out=places[first:stop])
        return lookup_group(replace(group, tables=tuple(rows)), places, offsets, weights)


def look_up_rows(
    averages: RowAverages | None, tables: Sequence[TableRows], ids: Int[Tensor, " nnz"], bounds: Sequence[int]
) -> list[Tensor]:
    """Do `row_lookup` for rows, or for their averages."""
    if averages is None:
        return row_lookup([table.weight for table in tables], ids, bounds)
    return [
        averages.gather(table, ids[first:stop]) for table, (first, stop) in zip(tables, pairwise(bounds), strict=True)
    ]
