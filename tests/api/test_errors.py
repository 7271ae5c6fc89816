"""Errors of a function name its arguments, and data in place of spooled files."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import meseta
from meseta.api.errors import ARGUMENTS, argument_errors, as_hint, spooled_names
from meseta.cli.prepare import _print_valid_rule, run_prepare
from meseta.data.prepare import PrepareOptions, prepare
from meseta.errors import MesetaError
from sampling import sample

ROWS = pa.table(
    {
        "clicked": [0, 1] * 100,
        "user": [f"u{i % 40}" for i in range(200)],
        "price": [i % 7 * 1.5 for i in range(200)],
        "hour": [1_700_000_000 + i for i in range(200)],
    }
)
UNLABELED = ROWS.drop_columns("clicked")
CASES: list[tuple[dict[str, Any], str]] = [
    (
        {"data": UNLABELED, "label": None},
        "data: none of 'user', 'price', 'hour' has the name of a label; choose one with label=",
    ),
    ({"label": "click"}, "data has no column 'click' for label=; did you mean 'clicked'?"),
    ({"sparse": ["usr"]}, "data has no column 'usr' for sparse=; did you mean 'user'?"),
    ({"time": "zeit"}, "data has no column 'zeit' for time=; available: hour, price, user"),
    ({"dense": ["user"]}, "data: column 'user' must be a number, but is string"),
    (
        {"ignore": ["hour"], "sparse": ["hour"]},
        "data: column 'hour' is named by ignore= and as a feature; name it once",
    ),
    (
        {"schema": "s.yaml"},
        "fit: schema= cannot be used with label=, dense=, sparse=, multi_valued=, ignore=, time= or time_features=; "
        "use either the schema or these options",
    ),
    (
        {"valid": 0.2, "split_by": "group"},
        "fit: split_by='group' needs a column, but none has this role; name it as 'group' in a schema file (libsvm has "
        "the group qid; Criteo's TSV has neither)",
    ),
    (
        {"valid": date(2026, 1, 31), "split_by": "group"},
        "fit: split_by='group' and valid= exclude each other; use one",
    ),
    ({"valid": 0.5, "test": 0.5}, "fit: test=0.5 and valid=0.5 leave no row for training; decrease one"),
    (
        {"valid": 1_600_000_000, "test": 0, "time": "hour"},
        "fit: none of 200 rows is left for training; give a later valid= or lower test=",
    ),
    (
        {"valid": date(2026, 1, 31), "test": 1_700_000_100, "time": "hour"},
        "fit: valid= is 1769817600 in seconds, but the test split begins at 1700000100; use an earlier valid=",
    ),
    (
        {"valid": ROWS.drop_columns("user")},
        "valid has other columns than data: column 'user' is missing; choose the columns to use in a schema file",
    ),
    (
        {"test": 7j},
        "test: complex has no rows; pass files, a dict of columns, or a table or frame of pyarrow, pandas, polars or "
        "DuckDB",
    ),
    ({"split_by": "day"}, "fit: split_by= must be 'time' or 'group', got 'day'"),
    ({"nproc": 0}, "nproc= must be at least 1, got 0"),
]


@pytest.mark.parametrize("case", sample(CASES, k=0, seed=0))
def test_errors_of_fit_name_its_arguments(case: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    arguments, message = case
    with pytest.raises(MesetaError) as raised:
        meseta.fit(**{"data": ROWS, "label": "clicked", "run_dir": tmp_path / "run"} | arguments)
    assert str(raised.value) == message


@pytest.mark.soak
def test_another_split_of_prepared_rows_is_refused(tmp_path: Path) -> None:
    meseta.fit(ROWS, "clicked", run_dir=tmp_path / "run")
    with pytest.raises(MesetaError) as raised:
        meseta.fit(ROWS, "clicked", valid=0.2, run_dir=tmp_path / "run")
    assert str(raised.value) == (
        f"'{tmp_path / 'run' / 'data'}' was not prepared from these files with these options: the argument valid was "
        "0.1 and is 0.2 now; choose another run_dir (or data.dir), or continue the run with "
        "meseta.open_run(run_dir).resume()"
    )


def test_errors_of_preparation_name_arguments(tmp_path: Path) -> None:
    path = str(tmp_path / "rows.parquet")
    pq.write_table(UNLABELED, path)
    options: dict[str, Any] = {"sources": [path], "out": tmp_path / "out"}
    cases = [
        ({}, f"source {path!r}: none of 'user', 'price', 'hour' has the name of a label; choose one "
         "with label="),
        ({"test_after": "soon"}, "fit: test='soon' is not a time; use the form 2026-01-31 23:59:59, or a number"),
        ({"split_by": "group", "valid_after": "1"}, "fit: split_by='group' and valid= exclude each other; use one"),
        ({"valid_fraction": 0.5, "test_fraction": 0.5},
         "fit: test=0.5 and valid=0.5 leave no row for training; decrease one"),
        ({"label": "price", "multi_valued": ["user"]},
         f"source {path!r}: cannot infer the separator of 'user' for multi_valued=: no usual separator occurs in its "
         "values: 'u0', 'u1'; name it, as in multi_valued='user=|'"),
    ]  # fmt: skip
    for chosen, message in cases:
        label = {"label": "price", "time": ["hour"]} if "test_after" in chosen else {}
        with pytest.raises(MesetaError) as raised, argument_errors("fit"):
            prepare(PrepareOptions(**options, **chosen, **label))
        assert str(raised.value) == message


def test_options_without_argument_are_those_of_the_command() -> None:
    cases = [
        ("prepare: name the encoding with --encoding", "fit: name the encoding with `meseta train --encoding`"),
        ("use another run_dir, or start from the beginning with --force", "use another run_dir, or delete the run"),
        ("run `meseta prepare F --out D --label a`; or --bad-rows skip", "run `meseta prepare F --out D --label a`; or "
         "bad_rows='skip'"),
        ("predict with --allow-unseen", "predict with allow_unseen=True"),
        ("predict: a--b is no option", "predict: a--b is no option"),
    ]  # fmt: skip
    for text, expected in cases:
        with pytest.raises(MesetaError) as raised, argument_errors("fit"):
            raise MesetaError(text)
        assert str(raised.value) == expected


def test_errors_about_spooled_files_name_the_data(tmp_path: Path) -> None:
    path = str(tmp_path / "abc.parquet")
    names = spooled_names([path, "x.csv"], tmp_path)
    with pytest.raises(MesetaError, match=r"^data lacks 'city' of data$"), argument_errors("predict", names):
        raise MesetaError(f"source {path!r} lacks 'city' of {path!r}")
    with pytest.raises(MesetaError, match=r"^source 'x.csv' lacks 'city'; add it$"), argument_errors("fit", names):
        raise MesetaError("source 'x.csv' lacks 'city'", remedy="add it")


def test_notebooks_show_the_users_lines_only() -> None:
    with pytest.raises(MesetaError) as raised:
        meseta.open_run("nowhere")
    place, line, *rest, message = raised.value._render_traceback_()
    assert __file__ in place and line.strip() == 'meseta.open_run("nowhere")'
    assert not any("meseta/api/" in text for text in rest)  # The checks of tests add lines.
    assert message == f"MesetaError: {raised.value}"


def test_hints_name_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(ROWS.rename_columns(["clicked", "user", "price", "timestamp"]), tmp_path / "rows.parquet")
    options = PrepareOptions(sources=[str(tmp_path / "rows.parquet")], out=tmp_path / "out")
    dataset = run_prepare(options, command="`meseta prepare FILE --out DIR`")
    _print_valid_rule(dataset.model_copy(update={"valid_from": 1_700_000_100.0, "valid_fraction": 0.1}))
    lines = capsys.readouterr().out.splitlines()
    hints = [as_hint(line) for line in lines]
    assert sum(hint != line for hint, line in zip(hints, lines, strict=True)) >= 3
    assert not any(f"--{name}" in "".join(hint.split("`")[::2]) for hint in hints for name in ARGUMENTS)
    assert "test rows are drawn at random from all times; test=TIME tests on later rows, as in production" in hints
    assert as_hint("--time seen --test-after TIME tests") == "time='seen' and test=TIME tests"
