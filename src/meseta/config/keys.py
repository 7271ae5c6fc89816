"""Every key of a run's config with its kind, default and meaning, made from the classes that check it."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from meseta.config.former_keys import current_key
from meseta.config.models import CustomModelConfig, ModelConfig, model_sections
from meseta.config.run import RunConfig
from meseta.config.section import Section, used_by
from meseta.spec import MesetaError

_MAX_EXCLUDED_MODELS = 2
"""Maximum length of a list of exceptions, as in "All but dlrm and fm"."""
BOUND_SIGNS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))


@dataclass(frozen=True, kw_only=True)
class ConfigKey:
    """One key of the config."""

    path: str
    """With dots; <feature> stands for a name that the user chooses."""
    kind: str
    """Values that it takes, as Markdown."""
    default: str
    """As Markdown."""
    description: str
    """What it means."""
    is_required: bool = False
    """Whether a config has to give it."""
    used_by: tuple[str, ...] = ()
    """Models, or values of its section's `name` or `kind`, for which it has an effect; empty if it always has one."""
    not_used_by: tuple[str, ...] = ()
    """The remaining models or values."""

    @property
    def full_text(self) -> str:
        """What it means, after the names in `used_by`."""
        if not self.used_by:
            return self.description
        users = ", ".join(self.used_by)
        # A few exceptions among many are shorter to read than the many.
        if len(self.not_used_by) <= _MAX_EXCLUDED_MODELS and 2 * len(self.not_used_by) < len(self.used_by):
            users = f"All but {' and '.join(self.not_used_by)}" if self.not_used_by else "All"
        begins_with_word = self.description[1:2].islower()
        return (
            f"{users}: "
            f"{self.description[:1].lower() if begins_with_word else self.description[:1]}{self.description[1:]}"
        )


def all_keys() -> list[ConfigKey]:
    """All keys that hold a value, sections apart."""
    return [key for _, found in key_sections() for key in found]


def find_keys(name: str) -> list[ConfigKey]:
    """The keys that `name` means: one, all of a section, those that match a pattern such as '*.lr', or those that have
    it in their names. Any name stands for <feature>. Raises MesetaError where there is none."""
    name, keys = current_key(name), all_keys()
    for rule in (_is_in_section, _matches_pattern, _contains):
        if found := [key for key in keys if rule(key, name)]:
            return found
    nicknames = {key.path.rpartition(".")[2]: key.path for key in keys} | {key.path: key.path for key in keys}
    close = dict.fromkeys(nicknames[near] for near in get_close_matches(name, nicknames, n=3))
    asked = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    raise MesetaError(f"config: there is no key {name!r}; {asked}`meseta config` lists all")


def _is_in_section(key: ConfigKey, name: str) -> bool:
    """Whether a key is the one called so, or lies in the section called so."""
    there, wanted = key.path.split("."), name.split(".")
    fits = all(one in (other, "<feature>") for one, other in zip(there, wanted, strict=False))
    return fits and (len(wanted) <= len(there) or key.kind == "section")


def _matches_pattern(key: ConfigKey, name: str) -> bool:
    return fnmatchcase(key.path, name)


def _contains(key: ConfigKey, name: str) -> bool:
    return bool(name) and name in key.path


def key_sections() -> Iterator[tuple[str, list[ConfigKey]]]:
    """The keys at the top, then each section with all that lies in it."""
    fields = RunConfig.model_fields
    yield "The run", [make_key(RunConfig, n, n) for n, f in fields.items() if _find_section(f.annotation) is None]
    for name, field in fields.items():
        section = _find_section(field.annotation)
        if section is not None:
            found = _model_keys(name) if section is ModelConfig else list(_walk_keys(section, name, ()))
            yield f"{name}: {_decapitalize(field.description)}", found


def _model_keys(path: str) -> list[ConfigKey]:
    """The keys of all models; what a key is where it means the same in several stands once, with their names."""
    classes: dict[str, type[Section]] = {**model_sections(), "your own": CustomModelConfig}
    named = make_key(ModelConfig, "name", f"{path}.name")
    told = (f"{name!r}: {make_key(section, 'name', '').description}" for name, section in model_sections().items())
    owners: dict[ConfigKey, list[str]] = {}
    for name, section in classes.items():
        for key in _walk_keys(section, path, ()):
            if key.path != named.path:
                owners.setdefault(key, []).append(name)
    found = [replace(named, description=" ".join([named.description, *told]))]
    for key, names in owners.items():
        others = tuple(name for name in classes if name not in names)
        found.append(replace(key, used_by=tuple(names), not_used_by=others))
    return found


def _walk_keys(section: type[Section], prefix: str, above: tuple[type[Section], ...]) -> Iterator[ConfigKey]:
    for name, field in section.model_fields.items():
        path = f"{prefix}.{name}"
        inner = _find_section(field.annotation)
        if inner is None or get_origin(field.annotation) is tuple:
            yield make_key(section, name, path)
        if inner is None:
            continue
        if get_origin(field.annotation) is tuple:
            yield from _walk_keys(inner, f"{path}.<number>", (*above, section))
        elif any(issubclass(inner, one) for one in above):
            key = make_key(section, name, path)
            yield replace(key, description=f"{key.description} Keys as above.")
        else:
            named = get_origin(field.annotation) is dict
            seen = (*above, *(c for c in (_find_section(f.annotation) for f in section.model_fields.values()) if c))
            yield from _walk_keys(inner, f"{path}.<feature>" if named else path, (*seen, section) if named else above)


def make_key(section: type[Section], name: str, path: str) -> ConfigKey:
    """The key `name` of a section, called `path` in the whole."""
    field = section.model_fields[name]
    text = field.description or _referenced_descriptions(section).get(name, inspect.cleandoc(section.__doc__ or ""))
    is_section = _find_section(field.annotation) and get_origin(field.annotation) is not tuple
    kind = "section" if is_section else _format_type(field.annotation, [*field.metadata])
    users = used_by(field)
    return ConfigKey(
        path=path,
        kind=kind,
        default=_format_default(field),
        description=" ".join(text.split()),
        is_required=field.is_required(),
        used_by=users,
        not_used_by=tuple(value for value in _choices(section) if value not in users) if users else (),
    )


def _choices(section: type[Section]) -> tuple[str, ...]:
    """Return the values that the `name`, or else the `kind`, of a section can have."""
    fields = section.model_fields
    return get_args(fields["name" if "name" in fields else "kind"].annotation)


def _find_section(annotation: Any) -> type[Section] | None:
    """The section that a field holds, directly, by name, or unless it is None."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


@cache
def _referenced_descriptions(section: type[Section]) -> dict[str, str]:
    """Texts of the fields of the class that describes the keys of a section."""
    source = section.keys_described_by
    if source is None:
        return {}
    tree = ast.parse(Path(inspect.getfile(source)).read_text(encoding="utf-8"))
    [body] = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == source.__name__]
    texts = {}
    for statement, after in pairwise(body):
        match statement, after:
            case ast.AnnAssign(target=ast.Name(id=field)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[field] = inspect.cleandoc(text)
    return texts


def _format_type(annotation: Any, limits: list[Any]) -> str:
    """A type as a person writes values of it in YAML."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _format_type(
            inside[0], [m for extra in inside[1:] for m in getattr(extra, "metadata", [extra])] + limits
        )
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inside)
    if origin in (Union, types.UnionType):
        return " or ".join(_format_type(part, limits) for part in inside if part is not type(None))
    if origin in (tuple, list):
        return f"list: {_format_type(inside[0], [])}"
    if origin is dict:
        return "mapping" if inside[1] is Any else f"mapping to {_format_type(inside[1], [])}"
    if _find_section(annotation):
        return "section"
    names = {Path: "path", str: "text", bool: "`true` or `false`", int: "integer", float: "number"}
    bounds = [
        f"{sign}\N{NO-BREAK SPACE}{_format_bound(getattr(m, name))}"
        for m in limits
        for name, sign in BOUND_SIGNS
        if hasattr(m, name)
    ]
    return " ".join([names[annotation], ", ".join(bounds)]).strip()


def strip_markdown(markdown: str) -> str:
    """Kind or default of a key without the marks of Markdown."""
    return markdown.replace("`", "").replace("\N{NO-BREAK SPACE}", " ")


def _format_bound(value: float | int) -> str:
    return "2^63" if value == 2**63 else f"{value:,}"


def _format_default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be given"
    value = field.default
    if isinstance(value, Section):
        return ""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(_format_item, value))}]`"
    return f"`{value}`"


def _format_item(value: Any) -> str:
    """One of a list."""
    if not isinstance(value, Section):
        return str(value)
    keys = ", ".join(f"{name}: {_format_default(FieldInfo(default=one)).strip('`')}" for name, one in value)
    return f"{{{keys}}}"


def _decapitalize(text: str | None) -> str:
    text = (text or "").rstrip(".")
    return text[:1].lower() + text[1:]
