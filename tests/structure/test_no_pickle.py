"""No module between readers and trainers executes received data as code, by pickle or a similar module."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from source_tree import SOURCE, modules

STARTS = ("data/read/", "data/service/", "cli/readers.py")
RUNS_CODE = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = {"torch.load", "pa.deserialize", "pyarrow.deserialize", "yaml.load", "eval", "exec"}


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the modules, and names that may be modules, that a module imports anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def faults(tree: ast.AST) -> list[str]:
    """Return the imports and calls that execute data as code."""
    imports = [name for name in imported(tree) if name.partition(".")[0] in RUNS_CODE]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in CALLS:
            imports.append(ast.unparse(node.func))
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            imports.append("allow_pickle")
    return imports


def modules_of_data_path() -> dict[str, ast.AST]:
    """Return the modules between readers and trainers, and all modules of this package that they import, by file."""
    trees = dict(modules())
    files = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in trees}
    data_path: dict[str, ast.AST] = {}
    waiting = [name for name in trees if name.startswith(STARTS)]
    while waiting:
        name = waiting.pop()
        if name in data_path:
            continue
        data_path[name] = trees[name]
        for module in imported(trees[name]):
            inner = module.removeprefix("meseta.")
            if module.startswith("meseta.") and inner in files:
                parts = inner.split(".")
                waiting += [
                    files[".".join(parts[:i])] for i in range(1, len(parts) + 1) if ".".join(parts[:i]) in files
                ]
    return data_path


def test_no_pickle_is_modules_of_data_path() -> None:
    data_path = modules_of_data_path()
    assert {
        "data/service/client/windows.py",
        "data/service/server/window_reader.py",
        "data/dataset/dataset.py",
        "system/files.py",
    } <= set(data_path)
    assert {name: names for name, tree in data_path.items() if (names := faults(tree))} == {}
    assert all((SOURCE / name).exists() for name in data_path)


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from marshal import loads",
        "def f():\n    import dill as d",
        "import torch\ntorch.load(f)",
        "import numpy as np\nnp.load(f, allow_pickle=True)",
        "eval(text)",
    ],
)
def test_the_rule_bites(text: str) -> None:
    assert faults(ast.parse(text))
    assert not faults(ast.parse("import json\nnp.load(f, allow_pickle=False)\nmodel.eval()"))
