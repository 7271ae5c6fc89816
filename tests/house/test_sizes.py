"""Files, functions and argument lists stay small enough to read in one go."""

from collections import Counter
from pathlib import Path

from source_tree import SOURCE, functions

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_ARGUMENTS = 8
MAX_FOLDER_FILES = 16
ONE_FILE_PER_KIND = {"cli", "data/formats", "models", "optim/row"}
"""Folders that grow by one file with each thing of their kind."""
NOT_CUT_YET = {"checkpoint": 17, "measure": 20, "planner": 25, "report": 19, "spec": 21, "train": 32}
"""Folders that are larger still; they may shrink alone."""


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


def large_folders(files: list[Path]) -> dict[str, int]:
    """Folders with more Python files beside their `__init__.py` than they may have."""
    counts = Counter(path.parent.as_posix() for path in files if path.name != "__init__.py")
    return {
        name: number
        for name, number in counts.items()
        if name not in ONE_FILE_PER_KIND and number > NOT_CUT_YET.get(name, MAX_FOLDER_FILES)
    }


def test_folders_are_small() -> None:
    assert large_folders([path.relative_to(SOURCE) for path in SOURCE.rglob("*.py")]) == {}


def test_the_rule_of_folders_bites() -> None:
    files = [Path(folder, f"{i}.py") for folder in ("ops", "cli") for i in range(17)]
    assert large_folders([*files, Path("ops/__init__.py")]) == {"ops": 17}
    assert large_folders(files[1:]) == {}
