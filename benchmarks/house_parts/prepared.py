"""What `meseta prepare` makes of raw files of every kind, byte for byte."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from house_parts.checkouts import Checkout, Ledger, files_of
from record import ROOT

if str(ROOT / "tests") not in sys.path:
    sys.path.insert(0, str(ROOT / "tests"))

from data.new_files import KINDS, SCHEMA, columns, svm_lines, without, write_csv, write_lines, write_parquet

PROGRESS = re.compile(r".*[━╸].*\n?|\d+(\.\d+)? m?s\b|[\d,]+ rows/s")
"""Lines of live progress, and times."""


@dataclass(frozen=True)
class Raw:
    """Files that a case prepares."""

    sources: list[Path]
    options: list[Any] = field(default_factory=list)
    like: Path | None = None
    """Rows without labels, to be encoded like these."""


def of_kind(kind: str) -> Callable[[Path], Raw]:
    """Files to train on, to test on, and new rows: as the tests of new rows write them."""

    def write(folder: Path) -> Raw:
        train, test, new, options = KINDS[kind](folder)
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        return Raw([*train, test], ["--test-files", test, *words], new)

    return write


def of_columns(*options: str, **schema: Any) -> Callable[[Path], Raw]:
    """A CSV file of every role that a column can have, under a schema and options."""

    def write(folder: Path) -> Raw:
        document = {**SCHEMA, "multi_valued": {"tags": "|"}, "weights": {"tags": ":"}, **schema}
        document = {key: value for key, value in document.items() if value is not None}
        (folder / "schema.yaml").write_text(json.dumps(document))
        return Raw([write_csv(folder / "log.csv", columns())], ["--schema", folder / "schema.yaml", *options])

    return write


def inferred(*options: str) -> Callable[[Path], Raw]:
    """A CSV file whose columns nobody names."""
    return lambda folder: Raw([write_csv(folder / "log.csv", without(columns(), "tags"))], list(options))


def _gzipped_csv(folder: Path) -> Raw:
    return Raw([write_csv(folder / "log.csv.gz", without(columns(), "tags"))])


def _gzipped_criteo(folder: Path) -> Raw:
    train, *_ = KINDS["criteo"](folder)
    packed = folder / "day_0.gz"
    packed.write_bytes(gzip.compress(train[0].read_bytes(), mtime=0))
    return Raw([packed], ["--hash-rows", "500"])


def _bad_rows(folder: Path) -> Raw:
    path = write_csv(folder / "log.csv", without(columns(), "tags"))
    lines = path.read_text().splitlines()
    lines[40] = "7" + lines[40][1:]
    lines[90] = lines[90].rpartition(",")[0]
    return Raw([write_lines(path, lines)], ["--bad-rows", "skip", "--max-bad-rows", "10"])


def _lists(folder: Path) -> Raw:
    return Raw([write_parquet(folder / "log.parquet", columns(1))])


def _two_labels(folder: Path) -> Raw:
    table = {**without(columns(), "tags"), "bought": [int(row % 5 == 0) for row in range(len(columns()["click"]))]}
    return Raw([write_csv(folder / "log.csv", table)], ["--label", "click,bought"])


def _comments(folder: Path) -> Raw:
    lines = [f"{line} # row {row}" for row, line in enumerate(svm_lines(fields=False, qid=True))]
    return Raw([write_lines(folder / "log.svm", lines)], ["--split-by", "group", "--valid-fraction", "0.2"])


CASES: dict[str, Callable[[Path], Raw]] = {
    **{kind: of_kind(kind) for kind in KINDS},
    "csv, inferred": inferred("--valid-fraction", "0.1"),
    "csv, other roles": inferred("--sparse", "age,ho*", "--dense", "price", "--ignore", "city", "--seed", "7"),
    "csv, gzip": _gzipped_csv,
    "criteo, gzip": _gzipped_criteo,
    "parquet, inferred": _lists,
    "libsvm, groups": _comments,
    "quantiles": of_columns(buckets={"age": 10, "price": [10, 11]}),
    "vocabulary": of_columns("--vocabulary", "--min-count", "3"),
    "hashed to rows by feature": of_columns("--hash-rows", "70", "--hash-rows", "city=11"),
    "split by time": of_columns("--split-by", "time", "--test-fraction", "0.2", "--valid-fraction", "0.1"),
    "split after a time": inferred("--time", "when", "--test-after", "1700020000", "--valid-after", "1700010000"),
    "split by group": of_columns("--split-by", "group", "--test-fraction", "0.3"),
    "two labels": _two_labels,
    "bad rows": _bad_rows,
}


def compare_prepared(before: Checkout, after: Checkout, folder: Path) -> Ledger:
    """Files, and what the commands print, of each case."""
    ledger = Ledger("prepare")
    for name, write in CASES.items():
        place = folder / name
        place.mkdir(parents=True)
        raw = write(place)
        old, new = (_prepare(checkout, raw, place) for checkout in (before, after))
        for what in sorted({*old, *new}):
            ledger.compare(name, what, old.get(what), new.get(what))
        ledger.figures += [f"{name}: {old['prepare'][1].strip()[-200:]}"] if old["prepare"][0] else []
    ledger.figures.append(f"{len(CASES)} cases: {', '.join(CASES)}")
    return ledger


def _prepare(checkout: Checkout, raw: Raw, place: Path) -> dict[str, Any]:
    """Files by name, and what each command printed."""
    out = place / "out"
    commands = {
        "print-schema": ["prepare", *raw.sources, "--out", out, *raw.options, "--print-schema"],
        "prepare": ["prepare", *raw.sources, "--out", out, *raw.options],
        "data stats": ["data", "stats", out, "--json"],
        "data check": ["data", "check", out],
    }
    if raw.like is not None:
        commands["like"] = ["prepare", raw.like, "--like", out, "--out", place / "new"]
    made: dict[str, Any] = {}
    for name, command in commands.items():
        done = checkout.meseta(*command)
        made[name] = (done.returncode, PROGRESS.sub("", done.stderr), PROGRESS.sub("", done.stdout))
    for part in (out, place / "new"):
        if part.exists():
            made |= {f"file {part.name}/{path}": digest for path, digest in files_of(part).items()}
            description = json.loads((part / "dataset.json").read_text())
            made[f"file {part.name}/dataset.json"] = description
            shutil.rmtree(part)
    return made
