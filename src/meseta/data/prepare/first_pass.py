"""First pass of `meseta prepare`: encode blocks of raw files and assign rows to splits. It resumes when killed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.growth import GrowthRule, VocabularyParts, grow_vocabulary
from meseta.data.dataset.queues import run_in_order
from meseta.data.dataset.records import SourceFile, Split
from meseta.data.dataset.statistics import (
    MAX_TOUCHED_TABLE_ROWS,
    FeatureStatistics,
    FeatureTables,
    LookupCounter,
    describe_dense,
    describe_sparse,
    make_source_form,
    write_touched,
)
from meseta.data.dataset.vocabulary import Vocabulary, VocabularyCounter
from meseta.data.formats.bad_rows import BadRowCounter, ParsedRows, are_bad_rows_rare, parse_good_rows
from meseta.data.formats.format import Block, FilePosition, Source, read_blocks
from meseta.data.prepare.continuation import Continuation
from meseta.data.prepare.encode import EncodedBlock, Encoder
from meseta.data.prepare.options import PrepareOptions
from meseta.data.prepare.sources import find_teacher
from meseta.data.prepare.staging import Staging
from meseta.data.prepare.write import SplitTally
from meseta.spec import MesetaError

Progress = Callable[[str, int, float], None]
"""Called with the stage ('scan', 'read', 'write' or 'count'), its number of rows so far and its completed share, 0 to
1.

'scan' occurs if columns or limits must be found before encoding: for libsvm and libffm, splits by time, and quantiles.
'read' and 'write' are the two passes. A recipe has 'count' in place of 'write'.
"""

_VOCABULARY_BUDGET_BYTES = 384 << 20


@dataclass(frozen=True)
class ReadProgress:
    """Progress of the first pass."""

    source: int
    """Index of the current file, or the number of files at the end."""
    num_rows: int
    place: FilePosition
    position_bytes: int
    """Bytes of the stored file that have been read."""


@dataclass(frozen=True, kw_only=True)
class PreparationJob:
    """Everything that determines the rows of a preparation."""

    options: PrepareOptions
    sources: tuple[Source, ...]
    encoder: Encoder
    earlier: Continuation | None = None
    """Earlier dataset whose next part is prepared."""


@runtime_checkable
class BlockObserver(Protocol):
    """Observer of the encoded blocks of the first pass."""

    def add(self, source: int, block: Block, parts: ParsedRows[EncodedBlock]) -> None:
        """Receive the next block of source number `source`, with the results of encoding it."""

    def get_state(self) -> Any:
        """Return plain data for `set_state` of another observer."""

    def set_state(self, state: Any) -> None:
        """Restore the result of `get_state`."""


class FirstPass:
    """Reads all sources once. Rows are added to the totals of their splits, values to the counters of vocabularies."""

    def __init__(
        self,
        job: PreparationJob,
        staging: Staging,
        progress: Progress,
        tallies: Mapping[str, SplitTally],
        observer: BlockObserver | None = None,
    ) -> None:
        """Create the pass. `tallies` has one entry for each split of the options."""
        self.options, self.sources, self.encoder, self.earlier = job.options, job.sources, job.encoder, job.earlier
        self.layout = job.encoder.layout
        self.staging = staging
        self.progress = progress
        self.tallies = tallies
        self.observer = observer
        self.rows_per_source = dict.fromkeys((source.path for source in self.sources), 0)
        self.bad_rows = BadRowCounter(self.options.max_bad_rows)
        self.non_finite: Counter[str] = Counter()
        self.num_unlabeled = 0
        budget = _VOCABULARY_BUDGET_BYTES // max(len(self.layout.sparse), 1)
        self.counters = {
            name: VocabularyCounter(name, staging.scratch, budget, self.encoder.hash_seeds[name])
            for name in self._vocabulary_features
            if name not in self.encoder.uncounted
        }

    @property
    def _vocabulary_features(self) -> list[str]:
        names = [column.name for column in self.layout.encoded_features]
        return [name for name in names if name not in self.encoder.hash_rows]

    def read(self, pool: ThreadPoolExecutor, num_threads: int) -> None:
        """Read all sources, or the rest of them after an interruption. Workers encode blocks, and this thread merges
        them in order.

        Raises MesetaError if a row cannot be parsed, too many rows are skipped, or a split has no rows.
        """
        at = self._resume()
        total_bytes = sum(source.size_bytes for source in self.sources)
        done_bytes = sum(source.size_bytes for source in self.sources[: at.source])
        self.progress("read", at.num_rows, (done_bytes + at.position_bytes) / total_bytes)
        for index, block, parts in run_in_order(pool, self._jobs(at), num_threads + 1):
            self._add_block(index, block, parts)
            at = ReadProgress(index, at.num_rows + block.num_rows, block.end, block.position_bytes)
            self.bad_rows.add(parts)
            done_bytes = sum(source.size_bytes for source in self.sources[:index])
            self.progress("read", at.num_rows, (done_bytes + block.position_bytes) / total_bytes)
            if self.staging.is_commit_due:
                self._commit(at)
        self.bad_rows.check()
        for tally in self.tallies.values():
            tally.close()
        self._check_splits(at.num_rows)
        if at.source < len(self.sources):
            self._commit(replace(at, source=len(self.sources), place=FilePosition(), position_bytes=0))

    def tables(self, folder: Path, statistics: Mapping[str, FeatureStatistics]) -> FeatureTables:
        """Write the vocabularies to `folder`, and return the tables of all features. Those without `statistics` get
        empty ones. Call it after `read`."""
        vocabularies = {name: self._make_vocabulary(name, folder) for name in self._vocabulary_features}
        num_rows = {**self.encoder.fixed_num_rows, **{name: v.num_embeddings for name, v in vocabularies.items()}}
        counted = {c.name: statistics.get(c.name) or FeatureStatistics(num_rows[c.name]) for c in self.layout.sparse}
        hashed = [name for name in self.encoder.hash_rows if num_rows[name] <= MAX_TOUCHED_TABLE_ROWS]
        touched = {} if self.earlier is None else self.earlier.touched
        return FeatureTables(
            num_embeddings=num_rows,
            hash_seeds=self.encoder.hash_seeds,
            vocabularies=vocabularies,
            statistics=counted,
            test_lookups={
                **{name: LookupCounter(None) for name in vocabularies},
                **{name: LookupCounter(counted[name], touched.get(name)) for name in hashed},
            },
        )

    def mean_and_std(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the mean and the deviation of each dense feature [num_dense]. Call it after `read`."""
        moments = self.tallies["train"].moments
        return (moments.mean, moments.std) if self.earlier is None else self.earlier.mean_and_std(self.layout, moments)

    def write_touched(self, folder: Path, statistics: Mapping[str, FeatureStatistics]) -> str | None:
        """Write the rows of hashed features that training looked up, in earlier parts too. Return the name of the
        file."""
        touched = {name: statistics[name].touched_bits() for name in self.encoder.hash_rows}
        return write_touched(folder, touched if self.earlier is None else self.earlier.unite_touched(touched))

    def _make_vocabulary(self, name: str, folder: Path) -> Vocabulary:
        counter, seed = self.counters.get(name), self.encoder.hash_seeds[name]
        if self.earlier is not None:
            return self.earlier.make_vocabulary(name, counter, seed, folder)
        rule = GrowthRule(min_count=self.options.min_count, max_candidates=self.options.max_candidates)
        return grow_vocabulary(name, self.counters[name].partitions(), VocabularyParts.empty(), rule, seed, folder)

    def describe(
        self, tables: FeatureTables, splits: dict[str, Split], touched: str | None, recipe: str | None = None
    ) -> Dataset:
        """Return the description of the dataset. `touched` and `recipe` are its fields of these names."""
        options, layout, splitter = self.options, self.layout, self.encoder.splitter
        raw_format = self.sources[0].format
        dataset = Dataset(
            labels=layout.label_columns,
            label_source=layout.labels[0] if len(layout.labels) == 1 else None,
            weight=layout.weight,
            group=layout.group_column,
            time=layout.time,
            dense=describe_dense(layout, *self.mean_and_std()),
            sparse=describe_sparse(layout, tables),
            splits=splits,
            teacher=find_teacher(self.sources),
            seed=splitter.seed,
            test_fraction=options.split_fraction("test"),
            valid_fraction=options.split_fraction("valid"),
            split_by=splitter.by,
            test_from=splitter.test_from,
            valid_from=splitter.valid_from,
            sources=tuple(
                SourceFile(path=s.path, split=s.split, num_rows=self.rows_per_source[s.path]) for s in self.sources
            ),
            not_finite=dict(+self.non_finite),
            num_unlabelled=self.num_unlabeled,
            bad_rows=self.bad_rows.bad_rows if options.bad_rows == "skip" else None,
            source_form=make_source_form(
                layout, raw_format if self.earlier is None else self.earlier.source_format(raw_format)
            ),
            touched=touched,
            recipe=recipe,
            min_count=options.min_count if tables.vocabularies else None,
        )
        return dataset if self.earlier is None else self.earlier.complete(dataset)

    def _add_block(self, source: int, block: Block, parts: ParsedRows[EncodedBlock]) -> None:
        for encoded in parts.results:
            for name, batch in encoded.splits.items():
                self.tallies[name].add(batch)
                self.rows_per_source[block.source.path] += batch.num_rows
            for name, counted in encoded.value_counts.items():
                self.counters[name].add(counted)
            self.non_finite.update(dict(zip(self.layout.dense, encoded.num_non_finite, strict=False)))
            self.num_unlabeled += encoded.num_unlabeled
        if self.observer is not None:
            self.observer.add(source, block, parts)

    def _check_splits(self, num_rows: int) -> None:
        if not self.tallies["train"].num_rows:
            change = {"fraction": "lower", "after": "give a later", "files": "give fewer"}
            rules = [(split, self.options.split_rule(split)) for split in self.options.splits if split != "train"]
            ways_out = " or ".join(f"{change[rule]} --{split}-{rule}" for split, rule in rules if rule)
            if not ways_out:
                raise MesetaError(
                    f"prepare: none of {num_rows} rows has a label, so there is nothing new to train on; add labels"
                )
            raise MesetaError(f"prepare: none of {num_rows} rows is left for training; {ways_out}")
        if "valid" in self.tallies and not self.tallies["valid"].num_rows:
            change = {"fraction": "raise", "after": "give an earlier", "files": "give other"}
            rule = self.options.split_rule("valid") or "fraction"
            raise MesetaError(
                f"prepare: none of {num_rows} rows is in the valid split; {change[rule]} --valid-{rule}, or omit the "
                "split with --valid-fraction 0"
            )

    def _jobs(self, at: ReadProgress) -> Iterator[Callable[[], tuple[int, Block, ParsedRows[EncodedBlock]]]]:
        """Yield jobs that encode one block each. A job returns (index of its source, block, results)."""
        first_row = at.num_rows
        for index, source in enumerate(self.sources[at.source :], at.source):
            for block in read_blocks(source, self.layout.columns, at.place if index == at.source else None):
                yield lambda index=index, block=block, row=first_row: (index, block, self._encode(block, row))  # type: ignore[misc]
                first_row += block.num_rows

    def _encode(self, block: Block, first_global_row: int) -> ParsedRows[EncodedBlock]:
        rows_before = first_global_row - block.first_row

        def encode(part: Block) -> EncodedBlock:
            return self.encoder.encode(part, rows_before + part.first_row)

        if self.options.bad_rows == "skip":
            return parse_good_rows(block, encode)
        try:
            return ParsedRows([encode(block)], block.num_rows)
        except MesetaError as error:
            if not are_bad_rows_rare(block, encode):
                raise
            raise error.with_suffix(", or leave such rows out with --bad-rows skip") from None

    def _resume(self) -> ReadProgress:
        state = self.staging.state.get("read")
        if state is None:
            return ReadProgress(0, 0, FilePosition(), 0)
        for name, tally in self.tallies.items():
            tally.set_state(state["tallies"][name])
        for name, counter in self.counters.items():
            counter.set_state(state["counters"][name])
        self.rows_per_source.update(zip(self.rows_per_source, state["rows_of_source"], strict=True))
        self.bad_rows.set_state(state["bad_rows"])
        self.non_finite.update(state["not_finite"])
        self.num_unlabeled = state["num_unlabelled"]
        if self.observer is not None:
            self.observer.set_state(state["observer"])
        return ReadProgress(state["source"], state["num_rows"], FilePosition(**state["place"]), state["position_bytes"])

    def _commit(self, at: ReadProgress) -> None:
        state = {
            **asdict(at),
            "tallies": {name: tally.get_state() for name, tally in self.tallies.items()},
            "counters": {name: counter.get_state() for name, counter in self.counters.items()},
            "rows_of_source": list(self.rows_per_source.values()),
            "bad_rows": self.bad_rows.get_state(),
            "not_finite": dict(self.non_finite),
            "num_unlabelled": self.num_unlabeled,
            "observer": None if self.observer is None else self.observer.get_state(),
        }
        self.staging.commit({**self.staging.state, "read": state})
