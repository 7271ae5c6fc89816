"""docs/walkthrough.md matches traced runs, and lists the files that contain the names of its examples."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from road_trace import Call, calls, first_call_of
from small_run import settings, tiny_data, train, write_config
from source_tree import ROOT, SOURCE

from .pool import RankPool

Ranks = Callable[[int], RankPool]
PAGE = (ROOT / "docs/walkthrough.md").read_text()
MAX_FILES_OF_STEP, MAX_FILES_OF_PREPARE = 48, 42
"""Number of files in which a function runs, at most. A reader of the source has to know them all."""


def section(title: str, table: int = 0) -> tuple[list[Call], set[str]]:
    """Return the rows of a section's table as (file, function), and the folders or files named after it."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    part = re.split(r"(?<=\n\n)(?=\| file \|)", section)[table + 1]
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", part, re.MULTILINE)
    assert len(rows) > 5, f"no table in {title!r}"
    return rows, set(re.findall(r"`([a-z_]+(?:/|\.py))`", part.partition("Also called:")[2].partition(".\n\n")[0]))


def find_differences(rows: Sequence[Call], also_called: set[str], made: Sequence[Call]) -> list[str]:
    """Return the differences between a section and the traced calls."""
    place, differences = {call: number for number, call in enumerate(made)}, []
    for row in rows:
        if row not in place:
            differences.append(f"{row} does not run")
    ran = [row for row in rows if row in place]
    differences += [f"{b} runs before {a}" for a, b in pairwise(ran) if place[b] < place[a]]
    named = {file.partition("/")[0] + "/" for file, _ in rows} | also_called
    calls_by_folder = {file.partition("/")[0] + "/" * ("/" in file): (file, name) for file, name in reversed(made)}
    folders = calls_by_folder.keys()
    differences += [f"{folder} runs and is not named: {calls_by_folder[folder]}" for folder in sorted(folders - named)]
    return differences + [f"{folder} is named and does not run" for folder in sorted(also_called - folders)]


def third_step(folder: Path) -> list[Call]:
    from meseta.comm.recording import start_record
    from meseta.train.trainer import Trainer

    start_record(folder)  # The pool keeps the record of any earlier test, and `meseta train` always has one.
    document = settings(
        folder / "tiny", folder / "run", train__max_steps=4, plan={"tables": {"*": "row_wise"}}, pipeline__overlap="off"
    )
    return first_call_of(Trainer, "_run_step", 3, lambda: train(document))


def test_one_batch(ranks: Ranks, tmp_path: Path) -> None:
    tiny_data(tmp_path)
    made = ranks(2).run(third_step, tmp_path)[0]
    assert find_differences(*section("One batch"), made) == []
    assert len({file for file, _ in made}) <= MAX_FILES_OF_STEP


def test_one_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meseta.cli.main import main

    config = write_config(tmp_path / "run.yaml", settings(tiny_data(tmp_path), tmp_path / "run"))
    machines = tmp_path / "machines.yaml"
    machines.write_text("num_hosts: 1\ndevices_per_host: 2\ndevice: cpu\nhbm_bytes: 8000000000\n")
    monkeypatch.setattr(sys, "argv", ["meseta", "plan", str(config), "--topology", str(machines)])
    with calls() as made, pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code
    differing = find_differences(*section("One plan"), made[made.index(("cli/plan.py", "plan")) :])
    assert differing == []


def test_one_raw_file(tmp_path: Path) -> None:
    from meseta.data import Dataset, Reader, ReaderOptions
    from meseta.data.prepare import PrepareOptions, prepare

    rows = [f"{i % 2},u{i % 50},{i * 0.5},{'ab'[i % 2]}{i % 7}" for i in range(3000)]
    (tmp_path / "log.csv").write_text("\n".join(["label,user,price,city", *rows, ""]))
    options = PrepareOptions(sources=[str(tmp_path / "log.csv")], out=tmp_path / "out", test_fraction=0.2, hash_rows=99)
    with calls() as made:
        prepare(options)
    made = made[made.index(("data/prepare/run.py", "prepare")) :]
    assert find_differences(*section("One raw file"), made) == []
    assert len({file for file, _ in made}) <= MAX_FILES_OF_PREPARE
    with calls() as made:
        batches = list(Reader(Dataset.load(tmp_path / "out"), "train", ReaderOptions(batch_size=64)).epoch())
    assert (
        find_differences(*section("One raw file", table=1), made) == []
        and sum(batch.batch_size for batch in batches) > 2000
    )


def test_one_checkpoint(tmp_path: Path) -> None:
    from meseta.train import resuming
    from meseta.train.trainer import Trainer

    def run(num_steps: int) -> dict[str, Any]:
        saves = {"every_steps": 3, "background": "never"}
        return train(settings(tiny_data(tmp_path), tmp_path / "run", train__max_steps=num_steps, checkpoint=saves))

    saved = first_call_of(Trainer, "_save", 2, lambda: run(4))
    assert find_differences(*section("One checkpoint"), saved) == []
    resumed = first_call_of(resuming, "resume", 1, lambda: run(6))
    assert find_differences(*section("One checkpoint", table=1), resumed) == []


def test_differences_from_the_page_are_reported() -> None:
    made = [("a/b.py", "first"), ("c/d.py", "second"), ("e.py", "third")]
    assert find_differences([made[0], made[1]], {"e.py"}, made) == []
    assert find_differences([made[1], made[0]], {"e.py"}, made) == [f"{made[0]} runs before {made[1]}"]
    assert find_differences([made[0], made[1], ("a/b.py", "gone")], {"e.py"}, made) == [
        "('a/b.py', 'gone') does not run"
    ]
    unnamed = "c/ runs and is not named: ('c/d.py', 'second')"
    assert find_differences([made[0]], {"e.py", "f/"}, made) == [unnamed, "f/ is named and does not run"]


ADDITIONS = re.findall(r"^\| ([a-z ]+) \| `(\w+)` \| (.+) \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("kind", "name", "text"), ADDITIONS, ids=[kind for kind, _, _ in ADDITIONS])
def test_files_of_an_addition(kind: str, name: str, text: str) -> None:
    listed = {file for file in re.findall(r"`([^` ]+/[^` ]+\.(?:py|h))`", text) if (SOURCE / file).exists()}
    sources = (path for path in SOURCE.rglob("*") if path.suffix in {".py", ".h", ".cpp"})
    named = (path for path in sources if path.stem == name or re.search(rf"\b{name}\b", path.read_text()))
    expected = {str(path.relative_to(SOURCE)) for path in named}
    assert listed == expected, kind
