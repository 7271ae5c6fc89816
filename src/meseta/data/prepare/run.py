"""Two-pass preparation: blocks are encoded and spooled, then written as Parquet. Both passes resume when killed."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any, Literal, cast

import pyarrow as pa

from meseta.data.dataset.dataset import DATASET_FILE, Dataset
from meseta.data.dataset.records import DataFile, Split
from meseta.data.dataset.statistics import FeatureTables, WindowCounter
from meseta.data.formats.format import Source
from meseta.data.formats.table_rows import parse_times
from meseta.data.hash_categories import feature_seed
from meseta.data.prepare.continuation import Continuation
from meseta.data.prepare.earlier_dataset import find_earlier_form, layout_from_dataset
from meseta.data.prepare.encode import Encoder, SplitBy, Splitter
from meseta.data.prepare.first_pass import FirstPass, PreparationJob, Progress
from meseta.data.prepare.options import HELD_OUT_SPLITS, PrepareOptions
from meseta.data.prepare.recipe_preparation import RecipePreparation
from meseta.data.prepare.sources import find_sources, find_teacher
from meseta.data.prepare.staging import Staging, load_record, make_record, record_difference, staged_folder
from meseta.data.prepare.survey import Survey, Surveyor
from meseta.data.prepare.write import RowFinalizer, SplitWriter, Spool
from meseta.data.schema.find_layout import find_layout
from meseta.data.schema.layout import RawLayout
from meseta.data.schema.schema import Schema, format_schema
from meseta.spec import MesetaError, suggest
from meseta.system.processors import choose_num_threads, limit_arrow_threads


class TwoPassPreparation:
    """State of one call of `prepare` across its two passes."""

    def __init__(
        self,
        job: PreparationJob,
        staging: Staging,
        progress: Progress,
    ) -> None:
        self.layout = job.encoder.layout
        self.staging = staging
        self.progress = progress
        self.spools = {
            name: Spool(staging.scratch / f"{name}.arrow", self.layout.dense, self.layout.label_columns)
            for name in job.options.splits
        }
        self.first_pass = FirstPass(job, staging, progress, self.spools)

    def run(self, pool: ThreadPoolExecutor, num_threads: int) -> Dataset:
        self.first_pass.read(pool, num_threads)
        tables = self.first_pass.tables(self.staging.folder, {})
        splits = self._write(pool, tables)
        touched = self.first_pass.write_touched(self.staging.folder, tables.statistics)
        return self.first_pass.describe(tables, splits, touched)

    def _write(self, pool: ThreadPoolExecutor, tables: FeatureTables) -> dict[str, Split]:
        total_rows = sum(spool.num_rows for spool in self.spools.values())
        done = self.staging.state.get("write", {})
        files = {name: [DataFile(**file) for file in done.get(name, ())] for name in self.spools}
        written = sum(file.num_rows for parts in files.values() for file in parts)
        lock = threading.Lock()

        def on_rows(num_rows: int) -> None:
            nonlocal written
            with lock:
                written += num_rows
                self.progress("write", written, written / total_rows)

        self.progress("write", written, written / total_rows)
        finisher = RowFinalizer(self.layout, *self.first_pass.mean_and_std(), tables.vocabularies)
        splits = {}
        # Write the training split first, because the counters of the test split compare with its statistics.
        counters: dict[str, Mapping[str, WindowCounter]] = {"train": tables.statistics, "test": tables.test_lookups}
        for name, spool in self.spools.items():
            splits[name] = SplitWriter(
                layout=self.layout,
                spool=spool,
                finalizer=finisher,
                counters=counters.get(name, {}),
                out=self.staging.folder,
                name=name,
                on_rows=on_rows,
                files=files[name],
            ).write(pool, lambda: self._commit_writing(files))
        return splits

    def _commit_writing(self, files: Mapping[str, Sequence[DataFile]]) -> None:
        # Counts of ids are not committed. A resumed process counts the ids of the finished files again.
        if self.staging.is_commit_due:
            done = {name: [file.model_dump() for file in parts] for name, parts in files.items()}
            self.staging.commit({**self.staging.state, "write": done})


DEFAULT_VALID_FRACTION = 0.1
"""Share of the valid split if a caller needs one and no option defines it."""
# Measured cost of hashing to 100,000 rows instead: 0.014 of AUC on a log with 60,000 users of five rows each, and 0.015
# on a log with an unbounded number of ids.
DEFAULT_MIN_COUNT = 2
"""Minimum count of a value in a vocabulary of `meseta train --data`."""


def read_layout(options: PrepareOptions) -> RawLayout:
    """Return the layout that `prepare` would use. Raises MesetaError if there is none, or it does not fit the files."""
    schema = _load_schema(options)
    earlier = _load_earlier(options)
    return _find_layout(options, schema, _find_sources(options, schema, earlier), earlier)[1]


def prepare(
    options: PrepareOptions, progress: Progress | None = None, on_layout: Callable[[RawLayout], None] | None = None
) -> Dataset:
    """Write the dataset directory `options.out`, or its recipe with `options.recipe_only`, and return its description.

    `on_layout` is called with the layout before the first pass. The folder appears with one rename after everything is
    written, and an error leaves nothing behind. After an interruption or a kill, the same call resumes the work and
    produces the same bytes.

    Raises MesetaError if a source is missing, empty or truncated, sources have different formats, a row cannot be
    parsed (with file, line and field), `out` exists, no row is left for training, or the files do not match
    `options.like`.
    """
    limit_arrow_threads()
    progress = progress or _no_progress
    schema = _load_schema(options)
    earlier = _load_earlier(options)
    sources = _find_sources(options, schema, earlier)
    record = make_record(options, sources, None if earlier is None else earlier.dataset)
    sources, layout = _find_layout(options, schema, sources, earlier, progress)
    if on_layout is not None:
        on_layout(layout)
    splitter = _make_splitter(options, layout, options.seed if earlier is None else earlier.dataset.seed)
    hash_rows = _hash_rows(options, layout) if earlier is None else earlier.hash_rows(layout)
    num_threads = choose_num_threads(options.num_threads, num_sharing=1).number  # Other ranks wait.
    columns = sha256(format_schema(layout).encode()).hexdigest()
    with staged_folder(options.out, record, force=options.force, columns=columns) as staging:
        if not staging.is_complete:
            pool = ThreadPoolExecutor(num_threads, thread_name_prefix="meseta-prepare")
            try:
                surveyor = Surveyor(
                    sources=sources,
                    layout=_unsurveyed(layout, earlier),
                    splitter=splitter,
                    scratch=staging.scratch,
                    pool=pool,
                    num_threads=num_threads,
                    on_rows=partial(progress, "scan"),
                    skip_bad_rows=options.bad_rows == "skip",
                )
                survey = _load_or_make_survey(surveyor, staging)
                job = PreparationJob(
                    options=options,
                    sources=sources,
                    encoder=_make_encoder(survey, layout, splitter, hash_rows, earlier),
                    earlier=earlier,
                )
                make = RecipePreparation if options.recipe_only else TwoPassPreparation
                dataset = make(job, staging, progress).run(pool, num_threads)
            finally:
                pool.shutdown(cancel_futures=True)
            dataset.save(staging.folder)
    return Dataset.load(options.out)


def _unsurveyed(layout: RawLayout, earlier: Continuation | None) -> RawLayout:
    """Return the layout without ages, if these are determined by an earlier dataset."""
    if earlier is None:
        return layout
    settled = {age.name for age in earlier.layout.ages}
    ages = tuple(age for age in layout.ages if age.name not in settled)
    return replace(layout, ages=ages, dense=tuple(name for name in layout.dense if name not in settled))


def _make_encoder(
    survey: Survey,
    layout: RawLayout,
    splitter: Splitter,
    hash_rows: Mapping[str, int],
    earlier: Continuation | None,
) -> Encoder:
    layout = layout.with_survey(survey.boundaries, survey.periods, survey.dates)
    seeds = {column.name: feature_seed(column.name, splitter.seed) for column in layout.sparse}
    splitter = replace(
        splitter,
        test_from=survey.test_from,
        valid_from=survey.valid_from,
        is_valid_by_time=splitter.is_valid_by_time and survey.valid_from is not None,
    )
    if earlier is None:
        return Encoder(layout, splitter, hash_seeds=seeds, hash_rows=hash_rows)
    return Encoder(
        layout,
        splitter,
        hash_seeds=earlier.hash_seeds(layout),
        hash_rows=hash_rows,
        uncounted=earlier.kept_vocabularies,
    )


def with_training_defaults(options: PrepareOptions) -> PrepareOptions:
    """Return the options that `meseta train --data` uses: a vocabulary, buckets, and a valid split unless an option
    defines it. Options with `like` are returned unchanged.

    The valid split are the last rows if there is a column of times. If `options.out` was prepared already, its choices
    of vocabulary, buckets, valid split and features of times are kept.
    """
    if options.like is not None:
        return options
    record = load_record(options.out)
    former = {} if record is None else record["options"]
    # Do not replace hashing by a vocabulary in a dataset that was prepared otherwise.
    if record is None or former.get("vocabulary"):
        min_count = former.get("min_count")
        least = min_count if isinstance(min_count, int) and min_count >= 1 else DEFAULT_MIN_COUNT
        options = replace(options, vocabulary=True, min_count=least)
    # Earlier versions made no features of times.
    if record is not None and "time_features" not in former and options.time_features is None:
        options = replace(options, time_features=())
    options = replace(options, default_buckets=record is None or bool(former.get("default_buckets")))
    if options.valid_fraction is not None or options.split_rule("valid"):
        return options
    if record is not None and former.get("valid_fraction") is None:
        return options
    by_time = options.split_by is None and (record is None or bool(former.get("valid_by_time")))
    return replace(options, valid_fraction=DEFAULT_VALID_FRACTION, valid_by_time=by_time)


def load_prepared(options: PrepareOptions, *, checks_like: bool = True) -> Dataset | None:
    """Return the dataset that `prepare` wrote with these options, or `None` if `options.out` contains no dataset.

    Without `checks_like`, the dataset of `options.like` is not read, so it may have changed or be missing. Raises
    MesetaError if the dataset was prepared from other sources or with other options.
    """
    out = options.out
    if not (out / DATASET_FILE).exists():
        return None
    record = load_record(out)
    if record is None:
        difference: str | None = "it has no record of its sources"
    else:
        difference = record_difference(record, _make_record(options, record, checks_like=checks_like))
    if difference:
        raise MesetaError(
            f"{str(out)!r} was not prepared from these files with these options: {difference}; use --force to prepare "
            "it again and restart the run, choose another run_dir (or data.dir), or omit --data to use it unchanged"
        )
    return Dataset.load(out)


def _load_earlier(options: PrepareOptions) -> Continuation | None:
    return None if options.like is None else Continuation.load(options, options.like)


def _make_record(options: PrepareOptions, former: Mapping[str, Any], *, checks_like: bool) -> dict[str, Any]:
    schema = _load_schema(options)
    if checks_like or options.like is None:
        earlier = _load_earlier(options)
        sources = _find_sources(options, schema, earlier)
        return make_record(options, sources, None if earlier is None else earlier.dataset)
    # The prepared rows have the form of the earlier ones.
    dataset = Dataset.load(options.out)
    form = Continuation(dataset=dataset, layout=layout_from_dataset(dataset), options=options)
    record = make_record(options, _find_sources(options, schema, form), dataset)
    record["options"]["like"] = former["options"].get("like")
    return record


def _load_schema(options: PrepareOptions) -> Schema | None:
    return None if options.schema is None else Schema.load(options.schema)


def _find_sources(options: PrepareOptions, schema: Schema | None, earlier: Continuation | None) -> tuple[Source, ...]:
    delimiter, header = (schema.delimiter, schema.header) if schema else (None, ())
    encoding = options.encoding or (schema.encoding if schema else None)
    patterns = options.sources
    split_files: dict[Literal["valid", "test"], Sequence[str]] = {
        "valid": options.valid_files,
        "test": options.test_files,
    }
    split_rest = any(options.split_rule(split) in ("fraction", "after") for split in HELD_OUT_SPLITS)
    if earlier is not None:
        sources = find_earlier_form(earlier.dataset, patterns, split_files, split_rest=split_rest, encoding=encoding)
    else:
        sources = find_sources(
            patterns, split_files, split_rest=split_rest, delimiter=delimiter, header=header, encoding=encoding
        )
    if encoding is not None and not sources[0].format.is_text:
        raise MesetaError(
            f"prepare: an encoding is for text, but {sources[0].path!r} is {sources[0].format.title}; remove the "
            "encoding"
        )
    return sources


def _find_layout(
    options: PrepareOptions,
    schema: Schema | None,
    sources: tuple[Source, ...],
    earlier: Continuation | None,
    progress: Progress | None = None,
) -> tuple[tuple[Source, ...], RawLayout]:
    """Return (raw files with their column names, layout of their rows)."""
    on_scan = None if progress is None else partial(progress, "scan")
    if earlier is not None:
        return earlier.match(sources, schema, on_scan)
    sources = sources[0].format.with_header(sources)
    skip_bad = options.bad_rows == "skip"
    return sources, find_layout(sources, options.named_columns, schema, on_scan, skip_bad=skip_bad)


def _make_splitter(options: PrepareOptions, layout: RawLayout, seed: int) -> Splitter:
    is_after = any(options.split_rule(split) == "after" for split in HELD_OUT_SPLITS)
    by = cast(SplitBy | None, "time" if is_after else options.split_by)
    if by is not None and getattr(layout, by) is None:
        raise MesetaError(
            f"prepare: --split-by {by} needs a column, but none has this role; name it as {by!r} in a --schema file"
            f"{', or with --time' if by == 'time' else ''} (libsvm has the group qid; Criteo's TSV has neither)"
        )
    splitter = Splitter(
        seed=seed,
        test_fraction=options.split_fraction("test") or 0.0,
        valid_fraction=options.split_fraction("valid") or 0.0,
        by=by,
        test_from=_parse_time("--test-after", options.test_after),
        valid_from=_parse_time("--valid-after", options.valid_after),
        is_valid_by_time=options.valid_by_time and by is None and layout.time is not None,
    )
    splitter.check_order()
    return splitter


def _parse_time(option: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        [seconds] = parse_times(pa.array([text])).tolist()
    except pa.ArrowInvalid:
        seconds = math.nan
    if math.isnan(seconds):
        raise MesetaError(f"prepare: {option} {text!r} is not a time; use the form 2026-01-31 23:59:59, or a number")
    return float(seconds)


def _load_or_make_survey(surveyor: Surveyor, staging: Staging) -> Survey:
    if "survey" in staging.state:
        return Survey.from_dict(staging.state["survey"])
    survey = surveyor.survey()
    if not surveyor.is_unnecessary:
        staging.commit({**staging.state, "survey": survey.to_dict()})
    return survey


def _no_progress(stage: str, rows: int, share: float) -> None:
    pass


def _hash_rows(options: PrepareOptions, layout: RawLayout) -> dict[str, int]:
    if options.vocabulary:
        return {}
    names = [column.name for column in layout.encoded_features]
    for name in options.hash_rows_by_feature:
        if name not in names:
            raise MesetaError(f"prepare: --hash-rows: {name!r} is not a sparse feature; {suggest(name, names)}")
    return {name: options.hash_rows_by_feature.get(name, options.hash_rows) for name in names}


__all__ = [
    "PrepareOptions",
    "Progress",
    "find_teacher",
    "load_prepared",
    "prepare",
    "read_layout",
    "with_training_defaults",
]
