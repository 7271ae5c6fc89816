"""What a prepared dataset holds: the typed form of dataset.json."""

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
from meseta.machine.files import (
    check_json_limits,
    first_name_collision,
    format_json,
    invalid_relative_path_reason,
    parse_json,
    read_bounded,
    resolve_inside,
)
from meseta.spec import MesetaError, Reuse, suggest

DATASET_FORMAT: Literal["meseta.dataset/1"] = "meseta.dataset/1"
DATASET_FILE = "dataset.json"
SPLITS = ("train", "valid", "test")
"""Splits that `meseta prepare` makes, 'valid' where it is asked for, in the order in which they are written."""


def _check_inner_path(path: str) -> str:
    if fault := invalid_relative_path_reason(path):
        raise ValueError(f"{format_value(path)} is no name of a file in the folder of the dataset: {fault}")
    return path


SourceSplit = Literal["train", "valid", "test", "both"]
"""Where the rows of a file go; 'both': each row by itself, drawn by seed or cut by time."""
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
InnerPath = Annotated[str, AfterValidator(_check_inner_path)]


class FrozenRecord(BaseModel):
    """A part of a description: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DenseFeature(FrozenRecord):
    name: str
    """Column of the Parquet files, float32."""
    fill: float
    """Stands for a missing value, before the logarithm."""
    signed: bool = False
    """Whether negative values count: a value x is sign(x) * log1p(|x|), and log1p(max(x, 0)) where not."""
    mean: float
    """Mean of that over the training split, subtracted."""
    std: float = Field(gt=0)
    """Its standard deviation over the training split, divided by; 1 where the feature is constant."""


class SparseStatistics(FrozenRecord):
    """Counted on the training split."""

    num_rows: Count
    """Samples."""
    num_lookups: Count
    """Ids, over all samples."""
    num_uniques: Count
    """Distinct ids, after hashing or the vocabulary."""
    mean_pooling_factor: float = Field(ge=0)
    """Ids per sample."""
    reuse: Reuse
    """How often rows come again within a window of samples, summed over windows, of which the last may be shorter."""


class LookupCounts(FrozenRecord):
    """Lookups of a sparse feature in one split, counted as meseta.data.dataset.unseen_values says."""

    num_lookups: int = Field(ge=1, lt=1 << 53)
    """Ids, over all samples."""
    num_unseen: Count
    """Ids of values that training has not seen."""

    @property
    def unseen_share(self) -> float:
        return self.num_unseen / self.num_lookups

    @model_validator(mode="after")
    def _check(self) -> LookupCounts:
        if self.num_unseen > self.num_lookups:
            raise ValueError(f"{self.num_unseen} of {self.num_lookups} lookups cannot be unseen")
        return self


class SparseEncoding(FrozenRecord):
    """How values of a sparse feature became ids."""

    name: str
    """Column of the Parquet files: int32 or int64, or a list of them."""
    num_embeddings: int = Field(ge=1, lt=1 << 53)
    """Ids are in 0..num_embeddings-1."""
    encoding: Literal["hash", "vocabulary", "buckets"]
    """'hash': row = high 64 bits of XXH64(value, hash_seed) * num_embeddings. 'vocabulary': see the file. 'buckets': 0
    for a missing number, else 1 + the boundaries that are not above it."""
    multi_valued: bool = False
    """Whether a sample has a list of ids."""
    weighted: bool = False
    """Whether the column '<name>.weight' holds one weight per id."""
    hash_seed: str | None = Field(default=None, pattern="^0x[0-9a-f]{1,16}$")
    """Seed of the hash in hexadecimal; None for vocabularies."""
    vocabulary_digest: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """SHA-256 of the vocabulary's values in the order of their ids; None for others, and where it was not kept."""
    boundaries: tuple[float, ...] | None = None
    """Ascending, where the encoding is 'buckets'."""
    made_of: tuple[str, ...] = ()
    """Columns of the sources that a bucketised feature or a cross is made of; empty for a column of the same name."""


class SparseFeature(SparseEncoding):
    vocabulary: InnerPath | None = None
    """Parquet file with the columns value, id and count, relative to the dataset; None for others."""
    statistics: SparseStatistics
    """For the planner."""
    test_lookups: LookupCounts | None = None
    """Counts of the test split that was made with the training split of `statistics`; `None` if it has no ids, or if
    unseen values cannot be counted."""


class DataFile(FrozenRecord):
    path: InnerPath
    """Relative to the dataset."""
    num_rows: Count
    """Samples in it."""


class Split(FrozenRecord):
    num_rows: Count
    """Samples."""
    num_positives: float = Field(ge=0)
    """Sum of the labels; of the first label where there are several."""
    positives: dict[str, float] = {}
    """Sum of each label, where there are several."""
    known: dict[str, Count] = {}
    """Samples that have each label; empty if all samples have all labels."""
    files: tuple[DataFile, ...]
    """Parquet files, in the order of their rows; none where a recipe makes them."""

    @property
    def base_rates(self) -> dict[str, float]:
        """Mean of each label over the samples that have it; of a single label under ''. 0 without samples."""
        sums = self.positives or {"": self.num_positives}
        return {label: total / max(self.known.get(label, self.num_rows), 1) for label, total in sums.items()}

    @model_validator(mode="after")
    def _check(self) -> Split:
        if any(number > self.num_rows for number in self.known.values()):
            raise ValueError(f"it has {self.num_rows} rows, but known says that more have a label")
        total = sum(file.num_rows for file in self.files)
        if total != self.num_rows and self.files:
            raise ValueError(f"its files hold {total} rows, but num_rows is {self.num_rows}")
        return self


class SourceFile(FrozenRecord):
    path: str
    """As found."""
    split: SourceSplit
    """Where its rows went; 'both': drawn by seed, or cut by time."""
    num_rows: Count
    """Samples in it."""


class BadRows(FrozenRecord):
    """Rows of the raw files that could not be parsed and were left out."""

    num_rows: int = Field(ge=0)
    """How many."""
    first: tuple[str, ...]
    """File, line and fault of the first few."""


def _check_separator(text: str) -> str:
    if not text.isascii() or text in '"\r\n':
        raise ValueError(f"{format_value(text)} must be an ASCII character, and no quote or line end")
    return text


def _check_format_name(kind: object) -> object:
    from meseta.data.formats.registry import FORMATS  # above this module, and the only owner of the names

    names = [raw_format.name for raw_format in FORMATS]
    if kind not in names:
        choice = f"{', '.join(map(repr, names[:-1]))} or {names[-1]!r}"
        raise PydanticCustomError("literal_error", "Input should be {choice}", {"choice": choice})
    return kind


def _check_encoding(name: str) -> str:
    from meseta.data.formats.encodings import check_encoding  # above this module

    return check_encoding(name)


def _check_delimiter(text: str) -> str:
    if problem := invalid_delimiter_reason(text):
        raise ValueError(f"{format_value(text)} {problem}")
    return text


Delimiter = Annotated[str, AfterValidator(_check_delimiter)]
Sign = Annotated[str, Field(min_length=1, max_length=1), AfterValidator(_check_separator)]
ColumnName = Annotated[str, Field(min_length=1)]


class LabelRule(FrozenRecord):
    """How the numbers in a raw column become a label of 0 and 1, unless they are labels already."""

    name: ColumnName
    """Name of the label."""
    column: ColumnName
    """Raw column that it is made from."""
    operator: Literal[">=", "<=", "==", "!=", ">", "<"] | None = None
    """The label is 1 if the value compares so with `threshold`; None: by `is_signed`."""
    threshold: float = 0.0
    is_signed: bool = False
    """Whether the column holds 1, and -1 for a label of 0."""

    @property
    def condition(self) -> str:
        """`COLUMN OPERATOR NUMBER`, or the column alone if there is no operator."""
        if self.operator is None:
            return self.column
        whole = self.threshold.is_integer() and abs(self.threshold) < 1e15
        return f"{self.column} {self.operator} {int(self.threshold) if whole else self.threshold!r}"

    @property
    def entry(self) -> str:
        """What a schema or --label says to make this label."""
        return self.condition if self.name == self.condition else f"{self.name}={self.condition}"

    @model_validator(mode="after")
    def _check(self) -> LabelRule:
        if (self.operator is None) != self.is_signed:
            raise ValueError("a label is made by an operator or from -1 and 1")
        return self


class SourceForm(FrozenRecord):
    """How the raw files said what the columns of the dataset say: what must be known to read others like them."""

    kind: Annotated[str, BeforeValidator(_check_format_name)]
    """Of the files. 'tsv' is Criteo's."""
    labels: tuple[ColumnName, ...] = Field(min_length=1)
    """Names of all labels: columns, except for those with a rule."""
    label_rules: tuple[LabelRule, ...] = ()
    """How the labels that are not columns of labels are made."""
    group: ColumnName | None = None
    """Column of the groups, whatever the dataset calls it."""
    delimiter: Delimiter = ","
    """CSV: the delimiter of the fields."""
    header: tuple[str, ...] = ()
    """CSV: names of all columns, where files do not begin with them."""
    encoding: Annotated[str, AfterValidator(_check_encoding)] | None = None
    """Text: its encoding; `None`: categories are bytes, whatever they encode, as former versions took them."""
    whole_numbers: tuple[ColumnName, ...] = ()
    """Raw columns in which every spelling of a whole number is one value; in others, as of former versions, each
    spelling in text is a separate value."""
    number_format: NumberFormat | None = None
    """How text spells numbers; `None`: as 1234.5."""
    partition_keys: tuple[ColumnName, ...] = ()
    """Columns that folders such as `date=2026-01-31` made."""
    separators: dict[str, Sign] = {}
    """CSV: feature -> the separator of its values."""
    weights: dict[str, ColumnName] = {}
    """Feature -> the sign before its weights in CSV, or the column that holds them in Parquet."""


class TeacherMetrics(FrozenRecord):
    """The best reachable metrics on the test split, where the data are synthetic."""

    auc: float
    """Area under the ROC curve of the true probabilities."""
    ne: float
    """Normalised entropy of the true probabilities."""


class Dataset(FrozenRecord):
    """A directory written by `meseta prepare`, described by its dataset.json."""

    format: Literal["meseta.dataset/1"] = DATASET_FORMAT
    """Version of this description."""
    labels: tuple[str, ...] = Field(default=("label",), min_length=1)
    """Columns of the labels, float32, 0 to 1. A single one is called 'label', whatever its name in the sources."""
    label_source: str | None = None
    """Name of a single label in the sources; None: of several, which keep theirs, and where it was not kept."""
    has_labels: bool = True
    """Whether the files have these columns; rows without are there to be predicted."""
    weight: str | None = None
    """Column of the weights of the samples, float32, 0 or more; None: all weigh 1."""
    group: str | None = None
    """Column of the keys of groups, int64: whole numbers as they are, all else by its XXH64; None: no groups."""
    time: str | None = None
    """Column of the time, float64 seconds since 1970-01-01 UTC, for splits; None: no time."""
    dense: tuple[DenseFeature, ...]
    """Dense features, in the order of Batch.dense's columns."""
    sparse: tuple[SparseFeature, ...]
    """Sparse features, in the order of the KeyedJaggedTensor's keys."""
    splits: dict[str, Split] = Field(min_length=1)
    """'train' and 'test', and 'valid' where there is one."""
    teacher: TeacherMetrics | None = None
    """Taken from the teacher.json that `meseta data synth` writes."""
    seed: int = 0
    """Seed of the hashes and of the split."""
    test_fraction: float | None = Field(default=None, ge=0, lt=1)
    """Share of rows, or of groups, in the test split; None: split by files, or at a given time."""
    valid_fraction: float | None = Field(default=None, ge=0, lt=1)
    """The same of the valid split; None where there is none, too."""
    split_by: Literal["time", "group"] | None = None
    """What these splits were drawn or cut off by; None: by rows, or by files."""
    test_from: float | None = None
    """Split by time: the first second of the test split, since 1970-01-01 UTC."""
    valid_from: float | None = None
    """Split by time: the first second of the valid split, which ends where the test split begins."""
    sources: tuple[SourceFile, ...] = ()
    """The raw files, in the order in which they were read."""
    not_finite: dict[str, Count] = {}
    """Dense feature -> its values in the sources that are inf or nan, which count as missing."""
    num_unlabelled: Count = 0
    """Rows of the sources that were left out because they have none of several labels."""
    bad_rows: BadRows | None = None
    """Rows that were left out; None: a bad row would have been an error."""
    source_form: SourceForm | None = None
    """For further rows of the same kind; None where it was not kept. Labels may have been changed by others since."""
    touched: InnerPath | None = None
    """Parquet file with the rows of hashed features that training looks up, see meseta.data.dataset.touched_rows; None:
    unknown."""
    recipe: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """SHA-256 of recipe.json, by which rows are made from the raw files as they are read, see meseta.data.recipe; None:
    they lie in the files of the splits."""
    can_lack_labels: bool = Field(default=False, exclude=True)
    """Whether samples may lack labels though no split says so, as new rows that nobody has counted; not part of the
    file."""
    dir: Path = Field(default=Path(), exclude=True)
    """Where it was loaded from; not part of the file."""

    @property
    def label_columns(self) -> tuple[str, ...]:
        """The labels that the Parquet files have: all, or none."""
        return self.labels if self.has_labels else ()

    @property
    def masked_labels(self) -> tuple[str, ...]:
        """The labels that some samples lack: null in the Parquet files."""
        if self.can_lack_labels:
            return self.label_columns
        short = [split for split in self.splits.values() if split.known]
        return tuple(
            name for name in self.label_columns if any(s.known.get(name, s.num_rows) < s.num_rows for s in short)
        )

    @property
    def num_masked_tasks(self) -> int:
        """Number of labels if samples may lack some of them, so that batches have a mask; else 0."""
        return len(self.labels) if self.masked_labels else 0

    @property
    def columns(self) -> list[str]:
        """Columns of the Parquet files that make a batch."""
        samples = [name for name in (*self.label_columns, self.weight, self.group) if name is not None]
        features = [*(d.name for d in self.dense), *(s.name for s in self.sparse)]
        return [*samples, *features, *(f"{s.name}.weight" for s in self.sparse if s.weighted)]

    @property
    def num_training_rows(self) -> int:
        """Rows that statistics, means and vocabularies were counted on, be they of this dataset or of another."""
        if "train" in self.splits:
            return self.splits["train"].num_rows
        return max((feature.statistics.num_rows for feature in self.sparse), default=0)

    def check_has_labels(self) -> None:
        """Raise MesetaError where the rows have no labels."""
        if not self.has_labels:
            raise MesetaError(
                f"dataset {str(self.dir)!r} has no labels, so nothing can be trained or measured on it; "
                "`meseta predict` gives its rows predictions"
            )

    def check_has_files(self, what: str) -> None:
        """Raise MesetaError where the rows lie in no files: `what` reads these."""
        if self.recipe is not None:
            raise MesetaError(
                f"dataset {str(self.dir)!r} is a recipe, whose rows are made as they are read, and {what} wants them "
                "in files; prepare it without --recipe-only"
            )

    def with_labels(self, names: Sequence[str] | None) -> Dataset:
        """The same rows with these labels alone, in this order; None: with all.

        Raises MesetaError for a name that is no label of the dataset, or is there twice.
        """
        if names is None:
            return self
        for name in names:
            if name not in self.labels:
                raise MesetaError(
                    f"data.labels names {name!r}, which is no label of dataset {str(self.dir)!r}; "
                    f"{suggest(name, self.labels)}"
                )
            if names.count(name) > 1:
                raise MesetaError(f"data.labels names {name!r} {names.count(name)} times; name each label once")
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
                raise ValueError(f"split {format_value(name)} has files, and a recipe makes its rows")
            if not split.files and split.num_rows and self.recipe is None:
                raise ValueError(f"split {format_value(name)}: its files hold 0 rows, but num_rows is {split.num_rows}")
        if alike := first_name_collision([DATASET_FILE, *files, *dict.fromkeys(vocabularies)]):
            raise ValueError(f"files {alike[0]!r} and {alike[1]!r} are one, or to file systems that ignore case")
        return self

    def _check_form(self, form: SourceForm) -> None:
        names = {feature.name for feature in self.sparse}
        for name in (*form.separators, *form.weights):
            if name not in names:
                raise ValueError(
                    f"source_form tells how values of {format_value(name)} are written, which is no feature"
                )
        if not self.accepts_source_labels(form.labels):
            raise ValueError(
                f"source_form.labels are {format_value(form.labels)}, which are no columns of these labels"
            )

    def accepts_source_labels(self, labels: Sequence[str]) -> bool:
        """Whether these are columns of its labels in the raw files; it may have been reduced to some of them."""
        known = ("label",) if len(labels) == 1 else labels
        return set(self.labels) <= set(known) and self.label_source in (None, *labels)

    def resolve_file(self, path: str) -> Path:
        """Where a file of this description is. Raises MesetaError where it is missing, no regular file, or led out of
        the folder by a link."""
        try:
            return resolve_inside(self.dir, path)
        except OSError as error:
            reason = f"dataset file {str(self.dir / path)!r} cannot be read ({error.strerror})"
            raise reading_error(error, reason, "prepare the dataset again") from None

    @staticmethod
    def load(path: str | Path) -> Dataset:
        """Read `path`/dataset.json. Raises MesetaError where it is missing, not JSON or not valid."""
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
        """Check plain data against this description. Raises MesetaError naming the key, the rule and the value."""
        where = f"dataset {str(dir)!r}: {DATASET_FILE}"
        if not isinstance(document, dict) or document.get("format") != DATASET_FORMAT:
            found = document.get("format") if isinstance(document, dict) else type(document).__name__
            raise MesetaError(
                f"{where}: format must be {DATASET_FORMAT!r}, got {format_value(found)}; prepare the dataset again"
            )
        # Before there could be several labels, their column stood there as "label": "label".
        document = {key: value for key, value in document.items() if (key, value) != ("label", "label")}
        try:
            # As JSON, where whole numbers are those alone, lists stand for tuples, and true is no number.
            dataset = Dataset.model_validate_json(json.dumps({**document, "dir": str(dir)}), strict=True)
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join(map(str, problem["loc"]))
            name = key if key.isprintable() and len(key) < 100 else format_value(key)
            raise MesetaError(f"{where}: {name or 'document'}: {problem['msg']}; prepare the dataset again") from None
        return dataset

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `from_dict` reads it back."""
        document: dict[str, Any] = self.model_dump(mode="json", exclude={"recipe"} if self.recipe is None else None)
        # Earlier versions refuse keys that they do not know, so later keys are left out if they say nothing.
        parts = [(document, "num_unlabelled"), *((split, "known") for split in document["splits"].values())]
        parts += [(feature, "test_lookups") for feature in document["sparse"]]
        if self.source_form is not None:
            parts += [(document["source_form"], key) for key in ("label_rules", "whole_numbers", "number_format")]
        for part, key in parts:
            if not part[key]:
                del part[key]
        return document

    def save(self, dir: str | Path) -> None:
        """Write `dir`/dataset.json. Raises MesetaError if `load` would refuse its size."""
        text = format_json(self.to_dict())
        try:
            check_json_limits(text.encode())
        except ValueError as error:
            raise MesetaError(
                f"dataset {str(dir)!r}: {DATASET_FILE} would not be read again: {error}; prepare fewer columns or files"
            ) from None
        (Path(dir) / DATASET_FILE).write_text(text)

    def split(self, name: str) -> Split:
        """The split called `name`; MesetaError where there is none."""
        if name not in self.splits:
            raise MesetaError(f"dataset {str(self.dir)!r} has no split {name!r}; {suggest(name, self.splits)}")
        return self.splits[name]
