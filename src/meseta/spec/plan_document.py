"""Parser of plan documents, which users may write in a short form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from meseta.errors import MAX_INT64, MesetaError, check_keys, check_number, format_value, is_int, suggest
from meseta.spec.codecs import FORMER_DENSE_EXCHANGES, FORMER_EXCHANGES
from meseta.spec.documents import rename_keys, rename_value
from meseta.spec.plan import OPTIONAL_PLAN_KEYS, PLAN_FORMAT, Plan, check_exchanges
from meseta.spec.shards import MAX_RANKS, SINGLE_HOST_TYPES, Shard, ShardingType, TablePlan, shard_table
from meseta.spec.tables import ELEMENT_BYTES, TableSpec
from meseta.spec.tiers import HBM

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
