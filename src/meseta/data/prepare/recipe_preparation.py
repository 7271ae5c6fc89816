"""Implementation of `meseta prepare --recipe-only`. It collects statistics and the positions of rows, but writes no
rows.

Features whose rows are known immediately are counted in the first pass. Features with vocabularies are counted
afterwards, when the vocabularies are complete, from training rows that the recipe itself produces. The test split is
read the same way to count its unseen values, which requires all training rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa

from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.statistics import (
    WINDOW_SAMPLES,
    FeatureStatistics,
    FeatureTables,
    WindowCounter,
)
from meseta.data.prepare.earlier_dataset import layout_from_dataset
from meseta.data.prepare.first_pass import FirstPass, PreparationJob, Progress
from meseta.data.prepare.recipe import Recipe, recipe_sources
from meseta.data.prepare.recipe_index import IndexWriter, SourceIndex
from meseta.data.prepare.recipe_rows import RowMaker, splitter_from_dataset
from meseta.data.prepare.staging import Staging
from meseta.data.prepare.write import ROW_GROUP_ROWS, RowFinalizer, SplitTally, count_window
from meseta.spec import MesetaError


class StatisticsFiles:
    """Files with the states of feature counters. A journal refers to them by name."""

    def __init__(self, folder: Path, stem: str) -> None:
        self._folder, self._stem = folder, stem
        self._paths: list[Path] = []

    def save(self, counters: Mapping[str, WindowCounter], num_windows: int) -> str:
        """Write the counters to a file, and return its name. Files before the previous one are deleted."""
        path = self._folder / f"{self._stem}-{num_windows}.arrow"
        states = [one.get_state() for one in counters.values()]
        numbers = pa.array([numbers for numbers, _ in states], pa.list_(pa.int64()))
        seen = pa.array([seen for _, seen in states], pa.large_binary())
        batch = pa.record_batch({"numbers": numbers, "seen": seen})
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        if path not in self._paths:
            self._paths.append(path)
        # The journal may still refer to the previous file.
        while len(self._paths) > 2:
            self._paths.pop(0).unlink(missing_ok=True)
        return path.name

    def load(self, name: str, counters: Mapping[str, WindowCounter]) -> None:
        """Restore the counters from a file that `save` wrote. They must be of the same features in the same order."""
        self._paths = [self._folder / name]
        with pa.OSFile(str(self._folder / name), "rb") as file:
            batch = pa.ipc.open_stream(file).read_next_batch()
        for one, numbers, seen in zip(counters.values(), batch["numbers"], batch["seen"], strict=True):
            one.set_state(numbers.as_py(), seen.as_py())


class TrainingTally(SplitTally):
    """Tally of the training split that also counts the features whose rows are known."""

    def __init__(
        self,
        path: Path,
        dense: tuple[str, ...],
        labels: tuple[str, ...],
        statistics: Mapping[str, FeatureStatistics],
    ) -> None:
        super().__init__(path, dense, labels)
        self._statistics = statistics
        self._files = StatisticsFiles(path.parent, "statistics")

    def get_state(self) -> dict[str, Any]:
        # The state contains the name of the file with the statistics.
        return {**super().get_state(), "statistics": self._files.save(self._statistics, self.num_windows)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        self._files.load(state["statistics"], self._statistics)

    def _process_window(self, window: pa.RecordBatch) -> None:
        count_window(self._statistics, [window])


class RecipePreparation:
    """One run of `prepare` that makes a recipe."""

    def __init__(
        self,
        job: PreparationJob,
        staging: Staging,
        progress: Progress,
    ) -> None:
        layout, scratch = job.encoder.layout, staging.scratch
        self.options, self.sources, self.encoder = job.options, job.sources, job.encoder
        self.staging, self.progress = staging, progress
        self.known_statistics = {
            name: FeatureStatistics(num_rows) for name, num_rows in self.encoder.fixed_num_rows.items()
        }
        self.training = TrainingTally(
            scratch / "train.arrow", layout.dense, layout.label_columns, self.known_statistics
        )
        self.tallies: dict[str, SplitTally] = {
            name: SplitTally(scratch / f"{name}.arrow", layout.dense, layout.label_columns)
            for name in self.options.splits
        }
        self.tallies["train"] = self.training
        self.index = IndexWriter(scratch, self.options.splits, ROW_GROUP_ROWS)
        self.first_pass = FirstPass(job, staging, progress, self.tallies, self.index)

    def run(self, pool: ThreadPoolExecutor, num_threads: int) -> Dataset:
        """Write everything except dataset.json, and return its content."""
        # The first pass writes no rows. It finds their positions, their splits and the vocabularies.
        folder = self.staging.folder
        self.first_pass.read(pool, num_threads)
        tables = self.first_pass.tables(folder, self.known_statistics)
        blocks, groups = self.index.finish(folder)
        recipe = Recipe(
            sources=recipe_sources(self.sources),
            skips_bad_rows=self.options.bad_rows == "skip",
            group_rows=ROW_GROUP_ROWS,
            splits=self.options.splits,
            blocks=blocks,
            groups=groups,
        )
        digest = recipe.save(folder)
        splits = {name: tally.describe_split(()) for name, tally in self.tallies.items()}
        touched_name = self.first_pass.write_touched(folder, self.known_statistics)
        # Reading rows through the recipe requires a dataset that does not have all statistics yet.
        uncounted = self.first_pass.describe(tables, splits, touched_name, digest)
        dataset = uncounted.model_copy(update={"dir": folder})
        self._check_reproducible(dataset)
        self._count_remaining(dataset, recipe, tables, num_threads)
        return self.first_pass.describe(tables, splits, touched_name, digest)

    def _check_reproducible(self, dataset: Dataset) -> None:
        if (
            layout_from_dataset(dataset) != self.encoder.layout
            or splitter_from_dataset(dataset) != self.encoder.splitter
        ):
            raise MesetaError("prepare: a recipe cannot describe these columns yet; prepare them without --recipe-only")

    def _count_remaining(self, dataset: Dataset, recipe: Recipe, tables: FeatureTables, num_threads: int) -> None:
        counters: dict[str, Mapping[str, WindowCounter]] = {
            "train": {name: tables.statistics[name] for name in tables.vocabularies},
            "test": tables.test_lookups,
        }
        num_rows = {name: tally.num_rows for name, tally in self.tallies.items() if counters.get(name)}
        total_rows, num_before = sum(num_rows.values()), 0
        if not total_rows:
            return
        maker = RowMaker(
            recipe.to_sources(dataset),
            SourceIndex.load(recipe, dataset),
            self.encoder,
            RowFinalizer(self.encoder.layout, *self.first_pass.mean_and_std(), tables.vocabularies),
            skips_bad_rows=recipe.skips_bad_rows,
            num_threads=num_threads,
        )
        for split, of_split in num_rows.items():
            for num_windows in self._count_split(maker, recipe, split, counters[split]):
                so_far = num_before + min(num_windows * WINDOW_SAMPLES, of_split)
                self.progress("count", so_far, so_far / total_rows)
            num_before += of_split

    def _count_split(
        self, maker: RowMaker, recipe: Recipe, split: str, counters: Mapping[str, WindowCounter]
    ) -> Iterator[int]:
        files = StatisticsFiles(self.staging.scratch, f"counted-{split}")
        done = self.staging.state.get("count", {}).get(split, {"num_windows": 0})
        # Continue after the windows that an interrupted run has counted.
        if done["num_windows"]:
            files.load(done["file"], counters)
        first = done["num_windows"]
        for number, window in enumerate(_make_windows(maker, recipe, split, first), first + 1):
            count_window(counters, window)
            yield number
            if self.staging.is_commit_due:
                so_far = {"num_windows": number, "file": files.save(counters, number)}
                of_splits = {**self.staging.state.get("count", {}), split: so_far}
                self.staging.commit({**self.staging.state, "count": of_splits})


def _make_windows(maker: RowMaker, recipe: Recipe, split: str, first: int) -> Iterator[list[pa.RecordBatch]]:
    # A window has `WINDOW_SAMPLES` rows. The last one of a split may have fewer.
    of_window = WINDOW_SAMPLES // recipe.group_rows
    groups = range(first * of_window, len(maker.group_rows(split)))
    batches: list[pa.RecordBatch] = []
    for group, table in zip(groups, maker.make_groups(split, groups), strict=True):
        batches += table.to_batches()
        if (group + 1) % of_window == 0:
            yield batches
            batches = []
    if batches:
        yield batches
