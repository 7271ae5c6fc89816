"""Descriptions of all config keys, derived from the config classes."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from meseta.config.embedding import RowOptimizerConfig
from meseta.config.former_keys import current_key
from meseta.config.models import MODEL_NAMES, CustomModelConfig, ModelConfig, model_sections
from meseta.config.run import RunConfig
from meseta.config.section import Section, used_by
from meseta.spec import MesetaError, suggest
from meseta.spec.optimizer import USED_FIELDS

_MAX_EXCLUDED_MODELS = 2
"""Maximum length of a list of exceptions, as in "All but dlrm and fm"."""
BOUND_SIGNS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))


@dataclass(frozen=True, kw_only=True)
class ConfigKey:
    """Description of a config key."""

    path: str
    """Dotted path of the key. `<feature>` is a placeholder for a feature name."""
    kind: str
    """Type and allowed values of the key, in Markdown."""
    default: str
    description: str
    is_required: bool = False
    used_by: tuple[str, ...] = ()
    """Models, or values of the section's `name` or `kind`, for which the key has an effect. Empty if it always has
    one."""
    not_used_by: tuple[str, ...] = ()
    """Models or values for which the key has no effect, if `used_by` is not empty."""

    @property
    def full_text(self) -> str:
        """Description with a prefix of the names in `used_by`."""
        if not self.used_by:
            return self.description
        users = ", ".join(self.used_by)
        # A few exceptions are shorter than a long list.
        if len(self.not_used_by) <= _MAX_EXCLUDED_MODELS and 2 * len(self.not_used_by) < len(self.used_by):
            users = f"All but {' and '.join(self.not_used_by)}" if self.not_used_by else "All"
        begins_with_word = self.description[1:2].islower()
        return (
            f"{users}: "
            f"{self.description[:1].lower() if begins_with_word else self.description[:1]}{self.description[1:]}"
        )


def all_keys() -> list[ConfigKey]:
    """Return all keys except sections."""
    return [key for _, keys in key_sections() for key in keys]


def find_keys(name: str) -> list[ConfigKey]:
    """Return the keys that match `name`, which is a key, a section, a pattern such as '*.lr' or a part of a path.

    Any feature name matches <feature>. Raises MesetaError if no key matches.
    """
    name, keys = current_key(name), all_keys()
    # The first rule that matches any key decides.
    for rule in (_is_in_section, _matches_pattern, _contains):
        if matches := [key for key in keys if rule(key, name)]:
            return matches
    # Compare with full paths and with the last names of paths.
    nicknames = {key.path.rpartition(".")[2]: key.path for key in keys} | {key.path: key.path for key in keys}
    close = dict.fromkeys(nicknames[match] for match in get_close_matches(name, nicknames, n=3))
    asked = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    raise MesetaError(f"config: there is no key {name!r}; {asked}`meseta config` lists all")


def _is_in_section(key: ConfigKey, name: str) -> bool:
    path, prefix = key.path.split("."), name.split(".")
    fits = all(one in (other, "<feature>") for one, other in zip(path, prefix, strict=False))
    return fits and (len(prefix) <= len(path) or key.kind == "section")


def _matches_pattern(key: ConfigKey, name: str) -> bool:
    return fnmatchcase(key.path, name)


def _contains(key: ConfigKey, name: str) -> bool:
    return bool(name) and name in key.path


def key_sections() -> Iterator[tuple[str, list[ConfigKey]]]:
    """Yield (title, keys) for the top-level keys, and then for each section."""
    fields = RunConfig.model_fields
    yield "The run", [make_key(RunConfig, n, n) for n, f in fields.items() if _find_section(f.annotation) is None]
    for name, field in fields.items():
        section = _find_section(field.annotation)
        if section is not None:
            keys = _model_keys(name) if section is ModelConfig else list(_walk_keys(section, name, ()))
            yield f"{name}: {_decapitalize(field.description)}", keys


def _model_keys(path: str) -> list[ConfigKey]:
    """Return the keys of all models. Keys that several models define identically are merged."""
    classes: dict[str, type[Section]] = {**model_sections(), "your own": CustomModelConfig}
    named = make_key(ModelConfig, "name", f"{path}.name")
    models = (f"{name!r}: {make_key(section, 'name', '').description}" for name, section in model_sections().items())
    owners: dict[ConfigKey, list[str]] = {}
    for name, section in classes.items():
        for key in _walk_keys(section, path, ()):
            if key.path != named.path:
                owners.setdefault(key, []).append(name)
    keys = [replace(named, description=" ".join([named.description, *models]))]
    for key, names in owners.items():
        remaining = tuple(name for name in classes if name not in names)
        keys.append(replace(key, used_by=tuple(names), not_used_by=remaining))
    return keys


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
        elif any(issubclass(inner, one) for one in above):  # The same section was listed before.
            key = make_key(section, name, path)
            yield replace(key, description=f"{key.description} Keys as above.")
        else:
            named = get_origin(field.annotation) is dict
            seen = (*above, *(c for c in (_find_section(f.annotation) for f in section.model_fields.values()) if c))
            yield from _walk_keys(inner, f"{path}.<feature>" if named else path, (*seen, section) if named else above)


def make_key(section: type[Section], name: str, path: str) -> ConfigKey:
    """Describe the key `name` of a section, whose full path is `path`."""
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
    fields = section.model_fields
    return get_args(fields["name" if "name" in fields else "kind"].annotation)


def _find_section(annotation: Any) -> type[Section] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


@cache
def _referenced_descriptions(section: type[Section]) -> dict[str, str]:
    source = section.keys_described_by
    if source is None:
        return {}
    # Field docstrings are not available at run time.
    tree = ast.parse(Path(inspect.getfile(source)).read_text(encoding="utf-8"))
    [body] = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == source.__name__]
    texts = {}
    for statement, after in pairwise(body):
        match statement, after:
            case ast.AnnAssign(target=ast.Name(id=field)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[field] = inspect.cleandoc(text)
    return texts


def _format_type(annotation: Any, limits: list[Any]) -> str:
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _format_type(
            inside[0], [m for extra in inside[1:] for m in getattr(extra, "metadata", [extra])] + limits
        )
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inside)
    if origin in (Union, types.UnionType):  # None is shown as the default "none".
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
    """Remove the Markdown markup from a key's kind or default."""
    return markdown.replace("`", "").replace("\N{NO-BREAK SPACE}", " ")


def _format_bound(value: float | int) -> str:
    return "2^63" if value == 2**63 else f"{value:,}"


def _format_default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be given"
    value = field.default
    if isinstance(value, Section):  # Its keys have their own defaults.
        return ""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(_format_item, value))}]`"
    return f"`{value}`"


def _format_item(value: Any) -> str:
    if not isinstance(value, Section):
        return str(value)
    keys = ", ".join(f"{name}: {_format_default(FieldInfo(default=one)).strip('`')}" for name, one in value)
    return f"{{{keys}}}"


def _decapitalize(text: str | None) -> str:
    text = (text or "").rstrip(".")
    return text[:1].lower() + text[1:]


_WIDTH = 110


def example_config(name: str) -> str:
    """Return a complete config for a built-in model as YAML text. Raises MesetaError if `name` is unknown."""
    if name not in MODEL_NAMES:
        raise MesetaError(f"config: there is no model {name!r}; {suggest(name, MODEL_NAMES)}")
    config = RunConfig(run_dir=f"runs/{name}", data={"dir": "data/prepared"}, model={"name": name})  # type: ignore[arg-type]
    head = (
        f"A run of {name}, for `meseta train FILE`. Every key that matters to it is here, at its default; all but "
        "run_dir and data.dir may be left out. null is none."
    )
    return "\n".join([*_comment(head, 0), "", *_lines(config, 0)]) + "\n"


def _lines(section: Section, depth: int) -> Iterator[str]:
    values = section.model_dump(mode="json")
    for name in type(section).model_fields:
        key, value = make_key(type(section), name, name), getattr(section, name)
        if not _has_effect(section, key):
            continue
        text = key.description[:1].upper() + key.description[1:]
        if isinstance(value, Section):
            yield from ["", *_comment(text, depth), f"{'  ' * depth}{name}:", *_lines(value, depth + 1)]
        else:
            kind = "" if key.kind == "section" else f" [{strip_markdown(key.kind)}]"
            yield from _comment(f"{text}{kind}", depth)
            yield f"{'  ' * depth}{name}: {_yaml(values[name])}"


def _has_effect(section: Section, key: ConfigKey) -> bool:
    if isinstance(section, RowOptimizerConfig):
        return key.path in ("name", *USED_FIELDS[section.name])
    return not key.used_by or getattr(section, "name", getattr(section, "kind", None)) in key.used_by


def _comment(text: str, depth: int) -> list[str]:
    indent = f"{'  ' * depth}# "
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _yaml(value: Any) -> str:
    # A large width keeps the value in one line.
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
