"""Which raw columns are the label, the dense and the sparse features, for all sources together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meseta.data.dataset.features import check_description_size
from meseta.data.formats.format import ColumnRequest, ScanProgress, Source
from meseta.data.layout import RawLayout
from meseta.data.schema.roles import NamedColumns
from meseta.data.schema.schema import Schema
from meseta.errors import duplicates, format_value
from meseta.machine.files import first_name_collision
from meseta.spec import MesetaError
from meseta.spec.tables import invalid_table_name_reason


def find_layout(
    sources: Sequence[Source],
    named: NamedColumns | None = None,
    schema: Schema | None = None,
    on_scan: ScanProgress | None = None,
    *,
    skip_bad: bool = False,
) -> RawLayout:
    """The common layout of all sources: as `schema` says, else as `named` says, else inferred.

    TSV is Criteo's. CSV and Parquet are judged by the names of columns, their types and a sample of the rows, libsvm
    and libffm by all rows, which `on_scan` follows; with `skip_bad`, by those that can be parsed.
    Raises MesetaError for a file with other columns, a missing column or one of a wrong type, for a name that no table
    can have, and for more columns than a dataset can describe.
    """
    asked = ColumnRequest(named_columns=named or NamedColumns(), schema=schema, skip_bad_rows=skip_bad)
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
    """The layout that says which of its columns folders make, and which of these it leaves out.

    Raises MesetaError for one of these columns that should hold several values."""
    keys = dict.fromkeys(key for source in sources for key in source.partition)
    used, ignored = {*layout.columns}, {*layout.ignored}
    for column in layout.sparse:
        if column.multi_valued and column.raw_column in keys:
            raise MesetaError(
                f"{where}: column {column.raw_column!r} is made by a folder, which holds one value, and no list"
            )
    left_out = [key for key in keys if key not in used and key not in ignored]
    in_all = {key for key in keys if all(key in source.partition for source in sources)}
    why = f"a folder, and {sources[0].format.title} has no columns beside its own"
    reasons = {key: why if key in in_all else "a folder that not every file is in" for key in left_out}
    return replace(
        layout,
        partition_keys=tuple(key for key in keys if key in used),
        ignored=(*layout.ignored, *left_out),
        reasons={**layout.reasons, **reasons},
    )


def check_features(where: str, layout: RawLayout) -> None:
    """Raise MesetaError, naming `where`, for a layout without features, and for names that meet in the dataset."""
    if not layout.feature_names:
        labels = ", ".join(map(repr, layout.labels))
        left_out = [f"{name!r}: {layout.reasons[name]}" for name in layout.ignored if name in layout.reasons]
        why = f" ({'; '.join(left_out[:3])}{'; ...' if len(left_out) > 3 else ''})" if left_out else ""
        raise MesetaError(
            f"{where} has no feature beside the label {labels}{why}; name some with --dense and --sparse, or in a "
            "--schema file"
        )
    others = (layout.weight, layout.time, *layout.feature_columns)
    for rule in layout.label_rules:
        if rule.column in others:
            raise MesetaError(
                f"{where}: column {rule.column!r} makes label {rule.name!r}, and has another role as well, which would "
                "give the answer away; take it from the features, the weight and the time"
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
    if alike := first_name_collision(column.name for column in layout.sparse):
        raise MesetaError(
            f"{where}: columns {alike[0]!r} and {alike[1]!r} are one name to file systems that ignore case or spell "
            "accents otherwise, and files are named after them; rename one"
        )
