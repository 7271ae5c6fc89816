"""Which raw columns are the label, the dense and the sparse features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from meseta.data.sources import Source, first_line, parquet_schema
from meseta.spec import MesetaError, nearest

NUM_DENSE = 13
NUM_SPARSE = 26


@dataclass(frozen=True, kw_only=True)
class SparseColumn:
    """One sparse feature in the raw files."""

    name: str
    multi_valued: bool = False
    """A list per sample."""
    weighted: bool = False
    """The column '<name>.weight' holds one weight per value."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Columns of the raw files: names of the label, the dense and the sparse features."""

    label: str
    dense: tuple[str, ...]
    sparse: tuple[SparseColumn, ...]

    @property
    def columns(self) -> list[str]:
        """Every raw column that is read."""
        weights = [f"{s.name}.weight" for s in self.sparse if s.weighted]
        return [self.label, *self.dense, *(s.name for s in self.sparse), *weights]


CRITEO = Layout(
    label="label",
    dense=tuple(f"int_{i}" for i in range(NUM_DENSE)),
    sparse=tuple(SparseColumn(name=f"cat_{i}") for i in range(NUM_SPARSE)),
)
"""Both Criteo layouts, Kaggle and 1TB: label, 13 integers, 26 categories."""


def find_layout(sources: Sequence[Source], label: str, dense: Sequence[str], sparse: Sequence[str]) -> Layout:
    """The common layout of all sources.

    TSV is Criteo's. In Parquet, `dense` defaults to the scalar numbers, `sparse` to the strings and the lists that no
    other option names. Raises MesetaError for a file with other columns, a missing column or one of a wrong type.
    """
    if sources[0].kind == "tsv":
        if dense or sparse or label != "label":
            raise MesetaError("prepare: --label, --dense and --sparse are for Parquet; the columns of TSV are Criteo's")
        for source in sources:
            _check_first_line(source)
        return CRITEO
    layouts = [_parquet_layout(source, label, dense, sparse) for source in sources]
    for source, layout in zip(sources, layouts, strict=True):
        if layout != layouts[0]:
            raise MesetaError(
                f"source {str(source.path)!r} has other columns than {str(sources[0].path)!r}: "
                f"{_difference(layouts[0], layout)}; name what you want with --dense and --sparse"
            )
    return layouts[0]


def _check_first_line(source: Source) -> None:
    num_fields = first_line(source).count(b"\t") + 1
    if num_fields == NUM_DENSE + NUM_SPARSE:
        raise MesetaError(
            f"source {str(source.path)!r} has 39 fields in its first line: rows without a label, as in the test.txt of "
            "the Kaggle contest, can be neither trained on nor evaluated; give files with a label in front (40 fields)"
        )
    if num_fields != 1 + NUM_DENSE + NUM_SPARSE:
        raise MesetaError(
            f"source {str(source.path)!r} has {num_fields} tab-separated fields in its first line, expected 40: "
            "label, 13 integers, 26 categories; is it a Criteo click log? Other data can come as Parquet"
        )


def _parquet_layout(source: Source, label: str, dense: Sequence[str], sparse: Sequence[str]) -> Layout:
    schema = parquet_schema(source)
    where = f"source {str(source.path)!r}"
    for name in (label, *dense, *sparse):
        if name not in schema.names:
            raise MesetaError(f"{where} has no column {name!r}; {nearest(name, schema.names)}")
    named = {label, *dense, *sparse}
    weights = {f"{name}.weight" for name in schema.names}
    if not dense:
        dense = [f.name for f in schema if f.name not in named and _is_number(f.type)]
    if not sparse:
        sparse = [f.name for f in schema if f.name not in {*named, *weights} and (_is_list(f.type) or _is_text(f.type))]
    for name in (label, *dense):
        if not _is_number(schema.field(name).type):
            raise MesetaError(f"{where}: column {name!r} must be a number, but is {schema.field(name).type}")
    if not dense and not sparse:
        raise MesetaError(f"{where} has no feature beside the label {label!r}; name some with --dense and --sparse")
    layout = Layout(
        label=label, dense=tuple(dense), sparse=tuple(_sparse_column(where, schema, name) for name in sparse)
    )
    features = layout.columns[1:]
    for name in features:
        if name in ("label", label) or features.count(name) > 1 or schema.names.count(name) > 1:
            raise MesetaError(
                f"{where}: column {name!r} is used twice (label {label!r} is written as 'label'); rename it"
            )
    return layout


def _sparse_column(where: str, schema: pa.Schema, name: str) -> SparseColumn:
    kind = schema.field(name).type
    multi_valued = _is_list(kind)
    item = kind.value_type if multi_valued else kind
    if not (_is_text(item) or pa.types.is_integer(item)):
        raise MesetaError(f"{where}: column {name!r} must hold strings, integers or lists of them, but is {kind}")
    weight = f"{name}.weight"
    weighted = multi_valued and weight in schema.names
    if weighted:
        weight_type = schema.field(weight).type
        if not (_is_list(weight_type) and _is_number(weight_type.value_type)):
            raise MesetaError(f"{where}: column {weight!r} must hold lists of numbers, but is {weight_type}")
    return SparseColumn(name=name, multi_valued=multi_valued, weighted=weighted)


def _difference(expected: Layout, found: Layout) -> str:
    for name in expected.columns:
        if name not in found.columns:
            return f"it lacks {name!r}"
    for name in found.columns:
        if name not in expected.columns:
            return f"it has {name!r} besides"
    return "some are lists in one file only"


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return any(
        check(kind)
        for check in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    )
