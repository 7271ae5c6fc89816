"""User-defined constraints on a sharding plan."""

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
    """Options that a plan may choose from for matching tables. `None` allows every option."""

    sharding: tuple[ShardingType, ...] | None = None
    """Allowed sharding types, for example [row_wise, table_row_wise]."""
    tiers: tuple[Tier, ...] | None = None
    """Allowed tiers, for example [hbm, cached]. `None` means `hbm`, or any other tier if `hbm` is too small."""
    dtypes: tuple[TableDtype, ...] | None = None
    """Allowed types of stored rows. A plan never changes the type, but reports the savings of other allowed types."""
    ranks: tuple[int, ...] | None = None
    """Ranks that may hold shards."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            if getattr(self, entry.name) == ():
                raise MesetaError(f"{entry.name} must not be an empty list; name at least one, or omit the key")
        if any(rank < 0 for rank in self.ranks or ()):
            raise MesetaError(f"ranks must not be negative, got {list(self.ranks or ())}")


@dataclass(frozen=True, kw_only=True)
class PinnedPlacement:
    """Tables of an earlier plan whose placement is kept."""

    plan: str
    tables: tuple[str, ...] = ("*",)
    """Names or patterns of the tables to keep in place. If a table has grown, its last shard takes the new rows. If
    memory runs out, as few kept bytes as possible are moved."""


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """Constraints on the tables and ranks of a plan."""

    tables: Mapping[str, TableRule] = field(default_factory=dict)
    """Rules by table name or pattern, such as 'user_*'. If several rules match a table, the last one that sets a field
    wins, and exact names override patterns."""
    together: tuple[tuple[str, ...], ...] = ()
    """Groups of names or patterns. All tables of a group are sharded identically and placed on the same ranks."""
    apart: tuple[tuple[str, ...], ...] = ()
    """Groups of names or patterns. No two tables of a group share a rank."""
    keep_free_bytes: Mapping[Tier, int] = field(default_factory=dict)
    """Bytes that remain unused on each device (`hbm`) or on each host (`host`, `disk`), by memory."""
    max_tables_per_rank: int | None = None
    """Maximum number of tables with a shard or replica on one rank. `None` means no limit."""
    keep: PinnedPlacement | None = None
    """Tables that keep their placement from an earlier plan."""

    def __post_init__(self) -> None:
        if not all(self.tables):
            raise MesetaError("constraints: tables has the empty key ''; use the name of a table or a pattern")
        for kind in ("together", "apart"):
            for number, group in enumerate(getattr(self, kind), start=1):
                if not group:
                    raise MesetaError(f"constraints: {kind}, group {number} is empty; name its tables, or remove it")
        check_keys("constraints: keep_free_bytes", self.keep_free_bytes, MEMORIES)
        for tier, free in self.keep_free_bytes.items():
            _check_min(f"keep_free_bytes.{tier}", free, 0)
        if self.max_tables_per_rank is not None:
            _check_min("max_tables_per_rank", self.max_tables_per_rank, 1)

    def rule(self, table: str) -> TableRule:
        """Return the combined rule for one table, by the precedence of `tables`."""
        named = [rule for pattern, rule in self.tables.items() if pattern != table and fnmatchcase(table, pattern)]
        named += [self.tables[table]] if table in self.tables else []
        options: dict[str, Any] = {}
        for rule in named:
            options |= {entry.name: value for entry in fields(rule) if (value := getattr(rule, entry.name)) is not None}
        return TableRule(**options)

    def match_tables(self, names: Sequence[str], tables: Sequence[TableSpec]) -> list[str]:
        """Return the names of the tables that match any of `names`, in the order of `tables`."""
        return [table.name for table in tables if any(fnmatchcase(table.name, name) for name in names)]

    def check(self, tables: Sequence[TableSpec], topology: Topology) -> None:
        """Raise MesetaError if no plan for these tables and this topology can satisfy the constraints.

        This includes patterns without a matching table, and ranks or tiers that the topology does not have.
        """
        known = [table.name for table in tables]
        groups = [(kind, group) for kind in ("together", "apart") for group in getattr(self, kind)]
        named = [("tables", name) for name in self.tables] + [(kind, name) for kind, group in groups for name in group]
        if self.keep is not None:
            named += [("keep.tables", name) for name in self.keep.tables]
        for where, name in named:
            if not any(fnmatchcase(table, name) for table in known):
                raise MesetaError(f"constraints: {where}: no table matches {name!r}; {suggest(name, known)}")
        for table in tables:
            self._check_rule(table, topology)
        self._check_groups(tables, topology)
        for tier, free in self.keep_free_bytes.items():
            has = topology.memory_bytes(tier)
            if has is not None and free >= has:
                raise MesetaError(
                    f"constraints: keep_free_bytes of {tier} must be below the {has:,} bytes of the topology, got "
                    f"{free:,}"
                )
        limit = self.max_tables_per_rank
        if limit is not None and limit * topology.num_ranks < len(tables):
            raise MesetaError(
                f"constraints: max_tables_per_rank {limit} on {topology.num_ranks} ranks allows "
                f"{limit * topology.num_ranks} tables, but the model has {len(tables)}; increase it"
            )

    def _check_rule(self, table: TableSpec, topology: Topology) -> None:
        rule, where = self.rule(table.name), f"constraints: table {table.name!r}"
        if rule.dtypes is not None and table.dtype not in rule.dtypes:
            raise MesetaError(
                f"{where} has dtype {table.dtype}, but only {', '.join(rule.dtypes)} are allowed; "
                "change the dtype of the table, or add it to dtypes"
            )
        for rank in rule.ranks or ():
            if rank >= topology.num_ranks:
                raise MesetaError(f"{where}: ranks must be in 0..{topology.num_ranks - 1}, got {rank}")
        if rule.tiers is not None and not set(rule.tiers) & set(topology.tiers):
            raise MesetaError(
                f"{where}: the topology has none of its tiers {', '.join(rule.tiers)}; set host_bytes or disk_bytes of "
                "the topology, or allow hbm"
            )
        everywhere = (ShardingType.DATA_PARALLEL, ShardingType.HOT_REPLICATED)
        is_pinned = rule.ranks is not None and len(set(rule.ranks)) < topology.num_ranks
        if is_pinned and rule.sharding is not None and all(sharding in everywhere for sharding in rule.sharding):
            raise MesetaError(
                f"{where} may use {len(set(rule.ranks or ()))} of {topology.num_ranks} ranks, but "
                f"{' and '.join(rule.sharding)} need all; allow another sharding type, or remove ranks"
            )

    def _check_groups(self, tables: Sequence[TableSpec], topology: Topology) -> None:
        bound: dict[str, int] = {}
        for number, names in enumerate(self.together):
            group = self.match_tables(names, tables)
            for name in group:
                if name in bound:
                    raise MesetaError(f"constraints: table {name!r} is in two groups of together; merge the groups")
                bound[name] = number
            allowed = [set(rule.ranks) for name in group if (rule := self.rule(name)).ranks is not None]
            if allowed and not set.intersection(*allowed):
                raise MesetaError(
                    f"constraints: {', '.join(map(repr, group))} are together, but share no allowed rank; allow one"
                )
        for names in self.apart:
            group = self.match_tables(names, tables)
            for one in group:
                for other in group:
                    if one < other and one in bound and bound[one] == bound.get(other):
                        raise MesetaError(
                            f"constraints: {one!r} and {other!r} must not be both together and apart; remove them "
                            "from one of the two groups"
                        )
            ranks = [self.rule(name).ranks for name in group]
            places = (
                set(range(topology.num_ranks))
                if None in ranks
                else {r for allowed_ranks in ranks for r in allowed_ranks or ()}
            )
            if len(group) > len(places):
                raise MesetaError(
                    f"constraints: {len(group)} tables are apart ({', '.join(names)}), but they may only use "
                    f"{len(places)} ranks; remove tables from the group, or allow more ranks"
                )

    @staticmethod
    def from_dict(document: Mapping[Any, Any]) -> Constraints:
        """Parse constraints. Raises MesetaError if a key is unknown or a value is invalid."""
        document = strip_format("constraints", document, _FORMAT)
        if isinstance(document.get("keep"), str):
            document["keep"] = {"plan": document["keep"]}
        if isinstance(document.get("tables"), Mapping):
            document["tables"] = {name: _wrap_scalars(rule) for name, rule in document["tables"].items()}
        return parse_dataclass("constraints", Constraints, document)

    @staticmethod
    def load(path: str | Path) -> Constraints:
        """Load constraints from a YAML or JSON file. Raises MesetaError if it cannot be read or is invalid."""
        return load_document("constraints", path, Constraints.from_dict)


def _check_min(name: str, number: int, least: int) -> None:
    if number < least:
        raise MesetaError(f"constraints: {name} must be at least {least}, got {number}")


def _wrap_scalars(rule: Any) -> Any:
    if not isinstance(rule, Mapping):
        return rule
    return {key: [value] if isinstance(value, str | int) else value for key, value in rule.items()}
