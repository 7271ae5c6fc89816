"""Where every piece of every table lives. Made by hand or by the planner, never mutated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from meseta.errors import MesetaError, check_choice, is_int, suggest
from meseta.machine.files import format_json, write_atomic
from meseta.spec.codecs import CrossHostAlgorithm, ExchangeAlgorithm
from meseta.spec.documents import load_document
from meseta.spec.shards import COLUMN_BLOCK, MAX_RANKS, SINGLE_HOST_TYPES, Shard, ShardingType, TablePlan
from meseta.spec.tables import TableSpec
from meseta.spec.tiers import DISK, HBM, OFFLOADED_TIERS, StorageOptions, Tier


def check_tiling(table: TableSpec, entry: TablePlan) -> None:
    """Raise MesetaError unless the shards cover every cell of the table exactly once and respect column blocks."""
    if _is_tiling(table, entry.shards):
        return
    where = f"plan: table {table.name!r} ({entry.sharding})"
    area = 0
    for index, shard in enumerate(entry.shards):
        (r0, r1), (c0, c1) = shard.rows, shard.columns
        if not (0 <= r0 < r1 <= table.num_embeddings and 0 <= c0 < c1 <= table.embedding_dim):
            raise MesetaError(
                f"{where}: shard {index} holds rows {r0}..{r1 - 1} and columns {c0}..{c1 - 1}, outside the "
                f"{table.num_embeddings} x {table.embedding_dim} table"
            )
        if c0 % COLUMN_BLOCK:
            raise MesetaError(f"{where}: shard {index} starts at column {c0}; column shards start at multiples of 16")
        for other in entry.shards[:index]:
            if r0 < other.rows[1] and other.rows[0] < r1 and c0 < other.columns[1] and other.columns[0] < c1:
                raise MesetaError(f"{where}: shard {index} overlaps another; every row and column is placed once")
            if shard.rows != other.rows and r0 < other.rows[1] and other.rows[0] < r1:
                raise MesetaError(
                    f"{where}: shard {index} holds rows {r0}..{r1 - 1} and another {other.rows[0]}.."
                    f"{other.rows[1] - 1}; row ranges must be equal or apart, so that rows are cut alike in all columns"
                )
        area += shard.num_rows * shard.num_columns
    if area != table.num_embeddings * table.embedding_dim:
        raise MesetaError(
            f"{where}: its shards cover {area} of {table.num_embeddings * table.embedding_dim} cells; "
            "every row and column is placed once"
        )


def _is_tiling(table: TableSpec, shards: Sequence[Shard]) -> bool:
    """The same as a question, answered in time that does not grow with the square of the pieces."""
    ranges: dict[tuple[int, int], list[Shard]] = {}
    for shard in shards:
        ranges.setdefault(shard.rows, []).append(shard)
    columns = [sorted(shard.columns for shard in pieces) for pieces in ranges.values()]
    aligned = all(shard.columns[0] % COLUMN_BLOCK == 0 for shard in shards)
    return aligned and all(
        _is_contiguous(spans, last)
        for spans, last in [(sorted(ranges), table.num_embeddings), *((own, table.embedding_dim) for own in columns)]
    )


def _is_contiguous(spans: Sequence[tuple[int, int]], last: int) -> bool:
    """Whether spans that are not empty lead from 0 to `last` without a gap."""
    ends = [0, *(stop for _, stop in spans)]
    return ends[-1] == last and all(a == end and a < b for (a, b), end in zip(spans, ends, strict=False))


def check_sharding(table: TableSpec, entry: TablePlan, num_ranks: int, per_host: int) -> None:
    """Raise MesetaError unless the pieces, which tile the table, have the form that the scheme promises on hosts of
    `per_host` ranks."""
    where = f"plan: table {table.name!r} ({entry.sharding})"
    sharding, shards = entry.sharding, entry.shards
    one_piece = sharding in (ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL)
    if one_piece and len(shards) > 1:
        raise MesetaError(f"{where}: it is cut into {len(shards)} shards, but the scheme keeps the table whole")
    for index, shard in enumerate(shards):
        if entry.is_replica(shard):
            _check_replica(f"{where}: shard {index}", shard, table, num_ranks)
        elif len(shard.ranks) > 1:
            raise MesetaError(
                f"{where}: shard {index} has {len(shard.ranks)} owners; only data_parallel and the hot rows of "
                "hot_replicated have replicas"
            )
    if sharding is ShardingType.HOT_REPLICATED and len(shards) < 2:
        raise MesetaError(f"{where}: it has no rows beside the hot ones; use data_parallel")
    whole_rows = sharding in (ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE)
    if whole_rows and any(s.num_rows != table.num_embeddings for s in shards):
        raise MesetaError(f"{where}: a shard holds only some of the rows; use row_wise to cut rows")
    if sharding is ShardingType.TABLE_ROW_WISE and any(s.num_columns != table.embedding_dim for s in shards):
        raise MesetaError(f"{where}: a shard holds only some of the columns; use grid to cut both")
    if sharding in (*SINGLE_HOST_TYPES, ShardingType.GRID):
        hosts: dict[tuple[int, int], set[int]] = {}
        for shard in shards:
            part = shard.columns if sharding is ShardingType.GRID else (0, table.embedding_dim)
            hosts.setdefault(part, set()).add(shard.ranks[0] // per_host)
        for (first, stop), found in hosts.items():
            if len(found) > 1:
                raise MesetaError(
                    f"{where}: columns {first}..{stop - 1} lie in hosts {sorted(found)} of {per_host} ranks, but the "
                    "scheme keeps them in one; name ranks of one host, set devices_per_host, or use row_wise or "
                    "column_wise"
                )


def _check_replica(where: str, shard: Shard, table: TableSpec, num_ranks: int) -> None:
    if sorted(shard.ranks) != list(range(num_ranks)):
        raise MesetaError(
            f"{where}: replicas on ranks {list(shard.ranks)}, but every one of the {num_ranks} ranks needs one; leave "
            "ranks out, or choose another scheme"
        )
    if shard.num_columns != table.embedding_dim:
        raise MesetaError(f"{where}: it holds only some of the columns, but replicas hold whole rows")


PLAN_FORMAT = "meseta.plan/1"
OPTIONAL_PLAN_KEYS = ("devices_per_host", "exchange", "dense_exchange")
"""What a plan says beside its tables, where it says it."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Placement of all tables on `num_ranks` ranks."""

    num_ranks: int
    """Ranks that the plan is for."""
    tables: tuple[TablePlan, ...]
    """One entry per table."""
    devices_per_host: int | None = None
    """Ranks of one host: rank r sits in host r // devices_per_host. None: all are in one."""
    exchange: ExchangeAlgorithm | None = None
    """Which way ids, rows and their gradients take between hosts; None: 'flat', where nobody chooses."""
    dense_exchange: CrossHostAlgorithm | None = None
    """Which way sums over ranks take between hosts, beside exchange 'two_level' or a codec; None: 'twins'."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_ranks <= MAX_RANKS:
            raise MesetaError(f"plan: num_ranks must be at least 1 and at most {MAX_RANKS:,}, got {self.num_ranks}")
        if self.num_ranks % self.ranks_per_host:
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
                _check_cache_rows(shard)
        check_exchanges(self.exchange, self.dense_exchange)

    @property
    def is_hierarchical(self) -> bool:
        """Whether rows leave a host by way of one rank of it for each place: where it says so, and hosts have several
        ranks and are several."""
        return self.exchange == "two_level" and 1 < self.ranks_per_host < self.num_ranks

    @property
    def ranks_per_host(self) -> int:
        """Ranks of one host."""
        return self.num_ranks if self.devices_per_host is None else self.devices_per_host

    @property
    def ranks_text(self) -> str:
        """What sums over ranks depend on, for people: '4 ranks on 2 hosts'."""
        hosts = self.num_ranks // self.ranks_per_host
        return f"{self.num_ranks} rank{'s' * (self.num_ranks > 1)}" + f" on {hosts} hosts" * (hosts > 1)

    @property
    def has_offloaded_tables(self) -> bool:
        """Whether rows of some table lie near and far."""
        return any(shard.tier in OFFLOADED_TIERS for entry in self.tables for shard in entry.shards)

    def __getitem__(self, table: str) -> TablePlan:
        if table not in self._by_name:
            raise MesetaError(f"plan: no table {table!r}; {suggest(table, self._by_name)}")
        return self._by_name[table]

    @cached_property
    def _by_name(self) -> dict[str, TablePlan]:
        return {entry.table: entry for entry in self.tables}

    def check(self, tables: Sequence[TableSpec]) -> None:
        """Raise MesetaError unless the plan places each of `tables`, and nothing else, exactly once."""
        known, planned = {table.name for table in tables}, set()
        for entry in self.tables:
            if entry.table not in known:
                raise MesetaError(f"plan: the model has no table {entry.table!r}; {suggest(entry.table, known)}")
            if entry.table in planned:
                raise MesetaError(f"plan: table {entry.table!r} is placed twice; name it once")
            planned.add(entry.table)
        for table in tables:
            check_tiling(table, self[table.name])
            check_sharding(table, self[table.name], self.num_ranks, self.ranks_per_host)
            _check_tiers(table, self[table.name])

    def check_storage(self, storage: StorageOptions) -> None:
        """Raise MesetaError where rows lie where `storage` has no room for them."""
        for entry in self.tables:
            if storage.dir is None and any(shard.tier == DISK for shard in entry.shards):
                raise MesetaError(
                    f"plan: table {entry.table!r} has rows in tier 'disk', and there is no folder for them; set "
                    "storage.dir to one on a local disk, or place them in 'hbm'"
                )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON or YAML, every shard written out; `from_dict` reads it back."""
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
        write_atomic(path, format_json(self.to_dict()))


def check_exchanges(exchange: object, dense_exchange: object) -> None:
    """Raise MesetaError unless both values of a plan are `None` or known."""
    for key, value, known in (
        ("exchange", exchange, ExchangeAlgorithm),
        ("dense_exchange", dense_exchange, CrossHostAlgorithm),
    ):
        if value is not None:
            check_choice("plan", key, value, get_args(known))


def _shard_to_dict(shard: Shard) -> dict[str, Any]:
    """A shard in a document."""
    near = {} if shard.cache_rows is None else {"near_rows": shard.cache_rows}
    places = {"rows": list(shard.rows), "columns": list(shard.columns), "ranks": list(shard.ranks)}
    return {**places, "tier": shard.tier, **near}


def _check_cache_rows(shard: Shard) -> None:
    near_rows = shard.cache_rows
    if near_rows is None:
        return
    if shard.tier not in OFFLOADED_TIERS:
        raise MesetaError(
            f"plan: table {shard.table!r} has near_rows {near_rows!r} in tier {shard.tier!r}; rows lie near and far in "
            f"{' and '.join(map(repr, OFFLOADED_TIERS))} alone: leave it out, or name one of these"
        )
    if not is_int(near_rows) or not 1 <= near_rows <= max(shard.num_rows, 1):
        raise MesetaError(
            f"plan: table {shard.table!r}, rows {list(shard.rows)}: near_rows must be 1 to {shard.num_rows:,}, its "
            f"rows, got {near_rows!r}"
        )


def _check_tiers(table: TableSpec, entry: TablePlan) -> None:
    """Raise MesetaError where pieces of a table lie in a tier that they cannot be in."""
    for shard in entry.shards:
        where = f"plan: table {table.name!r} has rows in tier {shard.tier!r}"
        if shard.tier == HBM:
            continue
        if entry.is_replica(shard) or entry.sharding is ShardingType.HOT_REPLICATED:
            raise MesetaError(
                f"{where}, but {entry.sharding} keeps copies of rows in the memory of each rank; place it in 'hbm', or "
                "take another scheme"
            )
        if table.optimizer.stepped_rows == "all":
            raise MesetaError(
                f"{where}, but its optimizer steps all rows in each step (stepped_rows 'all'); place it in 'hbm', or "
                "set stepped_rows to 'touched'"
            )
