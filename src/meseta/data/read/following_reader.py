"""Reader of a folder to which prepared datasets are added over time. It reads them as one stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from meseta.data.dataset.dataset import DATASET_FILE, Dataset
from meseta.data.dataset.encoding import with_vocabulary_digests
from meseta.data.read.batch import Batch
from meseta.data.read.options import ReaderOptions
from meseta.data.read.reader import Reader
from meseta.spec import MesetaError

FOLLOW_FORMAT = "meseta.follow/1"

Value = TypeVar("Value")


def _identity(value: Value) -> Value:
    return value


class FollowingReader:
    """Reader of the datasets ("parts") of a folder in order of their names, including parts that are added later.

        reader = FollowingReader("data/days", ReaderOptions(batch_size=2048))   # data/days/2026-01-01, ...
        for batch in reader.batches(idle_timeout_s=3600):    # ends after an hour without a new part
            ...
            state = reader.get_state()               # JSON-able; on a new reader: reader.set_state(state)

    A part is a folder made by `meseta prepare --out FOLDER/NAME`, which appears as a whole. All parts must have the
    same features, hash seeds and vocabularies. Dense columns of later parts are rescaled to the means and deviations of
    the first part.

    Each part is read once. A batch has rows of one part only, so it depends on the files of that part and on the
    options, not on the number of ranks.
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
        """Create a reader of the parts in `folder`.

        `broadcast` returns rank 0's argument on all ranks, such as `lambda x: world.all_gather_object(x)[0]`, because
        ranks must notice a part at the same time. The thread that requests batches calls it between parts.

        Raises MesetaError if `folder` is not a directory.
        """
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise MesetaError(f"follow: {str(folder)!r} is not a directory; create it, and prepare datasets inside it")
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
        """Yield batches from the current position on. The next call continues after the last batch.

        The iterator ends when no part was added for `idle_timeout_s` seconds. `None` means never. Raises MesetaError if
        a part does not match the first one, or if its name sorts before that of a part which was read already.
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
        """Return the position after the last batch as plain data for JSON. It is the same on all ranks."""
        return {
            "format": FOLLOW_FORMAT,
            "done": list(self._finished_parts),
            "part": self._part,
            "reader": None if self._reader is None else self._reader.get_state(),
            "first": self._first_schema,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `get_state`. Parts that were read completely may be deleted.

        Raises MesetaError if the state is invalid, or if the current part is missing or has changed.
        """
        if state.get("format") != FOLLOW_FORMAT:
            raise MesetaError(
                f"follow: cannot restore a state of format {state.get('format')!r}; use the result of get_state"
            )
        # Reading continues at the same row. Parts that were read completely are not opened again and may be deleted.
        self._finished_parts, self._first_schema = list(state["done"]), state["first"]
        self._part, self._reader = None, None
        if state["part"] is not None:
            self._open(state["part"])
            assert self._reader is not None
            self._reader.set_state(state["reader"])

    def _open_next(self) -> bool:
        names = [path.parent.name for path in self.folder.glob(f"*/{DATASET_FILE}") if path.parent.suffix != ".tmp"]
        waiting = self._broadcast(sorted(set(names) - set(self._finished_parts)))
        if not waiting:
            return False
        last = max(self._finished_parts, default="")
        if waiting[0] < last:
            raise MesetaError(
                f"follow: part {waiting[0]!r} of {str(self.folder)!r} was added after {last!r} was read, but parts are "
                "read in order of their names; use a later name"
            )
        self._open(waiting[0])
        return True

    def _open(self, name: str) -> None:
        dataset = with_vocabulary_digests(Dataset.load(self.folder / name))
        kind = _part_schema(dataset)
        self._first_schema = self._first_schema or kind
        self._check_vocabularies(name, kind)
        for key in kind:
            # States of earlier versions lack whole_numbers and vocabularies.
            expected, actual = self._first_schema.get(key, []), kind[key]
            if key == "dense":
                expected, actual = ([column[0] for column in columns] for columns in (expected, actual))
            if expected != actual:
                raise MesetaError(
                    f"follow: part {name!r} of {str(self.folder)!r} differs from the first part in {key}: {actual} "
                    f"instead of {expected}; prepare all parts with the same options and --seed"
                )
        self._reader = Reader(dataset, self._split, self.options, rank=self._rank, num_ranks=self._num_ranks)
        self._part = name

    def _check_vocabularies(self, name: str, kind: Mapping[str, Any]) -> None:
        assert self._first_schema is not None
        first, now = (dict(schema.get("vocabularies", ())) for schema in (self._first_schema, kind))
        for feature in (feature for feature in now if feature in first and first[feature] != now[feature]):
            raise MesetaError(
                f"follow: part {name!r} of {str(self.folder)!r} has another vocabulary of {feature!r} than the first "
                "part, so its rows do not match; prepare it with --like FIRST_PART --as train, or train a run on it "
                "with `meseta train --start-from`, which finds rows by value"
            )

    def _rescale(self, batch: Batch, dataset: Dataset) -> Batch:
        assert self._first_schema is not None
        moments = [[feature.mean, feature.std] for feature in dataset.dense]
        first = [column[1:] for column in self._first_schema["dense"]]
        if moments == first:
            return batch
        (mean, std), (first_mean, first_std) = (torch.tensor(m, dtype=torch.float64).T for m in (moments, first))
        dense = ((batch.dense.double() * std + mean - first_mean) / first_std).float()
        num_real = batch.batch_size - batch.num_padding
        # Padding samples are all zeros.
        dense[num_real:] = 0.0
        return replace(batch, dense=dense)


def _part_schema(dataset: Dataset) -> dict[str, Any]:
    """Return the JSON data that all parts must share, with the means and deviations of dense columns."""
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
        "vocabularies": [[f.name, f.vocabulary_digest] for f in dataset.sparse if f.encoding == "vocabulary"],
    }
