"""The layout of raw files: what each column is, as inferred or as a schema file says, and that file itself."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meseta.spec import MesetaError, nearest
from meseta.spec.documents import read_mapping


@dataclass(frozen=True, kw_only=True)
class SparseColumn:
    """One sparse feature in the raw files."""

    name: str
    multi_valued: bool = False
    """A list per sample."""
    weighted: bool = False
    """Whether each value has a weight."""
    weight: str | None = None
    """Column that holds the weights; None where there are none, or where they stand beside the values."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Columns of the raw files: names of the label, the dense and the sparse features."""

    label: str
    dense: tuple[str, ...]
    sparse: tuple[SparseColumn, ...]
    ignored: tuple[str, ...] = field(default=(), compare=False)
    """Columns that are not read."""
    reasons: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Why a column was taken for what it is, where that was inferred."""

    @property
    def columns(self) -> list[str]:
        """Every raw column that is read."""
        weights = [s.weight for s in self.sparse if s.weight is not None]
        return [self.label, *self.dense, *(s.name for s in self.sparse), *weights]


class Schema(BaseModel):
    """A schema file: what the columns are, instead of what would be inferred."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    label: str
    """Column of the label, 0 to 1."""
    dense: tuple[str, ...] = ()
    """Columns of numbers."""
    categorical: tuple[str, ...] = ()
    """Columns of categories, or of lists of them."""
    weights: dict[str, str] = Field(default_factory=dict)
    """Parquet: categorical column of lists to the column of lists that holds its weights."""
    ignore: tuple[str, ...] = ()
    """Columns that are not read; a column that the file does not name is not read either."""

    @staticmethod
    def load(path: str | Path) -> Schema:
        """Read a YAML file. Raises MesetaError naming the key and the rule, and for a column with two roles."""
        where = f"schema {str(path)!r}"
        try:
            document = read_mapping(path)
        except MesetaError as error:
            raise MesetaError(f"{where}: {error}") from None
        try:
            # An empty key means none of them, as elsewhere in YAML.
            schema = Schema.model_validate({key: value for key, value in document.items() if value is not None})
        except ValidationError as error:
            # An unknown key first: where 'labels' is given, the fault is not that 'label' is missing.
            problem = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
            key = ".".join(map(str, problem["loc"]))
            if problem["type"] == "extra_forbidden":
                raise MesetaError(f"{where}: unknown key {key!r}; {nearest(key, list(Schema.model_fields))}") from None
            raise MesetaError(f"{where}: key {key!r}: {problem['msg'].lower()}") from None
        roles = [schema.label, *schema.dense, *schema.categorical, *schema.weights.values(), *schema.ignore]
        doubled = sorted({name for name in roles if roles.count(name) > 1})
        if doubled:
            raise MesetaError(f"{where}: column {doubled[0]!r} is named twice; give it one role")
        for name in schema.weights:
            if name not in schema.categorical:
                raise MesetaError(f"{where}: weights are given for {name!r}, which is not under categorical")
        return schema


def schema_text(layout: Layout) -> str:
    """The schema file that says what `layout` says, with the reasons as comments."""
    lines = [_line(f"label: {_scalar(layout.label)}", layout.reasons.get(layout.label))]
    names = {
        "dense": layout.dense,
        "categorical": tuple(column.name for column in layout.sparse),
        "ignore": tuple(name for name in layout.ignored if name),
    }
    for key, columns in names.items():
        lines += [f"{key}:"] if columns else []
        lines += [_line(f"  - {_scalar(name)}", layout.reasons.get(name)) for name in columns]
        pairs = {column.name: column.weight for column in layout.sparse if column.weight}
        if key == "categorical" and pairs:
            lines += ["weights:", *(f"  {_scalar(name)}: {_scalar(weight)}" for name, weight in pairs.items())]
    return "\n".join(lines) + "\n"


def _line(text: str, reason: str | None) -> str:
    return f"{text:<30}  # {reason}" if reason else text


def _scalar(name: str) -> str:
    """A name as YAML reads it back: plain where that is safe, else quoted as in JSON, which YAML understands."""
    plain = re.fullmatch(r"[^\W\d][\w. -]*\w|[^\W\d]", name) is not None and yaml.safe_load(name) == name
    return name if plain else json.dumps(name, ensure_ascii=False)


def check_names(where: str, wanted: Sequence[str], known: Sequence[str]) -> None:
    """Raises MesetaError, naming `where`, for a column that is wanted and not there, or there twice."""
    for name in wanted:
        if name not in known:
            raise MesetaError(f"{where} has no column {name!r}; {nearest(name, [n for n in known if n])}")
        if known.count(name) > 1:
            raise MesetaError(f"{where}: {name!r} is the name of two columns; rename one")
