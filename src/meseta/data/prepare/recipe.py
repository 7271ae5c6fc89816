"""File recipe.json: raw files of a dataset's rows and checksums of their index. dataset.json has the encoding."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from meseta.data.dataset.dataset import SPLITS, Dataset
from meseta.data.dataset.records import Count, Delimiter, FrozenRecord, InnerPath, SourceSplit
from meseta.data.dataset.statistics import WINDOW_SAMPLES
from meseta.data.formats.encodings import UTF_8
from meseta.data.formats.format import Source
from meseta.data.formats.registry import find_format
from meseta.data.schema.text_syntax import check_encoding
from meseta.errors import format_value
from meseta.spec import MesetaError
from meseta.system.files import parse_json, read_bounded, resolve_inside
from meseta.system.remote import is_url

RECIPE_FORMAT: Literal["meseta.recipe/1"] = "meseta.recipe/1"
RECIPE_FILE = "recipe.json"
REMAKE_REMEDY = "make the recipe again with `meseta prepare --recipe-only`"
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


def _check_split(name: str) -> str:
    if name not in SPLITS:
        raise ValueError(f"{format_value(name)} is not a split")
    return name


class RecipeSource(FrozenRecord):
    """Raw file, with its size and modification time when the recipe was made."""

    path: str
    """Absolute path on this machine, or a URL."""
    split: SourceSplit
    """Split that receives the rows of this file, or the rule by which they are distributed."""
    size_bytes: Count
    """Size of the stored file, which may be compressed."""
    changed: str
    """Modification time as the file system reports it."""
    delimiter: Delimiter
    """Separator of the fields of a line. Only delimited formats use it."""
    header: tuple[str, ...]
    """Column names of a text file without a header. Empty if the file has one."""
    is_typed: bool = False
    """Whether names in the header have a type, which is not part of the column name."""
    encoding: Annotated[str, AfterValidator(check_encoding)] = UTF_8
    partition: dict[str, str | None] = Field(default_factory=dict)
    """Columns from the folders of the file, with their values."""
    can_enter: bool
    """Whether rows in the middle can be read without reading the rows before them."""


class IndexFile(FrozenRecord):
    """Parquet file of the index."""

    path: InnerPath
    """Path relative to the dataset."""
    sha256: Digest


class Recipe(FrozenRecord):
    """Raw files of a dataset whose rows are computed while they are read."""

    format: Literal["meseta.recipe/1"] = RECIPE_FORMAT
    sources: tuple[RecipeSource, ...] = Field(min_length=1)
    """Raw files in the order of their rows."""
    skips_bad_rows: bool
    """Whether rows that cannot be parsed are skipped."""
    group_rows: int = Field(ge=1, le=WINDOW_SAMPLES)
    """Number of rows per row group. The last group of a split may have fewer."""
    splits: tuple[Annotated[str, AfterValidator(_check_split)], ...] = Field(min_length=1)
    blocks: IndexFile
    """Positions of blocks, see `meseta.data.prepare.recipe_index`."""
    groups: IndexFile
    """Positions of row groups, see `meseta.data.prepare.recipe_index`."""

    def to_sources(self, dataset: Dataset) -> tuple[Source, ...]:
        """Return the files as sources of their raw format."""
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
        """Write recipe.json to `folder`, and return its SHA-256 for dataset.json."""
        content = (json.dumps(self.model_dump(mode="json"), indent=1) + "\n").encode()
        (folder / RECIPE_FILE).write_bytes(content)
        return sha256(content).hexdigest()

    @staticmethod
    def load(dataset: Dataset) -> Recipe:
        """Load the recipe of a dataset. Raises MesetaError if it is missing or does not match dataset.json."""
        where = f"recipe {str(dataset.dir / RECIPE_FILE)!r}"
        try:
            content = read_bounded(resolve_inside(dataset.dir, RECIPE_FILE))
        except OSError as error:
            raise MesetaError(f"{where} cannot be read ({error.strerror}); {REMAKE_REMEDY}") from None
        if sha256(content).hexdigest() != dataset.recipe:
            raise MesetaError(f"{where} does not match the checksum in dataset.json; {REMAKE_REMEDY}")
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
            raise MesetaError(f"{where} has other splits than dataset.json; {REMAKE_REMEDY}")
        return recipe


def recipe_sources(sources: Sequence[Source]) -> tuple[RecipeSource, ...]:
    """Return the raw files as entries of a recipe. Raises MesetaError if a file cannot be read."""
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
