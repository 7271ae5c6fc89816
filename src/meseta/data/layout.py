"""Which raw columns are the label, the dense and the sparse features, for all sources together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meseta.data.guess import SAMPLE_ROWS, guess_label, guess_text_column, only_one_each
from meseta.data.parquet_layout import guess_special, parquet_layout, parquet_layout_of
from meseta.data.schema import Layout, Schema, SparseColumn, check_names, layout_of
from meseta.data.sources import Source, csv_sample, first_line
from meseta.data.svm_layout import OnRows, svm_layout
from meseta.spec import MesetaError
from meseta.spec.checks import doubled
from meseta.spec.files import first_alike

NUM_DENSE = 13
NUM_SPARSE = 26
_DENSE = tuple(f"int_{i}" for i in range(NUM_DENSE))
_SPARSE = tuple(f"cat_{i}" for i in range(NUM_SPARSE))
CRITEO = Layout(
    labels=("label",),
    dense=_DENSE,
    sparse=tuple(SparseColumn(name=name) for name in _SPARSE),
    delimiter="\t",
    header=("label", *_DENSE, *_SPARSE),
)
"""Both Criteo layouts, Kaggle and 1TB: label, 13 integers, 26 categories."""


def find_layout(
    sources: Sequence[Source],
    label: str | None = None,
    dense: Sequence[str] = (),
    sparse: Sequence[str] = (),
    schema: Schema | None = None,
    on_scan: OnRows | None = None,
    *,
    skip_bad: bool = False,
) -> Layout:
    """The common layout of all sources: as `schema` says, else as `label`, `dense` and `sparse` say, else inferred.

    TSV is Criteo's. CSV is judged by its header and the first rows of the first file, Parquet by the types of its
    columns, libsvm and libffm by all rows, which `on_scan` follows; with `skip_bad`, by those that can be parsed.
    Raises MesetaError for a file with other columns, a missing column or one of a wrong type.
    """
    kind = sources[0].kind
    if kind == "parquet" and schema and (schema.header or schema.delimiter):
        raise MesetaError("prepare: header and delimiter of the --schema file are for text; leave them out for Parquet")
    if kind == "tsv":
        if dense or sparse or label or schema:
            raise MesetaError(
                "prepare: --label, --dense and --sparse are for CSV and Parquet, and this TSV has the columns of "
                "Criteo's logs; a --schema gives them other roles if it has their names under header, as the one that "
                "--print-schema prints, or a delimiter where the file has names of its own in its first line"
            )
        for source in sources:
            _check_first_line(source)
        return CRITEO
    if kind in ("libsvm", "libffm"):
        wanted = _wanted_fields(label, dense, sparse, schema)
        layout = svm_layout(sources, wanted, on_scan or (lambda rows, share: None), skip_bad=skip_bad)
    elif kind == "csv":
        layout = _csv_layout(sources[0], label, dense, sparse, schema)
        for source in sources[1:]:
            check_names(f"source {str(source.path)!r}", layout.columns, csv_sample(source, 0)[0])
    else:
        # Told by values, and so by those of one file for all.
        special = {} if schema else guess_special(sources[0], {label, *dense, *sparse})
        layouts = [
            parquet_layout_of(source, schema) if schema else parquet_layout(source, label, dense, sparse, special)
            for source in sources
        ]
        layout = layouts[0]
        for source, other in zip(sources, layouts, strict=True):
            if other != layout:
                raise MesetaError(
                    f"source {str(source.path)!r} has other columns than {str(sources[0].path)!r}: "
                    f"{_difference(layout, other)}; name what you want with --dense and --sparse, or --schema"
                )
    _check_features(f"source {str(sources[0].path)!r}", layout)
    return layout


def _wanted_fields(
    label: str | None, dense: Sequence[str], sparse: Sequence[str], schema: Schema | None
) -> Sequence[str]:
    """The features that the options or the schema choose of libsvm or libffm; empty for all."""
    known = {"label", "categorical", "ignore", "group"}
    if label or dense or (schema and (schema.label != "label" or schema.model_fields_set - known)):
        raise MesetaError(
            "prepare: of libsvm and libffm, --sparse or the categorical of a --schema file may choose features; the "
            "label is called 'label', nothing is dense, weights are as found, and qid is the group"
        )
    if schema and not schema.categorical:
        raise MesetaError("prepare: the --schema file names no categorical feature; there is nothing to learn from")
    return schema.categorical if schema else sparse


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
            "label, 13 integers, 26 categories; is it a Criteo click log? Other data can come as Parquet, libsvm or "
            "libffm, as CSV or TSV with a header in files named *.csv or *.tsv (or with .gz), or with any name, "
            "delimiter and header that a --schema file gives"
        )


def _csv_layout(
    source: Source, label: str | None, dense: Sequence[str], sparse: Sequence[str], schema: Schema | None
) -> Layout:
    """As the schema says, else as the options say; what those leave open is inferred from a sample."""
    where = f"source {str(source.path)!r}"
    names, rows = csv_sample(source, 0 if schema else SAMPLE_ROWS)
    if len(names) < 2:
        raise MesetaError(
            f"{where}, line 1: the header has {len(names)} column; CSV needs several, parted by commas, tabs, ';' or "
            "'|', or by the delimiter of a --schema file"
        )
    if schema:
        check_names(where, schema.columns, names)
        layout = _csv_layout_of(schema)
    else:
        if not rows:
            raise MesetaError(f"{where} holds no rows; leave it out, or fetch it again")
        layout = _guessed_layout(where, names, rows, label, dense, sparse)
    check_names(where, layout.columns, names)
    used = layout.columns
    ignored = tuple(name for name in names if name not in used)
    return replace(layout, ignored=ignored, delimiter=source.delimiter, header=source.header)


def _csv_layout_of(schema: Schema) -> Layout:
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


def _guessed_layout(
    where: str,
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    label: str | None,
    dense: Sequence[str],
    sparse: Sequence[str],
) -> Layout:
    """From the names and the first rows of a CSV file; `dense` and `sparse` replace what would be inferred."""
    label = label or guess_label(names)
    if label is None:
        raise MesetaError(
            f"{where}: none of {_listed(names)} has the name of a label; name it with --label, "
            "or put a header in front if those are values"
        )
    check_names(where, [label, *dense, *sparse], names)
    columns = {name: [row[i] for row in rows if i < len(row)] for i, name in enumerate(names)}
    guesses = {name: guess_text_column(name, values) for name, values in columns.items() if name != label}
    guesses = only_one_each({name: guess for name, guess in guesses.items() if name not in (*dense, *sparse)})
    roles = {name: role for name, (role, _) in guesses.items()}
    sparse = sparse or [name for name, role in roles.items() if role == "categorical"]
    return Layout(
        labels=(label,),
        dense=tuple(dense or [name for name, role in roles.items() if role == "dense"]),
        sparse=tuple(SparseColumn(name=name) for name in sparse),
        weight=next((name for name, role in roles.items() if role == "weight"), None),
        group=next((name for name, role in roles.items() if role == "group"), None),
        time=next((name for name, role in roles.items() if role == "time"), None),
        reasons={name: reason for name, (_, reason) in guesses.items()},
    )


def _check_features(where: str, layout: Layout) -> None:
    if not layout.features:
        labels = ", ".join(map(repr, layout.labels))
        raise MesetaError(
            f"{where} has no feature beside the label {labels}; name some with --dense and --sparse, or in a "
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


def _difference(expected: Layout, found: Layout) -> str:
    for name in expected.columns:
        if name not in found.columns:
            return f"it lacks {name!r}"
    for name in found.columns:
        if name not in expected.columns:
            return f"it has {name!r} besides"
    return "some are lists in one file only"
