"""Examples by name: complete configs of the models, and the files of examples/, which the wheel contains."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from meseta.config.keys import example_config, make_key
from meseta.config.models import MODEL_NAMES, model_sections
from meseta.spec import MesetaError, suggest

_SCHEMAS = "schemas/"
"""Prefix of the names of schemas. All other names are those of configs."""


def example_text(name: str) -> str:
    """Return the YAML text of an example. A model's name means its generated config, also if a file has that name.

    Raises MesetaError if there is no such example.
    """
    if name in MODEL_NAMES:
        return example_config(name)
    if (file := _files().get(name)) is not None:
        return file.read_text(encoding="utf-8")
    raise MesetaError(f"config: there is no example {name!r}; {suggest(name, [*MODEL_NAMES, *_files()])}")


def has_example_config(name: str) -> bool:
    """Whether an example with this name is a config, not a schema."""
    return name in MODEL_NAMES or (name in _files() and not name.startswith(_SCHEMAS))


def model_examples() -> Iterator[tuple[str, str]]:
    """Yield (name, description) of the generated configs."""
    for name, section in model_sections().items():
        yield name, make_key(section, "name", "").description


def file_examples() -> Iterator[tuple[str, str]]:
    """Yield (name, first sentence) of the files."""
    for name, file in _files().items():
        comment = re.match(r"(#.*\n)+", text := file.read_text(encoding="utf-8"))
        words = " ".join((comment[0] if comment else text).replace("#", " ").split())
        yield name, re.split(r"(?<=\.) ", words)[0]


@cache
def _files() -> dict[str, Path]:
    """Return the files by name, such as main, models/dhen and schemas/clicks."""
    folder = Path(__file__).parent / "examples"
    if not folder.is_dir():  # The package runs from a source tree, which has the only copy.
        folder = Path(__file__).parents[3] / "examples"
    files = (file for part in ("configs", "schemas") for file in sorted((folder / part).rglob("*.yaml")))
    return {file.relative_to(folder).with_suffix("").as_posix().removeprefix("configs/"): file for file in files}
