"""Scripts outside the package import its public names, and parts of it that are listed here."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterable, Iterator

import pytest

from source_tree import ROOT

SCRIPTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "benchmarks of operators and training": (
        ("benchmarks/bench_ops.py", "benchmarks/bench_e2e.py", "benchmarks/record.py", "benchmarks/peers"),
        (
            "meseta.ops",
            "meseta.measure.harness",
            "meseta.measure.gather_limit",
            "meseta.measure.synthetic_batches",
        ),
    ),
    "comparisons of models": (("tools/quality",), ()),
}
"""Scripts or folders, and modules of which they may import any name, also from submodules."""


def script_trees(paths: Iterable[str]) -> Iterator[tuple[str, ast.Module]]:
    """Yield (path, syntax tree) of every Python file at or below `paths`."""
    for path in (ROOT / name for name in paths):
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            yield str(file.relative_to(ROOT)), ast.parse(file.read_text())


def package_imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of everything imported from the package. The name is empty for `import module`."""
    for node in ast.walk(tree):
        imported: list[tuple[str, str]] = []
        if isinstance(node, ast.Import):
            imported = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported = [(node.module, alias.name) for alias in node.names]
        yield from (pair for pair in imported if pair[0].split(".")[0] == "meseta")


def is_allowed(module: str, name: str, allowed: Iterable[str]) -> bool:
    """Whether `name` is in `__all__` of `module`, or in a module of `allowed`."""
    if name in getattr(importlib.import_module(module), "__all__", ()):
        return True
    return any(full == part or full.startswith(f"{part}.") for part in allowed for full in (module, f"{module}.{name}"))


@pytest.mark.parametrize("scripts", SCRIPTS)
def test_scripts_import_what_is_listed(scripts: str) -> None:
    paths, allowed = SCRIPTS[scripts]
    assert [
        f"{path}: {module} {name}"
        for path, tree in script_trees(paths)
        for module, name in package_imports(tree)
        if not is_allowed(module, name, allowed)
    ] == []


def test_listed_modules_exist_and_are_imported() -> None:
    for paths, allowed in SCRIPTS.values():
        imports = [pair for _, tree in script_trees(paths) for pair in package_imports(tree)]
        for part in allowed:
            importlib.import_module(part)
            assert any(is_allowed(module, name, [part]) for module, name in imports), part


def test_an_internal_import_is_found() -> None:
    text = "import meseta.train\nfrom meseta.spec import Plan\nfrom meseta.spec.tiers import HBM\nimport torch"
    imports = list(package_imports(ast.parse(text)))
    assert imports == [("meseta.train", ""), ("meseta.spec", "Plan"), ("meseta.spec.tiers", "HBM")]
    assert [pair for pair in imports if not is_allowed(*pair, ["meseta.ops"])] == [imports[0], imports[2]]
    assert is_allowed("meseta.ops.core", "core", ["meseta.ops"]) and is_allowed("meseta", "ops", ["meseta.ops"])
