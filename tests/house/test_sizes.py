"""Files, functions and argument lists stay small enough to read in one go."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from source_tree import SOURCE, functions

MAX_FILE_LINES = 500
MAX_FILES = 16
MAX_FUNCTION_LINES = 60
MAX_ARGUMENTS = 8


def test_files_are_short() -> None:
    sources = [p for p in SOURCE.rglob("*") if p.suffix in {".py", ".pyi", ".cpp", ".h", ".hpp"}]
    assert sources
    lines = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in sources}
    assert not {name: n for name, n in lines.items() if n > MAX_FILE_LINES}


def test_functions_are_short() -> None:
    lines = {name: (node.end_lineno or node.lineno) - node.lineno + 1 for name, node in functions()}
    assert not {name: n for name, n in lines.items() if n > MAX_FUNCTION_LINES}


def test_functions_take_few_arguments() -> None:
    # Subcommands of the command line are exempt: each of their arguments is one option of `meseta <command> --help`.
    counts = {
        name: len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)
        for name, node in functions()
        if not name.startswith("cli/")
    }
    assert not {name: n for name, n in counts.items() if n > MAX_ARGUMENTS}


ONE_FILE_PER_KIND = {"models", "cli", "optim/row", "data/formats"}
"""Folders with one file for each thing of a kind may have as many as there are things."""


def crowded(files: Iterable[Path]) -> dict[str, int]:
    """Folders with more than MAX_FILES sources beside `__init__.py`, and how many."""
    sources = (file for file in files if file.suffix in {".py", ".cpp", ".h", ".hpp"} and file.name != "__init__.py")
    counts = Counter(str(file.parent) for file in sources)
    return {folder: n for folder, n in counts.items() if n > MAX_FILES and folder not in ONE_FILE_PER_KIND}


def test_folders_hold_few_files() -> None:
    assert crowded(path.relative_to(SOURCE) for path in SOURCE.rglob("*")) == {}


def test_the_rule_of_folders_bites() -> None:
    files = [Path(folder) / f"{n}.py" for folder in ("models", "spec") for n in range(MAX_FILES)]
    assert crowded([*files, Path("spec/__init__.py")]) == {}
    assert crowded([*files, Path("spec/a.h"), Path("models/a.py")]) == {"spec": MAX_FILES + 1}
