"""Reader that decodes a prepared dataset in its own process."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from meseta.data.dataset.dataset import Dataset
from meseta.data.read.batch_reader import BatchReader, WaitTracker, check_rank
from meseta.data.read.options import ReaderOptions
from meseta.data.read.order import epoch_order
from meseta.data.read.selection import RowSelection
from meseta.data.read.slicing import EpochRows
from meseta.data.read.split import open_split_rows


class Reader(BatchReader):
    """Reader of the batches of one split for one rank. It decodes every window, but gathers only the rows of its rank.

    reader = Reader("data/criteo", "train", ReaderOptions(batch_size=2048, shuffle=True), rank=0, num_ranks=2)
    """

    def __init__(
        self, dataset: Dataset | str | Path, split: str, options: ReaderOptions, *, rank: int = 0, num_ranks: int = 1
    ) -> None:
        """Open the footers of all files. If a filter or negative_keep is set, also read their columns to count rows.

        With a recipe, counting makes all rows once. Raises MesetaError if the rank is invalid, the filter does not
        match the data, or a file is missing, damaged or differs from dataset.json.
        """
        check_rank(rank, num_ranks)
        dataset = dataset if isinstance(dataset, Dataset) else Dataset.load(dataset)
        selection = RowSelection(
            dataset, condition=options.filter, negative_keep=options.negative_keep, seed=options.seed
        )
        self._files = open_split_rows(dataset, split, selection, shuffle=options.shuffle)
        super().__init__(
            dataset,
            split,
            options,
            rank=rank,
            num_ranks=num_ranks,
            num_rows=sum(self._files.group_rows),
            excluded_rows=self._files.excluded_rows,
        )

    def _rows(self, epoch: int, row: int, waits: WaitTracker, num_epochs: int) -> EpochRows:
        order = epoch_order(self._files.group_rows, self.options, epoch)
        read = partial(self._files.read, by_row=self.options.shuffle)
        return EpochRows(order, read, prefetch=self.options.prefetch_batches > 0)
