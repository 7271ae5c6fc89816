"""What a plan must keep to, beside the room of the machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from meseta.errors import MesetaError, check_keys, suggest
from meseta.spec.documents import load_document, parse_dataclass, strip_format
from meseta.spec.shards import ShardingType
from meseta.spec.tables import TableDtype, TableSpec
from meseta.spec.tiers import MEMORIES, Tier
from meseta.spec.topology import Topology

_FORMAT = "meseta.constraints/1"


@dataclass(frozen=True, kw_only=True)
class TableRule:
    """What one table, or all that a pattern names, may be; None: anything."""

    sharding: tuple[ShardingType, ...] | None = None
    """Schemes to choose from, for example [row_wise, table_row_wise]."""
    tiers: tuple[Tier, ...] | None = None
    """Memories to choose from, for example [hbm, cached]; None: hbm first, others where that is too small."""
    dtypes: tuple[TableDtype, ...] | None = None
    """Types that the rows may be stored in. A plan changes no type; it says what another allowed one would save."""
    ranks: tuple[int, ...] | None = None
    """Ranks that pieces may lie on."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            if getattr(self, entry.name) == ():
                raise MesetaError(f"{entry.name} must be a list that is not empty")
        if any(rank < 0 for rank in self.ranks or ()):
            raise MesetaError(f"ranks must be whole numbers, at least 0, got {list(self.ranks or ())}")


@dataclass(frozen=True, kw_only=True)
class PinnedPlacement:
    """A part of an earlier plan that stays where it is."""

    plan: str
    """File of the plan."""
    tables: tuple[str, ...] = ("*",)
    """Names or patterns of tables that stay. Those that are new are placed around them; those that grew keep their
    rows where they are, and their last rows take in the new ones; where room runs out, the fewest bytes move."""


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """Rules for tables and for ranks."""

    tables: Mapping[str, TableRule] = field(default_factory=dict)
    """By name or pattern such as 'user_*'. Where several name a table, each key comes from the last that has it; a
    name comes after all patterns."""
    together: tuple[tuple[str, ...], ...] = ()
    """Groups of names or patterns: the tables of a group are cut alike and lie on the same ranks."""
    apart: tuple[tuple[str, ...], ...] = ()
    """Groups of names or patterns: no two tables of a group share a rank."""
    keep_free_bytes: Mapping[Tier, int] = field(default_factory=dict)
    """By memory: bytes that stay free, on each device (hbm) or host (host, disk)."""
    max_tables_per_rank: int | None = None
    """Tables that a rank may hold pieces of, replicas included; None: any number."""
    keep: PinnedPlacement | None = None
    """What stays of an earlier plan; None: nothing."""

    def __post_init__(self) -> None:
        if not all(self.tables):
            raise MesetaError("constraints: tables must hold names or patterns of tables, got ''")
        for kind in ("together", "apart"):
            for number, group in enumerate(getattr(self, kind), start=1):
                if not group:
                    raise MesetaError(f"constraints: {kind}, group {number} must be a list that is not empty")
        check_keys("constraints: keep_free_bytes", self.keep_free_bytes, MEMORIES)
        for tier, free in self.keep_free_bytes.items():
            _check_min(f"keep_free_bytes.{tier}", free, 0)
        if self.max_tables_per_rank is not None:
            _check_min("max_tables_per_rank", self.max_tables_per_rank, 1)

    def rule(self, table: str) -> TableRule:
        """What holds for one table."""
        named = [rule for pattern, rule in self.tables.items() if pattern != table and fnmatchcase(table, pattern)]
        named += [self.tables[table]] if table in self.tables else []
        found: dict[str, Any] = {}
        for rule in named:
            found |= {entry.name: value for entry in fields(rule) if (value := getattr(rule, entry.name)) is not None}
        return TableRule(**found)

    def match_tables(self, names: Sequence[str], tables: Sequence[TableSpec]) -> list[str]:
        """Tables that the names and patterns of a group mean, in the order of `tables`."""
        return [table.name for table in tables if any(fnmatchcase(table.name, name) for name in names)]

    def check(self, tables: Sequence[TableSpec], topology: Topology) -> None:
        """Raise MesetaError for a name or pattern that no table has, a rank or memory that the machines lack, and rules
        that no plan can keep to together."""
        known = [table.name for table in tables]
        groups = [(kind, group) for kind in ("together", "apart") for group in getattr(self, kind)]
        named = [("tables", name) for name in self.tables] + [(kind, name) for kind, group in groups for name in group]
        if self.keep is not None:
            named += [("keep.tables", name) for name in self.keep.tables]
        for where, name in named:
            if not any(fnmatchcase(table, name) for table in known):
                raise MesetaError(f"constraints: {where} names {name!r}, which no table has; {suggest(name, known)}")
        for table in tables:
            self._check_rule(table, topology)
        self._check_groups(tables, topology)
        for tier, free in self.keep_free_bytes.items():
            has = topology.memory_bytes(tier)
            if has is not None and free >= has:
                raise MesetaError(
                    f"constraints: keep_free_bytes of {tier} are {free:,}, but the topology has {has:,}; keep less free"
                )
        limit = self.max_tables_per_rank
        if limit is not None and limit * topology.num_ranks < len(tables):
            raise MesetaError(
                f"constraints: max_tables_per_rank {limit} on {topology.num_ranks} ranks makes room for "
                f"{limit * topology.num_ranks} tables, but there are {len(tables)}; raise it"
            )

    def _check_rule(self, table: TableSpec, topology: Topology) -> None:
        rule, where = self.rule(table.name), f"constraints: table {table.name!r}"
        if rule.dtypes is not None and table.dtype not in rule.dtypes:
            raise MesetaError(
                f"{where} is stored in {table.dtype}, but its dtypes are {', '.join(rule.dtypes)}; "
                "set the dtype of the table, or allow it"
            )
        for rank in rule.ranks or ():
            if rank >= topology.num_ranks:
                raise MesetaError(f"{where} is pinned to rank {rank}, but the ranks are 0..{topology.num_ranks - 1}")
        if rule.tiers is not None and not set(rule.tiers) & set(topology.tiers):
            raise MesetaError(
                f"{where} may lie in {', '.join(rule.tiers)} alone, which the topology does not have; give it "
                "host_bytes or disk_bytes, or allow hbm"
            )
        everywhere = (ShardingType.DATA_PARALLEL, ShardingType.HOT_REPLICATED)
        is_pinned = rule.ranks is not None and len(set(rule.ranks)) < topology.num_ranks
        if is_pinned and rule.sharding is not None and all(sharding in everywhere for sharding in rule.sharding):
            raise MesetaError(
                f"{where} is pinned to {len(set(rule.ranks or ()))} of {topology.num_ranks} ranks, but "
                f"{' and '.join(rule.sharding)} need all; allow another scheme, or leave ranks out"
            )

    def _check_groups(self, tables: Sequence[TableSpec], topology: Topology) -> None:
        bound: dict[str, int] = {}
        for number, names in enumerate(self.together):
            group = self.match_tables(names, tables)
            for name in group:
                if name in bound:
                    raise MesetaError(f"constraints: table {name!r} is in two groups of together; make one of them")
                bound[name] = number
            allowed = [set(rule.ranks) for name in group if (rule := self.rule(name)).ranks is not None]
            if allowed and not set.intersection(*allowed):
                raise MesetaError(f"constraints: {', '.join(map(repr, group))} are together, but pinned to other ranks")
        for names in self.apart:
            group = self.match_tables(names, tables)
            for one in group:
                for other in group:
                    if one < other and one in bound and bound[one] == bound.get(other):
                        raise MesetaError(
                            f"constraints: {one!r} and {other!r} are together and apart; drop one of both"
                        )
            ranks = [self.rule(name).ranks for name in group]
            places = set(range(topology.num_ranks)) if None in ranks else {r for own in ranks for r in own or ()}
            if len(group) > len(places):
                raise MesetaError(
                    f"constraints: {len(group)} tables are apart ({', '.join(names)}), but may lie on {len(places)} "
                    "ranks; make the group smaller, or use more ranks"
                )

    @staticmethod
    def from_dict(document: Mapping[Any, Any]) -> Constraints:
        """Read constraints. Raises MesetaError for an unknown key or a value that breaks its rule."""
        document = strip_format("constraints", document, _FORMAT)
        if isinstance(document.get("keep"), str):
            document["keep"] = {"plan": document["keep"]}
        if isinstance(document.get("tables"), Mapping):
            document["tables"] = {name: _wrap_scalars(rule) for name, rule in document["tables"].items()}
        return parse_dataclass("constraints", Constraints, document)

    @staticmethod
    def load(path: str | Path) -> Constraints:
        """Read a YAML or JSON file; raises MesetaError as `from_dict` does, naming the file."""
        return load_document("constraints", path, Constraints.from_dict)


def _check_min(name: str, number: int, least: int) -> None:
    if number < least:
        raise MesetaError(f"constraints: {name} must be a whole number, at least {least}, got {number}")


def _wrap_scalars(rule: Any) -> Any:
    """A rule with a list where people give its only entry."""
    if not isinstance(rule, Mapping):
        return rule
    return {key: [value] if isinstance(value, str | int) else value for key, value in rule.items()}
