"""The columns of an earlier dataset, to be found again in further raw files."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from meseta.data.dataset.dataset import Dataset, SourceForm, SparseFeature
from meseta.data.formats.parquet_layout import parquet_layout_of
from meseta.data.formats.parse_svm import has_label
from meseta.data.formats.sample import csv_header, csv_sample, parquet_sample
from meseta.data.layout import NO_CATEGORY, BucketRule, RawLayout, SparseColumn
from meseta.data.prepare.sources import KIND_NAMES, Source, find_sources, first_line
from meseta.data.schema.find import CRITEO, check_features, column_names
from meseta.data.schema.guess import MISSING
from meseta.data.schema.schema import Schema
from meseta.spec import MesetaError
from meseta.spec.checks import doubled

_SVM = ("libsvm", "libffm")


def layout_of_dataset(dataset: Dataset) -> RawLayout:
    """The layout that it was prepared with. Raises MesetaError where dataset.json does not tell it, as those of older
    versions do not tell all, or tells what no layout is."""
    where = f"dataset {str(dataset.dir)!r}"
    form = dataset.source_form
    features = [*(f.name for f in dataset.dense), *(f.name for f in dataset.sparse)]
    group = dataset.group if form is None else form.group
    if form is None and group is not None and group not in features:
        group = group.removesuffix(".group") if group.removesuffix(".group") in features else group
    for column in dataset.dense:
        if column.fill != 0:
            raise MesetaError(
                f"{where}: missing values of {column.name!r} were filled with {column.fill:g}, and prepare fills with "
                "0; prepare the new rows as the others were"
            )
    layout = RawLayout(
        labels=_labels(where, dataset),
        dense=tuple(column.name for column in dataset.dense),
        signed=tuple(column.name for column in dataset.dense if column.signed),
        sparse=tuple(_sparse_column(where, feature, form) for feature in dataset.sparse),
        weight=dataset.weight,
        group=group,
        time=dataset.time,
        delimiter=form.delimiter if form else ",",
        header=form.header if form else (),
    )
    check_features(where, layout)
    if cut := doubled(column.buckets.column for column in layout.sparse if column.buckets):
        raise MesetaError(f"{where}: column {sorted(cut)[0]!r} is cut into buckets twice; {_AGAIN}")
    if layout.group_column != dataset.group:
        raise MesetaError(
            f"{where}: the group is column {dataset.group!r}, and source_form tells of another; " + _AGAIN
        )
    return layout


_AGAIN = "prepare the dataset again"


def _labels(where: str, dataset: Dataset) -> tuple[str, ...]:
    """Columns of all labels, also where the dataset was reduced to some."""
    labels: tuple[str, ...] = (dataset.label_source,) if dataset.label_source is not None else dataset.labels
    if dataset.source_form is not None:
        labels = dataset.source_form.labels
    if not dataset.can_come_from(labels):
        raise MesetaError(f"{where}: which columns its labels {', '.join(dataset.labels)} were is not kept; {_AGAIN}")
    return labels


def _sparse_column(where: str, feature: SparseFeature, form: SourceForm | None) -> SparseColumn:
    name, made_of = feature.name, feature.made_of
    if feature.encoding == "buckets":
        boundaries = feature.boundaries or ()
        if len(made_of) != 1 or not all(a < b for a, b in itertools.pairwise(boundaries)):
            raise MesetaError(f"{where}: buckets of {name!r} must be of one column and ascend; {_AGAIN}")
        if feature.num_embeddings != len(boundaries) + 2 or feature.multi_valued:
            raise MesetaError(f"{where}: {len(boundaries)} boundaries of {name!r} make another table; {_AGAIN}")
        return SparseColumn(name=name, buckets=BucketRule(column=made_of[0], boundaries=boundaries))
    if len(made_of) > 1:
        return SparseColumn(name=name, cross=made_of)
    if name == NO_CATEGORY.name and feature.multi_valued and not feature.statistics.num_lookups:
        return NO_CATEGORY
    if form is None and feature.multi_valued and not name.startswith(("field_", "features")):
        raise MesetaError(
            f"{where} was prepared by an older version, which did not keep how the lists of {name!r} are written; "
            "prepare it again, and train on that"
        )
    weight, separator = (form.weights.get(name), form.separators.get(name)) if form else (None, None)
    is_text = form is not None and form.kind == "csv"
    if is_text and feature.multi_valued and (separator is None or feature.weighted != (weight is not None)):
        raise MesetaError(f"{where}: source_form does not tell how the values of {name!r} are written; {_AGAIN}")
    return SparseColumn(
        name=name,
        column=made_of[0] if made_of else None,
        multi_valued=feature.multi_valued,
        weighted=feature.weighted,
        weight=None if is_text else weight,
        separator=separator,
        weight_separator=weight if is_text else None,
    )


def find_alike(dataset: Dataset, patterns: Sequence[str]) -> tuple[tuple[Source, ...], RawLayout]:
    """Raw files with the columns of an earlier dataset, in any order and among others; and the layout of their rows.

    It has no labels where no file has them, or none but empty ones, and then no weight; a group and a time are left out
    where a file lacks them, if there are no labels, for which groups count. All rows are for testing.
    Raises MesetaError as `find_sources` does, and for a feature or one of several labels that a file lacks, for
    files of another kind, and for columns of types that no longer fit.
    """
    layout, form = layout_of_dataset(dataset), dataset.source_form
    delimiter = layout.delimiter if form and form.kind == "csv" else None
    sources = find_sources(patterns, {}, rest_is_parted=False, delimiter=delimiter)
    sources = tuple(replace(source, split="test") for source in sources)
    _check_kind(dataset, layout, sources[0])
    if layout.header and sources[0].kind == "csv":
        sources = tuple(_with_header(source, layout) for source in sources)
    names = [_names(source, layout) for source in sources]
    empty = _empty_labels(sources, [name for name in layout.labels if any(name in present for present in names)])
    names = [[name for name in present if name not in empty] for present in names]
    layout = _with_samples(sources, names, layout)
    for source, present in zip(sources, names, strict=True):
        _check_columns(source, present, layout)
    if sources[0].kind == "parquet":
        for source in sources:
            _check_types(source, layout, dataset)
    return sources, layout


def _check_kind(dataset: Dataset, layout: RawLayout, source: Source) -> None:
    """Raise MesetaError where files of this kind cannot hold the rows."""
    kind = dataset.source_form.kind if dataset.source_form else None
    if source.kind == "tsv":
        fits = kind in ("tsv", None) and replace(layout, labels=CRITEO.labels) == CRITEO
    elif source.kind in _SVM:
        fits = kind in (source.kind, None)
    else:
        has_lists = any(column.multi_valued and not column.is_empty for column in layout.sparse)
        fits = kind == source.kind or (kind not in _SVM and not has_lists)
    if not fits:
        known = KIND_NAMES[kind] if kind else "files with other columns"
        raise MesetaError(
            f"source {source.path!r} is {KIND_NAMES[source.kind]}, and dataset {str(dataset.dir)!r} was prepared from "
            f"{known}; give rows of that form"
        )


def _with_header(source: Source, layout: RawLayout) -> Source:
    """CSV that does not begin with names: of all columns, or of all but the labels. One that does has them itself."""
    first = csv_header(source)
    if set(layout.feature_columns) <= set(first):
        return source
    rest = tuple(name for name in layout.header if name not in layout.labels)
    for header in (layout.header, rest):
        if len(header) == len(first):
            return replace(source, header=header)
    raise MesetaError(
        f"source {source.path!r} has {len(first)} columns and no names for them; the earlier files had "
        f"{len(layout.header)}, or {len(rest)} without the label"
    )


def _names(source: Source, layout: RawLayout) -> Sequence[str]:
    """Columns of a file; of libsvm and libffm, those that its rows may have."""
    if source.kind not in _SVM:
        return column_names(source)
    line = first_line(source)
    labels = layout.labels if has_label(line) else ()
    group = [layout.group] if layout.group is not None and b"qid:" in line else []
    return [*labels, *group, *layout.feature_columns]


def _empty_labels(sources: Sequence[Source], labels: Sequence[str]) -> set[str]:
    """Those of the labels in the files that stand there without a value, in a sample of the rows."""
    if not labels:
        return set()
    if sources[0].kind == "csv":
        texts = csv_sample(sources, labels)
        return {name for name, values in texts.items() if values and all(value in MISSING for value in values)}
    if sources[0].kind == "parquet":
        table = parquet_sample(sources, labels)
        values = {name: table.column(name).combine_chunks() for name in table.column_names}
        return {name for name, column in values.items() if len(column) and _is_empty(column)}
    return set()


def _is_empty(column: pa.Array) -> bool:
    is_number = pa.types.is_floating(column.type)
    return bool(pc.all(pc.is_null(column, nan_is_null=is_number)).as_py())


def _with_samples(sources: Sequence[Source], names: Sequence[Sequence[str]], layout: RawLayout) -> RawLayout:
    """The layout without the labels, if no file has any, and without what goes with them."""
    lacking = {
        name: source.path for source, present in zip(sources, names, strict=True) for name in layout.labels
        if name not in present
    }  # fmt: skip
    if not lacking:
        return layout if layout.time in _common(names) else replace(layout, time=None)
    if any(name in present for present in names for name in layout.labels):
        name, path = next(iter(lacking.items()))
        raise MesetaError(
            f"source {path!r} has no column {name!r}, and other labels are there; give all labels, or none of them to "
            "predict without"
        )
    common = _common(names)
    group, time = (name if name in common else None for name in (layout.group, layout.time))
    return replace(layout, labels=(), weight=None, group=group, time=time)


def _common(names: Sequence[Sequence[str]]) -> set[str | None]:
    return {name for name in names[0] if all(name in present for present in names)}


def _check_columns(source: Source, present: Sequence[str], layout: RawLayout) -> None:
    lacking = [name for name in layout.columns if name not in present]
    if lacking:
        shown = ", ".join(map(repr, lacking[:8])) + (f" and {len(lacking) - 8} more" if len(lacking) > 8 else "")
        roles = {layout.weight: "the weight of samples", layout.group: "the group"}
        only = [name for name in lacking if name not in layout.feature_columns]
        way_out = (
            f"it is {roles.get(only[0], 'no feature')}, which goes with labels: give it, or leave the labels out"
            if len(only) == len(lacking)
            else "the model was trained on all features, so each must be there"
        )
        raise MesetaError(f"source {source.path!r} lacks {shown}; {way_out}")
    for name in layout.columns:
        if list(present).count(name) > 1:
            raise MesetaError(f"source {source.path!r}: {name!r} is the name of two columns; rename one")


def _check_types(source: Source, layout: RawLayout, dataset: Dataset) -> None:
    """Raise MesetaError where columns of Parquet are of types that do not fit their roles."""
    plain = [column for column in layout.values if not column.cross]
    wanted = Schema.model_construct(
        labels=list(layout.labels),
        weight=layout.weight,
        group=layout.group,
        time=layout.time,
        dense=list(layout.dense),
        signed=list(layout.signed),
        categorical=[column.raw for column in plain],
        weights={column.raw: column.weight for column in plain if column.weight is not None},
        buckets={c.buckets.column: list(c.buckets.boundaries) for c in layout.sparse if c.buckets},
        crosses={column.name: list(column.cross) for column in layout.sparse if column.cross},
    )
    present = parquet_layout_of(source, wanted)
    for now, before in zip(present.sparse, layout.sparse, strict=True):
        if (now.multi_valued, now.weighted) != (before.multi_valued, before.weighted):
            kinds = {True: "lists", False: "single values"}
            other = "with weights" if before.weighted else "without weights"
            raise MesetaError(
                f"source {source.path!r}: column {before.raw!r} must hold {kinds[before.multi_valued]} {other}, as in "
                f"dataset {str(dataset.dir)!r}"
            )
