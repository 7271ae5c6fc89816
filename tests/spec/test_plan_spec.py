"""Tests of plans: short and long forms, round trips, and an error for each rule."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from meseta.spec import MesetaError, Plan, Shard, ShardingType, TablePlan, TableSpec
from meseta.spec.plan import rank_mismatch_reason
from meseta.spec.shards import shard_table

USER = TableSpec(name="user", num_embeddings=10, embedding_dim=40)
ITEM = TableSpec(name="item", num_embeddings=7, embedding_dim=16)
TABLES = [USER, ITEM]


def spans(plan: Plan, table: str) -> list[tuple[tuple[int, int], tuple[int, int], tuple[int, ...]]]:
    return [(shard.rows, shard.columns, shard.ranks) for shard in plan[table].shards]


def refused(document: Any, *words: str, num_ranks: int = 2) -> None:
    with pytest.raises(MesetaError) as caught:
        Plan.from_dict(document, TABLES, num_ranks)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_short_form() -> None:
    plan = Plan.from_dict({"tables": {"user": {"sharding": "row_wise"}, "*": "data_parallel"}}, TABLES, 3)
    assert spans(plan, "user") == [((0, 4), (0, 40), (0,)), ((4, 8), (0, 40), (1,)), ((8, 10), (0, 40), (2,))]
    assert spans(plan, "item") == [((0, 7), (0, 16), (0, 1, 2))]
    plan = Plan.from_dict(
        {"tables": {"user": {"sharding": "column_wise", "ranks": [1, 0]}, "item": "row_wise"}}, TABLES, 2
    )
    assert spans(plan, "user") == [((0, 10), (0, 32), (1,)), ((0, 10), (32, 40), (0,))]
    assert spans(plan, "item") == [((0, 4), (0, 16), (0,)), ((4, 7), (0, 16), (1,))]


def test_table_wise_goes_to_the_given_or_the_lightest_rank() -> None:
    plan = Plan.from_dict({"tables": {"*": "table_wise"}}, TABLES, 3)
    assert [plan[t].shards[0].ranks for t in ("user", "item")] == [(0,), (1,)]
    for ranks in (2, [2]):
        plan = Plan.from_dict(
            {"tables": {"user": {"sharding": "table_wise", "ranks": ranks}, "*": "table_wise"}}, TABLES, 3
        )
        assert [plan[t].shards[0].ranks for t in ("user", "item")] == [(2,), (0,)]


@pytest.mark.parametrize(
    ("rows", "wide", "narrow"),
    [(6, "float64", "float32"), (6, "float32", "float16"), (6, "float32", "bfloat16"), (3, "float64", "bfloat16")],
)
def test_the_lightest_rank_is_found_by_the_bytes_of_rows(rows: int, wide: str, narrow: str) -> None:
    # 10 narrow rows have fewer bytes than `rows` wide ones.
    tables = [
        dataclasses.replace(ITEM, name=n, num_embeddings=r, dtype=d)
        for n, r, d in (("a", rows, wide), ("b", 10, narrow), ("c", 1, narrow))
    ]
    plan = Plan.from_dict({"tables": {"*": "table_wise"}}, tables, 2)
    assert [plan[t].shards[0].ranks for t in "abc"] == [(0,), (1,), (1,)]


def test_cost_survives_the_short_form() -> None:
    plan = Plan.from_dict({"tables": {"*": {"sharding": "row_wise", "cost": 12}}}, TABLES, 2)
    assert plan["user"].cost == 12.0


table_draws = st.tuples(
    st.integers(1, 30),
    st.integers(1, 70),
    st.sampled_from(ShardingType),
    st.randoms(use_true_random=False),
    st.floats(0, 1e9),
)


@given(st.integers(1, 3), st.integers(1, 4), st.lists(table_draws, min_size=1, max_size=4))
def test_cut_tiles_and_documents_round_trip(num_hosts: int, per_host: int, draws: list[Any]) -> None:
    tables, entries = [], []
    num_ranks = num_hosts * per_host
    for index, (rows, dim, sharding, random, cost) in enumerate(draws):
        is_hot = sharding is ShardingType.HOT_REPLICATED
        tables.append(TableSpec(name=f"t{index}", num_embeddings=rows + is_hot, embedding_dim=dim))
        ranks = random.sample(range(num_ranks), 1 if sharding is ShardingType.TABLE_WISE else num_ranks)
        if sharding in (ShardingType.TABLE_ROW_WISE, ShardingType.TABLE_COLUMN_WISE):
            ranks = [rank for rank in ranks if rank // per_host == ranks[0] // per_host]
        placed = shard_table(
            tables[-1],
            sharding,
            ranks,
            num_ranks=num_ranks,
            devices_per_host=per_host,
            hot_rows=random.randint(1, rows) if is_hot else 0,
        )
        entries.append(dataclasses.replace(placed, cost=cost))
    plan = Plan(num_ranks=num_ranks, tables=tuple(entries), devices_per_host=per_host)
    plan.check(tables)
    for table in tables:
        covered = {
            (row, column)
            for shard in plan[table.name].shards
            for row in range(*shard.rows)
            for column in range(*shard.columns)
        }
        assert len(covered) == table.num_embeddings * table.embedding_dim
        assert sum(s.num_rows * s.num_columns for s in plan[table.name].shards) == len(covered)
    document = plan.to_dict()
    assert Plan.from_dict(document, tables, plan.num_ranks) == plan
    assert Plan.from_dict(json.loads(json.dumps(document)), tables, plan.num_ranks) == plan
    assert Plan.from_dict(yaml.safe_load(yaml.safe_dump(document)), tables, plan.num_ranks) == plan


def test_schemes_of_hosts() -> None:
    document = {"devices_per_host": 2, "tables": {"user": "table_row_wise", "item": "table_column_wise"}}
    plan = Plan.from_dict(document, TABLES, 4)
    assert spans(plan, "user") == [((0, 5), (0, 40), (0,)), ((5, 10), (0, 40), (1,))]
    assert spans(plan, "item") == [((0, 7), (0, 16), (2,))]  # the host with fewer bytes; one block of columns
    assert Plan.from_dict(plan.to_dict(), TABLES, 4) == plan and plan.ranks_per_host == 2
    plan = Plan.from_dict({"devices_per_host": 2, "tables": {"*": "grid"}}, TABLES, 4)
    assert spans(plan, "user") == [
        ((0, 5), (0, 32), (0,)), ((0, 5), (32, 40), (2,)), ((5, 10), (0, 32), (1,)), ((5, 10), (32, 40), (3,))
    ]  # fmt: skip
    assert spans(plan, "item") == [((0, 4), (0, 16), (0,)), ((4, 7), (0, 16), (1,))]
    hot = {"sharding": "hot_replicated", "hot_rows": 2, "ranks": [1, 0]}
    plan = Plan.from_dict({"tables": {"user": hot, "item": "table_wise"}}, TABLES, 3)
    assert spans(plan, "user") == [((0, 2), (0, 40), (0, 1, 2)), ((2, 6), (0, 40), (1,)), ((6, 10), (0, 40), (0,))]
    assert [plan["user"].is_replica(shard) for shard in plan["user"].shards] == [True, False, False]


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (
            {"devices_per_host": 3, "tables": {"*": "grid"}},
            "devices_per_host must be an integer that divides num_ranks (4)",
        ),
        ({"devices_per_host": "2", "tables": {"*": "grid"}}, "got '2'"),
        (
            {"devices_per_host": 2, "tables": {"*": {"sharding": "table_row_wise", "ranks": [1, 2]}}},
            "columns 0..39 must be on one host, got hosts [0, 1] of 2 ranks",
        ),
        (
            {"devices_per_host": 2, "tables": {"*": {"sharding": "table_column_wise", "ranks": [1, 2, 3]}}},
            "must be on one host, got hosts [0, 1]",
        ),
        ({"tables": {"*": "hot_replicated"}}, "hot_rows must be in 1..9, got 0"),
        (
            {"tables": {"*": {"sharding": "hot_replicated", "hot_rows": 10}}},
            "use row_wise to replicate none of the 10 rows",
        ),
        ({"tables": {"*": {"sharding": "hot_replicated", "hot_rows": 1.5}}}, "hot_rows must be an integer"),
        ({"tables": {"*": {"sharding": "row_wise", "hot_rows": 1}}}, "hot_rows can only be used with hot_replicated"),
    ],
)
def test_schemes_of_hosts_are_checked(document: Any, words: str) -> None:
    refused(document, words, num_ranks=4)


def test_written_out_pieces_of_hosts_are_checked() -> None:
    whole, everywhere = [0, 16], [0, 1, 2, 3]

    def shards(sharding: str, *pieces: Any) -> dict[str, Any]:
        shards = [{"rows": rows, "columns": columns, "ranks": ranks} for rows, columns, ranks in pieces]
        tables = {"item": {"sharding": sharding, "shards": shards}, "user": "table_wise"}
        return {"devices_per_host": 2, "tables": tables}

    hot = ([0, 2], whole, everywhere)
    refused(shards("hot_replicated", ([0, 7], whole, everywhere)), "all rows are hot", num_ranks=4)
    refused(shards("hot_replicated", ([0, 2], whole, [0, 1]), ([2, 7], whole, [0])), "must have a replica", num_ranks=4)
    refused(shards("hot_replicated", hot, ([2, 7], whole, [0, 1])), "must have one rank, got 2", num_ranks=4)
    refused(shards("grid", ([0, 3], whole, [0]), ([3, 7], whole, [2])), "got hosts [0, 1]", num_ranks=4)
    refused(shards("row_wise", hot, ([2, 7], whole, [0])), "must have one rank, got 4", num_ranks=4)


def test_hosts_are_full() -> None:
    with pytest.raises(MesetaError, match="num_ranks must be a multiple of devices_per_host, got 4 and 3"):
        Plan(num_ranks=4, tables=(), devices_per_host=3)


def test_save_and_load(tmp_path: Path) -> None:
    plan = Plan.from_dict({"tables": {"*": "row_wise"}}, TABLES, 2)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json", TABLES, 2) == plan
    (tmp_path / "plan.yaml").write_text("tables:\n  '*': row_wise\n")
    assert Plan.load(str(tmp_path / "plan.yaml"), TABLES, 2) == plan


def test_shards_written_out_are_ordered() -> None:
    def shard(rows: list[int], columns: list[int], rank: int) -> dict[str, Any]:
        return {"rows": rows, "columns": columns, "ranks": [rank]}

    pieces = [shard([5, 10], [16, 40], 1), shard([0, 5], [0, 40], 0), shard([5, 10], [0, 16], 0)]
    plan = Plan.from_dict(
        {"tables": {"user": {"sharding": "row_wise", "shards": pieces}, "item": "row_wise"}}, TABLES, 2
    )
    assert spans(plan, "user") == [((0, 5), (0, 40), (0,)), ((5, 10), (0, 16), (0,)), ((5, 10), (16, 40), (1,))]


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"table": {}}, ["unknown key 'table'", "did you mean 'tables'?"]),
        ({3: {}}, ["unknown key 3"]),
        ({"format": "meseta.plan/9", "tables": {"*": "row_wise"}}, ["'meseta.plan/9'", "'meseta.plan/1'"]),
        ({"num_ranks": 4, "tables": {"*": "row_wise"}}, ["for 4 ranks", "this run has 2", "create a plan"]),
        ({"tables": ["user"]}, ["'tables' must be a mapping", "['user']"]),
        ({"tables": {}}, ["table 'user' is not placed", "'*'"]),
        ({}, ["table 'user' is not placed"]),
        ({"tables": {"usr": "row_wise", "*": "row_wise"}}, ["no table 'usr'", "did you mean 'user'?"]),
        ({"tables": {1: "row_wise", "*": "row_wise"}}, ["no table 1", "available: item, user"]),
        ({"tables": {"*": 3}}, ["table 'user' must have a sharding type", "got 3"]),
        ({"tables": {"*": ["row_wise"]}}, ["must have a sharding type"]),
        ({"tables": {"*": "row_wize"}}, ["table 'user': sharding 'row_wize'", "did you mean 'row_wise'?"]),
        ({"tables": {"*": {"ranks": [0]}}}, ["sharding None is unknown", "available: column_wise"]),
        ({"tables": {"*": {"sharding": ["row_wise"]}}}, ["sharding ['row_wise'] is unknown"]),
        ({"tables": {"*": {"sharding": "row_wise", "rank": [0]}}}, ["unknown key 'rank'", "did you mean 'ranks'?"]),
        ({"tables": {"*": {"sharding": "row_wise", "ranks": "all"}}}, ["ranks must be a list", "got 'all'"]),
        ({"tables": {"*": {"sharding": "row_wise", "ranks": [0.5]}}}, ["ranks must be a list of integers"]),
        ({"tables": {"*": {"sharding": "row_wise", "ranks": None}}}, ["ranks must be a list", "None"]),
        ({"tables": {"*": {"sharding": "row_wise", "ranks": []}}}, ["'user' (row_wise): ranks must not be empty"]),
        ({"tables": {"*": {"sharding": "row_wise", "ranks": [0, 2]}}}, ["ranks of table 'user'", "in 0..1, got [2]"]),
        ({"tables": {"*": {"sharding": "row_wise", "ranks": [-1]}}}, ["ranks of table 'user'", "in 0..1, got [-1]"]),
        ({"tables": {"*": {"sharding": "table_wise", "ranks": [0, 1]}}}, ["must have one rank, got [0, 1]"]),
        (
            {"tables": {"*": {"sharding": "data_parallel", "ranks": [1]}}},
            ["all 2 ranks must have a replica", "got ranks [1]"],
        ),
        ({"tables": {"*": {"sharding": "data_parallel", "ranks": [0, 1, 1]}}}, ["got ranks [0, 1, 1]"]),
        ({"tables": {"*": {"sharding": "row_wise", "cost": "much"}}}, ["cost must be a finite number", "'much'"]),
        ({"tables": {"*": {"sharding": "row_wise", "cost": float("nan")}}}, ["cost must be", "nan"]),
        ({"tables": {"*": {"sharding": "row_wise", "cost": -1}}}, ["cost must not be negative", "-1"]),
    ],
)
def test_bad_documents_are_named(document: Any, words: list[str]) -> None:
    refused(document, *words)


WHOLE = {"rows": [0, 10], "columns": [0, 40], "ranks": [0]}


def piece(**keys: Any) -> dict[str, Any]:
    return {**WHOLE, **keys}


@pytest.mark.parametrize(
    ("sharding", "shards", "words"),
    [
        ("row_wise", {"rows": [0, 10]}, ["'shards' must be a list"]),
        ("row_wise", [3], ["shard 0 must be a mapping", "got 3"]),
        ("row_wise", [{"rows": [0, 10], "columns": [0, 40]}], ["shard 0: key 'ranks' is missing"]),
        ("row_wise", [piece(row=3)], ["shard 0: unknown key 'row'", "did you mean 'rows'?"]),
        ("row_wise", [piece(rows="all")], ["shard 0: rows must be a list of integers, got 'all'"]),
        ("row_wise", [piece(rows=[0, 10.0])], ["shard 0: rows must be a list of integers"]),
        ("row_wise", [piece(columns=[0, 16, 40])], ["shard 0: columns must be [start, stop]"]),
        ("row_wise", [piece(ranks=0)], ["shard 0: ranks must be a list"]),
        ("row_wise", [piece(ranks=[])], ["'user' must be a non-empty list of ranks in 0..1, got []"]),
        ("row_wise", [piece(tier="ssd")], ["tier 'ssd' is unknown"]),
        ("row_wise", [], ["cover 0 of 400 elements"]),
        ("row_wise", [piece(rows=[0, 9])], ["cover 360 of 400 elements"]),
        ("row_wise", [piece(rows=[0, 11])], ["shard 0 has rows 0..10", "10 x 40 table"]),
        ("row_wise", [piece(rows=[5, 5]), WHOLE], ["has rows 5..4"]),
        ("row_wise", [piece(rows=[0, 6]), piece(rows=[5, 10])], ["shard 1 overlaps another shard"]),
        (
            "row_wise",
            [piece(columns=[0, 8]), piece(columns=[8, 40])],
            ["must start at a multiple of 16 columns", "got column 8"],
        ),
        ("row_wise", [piece(ranks=[0, 1])], ["shard 0 must have one rank, got 2"]),
        (
            "row_wise",
            [piece(columns=[0, 16]), piece(rows=[0, 5], columns=[16, 40]), piece(rows=[5, 10], columns=[16, 40])],
            ["row ranges must be equal or disjoint", "0..4", "0..9"],
        ),
        ("table_wise", [piece(rows=[0, 5]), piece(rows=[5, 10])], ["requires exactly one shard", "got 2"]),
        ("data_parallel", [piece(rows=[0, 5]), piece(rows=[5, 10])], ["requires exactly one shard, got 2"]),
        ("data_parallel", [WHOLE], ["all 2 ranks must have a replica, got ranks [0]"]),
        ("column_wise", [piece(rows=[0, 5]), piece(rows=[5, 10])], ["must have all rows", "row_wise"]),
    ],
)
def test_bad_shards_are_named(sharding: str, shards: Any, words: list[str]) -> None:
    refused({"tables": {"user": {"sharding": sharding, "shards": shards}, "*": "row_wise"}}, "table 'user'", *words)


def test_ranks_and_shards_exclude_each_other() -> None:
    entry = {"sharding": "row_wise", "ranks": [0], "shards": [WHOLE]}
    refused({"tables": {"user": entry, "*": "row_wise"}}, "'ranks' and 'shards' are mutually exclusive")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    contents = {
        "list.yaml": (b"- a\n", "must contain a mapping of keys to values, got list"),
        "broken.yaml": (b"tables: [", "while parsing"),
        "binary.yaml": (b"tab\xff", "not valid UTF-8 (invalid start byte at byte 3)"),
        "twice.yaml": (
            b"tables:\n  user: row_wise\n  user: table_wise\n",
            "key 'user' is given twice, again in line 3",
        ),
        "bad.yaml": (b"tables: {'*': row_wize}\n", "did you mean 'row_wise'?"),
    }
    for name, (content, words) in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(MesetaError) as caught:
            Plan.load(tmp_path / name, TABLES, 2)
        assert name in str(caught.value) and words in str(caught.value), str(caught.value)
    with pytest.raises(MesetaError, match="No such file"):
        Plan.load(tmp_path / "absent.yaml", TABLES, 2)
    with pytest.raises(MesetaError, match="Is a directory"):
        Plan.load(tmp_path, TABLES, 2)


def test_plans_built_in_python_are_checked() -> None:
    whole = Shard(table="user", rows=(0, 10), columns=(0, 40), ranks=(0,))
    entry = TablePlan(table="user", sharding=ShardingType.TABLE_WISE, shards=(whole,))
    plan = Plan(num_ranks=1, tables=(entry,))
    plan.check([USER])
    assert plan["user"] is entry and whole.num_rows == 10 and whole.num_columns == 40
    bad: list[tuple[Any, str]] = [
        (lambda: Plan(num_ranks=0, tables=()), "num_ranks must be at least 1"),
        (lambda: plan["usr"], "no table 'usr'; did you mean 'user'?"),
        (lambda: plan.check(TABLES), "no table 'item'"),
        (lambda: plan.check([ITEM]), "the model has no table 'user'"),
        (lambda: Plan(num_ranks=1, tables=(entry, entry)).check([USER]), "'user' is placed twice"),
        (
            lambda: Plan(num_ranks=1, tables=(dataclasses.replace(entry, table="item"),)),
            "table 'item' contains a shard of table 'user'",
        ),
        (lambda: shard_table(USER, ShardingType.ROW_WISE, []), "ranks must not be empty"),
    ]
    for make, words in bad:
        with pytest.raises(MesetaError) as caught:
            make()
        assert words in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    "document",
    [
        {"tables": {"*": "row_wise"}},
        {"num_ranks": 4, "tables": {"*": "row_wise"}},
        {"devices_per_host": 2, "tables": {"*": "row_wise"}},
        {"tables": {"*": "row_wise", "t": {"sharding": "table_wise", "ranks": 2}}},
        {"tables": {"*": "row_wise", "t": {"sharding": "table_wise", "ranks": [1]}}},
        {"tables": {"*": {"sharding": "row_wise", "ranks": [0, 3]}}},
        {"tables": {"t": {"sharding": "row_wise", "shards": [
            {"rows": [0, 5], "columns": [0, 16], "ranks": [0]}, {"rows": [5, 10], "columns": [0, 16], "ranks": [1]}
        ]}, "u": "table_wise"}},
    ],
)  # fmt: skip
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_reasons_against_a_number_of_ranks(document: Any, num_ranks: int) -> None:
    """The reason needs no tables, and agrees with loading the plan with tables."""
    tables = [TableSpec(name=name, num_embeddings=10, embedding_dim=16) for name in "tu"]
    try:
        Plan.from_dict(document, tables, num_ranks)
    except MesetaError:
        assert rank_mismatch_reason(document, num_ranks) is not None
    else:
        assert rank_mismatch_reason(document, num_ranks) is None
