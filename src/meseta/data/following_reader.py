"""Reader of a growing folder. It reads the datasets in the folder, including those added later, as one stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from meseta.data.batch import Batch
from meseta.data.dataset.dataset import DATASET_FILE, Dataset
from meseta.data.read.options import ReaderOptions
from meseta.data.read.reader import Reader
from meseta.spec import MesetaError

FOLLOW_FORMAT = "meseta.follow/1"

Value = TypeVar("Value")


def _identity(value: Value) -> Value:
    return value


class FollowingReader:
    """Reader that traverses the datasets ("parts") of a folder once, in the order of their names.

        reader = FollowingReader("data/days", ReaderOptions(batch_size=2048))   # data/days/2026-01-01, ...
        for batch in reader.batches(idle_timeout_s=3600):    # ends when no part came for an hour
            ...
            state = reader.get_state()               # JSON-able; on a new reader: reader.set_state(state)

    Parts that appear while the reader runs are read too. Each is a folder written by `meseta prepare --out
    FOLDER/NAME`, which appears only when it is complete. All parts must have the same features and hash ids with the
    same seed. Dense columns are standardized with the means and standard deviations of the first part.

    A batch has rows of only one part. It depends on the files of its part and the options, and not on the number of
    ranks.
    """

    def __init__(
        self,
        folder: str | Path,
        options: ReaderOptions,
        *,
        split: str = "train",
        rank: int = 0,
        num_ranks: int = 1,
        broadcast: Callable[[Any], Any] = _identity,
        poll_interval_s: float = 1.0,
    ) -> None:
        """Open a folder. Raises MesetaError if `folder` is not a directory.

        Args:
            folder: Folder that contains the parts.
            options: Options that apply to each part separately.
            split: Split to read.
            rank: Index of this rank.
            num_ranks: Number of ranks.
            broadcast: Function that returns on each rank the value that rank 0 passes to it, such as `lambda value:
                world.all_gather_object(value)[0]`. It makes all ranks see a new part at the same time, and is called
                between parts by the thread that requests batches.
            poll_interval_s: Seconds between checks for new parts.
        """
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise MesetaError(f"follow: {str(folder)!r} is not a directory; make it, and prepare datasets inside it")
        self.options = options
        self._split = split
        self._rank, self._num_ranks = rank, num_ranks
        self._broadcast = broadcast
        self._poll_interval_s = poll_interval_s
        self._finished_parts: list[str] = []
        self._part: str | None = None
        self._reader: Reader | None = None
        self._first_schema: dict[str, Any] | None = None

    def batches(self, idle_timeout_s: float | None = 0.0) -> Iterator[Batch]:
        """Yield batches from the current position on.

        Ends if no new part has appeared for `idle_timeout_s` seconds. `None` means never. The next call continues at
        the position where this one ended or was stopped.

        Raises MesetaError if a part does not match the first one, or if the name of a new part precedes one that was
        already read.
        """
        since_s = time.monotonic()
        while True:
            if self._reader is None and not self._open_next():
                is_over = idle_timeout_s is not None and time.monotonic() - since_s >= idle_timeout_s
                if self._broadcast(is_over):
                    return
                time.sleep(self._poll_interval_s)
                continue
            assert self._reader is not None and self._part is not None
            if self._reader.epoch_index == 0:
                with closing(self._reader.epoch()) as batches:
                    for batch in batches:
                        yield self._rescale(batch, self._reader.dataset)
            self._finished_parts.append(self._part)
            self._part = self._reader = None
            since_s = time.monotonic()

    def get_state(self) -> dict[str, Any]:
        """Return the position after the last yielded batch as JSON-compatible data. It is the same on all ranks."""
        return {
            "format": FOLLOW_FORMAT,
            "done": list(self._finished_parts),
            "part": self._part,
            "reader": None if self._reader is None else self._reader.get_state(),
            "first": self._first_schema,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue at the exact row where `get_state` was called. Parts that were read completely may be missing.

        Raises MesetaError if `state` does not come from `get_state`, or if the current part is missing or has changed.
        """
        if state.get("format") != FOLLOW_FORMAT:
            raise MesetaError(f"follow: state of format {state.get('format')!r}; pass the result of get_state")
        self._finished_parts, self._first_schema = list(state["done"]), state["first"]
        self._part, self._reader = None, None
        if state["part"] is not None:
            self._open(state["part"])
            assert self._reader is not None
            self._reader.set_state(state["reader"])

    def _open_next(self) -> bool:
        """Open the first unread part. Returns False if there is none."""
        names = [path.parent.name for path in self.folder.glob(f"*/{DATASET_FILE}") if path.parent.suffix != ".tmp"]
        waiting = self._broadcast(sorted(set(names) - set(self._finished_parts)))
        if not waiting:
            return False
        last = max(self._finished_parts, default="")
        if waiting[0] < last:
            raise MesetaError(
                f"follow: part {waiting[0]!r} of {str(self.folder)!r} appeared after {last!r} was read; parts are "
                "read in the order of their names, so choose a later name"
            )
        self._open(waiting[0])
        return True

    def _open(self, name: str) -> None:
        dataset = Dataset.load(self.folder / name)
        kind = _part_schema(dataset)
        if any(feature.encoding == "vocabulary" for feature in dataset.sparse):
            raise MesetaError(
                f"follow: part {name!r} of {str(self.folder)!r} has its own vocabulary, whose rows differ from those "
                "of other parts; prepare all parts with --hash-rows"
            )
        self._first_schema = self._first_schema or kind
        for key in kind:
            # Former versions did not store whole numbers in the state.
            first_value, part_value = self._first_schema.get(key, []), kind[key]
            if key == "dense":
                first_value, part_value = ([column[0] for column in columns] for columns in (first_value, part_value))
            if first_value != part_value:
                raise MesetaError(
                    f"follow: part {name!r} of {str(self.folder)!r} differs from the first one in {key}: {part_value} "
                    f"instead of {first_value}; prepare all parts with the same options and --seed"
                )
        self._reader = Reader(dataset, self._split, self.options, rank=self._rank, num_ranks=self._num_ranks)
        self._part = name

    def _rescale(self, batch: Batch, dataset: Dataset) -> Batch:
        """Standardize dense columns with the means and standard deviations of the first part."""
        assert self._first_schema is not None
        current = [[feature.mean, feature.std] for feature in dataset.dense]
        first = [column[1:] for column in self._first_schema["dense"]]
        if current == first:
            return batch
        (mean, std), (first_mean, first_std) = (torch.tensor(m, dtype=torch.float64).T for m in (current, first))
        dense = ((batch.dense.double() * std + mean - first_mean) / first_std).float()
        num_real = batch.batch_size - batch.num_padding
        dense[num_real:] = 0.0
        return replace(batch, dense=dense)


def _part_schema(dataset: Dataset) -> dict[str, Any]:
    """Return the properties that parts must have in common, and the means and deviations of dense columns.

    The result equals itself after a conversion to JSON and back.
    """
    return {
        "labels": list(dataset.labels),
        "weight": dataset.weight,
        "group": dataset.group,
        "dense": [[feature.name, feature.mean, feature.std] for feature in dataset.dense],
        "sparse": [
            [f.name, f.num_embeddings, f.hash_seed, f.multi_valued, f.weighted, list(f.boundaries or ())]
            for f in dataset.sparse
        ],
        "whole_numbers": sorted(dataset.source_form.whole_numbers) if dataset.source_form else [],
    }
