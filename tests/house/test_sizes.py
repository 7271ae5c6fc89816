"""Files, functions and argument lists stay small enough to read in one go."""

from source_tree import SOURCE, functions

MAX_FILE_LINES = 500
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
