"""Preparation of the next part of an earlier dataset: its encoding stays, and vocabularies may grow."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.growth import GrowthRule, VocabularyParts, copy_vocabulary, grow_vocabulary
from meseta.data.dataset.records import SparseFeature
from meseta.data.dataset.statistics import Moments, read_touched
from meseta.data.dataset.vocabulary import Vocabulary, VocabularyCounter
from meseta.data.formats.format import RawFormat, ScanProgress, Source
from meseta.data.formats.registry import find_format
from meseta.data.hash_categories import feature_seed
from meseta.data.prepare.earlier_dataset import check_columns, hash_seeds, layout_from_dataset, match_columns
from meseta.data.prepare.options import PrepareOptions
from meseta.data.schema.find_layout import check_features, find_layout
from meseta.data.schema.layout import RawLayout, SparseColumn
from meseta.data.schema.roles import NamedColumns
from meseta.data.schema.schema import Schema
from meseta.errors import format_value, join_names
from meseta.spec import MesetaError, suggest


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """Earlier dataset whose next part is prepared."""

    dataset: Dataset
    """Description without the features that the options leave out."""
    layout: RawLayout
    """Layout of `dataset`."""
    options: PrepareOptions

    @staticmethod
    def load(options: PrepareOptions, like: Path) -> Continuation:
        """Load the earlier dataset in the folder `like`. Raises MesetaError if it cannot be read, or a column to leave
        out is unknown."""
        dataset = _drop_columns(Dataset.load(like), options.without)
        return Continuation(dataset=dataset, layout=layout_from_dataset(dataset), options=options)

    def match(
        self, sources: Sequence[Source], schema: Schema | None, on_scan: ScanProgress | None = None
    ) -> tuple[tuple[Source, ...], RawLayout]:
        """Return (raw files, layout of their rows). New columns that `schema` or the options name are added at the end.

        Raises MesetaError if a file lacks a column, or labels or types differ from those of the earlier dataset.
        """
        matched, names = match_columns(self.dataset, self.layout, sources)
        for source, present in zip(matched, names, strict=True):
            check_columns(source, present, self.layout, trains=True)
            source.format.check_types(source, self.layout, self.dataset.dir)
        self._check_label()
        options = self.options
        if schema is None and not (options.dense or options.sparse or options.multi_valued):
            return matched, self.layout
        entries = [
            name if (rule := self.layout.label_rule(name)) is None else rule.entry for name in self.layout.labels
        ]
        named = NamedColumns(
            label=entries,
            dense=options.dense,
            sparse=options.sparse,
            multi_valued=options.multi_valued,
            time_features=(),
            buckets=(),
        )
        skip_bad = options.bad_rows == "skip"
        inferred = find_layout(matched[0].format.with_header(matched), named, schema, on_scan, skip_bad=skip_bad)
        return matched, self._add_columns(f"source {matched[0].path!r}", inferred, is_schema=schema is not None)

    def hash_seeds(self, layout: RawLayout) -> dict[str, int]:
        """Return the seed of the hash of each sparse feature."""
        earlier = hash_seeds(self.dataset)
        names = [column.name for column in layout.sparse]
        return {name: earlier.get(name, feature_seed(name, self.dataset.seed)) for name in names}

    def hash_rows(self, layout: RawLayout) -> dict[str, int]:
        """Return the number of table rows of each hashed feature. New features have a vocabulary if earlier ones do."""
        earlier = {f.name: f.num_embeddings for f in self.dataset.sparse if f.encoding == "hash"}
        new = [] if self._features else [column.name for column in layout.encoded_features]
        return {**dict.fromkeys(new, self.options.hash_rows), **earlier}

    @property
    def kept_vocabularies(self) -> frozenset[str]:
        """Features whose vocabularies do not change, so that their values need not be counted."""
        return frozenset() if self.options.grow or self.options.recount else frozenset(self._features)

    def make_vocabulary(
        self, feature: str, counter: VocabularyCounter | None, hash_seed: int, folder: Path
    ) -> Vocabulary:
        """Write the vocabulary of a feature to `folder`, and return it. `counter` is `None` if it does not change."""
        former = self._features.get(feature)
        if former is None or self.options.recount:
            earlier = VocabularyParts.empty()
        else:
            earlier = VocabularyParts.load(self.dataset.dir, former, hash_seed, self.dataset.part)
        if counter is None:
            return copy_vocabulary(feature, earlier, folder)
        return grow_vocabulary(feature, counter.partitions(), earlier, self.rule, hash_seed, folder)

    @cached_property
    def rule(self) -> GrowthRule:
        """Rule of this part, with the minimum count of the first one."""
        options, is_counted = self.options, self.options.grow or self.options.recount
        return GrowthRule(
            min_count=self._min_count,
            part=self.dataset.part + is_counted,
            max_candidates=options.max_candidates,
            retire_after=options.retire_after,
        )

    def mean_and_std(self, layout: RawLayout, moments: Moments) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the mean and the deviation of each dense feature: the earlier ones, or those of new rows."""
        earlier = {column.name: (column.mean, column.std) for column in self.dataset.dense}
        new = zip(layout.dense, moments.mean.tolist(), moments.std.tolist(), strict=True)
        pairs = np.array([earlier.get(name, (mean, std)) for name, mean, std in new]).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    @cached_property
    def touched(self) -> dict[str, NDArray[np.uint8]]:
        """Rows that earlier parts looked up, see `read_touched`."""
        return read_touched(self.dataset)

    def unite_touched(self, touched: Mapping[str, NDArray[np.uint8] | None]) -> dict[str, NDArray[np.uint8] | None]:
        """Return the rows that this part or an earlier one looked up. `None` if they are unknown."""
        hashed = {feature.name for feature in self.dataset.sparse if feature.encoding == "hash"}
        united = {name: bits for name, bits in touched.items() if name not in hashed}
        for name in touched.keys() & hashed:
            now, before = touched[name], self.touched.get(name)
            united[name] = None if now is None or before is None else now | before
        return {name: united[name] for name in touched}

    def source_format(self, raw_format: RawFormat) -> RawFormat:
        """Return the format of the first files, or `raw_format` if it is unknown."""
        return find_format(self.dataset.source_form.kind) if self.dataset.source_form else raw_format

    def complete(self, dataset: Dataset) -> Dataset:
        """Return the description of a part with the facts about earlier parts."""
        has_test = "test" in dataset.splits
        lookups = {} if has_test else {feature.name: feature.test_lookups for feature in self.dataset.sparse}
        sparse = [
            f if f.test_lookups is not None else f.model_copy(update={"test_lookups": lookups.get(f.name)})
            for f in dataset.sparse
        ]
        names = {*(feature.name for feature in dataset.dense), *(feature.name for feature in sparse)}
        counts = any(feature.encoding == "vocabulary" for feature in sparse)
        update = {
            "sparse": tuple(sparse),
            "seed": self.dataset.seed,
            "min_count": self.rule.min_count if counts else None,
            "part": self.rule.part,
            "without": tuple(name for name in self.dataset.without if name not in names),
        }
        return dataset.model_copy(update=update)

    @cached_property
    def _features(self) -> dict[str, SparseFeature]:
        return {feature.name: feature for feature in self.dataset.sparse if feature.encoding == "vocabulary"}

    @property
    def _min_count(self) -> int:
        if self.dataset.min_count is not None:
            return self.dataset.min_count
        # Earlier versions did not record it.
        seeds, dataset = hash_seeds(self.dataset), self.dataset
        parts = (VocabularyParts.load(dataset.dir, f, seeds[f.name], 1) for f in self._features.values())
        return min((part.min_count for part in parts), default=self.options.min_count)

    def _check_label(self) -> None:
        chosen = self.options.label
        labels = [chosen] if isinstance(chosen, str) else [*(chosen or ())]
        for name in labels:
            rule = self.layout.label_rule(name)
            entries = [] if rule is None else [rule.entry, rule.condition]
            if name not in (*self.layout.labels, *self.layout.raw_label_columns, *entries):
                raise _other_label(name, self.dataset, self.layout)

    def _add_columns(self, where: str, inferred: RawLayout, *, is_schema: bool) -> RawLayout:
        """Return the layout with new columns of `inferred`: all of a schema file, or those that the options name."""
        options, layout = self.options, self.layout
        if inferred.labels != layout.labels:
            raise _other_label(", ".join(inferred.labels), self.dataset, layout)
        categories = [entry.partition("=")[0] for entry in options.multi_valued]
        dense = [name for name in inferred.dense if is_schema or _matches(name, options.dense)]
        sparse = [
            column
            for column in inferred.sparse
            if not column.is_empty and (is_schema or _matches(column.raw_column, [*options.sparse, *categories]))
        ]
        self._check_kinds(dense, sparse)
        before = {*layout.feature_names}
        dense = [name for name in dense if name not in before]
        sparse = [column for column in sparse if column.name not in before]
        raw_columns = {*layout.columns}
        whole_numbers = [name for name in inferred.whole_numbers if name not in raw_columns]
        extended = replace(
            layout,
            dense=(*layout.dense, *dense),
            signed=(*layout.signed, *(name for name in inferred.signed if name in dense)),
            ages=(*layout.ages, *(age for age in inferred.ages if age.name in dense)),
            sparse=(*(column for column in layout.sparse if not (column.is_empty and sparse)), *sparse),
            whole_numbers=(*layout.whole_numbers, *whole_numbers),
            partition_keys=tuple(dict.fromkeys([*layout.partition_keys, *inferred.partition_keys])),
        )
        check_features(where, extended)
        return extended

    def _check_kinds(self, dense: Sequence[str], sparse: Sequence[SparseColumn]) -> None:
        for kind, names, others in (
            ("dense", dense, [column.name for column in self.layout.sparse]),
            ("sparse", [column.name for column in sparse], self.layout.dense),
        ):
            for name in names:
                if name in others:
                    other = "sparse" if kind == "dense" else "dense"
                    raise MesetaError(
                        f"prepare: column {name!r} cannot be {kind}, because it is a {other} feature of "
                        f"{str(self.dataset.dir)!r}; leave that one out with --without {name}, or omit --{kind}"
                    )


def missing_counts_note(options: PrepareOptions) -> str | None:
    """Return a note if the vocabularies of an earlier dataset grow, but counts of rare values were not recorded."""
    if options.like is None or not options.grow:
        return None
    dataset = Dataset.load(options.like)
    names = [f.name for f in dataset.sparse if f.encoding == "vocabulary" and f.candidates is None]
    if not names:
        return None
    return (
        f"{str(options.like)!r} has no counts of values without a row, because an older version wrote it; "
        f"counting starts at zero for {join_names([*map(repr, names)], 8)}"
    )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(name == pattern or fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _other_label(name: str, dataset: Dataset, layout: RawLayout) -> MesetaError:
    return MesetaError(
        f"prepare: label {format_value(name)} is not that of {str(dataset.dir)!r}, whose model predicts "
        f"{', '.join(map(repr, layout.labels))}; omit it, or prepare without --like"
    )


def _drop_columns(dataset: Dataset, names: Sequence[str]) -> Dataset:
    """Return a description without columns, and without the features that are made of them."""
    dropped: list[str] = []
    for name in names:
        features = [f.name for f in dataset.dense if name in (f.name, f.age.column if f.age else None)]
        features += [f.name for f in dataset.sparse if name == f.name or name in f.made_of]
        form = dataset.source_form
        group = (dataset.group, form.group if form else None)
        has_role = {"time": name == dataset.time, "weight": name == dataset.weight, "group": name in group}
        if not features and not any(has_role.values()) and name not in dataset.without:
            columns = [*(f.name for f in dataset.dense), *(f.name for f in dataset.sparse)]
            raise MesetaError(
                f"prepare: --without {name!r} is not a column of {str(dataset.dir)!r}; {suggest(name, columns)}"
            )
        dropped += features
        dataset = dataset.model_copy(update={role: None for role, is_named in has_role.items() if is_named})
        if has_role["group"] and form is not None:
            dataset = dataset.model_copy(update={"source_form": form.model_copy(update={"group": None})})
    if dropped and dataset.sparse and all(feature.name in dropped for feature in dataset.sparse):
        raise MesetaError(f"prepare: --without leaves no sparse feature of {str(dataset.dir)!r}; keep one of them")
    return dataset.select(None, dropped, allow_missing=True)
