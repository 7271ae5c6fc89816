"""Sharding plans: the placement of each shard of each table. Plans are immutable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from meseta.errors import MAX_INT64, MesetaError, check_choice, check_keys, check_number, format_value, is_int, suggest
from meseta.spec.codecs import FORMER_DENSE_EXCHANGES, FORMER_EXCHANGES, CrossHostAlgorithm, ExchangeAlgorithm
from meseta.spec.documents import load_document, rename_keys, rename_value
from meseta.spec.shards import COLUMN_BLOCK, MAX_RANKS, SINGLE_HOST_TYPES, Shard, ShardingType, TablePlan, shard_table
from meseta.spec.tables import ELEMENT_BYTES, TableSpec
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
    """Raise MesetaError unless the shards conform to their type on hosts of `per_host` ranks. They must tile the
    table, see `check_tiling`."""
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


PLAN_FILE = "plan.json"
PLAN_KEYS = ("format", "num_ranks", *OPTIONAL_PLAN_KEYS, "tables")
TABLE_KEYS = ("sharding", "ranks", "hot_rows", "tier", "cache_rows", "shards", "cost")
SHARD_KEYS = ("rows", "columns", "ranks", "tier", "cache_rows")
FORMER_KEYS = {"near_rows": "cache_rows"}
"""Current name of each former key of a table or shard."""


def read_plan(document: Mapping[Any, Any], tables: Sequence[TableSpec], num_ranks: int) -> Plan:
    """Parse a plan. See `Plan.from_dict`."""
    check_keys("plan", document, PLAN_KEYS)
    if document.get("format", PLAN_FORMAT) != PLAN_FORMAT:
        raise MesetaError(f"plan: format {document['format']!r} is unknown; this version reads {PLAN_FORMAT!r}")
    if document.get("num_ranks", num_ranks) != num_ranks:
        raise MesetaError(
            f"plan: it is for {document['num_ranks']} ranks, but this run has {num_ranks}; "
            "create a plan for this number, or remove num_ranks and ranks from the plan"
        )
    entries = document.get("tables") or {}
    if not isinstance(entries, Mapping):
        raise MesetaError(f"plan: 'tables' must be a mapping with table names as keys, got {entries!r}")
    entries = dict(entries)
    default = entries.pop("*", None)
    for name in entries:
        if name not in {table.name for table in tables}:
            raise MesetaError(f"plan: the model has no table {name!r}; {suggest(name, [t.name for t in tables])}")
    per_host = document.get("devices_per_host")
    if per_host is not None and not (is_int(per_host) and per_host > 0 and num_ranks % per_host == 0):
        raise MesetaError(
            f"plan: devices_per_host must be an integer that divides num_ranks ({num_ranks}), got {per_host!r}"
        )
    held_bytes = [0] * num_ranks
    placed = []
    for table in tables:
        entry = entries.get(table.name, default)
        if entry is None:
            raise MesetaError(f"plan: table {table.name!r} is not placed; add an entry for it or for '*'")
        entry = {"sharding": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, Mapping):
            raise MesetaError(
                f"plan: table {table.name!r} must have a sharding type such as 'row_wise', or a mapping, got {entry!r}"
            )
        placed.append(_read_table(table, entry, per_host or num_ranks, held_bytes))
    paths = {key: document.get(key) for key in OPTIONAL_PLAN_KEYS}
    paths["exchange"] = rename_value(paths["exchange"], FORMER_EXCHANGES)
    paths["dense_exchange"] = rename_value(paths["dense_exchange"], FORMER_DENSE_EXCHANGES)
    check_exchanges(paths["exchange"], paths["dense_exchange"])
    plan = Plan(num_ranks=num_ranks, tables=tuple(placed), **paths)
    plan.check(tables)
    return plan


def read_explicit_plan(document: Mapping[Any, Any]) -> tuple[Plan, tuple[TableSpec, ...]]:
    """Parse a plan that lists all shards, and infer the names and sizes of its tables.

    The returned `TableSpec`s have default values for all other fields. Raises MesetaError if `num_ranks` or the shards
    of a table are missing, or if the plan is invalid.
    """
    entries, num_ranks = document.get("tables"), document.get("num_ranks")
    if not isinstance(entries, Mapping) or not isinstance(num_ranks, int):
        raise MesetaError("it must have num_ranks and tables; create it with `meseta plan --out`")
    if not 1 <= num_ranks <= MAX_RANKS:
        raise MesetaError(f"num_ranks must be at least 1 and at most {MAX_RANKS:,}, got {num_ranks}")
    specs = tuple(_table_spec(str(name), entry) for name, entry in entries.items())
    return read_plan(document, specs, num_ranks), specs


def rank_mismatch_reason(document: Mapping[Any, Any], num_ranks: int) -> str | None:
    """Return why a plan document cannot be used on `num_ranks` ranks, or `None` if it can. Does not check the
    tables."""
    fixed, per_host = document.get("num_ranks", num_ranks), document.get("devices_per_host")
    if fixed != num_ranks:
        return f"is for {fixed} ranks"
    if isinstance(per_host, int) and per_host > 0 and num_ranks % per_host:
        return f"is for hosts of {per_host} ranks"
    entries = document.get("tables")
    for name, entry in entries.items() if isinstance(entries, Mapping) else ():
        too_high = [rank for rank in _named_ranks(entry) if rank >= num_ranks]
        if too_high:
            return f"places table {name!r} on rank {too_high[0]}"
    return None


def _named_ranks(entry: Any) -> list[int]:
    if not isinstance(entry, Mapping):
        return []
    shards, ranks = entry.get("shards"), entry.get("ranks")
    named = [rank for rank in (ranks if isinstance(ranks, list | tuple) else [ranks]) if isinstance(rank, int)]
    for shard in shards if isinstance(shards, list | tuple) else ():
        named += _named_ranks(shard)
    return named


def _table_spec(name: str, entry: object) -> TableSpec:
    try:
        shards = entry["shards"]  # type: ignore[index]
        rows, columns = (max(int(shard[key][1]) for shard in shards) for key in ("rows", "columns"))
    except (TypeError, KeyError, IndexError, ValueError):
        raise MesetaError(
            f"plan: table {name!r} must list its shards; create the plan with `meseta plan --out`"
        ) from None
    return TableSpec(name=name, num_embeddings=rows, embedding_dim=columns)


def _read_table(table: TableSpec, entry: Mapping[Any, Any], per_host: int, held_bytes: list[int]) -> TablePlan:
    """Parse the entry of one table, and add the bytes of its shards to `held_bytes` of their ranks."""
    where = f"plan: table {table.name!r}"
    entry = rename_keys(where, entry, FORMER_KEYS)
    check_keys(where, entry, TABLE_KEYS)
    if entry.get("sharding") not in list(ShardingType):
        raise MesetaError(
            f"{where}: sharding {entry.get('sharding')!r} is unknown; {suggest(entry.get('sharding'), ShardingType)}"
        )
    sharding = ShardingType(entry["sharding"])
    if "shards" in entry:
        for key in ("ranks", "hot_rows", "tier", "cache_rows"):
            if key in entry:
                raise MesetaError(
                    f"{where}: {key!r} and 'shards' are mutually exclusive; set rows, ranks and tiers in the shards"
                )
        if not isinstance(entry["shards"], list | tuple):
            raise MesetaError(f"{where}: 'shards' must be a list, got {entry['shards']!r}")
        shards = [_read_shard(f"{where}: shard {i}", table.name, piece) for i, piece in enumerate(entry["shards"])]
        shards.sort(key=lambda shard: (shard.rows, shard.columns))
        placed = TablePlan(table=table.name, sharding=sharding, shards=tuple(shards))
    else:
        ranks = entry.get("ranks", _default_ranks(sharding, per_host, held_bytes))
        hot_rows = entry.get("hot_rows", 0)
        if not is_int(hot_rows):
            raise MesetaError(f"{where}: hot_rows must be an integer, got {hot_rows!r}")
        placed = shard_table(
            table,
            sharding,
            _read_integers(f"{where}: ranks", [ranks] if isinstance(ranks, int) else ranks),
            num_ranks=len(held_bytes),
            devices_per_host=per_host,
            hot_rows=hot_rows,
        )
        tier, cache_rows = str(entry.get("tier", HBM)), _read_cache_rows(where, entry)
        pieces = (
            # cache_rows applies to each shard, but small shards may have fewer rows.
            replace(s, tier=tier, cache_rows=None if cache_rows is None else min(cache_rows, max(s.num_rows, 1)))
            for s in placed.shards
        )
        placed = replace(placed, shards=tuple(pieces))
    for shard in placed.shards:
        for rank in shard.ranks:
            if 0 <= rank < len(held_bytes):
                held_bytes[rank] += shard.num_rows * shard.num_columns * ELEMENT_BYTES[table.dtype]
    cost = entry.get("cost", 0.0)
    seconds = check_number(where, "cost", cost)
    if seconds < 0:
        raise MesetaError(f"{where}: cost must not be negative, got {seconds}")
    return replace(placed, cost=seconds)


def _default_ranks(sharding: ShardingType, per_host: int, held_bytes: Sequence[int]) -> list[int]:
    """Return all ranks, or for sharding types on one rank or host, those with the fewest bytes so far."""
    ranks = list(range(len(held_bytes)))
    if sharding is ShardingType.TABLE_WISE:
        return [min(ranks, key=lambda rank: (held_bytes[rank], rank))]
    if sharding in SINGLE_HOST_TYPES:
        hosts = [ranks[first : first + per_host] for first in range(0, len(ranks), per_host)]
        return min(hosts, key=lambda host: (sum(held_bytes[rank] for rank in host), host))
    return ranks


def _read_shard(where: str, table: str, piece: Any) -> Shard:
    if not isinstance(piece, Mapping):
        raise MesetaError(f"{where} must be a mapping with rows, columns and ranks, got {piece!r}")
    piece = rename_keys(where, piece, FORMER_KEYS)
    check_keys(where, piece, SHARD_KEYS)
    for key in ("rows", "columns", "ranks"):
        if key not in piece:
            raise MesetaError(f"{where}: key {key!r} is missing")
    rows, columns = (_read_integers(f"{where}: {key}", piece[key]) for key in ("rows", "columns"))
    for key, span in (("rows", rows), ("columns", columns)):
        if len(span) != 2:
            raise MesetaError(
                f"{where}: {key} must be [start, stop] with an exclusive stop, such as [0, 500], got {list(span)}"
            )
    return Shard(
        table=table,
        rows=(rows[0], rows[1]),
        columns=(columns[0], columns[1]),
        ranks=_read_integers(f"{where}: ranks", piece["ranks"]),
        tier=str(piece.get("tier", HBM)),
        cache_rows=_read_cache_rows(where, piece),
    )


def _read_cache_rows(where: str, entry: Mapping[Any, Any]) -> int | None:
    cache_rows = entry.get("cache_rows")
    if cache_rows is not None and not is_int(cache_rows):
        raise MesetaError(f"{where}: cache_rows must be an integer, got {format_value(cache_rows)}")
    if cache_rows is not None and cache_rows > MAX_INT64:
        raise MesetaError(f"{where}: cache_rows must be at most {MAX_INT64}, got {format_value(cache_rows)}")
    return cache_rows


def _read_integers(where: str, value: Any) -> tuple[int, ...]:
    is_list = isinstance(value, list | tuple)
    if not is_list or not all(map(is_int, value)):
        raise MesetaError(f"{where} must be a list of integers, got {value!r}")
    return tuple(value)
