"""Two-pass preparation: blocks are encoded and spooled, then written as Parquet. Both passes resume when killed."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from meseta.data.dataset.dataset import DataFile, Dataset, Split
from meseta.data.dataset.features import FeatureTables
from meseta.data.dataset.statistics import WindowCounter
from meseta.data.dataset.touched_rows import write_touched
from meseta.data.formats.format import Source
from meseta.data.prepare.encode import Encoder
from meseta.data.prepare.first_pass import FirstPass, Progress
from meseta.data.prepare.options import PrepareOptions
from meseta.data.prepare.spool import Spool
from meseta.data.prepare.staging import Staging
from meseta.data.prepare.write import RowFinalizer, SplitWriter


class TwoPassPreparation:
    """State of one call of `prepare` across its two passes."""

    def __init__(
        self,
        options: PrepareOptions,
        sources: tuple[Source, ...],
        encoder: Encoder,
        staging: Staging,
        progress: Progress,
    ) -> None:
        self.layout = encoder.layout
        self.hash_rows = encoder.hash_rows
        self.staging = staging
        self.progress = progress
        self.spools = {
            name: Spool(staging.scratch / f"{name}.arrow", self.layout.dense, self.layout.label_columns)
            for name in options.splits
        }
        self.first_pass = FirstPass(options, sources, encoder, staging, progress, self.spools)

    def run(self, pool: ThreadPoolExecutor, num_threads: int) -> Dataset:
        self.first_pass.read(pool, num_threads)
        tables = self.first_pass.tables(self.staging.folder, {})
        splits = self._write(pool, tables)
        touched = {name: tables.statistics[name].touched_bits() for name in self.hash_rows}
        return self.first_pass.describe(tables, splits, write_touched(self.staging.folder, touched))

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
        moments = self.spools["train"].moments
        finisher = RowFinalizer(self.layout, moments.mean, moments.std, tables.vocabularies)
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
