"""Common layout of all sources: which raw columns are labels, dense features and sparse features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meseta.data.dataset.statistics import check_description_size
from meseta.data.formats.format import ColumnRequest, ScanProgress, Source
from meseta.data.schema.layout import RawLayout
from meseta.data.schema.roles import NamedColumns
from meseta.data.schema.schema import Schema
from meseta.errors import duplicates, format_value
from meseta.spec import MesetaError
from meseta.spec.tables import invalid_table_name_reason
from meseta.system.files import first_name_collision


def find_layout(
    sources: Sequence[Source],
    named: NamedColumns | None = None,
    schema: Schema | None = None,
    on_scan: ScanProgress | None = None,
    *,
    skip_bad: bool = False,
) -> RawLayout:
    """Return the common layout of all sources, which have the same format.

    The roles of columns come from `schema`, or else from `named`. Other roles are inferred: those of CSV, JSON and
    Parquet from names, types and a sample of rows, those of libsvm and libffm from all rows. Criteo TSV has a fixed
    layout.

    `on_scan` receives the progress of scans over all rows. With `skip_bad`, scans skip rows that cannot be parsed.

    Raises MesetaError if a file has other columns, a column is missing or has a wrong type, a name cannot be the name
    of a table, or the columns are too many for one dataset.
    """
    asked = ColumnRequest(
        named_columns=NamedColumns() if named is None else named, schema=schema, skip_bad_rows=skip_bad
    )
    if on_scan is not None:
        asked = replace(asked, on_scan=on_scan)
    where = f"source {str(sources[0].path)!r}"
    layout = _add_partition_keys(where, sources, sources[0].format.layout(sources, asked))
    for name in dict.fromkeys([*layout.columns, *layout.labels, *layout.feature_names]):
        if fault := invalid_table_name_reason(name):
            raise MesetaError(
                f"{where}: the name of column {format_value(name)}: {fault}; rename it, or leave the column out"
            )
    check_features(where, layout)
    check_description_size(where, layout, [source.path for source in sources])
    return layout


def _add_partition_keys(where: str, sources: Sequence[Source], layout: RawLayout) -> RawLayout:
    """Return `layout` with columns from folders, ignored if unused. Raises MesetaError if one would be multi-valued."""
    keys = dict.fromkeys(key for source in sources for key in source.partition)
    used, ignored = {*layout.columns}, {*layout.ignored}
    for column in layout.sparse:
        if column.multi_valued and column.raw_column in keys:
            raise MesetaError(
                f"{where}: column {column.raw_column!r} comes from a folder name, which is a single value and "
                "not a list"
            )
    left_out = [key for key in keys if key not in used and key not in ignored]
    in_all = {key for key in keys if all(key in source.partition for source in sources)}
    why = f"a folder, and {sources[0].format.title} has no columns besides its own"
    reasons = {key: why if key in in_all else "a folder that not every file is in" for key in left_out}
    return replace(
        layout,
        partition_keys=tuple(key for key in keys if key in used),
        ignored=(*layout.ignored, *left_out),
        reasons={**layout.reasons, **reasons},
    )


def check_features(where: str, layout: RawLayout) -> None:
    """Raise MesetaError with the prefix `where` if a layout has no features, or two columns of the same name."""
    if not layout.feature_names:
        labels = ", ".join(map(repr, layout.labels))
        left_out = [f"{name!r}: {layout.reasons[name]}" for name in layout.ignored if name in layout.reasons]
        why = f" ({'; '.join(left_out[:3])}{'; ...' if len(left_out) > 3 else ''})" if left_out else ""
        raise MesetaError(
            f"{where} has no feature besides the label {labels}{why}; choose features with --dense and --sparse, or in "
            "a --schema file"
        )
    others = (layout.weight, layout.time, *layout.feature_columns)
    # A feature from the column of a label rule would reveal the label.
    for rule in layout.label_rules:
        if rule.column in others:
            raise MesetaError(
                f"{where}: column {rule.column!r} makes label {rule.name!r} and also has another role, which would "
                "reveal the label; remove the column from the features, the weight and the time"
            )
    weights = [f"{column.name}.weight" for column in layout.sparse if column.weighted]
    written = [*layout.sample_columns, *layout.feature_names, *weights]
    twice = {*duplicates(written), *set(layout.labels).intersection(layout.feature_names)}
    for name in [*layout.feature_names, *weights, *layout.sample_columns]:
        if name in twice:
            raise MesetaError(
                f"{where}: column {name!r} is used twice (label {layout.labels[0]!r} is written as "
                f"{layout.label_columns[0]!r}); rename it"
            )
    if collision := first_name_collision(column.name for column in layout.sparse):
        raise MesetaError(
            f"{where}: columns {collision[0]!r} and {collision[1]!r} would have the same file name on file systems "
            "that ignore case or normalize accents; rename one"
        )
