"""Tools that come with the repository use only public names of the package."""

import ast
import importlib
from pathlib import Path

import pytest

from source_tree import ROOT

FILES = sorted((ROOT / "tools" / "quality").glob("*.py"))


def private_imports(text: str) -> list[str]:
    """Return the imports from meseta that are no public names of a package."""
    names = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names if alias.name.split(".")[0] == "meseta"]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "meseta":
            public = getattr(importlib.import_module(node.module or ""), "__all__", ())
            names += [f"{node.module}.{alias.name}" for alias in node.names if alias.name not in public]
    return names


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_tools_import_only_public_names(file: Path) -> None:
    assert private_imports(file.read_text()) == []


def test_private_imports_are_found() -> None:
    text = "import meseta.cli.main\nfrom meseta.spec import MesetaError\nfrom meseta.train.sweep import Trial\n"
    assert private_imports(text) == ["meseta.cli.main", "meseta.train.sweep.Trial"]
