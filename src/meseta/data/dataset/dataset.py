"""Description of a prepared dataset: the typed form of dataset.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from meseta.data.dataset.records import (
    BadRows,
    ColumnName,
    Count,
    Delimiter,
    DenseFeature,
    FrozenRecord,
    InnerPath,
    LabelRule,
    Sign,
    SourceFile,
    SparseFeature,
    Split,
)
from meseta.data.formats import registry
from meseta.data.schema.text_syntax import NumberFormat, check_encoding
from meseta.errors import duplicates, format_value, reading_error
from meseta.spec import MesetaError, suggest
from meseta.system.files import (
    check_json_limits,
    first_name_collision,
    format_json,
    parse_json,
    read_bounded,
    resolve_inside,
)

DATASET_FORMAT: Literal["meseta.dataset/1"] = "meseta.dataset/1"
DATASET_FILE = "dataset.json"
SPLITS = ("train", "valid", "test")
"""Names of the splits in the order in which they are written. 'valid' is optional."""


def _check_format_name(kind: object) -> object:
    names = [raw_format.name for raw_format in registry.FORMATS]
    if kind not in names:
        choice = f"{', '.join(map(repr, names[:-1]))} or {names[-1]!r}"
        raise PydanticCustomError("literal_error", "Input should be {choice}", {"choice": choice})
    return kind


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
    encoding: Annotated[str, AfterValidator(check_encoding)] | None = None
    """Encoding of text files. `None` means that categories are stored as bytes without decoding, as earlier versions
    did."""
    whole_numbers: tuple[ColumnName, ...] = ()
    """Raw columns in which all spellings of a whole number are one value. In other columns, each spelling is a separate
    value, as in earlier versions."""
    number_format: NumberFormat | None = None
    """Format of numbers in text. `None` means numbers such as 1234.5."""
    partition_keys: tuple[ColumnName, ...] = ()
    """Columns from partition folders such as `date=2026-01-31`."""
    separators: dict[str, Sign] = Field(default_factory=dict)
    """Separator of the values in a text, by multi-valued feature."""
    weights: dict[str, ColumnName] = Field(default_factory=dict)
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
    not_finite: dict[str, Count] = Field(default_factory=dict)
    """Number of inf and NaN values in the sources, by dense feature. They count as missing."""
    num_unlabelled: Count = 0
    """Number of source rows skipped because they have none of several labels."""
    bad_rows: BadRows | None = None
    """Skipped rows that could not be parsed. `None` if such rows were errors."""
    source_form: SourceForm | None = None
    """Form of the sources, for reading further rows of the same kind. It may have labels that `labels` does not. `None`
    if it was not recorded."""
    touched: InnerPath | None = None
    """Parquet file of table rows that training looks up, see `meseta.data.dataset.statistics`. `None` if they are
    unknown."""
    recipe: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """SHA-256 of recipe.json, if readers make the rows from the raw files, see `meseta.data.recipe`. `None` if the
    splits have Parquet files."""
    min_count: int | None = Field(default=None, ge=1)
    """Count from which on a value has its own row in a vocabulary. `None` without vocabularies, or if it was not
    recorded."""
    part: int = Field(default=1, ge=1, lt=1 << 31)
    """Number of parts whose values the vocabularies contain. Each `meseta prepare --grow` adds one."""
    without: tuple[ColumnName, ...] = ()
    """Columns of the sources that are not features, because a config leaves them out (`data.without`)."""
    can_lack_labels: bool = Field(default=False, exclude=True)
    """Whether samples may lack labels that the counts of the splits do not show, as in new rows. Not stored in the
    file."""
    reads_time: bool = Field(default=False, exclude=True)
    """Whether readers return the column `time`, too. Not stored in the file."""
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
        times = [self.time] if self.time is not None and self.reads_time else []
        return [*samples, *times, *features, *(f"{s.name}.weight" for s in self.sparse if s.weighted)]

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
        """Raise MesetaError if the dataset is a recipe, without Parquet files. The message names the caller, `what`."""
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

    def with_times(self) -> Dataset:
        """Return a description whose readers add the times of samples to batches, if the dataset has times."""
        return self if self.time is None else self.model_copy(update={"reads_time": True})

    def select(self, labels: Sequence[str] | None, without: Sequence[str], *, allow_missing: bool = False) -> Dataset:
        """Return a description with only `labels`, see `with_labels`, and without the features `without`.

        Raises MesetaError if a name is not a label, a name in `without` is not a feature (unless `allow_missing` is
        set), or no feature is left.
        """
        dataset = self.with_labels(labels)
        if not without:
            return dataset
        left_out = {*without}
        names = [*(feature.name for feature in self.dense), *(feature.name for feature in self.sparse)]
        for name in () if allow_missing else without:
            if name not in names and name not in self.without:
                raise MesetaError(
                    f"data.without: {name!r} is not a feature of dataset {str(self.dir)!r}; {suggest(name, names)}"
                )
        dense = tuple(feature for feature in self.dense if feature.name not in left_out)
        sparse = tuple(feature for feature in self.sparse if feature.name not in left_out)
        if self.sparse and not sparse:
            raise MesetaError(
                f"data.without: {', '.join(map(repr, without))} are all sparse features of dataset {str(self.dir)!r}; "
                "keep one of them, or prepare the data with --ignore"
            )
        form = self.source_form
        if form is not None:
            columns = {
                key: {name: value for name, value in getattr(form, key).items() if name not in left_out}
                for key in ("separators", "weights")
            }
            form = form.model_copy(update=columns)
        update = {"dense": dense, "sparse": sparse, "source_form": form}
        return dataset.model_copy(update={**update, "without": tuple(sorted(left_out | {*self.without}))})

    @model_validator(mode="after")
    def _check(self) -> Dataset:
        columns = self.columns if self.time is None or self.reads_time else [*self.columns, self.time]
        twice = duplicates(columns)
        if twice:
            raise ValueError(f"column {sorted(twice)[0]!r} is named twice")
        files = [file.path for split in self.splits.values() for file in split.files]
        vocabularies = [feature.vocabulary for feature in self.sparse if feature.vocabulary is not None]
        vocabularies += [feature.candidates for feature in self.sparse if feature.candidates is not None]
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
        defaults = {"recipe": None, "min_count": None, "part": 1}
        omitted = {name for name, value in defaults.items() if getattr(self, name) == value}
        document: dict[str, Any] = self.model_dump(mode="json", exclude=omitted)
        # Earlier versions refuse unknown keys, so newer keys are left out if they are empty.
        parts = [
            (document, "num_unlabelled"),
            (document, "without"),
            *((split, "known") for split in document["splits"].values()),
        ]
        keys = ("test_lookups", "candidates", "num_added", "num_retired")
        parts += [(feature, key) for feature in document["sparse"] for key in keys]
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
