"""Example config files, with all keys of a model, their defaults and descriptions."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import yaml

from meseta.config.embedding import RowOptimizerConfig
from meseta.config.keys import ConfigKey, make_key, strip_markdown
from meseta.config.models import MODEL_NAMES
from meseta.config.run import RunConfig
from meseta.config.section import Section
from meseta.spec import MesetaError, suggest
from meseta.spec.optimizer import USED_FIELDS

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
    """Whether a key has an effect for the section's `name` or `kind`."""
    if isinstance(section, RowOptimizerConfig):
        return key.path in ("name", *USED_FIELDS[section.name])
    return not key.used_by or getattr(section, "name", getattr(section, "kind", None)) in key.used_by


def _comment(text: str, depth: int) -> list[str]:
    indent = f"{'  ' * depth}# "
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _yaml(value: Any) -> str:
    # A large width keeps the value in one line.
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
