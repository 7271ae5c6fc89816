"""Every key of a run's config as a table, made from the classes that check it."""

from __future__ import annotations

import ast
import importlib
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from meseta.config import RunConfig

LIMITS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of the config."""

    path: str
    """With dots; <feature> stands for a name that the user chooses."""
    kind: str
    default: str
    text: str


def markdown() -> str:
    """A heading and a table for every section."""
    parts = []
    for title, keys in _sections():
        rows = "".join(f"| `{k.path}` | {_cell(k.kind)} | {_cell(k.default)} | {_cell(k.text)} |\n" for k in keys)
        parts.append(f"## {title}\n\n| key | values | default | |\n| --- | --- | --- | --- |\n{rows}\n")
    return '<div class="keys" markdown>\n\n' + "\n".join(parts) + "\n</div>\n"


def all_keys() -> list[Key]:
    """All keys that hold a value, sections apart."""
    return [key for _, found in _sections() for key in found]


def _sections() -> Iterator[tuple[str, list[Key]]]:
    """The keys at the top, then each section with all that lies in it."""
    fields = RunConfig.model_fields
    yield "The run", [_key(RunConfig, n, f, n) for n, f in fields.items() if _section_of(f.annotation) is None]
    for name, field in fields.items():
        section = _section_of(field.annotation)
        if section is not None:
            yield f"{name}: {_sentence(field.description)}", list(_walk(section, name, ()))


def _walk(section: type[BaseModel], prefix: str, above: tuple[type[BaseModel], ...]) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        path = f"{prefix}.{name}"
        inner = _section_of(field.annotation)
        if inner is None:
            yield _key(section, name, field, path)
        elif any(issubclass(inner, one) for one in above):
            yield Key(path=path, kind="section", default=_default(field), text=f"{field.description} Keys as above.")
        else:
            named = get_origin(field.annotation) is dict
            seen = (*above, *(c for c in (_section_of(f.annotation) for f in section.model_fields.values()) if c))
            yield from _walk(inner, f"{path}.<feature>" if named else path, (*seen, section) if named else above)


def _key(section: type[BaseModel], name: str, field: FieldInfo, path: str) -> Key:
    text = field.description or _texts_beside(section).get(name, "")
    kind = _kind(field.annotation, [*field.metadata])
    return Key(path=path, kind=kind, default=_default(field), text=" ".join(text.split()))


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, directly, by name, or unless it is None."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


@cache
def _texts_beside(section: type[BaseModel]) -> dict[str, str]:
    """Texts of the fields of the class that a section's docstring names: "See meseta.OptimizerSpec ..."."""
    words = [word.strip(".,") for word in (section.__doc__ or "").split() if word.startswith("meseta.")]
    if not words:
        return {}
    package, _, name = words[0].rpartition(".")
    source = getattr(importlib.import_module(package), name)
    tree = ast.parse(Path(inspect.getfile(source)).read_text(encoding="utf-8"))
    [body] = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    texts = {}
    for statement, after in pairwise(body):
        named = isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if named and told:
            texts[statement.target.id] = inspect.cleandoc(after.value.value)
    return texts


def _kind(annotation: Any, limits: list[Any]) -> str:
    """A type as a person writes values of it in YAML."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(inside[0], [m for extra in inside[1:] for m in getattr(extra, "metadata", [extra])] + limits)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inside)
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(part, limits) for part in inside if part is not type(None))
    if origin is tuple:
        return f"list: {_kind(inside[0], [])}"
    if origin is dict:
        return "mapping" if inside[1] is Any else f"mapping to {_kind(inside[1], [])}"
    names = {Path: "path", str: "text", bool: "`true` or `false`", int: "integer", float: "number"}
    bounds = [
        f"{sign}\N{NO-BREAK SPACE}{_bound(getattr(m, name))}"
        for m in limits
        for name, sign in LIMITS
        if hasattr(m, name)
    ]
    return " ".join([names[annotation], ", ".join(bounds)]).strip()


def _bound(value: float) -> str:
    return "2^63" if value == 2**63 else f"{value:,}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be given"
    value = field.default
    if isinstance(value, BaseModel):
        return ""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`"


def _sentence(text: str | None) -> str:
    text = (text or "").rstrip(".")
    return text[:1].lower() + text[1:]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
