"""Changed rows of each shard are the rows that a batch of any rank contains, under every scheme."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from meseta.spec import ShardingType

from .pool import RankPool
from .scenario import Scenario, train, whole_tables

Ranks = Callable[[int], RankPool]
SCHEMES = [*map(str, ShardingType), "mixed", "mixed of hosts"]


def named_rows(scenario: Scenario) -> dict[str, Tensor]:
    """Return the distinct rows of each table in the batches of all steps."""
    batches = [scenario.batch(step) for step in range(scenario.num_steps)]
    rows: dict[str, list[Tensor]] = {table.name: [] for table in scenario.tables()}
    for feature in scenario.features():
        rows[feature.table] += [batch[feature.name].values for batch in batches]
    return {table: torch.cat(ids).unique() for table, ids in rows.items()}


@pytest.mark.parametrize(("sharding", "size"), [("mixed", 1), ("mixed", 2), *((scheme, 4) for scheme in SCHEMES)])
def test_changed_rows_are_the_rows_of_the_batches(ranks: Ranks, sharding: str, size: int) -> None:
    optimizer = {"table_wise": "frozen", "row_wise": "adam", "column_wise": "rowwise_adagrad"}.get(sharding, "adagrad")
    scenario = Scenario(sharding=sharding, pooling="mean", weighted=True, optimizer=optimizer, max_ids=2, num_steps=2)
    results, before = ranks(size).run(train, scenario), [train(scenario.but(num_steps=0))]
    named = named_rows(scenario) if optimizer != "frozen" else {}
    changed: dict[str, list[Tensor]] = {table.name: [] for table in scenario.tables()}
    for result in results:
        for shard, rows in result["changed"]:
            inside = named.get(shard.table, torch.empty(0, dtype=torch.int64))
            inside = inside[(inside >= shard.rows[0]) & (inside < shard.rows[1])]
            assert torch.equal(rows + shard.rows[0], inside)
            changed[shard.table].append(rows + shard.rows[0])
    for table, parts in whole_tables(results, scenario).items():
        other: dict[str, Any] = whole_tables(before, scenario)[table]
        differ = torch.stack(
            [
                (value != other[name]).flatten(1).any(1) if value.dim() == 2 else value != other[name]
                for name, value in parts.items()
            ]
        ).any(0)
        assert set(differ.nonzero().flatten().tolist()) <= set(torch.cat(changed[table]).tolist())
