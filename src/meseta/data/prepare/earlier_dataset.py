"""The columns of an earlier dataset, to be found again in further raw files."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from meseta.data.dataset.dataset import Dataset, SourceForm, SparseFeature
from meseta.data.dataset.vocabulary import load_vocabulary
from meseta.data.formats.encodings import UTF_8
from meseta.data.formats.format import Source
from meseta.data.formats.partitions import check_partition
from meseta.data.formats.registry import find_format
from meseta.data.hash_categories import feature_seed
from meseta.data.layout import NO_CATEGORY, BucketRule, RawLayout, SparseColumn
from meseta.data.prepare.encode import Encoder
from meseta.data.prepare.sources import find_sources
from meseta.data.prepare.splitting import Splitter
from meseta.data.prepare.write import RowFinalizer
from meseta.data.schema.find_layout import check_features
from meseta.errors import duplicates
from meseta.spec import MesetaError


def layout_from_dataset(dataset: Dataset) -> RawLayout:
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
        labels=_label_columns(where, dataset),
        label_rules=form.label_rules if form else (),
        dense=tuple(column.name for column in dataset.dense),
        signed=tuple(column.name for column in dataset.dense if column.signed),
        sparse=tuple(_sparse_column(where, feature, form) for feature in dataset.sparse),
        whole_numbers=form.whole_numbers if form else (),
        number_format=form.number_format if form else None,
        weight=dataset.weight,
        group=group,
        time=dataset.time,
        delimiter=form.delimiter if form else ",",
        header=form.header if form else (),
        encoding=form.encoding if form else None,
        partition_keys=form.partition_keys if form else (),
    )
    check_features(where, layout)
    if cut := duplicates(column.buckets.column for column in layout.sparse if column.buckets):
        raise MesetaError(f"{where}: column {sorted(cut)[0]!r} is cut into buckets twice; {_PREPARE_AGAIN}")
    if layout.group_column != dataset.group:
        raise MesetaError(
            f"{where}: the group is column {dataset.group!r}, and source_form tells of another; " + _PREPARE_AGAIN
        )
    return layout


_PREPARE_AGAIN = "prepare the dataset again"


def _label_columns(where: str, dataset: Dataset) -> tuple[str, ...]:
    """Columns of all labels, also where the dataset was reduced to some."""
    labels: tuple[str, ...] = (dataset.label_source,) if dataset.label_source is not None else dataset.labels
    if dataset.source_form is not None:
        labels = dataset.source_form.labels
    if not dataset.accepts_source_labels(labels):
        raise MesetaError(
            f"{where}: which columns its labels {', '.join(dataset.labels)} were is not kept; {_PREPARE_AGAIN}"
        )
    return labels


def _sparse_column(where: str, feature: SparseFeature, form: SourceForm | None) -> SparseColumn:
    name, made_of = feature.name, feature.made_of
    if feature.encoding == "buckets":
        boundaries = feature.boundaries or ()
        if len(made_of) != 1 or not all(a < b for a, b in itertools.pairwise(boundaries)):
            raise MesetaError(f"{where}: buckets of {name!r} must be of one column and ascend; {_PREPARE_AGAIN}")
        if feature.num_embeddings != len(boundaries) + 2 or feature.multi_valued:
            raise MesetaError(f"{where}: {len(boundaries)} boundaries of {name!r} make another table; {_PREPARE_AGAIN}")
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
    is_text = form is not None and find_format(form.kind).is_delimited
    if is_text and feature.multi_valued and (separator is None or feature.weighted != (weight is not None)):
        raise MesetaError(
            f"{where}: source_form does not tell how the values of {name!r} are written; {_PREPARE_AGAIN}"
        )
    return SparseColumn(
        name=name,
        column=made_of[0] if made_of else None,
        multi_valued=feature.multi_valued,
        weighted=feature.weighted,
        weight=None if is_text else weight,
        separator=separator,
        weight_separator=weight if is_text else None,
    )


def make_encoders(
    dataset: Dataset, layout: RawLayout, splitter: Splitter, *, keep_unlabeled: bool = False
) -> tuple[Encoder, RowFinalizer]:
    """What makes of raw rows what they became, or would have become, in `dataset`; both hold no state that changes.
    `keep_unlabeled` is as of `Encoder`.

    Raises MesetaError for a vocabulary that is missing or damaged.
    """
    hashed = {f.name: f.num_embeddings for f in dataset.sparse if f.encoding == "hash"}
    seeds = {
        f.name: int(f.hash_seed, 16) if f.encoding == "hash" and f.hash_seed else feature_seed(f.name, dataset.seed)
        for f in dataset.sparse
    }
    finisher = RowFinalizer(
        layout,
        np.array([column.mean for column in dataset.dense]),
        np.array([column.std for column in dataset.dense]),
        {f.name: load_vocabulary(dataset.dir, f, seeds[f.name]) for f in dataset.sparse if f.encoding == "vocabulary"},
    )
    encoder = Encoder(layout, splitter, hash_seeds=seeds, hash_rows=hashed, keep_unlabeled=keep_unlabeled)
    return encoder, finisher


def find_matching_sources(
    dataset: Dataset, patterns: Sequence[str], encoding: str | None = None
) -> tuple[tuple[Source, ...], RawLayout]:
    """Raw files with the columns of an earlier dataset, in any order and among others; and the layout of their rows.

    It has no labels where no file has them, or none but empty ones, and then no weight; a group and a time are left out
    where a file lacks them, if there are no labels, for which groups count. All rows are for testing. Text has the
    `encoding` of the earlier files, if no other is given.
    Raises MesetaError as `find_sources` does, and for a feature or one of several labels that a file lacks, for
    files of another kind, and for columns of types that no longer fit.
    """
    layout, form = layout_from_dataset(dataset), dataset.source_form
    delimiter = layout.delimiter if form and find_format(form.kind).is_delimited else None
    if encoding is None and layout.encoding != UTF_8:  # UTF-16 is told by its mark, also after files in UTF-8
        encoding = layout.encoding
    sources = find_sources(patterns, {}, split_rest=False, delimiter=delimiter, encoding=encoding)
    sources = tuple(replace(source, split="test") for source in sources)
    _check_format(dataset, layout, sources[0])
    raw_format = sources[0].format
    sources = tuple(raw_format.with_header_from(_prefer_file_columns(source, layout), layout) for source in sources)
    names = [[*raw_format.columns_for(source, layout), *source.partition] for source in sources]
    labels = [name for name in layout.raw_label_columns if any(name in present for present in names)]
    empty = raw_format.find_empty_columns(sources, labels) if labels else set()
    names = [[name for name in present if name not in empty] for present in names]
    layout = _drop_missing_labels(sources, names, layout)
    for source, present in zip(sources, names, strict=True):
        _check_columns(source, present, layout)
    for source in sources:
        raw_format.check_types(source, layout, dataset.dir)
    return sources, layout


def _prefer_file_columns(source: Source, layout: RawLayout) -> Source:
    """The file, whose columns go before those that its folders make, as they did in files of former versions."""
    names = source.format.columns_for(source, layout) if source.partition else ()
    made = {key: value for key, value in source.partition.items() if key in layout.partition_keys}
    check_partition(f"source {source.path!r}", made, names)
    return replace(source, partition={key: source.partition[key] for key in source.partition if key not in names})


def _check_format(dataset: Dataset, layout: RawLayout, source: Source) -> None:
    """Raise MesetaError where files of this format cannot hold the rows."""
    earlier = find_format(dataset.source_form.kind) if dataset.source_form else None
    if not source.format.can_hold(layout, earlier):
        known = earlier.title if earlier else "files with other columns"
        raise MesetaError(
            f"source {source.path!r} is {source.format.title}, and dataset {str(dataset.dir)!r} was prepared from "
            f"{known}; give rows of that form"
        )


def _drop_missing_labels(sources: Sequence[Source], names: Sequence[Sequence[str]], layout: RawLayout) -> RawLayout:
    """The layout without the labels, if no file has any, and without what goes with them."""
    lacking = {
        name: source.path for source, present in zip(sources, names, strict=True) for name in layout.raw_label_columns
        if name not in present
    }  # fmt: skip
    if not lacking:
        return layout if layout.time in _common_columns(names) else replace(layout, time=None)
    if any(name in present for present in names for name in layout.raw_label_columns):
        name, path = next(iter(lacking.items()))
        raise MesetaError(
            f"source {path!r} has no column {name!r}, and other labels are there; give all labels, or none of them to "
            "predict without"
        )
    common = _common_columns(names)
    group, time = (name if name in common else None for name in (layout.group, layout.time))
    return replace(layout, labels=(), label_rules=(), weight=None, group=group, time=time)


def _common_columns(names: Sequence[Sequence[str]]) -> set[str | None]:
    return set[str | None](names[0]).intersection(*names[1:])


def _check_columns(source: Source, present: Sequence[str], layout: RawLayout) -> None:
    times = Counter(present)
    lacking = [name for name in layout.columns if name not in times]
    if lacking:
        shown = ", ".join(map(repr, lacking[:8])) + (f" and {len(lacking) - 8} more" if len(lacking) > 8 else "")
        roles = {layout.weight: "the weight of samples", layout.group: "the group"}
        features = {*layout.feature_columns}
        only = [name for name in lacking if name not in features]
        made = [name for name in lacking if name in layout.partition_keys]
        if made:
            way_out = f"files of the earlier dataset were in folders '{made[0]}=...'; give the folder above them"
        elif len(only) == len(lacking):
            role = roles.get(only[0], "no feature")
            way_out = f"it is {role}, which goes with labels: give it, or leave the labels out"
        else:
            way_out = "the model was trained on all features, so each must be there"
        raise MesetaError(f"source {source.path!r} lacks {shown}; {way_out}")
    for name in layout.columns:
        if times[name] > 1:
            raise MesetaError(f"source {source.path!r}: {name!r} is the name of two columns; rename one")
