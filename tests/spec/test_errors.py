"""The way out that errors offer for unknown names, and what they repeat of other errors."""

from meseta.errors import one_line
from meseta.spec import MesetaError, ShardingType, nearest


def test_nearest_names_one_or_all() -> None:
    assert nearest("user", ["users", "items"]) == "did you mean 'users'?"
    assert nearest("zebra", ["users", "items"]) == "known are items, users"
    assert nearest("zebra", []) == "known are none"


def test_nearest_takes_numbers_and_enums() -> None:
    assert nearest(7, ["users"]) == "known are users"
    assert nearest("row_wis", ShardingType) == "did you mean 'row_wise'?"
    assert nearest("???", ShardingType) == (
        "known are column_wise, data_parallel, grid, hot_replicated, row_wise, table_column_wise, table_row_wise, "
        "table_wise"
    )


def test_one_line_of_an_error() -> None:
    assert one_line(OSError("no such file\nin any folder")) == "no such file"
    assert one_line(RuntimeError("\n  late start\n")) == "late start"
    assert one_line(KeyError()) == "KeyError"
    assert one_line(ValueError(" \n")) == "ValueError"


def test_meseta_error_is_a_value_error() -> None:
    assert issubclass(MesetaError, ValueError)
