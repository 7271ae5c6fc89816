"""Description of a prepared dataset: the typed form of dataset.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from meseta.data.delimiter import invalid_delimiter_reason
from meseta.data.number_format import NumberFormat
from meseta.errors import duplicates, format_value, reading_error
from meseta.spec import MesetaError, Reuse, suggest
from meseta.system.files import (
    check_json_limits,
    first_name_collision,
    format_json,
    invalid_relative_path_reason,
    parse_json,
    read_bounded,
    resolve_inside,
)

DATASET_FORMAT: Literal["meseta.dataset/1"] = "meseta.dataset/1"
DATASET_FILE = "dataset.json"
SPLITS = ("train", "valid", "test")
"""Names of the splits in the order in which they are written. 'valid' is optional."""


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
    """Lookups of a sparse feature in one split. `meseta.data.dataset.unseen_values` defines unseen values."""

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
    encoding: Literal["hash", "vocabulary", "buckets"]
    """Rule that maps values to ids.

    'hash': the high 64 bits of XXH64(value, hash_seed) * num_embeddings. 'vocabulary': the id in the vocabulary file.
    'buckets': 0 for a missing number, otherwise 1 + the number of boundaries that are less than or equal to it.
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
    """Path of a Parquet file with the columns value, id and count, relative to the dataset. `None` without a
    vocabulary."""
    statistics: SparseStatistics
    test_lookups: LookupCounts | None = None
    """Lookups in the test split that was made with the training split of `statistics`. `None` if that split has no ids,
    or if unseen values cannot be counted."""


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


def _check_format_name(kind: object) -> object:
    # A late import: the registry imports this module, and it alone defines the names of the formats.
    from meseta.data.formats.registry import FORMATS

    names = [raw_format.name for raw_format in FORMATS]
    if kind not in names:
        choice = f"{', '.join(map(repr, names[:-1]))} or {names[-1]!r}"
        raise PydanticCustomError("literal_error", "Input should be {choice}", {"choice": choice})
    return kind


def _check_encoding(name: str) -> str:
    from meseta.data.formats.encodings import check_encoding  # A late import: encodings imports this module.

    return check_encoding(name)


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


class SourceForm(FrozenRecord):
    """Format of the raw files and of their columns, for reading further files of the same form."""

    kind: Annotated[str, BeforeValidator(_check_format_name)]
    """File format. 'tsv' is the format of the Criteo data sets."""
    labels: tuple[ColumnName, ...] = Field(min_length=1)
    """Names of all labels. A label without a rule is a raw column."""
    label_rules: tuple[LabelRule, ...] = ()
    group: ColumnName | None = None
    """Raw column with the group keys. The column in the dataset may have another name."""
    delimiter: Delimiter = ","
    header: tuple[str, ...] = ()
    """Names of all columns of CSV files without a header. Empty if the files have one."""
    encoding: Annotated[str, AfterValidator(_check_encoding)] | None = None
    """Encoding of text files. `None` means that categories are stored as bytes without decoding, as earlier versions
    did."""
    whole_numbers: tuple[ColumnName, ...] = ()
    """Raw columns in which all spellings of a whole number are one value. In other columns, each spelling is a separate
    value, as in earlier versions."""
    number_format: NumberFormat | None = None
    """Format of numbers in text. `None` means numbers such as 1234.5."""
    partition_keys: tuple[ColumnName, ...] = ()
    """Columns from partition folders such as `date=2026-01-31`."""
    separators: dict[str, Sign] = {}
    """Separator of the values in a CSV field, by multi-valued feature."""
    weights: dict[str, ColumnName] = {}
    """Position of the weights, by weighted feature: the character before each weight in CSV, or the weight column in
    Parquet."""


class TeacherMetrics(FrozenRecord):
    """Best reachable metrics on the test split of synthetic data."""

    auc: float
    ne: float


class Dataset(FrozenRecord):
    """Dataset directory written by `meseta prepare`, described by its dataset.json."""

    format: Literal["meseta.dataset/1"] = DATASET_FORMAT
    labels: tuple[str, ...] = Field(default=("label",), min_length=1)
    """Columns of the labels, float32 in 0..1. A single label is named 'label', whatever its name in the sources."""
    label_source: str | None = None
    """Name of a single label in the sources. `None` if it was not recorded, or if there are several labels."""
    has_labels: bool = True
    """Whether the files contain label columns. Rows without labels can only be predicted."""
    weight: str | None = None
    """Column of the sample weights, float32 and not negative. `None` means that all weights are 1."""
    group: str | None = None
    """Column of the group keys (int64). Whole numbers are stored unchanged, other values as their XXH64. `None` without
    groups."""
    time: str | None = None
    """Column of the time by which splits are made, as float64 seconds since 1970-01-01 UTC. `None` if there is none."""
    dense: tuple[DenseFeature, ...]
    """Dense features in the order of the columns of Batch.dense."""
    sparse: tuple[SparseFeature, ...]
    """Sparse features in the order of the keys of the KeyedJaggedTensor."""
    splits: dict[str, Split] = Field(min_length=1)
    teacher: TeacherMetrics | None = None
    """Best reachable metrics, copied from the teacher.json of `meseta data synth`. `None` for real data."""
    seed: int = 0
    test_fraction: float | None = Field(default=None, ge=0, lt=1)
    """Share of the rows or groups in the test split. `None` if files or a point in time define the split."""
    valid_fraction: float | None = Field(default=None, ge=0, lt=1)
    """Share of the rows or groups in the valid split. `None` if there is none, or if files or a point in time define
    it."""
    split_by: Literal["time", "group"] | None = None
    """Column that decides the split of a row. `None` if rows were drawn one by one or split by file."""
    test_from: float | None = None
    """First second of the test split, since 1970-01-01 UTC. `None` unless rows are split by time."""
    valid_from: float | None = None
    """First second of the valid split, since 1970-01-01 UTC. `None` if there is no valid split by time."""
    sources: tuple[SourceFile, ...] = ()
    """Raw files in the order in which they were read."""
    not_finite: dict[str, Count] = {}
    """Number of inf and NaN values in the sources, by dense feature. They count as missing."""
    num_unlabelled: Count = 0
    """Number of source rows skipped because they have none of several labels."""
    bad_rows: BadRows | None = None
    """Skipped rows that could not be parsed. `None` if such rows were errors."""
    source_form: SourceForm | None = None
    """Form of the sources, for reading further rows of the same kind. It may have labels that `labels` does not. `None`
    if it was not recorded."""
    touched: InnerPath | None = None
    """Parquet file of table rows that training looks up, see `meseta.data.dataset.touched_rows`. `None` if they are
    unknown."""
    recipe: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """SHA-256 of recipe.json, if readers make the rows from the raw files, see `meseta.data.recipe`. `None` if the
    splits have Parquet files."""
    can_lack_labels: bool = Field(default=False, exclude=True)
    """Whether samples may lack labels that the counts of the splits do not show, as in new rows. Not stored in the
    file."""
    dir: Path = Field(default=Path(), exclude=True)
    """Directory from which the dataset was loaded. Not stored in the file."""

    @property
    def label_columns(self) -> tuple[str, ...]:
        """Label columns of the Parquet files: all labels, or none."""
        return self.labels if self.has_labels else ()

    @property
    def masked_labels(self) -> tuple[str, ...]:
        """Labels that some samples lack. They are null in the Parquet files."""
        if self.can_lack_labels:
            return self.label_columns
        short = [split for split in self.splits.values() if split.known]
        return tuple(
            name for name in self.label_columns if any(s.known.get(name, s.num_rows) < s.num_rows for s in short)
        )

    @property
    def num_masked_tasks(self) -> int:
        """Number of labels if samples may lack labels, so that batches have a label mask. 0 otherwise."""
        return len(self.labels) if self.masked_labels else 0

    @property
    def columns(self) -> list[str]:
        """Columns of the Parquet files from which batches are made."""
        samples = [name for name in (*self.label_columns, self.weight, self.group) if name is not None]
        features = [*(d.name for d in self.dense), *(s.name for s in self.sparse)]
        return [*samples, *features, *(f"{s.name}.weight" for s in self.sparse if s.weighted)]

    @property
    def num_training_rows(self) -> int:
        """Number of rows, possibly of another dataset, from which statistics, means and vocabularies were computed."""
        if "train" in self.splits:
            return self.splits["train"].num_rows
        return max((feature.statistics.num_rows for feature in self.sparse), default=0)

    def check_has_labels(self) -> None:
        """Raise MesetaError if the rows have no labels."""
        if not self.has_labels:
            raise MesetaError(
                f"dataset {str(self.dir)!r} has no labels, so it cannot be used for training or evaluation; "
                "use `meseta predict`"
            )

    def check_has_files(self, what: str) -> None:
        """Raise MesetaError if the dataset is a recipe, which has no Parquet files. `what` names the caller in the
        message."""
        if self.recipe is not None:
            raise MesetaError(
                f"dataset {str(self.dir)!r} is a recipe without Parquet files, but {what} needs them; "
                "prepare it without --recipe-only"
            )

    def with_labels(self, names: Sequence[str] | None) -> Dataset:
        """Return a description with only the given labels, in the given order. `None` selects all labels.

        Raises MesetaError if a name is not a label of the dataset, or occurs twice.
        """
        if names is None:
            return self
        for name in names:
            if name not in self.labels:
                raise MesetaError(
                    f"data.labels: {name!r} is not a label of dataset {str(self.dir)!r}; {suggest(name, self.labels)}"
                )
            if names.count(name) > 1:
                raise MesetaError(f"data.labels: {name!r} occurs {names.count(name)} times; name each label once")
        splits = {
            key: split.model_copy(update={"num_positives": split.positives.get(names[0], split.num_positives)})
            for key, split in self.splits.items()
        }
        return self.model_copy(update={"labels": tuple(names), "splits": splits})

    @model_validator(mode="after")
    def _check(self) -> Dataset:
        columns = self.columns if self.time is None else [*self.columns, self.time]
        twice = duplicates(columns)
        if twice:
            raise ValueError(f"column {sorted(twice)[0]!r} is named twice")
        files = [file.path for split in self.splits.values() for file in split.files]
        vocabularies = [feature.vocabulary for feature in self.sparse if feature.vocabulary is not None]
        vocabularies += [] if self.touched is None else [self.touched]
        if self.source_form is not None:
            self._check_form(self.source_form)
        for name, split in self.splits.items():
            if split.files and self.recipe is not None:
                raise ValueError(f"split {format_value(name)} must not have files, because the dataset is a recipe")
            if not split.files and split.num_rows and self.recipe is None:
                raise ValueError(f"split {format_value(name)}: its files hold 0 rows, but num_rows is {split.num_rows}")
        if collision := first_name_collision([DATASET_FILE, *files, *dict.fromkeys(vocabularies)]):
            raise ValueError(
                f"files {collision[0]!r} and {collision[1]!r} are the same file, at least on file systems "
                "that ignore case"
            )
        return self

    def _check_form(self, form: SourceForm) -> None:
        names = {feature.name for feature in self.sparse}
        for name in (*form.separators, *form.weights):
            if name not in names:
                raise ValueError(f"source_form: separators and weights name {format_value(name)}, which is no feature")
        if not self.accepts_source_labels(form.labels):
            raise ValueError(
                f"source_form.labels are {format_value(form.labels)}, which are no columns of these labels"
            )

    def accepts_source_labels(self, labels: Sequence[str]) -> bool:
        """Whether raw columns `labels` are the source of the labels, which may be only some of the labels of the
        sources."""
        known = ("label",) if len(labels) == 1 else labels
        return set(self.labels) <= set(known) and self.label_source in (None, *labels)

    def resolve_file(self, path: str) -> Path:
        """Return the location of a file that the description names.

        Raises MesetaError if the file is missing, is not a regular file, or is outside of the folder because of a link.
        """
        try:
            return resolve_inside(self.dir, path)
        except OSError as error:
            reason = f"dataset file {str(self.dir / path)!r} cannot be read ({error.strerror})"
            raise reading_error(error, reason, "prepare the dataset again") from None

    @staticmethod
    def load(path: str | Path) -> Dataset:
        """Load `path`/dataset.json. Raises MesetaError if it is missing or invalid."""
        path = Path(path)
        file = path / DATASET_FILE
        try:
            document = parse_json(read_bounded(resolve_inside(path, DATASET_FILE)))
        except OSError as error:
            way_out = f"make it with `meseta prepare SOURCE... --out {path}`"
            text = f"dataset {str(path)!r}: cannot read {DATASET_FILE} ({error.strerror}); {way_out}"
            raise reading_error(error, text) from None
        except ValueError as error:
            raise MesetaError(f"{str(file)!r} is not JSON: {error}; prepare the dataset again") from None
        return Dataset.from_dict(document, path)

    @staticmethod
    def from_dict(document: Any, dir: str | Path = "") -> Dataset:
        """Validate plain data. Raises MesetaError that names the key, the rule and the value. `dir` is the directory of
        the files."""
        where = f"dataset {str(dir)!r}: {DATASET_FILE}"
        if not isinstance(document, dict) or document.get("format") != DATASET_FORMAT:
            document_format = document.get("format") if isinstance(document, dict) else type(document).__name__
            raise MesetaError(
                f"{where}: format must be {DATASET_FORMAT!r}, got {format_value(document_format)}; prepare "
                "the dataset again"
            )
        # Before there could be several labels, dataset.json had the entry "label": "label".
        document = {key: value for key, value in document.items() if (key, value) != ("label", "label")}
        try:
            # Validate JSON text, not Python objects: strict mode then accepts lists for tuples, and rejects true and
            # 1.0 for integers.
            dataset = Dataset.model_validate_json(json.dumps({**document, "dir": str(dir)}), strict=True)
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join(map(str, problem["loc"]))
            name = key if key.isprintable() and len(key) < 100 else format_value(key)
            raise MesetaError(f"{where}: {name or 'document'}: {problem['msg']}; prepare the dataset again") from None
        return dataset

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, which `from_dict` reads."""
        document: dict[str, Any] = self.model_dump(mode="json", exclude={"recipe"} if self.recipe is None else None)
        # Earlier versions refuse unknown keys, so newer keys are left out if they are empty.
        parts = [(document, "num_unlabelled"), *((split, "known") for split in document["splits"].values())]
        parts += [(feature, "test_lookups") for feature in document["sparse"]]
        if self.source_form is not None:
            parts += [(document["source_form"], key) for key in ("label_rules", "whole_numbers", "number_format")]
        for part, key in parts:
            if not part[key]:
                del part[key]
        return document

    def save(self, dir: str | Path) -> None:
        """Write `dir`/dataset.json. Raises MesetaError if it is larger than `load` accepts."""
        text = format_json(self.to_dict())
        try:
            check_json_limits(text.encode())
        except ValueError as error:
            raise MesetaError(
                f"dataset {str(dir)!r}: {DATASET_FILE} is too large to load: {error}; prepare fewer columns or files"
            ) from None
        (Path(dir) / DATASET_FILE).write_text(text)

    def split(self, name: str) -> Split:
        """Return the split `name`. Raises MesetaError if there is none."""
        if name not in self.splits:
            raise MesetaError(f"dataset {str(self.dir)!r} has no split {name!r}; {suggest(name, self.splits)}")
        return self.splits[name]
