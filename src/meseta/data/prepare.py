"""`meseta prepare`: raw click logs to a dataset directory, in two passes and bounded memory.

Pass 1 parses, splits and hashes blocks on all cores and spools the numbers; pass 2 standardises, counts and writes
Parquet. The result is a function of the rows, their order and the options alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, cast

import pyarrow as pa

from meseta.data.dataset import FILE_NAME, SPLITS, Dataset
from meseta.data.encode import Encoder
from meseta.data.hash_categories import feature_seed
from meseta.data.layout import find_layout, with_header
from meseta.data.passes import Progress, TwoPasses, find_teacher
from meseta.data.record import difference, load_record, record_of
from meseta.data.roles import NamedColumns
from meseta.data.schema import RawLayout, Schema
from meseta.data.sources import Source, find_sources
from meseta.data.splitting import SplitBy, Splitter
from meseta.data.staging import Staging, staged_folder
from meseta.data.survey import Survey, Surveyor
from meseta.data.values import seconds_of_texts
from meseta.machine.processors import num_cores
from meseta.machine.remote import refuse_url
from meseta.spec import MesetaError, nearest

PARTED = ("test", "valid")
"""Splits that are parted from the training rows."""
RULES = ("fraction", "files", "after")
"""What may part them, as in the names of the options."""
TEST_FRACTION = 0.1
"""Share of the test split where nothing says what makes it."""
VALID_FRACTION = 0.1
"""The same of the valid split, where there is to be one."""
MIN_COUNT = 2
"""Occurrences that earn a value a row of its own in what `meseta train --data` prepares: hashing to 100,000 rows cost
0.014 of AUC on a log with 60,000 users of five rows each, and 0.015 on one with ids without end."""


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """What `prepare` reads and how."""

    sources: Sequence[str]
    """Files, URLs or patterns: CSV, Criteo TSV, libsvm or libffm (plain or gzip), or Parquet."""
    out: Path
    """Folder to make."""
    test_files: Sequence[str] = ()
    """Files or patterns whose rows make the test split; they may be among the sources."""
    test_fraction: float | None = None
    """Share of rows that make the test split; None: 0.1 where neither test_files nor test_after are given."""
    test_after: str | None = None
    """Rows from this time on make the test split, as a number or in ISO 8601; it implies split_by 'time'."""
    valid_files: Sequence[str] = ()
    """Files or patterns whose rows make the valid split; they may be among the sources, not among test_files."""
    valid_fraction: float | None = None
    """Share of rows that make the valid split; None and 0: there is none, unless by valid_files or valid_after."""
    valid_after: str | None = None
    """Rows from this time on, up to the test split, make the valid split; it implies split_by 'time'."""
    split_by: str | None = None
    """What makes those shares: None: rows drawn by seed; 'group': whole groups, drawn by seed; 'time': the last rows,
    for testing, and those just before them."""
    seed: int = 0
    """Seed of the split and of the hashes, 0..2**63-1."""
    hash_rows: int = 100_000
    """Table rows that each feature is hashed to."""
    hash_rows_by_feature: Mapping[str, int] = field(default_factory=dict)
    """Exceptions, such as {"cat_2": 5_000_000}."""
    vocabulary: bool = False
    """Give each frequent value its own row instead of hashing."""
    min_count: int = 10
    """Occurrences in the training split that earn a row; rarer and unseen values share row 0."""
    label: str | Sequence[str] | None = None
    """CSV and Parquet: column of the label, or several, or patterns such as 'is_*'; None: by its name."""
    dense: Sequence[str] = ()
    """CSV and Parquet: columns that are numbers, by name or pattern; what no option names is inferred."""
    sparse: Sequence[str] = ()
    """Columns that are categories; one that is dense too is both. Of libffm and libsvm: the only fields that count."""
    ignore: Sequence[str] = ()
    """CSV and Parquet: columns that are left out; a name goes before a pattern, a feature's pattern before this one."""
    time: Sequence[str] = ()
    """CSV and Parquet: the column of times, by which `test_after` and `valid_after` split; empty: by its name."""
    schema: Path | None = None
    """A file that says what the columns are, instead of the five options above; not for TSV."""
    bad_rows: str = "error"
    """A row that cannot be parsed: 'error' stops the work there, 'skip' leaves it out and counts it."""
    max_bad_rows: int | float = 0.01
    """With 'skip', more of them stop the work: an int of rows, or a float, their share of all rows."""
    force: bool = False
    """Replace `out` where it is a prepared dataset."""
    num_threads: int | None = None
    """Worker threads; None: the cores this process may use. The result does not depend on it."""

    def __post_init__(self) -> None:
        refuse_url("prepare: --out", self.out)
        self._check_shares()
        self._check_split_by()
        if self.schema is not None and self.named:
            raise MesetaError(
                "prepare: --schema and --label, --dense, --sparse, --ignore, --time exclude each other; give one or "
                "the others"
            )
        if not 0 <= self.seed < 2**63:
            raise MesetaError(f"prepare: --seed must be in 0..2**63-1, got {self.seed}")
        for name, rows in {"all features": self.hash_rows, **self.hash_rows_by_feature}.items():
            if not 1 <= rows <= 2**40:
                raise MesetaError(f"prepare: --hash-rows of {name} must be in 1..2**40, got {rows}")
        if self.bad_rows not in ("error", "skip"):
            raise MesetaError(f"prepare: --bad-rows must be error or skip, got {self.bad_rows!r}")
        if self.max_bad_rows < 0 or (isinstance(self.max_bad_rows, float) and self.max_bad_rows > 1):
            raise MesetaError(
                "prepare: --max-bad-rows must be a number of rows, or a share of them from 0.0 to 1.0, "
                f"got {self.max_bad_rows}"
            )
        if self.min_count < 1:
            raise MesetaError(f"prepare: --min-count must be at least 1, got {self.min_count}")

    @property
    def named(self) -> NamedColumns:
        """Columns by name."""
        label = [self.label] if isinstance(self.label, str) else self.label or ()
        return NamedColumns(label=label, dense=self.dense, sparse=self.sparse, ignore=self.ignore, time=self.time)

    def _check_shares(self) -> None:
        for split in PARTED:
            options = [f"--{split}-{rule}" for rule in RULES if getattr(self, f"{split}_{rule}") not in (None, (), [])]
            if len(options) > 1:
                raise MesetaError(f"prepare: {' and '.join(options)} exclude each other; give one of them")
            share = getattr(self, f"{split}_fraction")
            if share is not None and not 0 <= share < 1:
                raise MesetaError(f"prepare: --{split}-fraction must be in [0, 1), got {share}")
        test, valid = self.share_of("test") or 0.0, self.share_of("valid") or 0.0
        if test + valid >= 1:
            raise MesetaError(
                f"prepare: --test-fraction {test:g} and --valid-fraction {valid:g} leave no row for training; lower one"
            )

    def _check_split_by(self) -> None:
        if self.split_by not in (None, "time", "group"):
            raise MesetaError(f"prepare: --split-by must be 'time' or 'group', got {self.split_by!r}")
        options = {f"--{split}-{rule}": rule for split in PARTED if (rule := self.rule_of(split))}
        after = [option for option, rule in options.items() if rule == "after"]
        if self.split_by == "group" and after:
            raise MesetaError(f"prepare: --split-by group and {after[0]} exclude each other; give one")
        if self.split_by is not None and set(options.values()) == {"files"}:
            other = " and ".join(options)
            raise MesetaError(f"prepare: --split-by {self.split_by} and {other} exclude each other; give one")

    def rule_of(self, split: str) -> Literal["fraction", "files", "after"] | None:
        """Which option makes the test or the valid split; None: there is no valid split."""
        if getattr(self, f"{split}_files"):
            return "files"
        if getattr(self, f"{split}_after") is not None:
            return "after"
        return "fraction" if split == "test" or self.valid_fraction else None

    def share_of(self, split: str) -> float | None:
        """Share of rows, or of groups, for the test or the valid split; None: by files, at a given time, or none."""
        if self.rule_of(split) != "fraction":
            return None
        share: float | None = getattr(self, f"{split}_fraction")
        return TEST_FRACTION if share is None else share

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits that are made, in the order of SPLITS."""
        return tuple(split for split in SPLITS if split == "train" or self.rule_of(split))


def read_layout(options: PrepareOptions) -> RawLayout:
    """The layout that `prepare` would use. Raises MesetaError where it cannot be told, or does not fit the files."""
    schema = _schema_of(options)
    return _layout_of(options, schema, with_header(_find_sources(options, schema)))


def prepare(
    options: PrepareOptions, progress: Progress | None = None, on_layout: Callable[[RawLayout], None] | None = None
) -> Dataset:
    """Write the dataset directory `options.out` and return its description.

    `on_layout` is called with the layout before the work begins.
    The folder appears by one rename when everything is written; an error leaves nothing behind. What was interrupted or
    killed goes on where it was when the same is asked for again, and gives the same bits.
    Raises MesetaError for a missing, empty, truncated or mixed source, for a row that cannot be parsed (naming file,
    line and field), for an existing `out`, and where no row is left for training.
    """
    progress = progress or _no_progress
    schema = _schema_of(options)
    sources = with_header(_find_sources(options, schema))
    layout = _layout_of(options, schema, sources, progress)
    if on_layout is not None:
        on_layout(layout)
    splitter = _splitter(options, layout)
    hash_rows = _hash_rows(options, layout)
    num_threads = options.num_threads or num_cores()
    record = record_of(options, sources)
    with staged_folder(options.out, record, force=options.force) as staging:
        if not staging.is_complete:
            pool = ThreadPoolExecutor(num_threads, thread_name_prefix="meseta-prepare")
            try:
                surveyor = Surveyor(
                    sources=sources,
                    layout=layout,
                    splitter=splitter,
                    scratch=staging.scratch,
                    pool=pool,
                    num_threads=num_threads,
                    on_rows=partial(progress, "scan"),
                    skip_bad=options.bad_rows == "skip",
                )
                survey = _survey(surveyor, staging)
                encoder = Encoder(
                    layout.with_boundaries(survey.boundaries),
                    replace(splitter, test_from=survey.test_from, valid_from=survey.valid_from),
                    hash_seeds={column.name: feature_seed(column.name, options.seed) for column in layout.sparse},
                    hash_rows=hash_rows,
                )
                dataset = TwoPasses(options, sources, encoder, staging, progress).run(pool, num_threads)
            finally:
                pool.shutdown(cancel_futures=True)
            dataset.save(staging.folder)
    return Dataset.load(options.out)


def for_training(options: PrepareOptions) -> PrepareOptions:
    """The same as `meseta train --data` prepares them: table rows for values that come twice, and a valid split of a
    tenth where nothing is said of one. What was prepared in `options.out` already, and otherwise, stays as it is."""
    record = load_record(options.out)
    former = {} if record is None else record["options"]
    if record is None or former.get("vocabulary"):
        min_count = former.get("min_count")
        least = min_count if isinstance(min_count, int) and min_count >= 1 else MIN_COUNT
        options = replace(options, vocabulary=True, min_count=least)
    if options.valid_fraction is not None or options.rule_of("valid"):
        return options
    if record is not None and former.get("valid_fraction") is None:
        return options
    return replace(options, valid_fraction=VALID_FRACTION)


def load_prepared(options: PrepareOptions) -> Dataset | None:
    """The dataset that `prepare` has written for these options, or None where there is no folder `options.out`.

    Raises MesetaError where the sources or the options are others than those that it was prepared from.
    """
    out = options.out
    if not (out / FILE_NAME).exists():
        return None
    record = load_record(out)
    if record is None:
        other: str | None = "it does not say from which it was"
    else:
        other = difference(record, record_of(options, _find_sources(options, _schema_of(options))))
    if other:
        raise MesetaError(
            f"{str(out)!r} was not prepared from these files with these options: {other}; --force prepares it again "
            "and begins the run anew; or choose another run_dir (or data.dir), or leave --data away to take it as it is"
        )
    return Dataset.load(out)


def _schema_of(options: PrepareOptions) -> Schema | None:
    return None if options.schema is None else Schema.load(options.schema)


def _find_sources(options: PrepareOptions, schema: Schema | None) -> tuple[Source, ...]:
    delimiter, header = (schema.delimiter, schema.header) if schema else (None, ())
    return find_sources(
        options.sources,
        {"valid": options.valid_files, "test": options.test_files},
        rest_is_parted=any(options.rule_of(split) in ("fraction", "after") for split in PARTED),
        delimiter=delimiter,
        header=header,
    )


def _layout_of(
    options: PrepareOptions, schema: Schema | None, sources: Sequence[Source], progress: Progress | None = None
) -> RawLayout:
    on_scan = None if progress is None else partial(progress, "scan")
    return find_layout(sources, options.named, schema, on_scan, skip_bad=options.bad_rows == "skip")


def _splitter(options: PrepareOptions, layout: RawLayout) -> Splitter:
    """Raises MesetaError where the column that decides is missing, or --test-after or --valid-after is no time."""
    is_after = any(options.rule_of(split) == "after" for split in PARTED)
    by = cast(SplitBy | None, "time" if is_after else options.split_by)
    if by is not None and getattr(layout, by) is None:
        raise MesetaError(
            f"prepare: --split-by {by} needs a column for it, and there is none; name it as {by!r} in a --schema file"
            f"{', or with --time' if by == 'time' else ''} (of libsvm, qid is the group; Criteo's TSV has neither)"
        )
    splitter = Splitter(
        seed=options.seed,
        test_fraction=options.share_of("test") or 0.0,
        valid_fraction=options.share_of("valid") or 0.0,
        by=by,
        test_from=_seconds("--test-after", options.test_after),
        valid_from=_seconds("--valid-after", options.valid_after),
    )
    splitter.check_order()
    return splitter


def _seconds(option: str, text: str | None) -> float | None:
    """A time as an option gives it, in seconds since 1970-01-01 UTC. Raises MesetaError where it is none."""
    if text is None:
        return None
    try:
        [seconds] = seconds_of_texts(pa.array([text])).tolist()
    except pa.ArrowInvalid:
        seconds = math.nan
    if math.isnan(seconds):
        raise MesetaError(f"prepare: {option} {text!r} is no time; give one as 2026-01-31 23:59:59, or a number")
    return float(seconds)


def _survey(surveyor: Surveyor, staging: Staging) -> Survey:
    """What an earlier process found, or what is found now."""
    if "survey" in staging.state:
        return Survey.from_dict(staging.state["survey"])
    survey = surveyor.survey()
    if not surveyor.leaves_all_as_it_is:
        staging.commit({**staging.state, "survey": survey.to_dict()})
    return survey


def _no_progress(stage: str, rows: int, share: float) -> None:
    """For callers that do not want to know."""


def _hash_rows(options: PrepareOptions, layout: RawLayout) -> dict[str, int]:
    if options.vocabulary:
        return {}
    names = [column.name for column in layout.values]
    for name in options.hash_rows_by_feature:
        if name not in names:
            raise MesetaError(f"prepare: --hash-rows names no sparse feature {name!r}; {nearest(name, names)}")
    return {name: options.hash_rows_by_feature.get(name, options.hash_rows) for name in names}


__all__ = [
    "PrepareOptions",
    "Progress",
    "find_teacher",
    "for_training",
    "load_prepared",
    "prepare",
    "read_layout",
]
