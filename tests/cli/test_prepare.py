"""Tests of the command `prepare`: options take effect, and errors name the mistake."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

from data.click_log import make_lines, write_tsv
from meseta.cli.prepare import bad_row_options, prepare
from meseta.data import Dataset
from meseta.spec import MesetaError


def invoke(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(prepare)
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_options_reach_the_work(tmp_path: Path) -> None:
    write_tsv(tmp_path / "a.tsv", make_lines(60))
    write_tsv(tmp_path / "b.tsv", make_lines(40))
    out = str(tmp_path / "out")
    options = ["--test-files", f"{tmp_path}/b.tsv", "--hash-rows", "1_000", "--hash-rows", "cat_2=50", "--seed", "7"]
    assert "100 rows in" in invoke(f"{tmp_path}/a.tsv", "--out", out, *options)
    dataset = Dataset.load(out)
    assert [s.num_embeddings for s in dataset.sparse][1:4] == [1000, 50, 1000]
    assert (dataset.seed, dataset.splits["train"].num_rows, dataset.splits["test"].num_rows) == (7, 60, 40)
    invoke(f"{tmp_path}/a.tsv", "--out", out, "--force", "--vocabulary", "--min-count", "3", "--test-fraction", "0.5")
    dataset = Dataset.load(out)
    assert {s.encoding for s in dataset.sparse} == {"vocabulary"}
    assert dataset.test_fraction == 0.5


def test_lines_of_a_log(
    tmp_path: Path, run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tsv(tmp_path / "a.tsv", make_lines(60))
    command = ("prepare", tmp_path / "a.tsv", "--out", tmp_path / "out", "--force")
    code, out, err = run(*command)
    assert code == 0 and [line.split(" rows in ")[0] for line in err.splitlines()] == ["read: 60", "write: 60"]
    assert out.startswith("60 rows in") and "  test " in out
    code, out, err = run(*command, "--quiet")
    assert (code, err) == (0, "") and len(out.splitlines()) == 1 and out.startswith("60 rows in")
    code, _, err = run(*command, "--verbose")
    assert code == 0 and "read: 60 rows in" in err
    monkeypatch.setattr("meseta.telemetry.detail.LIFE_SIGN_S", 0.0)
    assert "read: 0 rows, 0%" in run(*command)[2].splitlines()


@pytest.mark.parametrize("rows", ["many", "cat_1=", "cat_1=x"])
def test_bad_hash_rows_are_named(tmp_path: Path, rows: str) -> None:
    with pytest.raises(MesetaError, match=f"--hash-rows '{rows}' must be a number of rows, or NAME=ROWS"):
        invoke("x", "--out", str(tmp_path / "out"), "--hash-rows", rows)


def test_bad_rows_are_skipped_and_reported(
    tmp_path: Path, output_of: Callable[..., str], error_of: Callable[..., str]
) -> None:
    log, out = tmp_path / "log.csv", tmp_path / "out"
    log.write_text("label,city\n" + "1,a\n0,b\n" * 50 + "[7],c\n" * 6)
    assert "--bad-rows" not in error_of("prepare", log, "--out", out)
    skip = ("prepare", log, "--out", out, "--bad-rows", "skip")
    assert "6 of 106 rows cannot be parsed, but --max-bad-rows allows 0.01" in error_of(*skip)
    printed = output_of(*skip, "--max-bad-rows", "6", "--test-fraction", 0)
    assert "100 rows in" in printed and "6 rows could not be parsed and were omitted:" in printed
    assert f"source '{log}', line 102, column 'label': '[7]' is not a label" in printed and "..." in printed
    assert bad_row_options("skip", "50%")["max_bad_rows"] == 0.5
    assert bad_row_options("skip", "1_000")["max_bad_rows"] == 1000
    assert "needs --bad-rows skip" in error_of("prepare", log, "--out", out, "--max-bad-rows", "3")
    assert "must be a number of rows, or a share" in error_of(*skip, "--max-bad-rows", "few")
    assert "must be error or skip, got 'drop'" in error_of("prepare", log, "--out", out, "--bad-rows", "drop")


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_errors_about_a_missing_label_name_the_option(kind: str, error_of: Callable[..., str], tmp_path: Path) -> None:
    log = tmp_path / f"log.{kind}"
    texts = {"csv": "price,city\n1.5,a\n2,b\n", "jsonl": '{"price": 1.5, "city": "a"}\n{"price": 2, "city": "b"}\n'}
    if kind == "parquet":
        pq.write_table(pa.table({"price": [1.5, 2.0], "city": ["a", "b"]}), log)
    else:
        log.write_text(texts[kind])
    for command in (("prepare", log, "--out", tmp_path / "out"), ("train", "--data", log)):
        assert "none of 'price', 'city' has the name of a label; choose one with --label" in error_of(*command)
        assert "has no column 'clicked' for --label; available: city, price" in error_of(*command, "--label", "clicked")
        unknown = (
            "has no column 'prize', which label 'prize >= 2' uses (from --label or a schema file); did you mean 'pri"
        )
        assert unknown in error_of(*command, "--label", "prize >= 2")
