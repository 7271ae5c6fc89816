"""`meseta prepare`: raw click logs to a dataset directory, in two passes and bounded memory.

Pass 1 parses, splits and hashes blocks on all cores and spools the numbers; pass 2 standardises, counts and writes
Parquet. The result is a function of the rows, their order and the options alone.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

import pyarrow as pa

from meseta.data.bad_rows import BadRowCounter, GoodParts, good_parts
from meseta.data.dataset import FILE_NAME, DataFile, Dataset, SourceFile, Split, Teacher
from meseta.data.encode import EncodedBlock, Encoder
from meseta.data.features import Tables, describe_dense, describe_sparse
from meseta.data.files import refuse_url
from meseta.data.layout import find_layout
from meseta.data.record import difference, load_record, record_of
from meseta.data.schema import Layout, Schema
from meseta.data.sources import Block, Place, Source, find_sources, read_blocks
from meseta.data.splitting import SplitBy, Splitter
from meseta.data.spool import Spool
from meseta.data.staging import Staging, staged_folder
from meseta.data.statistics import FeatureStatistics
from meseta.data.survey import Survey, Surveyor
from meseta.data.values import seconds_of_texts
from meseta.data.vocabulary import VocabularyCounter
from meseta.data.workers import in_order
from meseta.data.write import SplitWriter
from meseta.spec import MesetaError, nearest
from meseta.spec.processors import num_cores

Progress = Callable[[str, int, float], None]
"""Called with the stage ('scan', 'read' or 'write'), its rows so far, and how much of it is done, 0 to 1.

Only libsvm and libffm are scanned, for their fields and weights, and files that are split by time or have quantiles."""

_VOCABULARY_BUDGET_BYTES = 384 << 20
COMMIT_S = 20.0
"""Seconds between two entries of the journal: what a kill costs, about."""


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
    return _layout_of(options, _find_sources(options))


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
    sources = _find_sources(options)
    layout = _layout_of(options, sources, progress)
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
                    on_rows=partial(progress or _no_progress, "scan"),
                    skip_bad=options.bad_rows == "skip",
                )
                survey = _survey(surveyor, staging)
                encoder = Encoder(
                    layout.with_boundaries(survey.boundaries),
                    replace(splitter, test_from=survey.test_from),
                    seed=options.seed,
                    hash_rows=hash_rows,
                )
                dataset = _Run(options, sources, encoder, staging, progress).run(pool, num_threads)
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
        other = difference(record, record_of(options, _find_sources(options)))
    if other:
        raise MesetaError(
            f"{str(out)!r} was not prepared from these files with these options: {other}; choose another run_dir (or "
            "data.dir), leave --data away to train on it as it is, or delete it to have it prepared again"
        )
    return Dataset.load(out)


@dataclass(frozen=True)
class ReadSoFar:
    """How far pass 1 has come."""

    source: int
    """Number of the file at hand; that of files, at the end."""
    num_rows: int
    """Rows of all files so far."""
    place: Place
    """Where the next row of that file begins."""
    position_bytes: int
    """How far the stored file has been read."""


class _Run:
    """One call of `prepare`: the state between its two passes."""

    def __init__(
        self,
        options: PrepareOptions,
        sources: tuple[Source, ...],
        encoder: Encoder,
        staging: Staging,
        progress: Progress | None,
    ) -> None:
        self.options = options
        self.sources = sources
        self.encoder = encoder
        self.layout = encoder.layout
        self.staging = staging
        self.committed_s = time.monotonic()
        self.folder = staging.folder
        self.spool_dir = staging.scratch
        self.progress = progress or _no_progress
        self.spools = {
            name: Spool(self.spool_dir / f"{name}.arrow", self.layout.dense, self.layout.label_columns)
            for name in ("train", "test")
        }
        self.rows_of_source = dict.fromkeys((source.path for source in sources), 0)
        self.bad_rows = BadRowCounter(options.max_bad_rows)
        self.counters: dict[str, VocabularyCounter] = {}
        if encoder.hash_rows is None:
            budget = _VOCABULARY_BUDGET_BYTES // max(len(self.layout.sparse), 1)
            for column in self.layout.values:
                self.counters[column.name] = VocabularyCounter(column.name, self.spool_dir, budget)

    def run(self, pool: ThreadPoolExecutor, num_threads: int) -> Dataset:
        self._read(pool, num_threads)
        vocabularies = {
            name: counter.finish(self.folder, self.options.min_count, self.encoder.hash_seeds[name])
            for name, counter in self.counters.items()
        }
        num_embeddings = {column.name: column.buckets.num_rows for column in self.layout.sparse if column.buckets}
        num_embeddings |= self.encoder.hash_rows or {n: v.num_embeddings for n, v in vocabularies.items()}
        tables = Tables(
            num_embeddings=num_embeddings,
            hash_seeds=self.encoder.hash_seeds,
            vocabularies=vocabularies,
            statistics={c.name: FeatureStatistics(num_embeddings[c.name]) for c in self.layout.sparse},
        )
        splits = self._write(pool, tables)
        return self._describe(tables, splits)

    def _read(self, pool: ThreadPoolExecutor, num_threads: int) -> None:
        """Pass 1: workers encode blocks, this thread reads ahead of them and spools their results in order."""
        at = self._resume_reading()
        total_bytes = sum(source.size_bytes for source in self.sources)
        done_bytes = sum(source.size_bytes for source in self.sources[: at.source])
        self.progress("read", at.num_rows, (done_bytes + at.position_bytes) / total_bytes)
        for index, block, parts in in_order(pool, self._jobs(at), num_threads + 1):
            for encoded in parts.results:
                for name, batch in encoded.splits.items():
                    self.spools[name].add(batch)
                    self.rows_of_source[block.source.path] += batch.num_rows
                for name, counted in encoded.counted.items():
                    self.counters[name].add(counted)
            at = ReadSoFar(index, at.num_rows + block.num_rows, block.end, block.position_bytes)
            self.bad_rows.add(parts)
            done_bytes = sum(source.size_bytes for source in self.sources[:index])
            self.progress("read", at.num_rows, (done_bytes + block.position_bytes) / total_bytes)
            if time.monotonic() - self.committed_s >= COMMIT_S:
                self._commit_reading(at)
        self.bad_rows.check()
        for spool in self.spools.values():
            spool.close()
        if not self.spools["train"].num_rows:
            raise MesetaError(f"prepare: none of {at.num_rows} rows is left for training; lower --test-fraction")
        if at.source < len(self.sources):
            self._commit_reading(replace(at, source=len(self.sources), place=Place(), position_bytes=0))

    def _jobs(self, at: ReadSoFar) -> Iterator[Callable[[], tuple[int, Block, GoodParts[EncodedBlock]]]]:
        """Each gives the number of its source and the block beside what was made of it."""
        first_row = at.num_rows
        for index, source in enumerate(self.sources[at.source :], at.source):
            for block in read_blocks(source, self.layout.columns, at.place if index == at.source else None):
                yield lambda index=index, block=block, row=first_row: (index, block, self._encode(block, row))  # type: ignore[misc]
                first_row += block.num_rows

    def _encode(self, block: Block, first_global_row: int) -> GoodParts[EncodedBlock]:
        rows_before = first_global_row - block.first_row
        if self.options.bad_rows == "skip":
            return good_parts(block, lambda part: self.encoder.encode(part, rows_before + part.first_row))
        try:
            return GoodParts([self.encoder.encode(block, first_global_row)], block.num_rows)
        except MesetaError as error:
            raise MesetaError(f"{error}, or leave such rows out with --bad-rows skip") from None

    def _resume_reading(self) -> ReadSoFar:
        """Take up what was committed of pass 1."""
        state = self.staging.state.get("read")
        if state is None:
            return ReadSoFar(0, 0, Place(), 0)
        for name, spool in self.spools.items():
            spool.set_state(state["spools"][name])
        for name, counter in self.counters.items():
            counter.set_state(state["counters"][name])
        self.rows_of_source.update(zip(self.rows_of_source, state["rows_of_source"], strict=True))
        self.bad_rows.set_state(state["bad_rows"])
        return ReadSoFar(state["source"], state["num_rows"], Place(**state["place"]), state["position_bytes"])

    def _commit_reading(self, at: ReadSoFar) -> None:
        state = {
            **asdict(at),
            "spools": {name: spool.get_state() for name, spool in self.spools.items()},
            "counters": {name: counter.get_state() for name, counter in self.counters.items()},
            "rows_of_source": list(self.rows_of_source.values()),
            "bad_rows": self.bad_rows.get_state(),
        }
        self.staging.commit({**self.staging.state, "read": state})
        self.committed_s = time.monotonic()

    def _write(self, pool: ThreadPoolExecutor, tables: Tables) -> dict[str, Split]:
        """Pass 2: one worker per part file."""
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
        splits = {}
        for name, spool in self.spools.items():
            splits[name] = SplitWriter(
                layout=self.layout,
                spool=spool,
                moments=self.spools["train"].moments,
                num_embeddings=tables.num_embeddings,
                vocabularies=tables.vocabularies,
                statistics=tables.statistics if name == "train" else {},
                out=self.folder,
                name=name,
                on_rows=on_rows,
                files=files[name],
            ).write(pool, lambda: self._commit_writing(files))
        return splits

    def _commit_writing(self, files: Mapping[str, Sequence[DataFile]]) -> None:
        """The parts that are written, now and then; what was counted on the way is counted again."""
        if time.monotonic() - self.committed_s >= COMMIT_S:
            done = {name: [file.model_dump() for file in parts] for name, parts in files.items()}
            self.staging.commit({**self.staging.state, "write": done})
            self.committed_s = time.monotonic()

    def _describe(self, tables: Tables, splits: dict[str, Split]) -> Dataset:
        options, layout = self.options, self.layout
        return Dataset(
            labels=layout.label_columns,
            weight=layout.weight,
            group=layout.group_column,
            time=layout.time,
            dense=describe_dense(layout, self.spools["train"].moments),
            sparse=describe_sparse(layout, tables),
            splits=splits,
            teacher=find_teacher(self.sources),
            seed=options.seed,
            test_fraction=options.fraction,
            split_by=self.encoder.splitter.by,
            test_from=self.encoder.splitter.test_from,
            sources=tuple(
                SourceFile(path=s.path, split=s.split, num_rows=self.rows_of_source[s.path]) for s in self.sources
            ),
            bad_rows=self.bad_rows.found if options.bad_rows == "skip" else None,
        )


def find_teacher(sources: Sequence[Source]) -> Teacher | None:
    """What the teacher.json beside synthetic sources says of the test split, or None where it does not cover it.

    A test split of one whole file takes that file's figures; one drawn from all rows takes those of all files.
    """
    folders = {Path(source.path).parent for source in sources}
    path = next(iter(folders)) / "teacher.json"  # no URL has one
    if len(folders) != 1 or not path.exists():
        return None
    try:
        document = json.loads(path.read_text())
        test = [source for source in sources if source.split == "test"]
        if any(source.split == "both" for source in sources):
            entry = document["all"] if {Path(s.path).name for s in sources} == set(document["files"]) else None
        else:
            entry = document["files"].get(Path(test[0].path).name) if len(test) == 1 else None
        # Without positives, or negatives, the teacher has no AUC either.
        return Teacher(auc=entry["auc"], ne=entry["ne"]) if entry and entry["auc"] is not None else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MesetaError(
            f"{str(path)!r} is not what `meseta data synth` writes ({error!r}); remove or repair it"
        ) from None


def _find_sources(options: PrepareOptions) -> tuple[Source, ...]:
    by_fraction = not options.test_files
    schema = None if options.schema is None else Schema.load(options.schema)
    delimiter, header = (schema.delimiter, schema.header) if schema else (None, ())
    return find_sources(
        options.sources, options.test_files, by_fraction=by_fraction, delimiter=delimiter, header=header
    )


def _layout_of(options: PrepareOptions, sources: Sequence[Source], progress: Progress | None = None) -> Layout:
    schema = None if options.schema is None else Schema.load(options.schema)
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
