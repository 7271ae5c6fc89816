"""What the numbers of a dataset mean: all that encoding used, compared where a run meets data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from meseta.data.dataset.dataset import DATASET_FILE, Dataset, DenseFeature, FrozenRecord, LabelRule, SparseEncoding
from meseta.data.dataset.vocabulary import read_vocabulary_values, values_digest
from meseta.spec import MesetaError

_PART_NAMES = {
    "fill": "fill value",
    "signed": "treatment of negative values",
    "mean": "mean",
    "std": "deviation",
    "encoding": "encoding",
    "made_of": "columns that it is made of",
    "boundaries": "buckets",
    "multi_valued": "lists",
    "weighted": "weights",
    "hash_seed": "seed of the hash",
    "num_embeddings": "number of rows",
    "vocabulary_digest": "vocabulary",
}
"""Keys of a column in words, what tells most first."""
_SPELLING_TEXTS = {True: "one value", False: "two values"}
_MAX_SHOWN_CHARACTERS = 40
"""Characters of a value that a message shows."""


class DatasetEncoding(FrozenRecord):
    """What a run keeps of the data that it was trained on; equal ones give the same numbers to the same values."""

    labels: tuple[str, ...]
    """As `Dataset.labels`."""
    label_source: str | None = None
    """As `Dataset.label_source`."""
    label_rules: tuple[LabelRule, ...] = ()
    """As `SourceForm.label_rules`, of these labels."""
    whole_numbers: tuple[str, ...] = ()
    """As `SourceForm.whole_numbers`, of the columns that features are made of, in order of name."""
    dense: tuple[DenseFeature, ...]
    """In the order of the batch's columns."""
    sparse: tuple[SparseEncoding, ...]
    """In the order of the batch's keys."""

    @staticmethod
    def from_dataset(dataset: Dataset) -> DatasetEncoding:
        """That of a dataset, whose files are not looked at."""
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

    def to_dict(self) -> dict[str, Any]:
        """Plain data without what is as by default; `from_dict` reads it back."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @staticmethod
    def from_dict(document: Any, where: str) -> DatasetEncoding:
        """Undo `to_dict`. Raises MesetaError, which begins with `where`, for anything else."""
        try:
            return DatasetEncoding.model_validate(document)
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join(map(str, problem["loc"]))
            raise MesetaError(f"{where}: encoding: {key or 'document'}: {problem['msg']}; use an older one") from None


def with_vocabulary_digests(dataset: Dataset) -> Dataset:
    """The same, with the digests that `prepare` did not write yet taken from the files, where these can be read."""
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
    """The first difference in words, with the number of others; None where there is none. What one of both did not
    keep is taken to be equal, see `unknown`."""
    found = [*_label_differences(before, now), *_column_differences("dense column", before.dense, now.dense)]
    found += _column_differences("sparse feature", before.sparse, now.sparse)
    found += [
        f"column {name!r}, in which 12 and 12.0 were {_SPELLING_TEXTS[name in before.whole_numbers]} and are "
        f"{_SPELLING_TEXTS[name in now.whole_numbers]} now"
        for name in sorted({*before.whole_numbers} ^ {*now.whole_numbers})
    ]
    if not found:
        return None
    return found[0] if len(found) == 1 else f"{found[0]} (and {len(found) - 1:,} other differences)"


def uncomparable_parts(before: DatasetEncoding, now: DatasetEncoding) -> list[str]:
    """What cannot be compared, since one of both did not keep it: by older versions, or without the files."""
    found = []
    if before.labels == now.labels and (before.label_source is None) != (now.label_source is None):
        found.append("the name of the label")
    found += [
        f"the vocabulary of {one.name!r}"
        for one, other in zip(before.sparse, now.sparse, strict=False)
        if "vocabulary" in (one.encoding, other.encoding)
        and (one.vocabulary_digest is None) != (other.vocabulary_digest is None)
    ]
    return found


def row_difference(before: Dataset, now: Dataset) -> str | None:
    """What tells that two datasets of one encoding hold other rows, in words: their files and numbers, and what was
    counted of them; None where nothing does. A recipe has no files, and gives the rows that others have in theirs."""
    if before.recipe or now.recipe:
        before, now = (_without_files(dataset) for dataset in (before, now))
    for name in ("splits", "weight", "group"):
        if getattr(before, name) != getattr(now, name):
            return f"other rows, as {name} in {DATASET_FILE} tells"
    counted = ({feature.name: feature.statistics for feature in dataset.sparse} for dataset in (before, now))
    return f"other rows, as statistics in {DATASET_FILE} tells" if next(counted) != next(counted) else None


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
    """How a label is made, in words."""
    if rule is None:
        return f"column {name!r}"
    return "made from -1 and 1" if rule.is_signed else rule.condition


def _column_differences(
    kind: str, before: Sequence[DenseFeature | SparseEncoding], now: Sequence[DenseFeature | SparseEncoding]
) -> Iterator[str]:
    """Differences of columns of one kind; their places are compared where all are there."""
    mine, theirs = ({column.name: column for column in columns} for columns in (before, now))
    yield from (f"{kind} {name!r} is missing now" for name in mine if name not in theirs)
    yield from (f"{kind} {name!r} was not there before" for name in theirs if name not in mine)
    if mine.keys() == theirs.keys() and list(mine) != list(theirs):
        place, (was, now_there) = _first_change(mine, theirs)
        yield f"order of the {kind}s: number {place} was {was!r} and is {now_there!r} now"
    for name in [name for name in mine if name in theirs]:
        for key in (key for key in _PART_NAMES if key in type(mine[name]).model_fields):
            one, other = getattr(mine[name], key), getattr(theirs[name], key)
            if one != other and not (key == "vocabulary_digest" and None in (one, other)):
                yield f"{kind} {name!r}: {_describe_change(key, one, other)}"


def _first_change(before: Iterable[Any], now: Iterable[Any]) -> tuple[int, tuple[Any, Any]]:
    """Where two of one length begin to differ, from 1, and what stands there."""
    pairs = enumerate(zip(before, now, strict=True), start=1)
    return next((place, pair) for place, pair in pairs if pair[0] != pair[1])


def _describe_change(key: str, one: Any, other: Any) -> str:
    """What became of a key."""
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
