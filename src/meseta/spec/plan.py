"""Where every piece of every table lives. Made by hand or by the planner, never mutated."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meseta.spec.errors import MesetaError, nearest
from meseta.spec.tables import TableSpec

COLUMN_BLOCK = 16
"""Column shards start at multiples of this many columns; row statistics are accumulated in blocks of as many."""

_FORMAT = "meseta.plan/1"
_PLAN_KEYS = ("format", "num_ranks", "tables")
_TABLE_KEYS = ("sharding", "ranks", "shards", "cost")
_SHARD_KEYS = ("rows", "columns", "ranks", "tier")
_VALUE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


class ShardingType(enum.StrEnum):
    """How a table is cut and placed."""

    DATA_PARALLEL = "data_parallel"
    """Every rank holds the whole table; the gradients of touched rows are added up over ranks."""
    TABLE_WISE = "table_wise"
    """One rank holds the whole table."""
    ROW_WISE = "row_wise"
    """Contiguous row ranges, one per rank; partial bags are added up at the rank that asked."""
    COLUMN_WISE = "column_wise"
    """Column ranges, one per rank, aligned to 16; bags are concatenated at the rank that asked."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One placed piece of a table."""

    table: str
    """Name of the TableSpec."""
    rows: tuple[int, int]
    """First row and the row after the last, for example (0, 500)."""
    columns: tuple[int, int]
    """First column and the column after the last, for example (16, 32)."""
    ranks: tuple[int, ...]
    """The one owner, or all replicas."""
    tier: str = "hbm"
    """Memory that holds the rows: 'hbm', the memory of the rank's device (on a CPU rank, DRAM)."""

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def num_columns(self) -> int:
        return self.columns[1] - self.columns[0]


@dataclass(frozen=True, kw_only=True)
class TablePlan:
    """The pieces of one table; together they tile it."""

    table: str
    """Name of the TableSpec."""
    sharding: ShardingType
    """The scheme that the pieces follow; row_wise pieces that are written out one by one may be cut by columns too."""
    shards: tuple[Shard, ...]
    """Pieces, ordered by (row, column)."""
    cost: float = 0.0
    """Predicted bytes that one sample moves through this table (rows read and written, exchanged both ways)."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Placement of all tables on `num_ranks` ranks."""

    num_ranks: int
    """Ranks that the plan is for."""
    tables: tuple[TablePlan, ...]
    """One entry per table."""

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise MesetaError(f"plan: num_ranks must be at least 1, got {self.num_ranks}")
        for entry in self.tables:
            for shard in entry.shards:
                if shard.table != entry.table:
                    raise MesetaError(f"plan: table {entry.table!r} holds a shard of table {shard.table!r}")
                if not shard.ranks or not all(0 <= rank < self.num_ranks for rank in shard.ranks):
                    raise MesetaError(
                        f"plan: table {entry.table!r} is placed on ranks {list(shard.ranks)}, "
                        f"outside 0..{self.num_ranks - 1}"
                    )
                if shard.tier != "hbm":
                    raise MesetaError(f"plan: table {entry.table!r}: tier {shard.tier!r} is unknown; known is 'hbm'")

    def __getitem__(self, table: str) -> TablePlan:
        for entry in self.tables:
            if entry.table == table:
                return entry
        raise MesetaError(f"plan: no table {table!r}; {nearest(table, [t.table for t in self.tables])}")

    def check(self, tables: Sequence[TableSpec]) -> None:
        """Raise MesetaError unless the plan places each of `tables`, and nothing else, exactly once."""
        planned = [entry.table for entry in self.tables]
        for name in planned:
            if name not in {table.name for table in tables}:
                raise MesetaError(f"plan: the model has no table {name!r}; {nearest(name, [t.name for t in tables])}")
            if planned.count(name) > 1:
                raise MesetaError(f"plan: table {name!r} is placed {planned.count(name)} times")
        for table in tables:
            _check_tiling(table, self[table.name])
            _check_scheme(table, self[table.name], self.num_ranks)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON or YAML, every shard written out; `from_dict` reads it back."""
        return {
            "format": _FORMAT,
            "num_ranks": self.num_ranks,
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
        for name in document:
            if name not in _PLAN_KEYS:
                raise MesetaError(f"plan: unknown key {name!r}; {nearest(name, _PLAN_KEYS)}")
        if document.get("format", _FORMAT) != _FORMAT:
            raise MesetaError(f"plan: format {document['format']!r} is unknown; this version reads {_FORMAT!r}")
        if document.get("num_ranks", num_ranks) != num_ranks:
            raise MesetaError(
                f"plan: it is for {document['num_ranks']} ranks, but this run has {num_ranks}; "
                "make a plan for this number, or leave num_ranks and ranks out of the plan"
            )
        entries = document.get("tables") or {}
        if not isinstance(entries, Mapping):
            raise MesetaError(f"plan: 'tables' must map table names to their places, got {entries!r}")
        entries = dict(entries)
        default = entries.pop("*", None)
        for name in entries:
            if name not in {table.name for table in tables}:
                raise MesetaError(f"plan: the model has no table {name!r}; {nearest(name, [t.name for t in tables])}")
        held_bytes = [0] * num_ranks
        placed = []
        for table in tables:
            entry = entries.get(table.name, default)
            if entry is None:
                raise MesetaError(f"plan: table {table.name!r} is not placed; name it, or add an entry for '*'")
            entry = {"sharding": entry} if isinstance(entry, str) else entry
            if not isinstance(entry, Mapping):
                raise MesetaError(
                    f"plan: table {table.name!r} must have a scheme such as 'row_wise', or a mapping, got {entry!r}"
                )
            placed.append(_read_table(table, entry, num_ranks, held_bytes))
        plan = Plan(num_ranks=num_ranks, tables=tuple(placed))
        plan.check(tables)
        return plan

    @staticmethod
    def load(path: str | Path, tables: Sequence[TableSpec], num_ranks: int) -> Plan:
        """Read a JSON or YAML plan; raises MesetaError as `from_dict` does, naming the file."""
        from meseta.spec.documents import read_mapping  # Needs PyYAML, which a machine with bare torch lacks.

        try:
            return Plan.from_dict(read_mapping(path), tables, num_ranks)
        except MesetaError as error:
            raise MesetaError(f"plan file {str(path)!r}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write JSON with every shard spelled out."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")


def cut(table: TableSpec, sharding: ShardingType, ranks: Sequence[int]) -> TablePlan:
    """Cut one table by a scheme over `ranks`: equal contiguous rows, or equal groups of 16 columns.

    A table with fewer rows, or fewer groups of 16 columns, than ranks leaves the last ranks empty-handed.
    Raises MesetaError when there are no ranks, or several for table_wise.
    """
    if not ranks:
        raise MesetaError(f"plan: table {table.name!r} ({sharding}) has no ranks; name at least one")
    whole_rows, whole_columns = (0, table.num_embeddings), (0, table.embedding_dim)
    pieces: list[tuple[tuple[int, int], tuple[int, int], tuple[int, ...]]]
    if sharding is ShardingType.DATA_PARALLEL:
        pieces = [(whole_rows, whole_columns, tuple(ranks))]
    elif sharding is ShardingType.TABLE_WISE:
        if len(ranks) != 1:
            raise MesetaError(f"plan: table {table.name!r} is table_wise and needs one rank, got {list(ranks)}")
        pieces = [(whole_rows, whole_columns, tuple(ranks))]
    elif sharding is ShardingType.ROW_WISE:
        spans = _spans(table.num_embeddings, len(ranks), 1)
        pieces = [(span, whole_columns, (rank,)) for span, rank in zip(spans, ranks, strict=False)]
    else:
        spans = _spans(table.embedding_dim, len(ranks), COLUMN_BLOCK)
        pieces = [(whole_rows, span, (rank,)) for span, rank in zip(spans, ranks, strict=False)]
    shards = tuple(Shard(table=table.name, rows=r, columns=c, ranks=owners) for r, c, owners in pieces)
    return TablePlan(table=table.name, sharding=sharding, shards=shards)


def _spans(total: int, parts: int, align: int) -> list[tuple[int, int]]:
    """At most `parts` non-empty spans of equal size (the last may be shorter), starting at multiples of `align`."""
    blocks = -(-total // align)
    step = -(-blocks // parts) * align
    return [(start, min(start + step, total)) for start in range(0, total, step)]


def _read_table(table: TableSpec, entry: Mapping[Any, Any], num_ranks: int, held_bytes: list[int]) -> TablePlan:
    """One entry of a plan document; adds the bytes it places to `held_bytes`."""
    where = f"plan: table {table.name!r}"
    for key in entry:
        if key not in _TABLE_KEYS:
            raise MesetaError(f"{where}: unknown key {key!r}; {nearest(key, _TABLE_KEYS)}")
    if entry.get("sharding") not in list(ShardingType):
        raise MesetaError(
            f"{where}: sharding {entry.get('sharding')!r} is unknown; {nearest(entry.get('sharding'), ShardingType)}"
        )
    sharding = ShardingType(entry["sharding"])
    if "shards" in entry:
        if "ranks" in entry:
            raise MesetaError(f"{where}: 'ranks' and 'shards' exclude each other; every shard names its own ranks")
        if not isinstance(entry["shards"], list | tuple):
            raise MesetaError(f"{where}: 'shards' must be a list, got {entry['shards']!r}")
        shards = [_read_shard(f"{where}: shard {i}", table.name, piece) for i, piece in enumerate(entry["shards"])]
        shards.sort(key=lambda shard: (shard.rows, shard.columns))
        placed = TablePlan(table=table.name, sharding=sharding, shards=tuple(shards))
    else:
        lightest = min(range(num_ranks), key=lambda rank: (held_bytes[rank], rank))
        default = [lightest] if sharding is ShardingType.TABLE_WISE else list(range(num_ranks))
        ranks = entry.get("ranks", default)
        placed = cut(table, sharding, _read_integers(f"{where}: ranks", [ranks] if isinstance(ranks, int) else ranks))
    for shard in placed.shards:
        for rank in shard.ranks:
            if 0 <= rank < num_ranks:
                held_bytes[rank] += shard.num_rows * shard.num_columns * _VALUE_BYTES[table.dtype]
    cost = entry.get("cost", 0.0)
    if isinstance(cost, bool) or not isinstance(cost, int | float) or not 0.0 <= cost < float("inf"):
        raise MesetaError(f"{where}: cost must be a finite number of bytes and not negative, got {cost!r}")
    return replace(placed, cost=float(cost))


def _read_shard(where: str, table: str, piece: Any) -> Shard:
    """One shard that is written out."""
    if not isinstance(piece, Mapping):
        raise MesetaError(f"{where} must be a mapping with rows, columns and ranks, got {piece!r}")
    for key in piece:
        if key not in _SHARD_KEYS:
            raise MesetaError(f"{where}: unknown key {key!r}; {nearest(key, _SHARD_KEYS)}")
    for key in ("rows", "columns", "ranks"):
        if key not in piece:
            raise MesetaError(f"{where}: key {key!r} is missing")
    rows, columns = (_read_integers(f"{where}: {key}", piece[key]) for key in ("rows", "columns"))
    for key, span in (("rows", rows), ("columns", columns)):
        if len(span) != 2:
            raise MesetaError(
                f"{where}: {key} must be the first and the one after the last, [0, 500], got {list(span)}"
            )
    return Shard(
        table=table,
        rows=(rows[0], rows[1]),
        columns=(columns[0], columns[1]),
        ranks=_read_integers(f"{where}: ranks", piece["ranks"]),
        tier=str(piece.get("tier", "hbm")),
    )


def _read_integers(where: str, value: Any) -> tuple[int, ...]:
    is_list = isinstance(value, list | tuple)
    if not is_list or not all(isinstance(number, int) and not isinstance(number, bool) for number in value):
        raise MesetaError(f"{where} must be a list of whole numbers, got {value!r}")
    return tuple(value)


def _check_tiling(table: TableSpec, entry: TablePlan) -> None:
    """Raise MesetaError unless the shards cover every cell of the table exactly once and respect column blocks."""
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
        if len(shard.ranks) > 1 and entry.sharding is not ShardingType.DATA_PARALLEL:
            raise MesetaError(f"{where}: shard {index} has {len(shard.ranks)} owners; only data_parallel has replicas")
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


def _check_scheme(table: TableSpec, entry: TablePlan, num_ranks: int) -> None:
    """Raise MesetaError unless the pieces, which tile the table, have the form that the scheme promises."""
    where = f"plan: table {table.name!r} ({entry.sharding})"
    one_piece = entry.sharding in (ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL)
    if one_piece and len(entry.shards) > 1:
        raise MesetaError(f"{where}: it is cut into {len(entry.shards)} shards, but the scheme keeps the table whole")
    if entry.sharding is ShardingType.DATA_PARALLEL and sorted(entry.shards[0].ranks) != list(range(num_ranks)):
        raise MesetaError(
            f"{where}: replicas on ranks {list(entry.shards[0].ranks)}, but every one of the {num_ranks} ranks needs "
            "one; leave ranks out, or choose another scheme"
        )
    if entry.sharding is ShardingType.COLUMN_WISE and any(s.num_rows != table.num_embeddings for s in entry.shards):
        raise MesetaError(f"{where}: a shard holds only some of the rows; use row_wise to cut rows")
