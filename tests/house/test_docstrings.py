"""Public functions, classes and fields of specs and configs say what they are."""

import ast
from collections.abc import Iterator

from source_tree import Function, modules

# Here a field's docstring carries its unit.
FIELDS_NEED_DOCSTRINGS = ("spec/", "config/")


def public_definitions() -> Iterator[tuple[str, Function | ast.ClassDef]]:
    for name, tree in modules():
        for node in tree.body:
            if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
                yield f"{name}:{node.lineno} {node.name}", node


def fields_without_docstring(node: ast.ClassDef) -> list[str]:
    """Annotated fields that no string literal follows, but for what a base explains: the only `name` of a class, and
    constants without a type."""
    missing = []
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            has_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            is_explained = ast.unparse(statement).startswith(("name: Literal['", f"{statement.target.id}: ClassVar ="))
            if not has_text and not is_explained and not statement.target.id.startswith("_"):
                missing.append(statement.target.id)
    return missing


def explained(node: Function | ast.ClassDef) -> bool:
    """A docstring, or a record each of whose fields has one."""
    if ast.get_docstring(node):
        return True
    has_fields = any(isinstance(statement, ast.AnnAssign) for statement in node.body)
    return isinstance(node, ast.ClassDef) and has_fields and not fields_without_docstring(node)


def test_modules_have_docstrings() -> None:
    assert not [name for name, tree in modules() if tree.body and not ast.get_docstring(tree)]


def test_public_functions_and_classes_have_docstrings() -> None:
    definitions = list(public_definitions())
    assert definitions
    assert not [name for name, node in definitions if not explained(node)]


def test_fields_of_specs_have_docstrings() -> None:
    # A config that mirrors a spec says "See meseta.X" once instead.
    missing = {
        name: fields
        for name, node in public_definitions()
        if isinstance(node, ast.ClassDef)
        and name.startswith(FIELDS_NEED_DOCSTRINGS)
        and not (ast.get_docstring(node) or "").startswith("See ")
        if (fields := fields_without_docstring(node))
    }
    assert not missing
