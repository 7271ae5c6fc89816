"""Sharding plans: the placement of each shard of each table. Plans are immutable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from meseta.errors import MesetaError, check_choice, is_int, suggest
from meseta.spec.codecs import CrossHostAlgorithm, ExchangeAlgorithm
from meseta.spec.documents import load_document
from meseta.spec.shards import COLUMN_BLOCK, MAX_RANKS, SINGLE_HOST_TYPES, Shard, ShardingType, TablePlan
from meseta.spec.tables import TableSpec
from meseta.spec.tiers import DISK, HBM, OFFLOADED_TIERS, StorageOptions, Tier
from meseta.system.files import format_json, write_atomic


def check_tiling(table: TableSpec, entry: TablePlan) -> None:
    """Raise MesetaError unless the shards cover each element of the table exactly once.

    Shards must start at multiples of `COLUMN_BLOCK` columns, and their row ranges must be equal or disjoint.
    """
    # Valid plans return here. The checks below take quadratic time, and report the shard that breaks a rule.
    if _is_tiling(table, entry.shards):
        return
    where = f"plan: table {table.name!r} ({entry.sharding})"
    area = 0
    for index, shard in enumerate(entry.shards):
        (r0, r1), (c0, c1) = shard.rows, shard.columns
        if not (0 <= r0 < r1 <= table.num_embeddings and 0 <= c0 < c1 <= table.embedding_dim):
            raise MesetaError(
                f"{where}: shard {index} has rows {r0}..{r1 - 1} and columns {c0}..{c1 - 1}, which are empty or "
                f"outside the {table.num_embeddings} x {table.embedding_dim} table"
            )
        if c0 % COLUMN_BLOCK:
            raise MesetaError(f"{where}: shard {index} must start at a multiple of 16 columns, got column {c0}")
        for other in entry.shards[:index]:
            if r0 < other.rows[1] and other.rows[0] < r1 and c0 < other.columns[1] and other.columns[0] < c1:
                raise MesetaError(f"{where}: shard {index} overlaps another shard; place each row and column once")
            if shard.rows != other.rows and r0 < other.rows[1] and other.rows[0] < r1:
                raise MesetaError(
                    f"{where}: shard {index} has rows {r0}..{r1 - 1} and another shard has rows {other.rows[0]}.."
                    f"{other.rows[1] - 1}; row ranges must be equal or disjoint"
                )
        area += shard.num_rows * shard.num_columns
    if area != table.num_embeddings * table.embedding_dim:
        raise MesetaError(
            f"{where}: its shards cover {area} of {table.num_embeddings * table.embedding_dim} elements; "
            "place each row and column once"
        )


def _is_tiling(table: TableSpec, shards: Sequence[Shard]) -> bool:
    ranges: dict[tuple[int, int], list[Shard]] = {}
    for shard in shards:
        ranges.setdefault(shard.rows, []).append(shard)
    columns = [sorted(shard.columns for shard in pieces) for pieces in ranges.values()]
    aligned = all(shard.columns[0] % COLUMN_BLOCK == 0 for shard in shards)
    return aligned and all(
        _is_contiguous(spans, last)
        for spans, last in [
            (sorted(ranges), table.num_embeddings),
            *((spans, table.embedding_dim) for spans in columns),
        ]
    )


def _is_contiguous(spans: Sequence[tuple[int, int]], last: int) -> bool:
    ends = [0, *(stop for _, stop in spans)]
    return ends[-1] == last and all(a == end and a < b for (a, b), end in zip(spans, ends, strict=False))


def check_sharding(table: TableSpec, entry: TablePlan, num_ranks: int, per_host: int) -> None:
    """Raise MesetaError unless the shards conform to their sharding type on hosts of `per_host` ranks.

    The shards must tile the table, see `check_tiling`.
    """
    where = f"plan: table {table.name!r} ({entry.sharding})"
    sharding, shards = entry.sharding, entry.shards
    one_piece = sharding in (ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL)
    if one_piece and len(shards) > 1:
        raise MesetaError(f"{where}: the sharding type requires exactly one shard, got {len(shards)}")
    for index, shard in enumerate(shards):
        if entry.is_replica(shard):
            _check_replica(f"{where}: shard {index}", shard, table, num_ranks)
        elif len(shard.ranks) > 1:
            raise MesetaError(
                f"{where}: shard {index} must have one rank, got {len(shard.ranks)}; only data_parallel and the hot "
                "rows of hot_replicated have replicas"
            )
    if sharding is ShardingType.HOT_REPLICATED and len(shards) < 2:
        raise MesetaError(f"{where}: all rows are hot; use data_parallel")
    whole_rows = sharding in (ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE)
    if whole_rows and any(s.num_rows != table.num_embeddings for s in shards):
        raise MesetaError(f"{where}: each shard must have all rows; use row_wise to split rows")
    if sharding is ShardingType.TABLE_ROW_WISE and any(s.num_columns != table.embedding_dim for s in shards):
        raise MesetaError(f"{where}: each shard must have all columns; use grid to split rows and columns")
    if sharding in (*SINGLE_HOST_TYPES, ShardingType.GRID):
        hosts: dict[tuple[int, int], set[int]] = {}
        for shard in shards:
            part = shard.columns if sharding is ShardingType.GRID else (0, table.embedding_dim)
            hosts.setdefault(part, set()).add(shard.ranks[0] // per_host)
        for (first, stop), used_hosts in hosts.items():
            if len(used_hosts) > 1:
                raise MesetaError(
                    f"{where}: columns {first}..{stop - 1} must be on one host, got hosts {sorted(used_hosts)} of "
                    f"{per_host} ranks; choose ranks of one host, set devices_per_host, or use row_wise or column_wise"
                )


def _check_replica(where: str, shard: Shard, table: TableSpec, num_ranks: int) -> None:
    if sorted(shard.ranks) != list(range(num_ranks)):
        raise MesetaError(
            f"{where}: all {num_ranks} ranks must have a replica, got ranks {list(shard.ranks)}; remove ranks, or use "
            "another sharding type"
        )
    if shard.num_columns != table.embedding_dim:
        raise MesetaError(f"{where}: replicas must have all columns of their rows")


PLAN_FORMAT = "meseta.plan/1"
OPTIONAL_PLAN_KEYS = ("devices_per_host", "exchange", "dense_exchange")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Placement of all tables on `num_ranks` ranks."""

    num_ranks: int
    tables: tuple[TablePlan, ...]
    devices_per_host: int | None = None
    """Ranks per host. Rank r is on host r // devices_per_host. `None` means that all ranks share one host."""
    exchange: ExchangeAlgorithm | None = None
    """Algorithm for exchanging ids, embeddings and their gradients. `None` means `flat`, unless the run chooses another
    one."""
    dense_exchange: CrossHostAlgorithm | None = None
    """Inter-host algorithm of all-reduces, used with exchange `hierarchical` or a codec. `None` means `cross_host`."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_ranks <= MAX_RANKS:
            raise MesetaError(f"plan: num_ranks must be at least 1 and at most {MAX_RANKS:,}, got {self.num_ranks}")
        if self.num_ranks % self.ranks_per_host:
            raise MesetaError(
                f"plan: num_ranks must be a multiple of devices_per_host, got {self.num_ranks} and "
                f"{self.devices_per_host}"
            )
        for entry in self.tables:
            for shard in entry.shards:
                if shard.table != entry.table:
                    raise MesetaError(f"plan: table {entry.table!r} contains a shard of table {shard.table!r}")
                if not shard.ranks or not all(0 <= rank < self.num_ranks for rank in shard.ranks):
                    raise MesetaError(
                        f"plan: ranks of table {entry.table!r} must be a non-empty list of ranks in "
                        f"0..{self.num_ranks - 1}, got {list(shard.ranks)}"
                    )
                check_choice(f"plan: table {entry.table!r}", "tier", shard.tier, get_args(Tier))
                _check_cache_rows(shard)
        check_exchanges(self.exchange, self.dense_exchange)

    @property
    def is_hierarchical(self) -> bool:
        """Whether the exchange is hierarchical. `False` on a single host, or with one rank per host."""
        return self.exchange == "hierarchical" and 1 < self.ranks_per_host < self.num_ranks

    @property
    def ranks_per_host(self) -> int:
        return self.num_ranks if self.devices_per_host is None else self.devices_per_host

    @property
    def ranks_text(self) -> str:
        """Human-readable number of ranks and hosts, such as '4 ranks on 2 hosts'."""
        # Sums over ranks depend on both numbers.
        hosts = self.num_ranks // self.ranks_per_host
        return f"{self.num_ranks} rank{'s' * (self.num_ranks > 1)}" + f" on {hosts} hosts" * (hosts > 1)

    @property
    def has_offloaded_tables(self) -> bool:
        """Whether any table has offloaded shards."""
        return any(shard.tier in OFFLOADED_TIERS for entry in self.tables for shard in entry.shards)

    def __getitem__(self, table: str) -> TablePlan:
        if table not in self._by_name:
            raise MesetaError(f"plan: no table {table!r}; {suggest(table, self._by_name)}")
        return self._by_name[table]

    @cached_property
    def _by_name(self) -> dict[str, TablePlan]:
        return {entry.table: entry for entry in self.tables}

    def check(self, tables: Sequence[TableSpec]) -> None:
        """Raise MesetaError unless the plan is valid for exactly these tables."""
        known, planned = {table.name for table in tables}, set()
        for entry in self.tables:
            if entry.table not in known:
                raise MesetaError(f"plan: the model has no table {entry.table!r}; {suggest(entry.table, known)}")
            if entry.table in planned:
                raise MesetaError(f"plan: table {entry.table!r} is placed twice; remove one of its entries")
            planned.add(entry.table)
        for table in tables:
            check_tiling(table, self[table.name])
            check_sharding(table, self[table.name], self.num_ranks, self.ranks_per_host)
            _check_tiers(table, self[table.name])

    def check_storage(self, storage: StorageOptions) -> None:
        """Raise MesetaError if a table is in tier `disk`, but `storage` has no folder for it."""
        for entry in self.tables:
            if storage.dir is None and any(shard.tier == DISK for shard in entry.shards):
                raise MesetaError(
                    f"plan: table {entry.table!r} has shards in tier 'disk', which requires storage.dir; set "
                    "storage.dir to a folder on a local disk, or use tier 'hbm'"
                )

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON or YAML that lists all shards. `from_dict` is the inverse."""
        return {
            "format": PLAN_FORMAT,
            "num_ranks": self.num_ranks,
            **{key: getattr(self, key) for key in OPTIONAL_PLAN_KEYS if getattr(self, key) is not None},
            "tables": {
                entry.table: {
                    "sharding": str(entry.sharding),
                    "cost": entry.cost,
                    "shards": [_shard_to_dict(shard) for shard in entry.shards],
                }
                for entry in self.tables
            },
        }

    @staticmethod
    def from_dict(document: Mapping[Any, Any], tables: Sequence[TableSpec], num_ranks: int) -> Plan:
        """Parse a plan for `num_ranks` ranks. It lists the shards of each table, or only the sharding types:

            {"tables": {"user": {"sharding": "row_wise"}, "item": "table_wise", "*": "data_parallel"}}

        `"*"` applies to all tables that are not listed. `ranks` defaults to all ranks. For table_wise it defaults to
        the rank, and for table_row_wise and table_column_wise to the host, with the fewest bytes so far.

        Raises MesetaError if a key, table, sharding type or rank is unknown, or if shards do not tile their table.
        """
        from meseta.spec.plan_document import read_plan  # Avoids a circular import.

        return read_plan(document, tables, num_ranks)

    @staticmethod
    def load(path: str | Path, tables: Sequence[TableSpec], num_ranks: int) -> Plan:
        """Load a plan from a JSON or YAML file. Raises MesetaError if it cannot be read or is invalid."""
        return load_document("plan", path, lambda document: Plan.from_dict(document, tables, num_ranks))

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file atomically. Raises MesetaError if writing fails."""
        write_atomic(path, format_json(self.to_dict()))


def check_exchanges(exchange: object, dense_exchange: object) -> None:
    """Raise MesetaError unless both algorithms of a plan are `None` or valid."""
    for key, value, names in (
        ("exchange", exchange, ExchangeAlgorithm),
        ("dense_exchange", dense_exchange, CrossHostAlgorithm),
    ):
        if value is not None:
            check_choice("plan", key, value, get_args(names))


def _shard_to_dict(shard: Shard) -> dict[str, Any]:
    near = {} if shard.cache_rows is None else {"cache_rows": shard.cache_rows}
    places = {"rows": list(shard.rows), "columns": list(shard.columns), "ranks": list(shard.ranks)}
    return {**places, "tier": shard.tier, **near}


def _check_cache_rows(shard: Shard) -> None:
    cache_rows = shard.cache_rows
    if cache_rows is None:
        return
    if shard.tier not in OFFLOADED_TIERS:
        raise MesetaError(
            f"plan: table {shard.table!r} has cache_rows {cache_rows!r} in tier {shard.tier!r}, but only tiers "
            f"{' and '.join(map(repr, OFFLOADED_TIERS))} have a cache; remove cache_rows, or use one of these tiers"
        )
    if not is_int(cache_rows) or not 1 <= cache_rows <= max(shard.num_rows, 1):
        raise MesetaError(
            f"plan: table {shard.table!r}, rows {list(shard.rows)}: cache_rows must be an integer in "
            f"1..{shard.num_rows:,}, got {cache_rows!r}"
        )


def _check_tiers(table: TableSpec, entry: TablePlan) -> None:
    for shard in entry.shards:
        where = f"plan: table {table.name!r} has shards in tier {shard.tier!r}"
        if shard.tier == HBM:
            continue
        if entry.is_replica(shard) or entry.sharding is ShardingType.HOT_REPLICATED:
            raise MesetaError(
                f"{where}, but {entry.sharding} supports only tier 'hbm'; use tier 'hbm', or another sharding type"
            )
        if table.optimizer.stepped_rows == "all":
            raise MesetaError(
                f"{where}, but stepped_rows 'all' of its optimizer requires tier 'hbm'; use tier 'hbm', or set "
                "stepped_rows to 'touched'"
            )
