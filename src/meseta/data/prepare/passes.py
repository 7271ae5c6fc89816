"""The two passes of `meseta prepare`, blocks to spooled numbers to Parquet; both go on where they were killed."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from meseta.data.dataset.dataset import DataFile, Dataset, SourceFile, Split, TeacherMetrics
from meseta.data.dataset.features import Tables, describe_dense, describe_sparse, source_form
from meseta.data.dataset.statistics import FeatureStatistics
from meseta.data.dataset.touched import write_touched
from meseta.data.dataset.vocabulary import VocabularyCounter
from meseta.data.formats.bad_rows import BadRowCounter, ParsedRows, parse_good_rows
from meseta.data.formats.format import Block, FilePosition, Source, read_blocks
from meseta.data.prepare.encode import EncodedBlock, Encoder
from meseta.data.prepare.options import PrepareOptions
from meseta.data.prepare.spool import Spool
from meseta.data.prepare.staging import Staging
from meseta.data.prepare.write import Finisher, SplitWriter
from meseta.data.workers import in_order
from meseta.machine.files import parse_json
from meseta.spec import MesetaError

Progress = Callable[[str, int, float], None]
"""Called with the stage ('scan', 'read' or 'write'), its rows so far, and how much of it is done, 0 to 1.

Only libsvm and libffm are scanned, for their fields and weights, and files that are split by time or have quantiles."""

_VOCABULARY_BUDGET_BYTES = 384 << 20
COMMIT_S = 20.0
"""Seconds between two entries of the journal: what a kill costs, about."""


@dataclass(frozen=True)
class ReadSoFar:
    """How far pass 1 has come."""

    source: int
    """Number of the file at hand; that of files, at the end."""
    num_rows: int
    """Rows of all files so far."""
    place: FilePosition
    """Where the next row of that file begins."""
    position_bytes: int
    """How far the stored file has been read."""


class TwoPasses:
    """One call of `prepare`: the state between its two passes."""

    def __init__(
        self,
        options: PrepareOptions,
        sources: tuple[Source, ...],
        encoder: Encoder,
        staging: Staging,
        progress: Progress,
    ) -> None:
        self.options = options
        self.sources = sources
        self.encoder = encoder
        self.layout = encoder.layout
        self.staging = staging
        self.committed_s = time.monotonic()
        self.folder = staging.folder
        self.spool_dir = staging.scratch
        self.progress = progress
        self.spools = {
            name: Spool(self.spool_dir / f"{name}.arrow", self.layout.dense, self.layout.label_columns)
            for name in options.splits
        }
        self.rows_of_source = dict.fromkeys((source.path for source in sources), 0)
        self.bad_rows = BadRowCounter(options.max_bad_rows)
        self.not_finite: Counter[str] = Counter()
        self.counters: dict[str, VocabularyCounter] = {}
        budget = _VOCABULARY_BUDGET_BYTES // max(len(self.layout.sparse), 1)
        for name in [column.name for column in self.layout.values if column.name not in encoder.hash_rows]:
            self.counters[name] = VocabularyCounter(name, self.spool_dir, budget)

    def run(self, pool: ThreadPoolExecutor, num_threads: int) -> Dataset:
        self._read(pool, num_threads)
        vocabularies = {
            name: counter.finish(self.folder, self.options.min_count, self.encoder.hash_seeds[name])
            for name, counter in self.counters.items()
        }
        num_embeddings = {c.name: c.buckets.num_rows if c.buckets else 1 for c in self.layout.sparse if c.has_rows}
        num_embeddings |= {**self.encoder.hash_rows, **{n: v.num_embeddings for n, v in vocabularies.items()}}
        tables = Tables(
            num_embeddings=num_embeddings,
            hash_seeds=self.encoder.hash_seeds,
            vocabularies=vocabularies,
            statistics={c.name: FeatureStatistics(num_embeddings[c.name]) for c in self.layout.sparse},
        )
        splits = self._write(pool, tables)
        touched = {name: tables.statistics[name].bits() for name in self.encoder.hash_rows}
        return self._describe(tables, splits, write_touched(self.folder, touched))

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
                self.not_finite.update(dict(zip(self.layout.dense, encoded.num_not_finite, strict=False)))
            at = ReadSoFar(index, at.num_rows + block.num_rows, block.end, block.position_bytes)
            self.bad_rows.add(parts)
            done_bytes = sum(source.size_bytes for source in self.sources[:index])
            self.progress("read", at.num_rows, (done_bytes + block.position_bytes) / total_bytes)
            if time.monotonic() - self.committed_s >= COMMIT_S:
                self._commit_reading(at)
        self.bad_rows.check()
        for spool in self.spools.values():
            spool.close()
        self._check_splits(at.num_rows)
        if at.source < len(self.sources):
            self._commit_reading(replace(at, source=len(self.sources), place=FilePosition(), position_bytes=0))

    def _check_splits(self, num_rows: int) -> None:
        """Raise MesetaError where a split that training or choosing needs has no row."""
        if not self.spools["train"].num_rows:
            change = {"fraction": "lower", "after": "give a later", "files": "give fewer"}
            rules = [(split, self.options.rule_of(split)) for split in self.options.splits if split != "train"]
            ways_out = " or ".join(f"{change[rule]} --{split}-{rule}" for split, rule in rules if rule)
            raise MesetaError(f"prepare: none of {num_rows} rows is left for training; {ways_out}")
        if "valid" in self.spools and not self.spools["valid"].num_rows:
            change = {"fraction": "raise", "after": "give an earlier", "files": "give other"}
            rule = self.options.rule_of("valid") or "fraction"
            raise MesetaError(
                f"prepare: none of {num_rows} rows falls to the valid split; {change[rule]} --valid-{rule}, or go "
                "without it: --valid-fraction 0"
            )

    def _jobs(self, at: ReadSoFar) -> Iterator[Callable[[], tuple[int, Block, ParsedRows[EncodedBlock]]]]:
        """Each gives the number of its source and the block beside what was made of it."""
        first_row = at.num_rows
        for index, source in enumerate(self.sources[at.source :], at.source):
            for block in read_blocks(source, self.layout.columns, at.place if index == at.source else None):
                yield lambda index=index, block=block, row=first_row: (index, block, self._encode(block, row))  # type: ignore[misc]
                first_row += block.num_rows

    def _encode(self, block: Block, first_global_row: int) -> ParsedRows[EncodedBlock]:
        rows_before = first_global_row - block.first_row
        if self.options.bad_rows == "skip":
            return parse_good_rows(block, lambda part: self.encoder.encode(part, rows_before + part.first_row))
        try:
            return ParsedRows([self.encoder.encode(block, first_global_row)], block.num_rows)
        except MesetaError as error:
            raise MesetaError(f"{error}, or leave such rows out with --bad-rows skip") from None

    def _resume_reading(self) -> ReadSoFar:
        """Take up what was committed of pass 1."""
        state = self.staging.state.get("read")
        if state is None:
            return ReadSoFar(0, 0, FilePosition(), 0)
        for name, spool in self.spools.items():
            spool.set_state(state["spools"][name])
        for name, counter in self.counters.items():
            counter.set_state(state["counters"][name])
        self.rows_of_source.update(zip(self.rows_of_source, state["rows_of_source"], strict=True))
        self.bad_rows.set_state(state["bad_rows"])
        self.not_finite.update(state["not_finite"])
        return ReadSoFar(state["source"], state["num_rows"], FilePosition(**state["place"]), state["position_bytes"])

    def _commit_reading(self, at: ReadSoFar) -> None:
        state = {
            **asdict(at),
            "spools": {name: spool.get_state() for name, spool in self.spools.items()},
            "counters": {name: counter.get_state() for name, counter in self.counters.items()},
            "rows_of_source": list(self.rows_of_source.values()),
            "bad_rows": self.bad_rows.get_state(),
            "not_finite": dict(self.not_finite),
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
        moments = self.spools["train"].moments
        finisher = Finisher(self.layout, moments.mean, moments.std, tables.vocabularies)
        splits = {}
        for name, spool in self.spools.items():
            splits[name] = SplitWriter(
                layout=self.layout,
                spool=spool,
                finisher=finisher,
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

    def _describe(self, tables: Tables, splits: dict[str, Split], touched: str | None) -> Dataset:
        options, layout = self.options, self.layout
        return Dataset(
            labels=layout.label_columns,
            label_source=layout.labels[0] if len(layout.labels) == 1 else None,
            weight=layout.weight,
            group=layout.group_column,
            time=layout.time,
            dense=describe_dense(layout, self.spools["train"].moments),
            sparse=describe_sparse(layout, tables),
            splits=splits,
            teacher=find_teacher(self.sources),
            seed=options.seed,
            test_fraction=options.share_of("test"),
            valid_fraction=options.share_of("valid"),
            split_by=self.encoder.splitter.by,
            test_from=self.encoder.splitter.test_from,
            valid_from=self.encoder.splitter.valid_from,
            sources=tuple(
                SourceFile(path=s.path, split=s.split, num_rows=self.rows_of_source[s.path]) for s in self.sources
            ),
            not_finite=dict(+self.not_finite),
            bad_rows=self.bad_rows.found if options.bad_rows == "skip" else None,
            source_form=source_form(layout, self.sources[0].format),
            touched=touched,
        )


def find_teacher(sources: Sequence[Source]) -> TeacherMetrics | None:
    """What the teacher.json beside synthetic sources says of the test split, or None where it does not cover it.

    A test split of one whole file takes that file's figures; one drawn from all rows takes those of all files.
    """
    folders = {Path(source.path).parent for source in sources}
    path = next(iter(folders)) / "teacher.json"  # no URL has one
    if len(folders) != 1 or not path.exists():
        return None
    try:
        document = parse_json(path.read_bytes())
        test = [source for source in sources if source.split == "test"]
        if test:
            entry = document["files"].get(Path(test[0].path).name) if len(test) == 1 else None
        else:
            drawn_from = {Path(source.path).name for source in sources if source.split == "both"}
            entry = document["all"] if drawn_from == set(document["files"]) else None
        # Without positives, or negatives, the teacher has no AUC either.
        return TeacherMetrics(auc=entry["auc"], ne=entry["ne"]) if entry and entry["auc"] is not None else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MesetaError(
            f"{str(path)!r} is not what `meseta data synth` writes ({error!r}); remove or repair it"
        ) from None
