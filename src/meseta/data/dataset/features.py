"""The description of a prepared dataset, from what preparing found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meseta.data.dataset.dataset import DenseFeature, SourceForm, SparseFeature
from meseta.data.dataset.statistics import FeatureStatistics, Moments
from meseta.data.dataset.vocabulary import Vocabulary
from meseta.data.formats.format import RawFormat
from meseta.data.layout import RawLayout, SparseColumn


@dataclass(frozen=True, kw_only=True)
class Tables:
    """How the sparse features become rows of tables."""

    num_embeddings: Mapping[str, int]
    """Table rows of every feature."""
    hash_seeds: Mapping[str, int]
    vocabularies: Mapping[str, Vocabulary]
    """Of the features that have one; the others are hashed, or cut into buckets."""
    statistics: Mapping[str, FeatureStatistics]


def describe_dense(layout: RawLayout, moments: Moments) -> tuple[DenseFeature, ...]:
    """The dense features in the layout's order."""
    columns = zip(layout.dense, moments.mean.tolist(), moments.std.tolist(), strict=True)
    return tuple(
        DenseFeature(name=name, fill=0.0, signed=name in layout.signed, mean=mean, std=std)
        for name, mean, std in columns
    )


def describe_sparse(layout: RawLayout, tables: Tables) -> tuple[SparseFeature, ...]:
    """The sparse features in the layout's order."""
    return tuple(_describe(column, tables) for column in layout.sparse)


def source_form(layout: RawLayout, raw_format: RawFormat) -> SourceForm:
    """What the features alone do not say of the files that they come from."""
    weights = {column.name: column.weight or column.weight_separator for column in layout.sparse}
    return SourceForm(
        kind=raw_format.name,
        labels=layout.labels,
        label_rules=layout.label_rules,
        group=layout.group,
        delimiter=layout.delimiter,
        header=layout.header if raw_format.is_delimited else (),
        separators={column.name: column.separator for column in layout.sparse if column.separator is not None},
        weights={name: sign for name, sign in weights.items() if sign is not None},
    )


def _describe(column: SparseColumn, tables: Tables) -> SparseFeature:
    vocabulary = tables.vocabularies.get(column.name)
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
    )
