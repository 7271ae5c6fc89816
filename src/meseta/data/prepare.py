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
from typing import cast

import pyarrow as pa

from meseta.data.dataset import FILE_NAME, Dataset
from meseta.data.encode import Encoder
from meseta.data.files import refuse_url
from meseta.data.layout import find_layout
from meseta.data.passes import Progress, TwoPasses, find_teacher
from meseta.data.record import difference, load_record, record_of
from meseta.data.schema import Layout, Schema
from meseta.data.sources import Source, find_sources
from meseta.data.splitting import SplitBy, Splitter
from meseta.data.staging import Staging, staged_folder
from meseta.data.survey import Survey, Surveyor
from meseta.data.values import seconds_of_texts
from meseta.spec import MesetaError, nearest
from meseta.spec.processors import num_cores


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """What `prepare` reads and how."""

    sources: Sequence[str]
    """Files, URLs or patterns: CSV with a header, Criteo TSV, libsvm or libffm (plain or gzip), or Parquet."""
    out: Path
    """Folder to make."""
    test_files: Sequence[str] = ()
    """Files or patterns whose rows make the test split; they may be among the sources."""
    test_fraction: float | None = None
    """Share of rows that make the test split; None: 0.1 where neither test_files nor test_after are given."""
    split_by: str | None = None
    """What makes that share: None: rows drawn by seed; 'group': whole groups, drawn by seed; 'time': the last rows."""
    test_after: str | None = None
    """Rows from this time on make the test split, as a number or in ISO 8601; it implies split_by 'time'."""
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
    label: str | None = None
    """CSV and Parquet: column of the label; None: by its name."""
    dense: Sequence[str] = ()
    """CSV and Parquet: dense columns; none: inferred, of those not named otherwise."""
    sparse: Sequence[str] = ()
    """Sparse columns, or fields of libffm; none: inferred, of those not named otherwise."""
    schema: Path | None = None
    """A file that says what the columns are, instead of the three options above; not for TSV."""
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
        if self.test_files and self.test_fraction is not None:
            raise MesetaError("prepare: --test-fraction and --test-files exclude each other; give one")
        if self.test_after is not None and (self.test_files or self.test_fraction is not None):
            raise MesetaError(
                "prepare: --test-after and --test-files or --test-fraction exclude each other; give one of them"
            )
        if self.split_by not in (None, "time", "group"):
            raise MesetaError(f"prepare: --split-by must be 'time' or 'group', got {self.split_by!r}")
        if self.split_by is not None and (self.test_files or (self.split_by == "group" and self.test_after)):
            other = "--test-files" if self.test_files else "--test-after"
            raise MesetaError(f"prepare: --split-by {self.split_by} and {other} exclude each other; give one")
        if self.schema is not None and (self.label or self.dense or self.sparse):
            raise MesetaError(
                "prepare: --schema and --label, --dense, --sparse exclude each other; give one or the others"
            )
        if self.test_fraction is not None and not 0 <= self.test_fraction < 1:
            raise MesetaError(f"prepare: --test-fraction must be in [0, 1), got {self.test_fraction}")
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
    def fraction(self) -> float | None:
        """Share of rows, or of groups, for the test split; None: split by files, or at a given time."""
        if self.test_files or self.test_after is not None:
            return None
        return 0.1 if self.test_fraction is None else self.test_fraction


def read_layout(options: PrepareOptions) -> Layout:
    """The layout that `prepare` would use. Raises MesetaError where it cannot be told, or does not fit the files."""
    schema = _schema_of(options)
    return _layout_of(options, schema, _find_sources(options, schema))


def prepare(
    options: PrepareOptions, progress: Progress | None = None, on_layout: Callable[[Layout], None] | None = None
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
    sources = _find_sources(options, schema)
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
                    replace(splitter, test_from=survey.test_from),
                    seed=options.seed,
                    hash_rows=hash_rows,
                )
                dataset = TwoPasses(options, sources, encoder, staging, progress).run(pool, num_threads)
            finally:
                pool.shutdown(cancel_futures=True)
            dataset.save(staging.folder)
    return Dataset.load(options.out)


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
            f"{str(out)!r} was not prepared from these files with these options: {other}; choose another run_dir (or "
            "data.dir), leave --data away to train on it as it is, or delete it to have it prepared again"
        )
    return Dataset.load(out)


def _schema_of(options: PrepareOptions) -> Schema | None:
    return None if options.schema is None else Schema.load(options.schema)


def _find_sources(options: PrepareOptions, schema: Schema | None) -> tuple[Source, ...]:
    by_fraction = not options.test_files
    delimiter, header = (schema.delimiter, schema.header) if schema else (None, ())
    return find_sources(
        options.sources, options.test_files, by_fraction=by_fraction, delimiter=delimiter, header=header
    )


def _layout_of(
    options: PrepareOptions, schema: Schema | None, sources: Sequence[Source], progress: Progress | None = None
) -> Layout:
    on_scan = None if progress is None else partial(progress, "scan")
    return find_layout(
        sources, options.label, options.dense, options.sparse, schema, on_scan, skip_bad=options.bad_rows == "skip"
    )


def _splitter(options: PrepareOptions, layout: Layout) -> Splitter:
    """Raises MesetaError where the column that decides is missing, or --test-after is no time."""
    by = cast(SplitBy | None, "time" if options.test_after is not None else options.split_by)
    if by is not None and getattr(layout, by) is None:
        raise MesetaError(
            f"prepare: --split-by {by} needs a column for it, and there is none; name it as {by!r} in a --schema file "
            "(of libsvm, qid is the group; Criteo's TSV has neither)"
        )
    test_from = None
    if options.test_after is not None:
        try:
            [test_from] = seconds_of_texts(pa.array([options.test_after])).tolist()
        except pa.ArrowInvalid:
            test_from = math.nan
        if math.isnan(test_from):
            raise MesetaError(
                f"prepare: --test-after {options.test_after!r} is no time; give one as 2026-01-31 23:59:59, or a number"
            )
    return Splitter(seed=options.seed, test_fraction=options.fraction or 0.0, by=by, test_from=test_from)


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


def _hash_rows(options: PrepareOptions, layout: Layout) -> dict[str, int] | None:
    if options.vocabulary:
        return None
    names = [column.name for column in layout.values]
    for name in options.hash_rows_by_feature:
        if name not in names:
            raise MesetaError(f"prepare: --hash-rows names no sparse feature {name!r}; {nearest(name, names)}")
    return {name: options.hash_rows_by_feature.get(name, options.hash_rows) for name in names}


__all__ = [
    "PrepareOptions",
    "Progress",
    "find_teacher",
    "load_prepared",
    "prepare",
    "read_layout",
]
