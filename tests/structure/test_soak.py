"""Tests of the parts of `make soak`: every test is in one part, and passed tests are not repeated."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from source_tree import ROOT, SOURCE

sys.path.insert(0, str(ROOT / "tools" / "soak"))
import soak_parts


def test_every_test_is_in_one_part() -> None:
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    parts = {name: soak_parts.paths_of(name) for name in soak_parts.PARTS}

    def below(path: str, folders: list[str]) -> bool:
        return any(path == folder or path.startswith(f"{folder}/") for folder in folders)

    for file in files:
        assert len([n for n, (its, other) in parts.items() if below(file, its) and not below(file, other)]) == 1, file


def test_every_part_has_a_row_on_the_page() -> None:
    rows = [line.split("`")[1] for line in soak_parts.PAGE.read_text().splitlines() if line.startswith("| `")]
    assert rows == list(soak_parts.PARTS)


TESTS = """
import os

import pytest


@pytest.mark.parametrize("number", range(3))
def test_it(number, record_property):
    record_property("number", number)
    assert number != int(os.environ["FAILS"])
"""


@pytest.mark.parametrize(
    "processes", [pytest.param([], marks=pytest.mark.soak), ["-p", "xdist", "-n", "2"]], ids=["one", "two"]
)
def test_passed_tests_are_not_repeated(tmp_path: Path, processes: list[str]) -> None:
    record = tmp_path / "record.jsonl"
    (tmp_path / "test_numbers.py").write_text(TESTS)

    def session(fails: int) -> str:
        environment = os.environ | {
            "PYTHONPATH": str(ROOT / "tools" / "soak"),
            "MESETA_SOAK_RECORD": str(record),
            "FAILS": str(fails),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # importing them takes longer than the tests
        }
        environment.pop("MESETA_ISA", None)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "soak_record", "-p", "no:cacheprovider", *processes]
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        return ended.stdout.splitlines()[-1]

    def noted() -> list[int]:
        return sorted(json.loads(line)["number"] for line in record.read_text().splitlines())

    assert session(fails=1).startswith("1 failed, 2 passed")
    assert noted() == [0, 2]
    record.write_bytes(record.read_bytes() + b'{"test": "cut o')
    assert session(fails=7).startswith("1 passed")
    assert noted() == [0, 1, 2]
    assert "no tests ran" in session(fails=7) or not processes


def uncheckable(text: str) -> list[str]:
    """Return the protocols that type checks cannot use. `make soak` checks every call."""
    return [
        node.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
        and any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)
        and not any(isinstance(mark, ast.Name) and mark.id == "runtime_checkable" for mark in node.decorator_list)
    ]


def test_protocols_can_be_checked_in_every_call() -> None:
    protocols = {str(path.relative_to(SOURCE)): uncheckable(path.read_text()) for path in SOURCE.rglob("*.py")}
    assert {path: names for path, names in protocols.items() if names} == {}
    assert uncheckable("class A(Protocol): ...\n@runtime_checkable\nclass B(Protocol): ...") == ["A"]
