"""A folder that grows: prepared datasets appear in it, one beside the other, and are read as one stream."""

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


def _identity(found: Value) -> Value:
    return found


class FollowingReader:
    """One pass over the datasets ("parts") of a folder in the order of their names, also those that come meanwhile.

        reader = FollowingReader("data/days", ReaderOptions(batch_size=2048))   # data/days/2026-01-01, ...
        for batch in reader.batches(idle_timeout_s=3600):    # ends when no part came for an hour
            ...
            state = reader.get_state()               # JSON-able; on a new reader: reader.set_state(state)

    A part is a folder that `meseta prepare --out FOLDER/NAME` made, which appears whole. Parts must have the same
    features, and hash their ids with the same seed. Their dense columns, each standardised by its own means, are
    brought to those of the first part. No batch has rows of two parts: the options hold for each part by itself, so its
    batches are a function of its files and the options, however many ranks there are.
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
        """`broadcast` gives every rank what rank 0 passes to it, such as
        `lambda found: world.all_gather_object(found)[0]`: ranks must see a part at the same moment. It is called
        between parts, by the thread that asks for batches. `poll_interval_s`: seconds between looks at the folder.
        Raises MesetaError where `folder` is no directory.
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
        """Batches from the present position on. Ends when no part has come for `idle_timeout_s` seconds, None: never;
        the next call goes on where this one ended or was left.

        Raises MesetaError for a part that does not fit the first one, and for one that came too late: its name stands
        before one that was begun.
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
        """The position after the last batch handed over, as plain data for JSON; the same on every rank."""
        return {
            "format": FOLLOW_FORMAT,
            "done": list(self._finished_parts),
            "part": self._part,
            "reader": None if self._reader is None else self._reader.get_state(),
            "first": self._first_schema,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `get_state` was called, to the row; parts that were read to the end may be gone.

        Raises MesetaError for what `get_state` did not return, and where the part at hand is missing or has changed.
        """
        if state.get("format") != FOLLOW_FORMAT:
            raise MesetaError(f"follow: state of format {state.get('format')!r}; pass what get_state returned")
        self._finished_parts, self._first_schema = list(state["done"]), state["first"]
        self._part, self._reader = None, None
        if state["part"] is not None:
            self._open(state["part"])
            assert self._reader is not None
            self._reader.set_state(state["reader"])

    def _open_next(self) -> bool:
        """Open the first part that was not read; False where there is none."""
        names = [path.parent.name for path in self.folder.glob(f"*/{DATASET_FILE}") if path.parent.suffix != ".tmp"]
        waiting = self._broadcast(sorted(set(names) - set(self._finished_parts)))
        if not waiting:
            return False
        last = max(self._finished_parts, default="")
        if waiting[0] < last:
            raise MesetaError(
                f"follow: part {waiting[0]!r} of {str(self.folder)!r} came after {last!r} was read; parts are read in "
                "the order of their names, so give it a later one"
            )
        self._open(waiting[0])
        return True

    def _open(self, name: str) -> None:
        dataset = Dataset.load(self.folder / name)
        kind = _part_schema(dataset)
        if any(feature.encoding == "vocabulary" for feature in dataset.sparse):
            raise MesetaError(
                f"follow: part {name!r} of {str(self.folder)!r} has a vocabulary of its own, whose rows are no other "
                "part's; prepare all parts with --hash-rows"
            )
        self._first_schema = self._first_schema or kind
        for key in kind:
            mine, theirs = self._first_schema.get(key, []), kind[key]  # former versions kept no whole numbers
            if key == "dense":
                mine, theirs = ([column[0] for column in columns] for columns in (mine, theirs))
            if mine != theirs:
                raise MesetaError(
                    f"follow: part {name!r} of {str(self.folder)!r} differs from the first one in {key}: {theirs} "
                    f"instead of {mine}; prepare all parts with the same options and --seed"
                )
        self._reader = Reader(dataset, self._split, self.options, rank=self._rank, num_ranks=self._num_ranks)
        self._part = name

    def _rescale(self, batch: Batch, dataset: Dataset) -> Batch:
        """Dense columns as they would be with the means and standard deviations of the first part."""
        assert self._first_schema is not None
        own = [[feature.mean, feature.std] for feature in dataset.dense]
        first = [column[1:] for column in self._first_schema["dense"]]
        if own == first:
            return batch
        (mean, std), (first_mean, first_std) = (torch.tensor(m, dtype=torch.float64).T for m in (own, first))
        dense = ((batch.dense.double() * std + mean - first_mean) / first_std).float()
        num_real = batch.batch_size - batch.num_padding
        dense[num_real:] = 0.0
        return replace(batch, dense=dense)


def _part_schema(dataset: Dataset) -> dict[str, Any]:
    """What parts must have in common, as JSON gives it back, and the means and deviations of the dense columns."""
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
