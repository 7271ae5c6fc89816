"""Nothing on the road of rows from readers to trainers runs what comes as code: no pickle, nor its like."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from source_tree import SOURCE, modules

STARTS = ("data/read/", "data/service/", "cli/readers.py")
RUNS_CODE = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = {"torch.load", "pa.deserialize", "pyarrow.deserialize", "yaml.load", "eval", "exec"}


def imported(tree: ast.AST) -> Iterator[str]:
    """Modules, and names in them that may be modules, that a module loads at any time."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def faults(tree: ast.AST) -> list[str]:
    """What it has that takes bytes for code."""
    found = [name for name in imported(tree) if name.partition(".")[0] in RUNS_CODE]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in CALLS:
            found.append(ast.unparse(node.func))
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            found.append("allow_pickle")
    return found


def on_the_road() -> dict[str, ast.AST]:
    """Modules of the road, and all of ours that they load, by their file."""
    trees = dict(modules())
    files = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in trees}
    found: dict[str, ast.AST] = {}
    waiting = [name for name in trees if name.startswith(STARTS)]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found[name] = trees[name]
        for module in imported(trees[name]):
            inner = module.removeprefix("meseta.")
            if module.startswith("meseta.") and inner in files:
                parts = inner.split(".")
                waiting += [
                    files[".".join(parts[:i])] for i in range(1, len(parts) + 1) if ".".join(parts[:i]) in files
                ]
    return found


def test_no_pickle_is_on_the_road() -> None:
    road = on_the_road()
    assert {
        "data/service/client/windows.py",
        "data/service/server/window_reader.py",
        "data/dataset/dataset.py",
        "system/files.py",
    } <= set(road)
    assert {name: found for name, tree in road.items() if (found := faults(tree))} == {}
    assert all((SOURCE / name).exists() for name in road)


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
