"""Records of dataset.json that other modules of data/ share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from meseta.data.schema.text_syntax import invalid_delimiter_reason
from meseta.errors import format_value
from meseta.spec import Reuse
from meseta.system.files import (
    invalid_relative_path_reason,
)


def _check_inner_path(path: str) -> str:
    if fault := invalid_relative_path_reason(path):
        raise ValueError(f"{format_value(path)} must be the path of a file in the folder of the dataset: {fault}")
    return path


SourceSplit = Literal["train", "valid", "test", "both"]
"""Split to which the rows of a raw file go. 'both' assigns each row by itself, randomly by seed or by time."""
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
InnerPath = Annotated[str, AfterValidator(_check_inner_path)]


class FrozenRecord(BaseModel):
    """Immutable part of dataset.json. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TimeAge(FrozenRecord):
    """Age of a row: the share of the training period that had passed at its time."""

    column: str
    """Raw column of times."""
    origin: float = 0.0
    """Time of the first training row, in seconds since 1970-01-01 UTC. Rows before it have age 0."""
    last: float = 0.0
    """Time of the last training row, in seconds since 1970-01-01 UTC. Rows after it have age 1."""

    @property
    def name(self) -> str:
        """Name of the dense feature."""
        return f"{self.column}.age"


TimePart = Literal["hour", "weekday"]


class DenseFeature(FrozenRecord):
    """Numeric input feature, standardized."""

    name: str
    """Column of the Parquet files (float32)."""
    fill: float
    """Raw value that replaces a missing one, before the logarithm."""
    signed: bool = False
    """Whether negative values are kept. The feature is sign(x) * log1p(|x|) if true, log1p(max(x, 0)) if false."""
    mean: float
    """Mean of the logarithms over the training split."""
    std: float = Field(gt=0)
    """Standard deviation of the logarithms over the training split, or 1 for a constant feature."""
    age: TimeAge | None = None
    """Column and period of an age. `None` if the feature is a raw column."""


class SparseStatistics(FrozenRecord):
    """Statistics of a sparse feature, counted on the training split."""

    num_rows: Count
    num_lookups: Count
    num_uniques: Count
    """Number of distinct ids, after hashing or the lookup in the vocabulary."""
    mean_pooling_factor: float = Field(ge=0)
    reuse: Reuse
    """Reuse histogram within windows of samples, summed over all windows. The last window may be shorter."""


class LookupCounts(FrozenRecord):
    """Lookups of a sparse feature in one split. `meseta.data.dataset.statistics` defines unseen values."""

    num_lookups: int = Field(ge=1, lt=1 << 53)
    num_unseen: Count
    """Number of ids whose values do not occur in training."""

    @property
    def unseen_share(self) -> float:
        return self.num_unseen / self.num_lookups

    @model_validator(mode="after")
    def _check(self) -> LookupCounts:
        if self.num_unseen > self.num_lookups:
            raise ValueError(f"{self.num_unseen} of {self.num_lookups} lookups cannot be unseen")
        return self


class SparseEncoding(FrozenRecord):
    """Encoding of the values of a sparse feature as ids."""

    name: str
    """Column of the Parquet files with ids (int32 or int64) or lists of ids."""
    num_embeddings: int = Field(ge=1, lt=1 << 53)
    """Number of rows of the embedding table. Ids are in 0..num_embeddings-1."""
    encoding: Literal["hash", "vocabulary", "buckets", "hour", "weekday"]
    """Rule that maps values to ids.

    'hash': the high 64 bits of XXH64(value, hash_seed) * num_embeddings. 'vocabulary': the id in the vocabulary file.
    'buckets': 0 for a missing number, otherwise 1 + the number of boundaries that are less than or equal to it.
    'hour': 0 for a missing time, otherwise 1 + the hour in UTC. 'weekday': 0 for a missing time, 1 for Monday in UTC.
    """
    multi_valued: bool = False
    weighted: bool = False
    """Whether the column '<name>.weight' holds one weight per id."""
    hash_seed: str | None = Field(default=None, pattern="^0x[0-9a-f]{1,16}$")
    """Seed of the hash function in hexadecimal. `None` if the encoding is not 'hash'."""
    vocabulary_digest: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """SHA-256 of the vocabulary's values in order of their ids. `None` without a vocabulary, or if it was not
    recorded."""
    boundaries: tuple[float, ...] | None = None
    """Bucket boundaries in ascending order. `None` if the encoding is not 'buckets'."""
    made_of: tuple[str, ...] = ()
    """Raw columns of a feature with another name than its column, such as a cross."""


class SparseFeature(SparseEncoding):
    """Sparse feature with its encoding and statistics."""

    vocabulary: InnerPath | None = None
    """Path of a Parquet file with the columns value, id, count and last, relative to the dataset. `None` without a
    vocabulary."""
    candidates: InnerPath | None = None
    """Path of a Parquet file with hashes and counts of values without a row, see `meseta.data.dataset.growth`. `None`
    if they were not recorded."""
    num_added: Count = 0
    """Number of values that the last part added to the vocabulary of earlier parts."""
    num_retired: Count = 0
    """Number of values of earlier parts that lost their row in the last part."""
    statistics: SparseStatistics
    test_lookups: LookupCounts | None = None
    """Lookups in the test split that was made with the training split of `statistics`, or in the last earlier one if
    there is none. `None` if that split has no ids, or if unseen values cannot be counted."""


class DataFile(FrozenRecord):
    """Parquet file of a split."""

    path: InnerPath
    num_rows: Count


class Split(FrozenRecord):
    """One split, with its totals."""

    num_rows: Count
    num_positives: float = Field(ge=0)
    """Sum of the labels. With several labels, sum of the first one."""
    positives: dict[str, float] = {}
    """Sum of each label. Empty if there is only one label."""
    known: dict[str, Count] = {}
    """Number of samples that have each label. Empty if all samples have all labels."""
    files: tuple[DataFile, ...]
    """Parquet files in the order of their rows. Empty if the dataset is a recipe."""

    @property
    def base_rates(self) -> dict[str, float]:
        """Mean of each label over the samples that have it, or 0 without samples. The key of a single label is ''."""
        sums = self.positives or {"": self.num_positives}
        return {label: total / max(self.known.get(label, self.num_rows), 1) for label, total in sums.items()}

    @model_validator(mode="after")
    def _check(self) -> Split:
        if any(number > self.num_rows for number in self.known.values()):
            raise ValueError(f"known must be at most num_rows ({self.num_rows}) for each label")
        total = sum(file.num_rows for file in self.files)
        if total != self.num_rows and self.files:
            raise ValueError(f"its files hold {total} rows, but num_rows is {self.num_rows}")
        return self


class SourceFile(FrozenRecord):
    """Raw file from which the dataset was made."""

    path: str
    """Path as found when the sources were listed."""
    split: SourceSplit
    """Split that receives the rows. 'both' assigns each row by itself, randomly by seed or by time."""
    num_rows: Count


class BadRows(FrozenRecord):
    """Skipped rows of the raw files that could not be parsed."""

    num_rows: int = Field(ge=0)
    first: tuple[str, ...]
    """File, line and error of the first few skipped rows."""


def _check_separator(text: str) -> str:
    if not text.isascii() or text in '"\r\n':
        raise ValueError(f"{format_value(text)} must be one ASCII character other than a quote or a line end")
    return text


def _check_delimiter(text: str) -> str:
    if problem := invalid_delimiter_reason(text):
        raise ValueError(f"{format_value(text)} {problem}")
    return text


Delimiter = Annotated[str, AfterValidator(_check_delimiter)]
Sign = Annotated[str, Field(min_length=1, max_length=1), AfterValidator(_check_separator)]
ColumnName = Annotated[str, Field(min_length=1)]


class LabelRule(FrozenRecord):
    """Rule that makes a label of 0 and 1 from a raw column that is not a label itself."""

    name: ColumnName
    column: ColumnName
    operator: Literal[">=", "<=", "==", "!=", ">", "<"] | None = None
    """Comparison of the value with `threshold`, true for label 1. `None` if `is_signed`."""
    threshold: float = 0.0
    is_signed: bool = False
    """Whether the raw column holds 1 for positives and -1 for negatives."""

    @property
    def condition(self) -> str:
        """Text `COLUMN OPERATOR NUMBER`, or the column alone if there is no operator."""
        if self.operator is None:
            return self.column
        whole = self.threshold.is_integer() and abs(self.threshold) < 1e15
        return f"{self.column} {self.operator} {int(self.threshold) if whole else self.threshold!r}"

    @property
    def entry(self) -> str:
        """Text that defines this label in a schema file or in `--label`."""
        return self.condition if self.name == self.condition else f"{self.name}={self.condition}"

    @model_validator(mode="after")
    def _check(self) -> LabelRule:
        if (self.operator is None) != self.is_signed:
            raise ValueError("a label rule must have either an operator or is_signed")
        return self
