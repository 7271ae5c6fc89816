"""Encoding of a dataset: everything that determines the ids and numbers of a value. Runs compare it with their data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from meseta.data.dataset.dataset import DATASET_FILE, Dataset
from meseta.data.dataset.records import DenseFeature, FrozenRecord, LabelRule, SparseEncoding
from meseta.data.dataset.vocabulary import read_vocabulary_values, values_digest
from meseta.spec import MesetaError

_PART_NAMES = {
    "fill": "fill value",
    "signed": "treatment of negative values",
    "mean": "mean",
    "std": "deviation",
    "age": "period of the ages",
    "encoding": "encoding",
    "made_of": "columns that it is made of",
    "boundaries": "buckets",
    "multi_valued": "lists",
    "weighted": "weights",
    "hash_seed": "seed of the hash",
    "num_embeddings": "number of rows",
    "vocabulary_digest": "vocabulary",
}
"""Names of properties in messages, the most informative first."""
_SPELLING_TEXTS = {True: "one value", False: "two values"}
_MAX_SHOWN_CHARACTERS = 40
"""Maximum number of characters of a value in a message."""


class DatasetEncoding(FrozenRecord):
    """Encoding of the data with which a run was trained. Equal encodings map equal values to equal numbers."""

    labels: tuple[str, ...]
    label_source: str | None = None
    label_rules: tuple[LabelRule, ...] = ()
    """Rules of these labels, as in `SourceForm.label_rules`."""
    whole_numbers: tuple[str, ...] = ()
    """Columns of features in which all spellings of a whole number are one value, sorted by name."""
    dense: tuple[DenseFeature, ...]
    sparse: tuple[SparseEncoding, ...]

    @staticmethod
    def from_dataset(dataset: Dataset) -> DatasetEncoding:
        """Return the encoding of a dataset without reading its files."""
        keys = SparseEncoding.model_fields
        sparse = [SparseEncoding(**{key: getattr(feature, key) for key in keys}) for feature in dataset.sparse]
        form = dataset.source_form
        rules = [] if form is None else form.label_rules
        made_of = {name for feature in dataset.sparse for name in feature.made_of or (feature.name,)}
        return DatasetEncoding(
            labels=dataset.labels,
            label_source=dataset.label_source,
            label_rules=tuple(rule for rule in rules if rule.name in (*dataset.labels, dataset.label_source)),
            whole_numbers=tuple(sorted(made_of.intersection(form.whole_numbers if form else ()))),
            dense=dataset.dense,
            sparse=tuple(sparse),
        )

    @property
    def column_names(self) -> tuple[str, ...]:
        """Names of all dense columns and sparse features."""
        return (*(column.name for column in self.dense), *(feature.name for feature in self.sparse))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data without default values, which `from_dict` reads."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @staticmethod
    def from_dict(document: Any, where: str) -> DatasetEncoding:
        """Restore the result of `to_dict`. Raises MesetaError if it is invalid. `where` starts the message."""
        try:
            return DatasetEncoding.model_validate(document)
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join(map(str, problem["loc"]))
            raise MesetaError(f"{where}: encoding: {key or 'document'}: {problem['msg']}; use an older file") from None


def with_vocabulary_digests(dataset: Dataset) -> Dataset:
    """Return a copy with all vocabulary digests. Digests that earlier versions did not store are computed from the
    files.

    Vocabularies that cannot be read remain without a digest.
    """
    sparse = list(dataset.sparse)
    for place, feature in enumerate(sparse):
        if feature.encoding == "vocabulary" and feature.vocabulary and feature.vocabulary_digest is None:
            try:
                digest = values_digest(read_vocabulary_values(dataset.dir, feature)[1:])
            except MesetaError:
                continue
            sparse[place] = feature.model_copy(update={"vocabulary_digest": digest})
    return dataset.model_copy(update={"sparse": tuple(sparse)})


def encoding_difference(before: DatasetEncoding, now: DatasetEncoding) -> str | None:
    """Describe the first difference and the number of further ones, or return `None` if there is none.

    A part that one of the encodings did not record counts as equal, see `uncomparable_parts`.
    """
    differences = [*_label_differences(before, now), *_column_differences("dense column", before.dense, now.dense)]
    differences += _column_differences("sparse feature", before.sparse, now.sparse)
    differences += [
        f"column {name!r}, in which 12 and 12.0 were {_SPELLING_TEXTS[name in before.whole_numbers]} and are "
        f"{_SPELLING_TEXTS[name in now.whole_numbers]} now"
        for name in sorted({*before.whole_numbers} ^ {*now.whole_numbers})
    ]
    if not differences:
        return None
    return (
        differences[0]
        if len(differences) == 1
        else f"{differences[0]} (and {len(differences) - 1:,} other differences)"
    )


def uncomparable_parts(before: DatasetEncoding, now: DatasetEncoding) -> list[str]:
    """Return the parts that cannot be compared because one of the encodings did not record them."""
    parts = []
    if before.labels == now.labels and (before.label_source is None) != (now.label_source is None):
        parts.append("the name of the label")
    parts += [
        f"the vocabulary of {one.name!r}"
        for one, other in zip(before.sparse, now.sparse, strict=False)
        if "vocabulary" in (one.encoding, other.encoding)
        and (one.vocabulary_digest is None) != (other.vocabulary_digest is None)
    ]
    return parts


def row_difference(before: Dataset, now: Dataset) -> str | None:
    """Describe how the rows of two datasets with the same encoding differ, or return `None` if no difference is known.

    Files, row counts and statistics are compared. A recipe has the same rows as a dataset with files.
    """
    if before.recipe or now.recipe:
        before, now = (_without_files(dataset) for dataset in (before, now))
    for name in ("splits", "weight", "group"):
        if getattr(before, name) != getattr(now, name):
            return f"other rows, as {name} in {DATASET_FILE} shows"
    counted = ({feature.name: feature.statistics for feature in dataset.sparse} for dataset in (before, now))
    return f"other rows, as statistics in {DATASET_FILE} shows" if next(counted) != next(counted) else None


def _without_files(dataset: Dataset) -> Dataset:
    splits = {name: split.model_copy(update={"files": ()}) for name, split in dataset.splits.items()}
    return dataset.model_copy(update={"splits": splits})


def _label_differences(before: DatasetEncoding, now: DatasetEncoding) -> Iterator[str]:
    if before.labels != now.labels:
        yield f"labels, which were {_format_value(before.labels)} and are {_format_value(now.labels)} now"
    elif None not in (before.label_source, now.label_source) and before.label_source != now.label_source:
        yield f"label, which was column {before.label_source!r} and is {now.label_source!r} now"
    rules, rules_now = ({rule.name: rule for rule in encoding.label_rules} for encoding in (before, now))
    for name in [name for name in {**rules, **rules_now} if rules.get(name) != rules_now.get(name)][:1]:
        one, other = (_describe_rule(name, of_encoding.get(name)) for of_encoding in (rules, rules_now))
        yield f"label {name!r}, which was {one} and is {other} now"


def _describe_rule(name: str, rule: LabelRule | None) -> str:
    if rule is None:
        return f"column {name!r}"
    return "made from -1 and 1" if rule.is_signed else rule.condition


def _column_differences(
    kind: str, before: Sequence[DenseFeature | SparseEncoding], now: Sequence[DenseFeature | SparseEncoding]
) -> Iterator[str]:
    """Yield the differences of columns of one kind. Their order is compared only if both have the same columns."""
    old_columns, new_columns = ({column.name: column for column in columns} for columns in (before, now))
    yield from (f"{kind} {name!r} is missing now" for name in old_columns if name not in new_columns)
    yield from (f"{kind} {name!r} is new" for name in new_columns if name not in old_columns)
    if old_columns.keys() == new_columns.keys() and list(old_columns) != list(new_columns):
        place, (was, now_there) = _first_change(old_columns, new_columns)
        yield f"order of the {kind}s: number {place} was {was!r} and is {now_there!r} now"
    for name in [name for name in old_columns if name in new_columns]:
        for key in (key for key in _PART_NAMES if key in type(old_columns[name]).model_fields):
            one, other = getattr(old_columns[name], key), getattr(new_columns[name], key)
            # A digest that one side did not record counts as equal.
            if one != other and not (key == "vocabulary_digest" and None in (one, other)):
                yield f"{kind} {name!r}: {_describe_change(key, one, other)}"


def _first_change(before: Iterable[Any], now: Iterable[Any]) -> tuple[int, tuple[Any, Any]]:
    """Return (position from 1, pair of values) of the first difference between sequences of equal length."""
    pairs = enumerate(zip(before, now, strict=True), start=1)
    return next((place, pair) for place, pair in pairs if pair[0] != pair[1])


def _describe_change(key: str, one: Any, other: Any) -> str:
    if key == "vocabulary_digest":
        return f"vocabulary, whose SHA-256 was {one[:8]}... and is {other[:8]}... now"
    if key == "boundaries" and one and other:
        if len(one) != len(other):
            return f"buckets, whose boundaries were {len(one):,} and are {len(other):,} now"
        place, (one, other) = _first_change(one, other)
        return f"buckets, whose boundary {place} was {one!r} and is {other!r} now"
    return f"{_PART_NAMES[key]}, which was {_format_value(one)} and is {_format_value(other)} now"


def _format_value(value: Any) -> str:
    if isinstance(value, tuple):
        value = ", ".join(map(str, value))
    return repr(value) if len(repr(value)) <= _MAX_SHOWN_CHARACTERS else f"{repr(value)[:_MAX_SHOWN_CHARACTERS]}..."
