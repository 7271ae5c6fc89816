"""The description of a prepared dataset, from what preparing found."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meseta.data.dataset.dataset import DenseFeature, SourceForm, SparseFeature
from meseta.data.dataset.statistics import FeatureStatistics, Moments
from meseta.data.dataset.unseen_values import LookupCounter
from meseta.data.dataset.vocabulary import Vocabulary
from meseta.data.formats.format import RawFormat
from meseta.data.layout import RawLayout, SparseColumn
from meseta.machine.files import MAX_DOCUMENT_BYTES, MAX_DOCUMENT_VALUES, count_json_values
from meseta.spec import MesetaError


@dataclass(frozen=True, kw_only=True)
class FeatureTables:
    """How the sparse features become rows of tables."""

    num_embeddings: Mapping[str, int]
    """Table rows of every feature."""
    hash_seeds: Mapping[str, int]
    vocabularies: Mapping[str, Vocabulary]
    """Of the features that have one; the others are hashed, or cut into buckets."""
    statistics: Mapping[str, FeatureStatistics]
    test_lookups: Mapping[str, LookupCounter]
    """Counters of the test split, for the features whose unseen values can be counted."""


MAX_DENSE_VALUES, MAX_SPARSE_VALUES, MAX_SOURCE_VALUES = 8, 80, 4
"""Most values of a feature, or of a source, in dataset.json, as its reader counts them. Boundaries are extra."""
MAX_DENSE_BYTES, MAX_SPARSE_BYTES, MAX_SOURCE_BYTES, MAX_BOUNDARY_BYTES = 256, 2048, 128, 32
"""Most bytes, without names."""
MAX_NAME_OCCURRENCES = 4
"""Times that dataset.json may hold the name of a column."""
RESERVED_VALUES, RESERVED_BYTES = 20_000, 1 << 20
"""Room for the rest, above all the files of the splits: two values for each 524,288 rows."""
MAX_CATEGORICAL_FEATURES, MAX_NUMERIC_FEATURES = (
    int(round((MAX_DOCUMENT_VALUES - RESERVED_VALUES) / values, -3)) for values in (MAX_SPARSE_VALUES, MAX_DENSE_VALUES)
)
"""Features that fit if all are of one kind, in thousands."""


def check_description_size(where: str, layout: RawLayout, paths: Sequence[str]) -> None:
    """Raise MesetaError, beginning with `where`, if what describes a layout and the sources at `paths` may exceed what
    is read of a dataset.json."""
    num_dense, num_sparse, num_sources = len(layout.dense), len(layout.sparse), len(paths)
    cuts = [column.buckets for column in layout.sparse if column.buckets]
    num_boundaries = sum(max(cut.num_quantiles or 0, len(cut.boundaries)) for cut in cuts)
    made_of = [name for column in layout.sparse for name in column.made_of]
    names = json.dumps(
        "".join([*layout.sample_columns, *layout.feature_names, *made_of, *layout.header, *paths])
    ).encode()
    num_values = (
        MAX_DENSE_VALUES * num_dense + MAX_SPARSE_VALUES * num_sparse + MAX_SOURCE_VALUES * num_sources + num_boundaries
    )
    num_values += len(made_of) + len(layout.header) + MAX_NAME_OCCURRENCES * count_json_values(names) + RESERVED_VALUES
    num_bytes = MAX_DENSE_BYTES * num_dense + MAX_SPARSE_BYTES * num_sparse + MAX_SOURCE_BYTES * num_sources
    num_bytes += MAX_BOUNDARY_BYTES * num_boundaries + MAX_NAME_OCCURRENCES * len(names) + RESERVED_BYTES
    if num_values > MAX_DOCUMENT_VALUES or num_bytes > MAX_DOCUMENT_BYTES:
        raise MesetaError(
            f"{where}: {num_dense:,} numeric and {num_sparse:,} categorical features are too many for one dataset; "
            f"dataset.json may hold {MAX_DOCUMENT_VALUES:,} values in {MAX_DOCUMENT_BYTES:,} bytes, and would have up "
            f"to "
            f"{num_values:,} in {num_bytes:,}: about {MAX_CATEGORICAL_FEATURES:,} categorical or "
            f"{MAX_NUMERIC_FEATURES:,} numeric "
            "features fit. Leave columns out with --ignore, or name those to read in a --schema file"
        )


def describe_dense(layout: RawLayout, moments: Moments) -> tuple[DenseFeature, ...]:
    """The dense features in the layout's order."""
    columns = zip(layout.dense, moments.mean.tolist(), moments.std.tolist(), strict=True)
    return tuple(
        DenseFeature(name=name, fill=0.0, signed=layout.is_signed(name), mean=mean, std=std)
        for name, mean, std in columns
    )


def describe_sparse(layout: RawLayout, tables: FeatureTables) -> tuple[SparseFeature, ...]:
    """The sparse features in the layout's order."""
    return tuple(_describe(column, tables) for column in layout.sparse)


def make_source_form(layout: RawLayout, raw_format: RawFormat) -> SourceForm:
    """What the features alone do not say of the files that they come from."""
    weights = {column.name: column.weight or column.weight_separator for column in layout.sparse}
    return SourceForm(
        kind=raw_format.name,
        labels=layout.labels,
        label_rules=layout.label_rules,
        group=layout.group,
        delimiter=layout.delimiter,
        header=layout.header if raw_format.is_delimited else (),
        encoding=layout.encoding,
        whole_numbers=layout.whole_numbers,
        number_format=layout.number_format,
        partition_keys=layout.partition_keys,
        separators={column.name: column.separator for column in layout.sparse if column.separator is not None},
        weights={name: sign for name, sign in weights.items() if sign is not None},
    )


def _describe(column: SparseColumn, tables: FeatureTables) -> SparseFeature:
    vocabulary, counter = tables.vocabularies.get(column.name), tables.test_lookups.get(column.name)
    is_hashed = vocabulary is None and column.buckets is None
    return SparseFeature(
        name=column.name,
        num_embeddings=tables.num_embeddings[column.name],
        encoding="buckets" if column.buckets else "vocabulary" if vocabulary else "hash",
        multi_valued=column.multi_valued,
        weighted=column.weighted,
        hash_seed=hex(tables.hash_seeds[column.name]) if is_hashed else None,
        vocabulary=vocabulary.path if vocabulary else None,
        vocabulary_digest=vocabulary.digest if vocabulary else None,
        boundaries=column.buckets.boundaries if column.buckets else None,
        made_of=column.made_of,
        statistics=tables.statistics[column.name].result(),
        test_lookups=counter.result() if counter else None,
    )
