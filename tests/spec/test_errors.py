"""Tests of errors: remedies, copies and causes."""

from __future__ import annotations

import copy
import pickle

import pytest

from meseta.errors import UnknownColumnError, error_summary
from meseta.spec import MesetaError, ShardingType, suggest


def test_nearest_names_one_or_all() -> None:
    assert suggest("user", ["users", "items"]) == "did you mean 'users'?"
    assert suggest("zebra", ["users", "items"]) == "available: items, users"
    assert suggest("zebra", []) == "available: none"


def test_nearest_takes_numbers_and_enums() -> None:
    assert suggest(7, ["users"]) == "available: users"
    assert suggest("row_wis", ShardingType) == "did you mean 'row_wise'?"
    assert suggest("???", ShardingType) == (
        "available: column_wise, data_parallel, grid, hot_replicated, row_wise, table_column_wise, table_row_wise, "
        "table_wise"
    )


def test_one_line_of_an_error() -> None:
    assert error_summary(OSError("no such file\nin any folder")) == "no such file"
    assert error_summary(RuntimeError("\n  late start\n")) == "late start"
    assert error_summary(KeyError()) == "KeyError"
    assert error_summary(ValueError(" \n")) == "ValueError"


def test_meseta_error_is_a_value_error() -> None:
    assert issubclass(MesetaError, ValueError)


def test_the_text_of_an_error_is_its_reason_and_its_remedy() -> None:
    error = MesetaError("the disk is full; 3 GB are missing", remedy="delete old runs; or use another disk")
    assert str(error) == "the disk is full; 3 GB are missing; delete old runs; or use another disk"
    assert (error.reason, error.remedy) == (
        "the disk is full; 3 GB are missing",
        "delete old runs; or use another disk",
    )
    error = MesetaError("the disk is full; delete old runs")
    assert (str(error), error.reason, error.remedy) == (*["the disk is full; delete old runs"] * 2, None)


class DiskFullError(MesetaError):
    """Error whose parameters are not its text."""

    def __init__(self, disk: str, num_bytes: int) -> None:
        super().__init__(f"{disk} lacks {num_bytes:,} bytes", remedy="delete old runs")
        self.disk, self.num_bytes = disk, num_bytes


def test_copies_of_an_error_keep_its_class_and_attributes() -> None:
    error = DiskFullError("sda", 1000)
    error.rank = 3
    attributes = {"rank": 3, "remedy": "delete old runs", "disk": "sda", "num_bytes": 1000}
    copies = {
        "sda lacks 1,000 bytes; delete old runs": [copy.copy(error), pickle.loads(pickle.dumps(error)), error],
        "step 4: sda lacks 1,000 bytes; delete old runs": [error.with_prefix("step 4: ")],
    }
    for text, ones in copies.items():
        for one in ones:
            assert (type(one), str(one), vars(one)) == (DiskFullError, text, attributes)


def test_a_reason_is_made_into_text_when_it_is_needed() -> None:
    """Other ranks receive only the text, because the arguments may be large."""
    made = []

    class Reason:
        def __str__(self) -> str:
            made.append(self)
            return "no room"

    error = MesetaError(Reason(), remedy="raise storage.cache_bytes")
    assert made == []
    for one in (error, pickle.loads(pickle.dumps(error)), error.with_prefix(""), error.with_suffix("")):
        assert (str(one), one.reason) == ("no room; raise storage.cache_bytes", "no room")


def test_a_suffix_is_part_of_the_remedy() -> None:
    error = DiskFullError("sda", 1000).with_suffix(", or use another disk")
    assert (str(error), error.remedy, error.disk) == (
        "sda lacks 1,000 bytes; delete old runs, or use another disk",
        "delete old runs, or use another disk",
        "sda",
    )
    error = MesetaError("sda is full").with_suffix(", use another disk")
    assert (str(error), error.remedy) == ("sda is full, use another disk", None)


def test_an_unknown_column_is_an_attribute() -> None:
    error = UnknownColumnError("file 'a.csv'", "usr", ["", "user", "item"])
    assert (str(error), error.column) == ("file 'a.csv' has no column 'usr'; did you mean 'user'?", "usr")
    with pytest.raises(MesetaError, match=r"available: item, user$"):
        raise UnknownColumnError("file 'a.csv'", "zebra", ["", "user", "item"])
