"""Where every piece of every table lives. Made by hand or by the planner, never mutated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from meseta.errors import MesetaError, nearest
from meseta.machine.files import json_text, write_whole
from meseta.spec.checks import check_choice
from meseta.spec.documents import load_document
from meseta.spec.plan_rules import check_scheme, check_tiling
from meseta.spec.shards import TablePlan
from meseta.spec.tables import TableSpec
from meseta.spec.tiers import Tier

FORMAT = "meseta.plan/1"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Placement of all tables on `num_ranks` ranks."""

    num_ranks: int
    """Ranks that the plan is for."""
    tables: tuple[TablePlan, ...]
    """One entry per table."""
    devices_per_host: int | None = None
    """Ranks of one host: rank r sits in host r // devices_per_host. None: all are in one."""

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise MesetaError(f"plan: num_ranks must be at least 1, got {self.num_ranks}")
        if self.num_ranks % self.per_host:
            raise MesetaError(
                f"plan: {self.num_ranks} ranks do not fill hosts of {self.devices_per_host}; hosts have equal devices"
            )
        for entry in self.tables:
            for shard in entry.shards:
                if shard.table != entry.table:
                    raise MesetaError(f"plan: table {entry.table!r} holds a shard of table {shard.table!r}")
                if not shard.ranks or not all(0 <= rank < self.num_ranks for rank in shard.ranks):
                    raise MesetaError(
                        f"plan: table {entry.table!r} is placed on ranks {list(shard.ranks)}, "
                        f"outside 0..{self.num_ranks - 1}"
                    )
                check_choice(f"plan: table {entry.table!r}", "tier", shard.tier, get_args(Tier))

    @property
    def per_host(self) -> int:
        """Ranks of one host."""
        return self.num_ranks if self.devices_per_host is None else self.devices_per_host

    def __getitem__(self, table: str) -> TablePlan:
        if table not in self._by_name:
            raise MesetaError(f"plan: no table {table!r}; {nearest(table, self._by_name)}")
        return self._by_name[table]

    @cached_property
    def _by_name(self) -> dict[str, TablePlan]:
        return {entry.table: entry for entry in self.tables}

    def check(self, tables: Sequence[TableSpec]) -> None:
        """Raise MesetaError unless the plan places each of `tables`, and nothing else, exactly once."""
        known, planned = {table.name for table in tables}, set()
        for entry in self.tables:
            if entry.table not in known:
                raise MesetaError(f"plan: the model has no table {entry.table!r}; {nearest(entry.table, known)}")
            if entry.table in planned:
                raise MesetaError(f"plan: table {entry.table!r} is placed twice; name it once")
            planned.add(entry.table)
        for table in tables:
            check_tiling(table, self[table.name])
            check_scheme(table, self[table.name], self.num_ranks, self.per_host)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON or YAML, every shard written out; `from_dict` reads it back."""
        return {
            "format": FORMAT,
            "num_ranks": self.num_ranks,
            **({} if self.devices_per_host is None else {"devices_per_host": self.devices_per_host}),
            "tables": {
                entry.table: {
                    "sharding": str(entry.sharding),
                    "cost": entry.cost,
                    "shards": [
                        {"rows": list(s.rows), "columns": list(s.columns), "ranks": list(s.ranks), "tier": s.tier}
                        for s in entry.shards
                    ],
                }
                for entry in self.tables
            },
        }

    @staticmethod
    def from_dict(document: Mapping[Any, Any], tables: Sequence[TableSpec], num_ranks: int) -> Plan:
        """Read a plan for `num_ranks` ranks, with shards written out or in the short form that people write.

        Short form, with `"*"` for the tables that are not named:

            {"tables": {"user": {"sharding": "row_wise"}, "item": "table_wise", "*": "data_parallel"}}

        `ranks` defaults to all ranks, for table_wise to the rank that holds the fewest bytes so far.
        Raises MesetaError for an unknown key, table, scheme or rank, and for shards that do not tile their table.
        """
        from meseta.spec.plan_document import read_plan  # It makes a Plan, so it imports this file.

        return read_plan(document, tables, num_ranks)

    @staticmethod
    def load(path: str | Path, tables: Sequence[TableSpec], num_ranks: int) -> Plan:
        """Read a JSON or YAML plan; raises MesetaError as `from_dict` does, naming the file."""
        return load_document("plan", path, lambda document: Plan.from_dict(document, tables, num_ranks))

    def save(self, path: str | Path) -> None:
        """Write JSON with every shard spelled out, whole or not at all; raises MesetaError where it cannot be."""
        write_whole(path, json_text(self.to_dict()))
