"""Find the columns of an earlier dataset in further raw files."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, cast

import numpy as np

from meseta.data.dataset.dataset import Dataset, SourceForm
from meseta.data.dataset.records import SparseFeature, TimeAge, TimePart
from meseta.data.dataset.vocabulary import load_vocabulary
from meseta.data.formats.encodings import UTF_8
from meseta.data.formats.format import Source
from meseta.data.formats.partitions import check_partition
from meseta.data.formats.registry import find_format
from meseta.data.hash_categories import feature_seed
from meseta.data.prepare.encode import Encoder, Splitter
from meseta.data.prepare.sources import find_sources
from meseta.data.prepare.write import RowFinalizer
from meseta.data.schema.find_layout import check_features
from meseta.data.schema.layout import NO_CATEGORY, NUM_TIME_PARTS, BucketRule, RawLayout, SparseColumn
from meseta.errors import duplicates, join_names
from meseta.spec import MesetaError


def layout_from_dataset(dataset: Dataset) -> RawLayout:
    """Return the layout with which the dataset was prepared.

    Raises MesetaError if dataset.json does not describe a valid layout. Descriptions of older versions may be
    incomplete.
    """
    where = f"dataset {str(dataset.dir)!r}"
    form = dataset.source_form
    features = [*(f.name for f in dataset.dense), *(f.name for f in dataset.sparse)]
    group = dataset.group if form is None else form.group
    # Earlier versions did not record the column of the group. It has the suffix if a feature has the same name.
    if form is None and group is not None and group not in features:
        group = group.removesuffix(".group") if group.removesuffix(".group") in features else group
    for column in dataset.dense:
        if column.fill != 0:
            raise MesetaError(
                f"{where}: missing values of {column.name!r} were filled with {column.fill:g}, but prepare fills with "
                "0; encode the new rows with the program that made the dataset"
            )
    layout = RawLayout(
        labels=_label_columns(where, dataset),
        label_rules=form.label_rules if form else (),
        dense=tuple(column.name for column in dataset.dense),
        ages=_ages(where, dataset),
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
        raise MesetaError(f"{where}: two features have buckets of column {sorted(cut)[0]!r}; {_PREPARE_AGAIN}")
    if layout.group_column != dataset.group:
        raise MesetaError(
            f"{where}: the group is column {dataset.group!r}, but source_form names another; " + _PREPARE_AGAIN
        )
    return layout


_PREPARE_AGAIN = "prepare the dataset again"


def _ages(where: str, dataset: Dataset) -> tuple[TimeAge, ...]:
    ages = {feature.name: feature.age for feature in dataset.dense if feature.age is not None}
    for name, age in ages.items():
        if name != age.name:
            raise MesetaError(f"{where}: the age of column {age.column!r} is called {name!r}; {_PREPARE_AGAIN}")
    return tuple(ages.values())


def _label_columns(where: str, dataset: Dataset) -> tuple[str, ...]:
    """Return the names of all labels, even if the description was reduced to some of them."""
    labels: tuple[str, ...] = (dataset.label_source,) if dataset.label_source is not None else dataset.labels
    if dataset.source_form is not None:
        labels = dataset.source_form.labels
    if not dataset.accepts_source_labels(labels):
        raise MesetaError(
            f"{where}: the raw columns of its labels {', '.join(dataset.labels)} are not recorded; {_PREPARE_AGAIN}"
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
    if feature.encoding in NUM_TIME_PARTS:
        part = cast(TimePart, feature.encoding)
        if len(made_of) != 1 or feature.multi_valued or feature.num_embeddings != NUM_TIME_PARTS[part] + 1:
            raise MesetaError(f"{where}: {part}s of {name!r} must be of one column; {_PREPARE_AGAIN}")
        return SparseColumn(name=name, column=made_of[0], time_part=part)
    if len(made_of) > 1:
        return SparseColumn(name=name, cross=made_of)
    if name == NO_CATEGORY.name and feature.multi_valued and not feature.statistics.num_lookups:
        return NO_CATEGORY
    if form is None and feature.multi_valued and not name.startswith(("field_", "features")):
        raise MesetaError(
            f"{where} was prepared by an older version, which did not record the format of the lists of {name!r}; "
            "prepare it again, and train on the new dataset"
        )
    weight, separator = (form.weights.get(name), form.separators.get(name)) if form else (None, None)
    is_text = form is not None and find_format(form.kind).is_delimited
    if is_text and feature.multi_valued and (separator is None or feature.weighted != (weight is not None)):
        raise MesetaError(f"{where}: source_form has no format of the values of {name!r}; {_PREPARE_AGAIN}")
    return SparseColumn(
        name=name,
        column=made_of[0] if made_of else None,
        multi_valued=feature.multi_valued,
        weighted=feature.weighted,
        weight=None if is_text else weight,
        separator=separator,
        weight_separator=weight if is_text else None,
    )


def hash_seeds(dataset: Dataset) -> dict[str, int]:
    """Return the seed of the hash of each sparse feature, also of those with a vocabulary."""
    return {
        f.name: int(f.hash_seed, 16) if f.encoding == "hash" and f.hash_seed else feature_seed(f.name, dataset.seed)
        for f in dataset.sparse
    }


def make_encoders(
    dataset: Dataset, layout: RawLayout, splitter: Splitter, *, keep_unlabeled: bool = False
) -> tuple[Encoder, RowFinalizer]:
    """Return the encoder and the finalizer that encode raw rows like those of `dataset`. Both are thread-safe.

    `keep_unlabeled` is passed to `Encoder`. Raises MesetaError if a vocabulary is missing or damaged.
    """
    hashed = {f.name: f.num_embeddings for f in dataset.sparse if f.encoding == "hash"}
    seeds = hash_seeds(dataset)
    finisher = RowFinalizer(
        layout,
        np.array([column.mean for column in dataset.dense]),
        np.array([column.std for column in dataset.dense]),
        {f.name: load_vocabulary(dataset.dir, f, seeds[f.name]) for f in dataset.sparse if f.encoding == "vocabulary"},
    )
    encoder = Encoder(layout, splitter, hash_seeds=seeds, hash_rows=hashed, keep_unlabeled=keep_unlabeled)
    return encoder, finisher


def find_earlier_form(
    dataset: Dataset,
    patterns: Sequence[str],
    split_files: Mapping[Literal["valid", "test"], Sequence[str]],
    *,
    split_rest: bool,
    encoding: str | None = None,
) -> tuple[Source, ...]:
    """Return raw files with the delimiter and the encoding of those of `dataset`, see `find_sources`. `encoding`
    replaces that of the earlier files."""
    form = dataset.source_form
    delimiter = form.delimiter if form and find_format(form.kind).is_delimited else None
    # UTF-16 is recognized by its byte order mark, even if the earlier files were in UTF-8.
    if encoding is None and form is not None and form.encoding != UTF_8:
        encoding = form.encoding
    return find_sources(patterns, split_files, split_rest=split_rest, delimiter=delimiter, encoding=encoding)


def find_matching_sources(
    dataset: Dataset, patterns: Sequence[str], encoding: str | None = None
) -> tuple[tuple[Source, ...], RawLayout]:
    """Return (raw files, layout of their rows) for files that have the columns of an earlier dataset.

    The columns may be in any order, and other columns may be present. If no file has labels, or all labels are empty,
    the layout has neither labels nor a weight. A time that a file lacks is left out, and without labels also the group.
    All rows belong to the test split. `encoding` is that of the text, by default that of the earlier files.

    Raises MesetaError as `find_sources` does, if a file lacks a feature or one of several labels, if the files have
    another format, or if the types of columns do not fit.
    """
    layout = layout_from_dataset(dataset)
    sources = find_earlier_form(dataset, patterns, {}, split_rest=False, encoding=encoding)
    sources, names = match_columns(dataset, layout, tuple(replace(source, split="test") for source in sources))
    raw_format = sources[0].format
    labels = [name for name in layout.raw_label_columns if any(name in present for present in names)]
    empty = raw_format.find_empty_columns(sources, labels) if labels else set()
    names = [[name for name in present if name not in empty] for present in names]
    layout = _drop_missing_labels(sources, names, layout)
    for source, present in zip(sources, names, strict=True):
        check_columns(source, present, layout)
    for source in sources:
        raw_format.check_types(source, layout, dataset.dir)
    return sources, layout


def match_columns(
    dataset: Dataset, layout: RawLayout, sources: Sequence[Source]
) -> tuple[tuple[Source, ...], list[list[str]]]:
    """Return (raw files with the names of their columns, these names by file), see `find_matching_sources`.

    Raises MesetaError if the files have another format than those of `dataset`.
    """
    _check_format(dataset, layout, sources[0])
    raw_format = sources[0].format
    sources = tuple(raw_format.with_header_from(_prefer_file_columns(source, layout), layout) for source in sources)
    return sources, [[*raw_format.columns_for(source, layout), *source.partition] for source in sources]


def _prefer_file_columns(source: Source, layout: RawLayout) -> Source:
    # Columns of the file take precedence, because datasets of earlier versions did not use partition columns.
    names = source.format.columns_for(source, layout) if source.partition else ()
    made = {key: value for key, value in source.partition.items() if key in layout.partition_keys}
    check_partition(f"source {source.path!r}", made, names)
    return replace(source, partition={key: source.partition[key] for key in source.partition if key not in names})


def _check_format(dataset: Dataset, layout: RawLayout, source: Source) -> None:
    earlier = find_format(dataset.source_form.kind) if dataset.source_form else None
    if not source.format.can_hold(layout, earlier):
        expected = earlier.title if earlier else "files with other columns"
        raise MesetaError(
            f"source {source.path!r} is {source.format.title}, but dataset {str(dataset.dir)!r} was prepared from "
            f"{expected}; use files of that form"
        )


def _drop_missing_labels(sources: Sequence[Source], names: Sequence[Sequence[str]], layout: RawLayout) -> RawLayout:
    """Return the layout without labels and weight if no file has labels. A group or time that a file lacks is left out
    too."""
    lacking = {
        name: source.path for source, present in zip(sources, names, strict=True) for name in layout.raw_label_columns
        if name not in present
    }  # fmt: skip
    if not lacking:
        return layout if layout.time in _common_columns(names) else replace(layout, time=None)
    if any(name in present for present in names for name in layout.raw_label_columns):
        name, path = next(iter(lacking.items()))
        raise MesetaError(
            f"source {path!r} has no column {name!r}, but other labels are present; provide all labels, or none of "
            "them to predict without labels"
        )
    common = _common_columns(names)
    group, time = (name if name in common else None for name in (layout.group, layout.time))
    return replace(layout, labels=(), label_rules=(), weight=None, group=group, time=time)


def _common_columns(names: Sequence[Sequence[str]]) -> set[str | None]:
    return set[str | None](names[0]).intersection(*names[1:])


def check_columns(source: Source, present: Sequence[str], layout: RawLayout, *, trains: bool = False) -> None:
    """Raise MesetaError if a file with the columns `present` lacks columns of an earlier layout, or has one twice.

    `trains` adds to the remedy that columns can be left out.
    """
    times = Counter(present)
    lacking = [name for name in layout.columns if name not in times]
    if lacking:
        shown = join_names([*map(repr, lacking)], 8)
        raise MesetaError(f"source {source.path!r} lacks {shown}; {_way_out_of_lack(lacking, layout, trains=trains)}")
    for name in layout.columns:
        if times[name] > 1:
            raise MesetaError(f"source {source.path!r}: two columns have the name {name!r}; rename one")


def _way_out_of_lack(lacking: Sequence[str], layout: RawLayout, *, trains: bool) -> str:
    features = {*layout.feature_columns}
    only = [name for name in lacking if name not in features]
    if made := [name for name in lacking if name in layout.partition_keys]:
        return f"the files of the earlier dataset were in folders '{made[0]}=...'; use the folder that contains them"
    if trains and (labels := [name for name in lacking if name in layout.raw_label_columns]):
        return f"training needs the label {labels[0]!r} of the earlier dataset; add it"
    if trains:
        return f"add the columns, or leave them out with --without {','.join(lacking)}"
    if len(only) == len(lacking):
        roles = {layout.weight: "the sample weight", layout.group: "the group"}
        return f"it is {roles.get(only[0], 'no feature')}, which is needed with labels: add it, or remove the labels"
    return "the model needs all features on which it was trained; add the columns"
