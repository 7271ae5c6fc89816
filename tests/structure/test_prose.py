"""Tests of the prose and names of the project, measured by tools/prose.py.

`prose_limits.toml` limits the hits of each folder, so that new code cannot make it worse. To find the
hits: `python tools/prose.py --list tell-tale src/meseta/comm` (also question, fragment and leftover). After a rewrite,
`python tools/prose.py --lower-limits` lowers the limits to today's counts; it never raises one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from source_tree import ROOT

sys.path.insert(0, str(ROOT / "tools"))
from writing.limits import LIMITS, exceeded, folder_counts, lower_limits, read_limits
from writing.measures import COMMENT_LINES, DOCSTRING_WORDS, REQUIRED, Measure, Part, package_measures, read_part


@pytest.fixture(scope="module")
def source() -> Part:
    """All files of src/."""
    return read_part(ROOT / "src")


def test_no_folder_gets_worse(source: Part) -> None:
    assert exceeded(folder_counts(ROOT, source), read_limits(ROOT / LIMITS)) == []


def test_every_measure_has_its_required_value(source: Part) -> None:
    assert [measure for measure in package_measures(source) if not measure.is_met] == []


def test_required_values_are_limits_of_measures() -> None:
    names = {measure.name for measure in package_measures(read_part(ROOT / "tools" / "writing"))}
    assert set(REQUIRED) - names == {"rows of the rename table whose old name is still defined"}
    assert Measure(DOCSTRING_WORDS, REQUIRED[DOCSTRING_WORDS]).is_met
    assert not Measure(DOCSTRING_WORDS, REQUIRED[DOCSTRING_WORDS] + 1).is_met
    assert Measure(COMMENT_LINES, REQUIRED[COMMENT_LINES]).is_met
    assert not Measure(COMMENT_LINES, REQUIRED[COMMENT_LINES] - 0.1).is_met


def test_a_count_above_its_limit_is_named() -> None:
    limits = {"src/a": {"prose": 3, "docstring_words": 200}}
    assert exceeded({"src/a": {"prose": 3, "docstring_words": 200}}, limits) == []
    assert exceeded({"src/a": {"prose": 4, "docstring_words": 201}}, limits) == [
        "src/a: prose 4, limit 3",
        "src/a: docstring_words 201, limit 200",
    ]
    assert exceeded({"src/new": {"prose": 1, "docstring_words": 140}}, limits) == ["src/new: prose 1, limit 0"]


def test_limits_are_only_lowered(tmp_path: Path) -> None:
    def limits(root: Path, text: str) -> Mapping[str, int]:
        part = root / "src" / "package" / "part"
        part.mkdir(parents=True)
        (part / "module.py").write_text(text)
        lower_limits(root)
        return read_limits(root / LIMITS)["src/package/part"]

    before, after = tmp_path / "before", tmp_path / "after"
    (before / LIMITS).parent.mkdir(parents=True)
    hits = {"prose": 1, "messages": 0, "beginnings": 1, "leftovers": 0, "docstring_words": 300}
    assert limits(before, '"""What it is."""\n') == hits
    (after / LIMITS).parent.mkdir(parents=True)
    (after / LIMITS).write_text((before / LIMITS).read_text())
    lowered = {"prose": 0, "messages": 0, "beginnings": 0, "leftovers": 0, "docstring_words": 140}
    assert limits(after, '"""Parts."""\nfound = 1\nprint("It stands still.")\n') == lowered
