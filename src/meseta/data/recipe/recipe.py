"""recipe.json beside dataset.json: from which files, and how, the rows of a dataset are made as they are read.

What the values become is told by dataset.json alone; here stand the files, and what the index of their rows must be.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from meseta.data.dataset.dataset import SPLITS, Count, Dataset, Delimiter, FrozenRecord, InnerPath, SourceSplit
from meseta.data.dataset.statistics import WINDOW_SAMPLES
from meseta.data.formats.encodings import UTF_8, check_encoding
from meseta.data.formats.format import Source
from meseta.data.formats.registry import find_format
from meseta.errors import format_value
from meseta.machine.files import parse_json, read_bounded, resolve_inside
from meseta.machine.remote import is_url
from meseta.spec import MesetaError

RECIPE_FORMAT: Literal["meseta.recipe/1"] = "meseta.recipe/1"
RECIPE_FILE = "recipe.json"
REMAKE_REMEDY = "make it anew with `meseta prepare --recipe-only`"
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


def _check_split(name: str) -> str:
    if name not in SPLITS:
        raise ValueError(f"{format_value(name)} is no split")
    return name


class RecipeSource(FrozenRecord):
    """One raw file as it was when the recipe was made."""

    path: str
    """An absolute path on this machine, or a URL."""
    split: SourceSplit
    """Where its rows go."""
    size_bytes: Count
    """As stored."""
    changed: str
    """When it was written last, as its file system tells."""
    delimiter: Delimiter
    """What separates the fields of a line, where the format leaves that open."""
    header: tuple[str, ...]
    """Names of its columns, where it could begin with them and does not."""
    is_typed: bool = False
    """Whether the names in its header have types, which are no part of them."""
    encoding: Annotated[str, AfterValidator(check_encoding)] = UTF_8
    """Of its text."""
    partition: dict[str, str | None] = Field(default_factory=dict)
    """Columns that the folders of the file make, with their values."""
    can_enter: bool
    """Whether rows in its middle can be read without those before them."""


class IndexFile(FrozenRecord):
    """A Parquet file of the index."""

    path: InnerPath
    """Relative to the dataset."""
    sha256: Digest
    """Of its bytes."""


class Recipe(FrozenRecord):
    """The files of a dataset whose rows are made as they are read."""

    format: Literal["meseta.recipe/1"] = RECIPE_FORMAT
    sources: tuple[RecipeSource, ...] = Field(min_length=1)
    """In the order in which their rows come."""
    skips_bad_rows: bool
    """Whether a row that cannot be parsed is left out, and otherwise an error."""
    group_rows: int = Field(ge=1, le=WINDOW_SAMPLES)
    """Rows of a row group, but for the last one of a split."""
    splits: tuple[Annotated[str, AfterValidator(_check_split)], ...] = Field(min_length=1)
    """Those that the index tells of."""
    blocks: IndexFile
    """Where the blocks of the files begin, see meseta.data.recipe.index."""
    groups: IndexFile
    """Where the row groups of the splits begin."""

    def to_sources(self, dataset: Dataset) -> tuple[Source, ...]:
        """The files as the formats want them."""
        assert dataset.source_form is not None
        raw_format = find_format(dataset.source_form.kind)
        return tuple(
            Source(
                path=source.path,
                split=source.split,
                format=raw_format,
                size_bytes=source.size_bytes,
                changed=source.changed,
                delimiter=source.delimiter,
                header=source.header,
                is_typed=source.is_typed,
                encoding=source.encoding,
                partition=source.partition,
            )
            for source in self.sources
        )

    def save(self, folder: Path) -> str:
        """Write `folder`/recipe.json; returns what dataset.json has to say of it."""
        content = (json.dumps(self.model_dump(mode="json"), indent=1) + "\n").encode()
        (folder / RECIPE_FILE).write_bytes(content)
        return sha256(content).hexdigest()

    @staticmethod
    def load(dataset: Dataset) -> Recipe:
        """That of a dataset. Raises MesetaError where it is missing, or not the one that dataset.json speaks of."""
        where = f"recipe {str(dataset.dir / RECIPE_FILE)!r}"
        try:
            content = read_bounded(resolve_inside(dataset.dir, RECIPE_FILE))
        except OSError as error:
            raise MesetaError(f"{where} cannot be read ({error.strerror}); {REMAKE_REMEDY}") from None
        if sha256(content).hexdigest() != dataset.recipe:
            raise MesetaError(f"{where} is not the one that dataset.json was written with; {REMAKE_REMEDY}")
        try:
            document: Any = parse_json(content)
            recipe = Recipe.model_validate_json(json.dumps(document), strict=True)
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join(map(str, problem["loc"]))
            raise MesetaError(f"{where}: {format_value(key)}: {problem['msg']}; {REMAKE_REMEDY}") from None
        except ValueError as error:
            raise MesetaError(f"{where} is not JSON: {error}; {REMAKE_REMEDY}") from None
        if dataset.source_form is None or set(recipe.splits) != set(dataset.splits):
            raise MesetaError(f"{where} tells of other splits than dataset.json; {REMAKE_REMEDY}")
        return recipe


def recipe_sources(sources: Sequence[Source]) -> tuple[RecipeSource, ...]:
    """The files as a recipe names them. Raises MesetaError for one that cannot be read any more."""
    return tuple(
        RecipeSource(
            path=source.path if is_url(source.path) else os.path.abspath(source.path),
            split=source.split,
            size_bytes=source.size_bytes,
            changed=source.changed,
            delimiter=source.delimiter,
            header=source.header,
            is_typed=source.is_typed,
            encoding=source.encoding,
            partition=dict(source.partition),
            can_enter=source.format.is_seekable(source),
        )
        for source in sources
    )
