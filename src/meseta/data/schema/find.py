"""Which raw columns are the label, the dense and the sparse features, for all sources together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meseta.data.formats.parquet_layout import parquet_layout
from meseta.data.formats.sample import csv_header, csv_sample, first_rows
from meseta.data.formats.svm_layout import OnRows, svm_layout
from meseta.data.layout import RawLayout, SparseColumn
from meseta.data.prepare.sources import FIELDS_OF_CRITEO, Source, first_line, parquet_schema
from meseta.data.schema.guess import guess_column, guess_label, guess_label_by_values, has_negative, is_header
from meseta.data.schema.roles import NamedColumns, reasons_of, schema_of
from meseta.data.schema.schema import Schema, check_names, layout_of
from meseta.machine.files import first_alike
from meseta.spec import MesetaError
from meseta.spec.checks import doubled

_HEADER_ROWS = 100
"""Rows beside which the first line of CSV is judged."""
NUM_DENSE = 13
NUM_SPARSE = 26
_DENSE = tuple(f"int_{i}" for i in range(NUM_DENSE))
_SPARSE = tuple(f"cat_{i}" for i in range(NUM_SPARSE))
CRITEO = RawLayout(
    labels=("label",),
    dense=_DENSE,
    sparse=tuple(SparseColumn(name=name) for name in _SPARSE),
    delimiter="\t",
    header=("label", *_DENSE, *_SPARSE),
)
"""Both Criteo layouts, Kaggle and 1TB: label, 13 integers, 26 categories."""


def find_layout(
    sources: Sequence[Source],
    named: NamedColumns | None = None,
    schema: Schema | None = None,
    on_scan: OnRows | None = None,
    *,
    skip_bad: bool = False,
) -> RawLayout:
    """The common layout of all sources: as `schema` says, else as `named` says, else inferred.

    TSV is Criteo's. CSV and Parquet are judged by the names of columns, their types and a sample of the rows, libsvm
    and libffm by all rows, which `on_scan` follows; with `skip_bad`, by those that can be parsed.
    Raises MesetaError for a file with other columns, a missing column or one of a wrong type.
    """
    named = named or NamedColumns()
    kind = sources[0].kind
    if kind == "parquet" and schema and (schema.header or schema.delimiter):
        raise MesetaError("prepare: header and delimiter of the --schema file are for text; leave them out for Parquet")
    if kind == "tsv":
        if named or schema:
            raise MesetaError(
                "prepare: --label, --dense, --sparse, --ignore, --time are for CSV and Parquet, and this TSV has the "
                "columns of Criteo's logs; a --schema gives them other roles if it has their names under header, as "
                "the one that --print-schema prints, or a delimiter where the file has names of its own in its first "
                "line"
            )
        for source in sources:
            _check_first_line(source)
        return CRITEO
    if kind in ("libsvm", "libffm"):
        wanted = _wanted_fields(named, schema)
        layout = svm_layout(sources, wanted, on_scan or (lambda rows, share: None), skip_bad=skip_bad)
    elif kind == "csv":
        layout = _csv_layout(sources, named, schema)
        for source in sources[1:]:
            check_names(f"source {str(source.path)!r}", layout.columns, csv_header(source))
    else:
        layout = parquet_layout(sources, named, schema)
    check_features(f"source {str(sources[0].path)!r}", layout)
    return layout


def with_header(sources: Sequence[Source]) -> tuple[Source, ...]:
    """The same; CSV that begins with a row instead of names gets column_1, column_2 and so on."""
    first = sources[0]
    if first.kind != "csv" or first.header:
        return tuple(sources)
    record, rows = first_rows(first, _HEADER_ROWS)
    if is_header(record, rows):
        return tuple(sources)
    header = tuple(f"column_{number}" for number in range(1, len(record) + 1))
    return tuple(replace(source, header=header) for source in sources)


def column_names(source: Source) -> tuple[str, ...]:
    """Names of the columns of a file that has such: CSV, Parquet, or Criteo's TSV with a label or without.

    Raises MesetaError for TSV with another number of fields in its first line, and for a damaged file.
    """
    if source.kind == "csv":
        return csv_header(source)
    if source.kind == "parquet":
        return tuple(parquet_schema(source).names)
    num_fields = first_line(source).count(b"\t") + 1
    if num_fields not in FIELDS_OF_CRITEO:
        raise MesetaError(
            f"source {source.path!r} has {num_fields} tab-separated fields in its first line, expected 40 with a label "
            "in front, or 39 without"
        )
    return CRITEO.header[-num_fields:]


def _wanted_fields(named: NamedColumns, schema: Schema | None) -> Sequence[str]:
    """The features that the options or the schema choose of libsvm or libffm; empty for all."""
    known = {"label", "categorical", "ignore", "group"}
    if (
        named.label
        or named.dense
        or named.ignore
        or named.time
        or (schema and (schema.label != "label" or schema.model_fields_set - known))
    ):
        raise MesetaError(
            "prepare: of libsvm and libffm, --sparse or the categorical of a --schema file may choose features; the "
            "label is called 'label', nothing is dense, weights are as found, and qid is the group"
        )
    if schema and not schema.categorical:
        raise MesetaError("prepare: the --schema file names no categorical feature; there is nothing to learn from")
    return schema.categorical if schema else named.sparse


def _check_first_line(source: Source) -> None:
    with_label, without = FIELDS_OF_CRITEO
    num_fields = first_line(source).count(b"\t") + 1
    if num_fields == without:
        raise MesetaError(
            f"source {str(source.path)!r} has 39 fields in its first line: rows without a label, as in the test.txt of "
            "the Kaggle contest, can be neither trained on nor evaluated; give files with a label in front (40), "
            "or let a trained model score these: meseta predict RUN --data"
        )
    if num_fields != with_label:
        raise MesetaError(
            f"source {str(source.path)!r} has {num_fields} tab-separated fields in its first line, expected 40: "
            "label, 13 integers, 26 categories; is it a Criteo click log? Other data can come as Parquet, libsvm or "
            "libffm, as CSV or TSV with a header in files named *.csv or *.tsv (or with .gz), or with any name, "
            "delimiter and header that a --schema file gives"
        )


def _csv_layout(sources: Sequence[Source], named: NamedColumns, schema: Schema | None) -> RawLayout:
    """As the schema says, else as `named` says; what that leaves open is inferred from a sample."""
    source = sources[0]
    where = f"source {str(source.path)!r}"
    names = csv_header(source)
    if len(names) < 2:
        raise MesetaError(
            f"{where}, line 1: the header has {len(names)} column; CSV needs several, parted by commas, tabs, ';' or "
            "'|', or by the delimiter of a --schema file"
        )
    if schema:
        check_names(where, schema.columns, names)
        layout = _csv_layout_of(schema)
    else:
        layout = _guessed_layout(where, sources, names, named)
    check_names(where, layout.columns, names)
    used = layout.columns
    ignored = tuple(name for name in names if name not in used)
    return replace(layout, ignored=ignored, delimiter=source.delimiter, header=source.header)


def _csv_layout_of(schema: Schema) -> RawLayout:
    for name in schema.weights:
        if name not in schema.multi_valued:
            raise MesetaError(
                f"prepare: the schema has weights for {name!r}, but a field of CSV holds one value, unless it is under "
                "multi_valued; then weights name the sign between a value and its weight"
            )
    plain = (
        SparseColumn(
            name=name,
            multi_valued=name in schema.multi_valued,
            weighted=name in schema.weights,
            separator=schema.multi_valued.get(name),
            weight_separator=schema.weights.get(name),
        )
        for name in schema.categorical
    )
    return layout_of(schema, plain)


def _guessed_layout(where: str, sources: Sequence[Source], names: Sequence[str], named: NamedColumns) -> RawLayout:
    """From the `names` of the columns and a sample of CSV files."""
    columns = csv_sample(sources, names)
    if not any(columns.values()):
        raise MesetaError(f"{where} holds no rows; leave it out, or fetch it again")
    labels = named.labels(where, names) or _guessed_labels(where, columns, has_names=not sources[0].header)
    check_names(where, labels, names)
    chosen = named.roles(where, [name for name in names if name not in labels])
    guesses = {
        name: chosen.get(name) or guess_column(name, values) for name, values in columns.items() if name not in labels
    }
    schema = schema_of(labels, guesses, [name for name in guesses if has_negative(columns[name])])
    reasons = reasons_of(guesses)
    if sources[0].header and not named.label:
        reasons[labels[0]] = "0 and 1 alone, in a file without names; --label NAME is another"
    return replace(_csv_layout_of(schema), reasons=reasons)


def _guessed_labels(where: str, columns: Mapping[str, Sequence[str]], *, has_names: bool) -> tuple[str]:
    label = guess_label(list(columns)) if has_names else guess_label_by_values(columns)
    if label is None and has_names:
        raise MesetaError(f"{where}: none of {_listed(list(columns))} has the name of a label; name it with --label")
    if label is None:
        raise MesetaError(
            f"{where}: its first line has no names, so its columns are called {_listed(list(columns))}; no single one "
            "of them holds 0 and 1 alone, so name the label with --label"
        )
    return (label,)


def check_features(where: str, layout: RawLayout) -> None:
    """Raise MesetaError, naming `where`, for a layout without features, and for names that meet in the dataset."""
    if not layout.features:
        labels = ", ".join(map(repr, layout.labels))
        left_out = [f"{name!r}: {layout.reasons[name]}" for name in layout.ignored if name in layout.reasons]
        why = f" ({'; '.join(left_out[:3])}{'; ...' if len(left_out) > 3 else ''})" if left_out else ""
        raise MesetaError(
            f"{where} has no feature beside the label {labels}{why}; name some with --dense and --sparse, or in a "
            "--schema file"
        )
    weights = [f"{column.name}.weight" for column in layout.sparse if column.weighted]
    written = [*layout.sample_columns, *layout.features, *weights]
    twice = {*doubled(written), *set(layout.labels).intersection(layout.features)}
    for name in [*layout.features, *weights, *layout.sample_columns]:
        if name in twice:
            raise MesetaError(
                f"{where}: column {name!r} is used twice (label {layout.labels[0]!r} is written as "
                f"{layout.label_columns[0]!r}); rename it"
            )
    if alike := first_alike(column.name for column in layout.sparse):
        raise MesetaError(
            f"{where}: columns {alike[0]!r} and {alike[1]!r} are one name to file systems that ignore case or spell "
            "accents otherwise, and files are named after them; rename one"
        )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:10]))
    return shown if len(names) <= 10 else f"{shown} and {len(names) - 10} more"
