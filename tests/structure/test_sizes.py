"""Files, functions, argument lists and folders have limited sizes."""

import ast
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from source_tree import SOURCE, functions

MAX_FILE_LINES = 800
MAX_FILES = 24
MAX_FUNCTION_LINES = 80
MAX_ARGUMENTS = 8


Function = ast.FunctionDef | ast.AsyncFunctionDef


def long_files(texts: Mapping[str, str]) -> dict[str, int]:
    """Return the files with too many lines, and their numbers of lines."""
    lines = {name: len(text.splitlines()) for name, text in texts.items()}
    return {name: n for name, n in lines.items() if n > MAX_FILE_LINES}


def long_functions(nodes: Iterable[tuple[str, Function]]) -> dict[str, int]:
    """Return the functions with too many lines, and their numbers of lines."""
    lines = {name: (node.end_lineno or node.lineno) - node.lineno + 1 for name, node in nodes}
    return {name: n for name, n in lines.items() if n > MAX_FUNCTION_LINES}


def wide_functions(nodes: Iterable[tuple[str, Function]]) -> dict[str, int]:
    """Return the functions with too many arguments, and their numbers of arguments. Subcommands of the command line are
    exempt: each of their arguments is one option of `meseta <command> --help`."""
    counts = {
        name: len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)
        for name, node in nodes
        if not name.startswith(("cli/", "api/fit.py"))  # each argument is an option of a command
    }
    return {name: n for name, n in counts.items() if n > MAX_ARGUMENTS}


def test_files_are_short() -> None:
    sources = [p for p in SOURCE.rglob("*") if p.suffix in {".py", ".pyi", ".cpp", ".h", ".hpp"}]
    assert sources
    assert not long_files({str(path.relative_to(SOURCE)): path.read_text() for path in sources})


def test_functions_are_short() -> None:
    assert not long_functions(functions())


def test_functions_take_few_arguments() -> None:
    assert not wide_functions(functions())


def test_the_rules_of_sizes_bite() -> None:
    texts = {"a.py": "\n" * MAX_FILE_LINES, "b.py": "\n" * (MAX_FILE_LINES + 1)}
    assert long_files(texts) == {"b.py": MAX_FILE_LINES + 1}
    arguments = ", ".join(f"a{n}" for n in range(MAX_ARGUMENTS + 1))
    body = "    pass\n" * MAX_FUNCTION_LINES
    nodes = [
        ("a.py f", ast.parse(f"def f({arguments}): pass").body[0]),
        ("cli/a.py f", ast.parse(f"def f({arguments}): pass").body[0]),
        ("b.py g", ast.parse(f"def g():\n{body}").body[0]),
        ("c.py h", ast.parse(f"async def h():\n{body}".removesuffix("    pass\n")).body[0]),
    ]
    known = [(name, node) for name, node in nodes if isinstance(node, Function)]
    assert wide_functions(known) == {"a.py f": MAX_ARGUMENTS + 1}
    assert long_functions(known) == {"b.py g": MAX_FUNCTION_LINES + 1}


ONE_FILE_PER_KIND = {"models", "cli", "optim/row", "data/formats"}
"""Folders with one file per item of a kind, which may have more files."""


def crowded(files: Iterable[Path]) -> dict[str, int]:
    """Return the folders with more than MAX_FILES sources in addition to `__init__.py`, and their numbers."""
    sources = (file for file in files if file.suffix in {".py", ".cpp", ".h", ".hpp"} and file.name != "__init__.py")
    counts = Counter(str(file.parent) for file in sources)
    return {folder: n for folder, n in counts.items() if n > MAX_FILES and folder not in ONE_FILE_PER_KIND}


def test_folders_hold_few_files() -> None:
    assert crowded(path.relative_to(SOURCE) for path in SOURCE.rglob("*")) == {}


def test_the_rule_of_folders_bites() -> None:
    files = [Path(folder) / f"{n}.py" for folder in ("models", "spec") for n in range(MAX_FILES)]
    assert crowded([*files, Path("spec/__init__.py")]) == {}
    assert crowded([*files, Path("spec/a.h"), Path("models/a.py")]) == {"spec": MAX_FILES + 1}
