"""Descriptions of features and sources in dataset.json, made from the results of preparation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meseta.data.dataset.dataset import SourceForm
from meseta.data.dataset.records import DenseFeature, SparseFeature
from meseta.data.dataset.statistics import FeatureStatistics, Moments
from meseta.data.dataset.unseen_values import LookupCounter
from meseta.data.dataset.vocabulary import Vocabulary
from meseta.data.formats.format import RawFormat
from meseta.data.schema.layout import RawLayout, SparseColumn
from meseta.spec import MesetaError
from meseta.system.files import MAX_DOCUMENT_BYTES, MAX_DOCUMENT_VALUES, count_json_values


@dataclass(frozen=True, kw_only=True)
class FeatureTables:
    """Encodings and statistics of the sparse features, by name."""

    num_embeddings: Mapping[str, int]
    hash_seeds: Mapping[str, int]
    vocabularies: Mapping[str, Vocabulary]
    """Vocabularies by feature. Other features are hashed or bucketized."""
    statistics: Mapping[str, FeatureStatistics]
    test_lookups: Mapping[str, LookupCounter]
    """Counters of the test split, for the features whose unseen values can be counted."""


MAX_DENSE_VALUES, MAX_SPARSE_VALUES, MAX_SOURCE_VALUES = 8, 80, 4
"""Maximum number of JSON values that one feature or one source takes in dataset.json. Boundaries are extra."""
MAX_DENSE_BYTES, MAX_SPARSE_BYTES, MAX_SOURCE_BYTES, MAX_BOUNDARY_BYTES = 256, 2048, 128, 32
"""Maximum number of bytes of such an entry, without names."""
MAX_NAME_OCCURRENCES = 4
"""Maximum number of times that dataset.json contains the name of a column."""
RESERVED_VALUES, RESERVED_BYTES = 20_000, 1 << 20
"""Reserve for the rest of dataset.json, mainly the files of the splits. They take two values per 524,288 rows."""
MAX_CATEGORICAL_FEATURES, MAX_NUMERIC_FEATURES = (
    int(round((MAX_DOCUMENT_VALUES - RESERVED_VALUES) / values, -3)) for values in (MAX_SPARSE_VALUES, MAX_DENSE_VALUES)
)
"""Number of features that fit if all are of one kind, rounded to thousands."""


def check_description_size(where: str, layout: RawLayout, paths: Sequence[str]) -> None:
    """Raise MesetaError if dataset.json could exceed the limits for JSON documents.

    `where` starts the message. `paths` are the paths of the sources.
    """
    num_dense, num_sparse, num_sources = len(layout.dense), len(layout.sparse), len(paths)
    cuts = [column.buckets for column in layout.sparse if column.buckets]
    num_boundaries = sum(max(cut.num_quantiles or 0, len(cut.boundaries)) for cut in cuts)
    made_of = [name for column in layout.sparse for name in column.made_of]
    # As JSON, because escaped characters make names longer.
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
            f"dataset.json would have up to {num_values:,} values in {num_bytes:,} bytes, but may have "
            f"{MAX_DOCUMENT_VALUES:,} in {MAX_DOCUMENT_BYTES:,}, which is enough for about "
            f"{MAX_CATEGORICAL_FEATURES:,} categorical or {MAX_NUMERIC_FEATURES:,} numeric "
            "features. Leave columns out with --ignore, or select columns with a --schema file"
        )


def describe_dense(layout: RawLayout, moments: Moments) -> tuple[DenseFeature, ...]:
    """Describe the dense features in the order of the layout."""
    columns = zip(layout.dense, moments.mean.tolist(), moments.std.tolist(), strict=True)
    return tuple(
        DenseFeature(name=name, fill=0.0, signed=layout.is_signed(name), mean=mean, std=std)
        for name, mean, std in columns
    )


def describe_sparse(layout: RawLayout, tables: FeatureTables) -> tuple[SparseFeature, ...]:
    """Describe the sparse features in the order of the layout."""
    return tuple(_describe(column, tables) for column in layout.sparse)


def make_source_form(layout: RawLayout, raw_format: RawFormat) -> SourceForm:
    """Describe the properties of the raw files that the features do not contain."""
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
